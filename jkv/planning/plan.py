"""`jkv.plan`: what fits a device, and how fast it could be, before anything is loaded or compiled.

Bytes of weights and cache are exact, as the engine's arrays have them (`jkv.planning.estimate`). Scratch is an upper estimate
(`jkv.planning.scratch`), tokens a second are a bound (`jkv.planning.roofline`).
"""

import bisect
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jkv import notebook
from jkv.cache import default_page_size
from jkv.cache.pool import num_pages_of
from jkv.cache.slot_size import slot_size
from jkv.checkpoints.gguf_header import read_header
from jkv.checkpoints.loading import find_gguf
from jkv.checkpoints.model_shapes import find_shape
from jkv.checkpoints.weight_reading import float_dtype, gguf_shapes
from jkv.checks import check_counts, counted, out_of_range, shown, size, typed
from jkv.engine.drafters import AUTO, Drafter, ngram
from jkv.engine.form_store import first_entries
from jkv.engine.memory import state_bytes
from jkv.engine.options import EngineOptions
from jkv.engine.parts.drafting import why_by_step
from jkv.engine.policy_checks import check_speculation
from jkv.engine.requests import check_prompt_fits, spread_policies
from jkv.errors import refused
from jkv.eviction import Policy
from jkv.eviction.byte_budget import check_sealing_on, in_slots
from jkv.eviction.policy import check_shape
from jkv.model.eight_bits import AS_STORED, check_format, format_of
from jkv.model.params import Model, ModelConfig, Params, count_weights
from jkv.model.sampling import Sampling
from jkv.model.sharding import check_divides
from jkv.planning.devices import Device, find_device
from jkv.planning.estimate import Estimate, Setting
from jkv.policies import full
from pallas_kernels import KERNELS, choice
from pallas_kernels.dispatch import Kernel, best
from pallas_kernels.models import ModelShape, Workload
from pallas_kernels.sealed import SEALED, SealedFormat

