"""One engine on the devices of several processes (`jax.distributed`), each of which runs the same Python program.

Every process calls the engine with the same requests in the same order. Host records follow from what programs return, so they
stay equal without messages. Three things would not by themselves, and are settled here: arrays of which a process has only its
part, the random seeds of requests that give none, and the free memory.
"""

import dataclasses
import re
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jkv.engine.requests import Request
from jkv.errors import refused


def spans(mesh: Mesh | None) -> bool:
    """Whether a mesh has devices of other processes."""
    return mesh is not None and any(device.process_index != jax.process_index() for device in mesh.devices.flat)


def check_processes(mesh: Mesh) -> None:
    """Refuses a mesh of some processes of several: arrays are gathered over all of them.

    Raises:
      ValueError: it has devices of others, and not of every process.
    """
    found = {device.process_index for device in mesh.devices.flat}
    if found != {jax.process_index()} and len(found) != jax.process_count():
        raise refused(
            f"The devices of an engine's mesh must belong to this process, number {jax.process_index()}, or to all of the "
            f"{jax.process_count()}; got processes {sorted(found)}. Build it from jax.local_devices() or jax.devices().",
            mesh="unsupported",
        )


def host(tree: Any) -> Any:
    """The arrays on the host, whole; all processes that have parts of them call this at the same place."""

    def gathered(x: Any) -> Any:
        is_part = isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)
        return multihost_utils.process_allgather(x, tiled=True) if is_part else x

    return jax.device_get(jax.tree.map(gathered, tree))


def copy_to_host(tree: Any) -> None:
    """Begins to copy arrays to the host, where this process has all of them."""
    for x in jax.tree.leaves(tree):
        if x.is_fully_addressable or x.is_fully_replicated:
            x.copy_to_host_async()


def least_bytes(number: int) -> int:
    """The least number of bytes that any process has, in whole kilobytes: arrays have no integers of 64 bits."""
    return int(np.min(multihost_utils.process_allgather(np.uint32(number >> 10)))) << 10


def agreed(requests: Sequence[Request]) -> list[Request]:
    """The requests with the seeds of the first process, where fresh entropy differs.

    Raises:
      ValueError: another process has submitted others.
    """
    fresh = [request.seed if request.sampling.seed is None else 0 for request in requests]
    mine = np.array([[digest(request) for request in requests], fresh], np.uint32)
    count = multihost_utils.process_allgather(np.uint32(len(requests)))
    every = multihost_utils.process_allgather(mine) if (count == count[0]).all() else None
    if every is None or (every[:, 0] != every[0, 0]).any():
        raise refused(
            "All processes of an engine's mesh must submit the same requests in the same order; at this place, another process "
            f"has others than process {jax.process_index()}. Give all of them the same prompts and settings.",
            requests="conflict",
        )
    return [
        dataclasses.replace(request, seed=int(seed)) if request.sampling.seed is None else request
        for request, seed in zip(requests, every[0, 1], strict=True)
    ]


def digest(request: Request) -> int:
    """A number of 32 bits that differs where what is drawn would differ, the seed aside."""
    settings: Any = request.policy.definition, request.max_new_tokens, request.stop_ids, request.sampling, request.sample
    settings += request.stop_strings, request.forced.tolist(), request.identity, request.first, request.num_kept, request.keep
    settings += (request.form,)
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(settings))  # where a function of a policy lies
    return zlib.crc32(text.encode(), zlib.crc32(request.prompt.tobytes()))
