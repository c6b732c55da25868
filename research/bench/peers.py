"""`jkv` beside transformers and kvpress: the same weights, prompts, budgets and cores, each in a process of its own, in turns.

Speed is of forced lengths, prompts as they are (padded on the left where a library needs it): full caches at several batch
sizes, then one budget. tiny-reasoner's prompts are problems of its task, and its accuracy is that of answers to their own end.
Another model's are questions in its chat template, and only its speed is measured. transformers and kvpress run with the
attention, and the cache, that a trial in the same run found fastest; the trial is kept in the record. Time is a whole call's,
prefill, sampling and host included, after one call that compiles and counts for nothing. Cache bytes are those of keys and
values that a library really held at its peak, by sequence; the process's peak memory is the system's account.
"""

import contextlib
import functools
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jkv.bench import speculate
from jkv.bench.rounds import in_turns, median_and_spread
from jkv.checkpoints import loading as checkpoint
from jkv.checks import install
from jkv.engine.prompts import encode_prompts
from jkv.evaluation.chains import read_answer
from jkv.evaluation.held_out import held_out
from jkv.reports import Report, digits, footnote, markdown
from research.bench.peer_worker import Tokens

NEEDED = {"jkv": "jax", "transformers": "torch", "kvpress": "kvpress"}  # packages, by contender
PRESSES = {"SnapKV": "snap_kv", "KeyDiff": "key_diff", "Knorm": "knorm"}  # the same method here
LONGEST = 1024  # tokens of an answer
GUESSES = 3  # a step, by `jkv.ngram` and by prompt lookup
TASK = "tiny-reasoner"  # whose answers can be graded
SUBJECTS = (
    "the tides",
    "a prime number",
    "fermentation",
    "a KV cache",
    "the French Revolution",
    "a rainbow",
    "inflation",
    "bees",
)
QUESTIONS = ("What is {}?", "Why does {} matter?", "Explain {} to a child.", "Write a short story about {}.")


class Entry(NamedTuple):
    """One library with one method, and what it is to do."""

    library: str
    method: str
    job: dict[str, Any]


class Process:
    """A contender that waits for jobs."""

    def __init__(self, library: str, model: str) -> None:
        self.library = library
        command = [sys.executable, "-m", "research.bench.peer_worker", library, model]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """What a job took.

        Raises:
          RuntimeError: the library failed.
        """
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        print(json.dumps(job), file=self.child.stdin, flush=True)
        line = self.child.stdout.readline()
        answer = json.loads(line) if line else {"error": f"it ended with status {self.child.wait()}"}
        if "error" in answer:
            raise RuntimeError(f"{self.library} failed: {answer['error']}")
        return answer


@contextlib.contextmanager
def processes(libraries: Sequence[str], model: str) -> Iterator[dict[str, Process]]:
    """A process for each library, with a model; ended with the block."""
    if unknown := sorted(set(libraries) - set(NEEDED)):
        raise ValueError(f"contenders are {', '.join(NEEDED)}; got {', '.join(unknown)}.")
    if missing := [name for name in libraries if importlib.util.find_spec(NEEDED[name]) is None]:
        raise ValueError(
            f"{', '.join(missing)} cannot take part: not installed. Run: {install('peers')}, or leave "
            "them out with --contenders."
        )
    running = {name: Process(name, model) for name in dict.fromkeys(["jkv", *libraries])}
    try:
        yield running
    finally:
        for one in running.values():
            one.child.terminate()
            one.child.wait()