RANK = EngineOptions.adapter_rank
DRAWN = Sampling(top_p=0.95)  # what is planned for where nothing is said
MARGIN = 1.01  # of speeds: where arithmetic is the limit, they differ only by rounding


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """The result of `jkv.plan`; print it.

    Attributes:
      model, device, dtype, weight_dtype, kv_dtype, num_devices, page_size, prompt, length: the setting that was planned.
      speculate, max_adapters, adapter_rank: likewise.
      num_weights: weights of the whole model.
      weight_bytes: bytes of weights on each device.
      adapter_bytes: bytes of `max_adapters` places for adapters of `adapter_rank`, on each device.
      bytes_per_token: bytes of one token's keys, values and positions in all layers, on each device.
      usable_bytes: bytes of each device's memory that the plan may fill.
      form_bytes: bytes of the tables of forms on each device, from the first request with a form on; in no other figure.
      own: the estimate for the policy.
      full: the estimate for the full cache, for comparison.
      rows_pay_from: the shortest length, prompt included, at which more rows fit than with full caches; None if there is none.
      speed_pays_from: the shortest length at which the bound on tokens a second is higher by a percent or more, or None.
      kernels: the implementation that the device gets of each kernel: "gpu", "tpu", or plain XLA's "reference".
      notes: what the figures do not include.
    """

    model: str
    device: Device
    dtype: str
    weight_dtype: str | None
    kv_dtype: str | None
    num_devices: int
    page_size: int
    prompt: int
    length: int
    num_weights: int
    weight_bytes: int
    bytes_per_token: int
    usable_bytes: int
    form_bytes: int
    own: Estimate
    full: Estimate
    rows_pay_from: int | None
    speed_pays_from: int | None
    kernels: dict[str, str]
    notes: tuple[str, ...]
    speculate: Drafter | None = None
    max_adapters: int = 0
    adapter_rank: int = RANK
    adapter_bytes: int = 0

    @property
    def engine(self) -> dict[str, Any]:
        """Settings of the `jkv.Engine` that was planned: `jkv.Engine(model, policies=[policy], **plan.engine)`."""
        own = self.own
        return {
            "max_running": own.batch,
            "max_slots": own.max_slots,
            "page_size": self.page_size,
            "kv_dtype": self.kv_dtype,
            "num_pages": own.num_pages,
            "speculate": self.speculate,
            "max_adapters": self.max_adapters,
            "adapter_rank": self.adapter_rank,
        }

    def __repr__(self) -> str:
        return report(self)

    def _repr_html_(self) -> str:
        return notebook.text(repr(self))


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
    sampling: Sampling | None = None,
    memory_share: float = 0.9,
    kv_dtype: str | None = None,
    weight_dtype: str | None = None,
    speculate: Drafter | str | None = None,
    max_adapters: int = 0,
    adapter_rank: int = RANK,
) -> Plan:
    """Computes what fits a device, how fast it could be, and whether compression pays, from a model's shape alone.

    Args:
      model: what `jkv.load` returns, a `ModelConfig`, a name from `jkv plan --list`, a TOML file of a `ModelConfig`'s
        fields, or a checkpoint (a folder or hub name), of which only config.json is read.
      device: one of `jkv.DEVICES`, "cpu" (this machine, no speed), or a `jkv.Device` of your own.
      policy: how the cache stays small; None is the full cache.
      length: tokens of a row at its end, prompt included; None takes 16,384, or the model's positions if fewer.
      prompt: tokens of its prompt.
      batch: rows that decode together; None takes as many as fit.
      page_size: slots of a page; None takes 128 on a TPU and for "kvarn", 16 elsewhere.
      dtype: of weights and cache; None is the loaded model's, or what `jkv.load` takes of a bfloat16 checkpoint: float32 on a
        CPU and on a GPU of compute capability below 8.0, and bfloat16 elsewhere.
      num_devices: devices over which KV heads are split or copied, as with `jkv.Engine(mesh=...)`; bytes are then per
        device. For more rows than such a group holds, plan one engine for each replica.
      sampling: how tokens are drawn. A cut by top-k, top-p or min-p keeps two copies of the logits, penalties keep counts of
        every token in every row, which each step reads. None plans for draws that are cut, without penalties.
      kv_dtype: "int8", "fp8", "int4" or "kvarn" for quantised pages (`jkv.EngineOptions`); None keeps keys and values in
        `dtype`.
      weight_dtype: "int8" or "fp8" for matrices in 8 bits, "blocks" for matrices of a GGUF file on a CPU (`jkv.load`); None
        keeps them in `dtype`.
      speculate: where guesses of the next tokens come from (`jkv.EngineOptions`); None for steps of one token. Its memory
        counts; the bound on tokens a second is for steps without guesses.
      max_adapters, adapter_rank: places for adapters that requests may choose (`jkv.EngineOptions`).
      memory_share: share of a device's memory that JAX may fill. The rest is for program code, the runtime and gaps.

    Every row is planned to reach `length`, and shares no prompt. Unbounded rows are planned with pages to their end; the engine
    would admit more rows and swap some out.

    Raises:
      ValueError: an unknown device, a setting out of its range, or a model or batch that does not fit; with the arithmetic.
      FileNotFoundError: an unknown model; the known ones are listed.
    """
    name, config = find_shape(model)
    device = find_device(device)
    dtype, kv_format = dtype_of(model, device, dtype), EngineOptions(kv_dtype=kv_dtype, page_size=page_size).kv_format
    check_sealing_on(device.platform, kv_format, config.head_size)
    policy = spread_policies(in_slots(policy, slot_size(config, dtype, kv_format)), 1, kv_format=kv_format)[0]
    length = min(config.max_positions, 16_384) if length is None else length
    if page_size is None:
        page_size = kv_format.page if isinstance(kv_format, SealedFormat) else default_page_size(device.platform)
    check_counts(length=length, prompt=prompt, batch=batch, page_size=page_size, num_devices=num_devices)
    check_lengths(policy, prompt, length, config.max_positions)
    check_shape(policy, config)
    if not 0 < typed("memory_share", memory_share, float) <= 1:
        raise out_of_range("memory_share", "lie in (0, 1], a share of the device's memory", memory_share)
    check_divides(config, num_devices)
    sampling = DRAWN if sampling is None else typed("sampling", sampling, Sampling)
    if speculate == AUTO:  # no more guesses on an accelerator
        speculate = None if why_by_step(policy) else ngram()
    max_slots = policy.widest(prompt, length - prompt, config.num_paged_layers, config.num_kv_heads)
    options = EngineOptions(
        speculate=speculate, kv_dtype=kv_dtype, page_size=page_size, max_adapters=max_adapters, adapter_rank=adapter_rank
    )
    drafter = check_speculation(options, [policy], config, 1, num_pages_of(max_slots, page_size))
    of_weights = check_format(weight_dtype)
    stored = stored_shapes(model, config, device, dtype) if of_weights == AS_STORED else None
    setting = Setting(
        *(
            config,
            device,
            dtype,
            num_devices,
            page_size,
            prompt,
            sampling,
            memory_share,
            kv_format,
            of_weights,
            drafter,
            stored,
        ),
        max_adapters=options.max_adapters,
        adapter_rank=options.adapter_rank,
    )
    own = setting.estimate(policy, length, batch)
    check_fits(setting, policy, length, own)
    most_full = setting.estimate(full(), length)
    whole = most_full if batch is None or batch >= most_full.batch else setting.estimate(full(), length, batch)
    kv = slot_size(config, dtype, kv_format).of_head
    return Plan(
        model=name,
        device=device,
        dtype=jnp.dtype(dtype).name,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        num_devices=num_devices,
        page_size=page_size,
        prompt=prompt,
        length=length,
        num_weights=count_weights(setting.shapes),
        weight_bytes=setting.weight_bytes,
        bytes_per_token=config.num_paged_layers * setting.local.num_kv_heads * kv,
        usable_bytes=setting.usable_bytes,
        form_bytes=2 * first_entries(config.vocab_size),
        own=own,
        full=whole,
        rows_pay_from=pays_from(setting, policy, lambda own, other: own.batch > other.batch),
        speed_pays_from=pays_from(setting, policy, is_faster),
        kernels=kernels_on(device, config, dtype, page_size, own.max_slots, kv_dtype, of_weights),
        notes=tuple(notes_of(setting, policy)),
        speculate=drafter,
        max_adapters=setting.max_adapters,
        adapter_rank=setting.adapter_rank,
        adapter_bytes=setting.adapter_bytes,
    )


