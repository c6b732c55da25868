"""The inputs of a decode chunk, computed on the host from the running samples.

Most settings change only when the rows change (`row_settings`). Remaining tokens, steering strengths and the progress of
thoughts change with every chunk (`for_chunk`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.cache import pool as pages
from jkv.cache import sealed_pages, states, windows
from jkv.cache.attention import Cache
from jkv.cache.gating import GATE
from jkv.cache.in_step_eviction import UNLIMITED, StepRules
from jkv.cache.page_selection import ReadRules, pages_read
from jkv.engine.faults import blame
from jkv.engine.programs import AlignRules, ChunkInputs, State
from jkv.engine.samples import Sample
from jkv.engine.scheduler import CHUNKS
from jkv.eviction import Needs, Policy
from jkv.model.params import Model, ModelConfig
from jkv.model.penalties import TokenCounts, count_tokens
from jkv.model.sampling import Sampling, rows_of
from jkv.model.threefry import sample_key
from jkv.reasoning.steering import SteerRules, marks_of
from jkv.reasoning.token_text import facts_of
from pallas_kernels.quantised import Format
from pallas_kernels.sealed import SealedFormat

MOST_STEPS = max(CHUNKS)


def empty_state(
    config: ModelConfig,
    needs: Needs,
    *,
    num_rows: int,
    num_pages: int,
    max_pages: int,
    page_size: int,
    dtype: Any = jnp.float32,
    poison: bool = False,
    kv_format: Format | None = None,
) -> State:
    """The state of an idle engine: an empty pool (`pool.create`), last queries, windows, recurrent states, logits."""
    pool = pages.create(
        num_layers=config.num_paged_layers,
        num_rows=num_rows,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        num_pages=num_pages,
        max_pages=max_pages,
        page_size=page_size,
        dtype=dtype,
        slot_data=("mass",) * needs.mass
        + ("carried",) * needs.carried
        + (GATE,) * needs.gate
        + (pages.LOG_WEIGHT,) * needs.sharing,
        has_vacant_slots=needs.mass,
        has_bounds=needs.bounds,
        poison=poison,
        kv_format=kv_format,
    )
    ring = (config.num_paged_layers, num_rows, needs.window, config.num_query_heads, config.head_size)
    rings = tail = None
    if config.window_layers:
        rings = windows.create(
            num_layers=config.num_ring_layers,
            num_rows=num_rows,
            num_kv_heads=config.in_windows.num_kv_heads,
            head_size=config.in_windows.head_size,
            window=config.window,
            page_size=page_size,
            dtype=dtype,
            poison=poison,
        )
    if is_sealed := isinstance(kv_format, SealedFormat):
        tail = windows.create(
            num_layers=config.num_paged_layers,
            num_rows=num_rows,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            window=sealed_pages.PLACES * page_size,
            page_size=page_size,
            dtype=dtype,
            poison=poison,
        )
    recurrent = None
    if config.delta_net is not None:
        num_layers = len(config.state_layers)
        recurrent = states.create(config.delta_net, num_layers=num_layers, num_rows=num_rows, dtype=dtype, poison=poison)
    queries = jnp.zeros(ring, dtype) if needs.window and not is_sealed else None
    cache = Cache(pool, queries, windows=rings, states=recurrent, tail=tail)
    return State(cache, jnp.zeros((num_rows, config.vocab_size), jnp.float32))


def row_settings(
    running: Mapping[int, Sample],
    needs: Needs,
    model: Model,
    *,
    num_rows: int,
    max_stop_ids: int,
    page_size: int,
    is_prompted: Any = None,
    sharding: jax.sharding.Sharding | None = None,
) -> ChunkInputs:
    """The inputs that stay the same while the rows do, on the device or mesh; `remaining` is 0 until `for_chunk` sets it.

    `is_prompted` is of `count_rows`, where a request has penalties.
    """
    stop_ids, key = np.full((num_rows, max_stop_ids), -1, np.int32), np.zeros((num_rows, 2), np.uint32)
    samplings = [Sampling(temperature=0.0)] * num_rows
    for i, sample in running.items():
        request = sample.request
        stop_ids[i, : len(request.stop_ids)] = request.stop_ids
        samplings[i], key[i] = request.sampling, sample_key(request.seed, request.identity, request.sample)
    policies = {i: sample.request.policy for i, sample in running.items()}
    prompts = {i: sample.request.first_prompt for i, sample in running.items()}
    arrays: Any = {"remaining": np.zeros(num_rows, np.int32), "stop_ids": stop_ids, "key": key}
    settings = ChunkInputs(
        **arrays,
        sampling=rows_of(samplings, penalises=is_prompted is not None),
        rules=step_rules(policies, num_rows, model.config.num_paged_layers, prompts) if needs.mass else None,
        reads=read_rules(policies, num_rows, page_size, model.config.num_paged_layers) if needs.bounds else None,
        sinks=moving_sinks(policies, num_rows) if needs.moving_sinks else None,
        steer=steer_rules(policies, num_rows, model) if needs.steering else None,
        align=align_rules(num_rows, model) if needs.aligning else None,
        is_prompted=is_prompted,
    )
    return jax.device_put(settings, sharding)


def for_chunk(settings: ChunkInputs, running: Mapping[int, Sample], model: Model, is_forcing: bool) -> ChunkInputs:
    """The settings with what changes from chunk to chunk: remaining and forced tokens, steering, the progress of thoughts."""
    num_rows = settings.remaining.shape[0]
    remaining: Any = np.zeros(num_rows, np.int32)
    strength, is_thinking = np.zeros(num_rows, np.float32), np.zeros(num_rows, bool)
    for i, sample in running.items():
        remaining[i] = sample.remaining
        steer, progress = sample.request.policy.steer, sample.thinking
        if steer is not None:
            with blame(sample):
                marks = marks_of(model.tokenizer, model.config.vocab_size)
                progress.follow(sample.request.prompt, sample.completion.tokens, marks)
                if steer.growth and sample.clock % steer.interval == 0:
                    progress.count(sample.completion.tokens, marks, model.tokenizer.decode, steer.keywords)
            strength[i], is_thinking[i] = steer.strength - steer.growth * progress.num_checks, progress.is_thinking
    steer_settings: Any = settings.steer
    if steer_settings is not None:
        steer_settings = steer_settings._replace(strength=strength, is_thinking=is_thinking)
    return settings._replace(
        remaining=remaining,
        steer=steer_settings,
        align=align_now(settings.align, running),
        forced=forced_now(running, num_rows) if is_forcing else None,
    )


def count_rows(running: Mapping[int, Sample], num_rows: int, vocab_size: int) -> TokenCounts:
    """The counts that penalties read, NumPy arrays; zero in rows without penalties."""
    texts: list[tuple[Sequence[int], Sequence[int]]] = [((), ())] * num_rows
    for i, sample in running.items():
        if sample.request.sampling.penalises:
            texts[i] = sample.request.prompt.tolist(), sample.completion.tokens
    return count_tokens(texts, vocab_size)


def forced_now(running: Mapping[int, Sample], num_rows: int) -> Any:
    """The next chunk's forced tokens, [steps, B]; -1 where a row draws its own."""
    forced = np.full((MOST_STEPS, num_rows), -1, np.int32)
    for i, sample in running.items():
        tokens = sample.request.forced[sample.generated : sample.generated + MOST_STEPS]
        forced[: len(tokens), i] = tokens
    return forced


