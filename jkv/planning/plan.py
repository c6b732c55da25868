"""`jkv.plan`: what fits a device, and how fast it could be, before anything is loaded or compiled.

Bytes of weights and cache are those of the engine's own arrays (`jkv.planning.estimate`). Scratch is an estimate from above
(`jkv.planning.scratch`), tokens a second a bound (`jkv.planning.roofline`).
"""

import bisect
import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jkv.cache import DEFAULT_PAGE_SIZE
from jkv.checks import check_counts, typed
from jkv.engine import mesh as meshes
from jkv.engine.requests import check_prompt_fits, spread_policies
from jkv.model.model_shapes import find_shape
from jkv.model.params import Model, Params, count_weights
from jkv.planning.devices import Device, find_device
from jkv.planning.estimate import Estimate, Setting
from jkv.policies import Policy, full

MARGIN = 1.01  # of speeds: where arithmetic is the limit, they are the same but for rounding
PAGE_SIZES = {"tpu": 128, "gpu": DEFAULT_PAGE_SIZE, "cpu": DEFAULT_PAGE_SIZE}  # that the kernels are tiled for


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `jkv.plan` found; `print` it.

    Attributes:
      model, device, dtype, num_devices, page_size, prompt, length: what was planned.
      num_weights: of the whole model.
      weight_bytes: of each device.
      bytes_per_token: keys and values of one token in all layers, positions included; of each device.
      usable_bytes: of each device's memory that the plan may fill.
      own: the policy.
      full: the full cache, for comparison.
      rows_pay_from: the shortest length, prompt included, from which more rows fit than of full caches; None for never.
      speed_pays_from: likewise, from which the bound on tokens a second is higher by a percent or more.
      notes: what the figures leave out.
    """

    model: str
    device: Device
    dtype: str
    num_devices: int
    page_size: int
    prompt: int
    length: int
    num_weights: int
    weight_bytes: int
    bytes_per_token: int
    usable_bytes: int
    own: Estimate
    full: Estimate
    rows_pay_from: int | None
    speed_pays_from: int | None
    notes: tuple[str, ...]

    @property
    def engine(self) -> dict[str, int]:
        """Settings of the `jkv.Engine` that was planned: `jkv.Engine(model, policies=[policy], **plan.engine)`."""
        own = self.own
        return {
            "max_running": own.batch,
            "max_slots": own.max_slots,
            "page_size": self.page_size,
            "num_pages": own.num_pages,
        }

    def __str__(self) -> str:
        return report(self)


def plan(
    model: Any,
    device: str | Device,
    policy: Policy | None = None,
    length: int | None = None,
    prompt: int = 256,
    batch: int | None = None,
    page_size: int | None = None,
    dtype: Any = None,
    num_devices: int = 1,
    truncates: bool = True,
    memory_share: float = 0.9,
) -> Plan:
    """What fits a device, how fast it could be, and whether compression pays, from a model's shape alone.

    Args:
      model: what `jkv.load` returns, a `ModelConfig`, a name that `jkv plan --list` lists, a TOML file of a `ModelConfig`'s
        fields, or a checkpoint (a folder or hub name), whose config.json alone is read.
      device: one of `jkv.DEVICES`, "cpu" (this machine, no speed), or a `jkv.Device` of your own.
      policy: how the cache stays small; None is the full cache.
      length: tokens of a row at its end, prompt included; None takes 16,384, or the model's positions if fewer.
      prompt: tokens of it that are the prompt.
      batch: rows that decode together; None takes as many as fit.
      page_size: slots of a page; None takes 128 on a TPU, 16 elsewhere.
      dtype: of weights and cache; None is the loaded model's, or float32 on a CPU and bfloat16 elsewhere.
      num_devices: over which KV heads are split, as with `jkv.Engine(mesh=...)`; bytes are then those of each. For more
        rows than one such group holds, plan one engine for each replica.
      truncates: whether draws are cut by top-k or top-p, which sorts the logits.
      memory_share: of a device's memory, what JAX may fill. The rest is for programs themselves, the runtime and gaps.

    Every row is planned to reach `length`, with a prompt of its own. Rows without a bound are planned with room to their end,
    where the engine would admit more and swap some out.

    Raises:
      ValueError: an unknown device, a setting out of its range, or a model or batch that does not fit; with the arithmetic.
      FileNotFoundError: an unknown model; the known ones are listed.
    """
    name, config = find_shape(model)
    device, policy = find_device(device), spread_policies(policy, 1)[0]
    length = min(config.max_positions, 16_384) if length is None else length
    page_size = PAGE_SIZES[device.platform] if page_size is None else page_size
    check_counts(length=length, prompt=prompt, batch=batch, page_size=page_size, num_devices=num_devices)
    check_lengths(policy, prompt, length, config.max_positions)
    if not 0 < typed("memory_share", memory_share, float) <= 1:
        raise ValueError(f"memory_share is a share of the device's memory and must lie in (0, 1]; got {memory_share}.")
    meshes.check_divides(config, num_devices)
    meshes.check_policy(policy, num_devices)
    dtype = dtype_of(model, device, dtype)
    setting = Setting(config, device, dtype, num_devices, page_size, prompt, truncates, memory_share)
    own = setting.estimate(policy, length, batch)
    check_fits(setting, policy, length, own)
    most_full = setting.estimate(full(), length)
    whole = most_full if batch is None or batch >= most_full.batch else setting.estimate(full(), length, batch)
    kv = 2 * setting.local.head_size * setting.itemsize + 4
    return Plan(
        model=name,
        device=device,
        dtype=jnp.dtype(dtype).name,
        num_devices=num_devices,
        page_size=page_size,
        prompt=prompt,
        length=length,
        num_weights=count_weights(setting.shapes),
        weight_bytes=setting.weight_bytes,
        bytes_per_token=config.num_layers * setting.local.num_kv_heads * kv,
        usable_bytes=setting.usable_bytes,
        own=own,
        full=whole,
        rows_pay_from=pays_from(setting, policy, lambda one, other: one.batch > other.batch),
        speed_pays_from=pays_from(setting, policy, is_faster),
        notes=tuple(notes_of(setting, policy)),
    )


def dtype_of(model: Any, device: Device, dtype: Any) -> Any:
    """The type of weights and cache."""
    if dtype is not None:
        try:
            dtype = jnp.dtype(dtype)
        except TypeError:
            raise ValueError(f"dtype must be float32, bfloat16 or float16; got {dtype!r}.") from None
        if dtype.name not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be float32, bfloat16 or float16; got {dtype.name}.")
        return dtype
    if isinstance(model, Model | Params):
        return (model.params if isinstance(model, Model) else model).embedding.dtype
    return jnp.dtype(jnp.float32 if device.platform == "cpu" else jnp.bfloat16)


def check_lengths(policy: Policy, prompt: int, length: int, max_positions: int) -> None:
    """Refuses lengths that no row can have."""
    if not prompt < length <= max_positions:
        raise ValueError(
            f"length counts prompt and completion: it must be above {prompt=} and at most the model's {max_positions} "
            f"positions; got {length}. Change length or prompt."
        )
    check_prompt_fits(policy, 0, prompt)


def check_fits(setting: Setting, policy: Policy, length: int, own: Estimate) -> None:
    """Refuses what does not fit, and says how many bytes are missing."""
    if own.batch and own.total_bytes <= setting.usable_bytes:
        return
    rows, most = max(1, own.batch), setting.estimate(policy, length).batch
    missing = own.total_bytes - setting.usable_bytes
    raise ValueError(
        f"{rows} {'row' if rows == 1 else 'rows'} of {own.policy} must fit {setting.device.name}: weights "
        f"{setting.weight_bytes} + cache {own.state_bytes} + scratch {own.scratch.most} = {own.total_bytes} bytes a device, "
        f"{setting.usable_bytes} are usable ({setting.memory_share:.0%} of {setting.device.memory}), {missing} bytes short; "
        f"{most or 'no'} rows fit. Take fewer rows, a shorter length, a smaller budget, more devices or a larger one."
    )


def is_faster(one: Estimate, other: Estimate) -> bool:
    """Whether one may make more tokens a second than another, by a percent or more."""
    return (one.tokens_per_second or 0.0) > MARGIN * (other.tokens_per_second or 0.0)


def pays_from(setting: Setting, policy: Policy, is_better: Callable[[Estimate, Estimate], bool]) -> int | None:
    """The shortest length at which a policy is better than the full cache, each with as many rows as fit; None for never.

    Lengths are doubled until it is better and halved between then; below a length that pays, another might.
    """

    def pays(length: int) -> bool:
        return is_better(setting.estimate(policy, length), setting.estimate(full(), length))

    longest, low, high = setting.config.max_positions, setting.prompt, 2 * setting.prompt
    while high < longest and not pays(high):
        low, high = high, 2 * high
    high = min(high, longest)
    if not pays(high):
        return None
    return bisect.bisect_left(range(low + 1, high + 1), True, key=pays) + low + 1


def notes_of(setting: Setting, policy: Policy) -> list[str]:
    """What the figures leave out."""
    notes = ["Tokens a second are a bound from the device's figures (a roofline), no measurement; prefill is not in them."]
    if setting.device.bandwidth is None:
        notes[0] = f"No speed: {setting.device.name}'s bandwidth and rate are not known. Give a jkv.Device with both."
    if setting.device.platform == "gpu":
        notes.append(f"On a GPU, JAX takes 75 % by default: set XLA_PYTHON_CLIENT_MEM_FRACTION={setting.memory_share:g}.")
    if policy.read is not None:
        notes.append(f"{policy.name} frees nothing: it reads fewer pages, and keeps their bounds beside them.")
    if policy.share is not None:
        notes.append(f"What {policy.name} saves depends on the text: rows are planned as if it shared nothing.")
    if not policy.is_bounded and policy.schedule is not None:
        notes.append(f"{policy.name}'s cache grows with the text: rows have room to their end.")
    if policy.steer is not None:
        notes.append(f"{policy.name} steers, to think less: the length is planned as given.")
    if setting.num_devices > 1:
        notes.append("Traffic between devices is not in the bound.")
    return notes


def report(plan: Plan) -> str:
    """A plan for people to read."""
    own, whole, device = plan.own, plan.full, plan.device
    count = "one" if plan.num_devices == 1 else f"each of {plan.num_devices}"
    both = [own] if own.policy == whole.policy else [own, whole]

    def line(label: str, *cells: str) -> str:
        return f"  {label:<42}" + "".join(f"{cell:>18}" for cell in cells)

    def rows(label: str, cell: Callable[[Estimate], str]) -> str:
        return line(label, *(cell(one) for one in both))

    lines = [
        f"{plan.model}, {plan.dtype}, on {count} {device.name} ({size(device.memory)}, {size(plan.usable_bytes)} usable)",
        f"prompt {plan.prompt:,} + {plan.length - plan.prompt:,} new tokens, pages of {plan.page_size} slots",
        line(f"{plan.num_weights:,} weights", size(plan.weight_bytes)),
        line("keys, values, positions of a token", f"{plan.bytes_per_token:,} B"),
        "",
        rows("", lambda one: one.policy),
        rows("most slots of a row", lambda one: f"{one.max_slots:,}"),
        rows("bytes of a row", lambda one: size(one.row_bytes)),
        rows("scratch of prefill, at most", lambda one: size(one.scratch.prefill)),
        rows("scratch of a decode chunk, at most", lambda one: size(one.scratch.decode)),
        rows("scratch of compaction, at most", lambda one: size(one.scratch.compaction)),
        rows("rows", lambda one: f"{one.batch:,}" if one.batch else "none fits"),
        rows("cache of all rows", lambda one: size(one.state_bytes) if one.batch else "-"),
        rows("all bytes", lambda one: size(one.total_bytes) if one.batch else "-"),
    ]
    if own.tokens_per_second is not None:
        lines += [
            rows("tokens/s, at most", lambda one: f"{one.tokens_per_second:,.0f}"),
            rows("limited by", lambda one: one.limited_by or "-"),
            rows("time in compaction", lambda one: "-" if one.compaction_share is None else f"{one.compaction_share:.1%}"),
        ]
    if len(both) == 2:
        lines += ["", f"  {own.policy} has more rows than the full cache {in_words(plan.rows_pay_from)}"]
        if own.tokens_per_second is not None:
            lines += [f"  {own.policy} may be faster than the full cache {in_words(plan.speed_pays_from)}"]
    return "\n".join([*lines, "", *(f"  {note}" for note in plan.notes)])


def in_words(pays_from: int | None) -> str:
    """From which length something pays, in words."""
    return "at no length that the model has" if pays_from is None else f"from {pays_from:,} tokens on, prompt included"


def size(num_bytes: int) -> str:
    """Bytes for people, in powers of ten.

    >>> size(1_230_000_000), size(999)
    ('1.23 GB', '999 B')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.3g} {unit}" if num_bytes < 1000 * scale else f"{num_bytes / scale:,.0f} {unit}"
    return f"{num_bytes:.0f} B"
