"""A policy's answers to every problem: generated, graded, appended to a file as they finish, and summed up from its lines.

A line is one finished sample. An interrupted run resumes with the samples that have none: draws depend on seed, prompt, sample
and position alone, and the engine is sized for all of them, so what is left comes out as it would have. Each line has digests
of the model and the problems, and the options of the run (`made_of`); a run of anything else is refused. Figures of samples
(right, lengths, evictions) are therefore the same as in an uninterrupted run. Figures of the run (bytes held, occupancy, rate)
are weighted over its parts, and a part that was killed counts up to its last finished sample.
"""

import dataclasses
import json
import math
import urllib.parse
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jkv.checks import check_counts, counted, shown
from jkv.engine.backend import Backend
from jkv.engine.interrupts import deferred_interrupts
from jkv.engine.options import EngineOptions
from jkv.engine.prompts import encode_prompts
from jkv.engine.requests import Request, RequestOptions, check_sampling, make_requests, spread_policies
from jkv.engine.results import Result
from jkv.engine.stats import RunStats
from jkv.errors import refused
from jkv.evaluation.budgets import Budget
from jkv.evaluation.graders import Grader, grader_of
from jkv.evaluation.problems import Problem, tokens_of
from jkv.eviction import Policy
from jkv.generate import engine_for
from jkv.model.params import Model
from jkv.model.sampling import Sampling
from jkv.progress import progress_bar
from jkv.reasoning.sharing import SharingStats
from jkv.reports import append_text, is_json, json_lines, read_json_lines, write_text
from jkv.resuming import check_same, digest_of, plain
from jkv.statistics import ROUNDING

DEFAULT_NEW_TOKENS = 1024
NEW_FOLDER = "Give another --out to start anew, or what the run began with to go on with it."
Record = dict[str, Any]
PEAKS = "peak_kv_bytes", "peak_sentence_bytes"
FIELDS = ("problem", "sample", "prompt", "gold", "settings", "run")  # that a record is resumed by


@dataclasses.dataclass(frozen=True)
class Totals:
    """Memory, time and evictions of a run, from its lines; per sample where `jkv.engine.results.Stats` sums up."""

    evicted: float  # tokens a sample, averaged over layers and KV heads
    compactions: float  # a sample
    final_amsr: float
    affected_ratio: float
    kv_bytes_per_sample: float
    peak_kv_bytes: int
    peak_sentence_bytes: int
    occupancy: float
    tokens_per_second: float
    amsr: float
    sharing: dict[str, Any] | None


@dataclasses.dataclass(frozen=True)
class Run:
    """One policy's graded completions; samples of a problem follow each other."""

    policy: Policy
    samples: int  # of each problem
    is_right: np.ndarray
    is_touched: np.ndarray  # whether a sample lost a token, shared a page or left one unread
    lengths: np.ndarray
    finish_reason: list[str]
    stats: Totals
    seeds: int = 1  # of the policy's own draws, each with all samples

    @property
    def right(self) -> np.ndarray:
        """Which samples of each problem are right, seed by seed: [problems, seeds x samples] bool."""
        return self.is_right.reshape(-1, self.seeds * self.samples)

    @property
    def touched(self) -> np.ndarray:
        """Which samples of each problem were touched, seed by seed: [problems, seeds x samples] bool."""
        return self.is_touched.reshape(-1, self.seeds * self.samples)