def measure(
    libraries: Sequence[str],
    models: Sequence[str],
    batches: Sequence[int],
    budget_batches: Sequence[int],
    new_tokens: int,
    problems: int,
    settings: Mapping[str, int],
    rounds: int,
    report: Report = print,
) -> dict[str, Any]:
    """Each model's speed with full caches at `batches`, and at a budget (`settings`) at `budget_batches`; the task's accuracy.

    Raises:
      ValueError: an unknown library, or one that is not installed.
      FileNotFoundError: an unknown model.
    """
    records: list[dict[str, Any]] = []
    trials: list[dict[str, Any]] = []
    for model in models:
        loaded = checkpoint.load(model)
        chosen = held_out(max(problems, *budget_batches, *batches)) if model == TASK else []
        asked = [problem.prompt for problem in chosen] or questions(max(*budget_batches, *batches))
        prompts = [list(map(int, prompt)) for prompt in encode_prompts(loaded, asked)]
        with processes(libraries, model) as running:
            fastest, tried = try_variants(running, prompts, new_tokens, settings)
            trials += [{"model": loaded.name, **one} for one in tried]
            every_full = full_entries(running, fastest)
            every_budget = budget_entries(running, fastest, settings)
            groups = [(f"full cache, batch {count}", count, every_full) for count in batches]
            # kvpress decodes one sequence at a time: a batch of a larger model would take it half an hour.
            sizes = budget_batches if model == TASK else [min(budget_batches)]
            groups += [(f"budget {settings['budget']}, batch {count}", count, every_budget) for count in sizes]
            for group, count, entries in groups:
                common = {"prompts": prompts[:count], "new_tokens": new_tokens, "forced": True}
                records += compared(running, entries, common, rounds, {"model": loaded.name, "group": group}, report)
            texts = [list(map(int, one)) for one in encode_prompts(loaded, next(iter(speculate.texts_of(loaded).values()))[:4])]
            common, about = {"prompts": texts, "new_tokens": new_tokens, "forced": True}, {"group": "guesses, one by one"}
            entries = guess_entries(running, fastest)
            records += compared(running, entries, common, rounds, {"model": loaded.name} | about, report)
            if chosen:
                common = {"prompts": prompts[:problems], "new_tokens": LONGEST, "forced": False}
                about = {"model": loaded.name, "group": f"{problems} problems"}
                grade = functools.partial(share_right, problems=chosen[:problems], tokenizer=loaded.tokenizer)
                records += compared(running, [*every_full, *every_budget], common, 1, about, report, grade)
    setting = {"new_tokens": new_tokens, "problems": problems, "settings": dict(settings), "rounds": rounds, "trials": trials}
    return setting | {"records": records}


def compared(
    running: Mapping[str, Process],
    entries: Sequence[Entry],
    common: Mapping[str, Any],
    rounds: int,
    about: Mapping[str, str],
    report: Report,
    grade: Callable[[Tokens], float] | None = None,
) -> list[dict[str, Any]]:
    """The records of one group of entries, compared with `jkv`'s; graded where there is something to grade."""
    records = []
    for figures in contest(running, entries, common, rounds):
        accuracy = {} if grade is None else {"accuracy": grade(figures["tokens"])}
        records.append({**about, "batch": len(common["prompts"])} | figures | accuracy)
    compare_with_first(records)
    for record in records:
        report(record)
    return records


