"""A replica in this process: an engine and its service, items in, messages out. Actors of Ray have one each."""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jkv.engine.engine import Engine
from jkv.engine.options import EngineOptions
from jkv.engine.outputs import text_of
from jkv.engine.samples import Sample
from jkv.engine.service import Reply, Service, Ticket
from jkv.eviction import Policy
from jkv.model.params import Model
from jkv.replicas.replica import Change, Facts, Failed, Finished, Item, Lost, Message, Newest, Post, Rows, Updated

BUCKET_BYTES = 1 << 28
ALIGNMENT = 64  # bytes at which each array begins, so that a device of the host can read it in place


class Bucket(NamedTuple):
    """Some leaves of the weights, one after the other.

    Attributes:
      leaves: their indices among all leaves.
      data: `[bytes]` uint8.
    """

    leaves: tuple[int, ...]
    data: np.ndarray


UINTS = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint32}  # by the bits of a number; 64 are read as two
MIXERS = (0x9E3779B1, 0x85EBCA6B), (0xC2B2AE35, 0x27D4EB2F)  # odd, so that no change of a single number is lost


def digests_of(params: Any) -> np.ndarray:
    """A digest of each leaf, from its bits and their places: `[leaves, 2]` uint32. One pass over the weights, where they lie.

    A change of one number always changes the digest, and other changes do but for one in 2**64. Each is awaited before the
    next begins: several CPU devices share their threads, and two sums over a mesh that run at once can each hold threads
    that the other needs.

    >>> a, b = digests_of([jnp.array([1.0, 2.0]), jnp.array([2.0, 1.0])])
    >>> (a == b).any()
    np.False_
    """
    return np.array([jax.device_get(digest(leaf)) for leaf in jax.tree.leaves(params)], np.uint32).reshape(-1, 2)


