"""`jkv eval`: what each policy costs in accuracy and saves in memory, all on the same problems.

Budgets may be shares of the length that the full cache reaches on these problems, on average ("25%") or on each of them
("25% each"), but what is compared is the memory that was really held: the mean over decode chunks of the pool's bytes in use,
for each running sample.
"""

import dataclasses
import functools
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jkv import viz
from jkv.cache.slot_size import slot_size_of
from jkv.checks import check_counts, check_list, need_tokenizer
from jkv.engine.options import EngineOptions
from jkv.engine.prompts import encode_prompts
from jkv.engine.requests import check_sampling
from jkv.errors import refused
from jkv.evaluation.budgets import Budget, least_policy, parse_budget
from jkv.evaluation.generations import (
    NEW_FOLDER,
    Run,
    budget_of,
    check_first_lines,
    default_limit,
    file_name,
    joined,
    made_of,
    run,
)
from jkv.evaluation.graders import check_gold, grader_of
from jkv.evaluation.oracles import ORACLE, greedy_texts, oracles_of, settings_of_oracle
from jkv.evaluation.problems import Problem, problems_of, tokens_of
from jkv.evaluation.variants import build, by_name, kv_dtype_of, seeds_of, size_in_slots, takes_budget
from jkv.eviction import Policy
from jkv.model.params import Model
from jkv.model.sampling import Sampling
from jkv.policies import POLICIES, Recipe, full, is_known
from jkv.reports import markdown, write_figure, write_json, write_text
from jkv.resuming import check_same
from jkv.statistics import accuracy_figures, check_ks, paired_change, pass_figures
from jkv.tidy import csv_of, records_of