def questions(count: int) -> list[list[dict[str, str]]]:
    """Conversations of one question each."""
    texts = [question.format(subject) for question in QUESTIONS for subject in SUBJECTS]
    return [[{"role": "user", "content": text}] for text in (texts * (-(-count // len(texts))))[:count]]


def try_variants(
    running: Mapping[str, Process], prompts: Sequence[list[int]], new_tokens: int, settings: Mapping[str, int]
) -> tuple[dict[str, dict[str, str]], list[dict[str, Any]]]:
    """The fastest way to run each peer here, and what every way took."""
    variants = {
        "transformers": [{"attention": a, "cache": c} for a in ("sdpa", "eager") for c in ("dynamic", "static")],
        "kvpress": [{"attention": a} for a in ("sdpa", "eager")],
    }
    fastest, trials = {}, []
    for library in (name for name in variants if name in running):
        count = 8 if library == "transformers" else 1
        job = {"prompts": prompts[:count], "new_tokens": new_tokens, "forced": True, "press": "Knorm", "settings": settings}
        calls = {i: functools.partial(running[library].do, job | one) for i, one in enumerate(variants[library])}
        taken = {i: min(one["seconds"] for one in answer) for i, answer in in_turns(calls, 2).items()}
        fastest[library] = variants[library][min(taken, key=lambda i: taken[i])]
        trials += [{"library": library, **variants[library][i], "seconds": digits(value)} for i, value in taken.items()]
    return fastest, trials


def full_entries(running: Mapping[str, Process], fastest: Mapping[str, dict[str, str]]) -> list[Entry]:
    """Full caches."""
    peers = [Entry("transformers", "full", dict(fastest["transformers"]))] if "transformers" in running else []
    return [Entry("jkv", "full", {"policy": "full"}), *peers]


def guess_entries(running: Mapping[str, Process], fastest: Mapping[str, dict[str, str]]) -> list[Entry]:
    """Full caches on texts that repeat themselves, one after the other, without guesses and with them."""
    entries = []
    for method, guesses in (("full", {}), ("full, guesses", {"guesses": GUESSES})):
        entries.append(Entry("jkv", method, {"policy": "full", "alone": True} | guesses))
        if "transformers" in running:  # whose prompt lookup takes back what was wrong, which no static cache can
            attention = fastest["transformers"]["attention"]
            entries.append(Entry("transformers", method, {"attention": attention, "cache": "dynamic", "alone": True} | guesses))
    return entries


def budget_entries(
    running: Mapping[str, Process], fastest: Mapping[str, dict[str, str]], settings: Mapping[str, int]
) -> list[Entry]:
    """Caches of one budget: each method of kvpress and the same one here, R-KV beside them."""
    windowed, plain = dict(settings), {name: settings[name] for name in ("budget", "interval")}
    entries = [Entry("jkv", "r_kv", {"policy": "r_kv", "settings": windowed})]
    for press, policy in PRESSES.items():
        own = windowed if policy == "snap_kv" else plain
        entries.append(Entry("jkv", policy, {"policy": policy, "settings": own}))
        if "kvpress" in running:
            # With eager attention its SnapKV looks at the last query alone, which is another method.
            attention = {"attention": "sdpa"} if press == "SnapKV" else fastest["kvpress"]
            entries.append(Entry("kvpress", press, {"press": press, "settings": windowed} | attention))
    return entries


def contest(
    running: Mapping[str, Process], entries: Sequence[Entry], common: Mapping[str, Any], rounds: int
) -> Iterator[dict[str, Any]]:
    """Each entry's figures, the entries in turns after a call of each that records what its caches held."""
    held = {}
    for i, entry in enumerate(entries):
        first = dict(common) | entry.job | {"records": True}
        if entry.library == "kvpress" or entry.job.get("alone"):  # one sequence at a time: the first one warms it
            first["prompts"] = first["prompts"][:1]
        answer = running[entry.library].do(first)
        at_a_time = len(first["prompts"])
        held[i] = answer["kv_bytes"] / at_a_time
    calls = {i: functools.partial(running[one.library].do, dict(common) | one.job) for i, one in enumerate(entries)}
    for i, runs in in_turns(calls, rounds, warm_up=False).items():
        rate, spread = median_and_spread([sum(map(len, one["tokens"])) / one["seconds"] for one in runs])
        yield {
            "library": entries[i].library,
            "method": entries[i].method,
            "job": entries[i].job,
            "tokens_per_second": digits(rate),
            "spread": spread,
            "kv_bytes_per_sequence": round(held[i]),
            "peak_rss": max(one["peak_rss"] for one in runs),
            "mean_tokens": digits(sum(map(len, runs[-1]["tokens"])) / len(runs[-1]["tokens"])),
            "tokens": runs[-1]["tokens"],
        }


def compare_with_first(records: list[dict[str, Any]]) -> None:
    """Adds how much faster `jkv` is than each peer by the same method, and how many tokens are the same; drops the tokens."""
    own = {record["method"]: record for record in records if record["library"] == "jkv"}
    for record in records:
        same = own[PRESSES.get(record["method"], record["method"])]
        pairs = [(a, b) for x, y in zip(record["tokens"], same["tokens"], strict=True) for a, b in zip(x, y, strict=False)]
        if record["library"] != "jkv":
            record["jkv_times_faster"] = digits(same["tokens_per_second"] / record["tokens_per_second"])
            record["equal_tokens"] = digits(sum(a == b for a, b in pairs) / len(pairs))
    for record in records:
        del record["tokens"]


def share_right(tokens: Sequence[Sequence[int]], problems: Sequence[Any], tokenizer: Any) -> float:
    """The share of completions whose boxed answer is the problem's."""
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in tokens]
    return sum(read_answer(text) == problem.answer for text, problem in zip(texts, problems, strict=True)) / len(problems)


COLUMNS = (
    "model",
    "what",
    "library",
    "method",
    "tokens/s",
    "`jkv` times faster",
    "cache kB a sequence",
    "process MB",
    "right",
    "equal tokens",
)


def table(record: dict[str, Any]) -> str:
    """Contenders by group; `jkv` is compared by the same method in the same group."""
    rows = [
        (
            one["model"],
            one["group"],
            one["library"],
            one["method"],
            f"{one['tokens_per_second']:,.0f} ± {one['spread'] / 2:.0%}",
            f"{one['jkv_times_faster']:.2f}" if "jkv_times_faster" in one else "",
            f"{one['kv_bytes_per_sequence'] / 1e3:,.0f}",
            f"{one['peak_rss'] / 1e6:,.0f}",
            f"{one['accuracy']:.0%}" if "accuracy" in one else "",
            f"{one['equal_tokens']:.0%}" if "equal_tokens" in one else "",
        )
        for one in record["records"]
    ]
    settings = record["settings"]
    caption = (
        f"float32, greedy; {record['new_tokens']} forced tokens a sequence, or {record['problems']} "
        f"problems to their end. Budget {settings['budget']} slots and {settings['interval']} between compactions, for all. "
        "kvpress decodes one sequence at a time. Equal tokens are those at the same place as `jkv`'s by the same method."
    )
    tried = "; ".join(
        f"{one['model']} {one['library']} {one['attention']}{' ' + one['cache'] if 'cache' in one else ''} {one['seconds']} s"
        for one in record["trials"]
    )
    trial = f"Tried first, the fastest taken: {tried}.\n\n" if tried else ""
    return f"{caption}\n\n{markdown(COLUMNS, rows)}\n\n{trial}{footnote(record)}"
