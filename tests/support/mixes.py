"""Random engine traffic and the expected result of each request, for the tests and `tests.support.soak`."""

import dataclasses
from typing import Any

import jax
import numpy as np

import jkv
from jkv.cache.pool import BlockTable
from jkv.engine.engine import Engine
from jkv.engine.row import Place
from jkv.testing import TinyTokenizer, random_gate, tiny_model
from tests.cache.test_pool import assert_allocator_is_consistent

PAGE_SIZE = 4
MAX_SLOTS = 64
WINDOW = 4
CHUNK = 8
PROMPTS = [[5, 1, 9], list(range(20)), [3, 7] * 13 + [1], [4] * 8, list(range(31, 0, -1)) + list(range(8))]
LOOSE = {"strict": 0.0, "soft": 0.0, "structure": False, "threshold": 1e9, "match": 0.0, "pairing": "all", "interval": 4}
POLICIES = [
    jkv.full(),
    jkv.r_kv(budget=16, interval=8, window=WINDOW),
    jkv.r_kv(budget=20, interval=16, window=WINDOW),
    jkv.streaming_llm(budget=12, interval=8),
    jkv.snap_kv(budget=10, when="prefill", window=WINDOW),
    jkv.pyramid_kv(budget=14, interval=8, window=WINDOW),
    jkv.ada_kv(budget=14, interval=8, window=WINDOW),
    jkv.rpc(interval=8, window=WINDOW),
    jkv.h2o(budget=14),
    jkv.tova(budget=11),
    jkv.quest(budget=12, dense_layers=1),
    jkv.streaming_llm(budget=12, interval=8, positions="cache"),
    jkv.skip_kv(budget=14, interval=8, window=WINDOW, tau=0.2, ends=(1, 5, 9, 17)),
    jkv.reason_cache(include_prompt=True, **LOOSE),
    jkv.random_share(jkv.reason_cache(**LOOSE)),
    jkv.chain(jkv.reason_cache(include_prompt=True, **LOOSE), jkv.r_kv(budget=36, interval=8, window=WINDOW)),
    jkv.learned_gate(random_gate(tiny_model()), threshold=0.0, window=WINDOW, interval=8, sinks=1),
]


class BreakingTokenizer(TinyTokenizer):
    """Six of the tokens end a thought, so that short texts have several."""

    pieces = tuple(piece + "\n\n" if i in (7, 13, 19, 25) else piece for i, piece in enumerate(TinyTokenizer.pieces))


SAMPLINGS = [jkv.Sampling(temperature=0.0), jkv.Sampling(temperature=1.0, seed=7)]
LENGTHS = [1, 7, 16, 23]  # limits of new tokens


@dataclasses.dataclass(frozen=True)
class Spec:
    """A request, by the indices of its parts."""

    prompt: int
    policy: int
    sampling: int
    length: int

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `Engine.submit`."""
        return {
            "prompt": PROMPTS[self.prompt],
            "policy": POLICIES[self.policy],
            "sampling": SAMPLINGS[self.sampling],
            "max_new_tokens": LENGTHS[self.length],
            "stop_ids": (3,),
        }


def draw_spec(rng: np.random.Generator) -> Spec:
    """A random request."""
    return Spec(*(int(rng.integers(len(choices))) for choices in (PROMPTS, POLICIES, SAMPLINGS, LENGTHS)))


def make_engine(model: Any, max_running: int, num_pages: int, **options: Any) -> Engine:
    """An engine that can serve any spec. Its pool needs at least the pages of one row, 2 * 2 * 16."""
    return Engine(
        dataclasses.replace(model, tokenizer=BreakingTokenizer()),
        max_running=max_running,
        max_slots=MAX_SLOTS,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        policies=POLICIES,
        chunk=CHUNK,
        poison=True,
        **options,
    )


class Expected:
    """The result of each sample by itself, computed once, on an engine with one row."""

    def __init__(self, model: Any) -> None:
        # Traced, as the engines of random mixes are: that of one row has the same programs.
        self.engine = make_engine(model, 1, 2 * 2 * MAX_SLOTS // PAGE_SIZE, return_trace=True)
        self.known: dict[tuple[Spec, int], tuple[list[int], np.ndarray, str]] = {}

    def __call__(self, spec: Spec, sample: int) -> tuple[list[int], np.ndarray, str]:
        """Tokens, their log-probabilities, and the finish reason."""
        longest = dataclasses.replace(spec, length=len(LENGTHS) - 1)
        if (longest, sample) not in self.known:
            # Later samples of a prompt run by themselves too: as a separate request that starts at that sample index.
            ticket = self.engine.submit(**longest.arguments, first_sample=sample)
            self.engine.run()
            out = self.engine.result(ticket)
            length = out.lengths[0]
            self.known[longest, sample] = out.tokens[0, :length].tolist(), out.logprobs[0, :length], out.finish_reason[0]
        tokens, log_probs, reason = self.known[longest, sample]
        limit = LENGTHS[spec.length]
        return tokens[:limit], log_probs[:limit], reason if len(tokens) < limit or 3 in tokens[:limit] else "length"


def table_of(piece: Any, pool: Any) -> Any:
    """The pages of a piece of the prefix cache, as a block table."""
    num_pages, entries = piece.shape[-1], pool.page_table.shape[-1]
    table = np.pad(np.asarray(piece), [(0, 0), (0, 0), (0, entries - num_pages)])
    return BlockTable(table, np.full(table.shape[:2], num_pages * PAGE_SIZE, np.int32), np.int32(0), {})


def assert_engine_is_consistent(engine: Engine) -> None:
    """Tables, prefixes, the prefix cache, reference counts and the free stack agree; no more pages are used than reserved.

    Between steps the reservations, which include the next chunk, may exceed the pool; the next step preempts before it decodes.
    """
    pool = jax.device_get(engine.runner.state.cache.pool)
    freed = engine.scheduler._freed  # by the next step: a prefix whose last sample was cancelled
    prefixes = [prefix for prefix in (*engine.scheduler.prefixes.values(), *freed) if prefix.row.snapshot]
    block_tables = [prefix.row.snapshot.block_table for prefix in prefixes]
    conversations = engine.scheduler.kept_rows
    assert not [*conversations.leaving, *conversations.swapping]
    block_tables += [
        kept.row.snapshot.block_table for kept in (*conversations.at(Place.POOL), *conversations.freed) if kept.row.snapshot
    ]
    waiting = [sample.resumes for sample in engine.scheduler.running.values() if sample.resumes]  # behind another prompt
    block_tables += [kept.row.snapshot.block_table for kept in waiting if kept.row.snapshot]
    block_tables += [table_of(piece, pool) for piece in engine.scheduler.prefix_cache._pages.values()]
    assert not engine.scheduler.prefix_cache._evicted
    assert_allocator_is_consistent(pool, [jax.device_get(block_table) for block_table in block_tables])
    reserved = engine.scheduler.reserved + sum(one.row.num_pages for one in (*freed, *conversations.freed))
    assert len(pool.refcount) - 1 - pool.free_top <= min(reserved, engine.num_pages)
