"""Compiles device programs in another thread, so that the engine's thread continues.

`Apart` wraps an engine's programs. A compiled program is known by its static arguments and by the shapes, types and shardings
of its other arguments. `jkv.engine.foreseen` requests the programs of future calls, which a compiler thread compiles. Any other
program compiles at its first call, in the caller's thread, as in JAX.
"""

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from jkv.checks import described
from jkv.engine.clocks import COMPILING

LOGGER = logging.getLogger("jkv")
SAME = "state"  # the argument whose shapes an engine never changes
Key = tuple[Any, ...]
Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # of a program: its name, arguments and settings


class Apart:
    """An engine's programs; some are compiled ahead of their first call. Only one thread may call the methods.

    Args:
      programs: `jkv.engine.programs`, the programs of a mesh, or a `ProgramsFor`.
      notify: called in another thread whenever a program has compiled, or failed to.
    """

    def __init__(self, programs: Any, notify: Callable[[], None]) -> None:
        self.programs, self._notify = programs, notify
        self._known: dict[Key, Callable[..., Any] | None] = {}  # by key; None if JAX compiled it at a call
        self._coming: dict[Key, Future[Callable[..., Any]]] = {}
        self._failed: dict[Key, BaseException] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="the compiler")
        self._params: Callable[[], Any] = lambda: None  # a weak reference to the weights of the last call
        self._form, self._forms = 0, dict[Key, int]()  # a number for the weights' shapes, which stands for them in keys

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._call, name)

    def _call(self, name: str, *args: Any, **settings: Any) -> Any:
        program = getattr(self.programs, name)
        fixed, given = split(program, args, settings)
        key = self._key(name, fixed, given)
        if (compiled := self._known.get(key)) is not None:
            return compiled(**given)
        out = program(*args, **settings)
        self._known[key] = None
        return out

    def knows(self, name: str, args: tuple[Any, ...], settings: Mapping[str, Any]) -> bool:
        """Whether a call would compile nothing."""
        return self._key(name, *split(getattr(self.programs, name), args, settings)) in self._known

    def are_ready(self, calls: Iterable[Call]) -> bool:
        """Whether all programs of these calls are compiled. If not, the missing ones are being compiled.

        Raises:
          BaseException: the error of a program that failed to compile, once no other program is being compiled. The next
            request tries again.
        """
        keys = [self.begin(*call) for call in calls]
        if any(key in self._coming for key in keys):
            return False
        errors = [self._failed.pop(key) for key in keys if key in self._failed]
        if errors:
            raise errors[0]
        return True

    def begin(self, name: str, args: tuple[Any, ...], settings: Mapping[str, Any]) -> Key:
        """Starts to compile a call's program, unless it is known, being compiled or has failed; returns its key."""
        program = getattr(self.programs, name)
        fixed, given = split(program, args, settings)
        key = self._key(name, fixed, given)
        if not (key in self._known or key in self._coming or key in self._failed):
            shapes = jax.tree.map(shape_of, given)
            self._coming[key] = self._thread.submit(compile_apart, program, fixed, shapes)
            self._coming[key].add_done_callback(lambda _: self._notify())
        return key

    def collect(self) -> None:
        """Takes over the programs that have finished compiling."""
        for key in [key for key, future in self._coming.items() if future.done()]:
            future = self._coming.pop(key)
            if future.cancelled():
                continue
            if (error := future.exception()) is None:
                self._known[key] = future.result()
            else:
                LOGGER.warning("A program did not compile: %s", described(error))
                self._failed[key] = error

    def forget(self) -> None:
        """Forgets compiled programs, after JAX's caches were cleared."""
        self._known.clear()
        self._failed.clear()

    def _key(self, name: str, fixed: Mapping[str, Any], given: Mapping[str, Any]) -> Key:
        """What a compiled program depends on. The weights have many leaves, which are read only when the object changes."""
        params = given.get("params")
        if params is not None and params is not self._params():
            self._params = weakref.ref(params)
            self._form = self._forms.setdefault(key_of(params), len(self._forms))
        others = {key: value for key, value in given.items() if key not in ("params", SAME)}
        return name, params is None or self._form, *fixed.items(), *key_of(others)

    def close(self) -> None:
        """Starts no further compilation; the interpreter waits at its end for a running one."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def split(program: Any, args: tuple[Any, ...], settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The static arguments of a call, and its other arguments, by name."""
    given = signature_of(program).bind(*args, **settings).arguments
    static = program.static
    return {name: given.pop(name) for name in static if name in given}, given


@functools.lru_cache(maxsize=256)
def signature_of(program: Any) -> inspect.Signature:
    """The signature of a program."""
    return inspect.signature(program)


def key_of(tree: Any) -> Key:
    """The structure, shapes, types and shardings of arguments."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *map(leaf_key, leaves)


def leaf_key(x: Any) -> Any:
    """The shape, type and sharding of an argument; host arrays have no sharding."""
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return x.shape, x.dtype, x.weak_type, x.sharding
    return (x.shape, x.dtype) if hasattr(x, "dtype") else type(x)


def shape_of(x: Any) -> Any:
    """The shape of an argument; the array itself may be deleted before the program is compiled."""
    if isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type)
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else x


def compile_apart(program: Any, fixed: Mapping[str, Any], shapes: Mapping[str, Any]) -> Callable[..., Any]:
    """Compiles a program; its seconds count in no other thread's measurement."""
    with COMPILING.elsewhere():
        compiled: Callable[..., Any] = program.compile(**fixed, **shapes)
    return compiled