def run(
    model: Model,
    problems: Sequence[Problem],
    policy: Policy | Sequence[Policy],
    *,
    grader: str = "boxed",
    samples: int = 1,
    sampling: Sampling | None = None,
    path: Path | None = None,
    max_new_tokens: int | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Run:
    """Every sample of every problem under a policy, or under the version of it for each problem, which differ by their budgets.

    `sampling` None is greedy, `options` size the engine.

    With a `path`, every finished sample is a line there, and those that it has already are not generated again, if they are of
    the same model (by digests of weights, configuration and tokenizer), problems, draws, limits and options. A policy that
    shares pages starts over unless it is complete: its filter's figures exist for whole runs only.

    Raises:
      ValueError: lines of another model, other problems, draws or options, or another policy; or draws that could not be
        repeated.
      KeyboardInterrupt: Ctrl-C ended it early; what is finished is written.
    """
    check_counts(samples=samples)
    judge, draws = grader_of(grader), check_sampling(sampling)
    if samples > 1 and draws.temperature == 0:
        rule = f"Greedy samples are all the same; got {samples} of them. Set a temperature, or samples to 1."
        raise refused(rule, samples="conflict")
    if path is not None and draws.temperature > 0 and draws.seed is None:
        raise refused("A run that is written to be resumed needs a seed; got None. Give sampling one.", sampling="missing")
    prompts = encode_prompts(model, [tokens_of(model, problem) for problem in problems])
    if max_new_tokens is None:
        max_new_tokens = default_limit(model, prompts)
    kv_format = EngineOptions(kv_dtype=options.get("kv_dtype"), page_size=options.get("page_size")).kv_format
    policies = spread_policies(policy, len(problems), model.params, kv_format)
    policy = policies[0]
    asked = RequestOptions(policy=policies, sampling=draws, n=samples, max_new_tokens=max_new_tokens)
    requests = make_requests(model, prompts, asked)
    origin: dict[str, Any] = {}
    if path is not None:
        origin = made_of(model, problems, prompts, draws, grader=grader, max_new_tokens=max_new_tokens, **options)
    records = [] if path is None else take_up(path, problems, policies, samples, origin)
    if policy.share and len(records) < len(problems) * samples:
        records = []
    done = {(record["problem"], record["sample"]) for record in records}
    left = [(i, j) for i in range(len(problems)) for j in range(samples) if (i, j) not in done]
    part = 1 + max((record["run"]["part"] for record in records), default=-1)
    if left:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json_lines(records))
        with engine_for(model, requests, EngineOptions().changed(options)) as engine:

            def keep(i: int, j: int, out: Result) -> None:
                record = record_of(policies[i], problems[i], i, j, out, judge)
                record |= {"made_of": origin, "run": figures_of_part(engine, part, policy)}
                records.append(record)
                if path is not None:
                    append_text(path, json_lines([record]))

            finish(engine, [(i, j, requests[i][j]) for i, j in left], keep, progress)
        if policy.name == "full":
            warn_if_none_is_right(records)
    return sum_up(policy, records, samples)


def made_of(
    model: Model, problems: Sequence[Problem], prompts: Sequence[Any], draws: Sampling, **settings: Any
) -> dict[str, Any]:
    """What samples are of, apart from their policy: the model, the problems as the model reads them, the draws and settings."""
    chosen = dict.fromkeys(("max_running", "page_size", "kv_memory", "kv_dtype")) | settings
    return {**model.digests, "data": data_digest(problems, prompts)} | plain(dataclasses.asdict(draws) | chosen)


def data_digest(problems: Sequence[Problem], prompts: Sequence[Any]) -> str:
    """Identifies problems by their texts, their gold answers and the token ids of their prompts."""
    pairs = zip(problems, prompts, strict=True)
    return digest_of([(one.prompt, one.answer, np.asarray(prompt).tolist()) for one, prompt in pairs])


def default_limit(model: Model, prompts: Sequence[Any]) -> int:
    """New tokens of each problem if no limit is given: the same for every policy, whatever the memory."""
    return min(DEFAULT_NEW_TOKENS, max(1, model.config.max_positions - max(map(len, prompts))))


def warn_if_none_is_right(records: Sequence[Record]) -> None:
    """Warns where the full cache answers nothing right: gold answers may have another form than the model's."""
    if any(record["right"] for record in records):
        return
    first = records[0]
    read = "no answer is found in it" if first["answer"] is None else f"its answer is read as {first['answer']!r}"
    warnings.warn(
        f"The full cache answers none of {counted(len(records), 'sample')} right. The first ends in {first['text'][-80:]!r}; "
        f"{read}, and the gold answer is {first['gold']!r}. Look at the grader, the prompt and the limit of new tokens.",
        stacklevel=2,
    )


def finish(
    engine: Backend,
    left: Sequence[tuple[int, int, Request]],
    keep: Callable[[int, int, Result], None],
    progress: bool | None,
) -> None:
    """Runs the samples that are left, and passes each to `keep` when it is finished.

    Raises:
      KeyboardInterrupt: Ctrl-C was pressed, any number of times; `keep` has had every finished sample.
    """
    waiting = {engine.submit_requests([request]): (i, j) for i, j, request in left}
    with deferred_interrupts(ends_here=True) as presses, progress_bar(len(left), progress) as show:
        while not engine.is_idle:
            events = engine.step()
            show(events)
            for event in events:
                if event.finish_reason:
                    out = engine.result(event.ticket)
                    if (error := out.samples[0].error) is not None:
                        raise error
                    keep(*waiting.pop(event.ticket), out)
            if presses:
                raise KeyboardInterrupt


