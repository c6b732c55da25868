"""What users of a server wait for, by the rate of requests and the policy.

A load of streamed completions with forced lengths, sent at random times of a given rate (`jkv.bench.load`). Policies have the
same prompts, lengths and arrivals, one load after another on the same server: `policy` and `budget` are fields of each request.
The requests of a policy are first sent all at once, uncounted, so that nothing compiles in its loads.

A request is good where its first token and the mean time from one token to the next lie within the limits; goodput counts
these alone.
"""

import asyncio
import contextlib
import math
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jkv.bench.load import Answer, poisson_arrivals, send_all
from jkv.evaluation.held_out import held_out
from jkv.policies import has_budget, make
from jkv.reports import Report, digits, footnote, markdown

SHARES = (0.5, 0.9, 0.99)
SHARES_OF_ENGINE = ("occupancy", "host_share", "idle_share")
COUNTERS = (
    "jkv:row_steps_total",
    "vllm:generation_tokens_total",
    "jkv:engine_seconds_total",
    "jkv:host_seconds_total",
    "jkv:between_steps_seconds_total",
    "jkv:idle_seconds_total",
)


def measure(
    *,
    url: str | None,
    model: str,
    policies: Sequence[str],
    budget: int,
    rates: Sequence[float],
    requests: int,
    new_tokens: int,
    rows: int,
    limits_ms: tuple[float, float],
    seed: int,
    seconds: float,
    key: str | None = None,
    report: Report = print,
) -> dict[str, Any]:
    """Loads at every rate and policy.

    Args:
      url: of a server; None starts one of `model` with `rows` rows, in a process of its own.
      model: what to serve.
      policies: names of `jkv.POLICIES`; those with a budget have `budget` slots.
      rates: requests a second; infinite: all at once.
      requests: of each load.
      new_tokens: the mean length of completions, which are from half of it to three halves.
      limits_ms: the most milliseconds to the first token, and from one token to the next, of a good request.
      seed: of arrivals and lengths.
      seconds: after which a request has failed.

    Raises:
      ValueError: an unknown policy; or the server cannot be reached or started, or serves no request of the warm-up.
    """
    chosen = {policy: {"budget": budget} if has_budget(policy) else {} for policy in policies}
    for policy, settings in chosen.items():
        make(policy, settings)
    records: list[dict[str, Any]] = []
    rng = np.random.default_rng(seed)
    lengths = rng.integers(max(1, new_tokens // 2), new_tokens + new_tokens // 2, requests, endpoint=True).tolist()
    prompts = [problem.prompt for problem in held_out(requests)]
    with contextlib.nullcontext(url.rstrip("/").removesuffix("/v1")) if url else started(model, rows, requests) as base:
        for policy, settings in chosen.items():
            fixed = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0}
            bodies = [
                {"prompt": prompt, "max_tokens": length, **fixed, "policy": policy, **settings}
                for prompt, length in zip(prompts, lengths, strict=True)
            ]
            load(base, bodies, np.zeros(requests), key, seconds, is_warm_up=True)
            for rate in rates:
                before, arrivals = counters(base), poisson_arrivals(rate, requests, seed)
                answers = load(base, bodies, arrivals, key, seconds)
                records.append({"policy": policy, "rate": None if math.isinf(rate) else rate})
                records[-1] |= figures(answers, arrivals, limits_ms) | engine_shares(before, counters(base))
                report(records[-1])
    given = {"url": url, "model": model, "budget": budget, "requests": requests, "new_tokens": new_tokens, "rows": rows}
    return given | {"limits_ms": list(limits_ms), "seed": seed, "records": records}


def load(
    base: str, bodies: Sequence[Any], arrivals: np.ndarray, key: str | None, seconds: float, is_warm_up: bool = False
) -> list[Answer]:
    """The answers of one load."""
    answers = asyncio.run(send_all(f"{base}/v1/completions", bodies, arrivals.tolist(), key, seconds))
    if is_warm_up and not any(answer.is_served for answer in answers):
        raise ValueError(f"{base} must serve completions; the first of {len(answers)} failed: {answers[0].error}")
    return answers


def figures(answers: Sequence[Answer], arrivals: np.ndarray, limits_ms: tuple[float, float]) -> dict[str, Any]:
    """Counts, rates and milliseconds of a load. Latencies are of the requests that were served.

    >>> one = Answer(first=0.1, last=0.2, end=0.2, gaps=[0.1], tokens=11, status=200)
    >>> two = Answer(status=429, error="full")
    >>> found = figures([one, two], np.array([0.0, 0.0]), (200.0, 20.0))
    >>> found["served"], found["refused"], found["good"], found["goodput"], found["first_token_ms"]
    (1, 1, 1, 5.0, [100.0, 100.0, 100.0])
    """
    served = [answer for answer in answers if answer.is_served]
    refused = sum(answer.is_refused for answer in answers)
    first, between = (limit / 1e3 for limit in limits_ms)
    good = sum((one.first or 0.0) <= first and one.per_token <= between for one in served)
    span = max(due + answer.end for due, answer in zip(arrivals.tolist(), answers, strict=True))
    tokens = sum(answer.tokens for answer in served)
    waits: dict[str, Sequence[float | None]] = {
        "first_token_ms": [one.first for one in served],
        "between_tokens_ms": [one.per_token for one in served],
        "between_events_ms": [gap for one in served for gap in one.gaps],
        "end_to_end_ms": [one.end for one in served],
        "late_ms": [one.late for one in answers],
    }
    return {
        "requests": len(answers),
        "served": len(served),
        "refused": refused,
        "failed": len(answers) - len(served) - refused,
        "good": good,
        "goodput": digits(good / span) if span else 0.0,
        "seconds": digits(span),
        "tokens": tokens,
        "tokens_per_second": digits(tokens / span) if span else 0.0,
        **{name: quantiles(values) for name, values in waits.items()},
    }


def quantiles(values: Sequence[float | None]) -> list[float] | None:
    """The median, p90 and p99 of seconds, in milliseconds; None without any."""
    return [digits(1e3 * float(value)) for value in np.quantile(np.array(values, float), SHARES)] if values else None


def counters(base: str) -> list[float] | None:
    """The engine's counters in `/metrics`; None where the server has none of them."""
    try:
        with urllib.request.urlopen(f"{base}/metrics", timeout=60) as answer:
            page = answer.read().decode()
    except OSError:
        return None
    found = [re.search(rf"^{name}\{{[^}}]*\}} (\S+)$", page, flags=re.MULTILINE) for name in COUNTERS]
    return [float(one[1]) for one in found if one] if all(found) else None


def engine_shares(before: list[float] | None, after: list[float] | None) -> dict[str, float | None]:
    """Shares during a load: of row steps that drew a token, of turns that did not wait for the device, and of the time with
    unfinished requests in which no device program was in flight.

    >>> engine_shares([0.0] * 6, [100.0, 80.0, 9.0, 3.0, 1.0, 0.5])
    {'occupancy': 0.8, 'host_share': 0.3333, 'idle_share': 0.15}
    """
    if before is None or after is None:
        return {"occupancy": None, "host_share": None, "idle_share": None}
    steps, used, seconds, host, between, idle = (end - begin for begin, end in zip(before, after, strict=True))
    return {
        "occupancy": digits(used / max(steps, 1)),
        "host_share": digits(host / max(seconds, 1e-9)),
        "idle_share": digits((idle + between) / max(seconds + between, 1e-9)),
    }


@contextlib.contextmanager
def started(model: str, rows: int, waiting: int, *options: str) -> Iterator[str]:
    """The address of a server in a process of its own, with more `options` of `jkv serve`, which ends with the block.

    Raises:
      ValueError: it does not start.
    """
    command = [sys.executable, "-m", "jkv", "serve", model, "--port", "0"]
    command += ["--max-running", str(rows), "--max-waiting", str(waiting), "--warm-up", "first", *options]
    environment = {name: value for name, value in os.environ.items() if name != "JKV_API_KEY"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"ready at (http://\S+)$", line.strip()):
                break
        else:
            raise ValueError(f"The server must start; it ended with: {''.join(lines[-3:]).strip()}")
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)  # a full pipe would stop the server
        yield found[1]
        process.terminate()
        process.wait(60)
        drain.wait(60)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