def align_rules(num_rows: int, model: Model) -> Any:
    """`AlignRules` without the rows' progress, which `align_now` adds."""
    facts = facts_of(model.tokenizer, model.config.vocab_size)
    arrays: Any = (np.zeros(num_rows, bool), np.zeros(num_rows, bool), np.zeros(num_rows, np.int32), facts.ends_thought)
    return AlignRules(*arrays)


def align_now(rules: Any, running: Mapping[int, Sample]) -> Any:
    """The rules with the current progress of each row."""
    if rules is None:
        return None
    num_rows = len(rules.since)
    is_aligning, was_end, since = np.zeros(num_rows, bool), np.zeros(num_rows, bool), np.zeros(num_rows, np.int32)
    for i, sample in running.items():
        sharing = sample.sharing
        if sharing is not None and sharing.share.align_steps:
            is_aligning[i], was_end[i], since[i] = True, sharing.ended_thought, sharing.since_aligned
    return rules._replace(is_aligning=is_aligning, was_end=was_end, since=since)


def step_rules(policies: Mapping[int, Policy], num_rows: int, num_layers: int, prompts: Mapping[int, int]) -> Any:
    """`StepRules`; rows that evict between chunks, or never, have an unlimited budget here. `prompts` are the rows' lengths."""
    budget = np.full((num_layers, num_rows), UNLIMITED, np.int32)
    sinks, recent = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
    last_only, is_per_layer = np.zeros(num_rows, bool), np.zeros(num_rows, bool)
    for i, policy in policies.items():
        if policy.evicts_in_steps:
            evict: Any = policy.evict
            budget[:, i] = policy.layer_budgets(num_layers)
            sinks[i] = max(evict.sinks, prompts[i] if evict.protect_prompt else 0)
            recent[i] = evict.recent
            last_only[i], is_per_layer[i] = evict.needs.in_step == "last", evict.scope == "layer"
    arrays: Any = (budget, sinks, recent, last_only, is_per_layer)
    return StepRules(*arrays)


def read_rules(policies: Mapping[int, Policy], num_rows: int, page_size: int, num_layers: int) -> Any:
    """`ReadRules`; rows without a `Read` read all their pages."""
    num_pages, dense_layers = np.full(num_rows, UNLIMITED, np.int32), np.zeros(num_rows, np.int32)
    averages = np.zeros(num_rows, bool)
    for i, policy in policies.items():
        if policy.read is not None:
            num_pages[i], dense_layers[i] = pages_read(policy.read.budget, page_size), policy.read.num_dense(num_layers)
            averages[i] = policy.read.over_group == "mean"
    arrays: Any = (num_pages, dense_layers, averages)
    return ReadRules(*arrays)


def moving_sinks(policies: Mapping[int, Policy], num_rows: int) -> Any:
    """The number of sinks in each row that are read at their position in the cache."""
    sinks = np.zeros(num_rows, np.int32)
    for i, policy in policies.items():
        sinks[i] = policy.num_moving_sinks
    return sinks


def steer_rules(policies: Mapping[int, Policy], num_rows: int, model: Model) -> Any:
    """`SteerRules` without what changes from chunk to chunk."""
    marks, layer = marks_of(model.tokenizer, model.config.vocab_size), np.zeros(num_rows, np.int32)
    vector = np.zeros((num_rows, model.config.width), np.float32)
    for i, policy in policies.items():
        if policy.steer is not None:
            layer[i], vector[i] = policy.steer.layer, policy.steer.values
    arrays: Any = (np.zeros(num_rows, np.float32), layer, vector, np.zeros(num_rows, bool), marks.is_break, marks.think)
    return SteerRules(*arrays)
