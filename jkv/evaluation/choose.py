"""Which policy to take: all of them on a user's own model and text, and the smallest budget that loses little.

Every policy decodes the same texts as they stand, once for each budget (`jkv.evaluation.probe.decode`). Its loss is by how many
nats a token is less likely than with the full cache, a mean over all tokens after the prompt. A text is one observation, and
what is compared are the differences on the same texts. `jkv choose` prints it.
"""

import dataclasses
import math
import os
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jkv import notebook
from jkv.cache.slot_size import SlotSize, slot_size_of
from jkv.checks import check_counts, check_length, counted, out_of_range, shown, size, typed
from jkv.engine.options import EngineOptions
from jkv.engine.prompts import encode_prompts
from jkv.engine.results import Result, complete
from jkv.errors import InputError
from jkv.evaluation.budgets import LARGE, Budget, parse_mean_budget
from jkv.evaluation.generations import default_limit
from jkv.evaluation.graders import check_gold, grader_of
from jkv.evaluation.probe import check_lengths, decode
from jkv.evaluation.probe_texts import Probe, passages_of
from jkv.evaluation.problems import Problem, problems_of, tokens_of
from jkv.evaluation.variants import build, by_name, settings_of, takes_budget
from jkv.eviction import Policy
from jkv.eviction.byte_budget import is_bytes, parse_bytes
from jkv.generate import generate
from jkv.limits import MOST_SAMPLES
from jkv.model.params import Model
from jkv.model.sampling import Sampling
from jkv.policies import POLICIES, Recipe, full, is_known, make, needs_no_file, recipe_of
from jkv.policies.own import fields_of
from jkv.progress import bar_of, counts_texts
from jkv.reports import markdown
from jkv.statistics import bootstrap, with_interval
from jkv.tidy import to_pandas

BUDGETS = ("50%", "25%", "12.5%")
TOLERANCE = 0.05  # nats a token
INTERVAL = 16  # tokens between two compactions
BASELINE = "random"
LONGEST_NAME = 256  # of a file, in characters
WIDTH = 128  # of the lines that are printed


@dataclasses.dataclass(frozen=True)
class Row:
    """A policy at one budget.

    Attributes:
      name: of the policy, or of a variant that the settings define.
      policy: what was run, with its settings.
      budget: slots in each layer and KV head.
      loss: nats a token, of each text.
      is_tied: whether it is the best of its budget, or not worse: the 95 % interval of its loss less the best one's, on the
        same texts, reaches 0.
    """

    name: str
    policy: Policy
    budget: int
    loss: Float[np.ndarray, " texts"]
    is_tied: bool = False

    @property
    def mean(self) -> float:
        """The loss, a mean over texts."""
        return float(self.loss.mean())


@dataclasses.dataclass(frozen=True)
class Answers:
    """How many of the problems are answered right with the full cache and under the chosen policy, and how many alike."""

    problems: int
    full: int
    right: int
    equal: int  # token for token


