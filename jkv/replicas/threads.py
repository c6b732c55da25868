"""Replicas in threads of this process: an engine on each device, or on each row of a mesh."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from jkv.checks import counted
from jkv.engine import mesh as meshes
from jkv.engine.mesh import DATA
from jkv.engine.options import EngineOptions
from jkv.errors import refused
from jkv.eviction import Policy
from jkv.model import weights
from jkv.model.params import Model, Params
from jkv.model.sharding import COPIES, HEADS, shard
from jkv.replicas.replica import FIRST, Change, Post, Replica
from jkv.replicas.worker import Worker, digests_of


def places_of(mesh: Mesh | None, num_replicas: int | None) -> list[Mesh | jax.Device]:
    """Where each replica runs: a mesh with an axis "tensor", or one device.

    Raises:
      ValueError: both or none are given, axes that are no replicas, or devices that replicas cannot share evenly.
    """
    rule = 'Replicas in threads take mesh= with the axes "data" and "tensor", or num_replicas='
    if (mesh is None) == (num_replicas is None):
        raise refused(f"{rule}; got {'neither' if mesh is None else 'both'}. Give one of them.", num_replicas="conflict")
    if mesh is not None:
        shape = dict(mesh.shape)
        others = {name: size for name, size in shape.items() if name not in (DATA, HEADS, COPIES) and size > 1}
        if DATA not in shape or others:
            raise refused(f"{rule}; got a mesh of {shape}. Rename its axes, or leave others out.", mesh="unsupported")
        rows = np.moveaxis(mesh.devices, mesh.axis_names.index(DATA), 0).reshape(shape[DATA], -1)
        return [Mesh(row, (HEADS,)) if len(row) > 1 else row[0] for row in rows]
    assert num_replicas is not None
    devices = jax.local_devices()
    if num_replicas > len(devices) and num_replicas % len(devices):
        raise refused(
            f"num_replicas must be at most the number of devices, here {len(devices)}, or a multiple of it; got "
            f"{num_replicas}. Lower it, so that no device has more to do than others.",
            num_replicas="out_of_range",
        )
    return [devices[i % len(devices)] for i in range(num_replicas)]


def replica_mesh(mesh: Mesh | None, params: Params) -> Mesh | None:
    """The mesh that is given, or else that of the weights, if its axis "data" asks for several replicas."""
    place = getattr(params.embedding, "sharding", None)
    if mesh is None and isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh):
        mesh = place.mesh
    return mesh if mesh is not None and dict(mesh.shape).get(DATA, 1) > 1 else None


def at_place(model: Model, options: EngineOptions, place: Mesh | jax.Device) -> tuple[Model, EngineOptions]:
    """The model with its weights there, and the options of an engine there. What lies there already is not copied.

    Raises:
      ValueError: a mesh that the model cannot be split over.
    """
    if isinstance(place, Mesh):
        meshes.check_mesh(place, model.config)
        return dataclasses.replace(model, params=shard(model.params, place)), dataclasses.replace(options, mesh=place)
    params = jax.device_put(model.params, SingleDeviceSharding(place))
    return dataclasses.replace(model, params=params), dataclasses.replace(options, mesh=None)


class ThreadCarrier:
    """Starts engines in this process; each has a thread that owns it.

    Args:
      model: its weights are copied to where each replica runs, unless they lie there.
      policies, options: of every engine.
      places: where each runs (`places_of`).
    """

    name, num_starts = "threads", 1  # engines size their pools by the memory that is free

    def __init__(
        self, model: Model, policies: Sequence[Policy], options: EngineOptions, places: Sequence[Mesh | jax.Device]
    ) -> None:
        self.count, self._places, self._policies, self._options = len(places), places, policies, options
        self._weights = model, FIRST, digests_of(model.params)  # the newest, their version and adapters, and their digests

    def start(self, index: int, post: Post) -> Replica:
        """An engine with the newest weights, at its place."""
        model, newest, digests = self._weights
        model, options = at_place(model, self._options, self._places[index])
        return Worker(model, self._policies, options, newest, digests, post)

    @property
    def model(self) -> Model:
        """The model with the newest weights."""
        return self._weights[0]

    def forget(self) -> None:
        """Keeps the shapes of the weights alone, until the next `put`, which has all of them."""
        model, newest, digests = self._weights
        self._weights = dataclasses.replace(model, params=weights.shapes_of(model.params)), newest, digests

    def put(self, leaves: Mapping[int, Any]) -> Mapping[int, Any]:
        """The leaves themselves; each engine copies them to its place."""
        return leaves

    def use(self, change: Change) -> None:
        """The newest weights, which stay where the caller has them, or another adapter."""
        model, newest, digests = self._weights
        if change.digests is not None:
            old, structure = jax.tree.flatten(model.params)
            params = jax.tree.unflatten(structure, [change.content.get(i, leaf) for i, leaf in enumerate(old)])
            model, digests = dataclasses.replace(model, params=params), change.digests
        self._weights = model, newest.after(change), digests

    def close(self) -> None:
        """Nothing is shared."""

    def __repr__(self) -> str:
        return f"{counted(self.count, 'replica')} in threads"