def record_of(policy: Policy, problem: Problem, index: int, sample: int, out: Result, judge: Grader) -> Record:
    """One finished sample."""
    assert out.text is not None
    text, stats = out.text[0], out.samples[0]
    return {
        "policy": policy.name,
        "settings": policy.definition,
        "budget": budget_of(policy),
        "problem": index,
        "sample": sample,
        "prompt": problem.prompt,
        "text": text,
        "answer": judge.read(text),
        "gold": problem.answer,
        "right": judge(text, problem.answer),
        "tokens": stats.num_tokens,
        "prompt_tokens": len(out.prompts[0]),
        "finish_reason": out.finish_reason[0],
        "evicted": stats.evicted,
        "compactions": stats.compactions,
        "shared": stats.shared,
        "saved": stats.saved,
        "peak_kv_bytes": stats.peak_kv_bytes,
    }


def budget_of(policy: Policy) -> int | None:
    """Slots for each layer and KV head that a policy keeps, or reads; None where it has no budget."""
    return policy.read.budget if policy.read else policy.budget


def file_name(policy: Policy, size: Budget, seed: int | None = None) -> str:
    """Where a policy's samples are written."""
    budget = budget_of(policy)
    share = "" if size.share is None else f"-{100 * size.share:g}%" + "-each" * size.is_each
    slots = "" if budget is None else share or f"-{budget}"
    return urllib.parse.quote(policy.name, safe=" =+") + slots + ("" if seed is None else f"-seed{seed}") + ".jsonl"


def take_up(
    path: Path, problems: Sequence[Problem], policies: Sequence[Policy], samples: int, origin: dict[str, Any]
) -> list[Record]:
    """The finished samples of an interrupted run; a last line that was cut off is dropped, with a line on stderr.

    Raises:
      ValueError: a line that is no record, one of another run (by `made_of`), policy, problem or sample, or one that is there
        twice.
    """
    records, seen = read_records(path), set()
    for number, record in enumerate(records, 1):
        index, place = record["problem"], (record["problem"], record["sample"])
        if type(index) is not int or not 0 <= index < len(problems):
            differ = ["problem"]
        else:
            known = {"prompt": problems[index].prompt, "gold": problems[index].answer, "settings": policies[index].definition}
            differ = [name for name, value in known.items() if record[name] != value]
        if differ:
            raise refused(
                f"{path} must hold samples of the same problems and policy; line {number} is of others, by "
                f"{', '.join(differ)}. {NEW_FOLDER}",
                path="conflict",
            )
        check_same(f"Line {number} of {path} is of another run", record.get("made_of", {}), origin, NEW_FOLDER)
        if type(record["sample"]) is not int or not 0 <= record["sample"] < samples:
            raise refused(
                f"{path} must hold samples below {samples} of each problem; line {number} has {shown(record['sample'])}. "
                "Ask for more samples, or give another --out.",
                path="conflict",
            )
        if place in seen:
            rule = f"{path} must hold each sample once; line {number} repeats one. Remove the line, or the file."
            raise refused(rule, path="invalid")
        seen.add(place)
    return records


def check_first_lines(folder: Path, origin: dict[str, Any]) -> None:
    """Refuses a folder of completions whose files begin with a line of another run, before anything is generated.

    Raises:
      ValueError: what differs; `kv_dtype` may, which a variant may set.
    """
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as file:
            line = file.readline()
        record = json.loads(line) if is_json(line) else None  # `take_up` reports what is no record
        if isinstance(record, dict):
            what = f"Line 1 of {path} is of another run"
            check_same(what, record.get("made_of", {}), origin, NEW_FOLDER, free=("kv_dtype",))


def read_records(path: Path) -> list[Record]:
    """The records of a file of generations, none where there is no file.

    Raises:
      ValueError: a line, other than a last one that was cut off, that is no record.
    """
    if not path.exists():
        return []
    what = "a sample that `jkv eval` wrote"
    return read_json_lines(path, FIELDS, what=what, fix="Remove the file.", drops_cut_line=True)


def figures_of_part(engine: Backend, part: int, policy: Policy) -> dict[str, Any]:
    """What the engine of this part of a run did so far."""
    names = "kv_bytes_per_sample", "sample_chunks", "peak_kv_bytes", "peak_sentence_bytes", "tokens", "row_steps", "seconds"
    known = dataclasses.asdict(dataclasses.replace(engine.stats, sharing=SharingStats()))
    figures = {"part": part} | {name: known[name] for name in (*names, "amsr", "steps")}
    if policy.share and engine.is_idle:
        figures["sharing"] = figures_of_sharing(engine.stats)
    return figures