@dataclasses.dataclass(frozen=True, repr=False)
class Choice:
    """A ranking of policies on one model and its texts, and what follows from it. `str` has all of it as a Markdown table.

    Attributes:
      model: its name.
      slot: the bytes of a slot.
      lengths: tokens of each text, prompt included.
      nats: a token, with the full cache.
      tolerance: the most that the chosen policy may lose, nats a token.
      rows: by budget, the largest first, then by loss.
      left_out: policies with a reason, where a budget is too small for what they keep.
      answers: of the problems, where there were any.
      vocabulary: the model's tokens, with which a guess among all of them is compared.
    """

    model: str
    slot: SlotSize
    lengths: list[int]
    nats: float
    tolerance: float
    rows: list[Row]
    left_out: list[str]
    answers: Answers | None = None
    vocabulary: int | None = None

    @property
    def best(self) -> list[Row]:
        """The row with the smallest loss at each budget, the largest budget first."""
        first = {row.budget: row for row in reversed(self.rows)}
        return [first[budget] for budget in sorted(first, reverse=True)]

    @property
    def is_within(self) -> bool:
        """Whether the chosen policy loses at most the tolerance."""
        return is_within(self.chosen, self.tolerance)

    @property
    def chosen(self) -> Row:
        """The best row at the smallest budget where the loss's 95 % interval ends below the tolerance; without one, at the
        largest budget.
        """
        return next((row for row in reversed(self.best) if is_within(row, self.tolerance)), self.best[0])

    @property
    def policy(self) -> Policy:
        """The chosen policy, as `jkv.generate` takes it."""
        return self.chosen.policy

    @property
    def budget(self) -> int:
        """Its slots in each layer and KV head."""
        return self.chosen.budget

    @property
    def line(self) -> str:
        """The line of code that uses it."""
        is_own = repr(self.policy).partition("(")[0] not in POLICIES
        return f"jkv.generate(model, prompts, policy={'' if is_own else 'jkv.'}{self.policy!r})"

    def __str__(self) -> str:
        mean = sum(self.lengths) / len(self.lengths)
        head = (
            f"{self.model}, {counted(len(self.lengths), 'text')} of {mean:,.0f} tokens on average; the full cache has "
            f"{self.nats:.3f} nats a token. The loss is what a policy adds to that, with 95 % intervals over texts; = marks "
            "the best of a budget and those that are not worse."
        )
        parts = [wrapped(head), self._table, *map(wrapped, [*self.left_out, *self._advice]), f"    {self.line}"]
        return "\n\n".join(parts)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return notebook.text(str(self))

    @property
    def _table(self) -> str:
        mean = sum(self.lengths) / len(self.lengths)
        budgets = [row.budget for row in self.best]
        columns = [f"{budget} slots ({budget / mean:.1%}), {size(budget * self.slot.whole)}" for budget in budgets]
        cells = {(row.name, row.budget): with_interval(row.loss) + " =" * row.is_tied for row in self.rows}
        names = dict.fromkeys(row.name for row in self.rows)
        return markdown(("policy", *columns), [(name, *(cells.get((name, one), "") for one in budgets)) for name in names])

    @property
    def _advice(self) -> list[str]:
        """In words: which policies do not beat the baseline, what is chosen, and what the answers are."""
        said = []
        if self.vocabulary and self.nats > math.log(self.vocabulary):
            said.append(
                f"The full cache has {self.nats:.3f} nats a token, more than a guess among all {self.vocabulary:,} tokens: the "
                "model cannot read these texts, so the ranking says nothing. Take texts like those that it reads and writes."
            )
        for best in self.best:
            base = next((row for row in self.rows if (row.name, row.budget) == (BASELINE, best.budget)), None)
            if base is None:
                continue
            if best is base:
                said.append(f"With {best.budget} slots, no policy loses less than random slots.")
            elif bootstrap(best.loss - base.loss)[1] >= 0:
                said.append(f"With {best.budget} slots, {best.name}, the best, is no better than random slots.")
        best = self.chosen
        loss = f"{best.name} with {best.budget} slots loses {with_interval(best.loss)} nats a token"
        if self.is_within:
            said.append(f"{loss}, with its interval at most the tolerance of {self.tolerance:g}.")
        else:
            said.append(
                f"{loss}, and its interval goes beyond the tolerance of {self.tolerance:g}: too small a budget, or too few "
                "texts."
            )
        if (found := self.answers) is not None:
            said.append(
                f"Of {counted(found.problems, 'problem')}, the full cache answers {found.full} right, and {best.name} "
                f"{found.right}; {found.equal} of its answers are the same token for token."
            )
        return said

    @property
    def tidy(self) -> list[dict[str, Any]]:
        """A record for each policy, budget and text (`jkv.tidy`)."""
        return [
            {
                "policy": row.name,
                "settings": row.policy.definition,
                "budget": row.budget,
                "kv_bytes": row.budget * self.slot.whole,
                "is_tied": row.is_tied,
                "text": i,
                "loss": loss,
            }
            for row in self.rows
            for i, loss in enumerate(row.loss.tolist())
        ]

    def to_pandas(self) -> Any:
        """The same as a `pandas.DataFrame` (`jkv.to_pandas`)."""
        return to_pandas(self)

    @property
    def record(self) -> dict[str, Any]:
        """All figures, for JSON."""
        rows = [
            {
                "name": row.name,
                "policy": repr(row.policy),
                "budget": row.budget,
                "kv_bytes": row.budget * self.slot.whole,
                "loss": row.loss.tolist(),
                "is_tied": row.is_tied,
            }
            for row in self.rows
        ]
        answers = None if self.answers is None else dataclasses.asdict(self.answers)
        own = {name: getattr(self, name) for name in ("model", "lengths", "nats", "tolerance", "left_out", "budget", "line")}
        return own | {"is_within": self.is_within, "answers": answers, "rows": rows}


