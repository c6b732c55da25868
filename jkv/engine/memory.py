"""Pages and bytes: what a request needs, what a pool holds, what a device has free. Host arithmetic."""

import bisect
import contextlib
import dataclasses
import functools
import os
import re
from pathlib import Path
from typing import Any

import jax

from jkv.cache import default_page_size, states
from jkv.cache.pool import num_pages_of
from jkv.cache.sealed_pages import num_float_pages
from jkv.cache.slot_size import POSITION_BYTES
from jkv.checks import check_memory, shown, size
from jkv.engine.device_program import LEAST_ROWS
from jkv.engine.processes import least_bytes
from jkv.engine.requests import Request
from jkv.errors import InputError
from jkv.eviction import Policy
from jkv.model.params import ModelConfig, Params
from pallas_kernels import sealed
from pallas_kernels.choice import is_old_gpu
from pallas_kernels.dispatch import platform_of
from pallas_kernels.quantised import Format, vector_bytes
from pallas_kernels.sealed import SealedFormat

AUTO_SHARE = 0.85  # of an accelerator's free memory; the rest is for temporaries of programs
TABLE_SHARE = 1 / 8  # of the free memory, at most, for page tables
PLAIN_SHARE = 0.5  # the same without Triton: plain XLA gathers the keys and values of all rows
STEP_PIECE = 16  # new tokens of a later turn that are prefilled at a time, where a policy evicts in each step
HOST_MEMORY = "JKV_HOST_MEMORY"
MEMORY = Path("/proc/meminfo")
AUTO_HOST_SHARE = 0.5  # of the free memory of a machine whose device is its CPU


def page_size_for(params: Params, page_size: int | None, kv_format: Format | None = None) -> int:
    """Slots of a page: those asked for, or of the format, or the usual number on the devices of the weights."""
    if isinstance(kv_format, SealedFormat):
        return kv_format.page
    return page_size or default_page_size(platform_of(next(iter(params.embedding.devices()))))


def page_bytes(params: Params, page_size: int, has_bounds: bool = False, kv_format: Format | None = None) -> int:
    """Bytes of one page: keys, values and positions, and the bounds of its keys where a policy needs them."""
    size, dtype = params.config.head_size, params.embedding.dtype
    own = sealed.page_bytes(size, dtype, kv_format, page_size) + page_size * POSITION_BYTES
    return own + has_bounds * 2 * vector_bytes(size, dtype, None)


def num_layer_heads(params: Params) -> int:
    """Number of (layer, KV head) pairs; each has its own pages."""
    return params.config.num_paged_layers * params.config.num_kv_heads


def num_row_pages(params: Params, num_slots: int, page_size: int) -> int:
    """Pages of a row with `num_slots` slots in every layer and KV head."""
    return num_layer_heads(params) * num_pages_of(num_slots, page_size)


def most_pages(params: Params, request: Request, page_size: int, num_shards: int = 1) -> int:
    """The most pages that a request holds once its prompt is prefilled and compacted, on all shards of a mesh."""
    return most_pages_of(params.config, request.policy, request.first_prompt, request.most_generated, page_size, num_shards)


def most_pages_of(config: ModelConfig, policy: Policy, prompt: int, new: int, page_size: int, num_shards: int = 1) -> int:
    """`most_pages` of a request with `prompt` prompt tokens and at most `new` new ones."""
    return policy.most_pages(prompt, new, config.num_paged_layers, config.num_kv_heads, page_size, num_shards)


def most_slots(params: Params, request: Request) -> int:
    """The most slots that a request ever fills in a layer and KV head."""
    config, policy = params.config, request.policy
    widest = policy.widest(request.first_prompt, request.most_generated, config.num_paged_layers, config.num_kv_heads)
    if not (request.num_before and policy.evicts_in_steps):
        return widest
    return max(widest, int(policy.layer_budgets(config.num_paged_layers).max()) + 1 + STEP_PIECE)


def window_bytes(params: Params, num_rows: int, page_size: int, kv_format: Format | None = None, places: int = 1) -> int:
    """Bytes that a number of rows have outside of the pool: rings of layers with a sliding window, floats beside sealed pages.

    `places` are the tokens that a step may append to a row.
    """
    config, own, dtype = params.config, params.config.in_windows, params.embedding.dtype
    slots = num_pages_of(config.window + places - 1, page_size) * page_size
    of_row = config.num_ring_layers * own.num_kv_heads * slots * 2 * vector_bytes(own.head_size, dtype, None)
    if isinstance(kv_format, SealedFormat):
        tail = config.num_paged_layers * config.num_kv_heads * num_float_pages(places) * page_size
        of_row += tail * 2 * vector_bytes(config.head_size, dtype, None)
    return num_rows * of_row


