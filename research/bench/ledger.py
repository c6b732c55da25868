"""Where the numbers of rollouts and trainers part: the same tokens' log-probabilities, computed in every way that we have.

Samples are drawn in one batch. Then each way computes their log-probabilities again: the engine with the tokens forced, in a
batch and one by one, with compiled kernels and in plain XLA; the replay of the trace, all rows in groups and as a trainer's
batch, padded and packed; and the full cache. In one dtype the ways differ by the order of their sums alone, but for the full
cache, which reads what was evicted.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jkv
from jkv.bench.fixtures import usual_page_size
from jkv.bench.speculate import texts_of
from jkv.checks import check_known
from jkv.engine.engine import Engine
from jkv.engine.results import Result
from jkv.evaluation.variants import takes_budget
from jkv.eviction import Policy
from jkv.model.params import Model
from jkv.model.sampling import Sampling
from jkv.policies import make
from jkv.replay.score import score
from jkv.reports import Report, digits, footnote, markdown
from jkv.rl import Batch, log_probs, make_batch
from jkv.rl.mismatch import figures_of

DRAWN = Sampling(seed=0)
ROWS = 8
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class Drawn(NamedTuple):
    """A model, a policy, and what they drew."""

    model: Model
    policy: Policy
    out: Result


def draw(model: Model, policy: Policy, new_tokens: int) -> Drawn:
    """Samples of `ROWS` prompts."""
    texts = [text for texts in texts_of(model).values() for text in texts]
    prompts, page_size = [texts[i % len(texts)] for i in range(ROWS)], usual_page_size()
    settings: Any = {"max_running": ROWS, "page_size": page_size, "return_trace": True, "progress": False}
    return Drawn(
        model, policy, jkv.generate(model, prompts, policy=policy, sampling=DRAWN, max_new_tokens=new_tokens, **settings)
    )


def forced(drawn: Drawn, max_running: int, kernels: str | None = None) -> np.ndarray:
    """Those of an engine that decodes the same tokens."""
    out = drawn.out
    longest = max(len(prompt) + int(length) for prompt, length in zip(out.prompts, out.lengths, strict=True))
    sizes: Any = {"max_slots": longest + 8, "page_size": usual_page_size(), "kernels": kernels}
    engine = Engine(drawn.model, max_running=max_running, policies=[drawn.policy], **sizes)
    found = np.zeros(out.tokens.shape, np.float32)
    tickets = []
    for prompt, tokens, length in zip(out.prompts, out.tokens, out.lengths, strict=True):
        of_row: Any = {"forced_tokens": tokens[:length].tolist(), "stop_ids": ()}
        tickets.append(engine.submit(prompt, drawn.policy, DRAWN, int(length), **of_row))
    engine.run()
    for row, ticket in enumerate(tickets):
        of_row = engine.result(ticket).logprobs[0]
        found[row, : len(of_row)] = of_row
    return found


def trained(drawn: Drawn, pack: int | None = None) -> np.ndarray:
    """Those of a trainer's batch."""
    out = drawn.out
    batch: Batch = make_batch(out, np.zeros(len(out.lengths)), replay=True, pack=pack)
    of_tokens = np.asarray(jax.jit(log_probs)(drawn.model.params, batch), np.float32)
    found = np.zeros(out.tokens.shape, np.float32)
    for row, (prompt, length) in enumerate(zip(out.prompts, out.lengths, strict=True)):
        found[row, :length] = of_tokens[row, len(prompt) : len(prompt) + int(length)]
    return found


def packed(drawn: Drawn) -> np.ndarray:
    """Those of a batch with several sequences in a row."""
    totals = [len(prompt) + int(length) for prompt, length in zip(drawn.out.prompts, drawn.out.lengths, strict=True)]
    return trained(drawn, pack=2 * max(totals))


WAYS: Mapping[str, Callable[[Drawn], np.ndarray]] = {
    "engine, the same batch": lambda drawn: forced(drawn, ROWS),
    "engine, one by one": lambda drawn: forced(drawn, 1),
    "engine, the same batch, plain XLA": lambda drawn: forced(drawn, ROWS, "reference"),
    "replay": lambda drawn: np.asarray(score(drawn.model, drawn.out, trace=drawn.out.trace).logprobs),
    "replay, one by one": lambda drawn: np.asarray(score(drawn.model, drawn.out, trace=drawn.out.trace, max_tokens=1).logprobs),
    "replay in a trainer's batch": trained,
    "replay in a packed batch": packed,
    "full cache": lambda drawn: np.asarray(score(drawn.model, drawn.out).logprobs),
}


def measure(
    models: Sequence[str],
    policies: Sequence[str],
    budget: int,
    interval: int,
    new_tokens: int,
    dtypes: Sequence[str],
    report: Report = print,
) -> dict[str, Any]:
    """Each way against the draws, by model, dtype and policy; `budget` and `interval` are of policies that take them.

    Raises:
      ValueError: an unknown dtype, model or policy.
    """
    for dtype in dtypes:
        check_known(DTYPES, dtypes=dtype)
    settings, records = {"budget": budget, "interval": interval}, []
    named = [make(name, settings if takes_budget(name, {}) else {}) for name in policies]
    for name in models:
        for dtype in dtypes:
            model = jkv.load(name, dtype=DTYPES[dtype])
            for policy in named:
                drawn = draw(model, policy, new_tokens)
                mask = np.arange(drawn.out.tokens.shape[1]) < drawn.out.lengths[:, None]
                for way, compute in WAYS.items():
                    difference = (compute(drawn).astype(np.float64) - drawn.out.logprobs)[mask]
                    figures = figures_of(difference)
                    records.append(
                        {"model": model.name, "dtype": dtype, "policy": policy.name, "way": way, "tokens": int(mask.sum())}
                        | {"equal_bits": digits(float((difference == 0).mean())), "k3": digits(figures.k3)}
                        | {"p99": digits(float(np.percentile(np.abs(difference), 99)))}
                        | {"largest": digits(figures.max_difference), "overlap": digits(figures.overlap)}
                    )
                    report(records[-1])
    setting = {"budget": budget, "interval": interval, "new_tokens": new_tokens, "rows": ROWS}
    return setting | {"records": records}


def table(record: dict[str, Any]) -> str:
    """A row for each way, by model, dtype and policy."""
    head = "model", "dtype", "policy", "log-probabilities of", "equal bits", "99th percentile", "largest", "KL a token"
    rows = [
        (
            *(one[name] for name in ("model", "dtype", "policy", "way")),
            f"{one['equal_bits']:.0%}",
            *(f"{one[name]:.0e}" for name in ("p99", "largest", "k3")),
        )
        for one in record["records"]
    ]
    caption = (
        f"Against the log-probabilities that {record['rows']} samples of up to {record['new_tokens']} tokens were drawn with, "
        f"temperature 1, in one batch; budgets of {record['budget']} slots. Differences in nats; KL is the mean of "
        "rho - 1 - log rho, in nats."
    )
    return f"{caption}\n\n{markdown(head, rows)}\n\n{footnote(record)}"