# Of an outcome, what is of single samples or nested; `Outcome.tidy` has figures of some.
NOT_TIDY = {"right", "touched_each", "lengths", "seed_accuracy", "sharing", "pass_at", "touched_accuracy", "touched_change"}
GROWING = {"policies", "budgets", "settings"}  # of a comparison that is resumed


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One policy on all problems; rates are shares, memory is bytes a running sample."""

    policy: str
    settings: str
    budget: int | None  # slots for each layer and KV head; a mean where each problem has its own
    share: float | None  # of the full cache's length
    problems: int
    accuracy: float  # pass@1
    low: float  # 95 % interval: Wilson's of one sample a problem, bootstrapped over problems of several
    high: float
    change: float  # accuracy less the full cache's, on the same problems
    change_low: float  # 95 % interval of the paired difference; without width where nothing was touched and nothing differs
    change_high: float
    mean_tokens: float
    inflation: float  # mean tokens by the full cache's
    truncated: float  # stopped by the token limit
    kv_bytes: float  # mean
    kv_share: float  # of the full cache's mean
    peak_kv_bytes: int  # of the whole run
    peak_sentence_bytes: int  # of the whole run, in host memory (SkipKV)
    right: str  # a 1 or 0 for each sample, problem by problem, and for each problem seed by seed
    evicted: float  # tokens a sample, averaged over layers and KV heads
    compactions: float  # a sample
    occupancy: float
    tokens_per_second: float  # of the whole run, without compile time
    amsr: float = math.nan  # average memory saving ratio (ReasonCache): the share of their pages that rows do not hold
    final_amsr: float = math.nan  # the same when each sample ended
    affected: float = math.nan  # the share of all tokens that were evicted or shared (MemShare)
    sharing: dict[str, Any] | None = None  # what sharing found and took
    samples: int = 1  # of each problem
    pass_at: dict[str, list[float]] = dataclasses.field(default_factory=dict)  # k: the value and its 95 % bootstrap interval
    touched_each: str | None = None  # as `right`: 1 where a sample lost a token, shared a page or left one unread
    touched_accuracy: list[float] = dataclasses.field(default_factory=list)  # of the problems with such a sample, with interval
    touched_change: list[float] = dataclasses.field(default_factory=list)  # of the same problems, with interval
    seed_accuracy: list[float] = dataclasses.field(default_factory=list)  # of each of several seeds of the policy's own draws
    lengths: list[int] = dataclasses.field(default_factory=list)  # new tokens of each sample, as `right`
    is_each: bool = False  # whether the share is of each problem's own length
    kv_dtype: str | None = None  # of quantised pages
    num_bytes: str | None = None  # of a row, where the budget is in bytes
    num_raised: int = 0  # problems with the least budget that the policy accepts, which is more than the share

    @property
    def key(self) -> tuple[Any, ...]:
        """What it is of, within a comparison."""
        return self.policy, self.settings, self.share, self.is_each, self.kv_dtype, self.num_bytes

    @property
    def tidy(self) -> list[dict[str, Any]]:
        """Its figures as one record of a table (`jkv.tidy`); an interval is in columns that end with `_low` and `_high`."""
        record = {name: value for name, value in vars(self).items() if name not in NOT_TIDY}
        marks = self.touched_each or ""
        record |= {"touched": marks.count("1") / len(marks) if marks else math.nan, "seeds": len(self.seed_accuracy) or 1}
        spread = {"touched_accuracy": self.touched_accuracy, "touched_change": self.touched_change}
        for name, figures in {**{f"pass_at_{k}": figures for k, figures in self.pass_at.items()}, **spread}.items():
            values = figures or [math.nan] * 3
            record |= dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))
        return [record]

    @property
    def rights(self) -> np.ndarray:
        """Which samples of each problem are right: [problems, n] bool."""
        return np.array([mark == "1" for mark in self.right]).reshape(self.problems, -1)


def compare(
    model: Model,
    problems: Sequence[Problem | tuple[str, str]],
    policies: Sequence[Recipe],
    budgets: Sequence[str | int],
    settings: dict[str, dict[str, Any]] | None = None,
    report: Callable[[list["Outcome"]], None] = lambda outcomes: None,
    known: Sequence["Outcome"] = (),
    generations: Path | None = None,
    pass_at: Sequence[int] | None = None,
    grader: str = "boxed",
    samples: int = 1,
    seeds: int = 1,
    **options: Any,
) -> list[Outcome]:
    """Every policy at every budget, the full cache first; `options` go to `run`, `settings` to the policies by name.

    A problem may also be a pair of texts, its prompt and its answer. Problems, prompts, grader, draws and limits are the same
    for all; draws have the same noise where the text so far is the same. `report` is called with all outcomes so far
    after each policy. `known` are outcomes of an interrupted comparison of the same model, problems and options, which
    are not run again. `generations` is a folder for every sample that was drawn, a file for each policy and budget
    (`jkv.evaluation.generations`), from which an interrupted comparison resumes. `pass_at` are the k of pass@k; None takes 1
    and the number of samples.

    Policies are names of `jkv.POLICIES`, names of your own (`module:name`, see `jkv.policies.own`), policies, or functions that
    return one. Those that are no names appear under their own, and a policy, which has its budget, runs once.

    Another name is a variant: its settings name the `policy` that it varies, and override that one's; its `kv_dtype` is
    the engine's. A policy without a budget (RPC's grows with the sequence) runs once, with its settings. One with a setting
    `seed` runs with so many `seeds`, from its own on, and has one outcome, of means. "oracle" is what a budget allows: for each
    problem, a policy that knows what the full cache's greedy answer reads (`jkv.policies.oracle`).

    Raises:
      ValueError: an unknown policy or setting, an oracle where answers are drawn, a gold answer that the grader does not mark
        right, or a budget that a policy cannot hold. Raised before anything runs; for shares of the mean length, whose slots
        depend on the full cache's lengths, before any other policy runs. Where a share of a problem's own length is too small,
        the policy has the least budget that it accepts.
    """
    need_tokenizer(model.tokenizer, "Answers are read from text")
    problems, budgets = problems_of(problems), check_list("budgets", budgets)
    check_gold([problem.answer for problem in problems], grader_of(grader))
    check_counts(seeds=seeds)
    ks, (names, settings) = check_ks(pass_at, samples), by_name(policies, settings)
    recipes = [own.get("policy", name) for name, own in settings.items()]
    if unknown := sorted({recipe for recipe in recipes if recipe != ORACLE and not is_known(recipe)}):
        raise refused(f"settings are for policies, {', '.join(POLICIES)}; got {', '.join(unknown)}.", settings="unknown_name")
    sizes = [parse_budget(budget) for budget in budgets]
    wanted: list[tuple[str, Budget]] = []
    for name in names:
        if name != "full":
            form = EngineOptions(kv_dtype=kv_dtype_of(name, settings, options), page_size=options.get("page_size")).kv_format
            slot = slot_size_of(model.params, form)
            own = [size_in_slots(name, size, slot, settings) for size in sizes] if takes_budget(name, settings) else [Budget()]
            wanted += [(name, size) for size in own]
    for name, size in wanted:
        if name != ORACLE:
            build(name, size.slots_or_large, settings)
    if ORACLE in names:
        settings_of_oracle(settings)
        check_greedy(samples, options.get("sampling"))
    ids = encode_prompts(model, [tokens_of(model, problem) for problem in problems])
    if generations is not None:
        limit = options.get("max_new_tokens") or default_limit(model, ids)
        of_runs = {name: value for name, value in options.items() if name not in ("sampling", "max_new_tokens", "progress")}
        draws = check_sampling(options.get("sampling"))
        check_first_lines(generations, made_of(model, problems, ids, draws, grader=grader, max_new_tokens=limit, **of_runs))
    done = {outcome.key: outcome for outcome in known}

    def outcome_of(versions: dict[int | None, list[Policy]], size: Budget, base: Outcome | None) -> Outcome:
        first = next(iter(versions.values()))[0]
        kv_dtype = kv_dtype_of(first.name, settings, options)
        if before := done.get((first.name, first.definition, size.share, size.is_each, kv_dtype, size.num_bytes)):
            return before
        runs = []
        for seed, each in versions.items():
            path = None if generations is None else generations / file_name(first, size, seed)
            given = options | {"kv_dtype": kv_dtype, "grader": grader, "samples": samples, "path": path}
            runs.append(run(model, problems, each, **given))
        found = summarise(joined(runs), base, size.share, ks)
        return dataclasses.replace(found, kv_dtype=kv_dtype, num_bytes=size.num_bytes)

    outcomes = [outcome_of({None: [full()] * len(problems)}, Budget(), None)]
    report(outcomes)
    base = outcomes[0]
    prompts = list(map(len, ids))
    new = np.reshape(base.lengths, (len(problems), -1)).mean(axis=1) if base.lengths else base.mean_tokens
    lengths = (np.array(prompts) + new).tolist()

    def maker_of(name: str, seed: int | None) -> Callable[[int, int], Policy]:
        """A function of a problem's index and a budget."""
        if name == ORACLE:
            knowing = {name: value for name, value in options.items() if name not in ("sampling", "max_new_tokens", "progress")}
            limit = options.get("max_new_tokens") or default_limit(model, ids)
            return oracles_of(model, greedy_texts(model, ids, limit, knowing), settings)
        of_all = functools.cache(lambda slots: build(name, slots, settings, seed))
        return lambda _, slots: of_all(slots)

    makers = {name: {seed: maker_of(name, seed) for seed in seeds_of(name, settings, seeds)} for name, _ in wanted}
    prepared = [(versions_of(makers[name], size, prompts, lengths), size) for name, size in wanted]
    for versions, size in prepared:
        outcome = outcome_of(versions, size, base)
        if size.is_each:
            outcome = with_own_budgets(outcome, next(iter(versions.values())), size.slots_for(lengths))
        outcomes.append(outcome)
        report(outcomes)
    return outcomes


