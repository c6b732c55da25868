"""The only loop: admit, decode a chunk, compress rows that are due, emit finished rows and free their pages.

Every device program has a fixed shape, so nothing compiles anew for another prompt, length, budget or weights; the pool is
donated from each to the next. The host sees the device once a chunk. Rules of time, in one place:
- a step draws a token from the logits at hand, appends it and computes the next logits; `generated` counts these steps;
- a row is due when its own `generated` is a multiple of its policy's interval and more than `budget` slots are filled, so
  a row's compactions never depend on its neighbours. Chunks divide every interval, and rows are admitted between chunks;
- a prompt longer than its budget is compressed once, after prefill;
- a request reserves its largest number of pages at admission, so the pool never runs out under it.
"""

import collections
import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jkv import model as decoder
from jkv import pool as pages
from jkv import sampling
from jkv.attention import NEVER, Cache, DecodeAttention, PrefillAttention, last_queries
from jkv.params import Params
from jkv.policies.base import CacheView, Evict, Policy
from jkv.pool import EMPTY
from jkv.sampling import Sampling, SamplingRows

MAX_CHUNK = 16  # decode steps a dispatch, at most
PREFILL_SIZES = (16, 64, 256)  # tokens of a prefill program
COMPRESS_SIZES = (1, 4, 16, 64)  # rows of a compaction program


class State(NamedTuple):
    """Everything that lives on the device between programs; donated to each of them."""

    cache: Cache
    logits: Float[Array, "B V"]  # of each row's next token


class Control(NamedTuple):
    """What the host tells a chunk about each row."""

    is_active: Bool[Array, " B"]
    remaining: Int[Array, " B"]  # tokens until the row's limit
    stop_ids: Int[Array, "B E"]  # padded with -1
    sampling: SamplingRows


class Emitted(NamedTuple):
    """A chunk's tokens, for the host; steps of finished rows are not real."""

    token: Int[Array, "steps B"]
    log_prob: Float[Array, "steps B"]
    is_real: Bool[Array, "steps B"]
    held_pages: Int[Array, ""]


@functools.partial(jax.jit, static_argnames=("num_steps", "truncates"), donate_argnames="state")
def decode_chunk(params: Params, state: State, control: Control, num_steps: int, truncates: bool) -> tuple[State, Emitted]:
    """`num_steps` decode steps of all rows; a static trip count, so that no device waits for the host."""
    row = jnp.arange(control.remaining.shape[0], dtype=jnp.int32)

    def step(carry: tuple[State, Array, Array], _: None) -> tuple[tuple[State, Array, Array], tuple[Array, Array, Array]]:
        (cache, logits), is_active, remaining = carry
        position = cache.pool.logical_length
        token, log_prob = sampling.draw(logits, control.sampling, position, truncates)
        token = jnp.where(is_active, token, 0)
        num_new = is_active.astype(jnp.int32)
        pool, address = pages.reserve(cache.pool, row, num_new, 1)
        attend = DecodeAttention(address, pool.length + num_new[None, :, None], position)
        cache = cache._replace(pool=pool)
        hidden, cache = decoder.forward(params, token[:, None], position[:, None], attend, cache)
        cache = cache._replace(pool=pages.advance(cache.pool, row, num_new))
        logits = decoder.unembed(params, hidden[:, 0])
        is_last = (token[:, None] == control.stop_ids).any(axis=-1) | (remaining <= 1) | ~jnp.isfinite(log_prob)
        return (State(cache, logits), is_active & ~is_last, remaining - 1), (token, log_prob, is_active)

    carry, (token, log_prob, is_real) = jax.lax.scan(
        step, (state, control.is_active, control.remaining), None, length=num_steps
    )
    return carry[0], Emitted(token, log_prob, is_real, pages.held_pages(carry[0].cache.pool))


