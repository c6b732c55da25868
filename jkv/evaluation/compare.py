"""`jkv eval`: what each policy costs in accuracy and saves in memory, all on the same problems.

Budgets may be shares of the mean length that the full cache reaches on these problems ("25%"), but what is compared is the
memory that was really held: the mean over decode chunks of the pool's bytes in use, for each running sample.
"""

import dataclasses
import json
import math
import sys
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jkv import viz
from jkv.engine.prompts import encode_prompts
from jkv.evaluation.generations import Run, budget_of, run
from jkv.evaluation.graders import check_gold, grader_of
from jkv.evaluation.problems import Problem, tokens_of
from jkv.model.params import Model
from jkv.policies import POLICIES, Policy, full, has_budget, make
from jkv.reports import markdown, write_figure, write_json, write_text
from jkv.statistics import check_ks, paired_change, pass_figures, wilson


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One policy on all problems; rates are shares, memory is bytes a running sample."""

    policy: str
    settings: str
    budget: int | None  # slots for each layer and KV head
    share: float | None  # of the full cache's mean length
    problems: int
    accuracy: float  # pass@1
    low: float  # 95 % interval: Wilson's of one sample a problem, bootstrapped over problems of several
    high: float
    change: float  # accuracy less the full cache's, on the same problems
    change_low: float  # 95 % interval of the paired difference
    change_high: float
    mean_tokens: float
    inflation: float  # mean tokens by the full cache's
    truncated: float  # stopped by the token limit
    kv_bytes: float  # mean
    kv_share: float  # of the full cache's mean
    peak_kv_bytes: int  # of the whole run
    peak_sentence_bytes: int  # of the whole run, in host memory (SkipKV)
    right: str  # a 1 or 0 for each sample, those of a problem one after the other
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


def compare(
    model: Model,
    problems: Sequence[Problem],
    policies: Sequence[str],
    budgets: Sequence[str | int],
    settings: dict[str, dict[str, Any]] | None = None,
    report: Callable[[list["Outcome"]], None] = lambda outcomes: None,
    known: Sequence["Outcome"] = (),
    generations: Path | None = None,
    pass_at: Sequence[int] | None = None,
    grader: str = "boxed",
    samples: int = 1,
    **options: Any,
) -> list[Outcome]:
    """Every policy at every budget, the full cache first; `options` go to `run`, `settings` to the policies by name.

    Problems, prompts, grader, draws and limits are the same for all; draws have the same noise where the text so far is the
    same. `report` is called with all outcomes so far after each policy. `known` are those of an interrupted comparison of the
    same model, problems and options, which need no second run. `generations` is a folder for every sample that was drawn, a
    file for each policy and budget (`jkv.evaluation.generations`), from which an interrupted comparison resumes. `pass_at` are
    the k of pass@k; None takes 1 and the number of samples.

    A name of your own is a variant: its settings name the `policy` that it varies, and override that one's. A policy without a
    budget (RPC's grows with the sequence) runs once, with its settings.

    Raises:
      ValueError: an unknown policy or setting, a gold answer that the grader does not mark right, or a budget that a policy
        cannot hold. Raised before anything runs; for shares, whose slots depend on the full cache's lengths, before any other
        policy runs.
    """
    if model.tokenizer is None:
        raise ValueError("Answers are read from text, and this model has no tokenizer. Compare with one that has.")
    check_gold([problem.answer for problem in problems], grader_of(grader))
    ks, settings = check_ks(pass_at, samples), settings or {}
    recipes = {name: own.get("policy", name) for name, own in settings.items()}
    if unknown := sorted(set(recipes.values()) - set(POLICIES)):
        raise ValueError(f"settings are for policies, {', '.join(POLICIES)}; got {', '.join(unknown)}.")
    shares = {None: None, **{budget: parse_share(budget) for budget in budgets}}
    wanted: list[tuple[str, str | int | None]] = []
    for name in policies:
        if name != "full":
            wanted += [(name, budget) for budget in (budgets if has_budget(recipes.get(name, name)) else [None])]
    for name, budget in wanted:
        build(name, None if budget is None else 1 << 30 if shares[budget] else int(budget), settings)
    done = {(outcome.policy, outcome.settings, outcome.share): outcome for outcome in known}

    def outcome_of(policy: Policy, base: Outcome | None, share: float | None) -> Outcome:
        before = done.get((policy.name, policy.definition, share))
        if before is not None:
            return before
        path = None if generations is None else generations / file_name(policy, share)
        return summarise(run(model, problems, policy, grader=grader, samples=samples, path=path, **options), base, share, ks)

    outcomes = [outcome_of(full(), None, None)]
    report(outcomes)
    base = outcomes[0]
    prompts = encode_prompts(model, [tokens_of(model, problem) for problem in problems])
    mean_length = base.mean_tokens + float(np.mean([len(prompt) for prompt in prompts]))

    def slots_of(budget: str | int | None) -> int | None:
        share = shares[budget]
        return round(share * mean_length) if share else None if budget is None else int(budget)

    for policy, budget in [(build(name, slots_of(budget), settings), budget) for name, budget in wanted]:
        outcomes.append(outcome_of(policy, base, shares[budget]))
        report(outcomes)
    return outcomes


def build(name: str, slots: int | None, settings: dict[str, dict[str, Any]]) -> Policy:
    """The policy, or the variant of one, by its name."""
    own = settings.get(name, {})
    recipe = own.get("policy", name)
    chosen = ({} if slots is None else {"budget": slots}) | settings.get(recipe, {}) | own
    policy = make(recipe, {field: value for field, value in chosen.items() if field != "policy"})
    return dataclasses.replace(policy, name=name)


def file_name(policy: Policy, share: float | None) -> str:
    """Where a policy's samples are written."""
    budget = budget_of(policy)
    size = "" if budget is None else f"-{100 * share:g}%" if share else f"-{budget}"
    return urllib.parse.quote(policy.name, safe=" =+") + size + ".jsonl"


def parse_share(budget: str | int) -> float | None:
    """The share that a budget such as "25%" names, None for a number of slots.

    >>> parse_share("25%"), parse_share(64)
    (0.25, None)
    """
    text = str(budget).strip()
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if text.endswith("%") and 0 < value <= 100:
        return value / 100
    if text.isdigit() and value >= 1:
        return None
    raise ValueError(f'A budget is a number of slots, or a share of the mean length such as "25%"; got {budget!r}.')


def summarise(this: Run, base: Outcome | None, share: float | None, ks: Sequence[int] = (1,)) -> Outcome:
    """A run's figures, compared with those of the full cache (`base`; None for the full cache itself)."""
    count, stats, mean_tokens = len(this.is_right), this.stats, float(this.lengths.mean())
    passes = pass_figures(this.right, ks)
    before = this.right if base is None else np.array([c == "1" for c in base.right]).reshape(this.right.shape)
    low, high = wilson(int(this.is_right.sum()), count) if this.samples == 1 else passes["1"][1:]
    change, change_low, change_high = paired_change(this.right, before)
    return Outcome(
        policy=this.policy.name,
        settings=this.policy.definition,
        budget=budget_of(this.policy),
        share=share,
        problems=len(this.right),
        accuracy=float(this.is_right.mean()),
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
        right="".join(str(int(is_right)) for is_right in this.is_right),
        evicted=stats.evicted,
        compactions=stats.compactions,
        occupancy=stats.occupancy,
        tokens_per_second=stats.tokens_per_second,
        amsr=stats.amsr,
        final_amsr=stats.final_amsr,
        affected=stats.affected_ratio,
        sharing=stats.sharing,
        samples=this.samples,
        pass_at=passes,
    )


COLUMNS = (
    "policy",
    "budget",
    "accuracy (95 %)",
    "change",
    "tokens",
    "truncated",
    "KV kB",
    "of full",
    "peak MB",
    "AMSR",
    "affected",
    "evicted",
    "tok/s",
)


def cells_of(outcome: Outcome) -> tuple[str, ...]:
    """A line of the table, cell by cell."""
    o = outcome
    budget = "" if o.budget is None else f"{o.budget}" + (f" ({o.share:.0%})" if o.share else "")
    is_base = o.policy == "full"
    change = f"{100 * o.change:+.1f} ± {100 * (o.change_high - o.change):.1f}"
    if o.samples > 1:
        change = f"{100 * o.change:+.1f} ({100 * o.change_low:+.1f} to {100 * o.change_high:+.1f})"
    return (
        o.policy,
        budget,
        f"{o.accuracy:.1%} ({o.low:.1%} to {o.high:.1%})",
        *(f"{value:.1%} ({low:.1%} to {high:.1%})" for k, (value, low, high) in o.pass_at.items() if k != "1"),
        "" if is_base else change,
        f"{o.mean_tokens:.0f} (x{o.inflation:.2f})",
        f"{o.truncated:.1%}",
        f"{o.kv_bytes / 1e3:.0f}",
        f"{o.kv_share:.0%}",
        f"{o.peak_kv_bytes / 1e6:.1f}",
        f"{o.amsr:.1%}",
        f"{o.affected:.1%}",
        f"{o.evicted:.0f} in {o.compactions:.1f}",
        f"{o.tokens_per_second:.0f}",
    )


def table(outcomes: Sequence[Outcome], ks: Sequence[int] = (1,)) -> str:
    """A Markdown table; `ks` names the columns of pass@k while there are no outcomes."""
    named = [f"pass@{k} (95 %)" for k in (outcomes[0].pass_at if outcomes else map(str, ks))]
    names = [*COLUMNS[:2], *(named if len(named) > 1 else COLUMNS[2:3]), *COLUMNS[3:]]
    return markdown(names, map(cells_of, outcomes))


def write(outcomes: Sequence[Outcome], folder: Path, name: str, about: dict[str, Any], draws: bool = True) -> None:
    """The table, the figures and, if it `draws`, the picture, as `name`.md, .json and .png."""
    write_figures(outcomes, folder, name, about)
    write_text(folder / f"{name}.md", table(outcomes) + "\n")
    if draws:
        write_figure(folder / f"{name}.png", viz.frontier(outcomes, f"{name}, {outcomes[0].problems} problems"))


def write_figures(outcomes: Sequence[Outcome], folder: Path, name: str, about: dict[str, Any]) -> None:
    """The figures alone, and what they are of, as `name`.json."""
    write_json(folder / f"{name}.json", {"about": about, "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes]})


def read(path: Path, about: dict[str, Any], unsaid: dict[str, Any] | None = None) -> list[Outcome]:
    """The outcomes that an interrupted comparison wrote; none where there is no file. `unsaid` has what older files leave out.

    A file that is no JSON, which a failed disk may leave, is none, with a line on stderr: its figures come from the completions
    again.

    Raises:
      ValueError: they are of another comparison, or no outcomes.
    """
    if not path.exists():
        return []
    try:
        record = json.loads(path.read_bytes())
    except ValueError:
        print(f"jkv: {path} is damaged; its figures are computed from the completions again", file=sys.stderr)
        return []
    try:
        outcomes = [Outcome(**outcome) for outcome in record["outcomes"]]
        before = (unsaid or {}) | record["about"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} must hold outcomes that `jkv eval` wrote; got {error!r}. Give another --out.") from None
    now = json.loads(json.dumps(about))
    if before != now:
        differ = ", ".join(name for name in sorted({*before, *now}) if before.get(name) != now.get(name))
        raise ValueError(f"{path} holds another comparison, by {differ}. Give another --out, or leave --resume out.")
    return outcomes