def versions_of(
    makers: dict[int | None, Callable[[int, int], Policy]], size: Budget, prompts: Sequence[int], lengths: Sequence[float]
) -> dict[int | None, list[Policy]]:
    """The policy for each problem, by seed; `prompts` and `lengths` (with the full cache) are tokens of each problem."""
    slots, found = size.slots_for(lengths), {}
    for seed, of_problem in makers.items():
        if size.is_each:
            found[seed] = [
                least_policy(functools.partial(of_problem, i), count, prompt)
                for i, (count, prompt) in enumerate(zip(slots, prompts, strict=True))
            ]
        else:
            found[seed] = [of_problem(i, count) for i, count in enumerate(slots)]
    return found


def check_greedy(samples: int, sampling: Sampling | None) -> None:
    """Refuses an oracle where answers are drawn or penalised: it knows one text of each problem.

    Raises:
      ValueError: several samples, a temperature, or penalties.
    """
    if samples > 1 or (sampling is not None and (sampling.temperature > 0 or sampling.penalises)):
        raise refused(
            "The oracle knows the greedy answer of each problem. Set temperature to 0 and samples to 1, without penalties, or "
            "leave it out.",
            sampling="conflict",
        )


def with_own_budgets(outcome: Outcome, policies: Sequence[Policy], slots: Sequence[int]) -> Outcome:
    """An outcome of policies with a budget for each problem, which may be more than the `slots` of its share."""
    budgets = np.array([budget_of(policy) for policy in policies])
    raised = int((budgets > slots).sum())
    return dataclasses.replace(outcome, is_each=True, budget=round(budgets.mean()), num_raised=raised)


