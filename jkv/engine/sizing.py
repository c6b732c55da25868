"""How large an engine is that is built for known requests: rows, slots and pages."""

import dataclasses
from collections.abc import Sequence

from jkv.engine.memory import (
    cap_to_free,
    coarse,
    free_pool_bytes,
    lowered,
    most_pages,
    most_slots,
    num_row_pages,
    page_bytes,
    page_size_for,
)
from jkv.engine.mesh import mesh_for, num_pools
from jkv.engine.options import EngineOptions
from jkv.engine.requests import Request
from jkv.eviction import Policy
from jkv.model.params import Model, Params
from jkv.model.sharding import shard
from jkv.replay.score import round_up

PROMPT_ROOM = 256  # slots of a shared prompt that a pool has room for, at least
DEFAULT_RUNNING = 32


def sized(
    model: Model, options: EngineOptions, requests: Sequence[Sequence[Request]], num_engines: int = 1
) -> tuple[Model, EngineOptions]:
    """The model on the engine's mesh, and the options with sizes for these requests, grouped by prompt; given sizes stay.

    Weights are placed first, because the pool gets what they leave free on each device. `num_engines` share the requests.
    """
    mesh = mesh_for(options.mesh, model.params)
    if mesh is not None:
        options = dataclasses.replace(options, mesh=mesh)
        model = dataclasses.replace(model, params=shard(model.params, mesh))
    num_shards = num_pools(mesh)
    params, n, page_size = model.params, len(requests[0]), page_size_for(model.params, options.page_size, options.kv_format)
    policies = [group[0].policy for group in requests]
    every = [request for group in lowered_to_memory(model, requests, options) for request in group]
    share = -(-len(every) // num_engines)
    num_rows = options.max_running or min(1 << (share - 1).bit_length(), DEFAULT_RUNNING)
    max_slots = options.max_slots or round_up(max(most_slots(params, request) for request in every))
    num_pages = options.num_pages
    if options.kv_memory is None and num_pages is None:
        num_pages = default_num_pages(params, every, n, num_rows, max_slots, page_size, num_shards)
        has_bounds = any(policy.read is not None for policy in policies)
        bytes_per_page = page_bytes(params, page_size, has_bounds, options.kv_format)
        num_pages = cap_to_free(params, num_pages, bytes_per_page, num_shards)
    max_stop_ids = max(options.max_stop_ids, *(len(request.stop_ids) for request in every))
    sizes = {"max_running": num_rows, "max_slots": max_slots, "num_pages": num_pages, "max_stop_ids": max_stop_ids}
    return model, options.changed(sizes | {"policies": list(dict.fromkeys(policies))})


def lowered_to_memory(model: Model, requests: Sequence[Sequence[Request]], options: EngineOptions) -> list[list[Request]]:
    """Requests whose limit of new tokens was left open, with no more than one row of the pool, or of the free memory, holds."""
    params, page_size, config = model.params, page_size_for(model.params, options.page_size, options.kv_format), model.config
    if not any(group[0].has_open_limit for group in requests):
        return [list(group) for group in requests]
    num_shards = num_pools(options.mesh)
    has_bounds = any(group[0].policy.read is not None for group in requests)
    bytes_per_page = page_bytes(params, page_size, has_bounds, options.kv_format)
    num_pages = options.num_pages
    if num_pages is None:
        num_bytes = options.kv_memory if isinstance(options.kv_memory, int) else free_pool_bytes(params, num_shards)
        num_pages = coarse(max(1, num_bytes // bytes_per_page))
    sizes = {"max_slots": options.max_slots or config.max_positions, "num_pages": num_pages, "page_size": page_size}
    sizes["num_shards"] = num_shards
    found: dict[tuple[int, Policy], int] = {}  # equal prompts' lengths and policies are looked up once
    for group in requests:
        key = len(group[0].prompt), group[0].policy
        if key not in found:
            found[key] = lowered(params, group[0], **sizes).max_new_tokens
    return [
        [
            dataclasses.replace(one, max_new_tokens=found[len(one.prompt), one.policy]) if one.has_open_limit else one
            for one in group
        ]
        for group in requests
    ]


def default_num_pages(
    params: Params, requests: Sequence[Request], n: int, num_rows: int, max_slots: int, page_size: int, num_shards: int
) -> int:
    """Pages for full rows, and for the prompts that running samples may share.

    The number does not depend on whether prompts are equal, nor on their lengths up to `PROMPT_ROOM` slots: the pool's size is
    a compiled shape, and other prompts must compile nothing.
    """
    # Unequal heads may round up more often.
    widest_row = max(most_pages(params, request, page_size, num_shards) for request in requests)
    rows = num_rows * max(widest_row, num_row_pages(params, max_slots, page_size))
    if len(requests) == 1:
        return rows
    longest = max(int(request.first_slots(1).max()) for request in requests)
    prefix = num_row_pages(params, min(max_slots, max(PROMPT_ROOM, round_up(longest))), page_size)
    return rows + (-(-num_rows // max(n, 2)) + 1) * prefix