@jax.jit
def digest(leaf: jax.Array) -> jax.Array:
    """Two sums of mixed bits: [2] uint32. Sums of integers do not depend on their order, nor on how a mesh splits the array."""
    bits = jax.lax.bitcast_convert_type(leaf, UINTS[8 * leaf.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        place = place * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    sums = []
    for first, second in MIXERS:
        mixed = bits ^ (place * jnp.uint32(first))
        mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(second)
        mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(first)
        sums.append((mixed ^ (mixed >> 16)).sum(dtype=jnp.uint32))
    return jnp.stack(sums)


def check_digests(params: Any, digests: np.ndarray, version: int) -> None:
    """Refuses weights that are not the ones whose digests were sent.

    Raises:
      RuntimeError: they differ; the error names the first leaf.
    """
    is_other = (digests_of(params) != digests).any(axis=1)
    if is_other.any():
        path = jax.tree_util.tree_leaves_with_path(params)[int(is_other.argmax())][0]
        raise RuntimeError(
            f"A replica must use the weights that were sent as version {version}; its params{jax.tree_util.keystr(path)} are "
            f"others ({int(is_other.sum())} of {len(is_other)} arrays differ). It is started again."
        )


def num_bytes(shape: Any) -> int:
    """Bytes that a leaf takes in a bucket, of its shape and dtype."""
    return -(-math.prod(shape.shape) * np.dtype(shape.dtype).itemsize // ALIGNMENT) * ALIGNMENT


def pack(leaves: Mapping[int, Any], most_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Buckets of the leaves, in order, one at a time; each has at most `most_bytes`, or a single leaf."""
    group: dict[int, Any] = {}
    for i, leaf in leaves.items():
        if group and sum(map(num_bytes, (*group.values(), leaf))) > most_bytes:
            yield packed(group)
            group = {}
        group[i] = leaf
    if group:
        yield packed(group)


def packed(leaves: Mapping[int, Any]) -> Bucket:
    """One bucket of these leaves; waits for the device."""
    data, start = np.zeros(sum(map(num_bytes, leaves.values())), np.uint8), 0
    for leaf in leaves.values():
        flat = np.ascontiguousarray(jax.device_get(leaf)).reshape(-1).view(np.uint8)
        data[start : start + flat.size] = flat
        start += num_bytes(leaf)
    return Bucket(tuple(leaves), data)


def unpack(bucket: Bucket, shapes: Sequence[Any]) -> dict[int, np.ndarray]:
    """The leaves of a bucket, as views of its bytes; `shapes` has shape and dtype of all leaves."""
    leaves, start = {}, 0
    for i in bucket.leaves:
        shape, dtype = shapes[i].shape, np.dtype(shapes[i].dtype)
        size = math.prod(shape) * dtype.itemsize
        leaves[i] = bucket.data[start : start + size].view(dtype).reshape(shape)
        start += num_bytes(shapes[i])
    return leaves


def with_leaves(params: Any, leaves: Mapping[int, Any]) -> Any:
    """The weights with some leaves replaced, each put where the one before lies."""
    old, structure = jax.tree.flatten(params)
    new = [jax.device_put(leaves[i], leaf.sharding) if i in leaves else leaf for i, leaf in enumerate(old)]
    return jax.tree.unflatten(structure, new)


T = TypeVar("T")


class Worker:
    """A `Replica` that runs items on an engine of its own, whose owner thread posts what has happened.

    Args:
      model: its weights lie where the engine is to run.
      policies: what items name by their index.
      options: the engine's.
      newest: versions, and adapters.
      digests: of the weights.
      post: receives messages, in the owner thread.

    Raises:
      RuntimeError: the weights have other digests.
    """

    def __init__(
        self,
        model: Model,
        policies: Sequence[Policy],
        options: EngineOptions,
        newest: Newest,
        digests: np.ndarray,
        post: Post,
    ) -> None:
        self.policies, self._post = list(policies), post
        check_digests(model.params, digests, newest.version)
        self.engine = Engine(model, options, policies=self.policies)
        for name, adapter in newest.adapters.items():
            self.engine.add_adapter(name, adapter)
        self.engine.renumber(newest.version, newest.versions)
        self.facts, self.version = Facts.of(self.engine), newest.version
        self.tickets: dict[int, Ticket] = {}  # of items that are neither finished nor given up
        self._lock, self._earlier_chunks = threading.Lock(), 0  # those before statistics began again
        self._adding, self._is_traced = threading.Lock(), options.return_trace
        self.service = Service(self.engine, self._collect)

    @property
    def num_chunks(self) -> int:
        """Chunks that the engine has decoded since it was built: whether it goes on."""
        return self._earlier_chunks + self.engine.stats.chunks

    def submit(self, items: Sequence[Item]) -> None:
        """Queues items."""
        with self._adding:
            self._trace(items)
            for item in items:
                self._add(item, lambda item=item: self.service.submit_requests([item.restored(self.policies)]))

    def restore(self, items: Sequence[Item], content: Mapping[int, bytes]) -> None:
        """Queues items whose rows are in a snapshot."""
        with self._adding:
            self._trace(items)
            for item in items:
                policy = self.policies[item.policy]
                self._add(item, lambda item=item, policy=policy: self.service.resume_row(content[item.number], policy))

    def _trace(self, items: Sequence[Item]) -> None:
        """Turns tracing on for items that ask for it, and off for items that do not, if no others are unfinished."""
        is_traced = any(item.is_traced for item in items)
        with self._lock:
            if is_traced == self._is_traced or (self.tickets and not is_traced):
                return
            self._is_traced = is_traced
        with contextlib.suppress(RuntimeError):  # the service has ended, which adding an item reports
            self.service.call(lambda engine: setattr(engine, "is_traced", is_traced))

    def _add(self, item: Item, submit: Any) -> None:
        try:
            ticket = submit()
        except Exception as error:
            self._fail(item.number, error)
            return
        with self._lock:
            self.tickets[item.number] = ticket
        ticket.add_done_callback(functools.partial(self._done, item.number))

    def _collect(self, ticket: int) -> Sample:
        """What a finished request's ticket is given: its sample, with the text."""
        (sample,) = self.engine.take([ticket])
        if self.engine.model.tokenizer is not None:
            text_of(self.engine.model.tokenizer, sample)
        return sample

    def _done(self, number: int, ticket: "Future[Any]") -> None:
        with self._lock:
            is_ours = self.tickets.pop(number, None) is not None
        if not is_ours:  # drained: another replica goes on with it
            return
        if (error := ticket.exception()) is not None:
            self._fail(number, error)
        else:
            self._post(Finished.of(number, ticket.result()))

    def _fail(self, number: int, error: BaseException) -> None:
        """An item's error, or the end of the whole engine."""
        message: Message = Failed(number, error)
        if self.service.failure:
            message = Lost(RuntimeError(self.service.failure))
        self._post(message)

    def cancel(self, numbers: Sequence[int]) -> None:
        """Ends items; they come back with the tokens that they have."""
        with self._lock:
            tickets = [self.tickets[number] for number in numbers if number in self.tickets]
        for ticket in tickets:
            ticket.cancel()

    def update(self, change: Change) -> None:
        """Uses new weights, or an adapter, and posts `Updated` once the engine does; unfinished items go on with them.

        It posts `Lost` if the version does not follow the one before (an update was lost on the way), if these leaves and those
        that stay have other digests than the weights that were sent, or if the engine refuses them.
        """
        version, digests, content, name = change

        def apply(engine: Engine) -> None:
            if version != engine.version + 1:
                raise RuntimeError(f"Weights of version {version} came to a replica of version {engine.version}.")
            if digests is not None:
                params = with_leaves(engine.model.params, content)
                check_digests(params, digests, version)
                engine.update(params)
            elif content is None:
                engine.remove_adapter(name)
            else:
                (engine.update_adapter if name in engine.adapters else engine.add_adapter)(name, content)

        self._post_after(apply, lambda _: Updated(version))

    def drain(self) -> None:
        """Gives up all items, and posts the rows of those that run."""
        self._post_after(self._give_up, lambda rows: rows)

    def _post_after(self, function: Callable[[Engine], T], message: Callable[[T], Message]) -> None:
        """Posts a message of what the owner thread has done; an error is the end of the replica."""

        def done(reply: "Future[T]") -> None:
            error = reply.exception()
            self._post(message(reply.result()) if error is None else Lost(error))

        try:
            self.service.call(function).add_done_callback(done)
        except RuntimeError as error:  # the service has ended
            self._post(Lost(error))

    def snapshot(self) -> Rows:
        """The rows that run now; they go on."""
        return self.service.call(self._copy_rows).result()

    def drained(self) -> Rows:
        """What `drain` posts."""
        return self.service.call(self._give_up).result()

    def _copy_rows(self, engine: Engine) -> Rows:
        rows = engine.copy_rows()
        with self._lock:
            content = {number: rows[ticket.number] for number, ticket in self.tickets.items() if ticket.number in rows}
        return Rows(frozenset(content), content)

    def _give_up(self, engine: Engine) -> Rows:
        """Takes all items out of the engine: they are cancelled before its next step."""
        rows = self._copy_rows(engine)
        with self._lock:
            given_up, self.tickets = list(self.tickets.values()), {}
        for ticket in given_up:
            ticket.cancel()
        return rows._replace(is_last=True)

    def reset_stats(self) -> None:
        """Statistics start from zero."""

        def reset(engine: Engine) -> None:
            self._earlier_chunks += engine.stats.chunks
            engine.reset_stats()

        self.service.call(reset)

    @property
    def is_resting(self) -> bool:
        """Whether it decodes nothing because it was asked to rest or to sleep."""
        return self.service.is_paused or self.engine.is_asleep

    def ask(self, call: Callable[[Service], Reply[T]], seconds: float = math.inf) -> T | None:
        """What a method of its service returns; None if the engine cannot go on."""
        return None if self.service.failure else call(self.service).result()

    def close(self) -> None:
        """Ends the service, and cancels what is unfinished."""
        with self._lock:
            self.tickets = {}
        with self.service:  # whose end waits for its thread, unless it is this one
            pass