def sum_up(policy: Policy, records: Sequence[Record], samples: int) -> Run:
    """A complete run, from its lines in the order in which they came."""
    parts = list({record["run"]["part"]: record["run"] for record in records}.values())  # the last of each

    def total(name: str) -> int | float:
        return sum(part[name] for part in parts)

    def weighted(name: str, weight: str) -> float:
        return sum(part[name] * part[weight] for part in parts) / max(total(weight), 1)

    rows = sorted(records, key=lambda record: (record["problem"], record["sample"]))
    count, touched = len(rows), sum(row["evicted"] + row["shared"] for row in rows)
    stats = Totals(
        evicted=sum(row["evicted"] for row in rows) / count,
        compactions=sum(row["compactions"] for row in rows) / count,
        final_amsr=sum(row["saved"] for row in rows) / max(sum(row["tokens"] > 0 for row in rows), 1),
        affected_ratio=touched / sum(row["prompt_tokens"] + row["tokens"] for row in rows),
        kv_bytes_per_sample=weighted("kv_bytes_per_sample", "sample_chunks"),
        peak_kv_bytes=max(part["peak_kv_bytes"] for part in parts),
        peak_sentence_bytes=max(part["peak_sentence_bytes"] for part in parts),
        occupancy=total("tokens") / max(total("row_steps"), 1),
        tokens_per_second=total("tokens") / max(total("seconds"), 1e-9),
        amsr=weighted("amsr", "steps"),
        sharing=parts[-1].get("sharing"),
    )
    return Run(
        policy=policy,
        samples=samples,
        is_right=np.array([row["right"] for row in rows]),
        is_touched=np.array([row["evicted"] > 0 or row["shared"] > 0 or row["saved"] > ROUNDING for row in rows]),
        lengths=np.array([row["tokens"] for row in rows], np.int32),
        finish_reason=[row["finish_reason"] for row in rows],
        stats=stats,
    )


def joined(runs: Sequence[Run]) -> Run:
    """The runs of one policy with several seeds as one: figures are means, peaks maxima, sharing's the first run's."""
    first, totals = runs[0], [run.stats for run in runs]

    def by_problem(name: str) -> np.ndarray:
        return np.stack([np.reshape(getattr(run, name), (-1, first.samples)) for run in runs], axis=1).reshape(-1)

    names = [field.name for field in dataclasses.fields(Totals) if field.name not in ("sharing", *PEAKS)]
    means: Any = {name: float(np.mean([getattr(one, name) for one in totals])) for name in names}
    peaks = {name: max(getattr(one, name) for one in totals) for name in PEAKS}
    return Run(
        policy=first.policy,
        samples=first.samples,
        is_right=by_problem("is_right"),
        is_touched=by_problem("is_touched"),
        lengths=by_problem("lengths"),
        finish_reason=by_problem("finish_reason").tolist(),
        stats=Totals(**means, **peaks, sharing=first.stats.sharing),
        seeds=len(runs),
    )


def figures_of_sharing(stats: RunStats) -> dict[str, Any]:
    """Counts, rates, latencies in milliseconds, and a histogram of the candidates' distances."""
    sharing = stats.sharing
    counted, candidates = dataclasses.asdict(sharing.filter), sharing.candidates
    rule = next(iter(sharing.thresholds.values()), None)  # one policy, one rule
    count, edges = np.histogram(rule.distances if rule and rule.distances else [0.0], bins=20)
    return counted | {
        "shifted": sharing.shifted,
        "empty_slots": sharing.empty_slots,
        "candidates": candidates,
        "shared": sharing.shared,
        "deferred": sharing.deferred,
        "accept_rate": sharing.accept_rate,
        "threshold": rule.value if rule and rule.value is not None and math.isfinite(rule.value) else None,
        "median_relative_distance": float(np.median(rule.relative)) if rule and rule.relative else None,
        "filter_ms_per_step": 1e3 * sharing.filter_seconds / max(sharing.filter.steps, 1),
        "filter_waits": sharing.filter_waits,
        "measure_ms_per_candidate": 1e3 * sharing.measure_seconds / max(candidates, 1),
        "histogram": {"count": count.tolist(), "edges": [round(float(edge), 6) for edge in edges]} if candidates else None,
    }
