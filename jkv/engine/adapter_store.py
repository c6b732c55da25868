"""The low-rank adapters that an engine's requests choose from, each in a place of stacks on the device."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jkv.checkpoints.adapters import read_adapter
from jkv.checks import counted, did_you_mean, shown, typed
from jkv.engine.device_program import device_program
from jkv.engine.processes import spans
from jkv.errors import InputError, refused
from jkv.model import weights
from jkv.model.adapter_stacks import check_fits, empty_stacks, padded, with_place
from jkv.model.params import LowRank, Params
from jkv.model.sharding import shardings

LONGEST_NAME = 256  # characters


class AdapterPlaces:
    """The places of adapters by name, and the shapes that fit them; the stacks may be elsewhere. Place 0 has no adapter.

    Args:
      params: the weights, or their shapes.
      num_adapters: places.
      rank: the highest rank of an adapter; lower ones are padded.

    Attributes:
      stacks: `jkv.model.adapter_stacks.empty_stacks`, or their shapes.
      places: the place of each adapter.
    """

    def __init__(self, params: Params, num_adapters: int, rank: int) -> None:
        self._shapes, self.num_adapters, self.places = weights.shapes_of(params), num_adapters, dict[str, int]()
        self.stacks: Params = jax.eval_shape(
            lambda: empty_stacks(params.config, 1 + num_adapters, rank, params.final_norm.dtype)
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all adapters, sorted."""
        return tuple(sorted(self.places))

    def place_of(self, name: str) -> int:
        """The place of an adapter; 0 for the empty name."""
        return self.places[name] if name else 0

    def place_for(self, name: str) -> int:
        """The place that an adapter has, or else a free one."""
        return self.places.get(name) or min(set(range(1, 1 + self.num_adapters)) - set(self.places.values()))

    def remove(self, name: str) -> None:
        """Frees a place for another adapter; no row may use it any more."""
        del self.places[name]

    def check_known(self, name: str) -> None:
        """Refuses the name of no adapter.

        Raises:
          ValueError: the known ones.
        """
        if name not in self.places:
            raise unknown(name, self.names)

    def check_new(self, name: Any) -> None:
        """Refuses a name that an adapter cannot get.

        Raises:
          ValueError: another type, one that is empty, too long or in use; or all places are taken.
        """
        if not typed("name", name, str).strip() or len(name) > LONGEST_NAME or not name.isprintable():
            rule = f"An adapter's name must be printable, of 1 to {LONGEST_NAME} characters; got {shown(name)}. Shorten it."
            raise refused(rule, name="out_of_range")
        if name in self.places:
            rule = f"add_adapter takes a new name; got {shown(name)} again. Call update_adapter, or remove_adapter before."
            raise refused(rule, name="conflict")
        if len(self.places) == self.num_adapters:
            rule = f"An engine holds at most max_adapters={self.num_adapters}; all places are taken. Remove one, or raise it."
            raise refused(rule, name="does_not_fit")

    def read(self, given: Any) -> dict[str, LowRank]:
        """The adapter of each matrix, from a folder of peft or from weights that have adapters.

        Raises:
          ValueError: something else, a bad file, or an adapter that does not fit a place.
        """
        found, where = read_adapter(given, self._shapes)
        check_fits(self.stacks, found, where)
        return found


class AdapterStore(AdapterPlaces):
    """The places of an engine, with the stacks on the device or mesh of the weights.

    Args:
      params, num_adapters, rank: see `AdapterPlaces`.
      mesh: a tensor-parallel engine's mesh of one process.

    Attributes:
      is_used: whether any adapter was ever added; until then, programs have no adapters.
    """

    is_used = False

    def __init__(self, params: Params, num_adapters: int, rank: int, mesh: Mesh | None = None) -> None:
        if spans(mesh):
            rule = f"A mesh of several processes holds no adapters by name; got max_adapters={num_adapters}. Leave it out."
            raise refused(rule, max_adapters="unsupported")
        super().__init__(params, num_adapters, rank)
        empty = empty_stacks(params.config, 1 + num_adapters, rank, params.final_norm.dtype)
        one_device = jax.tree.map(lambda _: weights.place_of(params), empty)
        where = one_device if mesh is None else shardings(empty, mesh)
        self.stacks = jax.device_put(empty, where)
        self._write = device_program(donate_argnames="stacks", out_shardings=where)(with_place)

    def put(self, name: str, adapters: dict[str, LowRank]) -> None:
        """Writes what `read` returned into the place of an adapter, or into a free one."""
        place, self.is_used = self.place_for(name), True
        self.stacks = self._write(self.stacks, padded(self.stacks, adapters), np.int32(place))
        self.places[name] = place


def unknown(name: str, known: Sequence[str]) -> InputError:
    """The error about the name of no adapter."""
    has = f"this engine has {', '.join(map(shown, known))}" if known else "this engine has none"
    rule = "adapter must be the name of an adapter that the engine holds; got {got}, and {has}.{near} Call add_adapter first."
    return InputError(rule, field="adapter", code="unknown_name", got=shown(name), has=has, near=did_you_mean(name, known))


def no_places() -> InputError:
    """The error about an engine without places for adapters."""
    rule = "An engine takes adapters if it was built with places for them; got max_adapters=0. Build it with more."
    return refused(rule, max_adapters="missing")


def in_use(name: str, count: int) -> InputError:
    """The error about an adapter that cannot be removed yet."""
    rule = f"remove_adapter takes an adapter that no request uses; {counted(count, 'sample')} use {shown(name)}. "
    return refused(f"{rule}Wait for their results, or cancel them, and release kept rows.", name="conflict")