def summarise(this: Run, base: Outcome | None, share: float | None, ks: Sequence[int] = (1,)) -> Outcome:
    """A run's figures, compared with the figures of the full cache (`base`; None for the full cache itself)."""
    count, stats, mean_tokens = len(this.is_right), this.stats, float(this.lengths.mean())
    before = this.right if base is None else base.rights
    is_touched = this.touched.any(axis=1)
    accuracy, low, high = accuracy_figures(this.right)
    change, change_low, change_high = paired_change(this.right, before)
    if not is_touched.any() and (this.right.mean(axis=1) == before.mean(axis=1)).all():
        change_low = change_high = change  # equal by construction: there is nothing to estimate
    by_seed = this.is_right.reshape(-1, this.seeds, this.samples).mean(axis=(0, 2))
    return Outcome(
        policy=this.policy.name,
        settings=this.policy.definition,
        budget=budget_of(this.policy),
        share=share,
        problems=len(this.right),
        accuracy=accuracy,
        low=low,
        high=high,
        change=change,
        change_low=change_low,
        change_high=change_high,
        mean_tokens=mean_tokens,
        inflation=1.0 if base is None else mean_tokens / base.mean_tokens,
        truncated=this.finish_reason.count("length") / count,
        kv_bytes=stats.kv_bytes_per_sample,
        kv_share=1.0 if base is None else stats.kv_bytes_per_sample / base.kv_bytes,
        peak_kv_bytes=stats.peak_kv_bytes,
        peak_sentence_bytes=stats.peak_sentence_bytes,
        right=marks(this.is_right),
        evicted=stats.evicted,
        compactions=stats.compactions,
        occupancy=stats.occupancy,
        tokens_per_second=stats.tokens_per_second,
        amsr=stats.amsr,
        final_amsr=stats.final_amsr,
        affected=stats.affected_ratio,
        sharing=stats.sharing,
        samples=this.samples,
        pass_at=pass_figures(this.right, ks, this.seeds),
        touched_each=marks(this.is_touched),
        touched_accuracy=accuracy_figures(this.right[is_touched]) if is_touched.any() else [],
        touched_change=list(paired_change(this.right[is_touched], before[is_touched])) if is_touched.any() else [],
        seed_accuracy=by_seed.tolist() if this.seeds > 1 else [],
        lengths=this.lengths.tolist(),
    )


def marks(values: np.ndarray) -> str:
    """A 1 or 0 for each value.

    >>> marks(np.array([True, False]))
    '10'
    """
    return "".join(str(int(value)) for value in values)


COLUMNS = (
    "policy",
    "budget",
    "touched",
    "accuracy (95 %)",
    "change",
    "accuracy, touched",
    "change, touched",
    "seeds",
    "tokens",
    "truncated",
    "KV kB",
    "of full",
    "peak MB",
    "pages read",
    "affected",
    "evicted",
    "tok/s",
)
ACCURACY = COLUMNS.index("accuracy (95 %)")


def cells_of(outcome: Outcome) -> tuple[str, ...]:
    """A line of the table, cell by cell; what an older record leaves out is blank."""
    o = outcome
    spread = f"{len(o.seed_accuracy)}, SD {100 * np.std(o.seed_accuracy, ddof=1):.1f}" if o.seed_accuracy else ""
    return (
        o.policy,
        budget_cell(o),
        touched_cell(o),
        percents([o.accuracy, o.low, o.high]),
        *(percents(figures) for k, figures in o.pass_at.items() if k != "1"),
        points([o.change, o.change_low, o.change_high] if o.change_low < o.change_high else []),
        percents(o.touched_accuracy),
        points(o.touched_change),
        spread,
        f"{o.mean_tokens:.0f} (x{o.inflation:.2f})",
        f"{o.truncated:.1%}",
        f"{o.kv_bytes / 1e3:.0f}",
        f"{o.kv_share:.0%}",
        f"{o.peak_kv_bytes / 1e6:.1f}",
        "" if math.isnan(o.amsr) else f"{1 - o.amsr:.1%}",
        "" if math.isnan(o.affected) else f"{o.affected:.1%}",
        f"{o.evicted:.0f} in {o.compactions:.1f}",
        f"{o.tokens_per_second:.0f}",
    )