def stored_shapes(model: Model | Params | ModelConfig | str | Path, config: ModelConfig, device: Device, dtype: Any) -> Params:
    """The shapes of weights in the blocks of a GGUF file.

    Raises:
      ValueError: another model, or an accelerator.
    """
    rule = 'weight_dtype="blocks" is for a GGUF file on a CPU'
    if device.platform != "cpu":
        raise refused(f"{rule}; got {device.name}. Use another weight_dtype.", weight_dtype="unsupported")
    if isinstance(model, Model | Params):
        params = model.params if isinstance(model, Model) else model
        if format_of(params) == AS_STORED:
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    elif isinstance(model, str | Path) and (file := find_gguf(model)):
        return gguf_shapes(read_header(file), config, dtype)
    raise refused(f"{rule}, or a model loaded so; got {shown(str(model))}. Give the file.", weight_dtype="unsupported")


def dtype_of(model: Any, device: Device, dtype: Any) -> Any:
    """The dtype of weights and cache."""
    if dtype is not None:
        return float_dtype(dtype)
    if isinstance(model, Model | Params):
        return (model.params if isinstance(model, Model) else model).embedding.dtype
    return jnp.dtype(jnp.float32 if device.platform == "cpu" or device.is_old_gpu else jnp.bfloat16)


def kernels_on(
    device: Device,
    config: ModelConfig,
    dtype: Any,
    page_size: int,
    slots: int,
    kv_dtype: str | None,
    weight_dtype: str | None,
) -> dict[str, str]:
    """The implementation that a device gets of each kernel, but for those that an accelerator leaves to XLA on purpose."""
    shape = ModelShape(config.num_layers, config.num_query_heads, config.num_kv_heads, config.head_size)
    workload = Workload(1, slots, page_size, dtype, kv_format=None if kv_dtype in SEALED else kv_dtype)
    platform = "cuda" if device.platform == "gpu" else device.platform
    with choice.tracing_for(device.compute_capability or choice.LEAST_CAPABILITY):  # whatever this process has
        return {
            name: best(kernel.implementations, platform, *kernel.shapes.arguments(shape, workload))
            for name, kernel in KERNELS.items()
            if (name != "sealed_attention" or kv_dtype in SEALED)
            and (name != "block_product" or weight_dtype == AS_STORED)
            and (platform == "cpu" or not is_for_cpus(kernel))
        }


def is_for_cpus(kernel: Kernel) -> bool:
    """Whether a kernel has an implementation of its own for a CPU alone."""
    return {one.platform for one in kernel.implementations.values()} == {"cpu", None}


def check_lengths(policy: Policy, prompt: int, length: int, max_positions: int) -> None:
    """Refuses lengths that no row can have."""
    if not prompt < length <= max_positions:
        raise refused(
            f"length counts prompt and completion: it must be above {prompt=} and at most the model's {max_positions} "
            f"positions; got {length}. Change length or prompt.",
            length="out_of_range",
        )
    check_prompt_fits(policy, 0, prompt)


