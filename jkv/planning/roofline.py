"""The fastest that a device could decode: the bytes and operations of a step, over the device's bandwidth and peak rate.

This is a bound, not a measurement. The phases of a step follow each other: products with the weights, attention, sampling. Each
takes at least the time of its bytes or of its operations, whichever is longer, and the bound adds them: with many rows the
products are limited by arithmetic and attention by bandwidth, and neither hides the other. Weights are read once a step for all
rows, keys and values once for each row, so a small cache shortens a step and lets more rows share the weights. The host works
while the device decodes (`EngineOptions.ahead`), and counts where it would take longer. Prefill, launches and traffic between
devices are not included.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from jkv.cache.page_selection import pages_read
from jkv.eviction import Policy
from jkv.eviction.policy import compacted
from jkv.model.params import ModelConfig
from jkv.model.sampling import COUNTED
from jkv.planning.devices import Device

# Seconds of the host for a step, in chunks of 16, and for each of its rows: measured on a CPU with 1, 8 and 32 rows.
HOST_STEP, HOST_ROW = 22e-6, 1.9e-6


class Lifetime(NamedTuple):
    """A row's cache while it decodes: slots of a KV head, averaged over the heads of a layer."""

    mean_slots: np.ndarray  # [L] mean over decode steps
    compactions: int
    slots_before: np.ndarray  # [L] summed over compactions
    slots_squared: np.ndarray  # [L] their squares, summed
    slots_after: np.ndarray  # [L] slots that stay, summed