def budget_cell(outcome: Outcome) -> str:
    """The slots of a policy, the bytes or share that they are, and for how many problems more: the least that it accepts."""
    o = outcome
    raised = f", the least for {o.num_raised}" if o.num_raised else ""
    share = f" ({o.share:.0%}{' each' * o.is_each}{raised})" if o.share else ""
    share = f" ({o.num_bytes})" if o.num_bytes else share
    return "" if o.budget is None else f"{o.budget}{share}"


def touched_cell(outcome: Outcome) -> str:
    """The share of samples that a policy touched."""
    if outcome.touched_each is None or outcome.policy == "full":
        return ""
    count = outcome.touched_each.count("1")
    return f"{count / len(outcome.touched_each):.1%}" if count else "nothing evicted"


def percents(figures: Sequence[float]) -> str:
    """A share and its interval, blank where there is none.

    >>> percents([0.5, 0.25, 0.75])
    '50.0% (25.0% to 75.0%)'
    """
    return "{:.1%} ({:.1%} to {:.1%})".format(*figures) if figures else ""


def points(figures: Sequence[float]) -> str:
    """A change and its interval in percentage points, blank where there is none.

    >>> points([0.5, -0.25, 0.75])
    '+50.0 (-25.0 to +75.0)'
    """
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*(100 * figure for figure in figures)) if figures else ""


def table(outcomes: Sequence[Outcome], ks: Sequence[int] = (1,)) -> str:
    """A Markdown table; `ks` names the columns of pass@k while there are no outcomes."""
    named = [f"pass@{k} (95 %)" for k in (outcomes[0].pass_at if outcomes else map(str, ks))]
    names = [*COLUMNS[:ACCURACY], *(named if len(named) > 1 else COLUMNS[ACCURACY : ACCURACY + 1]), *COLUMNS[ACCURACY + 1 :]]
    return markdown(names, map(cells_of, outcomes))


def write(
    outcomes: Sequence[Outcome], folder: Path, name: str, about: dict[str, Any], draws: bool = True, notes: Sequence[str] = ()
) -> None:
    """The table with the notes below, the figures and, if it `draws`, the picture, as `name`.md, .json, .csv and .png."""
    write_text(folder / f"{name}.csv", csv_of(records_of(outcomes)))
    write_figures(outcomes, folder, name, about)
    write_text(folder / f"{name}.md", "\n\n".join([table(outcomes), *notes]) + "\n")
    if draws:
        write_figure(folder / f"{name}.png", viz.frontier(outcomes, f"{name}, {outcomes[0].problems} problems"))


def write_figures(outcomes: Sequence[Outcome], folder: Path, name: str, about: dict[str, Any]) -> None:
    """The figures alone, and what they are of, as `name`.json."""
    write_json(folder / f"{name}.json", {"about": about, "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes]})


def read(path: Path, about: dict[str, Any], unsaid: dict[str, Any] | None = None) -> list[Outcome]:
    """The outcomes that an interrupted comparison wrote; none where there is no file. `unsaid` has what older files leave out.

    A comparison may go on with more policies or budgets: an outcome counts if its policy has the same settings.

    A file that is no JSON, which a failed disk may leave, is none, with a line on stderr: its figures come from the completions
    again, each of which has the same digests.

    Raises:
      ValueError: they are of another comparison, or of one whose file lacks the digests of `about`; or no outcomes.
    """
    if not path.exists():
        return []
    try:
        record = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        print(f"jkv: {path} is damaged; its figures are computed from the completions again", file=sys.stderr)
        return []
    try:
        outcomes = [Outcome(**outcome) for outcome in record["outcomes"]]
        before = (unsaid or {}) | record["about"]
    except (KeyError, TypeError) as error:
        rule = f"{path} must hold outcomes that `jkv eval` wrote; got {error!r}. Give another --out."
        raise refused(rule, path="invalid") from None
    check_same(f"{path} holds another comparison", before, about, NEW_FOLDER, GROWING)
    return outcomes