def check_fits(setting: Setting, policy: Policy, length: int, own: Estimate) -> None:
    """Refuses a plan that does not fit, with the number of bytes missing."""
    if own.batch and own.total_bytes <= setting.usable_bytes:
        return
    rows, most = max(1, own.batch), setting.estimate(policy, length).batch
    missing = own.total_bytes - setting.usable_bytes
    adapters = f"adapters {size(setting.adapter_bytes)} + " if setting.adapter_bytes else ""
    fixes = smaller_weights(setting) if rows == 1 and not most else ["fewer rows"]
    fixes += ["fewer adapters or a lower rank"] if setting.adapter_bytes else []
    if not fixes or setting.weight_bytes < setting.usable_bytes:
        fixes += ["a shorter length", *(["a smaller budget"] if policy.is_bounded else ["a policy with a fixed budget"])]
    raise refused(
        f"{rows} {'row' if rows == 1 else 'rows'} of {own.policy} must fit {setting.device.name}: weights "
        f"{size(setting.weight_bytes)} + {adapters}cache {size(own.state_bytes)} + scratch {size(own.scratch.most)} = "
        f"{size(own.total_bytes)} a device, {size(setting.usable_bytes)} are usable ({setting.memory_share:.0%} of "
        f"{size(setting.device.memory)}), {size(missing)} short; "
        f"{most or 'no'} rows fit. Use {', '.join(fixes)}, more devices or a larger one.",
        batch="does_not_fit",
    )


def smaller_weights(setting: Setting) -> list[str]:
    """What makes the weights fit, the least change first; a smaller model, if nothing else does."""
    half = "float16" if setting.device.is_old_gpu else "bfloat16"
    changes: dict[str, dict[str, Any]] = {}
    if jnp.dtype(setting.dtype).itemsize > 2 and setting.device.platform != "cpu":
        changes[f'dtype="{half}"'] = {"dtype": jnp.dtype(half)}
    if setting.weight_dtype is None:
        changes['weight_dtype="int8"'] = {"weight_dtype": "int8"}
    fits = {
        name: dataclasses.replace(setting, **fields).weight_bytes < setting.usable_bytes for name, fields in changes.items()
    }
    return [name for name, does in fits.items() if does] or ["a smaller model"]


def is_faster(own: Estimate, other: Estimate) -> bool:
    """Whether the bound on tokens a second of `own` is higher by a percent or more."""
    return (own.tokens_per_second or 0.0) > MARGIN * (other.tokens_per_second or 0.0)