def state_bytes(config: ModelConfig, num_rows: int, dtype: Any) -> int:
    """Bytes of the recurrent states of a number of rows; 0 without such layers."""
    if config.delta_net is None:
        return 0
    sizes = {"num_layers": len(config.state_layers), "num_rows": num_rows, "dtype": dtype, "poison": False}
    shapes = jax.eval_shape(functools.partial(states.create, config.delta_net, **sizes))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def num_pool_pages(
    params: Params,
    max_running: int,
    max_slots: int,
    *,
    page_size: int,
    bytes_per_page: int,
    kv_memory: int | str | None = None,
    num_pages: int | None = None,
    num_shards: int = 1,
    kv_format: Format | None = None,
    places: int = 1,
) -> int:
    """Pages of a pool whose size is given in pages, in bytes, as "auto" (the free memory), or as None (full rows, if they fit).

    Windows and recurrent states are allocated beside the pool, and count in a size in bytes and in the free memory; in the
    latter also the states that a step of several `places` keeps while it runs.
    A size in bytes is capped at the pages that can ever be in use: full rows, and as many again for prompts that samples
    share. All `num_shards` pools of a mesh have equally many pages, so the total is rounded down.

    Raises:
      ValueError: a setting out of its range, both settings, or more than the device has free.
    """
    rows = max_running * num_row_pages(params, max_slots, page_size)
    num_rows = max(max_running, LEAST_ROWS.get(platform_of(next(iter(params.embedding.devices()))), 1))
    beside = window_bytes(params, num_rows, page_size, kv_format, places)
    of_states = state_bytes(params.config, num_rows, params.embedding.dtype)
    beside, in_steps = beside + of_states, places * of_states if places > 1 else 0
    free = free_pool_bytes(params, num_shards, share=1.0) - beside - in_steps
    if 4 * rows > TABLE_SHARE * free:
        rule = (
            "Page tables must fit an eighth of the device's free memory, {free}: {got}. Lower max_running or {field}, or raise "
            "page_size."
        )
        got = f"{max_running} rows of {max_slots} slots in pages of {page_size} take {size(4 * rows)}"
        raise InputError(rule, field="max_slots", code="does_not_fit", free=size(free), got=got)
    if kv_memory is not None and num_pages is not None:
        rule = "The pool is given in bytes or in pages, not both; got {field}={got} and num_pages={pages}. Pass one."
        raise InputError(rule, field="kv_memory", code="conflict", got=shown(kv_memory), pages=num_pages)
    if kv_memory is None and num_pages is None:
        num_pages = cap_to_free(params, rows, bytes_per_page, num_shards, beside + in_steps)
        return num_pages - num_pages % num_shards
    if kv_memory == "auto":
        kv_memory = max(1, free_pool_bytes(params, num_shards) - in_steps)
    if num_pages is None:
        num_bytes = check_memory(kv_memory)
        if beside and num_bytes < beside + bytes_per_page:
            windows, recurrent = params.config.num_ring_layers, len(params.config.state_layers)
            outside = " and ".join(
                [f"the windows of {windows} layers"] * bool(windows)
                + [f"the recurrent states of {recurrent} layers"] * bool(recurrent)
                + ["the floats of pages that are not sealed"] * isinstance(kv_format, SealedFormat)
            )
            rule = "{field} must hold {outside} for all rows, and a pool; got {got}. Raise it, or lower max_running."
            needed = f"{outside}, {size(beside)}"
            raise InputError(rule, field="kv_memory", code="does_not_fit", outside=needed, got=size(num_bytes))
        num_pages = min(2 * rows, (num_bytes - beside) // bytes_per_page)
    if num_pages * bytes_per_page > free:
        rule = 'The pool must fit the device: {got}, and {free} are free. Lower {field} or num_pages, or pass {field}="auto".'
        got = f"{num_pages} pages of {bytes_per_page} bytes = {size(num_pages * bytes_per_page)}"
        raise InputError(rule, field="kv_memory", code="does_not_fit", got=got, free=size(free))
    return num_pages - num_pages % num_shards


def cap_to_free(params: Params, num_pages: int, bytes_per_page: int, num_shards: int = 1, beside: int = 0) -> int:
    """At most `num_pages`, as many as fit the device with the bytes `beside` them, at least one; with fewer, fewer rows run.

    The number is a compiled shape, and the free memory changes all the time: fewer pages are a power of two, or half as many
    again.
    """
    free = max(1, (free_pool_bytes(params, num_shards) - beside) // bytes_per_page)
    return num_pages if num_pages <= free else coarse(free)


def coarse(number: int) -> int:
    """The largest number up to this one that is a power of two, or half as many again.

    >>> [coarse(number) for number in (1, 2, 3, 5, 7, 1000, 554_587)]
    [1, 2, 3, 4, 6, 768, 524288]
    """
    power = 1 << (number.bit_length() - 1)
    return power + power // 2 if number >= power + power // 2 and power > 1 else power


def free_pool_bytes(params: Params, num_shards: int, share: float | None = None) -> int:
    """Bytes that `num_shards` pools may take in all, in equal parts, on the devices that hold the weights.

    CPU devices share one memory, where a pool that several devices have takes its bytes as often.
    """
    devices = params.embedding.devices()
    here = [device for device in devices if device.process_index == jax.process_index()]
    least = min(free_bytes(device, share) for device in here)
    if len(here) < len(devices):
        least = least_bytes(least)
    is_one_memory = all(device.platform == "cpu" for device in devices)
    return least * num_shards // (len(devices) if is_one_memory else 1)


def free_bytes(device: Any, share: float | None = None) -> int:
    """Bytes that a pool may take on a device: `share` of the free memory, or a safe share if None."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int((stats["bytes_limit"] - stats["bytes_in_use"]) * (share or (PLAIN_SHARE if is_old_gpu() else AUTO_SHARE)))
    return int(free_host_bytes() * (share or AUTO_HOST_SHARE))


def free_host_bytes() -> int:
    """Bytes of host memory that programs may take: `JKV_HOST_MEMORY`, else what Linux calls available, with its file cache.

    Raises:
      InputError: JKV_HOST_MEMORY is no number of bytes.
    """
    if given := os.environ.get(HOST_MEMORY):
        with contextlib.suppress(ValueError, OverflowError):
            if (num_bytes := int(float(given))) > 0:
                return num_bytes
        rule = "{field} must be a number of bytes, such as 16e9; got {got}. Correct the environment variable."
        raise InputError(rule, field=HOST_MEMORY, got=shown(given))
    with contextlib.suppress(OSError):
        if found := re.search(r"^MemAvailable:\s+(\d+) kB", MEMORY.read_text(), re.MULTILINE):
            return 1024 * int(found[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # macOS reports only the total


def lowered(
    params: Params, request: Request, *, max_slots: int, num_pages: int, page_size: int, num_shards: int = 1
) -> Request:
    """A request whose limit the caller left open, with the highest one that fits; any other as it is."""

    def is_too_long(new: int) -> bool:
        one = dataclasses.replace(request, max_new_tokens=new)
        return most_slots(params, one) > max_slots or most_pages(params, one, page_size, num_shards) > num_pages

    if not request.has_open_limit or not is_too_long(request.max_new_tokens):
        return request
    most = bisect.bisect_left(range(1, request.max_new_tokens), True, key=is_too_long)
    return dataclasses.replace(request, max_new_tokens=max(1, most))


def check_fits(
    params: Params,
    request: Request,
    *,
    max_slots: int,
    num_pages: int,
    page_size: int,
    bytes_per_page: int,
    num_shards: int = 1,
) -> None:
    """Refuses a request that an engine of this size could not serve even by itself."""
    slots, of_page = most_slots(params, request), bytes_per_page
    if slots > max_slots:
        rule = (
            "A request may fill {most} slots in a layer and KV head; this one fills {slots} ({about}). Lower the budget or "
            "{max_new_tokens}, or raise {max_slots}; align_steps may take twice the slots."
        )
        about = f"{len(request.prompt)} prompt tokens, at most {request.max_new_tokens} new, policy {request.policy.name}"
        raise InputError(rule, code="does_not_fit", most=max_slots, slots=slots, about=about)
    prefilled = slots if request.num_before and request.policy.evicts_in_steps else request.first_prompt
    needed = max(most_pages(params, request, page_size, num_shards), num_row_pages(params, prefilled, page_size))
    if needed > num_pages:
        one, heads = num_pages_of(slots, page_size), num_layer_heads(params)
        share = f"each of {heads} layer-heads =" if needed == one * heads else f"the widest of {heads} layer-heads, in all"
        rule = (
            "The pool must hold the largest request: {needed}; the pool has {got}. Lower the budget or {max_new_tokens}, raise "
            "{kv_memory}, or lower {page_size}."
        )
        most = f"up to {slots} slots = {one} pages of {page_size} in {share} {needed} pages of {of_page} bytes"
        got = f"{num_pages} pages = {size(num_pages * of_page)}"
        raise InputError(rule, code="does_not_fit", needed=f"{most} = {size(needed * of_page)}", got=got)
