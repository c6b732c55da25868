"""The arithmetic of `jkv.plan`: one policy's memory on a device and a bound on its speed, from shapes alone.

Bytes of weights and state are exact: the shapes come from the functions that make the engine's arrays.
"""

import bisect
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jkv.cache.pool import num_pages_of
from jkv.engine import mesh as meshes
from jkv.engine.drafters import Drafter, places_of
from jkv.engine.memory import most_pages_of, num_row_pages, state_bytes
from jkv.engine.parts.drafting import drafting_bytes
from jkv.engine.state import empty_state
from jkv.eviction import Needs, Policy
from jkv.limits import MOST_ROWS
from jkv.model.adapter_stacks import empty_stacks
from jkv.model.eight_bits import quantise_weights
from jkv.model.params import ModelConfig, Params
from jkv.model.sampling import COUNTED, Sampling
from jkv.model.sharding import local_config, num_copies
from jkv.model.weight_shapes import weight_shapes
from jkv.planning.devices import Device
from jkv.planning.roofline import Lifetime, compaction_cost, host_seconds, lifetime, step_costs
from jkv.planning.scratch import Scratch, scratch_of
from pallas_kernels.quantised import Format
from pallas_kernels.sealed import page_bytes


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One policy's memory and speed; bytes are per device.

    Attributes:
      policy: its name.
      batch: rows that decode together: those given, or as many as fit, 0 if none fits.
      max_slots: the most slots of a row in any layer and KV head.
      num_pages: pages of the pool, of all devices together.
      row_bytes: bytes of one more row: the pages that the engine reserves for it, its page tables, last queries, logits
        and, with penalties, counts; with speculation, the tokens that a drafter sees.
      state_bytes: bytes that stay allocated between programs, without weights, at `batch` rows (one row if none fits).
      scratch: the most bytes that programs take while they run.
      total_bytes: weights (with a gate's), places for adapters, state and the largest scratch.
      mean_slots: slots of a KV head while a row decodes, averaged over time and layers.
      tokens_per_second: of all rows; a bound from the device's figures, not a measurement. None if it has no figures.
      phases: seconds of a decode step in products with the weights, attention, sampling, and the host; empty without a speed.
      limited_by: "memory bandwidth" or "arithmetic": which takes more of a step's phases.
      compaction_share: share of the time that compactions take.
    """

    policy: str
    batch: int
    max_slots: int
    num_pages: int
    row_bytes: int
    state_bytes: int
    scratch: Scratch
    total_bytes: int
    mean_slots: float
    tokens_per_second: float | None
    phases: dict[str, float]
    limited_by: str | None
    compaction_share: float | None


class Layout(NamedTuple):
    """Slots and pages of each row."""

    max_slots: int  # in a layer and KV head
    max_pages: int  # in a layer and KV head
    row_pages: int  # in all layers and KV heads, on all devices
    first_pages: int  # the same, for a row whose prompt is not compacted yet

    def pool_pages(self, rows: int) -> int:
        """Pages of a pool in which `rows` rows reach their end, and prompts are compacted one after the other."""
        return self.first_pages + (rows - 1) * self.row_pages


class StateSize(NamedTuple):
    """Bytes of an engine's state: a fixed part, and parts for each page, row, and entry of a row's page table."""

    fixed: int
    of_page: int
    of_row: int
    of_entry: int  # of a row's page table

    def of(self, rows: int, pages: int, max_pages: int) -> int:
        """Bytes for `rows` rows, `pages` pages and page tables of `max_pages` entries."""
        return self.fixed + pages * self.of_page + rows * (self.of_row + max_pages * self.of_entry)


@functools.lru_cache(maxsize=64)
def state_size(
    config: ModelConfig, needs: Needs, page_size: int, dtype: str, kv_format: Format | None = None, places: int = 1
) -> StateSize:
    """How the arrays of `empty_state` grow, from their shapes for one and two of each; nothing is allocated."""

    def at(rows: int, pages: int, max_pages: int) -> int:
        sizes: dict[str, Any] = {"num_rows": rows, "num_pages": pages, "max_pages": max_pages, "page_size": page_size}
        sizes |= {"dtype": jnp.dtype(dtype), "kv_format": kv_format, "places": places}
        shapes = jax.eval_shape(functools.partial(empty_state, config, needs, **sizes))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))

    smallest = at(1, 1, 1)
    of_page, row, of_entry = at(1, 2, 1) - smallest, at(2, 1, 1) - smallest, at(1, 1, 2) - smallest
    return StateSize(smallest - of_page - row, of_page, row - of_entry, of_entry)


@dataclasses.dataclass(frozen=True)
class Setting:
    """The settings that all estimates of one plan share."""

    config: ModelConfig
    device: Device
    dtype: Any
    num_devices: int
    page_size: int
    prompt: int
    sampling: Sampling
    memory_share: float
    kv_format: Format | None = None
    weight_dtype: str | None = None  # of matrices in 8 bits
    speculate: Drafter | None = None
    stored: Params | None = None  # the shapes of weights in the blocks of a GGUF file
    max_adapters: int = 0
    adapter_rank: int = 1

    @functools.cached_property
    def shapes(self) -> Params:
        """The shapes of the model's weights."""
        if self.stored is not None:
            return self.stored
        shapes = weight_shapes(self.config, self.dtype)
        return shapes if self.weight_dtype is None else quantise_weights(shapes, self.weight_dtype)

    @functools.cached_property
    def local(self) -> ModelConfig:
        """The configuration of one device's part of the model."""
        return local_config(self.config, self.num_devices)

    @functools.cached_property
    def weight_bytes(self) -> int:
        """Bytes of weights on each device."""
        return meshes.local_bytes(self.shapes, self.num_devices, self.copies)

    @functools.cached_property
    def stacks(self) -> Params | None:
        """The shapes of the places for adapters; None without any."""
        sizes = self.config, 1 + self.max_adapters, self.adapter_rank, self.dtype
        return jax.eval_shape(lambda: empty_stacks(*sizes)) if self.max_adapters else None

    @functools.cached_property
    def adapter_bytes(self) -> int:
        """Bytes of the places for adapters on each device, with the zeros of rows without an adapter."""
        return 0 if self.stacks is None else meshes.local_bytes(self.stacks, self.num_devices, self.copies)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of one row's adapter, which programs copy: XLA moves the copies of all layers out of a chunk's loop."""
        return self.adapter_bytes // (1 + self.max_adapters)

    @property
    def copies(self) -> int:
        """How many devices hold each KV head."""
        return num_copies(self.config, self.num_devices)

    @property
    def num_pools(self) -> int:
        """Pools of different KV heads."""
        return self.num_devices // self.copies

    @property
    def usable_bytes(self) -> int:
        """Bytes of each device that the plan may fill."""
        return int(self.device.memory * self.memory_share)

    @property
    def itemsize(self) -> int:
        """Bytes of one element of weights and cache."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def vector_bytes(self) -> float:
        """Bytes of a key or value in the pool, on average."""
        return page_bytes(self.config.head_size, self.dtype, self.kv_format, self.page_size) / (2 * self.page_size)

    def layout(self, policy: Policy, length: int) -> Layout:
        """The slots and pages that the engine reserves for each row, and for a prompt that is not compacted yet."""
        config, new = self.config, length - self.prompt
        slots = policy.widest(self.prompt, new, config.num_paged_layers, config.num_kv_heads)
        pages = most_pages_of(config, policy, self.prompt, new, self.page_size, self.num_pools)
        first = max(pages, num_row_pages(self.shapes, self.prompt, self.page_size))
        return Layout(slots, num_pages_of(slots, self.page_size), pages, first)

    def scratch(self, policy: Policy, layout: Layout, rows: int) -> Scratch:
        """Scratch of each device."""
        found = scratch_of(
            self.local,
            policy,
            platform=self.device.platform,
            itemsize=self.itemsize,
            num_rows=rows,
            max_slots=layout.max_pages * self.page_size,
            logits=self.config.vocab_size,
            sampling=self.sampling,
            is_plain=self.device.is_old_gpu,
            places=places_of(self.speculate),
            states=state_bytes(self.local, rows, self.dtype),
        )
        more = {"prefill": found.prefill + self.gathered_bytes, "decode": found.decode + rows * self.gathered_bytes}
        return dataclasses.replace(found, **more)

    def estimate(self, policy: Policy, length: int, batch: int | None = None) -> Estimate:
        """The estimate of one policy at one length, for `batch` rows or as many as fit."""
        layout = self.layout(policy, length)
        shared = self.page_size, jnp.dtype(self.dtype).name, self.kv_format, places_of(self.speculate)
        size = state_size(self.local, Needs.of([policy]), *shared)
        counts = self.sampling.penalises * COUNTED * self.config.vocab_size
        counts += drafting_bytes(self.speculate, self.config)

        def state(rows: int) -> int:
            return size.of(rows, layout.pool_pages(rows) // self.num_pools, layout.max_pages) + rows * counts

        gate = policy.calibration if policy.needs.gate else None
        gate_bytes = 0 if gate is None else meshes.local_bytes(gate.arrays, self.num_devices, self.copies)

        def total(rows: int) -> int:
            fixed = self.weight_bytes + self.adapter_bytes + gate_bytes
            return fixed + state(rows) + self.scratch(policy, layout, rows).most

        if batch is None:
            batch = bisect.bisect_right(range(1, MOST_ROWS), self.usable_bytes, key=total)
        rows, pages = max(1, batch), layout.pool_pages(max(1, batch))
        life = lifetime(policy, self.prompt, length - self.prompt, self.config.num_paged_layers)
        speed, phases, limit, share = self.speed(policy, life, length - self.prompt, batch)
        return Estimate(
            policy=policy.name,
            batch=batch,
            max_slots=layout.max_slots,
            num_pages=pages - pages % self.num_pools,
            row_bytes=state(2) - state(1),
            state_bytes=state(rows),
            scratch=self.scratch(policy, layout, rows),
            total_bytes=total(rows),
            mean_slots=float(life.mean_slots.mean()),
            tokens_per_second=speed,
            phases=phases,
            limited_by=limit,
            compaction_share=share,
        )

    def speed(
        self, policy: Policy, life: Lifetime, new: int, batch: int
    ) -> tuple[float | None, dict[str, float], str | None, float | None]:
        """The most tokens a second of all rows, a step's phases, what limits them, and the share of the time in compaction."""
        device, itemsize = self.device, self.itemsize
        if device.bandwidth is None:
            return None, {}, None, None
        if batch == 0:
            return 0.0, {}, None, None
        looked_up = (
            not self.config.tie_embeddings
        ) * self.config.width + self.config.num_layers * self.config.layer_input_width
        embedding = looked_up * self.config.vocab_size // self.num_devices
        shapes = weight_shapes(self.config, self.dtype)
        num_weights = meshes.local_bytes(shapes, self.num_devices, self.copies) // itemsize - embedding
        costs = step_costs(
            self.local,
            policy,
            life,
            weights=num_weights,
            weight_size=(self.weight_bytes - embedding * itemsize) / num_weights,
            logits=self.config.vocab_size,
            itemsize=itemsize,
            vector=self.vector_bytes,
            page_size=self.page_size,
            rows=batch,
            penalises=self.sampling.penalises,
            state_bytes=state_bytes(self.local, 1, self.dtype),
            window_slots=float(np.minimum(self.prompt + 1 + np.arange(new), self.config.window).mean()),
        )
        phases = {name: cost.seconds(device, itemsize) for name, cost in costs.items()}
        limits: dict[str, float] = {}
        for name, cost in costs.items():
            limits[cost.limit(device, itemsize)] = limits.get(cost.limit(device, itemsize), 0.0) + phases[name]
        phases["host"] = max(0.0, host_seconds(batch) - sum(phases.values()))  # it works while the device decodes
        of_row = compaction_cost(self.local, policy, life, vector=self.vector_bytes, copies=self.copies)
        compacting = batch * of_row.seconds(device, itemsize)
        seconds = new * sum(phases.values()) + compacting
        return batch * new / seconds, phases, max(limits, key=limits.__getitem__), compacting / seconds
