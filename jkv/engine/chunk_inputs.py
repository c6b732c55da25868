"""The inputs of a decode chunk, computed on the host from the running samples; and how a prompt is cut into chunks of prefill.

Most settings change only when the rows change (`row_settings`). Remaining tokens and what some parts need change with every
chunk (`for_chunk`).
"""

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jkv.cache.in_step_eviction import UNLIMITED, StepRules
from jkv.cache.page_selection import ReadRules, pages_read
from jkv.checks import out_of_range
from jkv.engine.parts.base import Rows
from jkv.engine.parts.table import KINDS, Parts
from jkv.engine.programs import ChunkInputs
from jkv.eviction import Policy
from jkv.model.sampling import Sampling, rows_of, sample_key
from pallas_kernels.choice import LEAST_CAPABILITY

LEAST_SLOTS = 1024  # of a row that a piece gathers; more, by a factor of four each, where it holds more
LARGE = 1024  # tokens of a prefill program where kernels run: the products of 256 leave half of a GPU without work


class PrefillPrograms(NamedTuple):
    """The programs through which a device reads prompts.

    Attributes:
      sizes: the tokens of each, the smallest first.
      of_piece: what a piece of a prompt costs besides its tokens, in tokens, as the weights are read again.
    """

    sizes: tuple[int, ...]
    of_piece: int


# An H200 reads 8B parameters in the time in which it multiplies 170 tokens with them, and a CPU reads SmolLM2-135M in the time
# of 8 tokens. There 256 tokens take as long as twice 128, and the prefix cache finds more in short pieces.
OF_CPU = PrefillPrograms((16, 64, 128), 8)
OF_KERNELS = PrefillPrograms((16, 64, 256, LARGE), 170)
OF_OTHERS = PrefillPrograms((16, 64, 256), 48)


def prefill_programs(platform: str, capability: tuple[int, int] | None = None, largest: int | None = None) -> PrefillPrograms:
    """The prefill programs of a platform, and of a GPU of this compute capability; none has more tokens than `largest`.

    Raises:
      ValueError: `largest` is not the tokens of one of them.

    >>> [prefill_programs(*one).sizes for one in (("cpu",), ("tpu",), ("cuda", (7, 5)))]
    [(16, 64, 128), (16, 64, 256, 1024), (16, 64, 256)]
    """
    has_kernels = platform == "tpu" or (platform == "cuda" and (capability or LEAST_CAPABILITY) >= LEAST_CAPABILITY)
    found = OF_CPU if platform == "cpu" else OF_KERNELS if has_kernels else OF_OTHERS
    if largest is None:
        return found
    if largest not in found.sizes:
        raise out_of_range(
            "largest_prefill", f"be one of {found.sizes}, the tokens of this device's programs, or None", largest
        )
    return found._replace(sizes=tuple(size for size in found.sizes if size <= largest))


def cut(num_tokens: int, programs: PrefillPrograms) -> tuple[int, ...]:
    """The sizes of the programs that a prompt passes through, the largest first.

    >>> cut(257, prefill_programs("cpu")), cut(300, prefill_programs("tpu")), cut(900, prefill_programs("tpu"))
    ((128, 128, 16), (256, 64), (1024,))
    """
    largest = programs.sizes[-1]
    full = max(0, num_tokens - 1) // largest  # the prefix cache keeps whole pieces of the largest size
    return (largest,) * full + cheapest(num_tokens - full * largest, programs)


@functools.cache
def cheapest(num_tokens: int, programs: PrefillPrograms) -> tuple[int, ...]:
    """The sizes that cost least for at most one piece of the largest size; few of them, if as much."""
    if num_tokens <= 0:
        return ()
    ways = [(size, *cheapest(num_tokens - size, programs)) for size in reversed(programs.sizes)]
    return min(ways, key=lambda way: (sum(way) + programs.of_piece * len(way), len(way)))


def chunks(prompt: np.ndarray, programs: PrefillPrograms) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the pieces of a prompt, each padded to a size of the programs, as [1, T], and the number of its tokens, as [1]."""
    start = 0
    for size in cut(len(prompt), programs):
        piece = prompt[start : start + size]
        padded = np.zeros((1, size), np.int32)
        padded[0, : len(piece)] = piece
        start += len(piece)
        yield padded, np.asarray([len(piece)], np.int32)


def pages_to_read(num_slots: int, page_size: int, max_pages: int) -> int | None:
    """How many pages a piece gathers of a row with so many slots: one of a few numbers; None for all that a row can have.

    >>> [pages_to_read(slots, 16, 2048) for slots in (300, 1024, 1025, 4097, 20_000)]
    [64, 64, 256, 1024, None]
    """
    most = LEAST_SLOTS
    while most < num_slots:
        most *= 4
    num_pages = -(-most // page_size)
    return num_pages if num_pages < max_pages else None


def row_settings(
    rows: Rows,
    names: Collection[str],
    *,
    max_stop_ids: int,
    page_size: int,
    sharding: jax.sharding.Sharding | None = None,
) -> ChunkInputs:
    """The inputs that stay the same while the rows do, on the device or mesh; `remaining` is 0 until `for_chunk` sets it.

    `names` are the parts that are on.
    """
    num_rows, num_layers, needs = rows.num_rows, rows.model.config.num_paged_layers, rows.needs
    stop_ids, key = np.full((num_rows, max_stop_ids), -1, np.int32), np.zeros((num_rows, 2), np.uint32)
    samplings = [Sampling(temperature=0.0)] * num_rows
    for i, sample in rows.running.items():
        request = sample.request
        stop_ids[i, : len(request.stop_ids)] = request.stop_ids
        samplings[i], key[i] = request.sampling, sample_key(request.seed, request.identity, request.sample)
    policies = {i: sample.request.policy for i, sample in rows.running.items()}
    prompts = {i: sample.request.first_prompt for i, sample in rows.running.items()}
    arrays: Any = {"remaining": np.zeros(num_rows, np.int32), "stop_ids": stop_ids, "key": key}
    settings = ChunkInputs(
        **arrays,
        sampling=rows_of(samplings, penalises="penalties" in names),
        rules=step_rules(policies, num_rows, num_layers, prompts) if needs.mass else None,
        reads=read_rules(policies, num_rows, page_size, num_layers) if needs.bounds else None,
        sinks=moving_sinks(policies, num_rows) if needs.moving_sinks else None,
        parts=Parts.from_names({name: kind.of(rows) for name, kind in KINDS.items() if name in names}),
    )
    leaves, structure = jax.tree.flatten(settings)  # some are on the device already, perhaps split over a mesh
    put = iter(jax.device_put([leaf for leaf in leaves if not isinstance(leaf, jax.Array)], sharding))
    return jax.tree.unflatten(structure, [leaf if isinstance(leaf, jax.Array) else next(put) for leaf in leaves])


def for_chunk(settings: ChunkInputs, rows: Rows) -> ChunkInputs:
    """The settings with what changes from chunk to chunk."""
    remaining: Any = np.zeros(rows.num_rows, np.int32)
    for i, sample in rows.running.items():
        remaining[i] = sample.remaining
    settings = settings._replace(remaining=remaining)
    if not any(settings.parts):
        return settings
    return settings._replace(parts=Parts.from_names({name: part.at(rows) for name, part in settings.parts.on.items()}))


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