COLUMNS = (
    "policy",
    "requests/s",
    "served, refused, failed",
    "goodput/s",
    "tokens/s",
    "first token, ms: p50",
    "p90",
    "p99",
    "between tokens, ms: p50",
    "p90",
    "p99",
    "end, ms: p50",
    "p90",
    "p99",
    "occupancy",
    "host share",
    "device idle",
)


def table(record: dict[str, Any]) -> str:
    """One line for each policy and rate."""
    rows = [
        (
            one["policy"],
            "all at once" if one["rate"] is None else f"{one['rate']:g}",
            f"{one['served']}, {one['refused']}, {one['failed']}",
            f"{one['goodput']:.3g}",
            f"{one['tokens_per_second']:,.0f}",
            *milliseconds(one["first_token_ms"]),
            *milliseconds(one["between_tokens_ms"]),
            *milliseconds(one["end_to_end_ms"]),
            *("-" if one.get(name) is None else f"{one[name]:.0%}" for name in SHARES_OF_ENGINE),
        )
        for one in record["records"]
    ]
    first, between = record["limits_ms"]
    late = max((one["late_ms"][-1] for one in record["records"]), default=0.0)
    where = f"the server at {record['url']}" if record["url"] else f"a server of {record['model']} with {record['rows']} rows"
    lengths = f"{record['new_tokens'] // 2} to {record['new_tokens'] + record['new_tokens'] // 2} tokens"
    about = (
        f"{record['requests']} requests for {lengths} to {where}; a budget is {record['budget']} slots. Goodput: requests with "
        f"the first token within {first:g} ms and {between:g} ms from one token to the next. The client sent 99 % of the "
        f"requests at most {late:,.3g} ms late, which counts as waiting."
    )
    return f"{about}\n\n{markdown(COLUMNS, rows)}\n\n{footnote(record)}"


def milliseconds(values: Sequence[float] | None) -> list[str]:
    """Figures of a table; dashes without any."""
    return ["-"] * len(SHARES) if values is None else [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]