@functools.partial(jax.jit, donate_argnames="state")
def prefill_chunk(
    params: Params, state: State, row: Int[Array, " 1"], token: Int[Array, "1 T"], num_new: Int[Array, " 1"]
) -> State:
    """Appends the first `num_new` of T prompt tokens to a row, and leaves the logits after the last of them."""
    cache = state.cache
    position = cache.pool.logical_length[row][:, None] + jnp.arange(token.shape[1], dtype=jnp.int32)
    pool, address = pages.reserve(cache.pool, row, num_new, token.shape[1])
    attend = PrefillAttention(address, row, position, num_new)
    hidden, cache = decoder.forward(params, token, position, attend, cache._replace(pool=pool))
    cache = cache._replace(pool=pages.advance(cache.pool, row, num_new))
    logits = decoder.unembed(params, hidden[:, num_new[0] - 1])
    return State(cache, state.logits.at[row].set(logits))


@functools.partial(jax.jit, static_argnames=("evict", "is_traced"), donate_argnames="state")
def compress(
    state: State,
    row: Int[Array, " R"],
    budget: Int[Array, " R"],
    prompt_length: Int[Array, " R"],
    evict: Evict,
    is_traced: bool,
) -> tuple[State, Int[Array, "L R K S"] | None]:
    """Compacts rows to their budgets, and lists the positions dropped (EMPTY where a slot stays) when traced.

    A row equal to the number of rows stands for none.
    """
    cache = state.cache
    pool = cache.pool
    present = jnp.minimum(row, pool.num_rows - 1)
    num_seen = pool.logical_length[present]

    # One layer after the other: left to itself, XLA gathers the keys of all layers at once on a GPU, half the pool's bytes.
    def rate(_: None, layer: Int[Array, ""]) -> tuple[None, tuple[Float[Array, "R K S"], Int[Array, "R K S"]]]:
        key, value, position = pages.gather(pool, layer, present)
        query = None
        if cache.query_ring is not None and evict.window:
            query = last_queries(cache.query_ring, layer, present, num_seen, evict.window)
        view = CacheView(key, value, position, query, layer=layer, prompt_length=prompt_length)
        return None, (evict.rate(view), position)

    _, (score, position) = jax.lax.scan(rate, None, jnp.arange(pool.page_table.shape[0], dtype=jnp.int32))
    slots = evict.choose(score, position, budget[None, :, None])
    state = state._replace(cache=cache._replace(pool=pages.take_slots(pool, row, slots)))
    return state, dropped_positions(position, slots) if is_traced else None


def dropped_positions(position: Int[Array, "L R K S"], slots: Int[Array, "L R K S"]) -> Int[Array, "L R K S"]:
    """The positions of the filled slots that are not in `slots`, EMPTY elsewhere."""
    layer, row, head, _ = jnp.indices(slots.shape, dtype=jnp.int32, sparse=True)
    place = jnp.where(slots == EMPTY, slots.shape[-1], slots)
    is_kept = jnp.zeros(slots.shape, bool).at[layer, row, head, place].set(True, mode="drop")
    return jnp.where(is_kept, EMPTY, position)


@functools.partial(jax.jit, donate_argnames="state")
def release(state: State, row: Int[Array, " B"]) -> State:
    """Frees rows."""
    return state._replace(cache=state.cache._replace(pool=pages.release(state.cache.pool, row)))


@dataclasses.dataclass(frozen=True)
class Request:
    """One sample to generate; token ids, checked by whoever made it."""

    prompt: np.ndarray
    policy: Policy
    sampling: Sampling
    seed: int
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    sample: int = 0  # index among the samples of equal prompts
    stop_at: Callable[[list[int]], int | None] | None = None  # tokens so far -> how many to keep, None to go on

    @property
    def max_slots(self) -> int:
        """The most slots that a layer and KV head of this request ever fills."""
        everything = len(self.prompt) + self.max_new_tokens
        if self.policy.evict is None:
            return everything
        return min(everything, max(len(self.prompt), self.policy.slots + self.policy.evict.interval))