def pays_from(setting: Setting, policy: Policy, is_better: Callable[[Estimate, Estimate], bool]) -> int | None:
    """The shortest length at which a policy is better than the full cache, each with as many rows as fit; None if none is.

    The length is doubled until the policy is better, then bisected; a shorter length that also pays may be missed.
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
    """What the figures do not include."""
    config = setting.config
    notes = ["Tokens a second are a bound from the device's figures (a roofline), not a measurement; they exclude prefill."]
    if setting.device.bandwidth is None:
        notes[0] = f"No speed: {setting.device.name}'s bandwidth and rate are not known. Give a jkv.Device with both."
    if setting.device.platform == "gpu":
        notes.append(f"On a GPU, JAX takes 75 % by default: set XLA_PYTHON_CLIENT_MEM_FRACTION={setting.memory_share:g}.")
    if setting.device.is_old_gpu:
        notes.append(
            f"{setting.device.name} has a compute capability below {choice.spell(choice.LEAST_CAPABILITY)}, so no Triton "
            "kernels and no bfloat16: weights load as float32, and plain XLA computes the kernels."
        )
    if config.window_layers:
        notes.append(
            f"{len(config.window_layers)} of {config.num_layers} layers read a window of {config.window:,} tokens: every row "
            "has room for it, which counts in its bytes, and policies leave it alone."
        )
    if config.state_layers:
        of_row = state_bytes(setting.local, 1, setting.dtype)
        tokens = int(of_row // (config.num_paged_layers * setting.local.num_kv_heads * 2 * setting.vector_bytes))
        notes.append(
            f"{len(config.state_layers)} of {config.num_layers} layers have a recurrent state: {size(of_row)} a row at any "
            f"length, as much as {tokens:,} tokens take in the other {config.num_paged_layers}. Each step reads and writes it, "
            "and no policy makes it smaller."
        )
    if policy.read is not None:
        notes.append(f"{policy.name} frees nothing: it reads fewer pages, and stores bounds for all.")
    if policy.share is not None:
        notes.append(f"The savings of {policy.name} depend on the text: rows are planned without sharing.")
    if not policy.is_bounded and policy.schedule is not None:
        notes.append(f"{policy.name}'s cache grows with the text: rows have room to their end.")
    if policy.steer is not None:
        notes.append(f"{policy.name} steers, to think less: the length is planned as given.")
    if setting.speculate is not None:
        notes.append("The bound is that of steps without guesses: how many prove right depends on the text.")
    if setting.adapter_bytes:
        notes.append("What rows read of their adapters is not in the bound.")
    if setting.num_devices > 1:
        notes.append("Traffic between devices is not in the bound.")
    return notes


def report(plan: Plan) -> str:
    """The printed form of a plan."""
    own, whole, device = plan.own, plan.full, plan.device
    count = "one" if plan.num_devices == 1 else f"each of {plan.num_devices}"
    kept = f", weights in {plan.weight_dtype}" if plan.weight_dtype else ""
    kept += f", cache in {plan.kv_dtype}" if plan.kv_dtype else ""
    both = [own] if own.policy == whole.policy else [own, whole]

    def line(label: str, *cells: str) -> str:
        return f"  {label:<42}" + "".join(f"{cell:>18}" for cell in cells)

    def rows(label: str, cell: Callable[[Estimate], str]) -> str:
        return line(label, *(cell(estimate) for estimate in both))

    label = f"places for {counted(plan.max_adapters, 'adapter')} of rank {plan.adapter_rank}"
    adapters = [line(label, size(plan.adapter_bytes))] if plan.max_adapters else []
    lines = [
        f"{plan.model}, {plan.dtype}{kept}, on {count} {device.name} ({size(device.memory)}, {size(plan.usable_bytes)} usable)",
        f"prompt {plan.prompt:,} + {plan.length - plan.prompt:,} new tokens, pages of {plan.page_size} slots",
        line(f"{plan.num_weights:,} weights", size(plan.weight_bytes)),
        *adapters,
        line("keys, values, positions of a token", f"{plan.bytes_per_token:,} B"),
        line("tables of forms, if requests have any", size(plan.form_bytes)),
        "",
        rows("", lambda estimate: estimate.policy),
        rows("most slots of a row", lambda estimate: f"{estimate.max_slots:,}"),
        rows("bytes of a row", lambda estimate: size(estimate.row_bytes)),
        rows("scratch of prefill, at most", lambda estimate: size(estimate.scratch.prefill)),
        rows("scratch of a decode chunk, at most", lambda estimate: size(estimate.scratch.decode)),
        rows("scratch of compaction, at most", lambda estimate: size(estimate.scratch.compaction)),
        rows("rows", lambda estimate: f"{estimate.batch:,}" if estimate.batch else "none fits"),
        rows("cache of all rows", lambda estimate: size(estimate.state_bytes) if estimate.batch else "-"),
        rows("all bytes", lambda estimate: size(estimate.total_bytes) if estimate.batch else "-"),
    ]
    if own.tokens_per_second is not None:
        lines += [
            rows("tokens/s, at most", lambda estimate: f"{estimate.tokens_per_second:,.0f}"),
            *(
                rows(f"ms of a step: {phase}", lambda estimate, phase=phase: in_ms(estimate.phases.get(phase)))
                for phase in own.phases or whole.phases
            ),
            rows("limited by", lambda estimate: estimate.limited_by or "-"),
            rows(
                "time in compaction",
                lambda estimate: "-" if estimate.compaction_share is None else f"{estimate.compaction_share:.1%}",
            ),
        ]
    if len(both) == 2:
        lines += ["", f"  {own.policy} has more rows than the full cache {in_words(plan.rows_pay_from)}"]
        if own.tokens_per_second is not None:
            lines += [f"  {own.policy} may be faster than the full cache {in_words(plan.speed_pays_from)}"]
    names = sorted(set(plan.kernels.values()))
    of = {name: ", ".join(kernel for kernel, taken in plan.kernels.items() if taken == name) for name in names}
    lines += ["", *(f"  kernels by {'plain XLA' if name == 'reference' else name}: {kernels}" for name, kernels in of.items())]
    return "\n".join([*lines, "", *(f"  {note}" for note in plan.notes)])


def in_ms(seconds: float | None) -> str:
    """Milliseconds as text."""
    return "-" if seconds is None else f"{1e3 * seconds:.3g}"


def in_words(pays_from: int | None) -> str:
    """The length from which something pays, as text."""
    return "at no length that the model has" if pays_from is None else f"from {pays_from:,} tokens on, prompt included"
