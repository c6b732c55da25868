"""`jkv probe`: by how much policies make the tokens of given texts less likely, compared pair by pair on the same texts.

The engine decodes each text as it stands (`forced_tokens`) under every policy and budget, so the kept sets are the same as in
real decoding. A text counts as one observation: the mean loss of its scored tokens. An oracle that knows what will be read
(`jkv.evaluation.oracles`) shows what a budget allows.

Runs are written one by one as they end, and an interrupted comparison goes on with those that are there. A file of another
model's is refused; of other texts or options, texts are read again.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jkv.checks import check_list, did_you_mean, need_tokenizer, shown, typed
from jkv.engine.options import EngineOptions
from jkv.engine.results import complete
from jkv.errors import InputError, refused
from jkv.evaluation.budgets import parse_mean_budget
from jkv.evaluation.contrasts import p_cell
from jkv.evaluation.generations import NEW_FOLDER
from jkv.evaluation.oracles import ORACLE, oracles_of, settings_of_oracle
from jkv.evaluation.probe_texts import KINDS, Probe
from jkv.evaluation.variants import build, by_name, kv_dtype_of, seeds_of, takes_budget
from jkv.eviction import Policy
from jkv.generate import generate
from jkv.limits import check_numbers
from jkv.model.params import Model
from jkv.policies import Recipe
from jkv.reports import append_text, json_lines, markdown, read_json_lines, write_text
from jkv.resuming import check_same, digest_of, plain
from jkv.statistics import holm, sign_flip_p, with_interval

COLUMNS = "policy", "slots", "KV kB", "pages read"


@dataclasses.dataclass(frozen=True)
class Reading:
    """One policy on all texts of one set.

    Attributes:
      texts: the name of the set.
      policy: its name; "oracle" for the best that the budget allows.
      settings: the policy's definition; of the oracle, its settings.
      budget: slots of each layer and KV head; None where the policy has none.
      seed: of its draws; None where it draws nothing or runs once.
      groups: the group of each text.
      log_prob: nats, the mean over the scored tokens of each text.
      kv_bytes: that a row holds, a mean over decode chunks.
      pages_read: the share of the full cache's pages that a decode step reads, a mean over steps.
      made_of: JSON of what it is of: digests of the model and of the texts' tokens, the texts' options and the engine's.
    """

    texts: str
    policy: str
    settings: str
    budget: int | None
    seed: int | None
    groups: list[str]
    log_prob: list[float]
    kv_bytes: float
    pages_read: float
    made_of: str

    @property
    def tidy(self) -> list[dict[str, Any]]:
        """A record for each text (`jkv.tidy`); a policy's loss is the full cache's `log_prob` of the same text less its own."""
        names = ("texts", "policy", "settings", "budget", "seed", "kv_bytes", "pages_read")
        own = {name: getattr(self, name) for name in names}
        pairs = enumerate(zip(self.groups, self.log_prob, strict=True))
        return [own | {"text": i, "group": group, "log_prob": value} for i, (group, value) in pairs]

    @property
    def key(self) -> tuple[Any, ...]:
        """What a reading is of."""
        return self.texts, self.policy, self.settings, self.budget, self.seed, self.made_of


@dataclasses.dataclass(frozen=True)
class TextSet:
    """Texts of one kind with their budgets: `options` go to the function of `KINDS`."""

    name: str
    kind: str
    budgets: list[str | int]
    options: dict[str, Any]

    def probes(self, tokenizer: Any) -> list[Probe]:
        """The texts."""
        return KINDS[self.kind](tokenizer, **self.options)


def text_sets(tables: dict[str, Any]) -> list[TextSet]:
    """The sets of texts of a config file: a table each, with `budgets`, the `kind` (its name, if none is given) and options.

    Raises:
      ValueError: no set, an unknown kind, no budgets, or options that the kind does not have.
    """
    if not tables or not all(isinstance(table, dict) for table in tables.values()):
        rule = f"A probe needs texts, one table each, such as [texts.stream] with budgets = [128]; got {tables!r}."
        raise refused(rule, texts="invalid")
    sets = []
    for name, table in tables.items():
        options = dict(table)
        kind, budgets = options.pop("kind", name), options.pop("budgets", [])
        if kind not in KINDS:
            rule = f"[texts.{name}] must be of a kind of {', '.join(KINDS)}; got {kind!r}. Set kind, or name it so."
            raise refused(rule, texts="unknown_name")
        if not isinstance(budgets, list) or not budgets:
            raise refused(f'[texts.{name}] needs budgets, such as ["12.5%", 256]; got {budgets!r}.', texts="missing")
        for budget in budgets:
            parse_mean_budget(budget)
        check_options(f"[texts.{name}]", kind, options)
        sets.append(TextSet(name, kind, budgets, options))
    return sets


def check_options(where: str, kind: str, options: dict[str, Any]) -> None:
    """Refuses options that texts of a kind do not have, or of another type, and missing ones."""
    fields = dict(inspect.signature(KINDS[kind]).parameters)
    del fields["tokenizer"]
    for name, value in options.items():
        if name not in fields:
            known = ", ".join(("kind", "budgets", *fields))
            raise refused(f"{where} may set {known}; got {shown(name)}.{did_you_mean(name, fields)}", **{name: "unknown_name"})
        is_one, least = fields[name].annotation is int, int(name not in ("first", "passes", "seed", "times"))
        numbers = [value] if is_one else value
        if not isinstance(numbers, list) or not numbers:
            raise refused(f"{where} {name} must be a list of whole numbers; got {shown(value)}.", **{name: "wrong_type"})
        check_numbers({name: numbers})
        if any(typed(f"{where} {name}", number, int) < least for number in numbers):
            raise refused(f"{where} {name} must be at least {least}; got {shown(value)}.", **{name: "out_of_range"})
    if missing := [name for name, field in fields.items() if field.default is field.empty and name not in options]:
        rule = f"{where} needs {missing[0]}, such as {missing[0]} = 16; got {', '.join(options) or 'no options'}."
        raise refused(rule, **{missing[0]: "missing"})


def probe(
    model: Model,
    sets: Sequence[TextSet],
    policies: Sequence[Recipe],
    settings: dict[str, dict[str, Any]] | None = None,
    *,
    seeds: int = 1,
    path: Path | None = None,
    report: Callable[[Reading], None] = lambda reading: None,
    **options: Any,
) -> list[Reading]:
    """Every policy on every text, the full cache first, and the oracle where `policies` name it.

    Args:
      model: with a tokenizer.
      sets: the texts that are read.
      policies: names, variants that `settings` define, or policies themselves (`jkv.evaluation.compare`).
      settings: of policies, by name; a variant may have a `kv_dtype` of its own.
      seeds: of policies that draw at random.
      path: a JSON-lines file that receives each reading, and from which those that it holds are taken.
      report: receives each reading.
      options: of the engine (`jkv.EngineOptions`).

    Raises:
      ValueError: a model without a tokenizer, texts longer than its positions, what a policy refuses, or a file of readings of
        another model.
    """
    need_tokenizer(model.tokenizer, "Probes are made of text")
    names, settings = by_name(policies, settings)
    known = {one.key: one for one in read_known(path)}
    for texts in check_list("sets", sets):
        if not isinstance(texts, TextSet):
            rule = "{field} must be of jkv.evaluation.probe.text_sets, such as text_sets({{'stream': {example}}}); got {got}."
            example = "{'budgets': [128], 'count': 4, 'length': 512}"
            raise InputError(rule, field="sets", code="wrong_type", example=example, got=shown(texts))
    wanted = [(texts, texts.probes(model.tokenizer)) for texts in sets]
    for texts, probes in wanted:
        check_lengths(model, texts.name, probes)
        for name, slots, seed in runs_of(texts, names, probes, settings, seeds):
            EngineOptions(kv_dtype=kv_dtype_of(name, settings, options))  # which refuses before anything runs, as `build` does
            if name != ORACLE:
                build(name, slots, settings, seed)
    check_model(path, known.values(), model)
    if path is not None:
        write_text(path, json_lines(dataclasses.asdict(one) for one in known.values()))  # without a line that was cut off
    readings = []
    for texts, probes in wanted:
        oracles = oracles_of(model, [(one.prompt, one.rest) for one in probes], settings)
        tokens = digest_of(probes)  # the manual differs between versions of Python
        for name, slots, seed in runs_of(texts, ["full", *names], probes, settings, seeds):
            policy = None if name == ORACLE else build(name, slots, settings, seed)
            own = options if (kv_dtype := kv_dtype_of(name, settings, options)) is None else options | {"kv_dtype": kv_dtype}
            made_of = json.dumps({**model.digests, "data": tokens, "kind": texts.kind, "options": plain([texts.options, own])})
            definition = policy.definition if policy else repr(settings_of_oracle(settings))
            empty = Reading(texts.name, name, definition, slots, seed, [one.group for one in probes], [], 0.0, 0.0, made_of)
            reading = known.get(empty.key)
            if reading is None:
                found = decode(model, probes, policy or [oracles(i, slots or 0) for i in range(len(probes))], own)
                reading = dataclasses.replace(empty, log_prob=found[0], kv_bytes=found[1], pages_read=found[2])
                if path is not None:
                    append_text(path, json_lines([dataclasses.asdict(reading)]))
            readings.append(reading)
            report(reading)
    return readings


def check_model(path: Path | None, known: Iterable[Reading], model: Model) -> None:
    """Refuses readings of another model; of other texts or options, a reading stays in the file and answers no question.

    Raises:
      ValueError: what differs, or what readings of an older version lack.
    """
    for one in known:
        found = json.loads(one.made_of)
        before = found if isinstance(found, dict) else {}  # a list of older versions, with a digest of a part of the weights
        what = f"{path} holds readings of another model: {one.policy} on {one.texts}"
        check_same(what, {name: before[name] for name in model.digests if name in before}, model.digests, NEW_FOLDER)


def read_known(path: Path | None) -> list[Reading]:
    """The readings of a file; none where there is no file.

    Raises:
      ValueError: a line that is no reading, other than a last one that was cut off.
    """
    if path is None or not path.exists():
        return []
    fields = [field.name for field in dataclasses.fields(Reading)]
    records = read_json_lines(path, fields, what="a reading of `jkv probe`", fix="Remove the file.", drops_cut_line=True)
    return [Reading(**{name: record[name] for name in fields}) for record in records]


def check_lengths(model: Model, name: str, probes: Sequence[Probe]) -> None:
    """Refuses a set of texts that the model has no positions for."""
    longest, most = max(len(one.prompt) + len(one.rest) for one in probes), model.config.max_positions
    if longest > most:
        rule = f"Texts of {name} must fit the model's {most} positions; one has {longest}. Make them shorter."
        raise refused(rule, texts="does_not_fit")


def runs_of(
    texts: TextSet, policies: Sequence[str], probes: Sequence[Probe], settings: dict[str, dict[str, Any]], seeds: int
) -> list[tuple[str, int | None, int | None]]:
    """Each policy's name, slots and seed; shares are of the texts' mean length."""
    lengths = [len(one.prompt) + len(one.rest) for one in probes]
    slots = [parse_mean_budget(budget).slots_for(lengths)[0] for budget in texts.budgets]
    runs: list[tuple[str, int | None, int | None]] = []
    for name in policies:
        if name == ORACLE:
            runs += [(name, count, None) for count in slots]
            continue
        sizes = slots if takes_budget(name, settings) else [None]
        runs += [(name, count, seed) for count in sizes for seed in seeds_of(name, settings, seeds)]
    return runs


def decode(
    model: Model, probes: Sequence[Probe], policy: Policy | Sequence[Policy], options: dict[str, Any]
) -> tuple[list[float], float, float]:
    """The mean log-probability of each text's scored tokens, the bytes that a row held, and the share of its pages that a step
    read, under a policy, or one for each text.
    """
    prompts, forced = [one.prompt for one in probes], [one.rest for one in probes]
    out = complete(generate(model, prompts, policy, forced_tokens=forced, progress=False, **options))
    rows = np.asarray(out.logprobs, np.float64)
    log_prob = [float(row[one.scored].mean()) for row, one in zip(rows, probes, strict=True)]
    return log_prob, out.stats.kv_bytes_per_sample, 1 - out.stats.amsr


@dataclasses.dataclass(frozen=True)
class Row:
    """A policy at a budget on one set of texts: the mean over seeds of its loss on each text, nats a scored token."""

    policy: str
    budget: int | None
    loss: np.ndarray  # [texts]
    kv_bytes: float
    pages_read: float


def rows_of(readings: Sequence[Reading], texts: str) -> list[Row]:
    """The rows of one set of texts, the full cache first, then by budget and loss."""
    of_set = [one for one in readings if one.texts == texts]
    full = np.array(next(one.log_prob for one in of_set if one.policy == "full"))
    rows = []
    for policy, budget in dict.fromkeys((one.policy, one.budget) for one in of_set):
        same = [one for one in of_set if (one.policy, one.budget) == (policy, budget)]
        loss = np.mean([full - np.array(one.log_prob) for one in same], axis=0)
        sizes = (float(np.mean([getattr(one, name) for one in same])) for name in ("kv_bytes", "pages_read"))
        rows.append(Row(policy, budget, loss, *sizes))
    return sorted(rows, key=lambda row: (row.policy != "full", row.budget or 0, row.loss.mean()))


def groups_of(readings: Sequence[Reading], texts: str) -> dict[str, np.ndarray]:
    """Which texts belong to each group of a set."""
    groups = np.array(next(one.groups for one in readings if one.texts == texts))
    return {name: groups == name for name in dict.fromkeys(groups.tolist())}


def table(readings: Sequence[Reading], texts: str) -> str:
    """One line for each policy and budget, with its loss in each group and 95 % intervals over texts.

    Of the full cache it has the nats themselves.
    """
    groups = groups_of(readings, texts)
    full = np.array(next(one.log_prob for one in readings if one.texts == texts and one.policy == "full"))
    lines = []
    for row in rows_of(readings, texts):
        cells = [
            f"{-full[of].mean():.3f} nats" if row.policy == "full" else with_interval(row.loss[of]) for of in groups.values()
        ]
        budget = "" if row.budget is None else row.budget
        lines.append((row.policy, budget, f"{row.kv_bytes / 1e3:,.0f}", f"{row.pages_read:.1%}", *cells))
    names = [f"loss, {name}" if name else "loss" for name in groups]
    return markdown((*COLUMNS, *names), lines)


def contrasts_table(readings: Sequence[Reading], pairs: Sequence[Sequence[str]]) -> str:
    """The difference of losses of each pair, in each set, group and budget that both have; below 0, the first loses less.

    One whose settings have its budget is compared with the other at each.

    p is of random signs of the paired differences, and corrected for all of them by Holm's method.
    """
    found = []
    for texts in dict.fromkeys(one.texts for one in readings):
        rows, groups = rows_of(readings, texts), groups_of(readings, texts)
        for this, other in pairs:
            both = [
                (a, b)
                for a in rows
                for b in rows
                if (a.policy, b.policy) == (this, other) and (a.budget is None or b.budget in (a.budget, None))
            ]
            found += [(texts, group, a, b, a.loss[of] - b.loss[of]) for a, b in both for group, of in groups.items()]
    ps = [sign_flip_p(difference) for *_, difference in found]
    lines = [
        (
            f"{a.policy} - {b.policy}",
            texts,
            group,
            a.budget or b.budget or "",
            with_interval(difference),
            p_cell(p),
            p_cell(own),
        )
        for (texts, group, a, b, difference), p, own in zip(found, ps, holm(ps), strict=True)
    ]
    return markdown(("contrast", "texts", "group", "slots", "difference of losses (95 %)", "p", "p, corrected"), lines)