@dataclasses.dataclass
class Completion:
    """What the engine made of a request."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    finish_reason: str = ""
    compactions: int = 0
    evicted: float = 0.0  # tokens dropped, averaged over layers and KV heads
    ends: np.ndarray | None = None  # [L, K, T] int32, traced requests only: when each token's key was dropped, or NEVER


@dataclasses.dataclass
class Row:
    """A running request, on the host."""

    request: Request
    completion: Completion
    filled: int  # slots of the fullest layer and KV head
    reserved_pages: int
    generated: int = 0

    @property
    def is_due(self) -> bool:
        """Whether the row is to be compressed now."""
        return not self.completion.finish_reason and self.request.policy.is_due(self.generated, self.filled)


@dataclasses.dataclass
class RunStats:
    """What a run held and how long it took, measured on the pool itself; bytes and seconds."""

    kv_bytes: float = 0.0  # mean over decode chunks
    peak_kv_bytes: int = 0
    dense_kv_bytes: int = 0  # what full caches of the same rows would have held at their peak
    decode_seconds: float = 0.0  # compaction included, compile time not
    prefill_seconds: float = 0.0
    compile_seconds: float = 0.0
    chunks: int = 0
    prefills: int = 0


class Engine:
    """Runs requests on `num_rows` rows over one pool of `num_pages` pages.

    Attributes:
      stats: a `RunStats` of everything run so far.
    """

    def __init__(
        self,
        params: Params,
        *,
        num_rows: int,
        num_pages: int,
        max_pages: int,
        page_size: int,
        window: int = 0,
        max_stop_ids: int = 1,
        chunk: int = MAX_CHUNK,
        truncates: bool = False,
        is_traced: bool = False,
        poison: bool = False,
    ) -> None:
        config = params.config
        self.params = params
        self.num_pages, self.chunk, self.truncates, self.is_traced = num_pages, chunk, truncates, is_traced
        self.max_stop_ids = max_stop_ids
        dtype = params.embedding.dtype
        pool = pages.create(
            num_layers=config.num_layers,
            num_rows=num_rows,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            num_pages=num_pages,
            max_pages=max_pages,
            page_size=page_size,
            dtype=dtype,
            poison=poison,
        )
        ring_shape = (config.num_layers, num_rows, window, config.num_query_heads, config.head_size)
        ring = jnp.zeros(ring_shape, dtype) if window else None
        self.state = State(Cache(pool, ring), jnp.zeros((num_rows, config.vocab_size), jnp.float32))
        self.num_rows = num_rows
        self.rows: dict[int, Row] = {}  # by batch row
        self.queue: collections.deque[tuple[int, Request]] = collections.deque()
        self.stats = RunStats()
        self.page_bytes = page_bytes(params, page_size)
        self.ring_bytes = 0 if ring is None else ring.nbytes

    def run(self, requests: Sequence[Request], on_tokens: Callable[[int], None] | None = None) -> list[Completion]:
        """Generates every request, in their order; `on_tokens` hears how many tokens each chunk made."""
        completions = [Completion() for _ in requests]
        self.queue.extend(enumerate(requests))
        with timed_compiles() as compiled:
            while self.queue or self.rows:
                self._admit(completions)
                made = self._decode()
                self._compress([i for i, row in self.rows.items() if row.is_due])
                self._emit()
                if on_tokens:
                    on_tokens(made)
        self.stats.compile_seconds += compiled()
        return completions

    def _admit(self, completions: list[Completion]) -> None:
        """Fills free rows from the queue, in order, as long as their pages can be reserved."""
        config, page_size = self.params.config, self.state.cache.pool.page_size
        admitted = []
        free = [i for i in range(self.num_rows) if i not in self.rows]
        while free and self.queue:
            index, request = self.queue[0]
            needed = num_reserved_pages(self.params, request.max_slots, page_size)
            if sum(row.reserved_pages for row in self.rows.values()) + needed > self.num_pages:
                break
            i = free.pop(0)
            self.queue.popleft()
            completion = completions[index]
            if self.is_traced:
                shape = (config.num_layers, config.num_kv_heads, len(request.prompt) + request.max_new_tokens)
                completion.ends = np.full(shape, NEVER, np.int32)
            self.rows[i] = Row(request, completion, len(request.prompt), needed)
            self._prefill(i, request.prompt)
            admitted.append(i)
        if admitted:
            self._note_peak(int(pages.held_pages(self.state.cache.pool)))
        self._compress([i for i in admitted if self.rows[i].is_due])

    def _prefill(self, i: int, prompt: np.ndarray) -> None:
        began = time.perf_counter()
        row = jnp.asarray([i], jnp.int32)
        with timed_compiles() as compiled:
            for piece in split_prompt(prompt):
                num_new = jnp.asarray([len(piece)], jnp.int32)
                padded = np.zeros((1, next(size for size in PREFILL_SIZES if size >= len(piece))), np.int32)
                padded[0, : len(piece)] = piece
                self.state = prefill_chunk(self.params, self.state, row, jnp.asarray(padded), num_new)
            jax.block_until_ready(self.state.logits)
        self.stats.prefills += 1
        self.stats.prefill_seconds += time.perf_counter() - began - compiled()

    def _decode(self) -> int:
        """One chunk of all rows; returns the number of tokens made."""
        began = time.perf_counter()
        with timed_compiles() as compiled:
            self.state, emitted = decode_chunk(
                self.params, self.state, self._control(), num_steps=self.chunk, truncates=self.truncates
            )
            token, log_prob, is_real, held = jax.device_get(emitted)
        self.stats.decode_seconds += time.perf_counter() - began - compiled()
        assert held <= self.num_pages, "the pool ran out of pages below a reservation"
        for i, row in self.rows.items():
            self._collect(row, token[is_real[:, i], i], log_prob[is_real[:, i], i])
        self._count_bytes(int(held))
        return int(is_real.sum())

    def _control(self) -> Control:
        num_rows = self.num_rows
        stop_ids = np.full((num_rows, self.max_stop_ids), -1, np.int32)
        remaining, top_k = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        temperature, top_p = np.zeros(num_rows, np.float32), np.ones(num_rows, np.float32)
        key = np.zeros((num_rows, 2), np.uint32)
        for i, row in self.rows.items():
            request = row.request
            stop_ids[i, : len(request.stop_ids)] = request.stop_ids
            remaining[i] = request.max_new_tokens - row.generated
            temperature[i], top_p[i] = request.sampling.temperature, request.sampling.top_p
            top_k[i], key[i] = request.sampling.top_k, key_of(request)
        rows = SamplingRows(*map(jnp.asarray, (temperature, top_p, top_k, key)))
        return Control(jnp.asarray(remaining > 0), jnp.asarray(remaining), jnp.asarray(stop_ids), rows)

    def _collect(self, row: Row, tokens: np.ndarray, log_probs: np.ndarray) -> None:
        """Takes a chunk's tokens over into the row's completion, and says whether and why it is finished."""
        request, completion = row.request, row.completion
        completion.tokens += tokens.tolist()
        completion.log_probs += log_probs.tolist()
        row.generated += len(tokens)
        row.filled += len(tokens)
        if not np.isfinite(completion.log_probs[-1]):
            completion.finish_reason = "nan"
        elif completion.tokens[-1] in request.stop_ids:
            completion.finish_reason = "eos" if completion.tokens[-1] in self.params.config.end_ids else "stop"
        elif row.generated >= request.max_new_tokens:
            completion.finish_reason = "length"
        kept = request.stop_at(completion.tokens) if request.stop_at else None
        if kept is not None:
            del completion.tokens[kept:], completion.log_probs[kept:]
            completion.finish_reason = "stop"

    def _count_bytes(self, held: int) -> None:
        stats, kv_bytes = self.stats, held * self.page_bytes + self.ring_bytes
        stats.kv_bytes = (stats.kv_bytes * stats.chunks + kv_bytes) / (stats.chunks + 1)
        stats.chunks += 1
        self._note_peak(held)

    def _note_peak(self, held: int) -> None:
        stats, config = self.stats, self.params.config
        stats.peak_kv_bytes = max(stats.peak_kv_bytes, held * self.page_bytes + self.ring_bytes)
        seen = sum(len(row.request.prompt) + row.generated for row in self.rows.values())
        itemsize = self.params.embedding.dtype.itemsize
        dense = seen * 2 * config.num_layers * config.num_kv_heads * config.head_size * itemsize
        stats.dense_kv_bytes = max(stats.dense_kv_bytes, dense)

    def _compress(self, due: list[int]) -> None:
        """Compacts rows, those of the same policy together, padded to a few sizes."""
        began = time.perf_counter()
        groups: dict[Evict, list[int]] = {}
        for i in due:
            evict = self.rows[i].request.policy.evict
            assert evict is not None
            groups.setdefault(evict, []).append(i)
        with timed_compiles() as compiled:
            for evict, members in groups.items():
                for start in range(0, len(members), COMPRESS_SIZES[-1]):
                    self._compress_group(evict, members[start : start + COMPRESS_SIZES[-1]])
        self.stats.decode_seconds += time.perf_counter() - began - compiled()

    def _compress_group(self, evict: Evict, members: list[int]) -> None:
        size = next(size for size in COMPRESS_SIZES if size >= len(members))
        row = np.full(size, self.num_rows, np.int32)
        budget, prompt_length = np.zeros(size, np.int32), np.zeros(size, np.int32)
        for j, i in enumerate(members):
            request = self.rows[i].request
            row[j], budget[j], prompt_length[j] = i, request.policy.slots, len(request.prompt)
        arrays = (jnp.asarray(x) for x in (row, budget, prompt_length))
        self.state, dropped = compress(self.state, *arrays, evict=evict, is_traced=self.is_traced)
        dropped = None if dropped is None else jax.device_get(dropped)
        for j, i in enumerate(members):
            running = self.rows[i]
            running.completion.compactions += 1
            running.completion.evicted += running.filled - running.request.policy.slots
            running.filled = running.request.policy.slots
            if dropped is not None and running.completion.ends is not None:
                layer, head, slot = np.nonzero(dropped[:, j] != EMPTY)
                now = len(running.request.prompt) + running.generated
                running.completion.ends[layer, head, dropped[layer, j, head, slot]] = now

    def _emit(self) -> None:
        """Frees the rows that are finished."""
        finished = [i for i, row in self.rows.items() if row.completion.finish_reason]
        if finished:
            row = np.full(self.num_rows, self.num_rows, np.int32)
            row[: len(finished)] = finished
            self.state = release(self.state, jnp.asarray(row))
        for i in finished:
            ended = self.rows.pop(i)
            if ended.completion.ends is not None:
                ended.completion.ends = ended.completion.ends[..., : len(ended.request.prompt) + ended.generated]


def key_of(request: Request) -> np.ndarray:
    """The key data of a request's sample; `request` in the key is a hash of the prompt's ids."""
    return sample_key(request.seed, sampling.request_id(request.prompt), request.sample)


@functools.lru_cache(maxsize=4096)
def sample_key(seed: int, request: int, sample: int) -> np.ndarray:
    """`sampling.sample_key`, on the host."""
    return np.asarray(sampling.sample_key(np.uint32(seed), np.uint32(request), np.uint32(sample)))


def split_prompt(prompt: np.ndarray) -> list[np.ndarray]:
    """The pieces that prefill takes one after the other."""
    return [prompt[start : start + PREFILL_SIZES[-1]] for start in range(0, len(prompt), PREFILL_SIZES[-1])]


def page_bytes(params: Params, page_size: int) -> int:
    """Bytes of one page: keys, values and positions."""
    return page_size * (2 * params.config.head_size * params.embedding.dtype.itemsize + 4)


def num_reserved_pages(params: Params, max_slots: int, page_size: int) -> int:
    """Pages that a request needs for `max_slots` slots in every layer and KV head."""
    return params.config.num_layers * params.config.num_kv_heads * pages.num_pages_of(max_slots, page_size)


def chunk_of(policies: Sequence[Policy]) -> int:
    """Decode steps a dispatch: the largest number up to MAX_CHUNK that divides every policy's interval."""
    common = math.gcd(0, *(policy.evict.interval for policy in policies if policy.evict))
    return max(n for n in range(1, MAX_CHUNK + 1) if common % n == 0)


@contextlib.contextmanager
def timed_compiles() -> Iterator[Callable[[], float]]:
    """Gives a function that tells the seconds spent tracing and compiling inside the block, nested spans counted once."""
    spans: list[tuple[float, float]] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            spans.append((time.perf_counter() - duration_secs, time.perf_counter()))

    def total() -> float:
        seconds, reached = 0.0, 0.0
        for begin, end in sorted(spans):
            seconds += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        return seconds

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield total
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