def lifetime(policy: Policy, prompt: int, new: int, num_layers: int) -> Lifetime:
    """A row's cache over `new` decode steps after its prompt, by the policy's own schedule, without sharing."""
    filled = policy.uncut(prompt, num_layers)
    held, sums = np.zeros(num_layers), np.zeros((3, num_layers))
    count = done = 0

    def compact(times: int) -> None:
        nonlocal filled, count, sums
        after = compacted(policy, filled, prompt, done)
        if (after < filled).any():
            count += times
            sums = sums + times * np.stack([of_layers(x) for x in (filled, filled.astype(float) ** 2, after)])
            filled = after

    compact(1)
    budgets, slots_last_cycle = policy.layer_budgets(num_layers), None
    while done < new:
        due = None if policy.schedule is None else policy.schedule.steps_until_due(done)
        steps = min(due or new, new - done)
        # A bounded row with the slots that it had a cycle ago repeats that cycle to its end.
        repeats = 1
        is_settled = policy.budget is None or (policy.budgets(policy.budget, num_layers, prompt + done) == budgets).all()
        if (
            policy.is_bounded
            and is_settled
            and steps == due
            and slots_last_cycle is not None
            and (filled == slots_last_cycle).all()
        ):
            repeats = max(1, (new - done - 1) // steps)
        slots_last_cycle = filled
        read = filled[..., None] + np.arange(1, steps + 1)
        if policy.evicts_in_steps:
            read = np.minimum(read, budgets[:, None] + 1)
        held += repeats * of_layers(read.sum(axis=-1))
        filled = np.minimum(filled + steps, budgets) if policy.evicts_in_steps else filled + steps
        done += repeats * steps
        if done < new and not policy.evicts_in_steps:
            compact(repeats)
    return Lifetime(held / new, count, *sums)


def of_layers(slots: np.ndarray) -> np.ndarray:
    """Slots of each layer, on average over the KV heads where they have numbers of their own: [L]."""
    return slots if slots.ndim == 1 else slots.mean(axis=1)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes read and written, and floating-point operations."""

    num_bytes: float
    flops: float

    def times(self, device: Device, itemsize: int) -> dict[str, float]:
        """Seconds by each limit, on a device whose figures are known."""
        assert device.bandwidth is not None
        rate = device.rate_of(itemsize)
        return {"memory bandwidth": self.num_bytes / device.bandwidth, "arithmetic": self.flops / rate if rate else 0.0}

    def seconds(self, device: Device, itemsize: int) -> float:
        """The least seconds that it takes."""
        return max(self.times(device, itemsize).values())

    def limit(self, device: Device, itemsize: int) -> str:
        """The limit that takes longest."""
        times = self.times(device, itemsize)
        return max(times, key=times.__getitem__)


def host_seconds(rows: int) -> float:
    """What the host takes for a step of `rows` rows."""
    return HOST_STEP + rows * HOST_ROW


def step_costs(
    config: ModelConfig,
    policy: Policy,
    life: Lifetime,
    *,
    weights: int,
    logits: int,
    itemsize: int,
    weight_size: float | None = None,
    vector: float | None = None,
    page_size: int,
    rows: int,
    penalises: bool = False,
    window_slots: float = 0.0,
    state_bytes: int = 0,
) -> dict[str, Cost]:
    """The phases of a step of `rows` rows on a device with the part `config` of the model, and `weights` weights in products,
    of `weight_size` bytes each (None is `itemsize`).

    A key or value has `vector` bytes in the pool; None is the size of its numbers. Each layer with a sliding window reads
    `window_slots` slots, which are never quantised. Recurrent states of a row, of `state_bytes`, are read and written. Of a
    mixture of experts, a step reads those that some row chooses, if rows choose independently, and multiplies by those that
    each row chooses.
    H2O and TOVA read and write each slot's mass, sharing reads log-weights, Quest reads the bounds of all pages and the keys
    and values of some. Logits are written once and read once; penalties read the counts, and write and read the logits anew.
    """
    weight_size = itemsize if weight_size is None else weight_size
    slots, bounds = life.mean_slots, 2 * config.head_size * itemsize
    pair = bounds if vector is None else 2 * vector
    read = slots
    if policy.read is not None:
        chosen = np.minimum(slots, page_size * pages_read(policy.read.budget, page_size))
        read = np.where(np.arange(len(slots)) < policy.read.num_dense(len(slots)), slots, chosen)
    extra = 8 * policy.needs.mass + 4 * (policy.share is not None) + (policy.read is not None) * bounds / page_size
    times = np.ones(len(read))  # that a layer's slots are read: once more by each layer that shares them
    times[-1:] += config.num_layers - len(config.unpaged_layers) - len(read)
    row_bytes = config.num_kv_heads * float((times * read * pair + slots * extra).sum())
    in_windows, own = len(config.window_layers) * window_slots, config.in_windows
    row_bytes += own.num_kv_heads * in_windows * 2 * own.head_size * itemsize + 2 * state_bytes
    row_flops = 4 * config.num_query_heads * (config.head_size * float((times * read).sum()) + own.head_size * in_windows)
    of_experts = 3 * len(config.expert_layers) * config.own_experts * config.mlp_width * config.width
    chosen_by_one = config.num_active_experts / max(config.num_experts, 1)
    chosen_by_any, active = 1 - (1 - chosen_by_one) ** rows, of_experts * chosen_by_one
    return {
        "weights": Cost((weights - of_experts * (1 - chosen_by_any)) * weight_size, rows * 2 * (weights - of_experts + active)),
        "attention": Cost(rows * row_bytes, rows * row_flops),
        "sampling": Cost(rows * logits * (8 + penalises * (COUNTED + 8)), 0.0),
    }


def compaction_cost(config: ModelConfig, policy: Policy, life: Lifetime, *, vector: float, copies: int = 1) -> Cost:
    """All compactions of one row: a score may read all keys, of `vector` bytes each, and slots that stay are read and written.

    A score that compares keys with each other (R-KV's) multiplies all pairs of keys. Each of several `copies` of a KV head
    scores by the query heads of all.
    """
    if policy.evict is None:
        return Cost(0.0, 0.0)
    needs = policy.evict.needs
    heads, size = config.num_kv_heads, config.head_size
    before, squared, after = (float(x.sum()) for x in (life.slots_before, life.slots_squared, life.slots_after))
    num_bytes = heads * vector * (4 * after + bool(needs.window) * before)
    flops = 2 * size * (needs.window * copies * config.num_query_heads * before + needs.compares_keys * heads * squared)
    return Cost(num_bytes, flops)