def choose(
    model: Model,
    texts: str | Sequence[str] | None = None,
    problems: Sequence[Problem | tuple[str, str]] | None = None,
    *,
    policies: Sequence[Recipe] | None = None,
    budgets: Sequence[str | int] = BUDGETS,
    memory: str | None = None,
    tolerance: float = TOLERANCE,
    interval: int = INTERVAL,
    settings: dict[str, dict[str, Any]] | None = None,
    count: int = 16,
    length: int = 512,
    prompt: int = 32,
    grader: str = "boxed",
    max_new_tokens: int | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Choice:
    """Ranks policies on a model and its own texts, and finds the smallest budget that loses little.

    Args:
      model: with a tokenizer.
      texts: what the model will read and write: one long text, which is cut into passages, or a list of texts.
      problems: in place of texts, problems with their gold answers. The model's own greedy answers with the full cache are the
        texts, and the chosen policy then answers the problems by itself.
      policies: names, variants that `settings` define, or functions that return policies (`jkv.evaluation.compare`). None takes
        every policy that has a budget, frees memory and needs no trained file, and the variants of `settings`. Random slots
        are always among them.
      budgets: slots, or shares of the texts' mean length.
      memory: bytes of a row over all layers and KV heads, such as "64MB"; the only budget then.
      tolerance: the most that the chosen policy may lose, nats a token, as the upper end of its 95 % interval.
      interval: generated tokens between two compactions, for policies that compact at intervals; their `settings` go before.
      settings: of policies, by name.
      count: the most passages of one long text.
      length: tokens of a passage, and the most of each text of a list.
      prompt: tokens of each text that are prefilled.
      grader: of the answers: "boxed", "math" or "choice" (`jkv.evaluation.graders`).
      max_new_tokens: of an answer; None takes 1,024, or what the model's positions leave.
      progress: whether to show a bar; None shows it in a terminal or notebook.
      options: of the engine (`jkv.EngineOptions`).

    Raises:
      InputError: both texts and problems or neither, fewer than two texts, a policy without a budget, a budget in which
        nothing would be evicted or no policy fits, or a setting out of its range. Nothing has been compiled then; with
        problems, whose answers have unknown lengths, all but the budgets are checked before.
      TypeError: an unknown option of the engine.
    """
    check_sources(texts, problems)
    if model.tokenizer is None:
        raise InputError("{field} needs a tokenizer to read texts; {name} has none.", field="model", name=model.name)
    check_counts(count=count, length=length, prompt=prompt, interval=interval, max_new_tokens=max_new_tokens)
    if not 0 < typed("tolerance", tolerance, float) < np.inf:
        raise out_of_range("tolerance", "be above 0, in nats a token", tolerance)
    slot = slot_size_of(model.params, EngineOptions().changed(options).kv_format)
    sizes = [parse_mean_budget(budget) for budget in budgets] if memory is None else [in_memory(memory, slot)]
    if not sizes:
        raise InputError("{field} must be a list of at least one; got none.", field="budgets", code="missing")
    given, settings = by_name(ranked_names(settings or {}) if policies is None else policies, settings)
    names = list(dict.fromkeys([*given, BASELINE]))
    settings = with_interval_of(names, settings, interval)
    check_names(names, settings)
    asked = problems_of(problems or ())
    if texts is None and len(asked) < 2:
        raise InputError("{field} must be two or more, for an interval; got {got}.", field="problems", got=len(asked))
    check_gold([one.answer for one in asked], judge := grader_of(grader))

    with bar_of(1 + len(names) + 2 * bool(asked), "run", "choose", progress) as bar:

        def step(title: str, run: Callable[..., Any], *about: Any) -> Any:
            bar.set_description(f"choose: {title}")
            found = run(model, *about, options | counts_texts(bar))
            bar.update()
            return found

        before = None if texts is not None else step("answers", answers_of, asked, full(), max_new_tokens)
        probes = probes_of(model.tokenizer, texts, count, length, prompt) if before is None else probes_of_answers(before)
        check_lengths(model, "choose", probes)
        lengths = [len(one.prompt) + len(one.rest) for one in probes]
        slots = in_slots(sizes, lengths, "budgets" if memory is None else "memory")
        runs, left_out = runs_of(names, slots, settings, max(len(one.prompt) for one in probes))
        base = np.array(step("full", decode, probes, full())[0])
        rows = []
        for name, versions in runs.items():  # all budgets of a policy in one engine, which compiles once
            log_prob = step(name, decode, probes * len(versions), [policy for policy in versions for _ in probes])[0]
            losses = base - np.reshape(log_prob, (len(versions), -1))
            rows += [Row(name, policy, budget_of(policy), loss) for policy, loss in zip(versions, losses, strict=True)]
        nats, vocabulary = -float(base.mean()), model.config.vocab_size
        choice = Choice(model.name, slot, lengths, nats, tolerance, ranked(rows), left_out, vocabulary=vocabulary)
        if before is None:
            return choice
        after = step("answers under the best", answers_of, asked, choice.policy, max_new_tokens)
    right, kept = (sum(map(judge, out.text or (), (one.answer for one in asked))) for out in (before, after))
    equal = sum(first.rest == second.rest for first, second in zip(probes, probes_of_answers(after), strict=True))
    return dataclasses.replace(choice, answers=Answers(len(asked), right, kept, equal))


def answers_of(
    model: Model, asked: Sequence[Problem], policy: Policy, max_new_tokens: int | None, options: dict[str, Any]
) -> Result:
    """The model's greedy answers to problems."""
    ids = encode_prompts(model, [tokens_of(model, one) for one in asked])
    limit, greedy = max_new_tokens or default_limit(model, ids), Sampling(temperature=0.0)
    return complete(generate(model, ids, policy, greedy, max_new_tokens=limit, progress=False, **options))


def in_slots(sizes: Sequence[Budget], lengths: Sequence[int], field: str) -> list[int]:
    """The budgets in slots, the largest first.

    Raises:
      InputError: one that holds every text whole.
    """
    found = sorted({max(1, size.slots_for(lengths)[0]) for size in sizes}, reverse=True)
    if found[0] >= max(lengths):
        rule = "{field} must be less than the longest text has, {longest} tokens, or nothing is evicted; got {got} slots."
        raise InputError(rule, field=field, code="out_of_range", longest=max(lengths), got=found[0])
    return found


def in_memory(memory: str, slot: SlotSize) -> Budget:
    """The slots that a row has in so many bytes.

    Raises:
      InputError: no bytes, or fewer than a slot needs.
    """
    if not is_bytes(memory):
        rule = '{field} must be bytes of a row, such as "64MB"; got {got}.'
        raise InputError(rule, field="memory", code="wrong_type", got=shown(memory))
    if (slots := parse_bytes(memory) // slot.whole) < 1:
        raise InputError("{field} must hold a slot ({slot}); got {got}.", field="memory", slot=slot, got=memory)
    return Budget(slots=slots)


def ranked_names(settings: dict[str, dict[str, Any]]) -> list[str]:
    """The policies that a budget makes small and that need no trained file, and those that `settings` complete."""
    names = dict.fromkeys([*filter(needs_no_file, POLICIES), *settings])
    return [name for name in names if takes_budget(name, settings) and build(name, LARGE, settings).budget is not None]


def check_sources(texts: Any, problems: Any) -> None:
    """Refuses both texts and problems, and neither."""
    if (texts is None) == (problems is None):
        both = "neither" if texts is None else "both"
        raise InputError("choose takes {field} or {other}; got {got}.", field="texts", other="problems", got=both)


def check_names(names: Sequence[str], settings: dict[str, dict[str, Any]]) -> None:
    """Refuses policies that no budget makes small, and settings that they do not have."""
    for name in names:
        if not takes_budget(name, settings) or build(name, LARGE, settings).budget is None:
            rule = "{field} must free memory by a budget that choose sets; {got} does not. Leave it out."
            raise InputError(rule, field="policies", code="unsupported", got=name)


def with_interval_of(names: Sequence[str], settings: dict[str, dict[str, Any]], interval: int) -> dict[str, dict[str, Any]]:
    """The settings with an interval for each policy whose recipe has one above a step and whose settings have none."""
    own = {}
    for name in names:
        recipe, chosen = settings_of(name, settings)
        field = fields_of(recipe_of(recipe)).get("interval") if is_known(recipe) else None
        if field is not None and field.default != 1 and "interval" not in chosen:
            own[name] = settings.get(name, {}) | {"interval": interval}
    return settings | own


def probes_of(tokenizer: Any, texts: str | Sequence[str] | None, count: int, length: int, prompt: int) -> list[Probe]:
    """Passages of one long text, or the beginnings of several, in which every token after the prompt is scored.

    Raises:
      InputError: less than two, or a text that has no tokens after its prompt.
    """
    if prompt >= length:
        raise InputError("{field} must be below length, {length}; got {got}.", field="prompt", length=length, got=prompt)
    if isinstance(texts, str):
        tokens = tokenizer.encode(texts, add_special_tokens=False)
        if len(tokens) < 2 * length:
            rule = "{field} must have two passages of {length} tokens; got {got:,} tokens. {remedy}"
            is_file = len(texts) < LONGEST_NAME and os.path.isfile(texts)
            remedy = f"Read the file: open({texts!r}).read()." if is_file else "Give more text, or a smaller length."
            raise InputError(rule, field="texts", length=length, got=len(tokens), remedy=remedy)
        parts = passages_of(tokens, min(count, len(tokens) // length), length)
    else:
        check_length("texts", texts, MOST_SAMPLES, "texts")
        parts = [tokenizer.encode(typed("texts", text, str), add_special_tokens=False)[:length] for text in texts or ()]
    if len(parts) < 2 or min(map(len, parts)) <= prompt:
        rule = "{field} must be two or more, each longer than the prompt of {prompt} tokens; got lengths of {got}."
        raise InputError(rule, field="texts", prompt=prompt, got=shown(list(map(len, parts))))
    return [scored_whole(part[:prompt], part[prompt:]) for part in parts]


def probes_of_answers(out: Result) -> list[Probe]:
    """Prompts with what a model wrote after them."""
    rows = zip(out.prompts, out.tokens, out.lengths, strict=True)
    return [scored_whole(prompt.tolist(), row[:length].tolist()) for prompt, row, length in rows]


def scored_whole(prompt: list[int], rest: list[int]) -> Probe:
    """A text in which every token after the prompt is scored."""
    return Probe("", prompt, rest, list(range(len(rest))))


def runs_of(
    names: Sequence[str], budgets: Sequence[int], settings: dict[str, dict[str, Any]], longest_prompt: int
) -> tuple[dict[str, list[Policy]], list[str]]:
    """The versions of each policy, one for each budget that it takes, and in words those that are left out.

    Raises:
      InputError: no policy takes any of the budgets.
    """
    runs: dict[str, list[Policy]] = {}
    left_out = []
    for name in names:
        recipe, chosen = settings_of(name, settings)
        for budget in budgets:
            try:
                policy = make(recipe, {"budget": budget} | chosen)
            except ValueError as error:
                left_out.append(f"Without {name} at {budget} slots: {error}")
                continue
            if policy.longest_prompt < longest_prompt:
                left_out.append(f"Without {name} at {budget} slots: it keeps the prompt, which has {longest_prompt} tokens.")
            else:
                runs.setdefault(name, []).append(policy)
    if not runs:
        raise InputError("{field} must be large enough for a policy. {reason}", field="budgets", reason=left_out[0])
    return runs, left_out


def budget_of(policy: Policy) -> int:
    """The slots of a policy that has a budget."""
    assert policy.budget is not None
    return policy.budget


def is_within(row: Row, tolerance: float) -> bool:
    """Whether the interval of a loss ends at most at the tolerance."""
    return bootstrap(row.loss)[1] <= tolerance


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Rows by budget, the largest first, then by loss; those that are not worse than their best are marked."""
    rows = sorted(rows, key=lambda row: (-row.budget, row.mean))
    best = {row.budget: row for row in reversed(rows)}
    return [dataclasses.replace(row, is_tied=bootstrap(row.loss - best[row.budget].loss)[0] <= 0) for row in rows]


def wrapped(text: str) -> str:
    """A paragraph in lines."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)
