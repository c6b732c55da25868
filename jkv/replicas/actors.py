"""Replicas in actors of Ray, on any number of machines.

Ray places the actors, carries items and results, and holds weights and snapshots in its object store: weights as flat buckets
that all actors of a machine read in place, snapshots without passing the driver. Each actor is asked all the time what has
happened, and answers as soon as something has. So one thread of the driver watches all of them, and finds out who is gone.
"""

import contextlib
import dataclasses
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import ray
from jax.sharding import Mesh

from jkv.engine import mesh as meshes
from jkv.engine.options import EngineOptions
from jkv.engine.service import Reply, Service
from jkv.errors import refused
from jkv.eviction import Policy
from jkv.model import weights
from jkv.model.params import Model
from jkv.model.sharding import HEADS, shardings
from jkv.replicas.options import RayOptions
from jkv.replicas.replica import FIRST, Change, Facts, Failed, Item, Lost, Message, Newest, Post, Replica, Rows
from jkv.replicas.worker import Bucket, Worker, digests_of, pack, unpack

T = TypeVar("T")
POLL_SECONDS = 1.0  # after which an actor answers that nothing has happened
TICK = 0.05  # seconds between two looks for calls that other threads have made
CALLS_AT_ONCE = 16  # of an actor: one asks what has happened, and others may wait for the engine


class Shape(NamedTuple):
    """Of a leaf of the weights."""

    shape: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(frozen=True)
class Spec:
    """What an actor builds its engine from, without the weights.

    Attributes:
      model: with the index of each leaf in its place.
      shapes: of the leaves.
      policies, options: of the engine.
      tensor: devices.
    """

    model: Model
    shapes: list[Shape]
    policies: list[Policy]
    options: EngineOptions
    tensor: int

    def build(self, buckets: Sequence[Bucket]) -> tuple[Model, EngineOptions]:
        """The model on this process's devices, of all leaves; the last bucket that has a leaf counts."""
        leaves: dict[int, Any] = {}
        for bucket in buckets:
            leaves |= unpack(bucket, self.shapes)
        params = jax.tree.map(lambda i: leaves[i], self.model.params)
        devices = jax.local_devices()
        if len(devices) < self.tensor:
            rule = f"An actor needs tensor={self.tensor} devices; it has {len(devices)}. Give it more, with actor=."
            raise refused(rule, tensor="does_not_fit")
        if self.tensor == 1:
            return dataclasses.replace(self.model, params=jax.device_put(params, devices[0])), self.options
        mesh = Mesh(np.array(devices[: self.tensor]), (HEADS,))
        meshes.check_mesh(mesh, params.config)
        params = jax.device_put(params, shardings(params, mesh))
        return dataclasses.replace(self.model, params=params), dataclasses.replace(self.options, mesh=mesh)


class Report(NamedTuple):
    """What an actor answers.

    Attributes:
      num_open: its unfinished items; while it rests, none counts.
    """

    messages: list[Message]
    num_chunks: int
    num_open: int


class EngineActor:
    """A worker in a process of its own; an actor's methods run in threads."""

    def __init__(self, spec: Spec, buckets: Sequence[Any], newest: Newest, digests: np.ndarray) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._shapes = spec.shapes
        model, options = spec.build(ray.get(list(buckets)))
        self.worker = Worker(model, spec.policies, options, newest, digests, self._messages.put)

    def facts(self) -> tuple[Facts, int]:
        """Sizes of the engine, and the version of its weights."""
        return self.worker.facts, self.worker.version

    def poll(self, seconds: float, chunks: float) -> Report:
        """All messages since the last call; waits for the first, or until the engine has decoded a number of chunks."""
        messages: list[Message] = []
        end = time.monotonic() + seconds
        while not messages and self.worker.num_chunks < chunks and (left := end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                messages.append(self._messages.get(timeout=left if math.isinf(chunks) else min(left, TICK)))
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._messages.get_nowait())
        sent = [
            one._replace(error=RuntimeError(repr(one.error))) if isinstance(one, Failed | Lost) else one for one in messages
        ]
        return Report(sent, self.worker.num_chunks, 0 if self.worker.is_resting else len(self.worker.tickets))

    def call(self, name: str, *arguments: Any) -> Any:
        """A method of the worker by its name."""
        return getattr(self.worker, name)(*arguments)

    def update(self, buckets: Sequence[Any], version: int, digests: np.ndarray) -> None:
        """Uses new weights."""
        leaves: dict[int, Any] = {}
        for bucket in ray.get(list(buckets)):
            leaves |= unpack(bucket, self._shapes)
        self.worker.update(Change(version, digests, leaves))

    def snapshot(self) -> tuple[frozenset[int], Any]:
        """The items whose rows are in a snapshot, and the rows."""
        rows = self.worker.snapshot()
        return rows.numbers, rows.content

    def drain(self) -> tuple[frozenset[int], Any]:
        """The same, after the engine has given up everything."""
        rows = self.worker.drained()
        return rows.numbers, rows.content


class Call(NamedTuple):
    """A call of an actor that was not answered yet.

    Attributes:
      replica: whose call it is.
      receive: is given the answer.
      since: seconds on the monotonic clock when it was made.
      otherwise: called if what was sent is gone, with the machine that had it; None where that is the replica's own end.
    """

    replica: "RayReplica"
    receive: Callable[[Any], None]
    since: float
    otherwise: Callable[[], None] | None = None


class Watch:
    """The thread that receives what actors answer.

    Args:
      timeout: seconds after which one that does not answer counts as lost.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout, self._calls, self._lock = timeout, dict[Any, Call](), threading.Lock()
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="the watch over actors", daemon=True).start()

    def add(
        self,
        replica: "RayReplica",
        reference: Any,
        receive: Callable[[Any], None],
        otherwise: Callable[[], None] | None = None,
    ) -> None:
        """Waits for the answer of a call; if there is none, or an error, the replica is lost."""
        with self._lock:
            self._calls[reference] = Call(replica, receive, time.monotonic(), otherwise)

    def forget(self, replica: "RayReplica") -> None:
        """Waits for no answer of a replica any more."""
        with self._lock:
            self._calls = {reference: call for reference, call in self._calls.items() if call.replica is not replica}

    def end(self) -> None:
        """Ends the thread."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.is_set():
            with self._lock:
                calls = dict(self._calls)
            if not calls:
                self._is_over.wait(TICK)
                continue
            ready, _ = ray.wait(list(calls), num_returns=1, timeout=TICK)
            if ready:
                ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
            for reference in ready:
                self._answer(reference, calls[reference])
            late = time.monotonic() - self.timeout
            for call in calls.values():
                if call.since < late and not call.replica.is_gone and call in self._calls.values():
                    call.replica.lose(TimeoutError(f"an actor did not answer for {self.timeout:g} seconds"))

    def _answer(self, reference: Any, call: Call) -> None:
        with self._lock:
            self._calls.pop(reference, None)
        if call.replica.is_gone:
            return
        try:
            call.receive(ray.get(reference))
        except Exception as error:  # of the actor, its process, or its machine
            cause = cause_of(error)
            if call.otherwise is not None and isinstance(cause, ray.exceptions.ObjectLostError):
                call.otherwise()
            else:
                call.replica.lose(cause)


class RayReplica:
    """A replica in an actor.

    Args:
      actor: its handle.
      post: receives messages.
      watch: waits for its answers.
      snapshot_chunks: after how many chunks a snapshot is taken; 0 never.
    """

    def __init__(self, actor: Any, facts: Facts, version: int, post: Post, watch: Watch, snapshot_chunks: int) -> None:
        self.actor, self.facts, self.version, self.is_gone = actor, facts, version, False
        self._post, self._watch, self._snapshot_chunks = post, watch, snapshot_chunks
        self._num_chunks = self._saved_chunks = 0
        self._moved = time.monotonic()  # when it was last seen to go on, or to have nothing to do
        self._poll()

    def _poll(self) -> None:
        due = self._saved_chunks + self._snapshot_chunks if self._snapshot_chunks else math.inf
        self._watch.add(self, self.actor.poll.remote(POLL_SECONDS, due), self._receive)

    def _receive(self, report: Report) -> None:
        """Hands on what has happened, and asks again."""
        for message in report.messages:
            self._post(message)
        if report.num_chunks != self._num_chunks or not report.num_open:
            self._moved = time.monotonic()
        self._num_chunks = report.num_chunks
        if time.monotonic() - self._moved > self._watch.timeout:
            self.lose(
                TimeoutError(f"an actor has {report.num_open} items and decoded nothing for {self._watch.timeout:g} seconds")
            )
            return
        if self._snapshot_chunks and report.num_chunks - self._saved_chunks >= self._snapshot_chunks:
            self._saved_chunks = report.num_chunks
            if report.num_open:
                self._take_rows("snapshot", is_last=False)
        self._poll()

    def _take_rows(self, method: str, is_last: bool) -> None:
        numbers, content = getattr(self.actor, method).options(num_returns=2).remote()
        self._watch.add(self, numbers, lambda numbers: self._post(Rows(numbers, content, is_last)))

    def _call(self, name: str, *arguments: Any) -> None:
        self._watch.add(self, self.actor.call.remote(name, *arguments), lambda _: None)

    def submit(self, items: Sequence[Item]) -> None:
        """Sends items."""
        self._call("submit", list(items))

    def restore(self, items: Sequence[Item], content: Any) -> None:
        """Sends items; the actor takes their rows from the object store. Without them, items start again."""
        reference = self.actor.call.remote("restore", list(items), content)
        self._watch.add(self, reference, lambda _: None, lambda: self.submit(items))

    def cancel(self, numbers: Sequence[int]) -> None:
        """Ends items."""
        self._call("cancel", list(numbers))

    def update(self, change: Change) -> None:
        """Lets the actor take new weights from the object store, or sends it an adapter."""
        version, digests, content, _ = change
        if digests is None:
            self._call("update", change)
            return
        self._watch.add(self, self.actor.update.remote([bucket for _, bucket in content], version, digests), lambda _: None)

    def drain(self) -> None:
        """Gives up all items."""
        self._take_rows("drain", is_last=True)

    def reset_stats(self) -> None:
        """Statistics start from zero."""
        self._call("reset_stats")

    def ask(self, call: Callable[[Service], Reply[T]], seconds: float = math.inf) -> T | None:
        """What a method of the actor's service returns; None if the actor is gone, or busy for too long."""
        try:
            return ray.get(self.actor.call.remote("ask", call), timeout=min(seconds, self._watch.timeout))
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return None
        except ray.exceptions.RayTaskError as error:
            raise cause_of(error) from None

    def lose(self, error: BaseException) -> None:
        """The actor is gone, or is ended because it does not answer."""
        if not self.is_gone:
            self.close()
            self._post(Lost(error))

    def close(self) -> None:
        """Ends the actor's process."""
        self.is_gone = True
        self._watch.forget(self)
        ray.kill(self.actor, no_restart=True)


class RayCarrier:
    """Starts actors, and puts weights into the object store once for all of them.

    Args:
      model: its weights are sent from where they are.
      policies: sent once; each is unpickled once in each actor, so that programs compile once.
      options: of each engine.
      count: the number of actors.
      settings: placement, timeout, snapshots.

    Raises:
      ValueError: a policy that cannot be sent.
    """

    name, num_starts = "ray", 16

    def __init__(
        self, model: Model, policies: Sequence[Policy], options: EngineOptions, count: int, settings: RayOptions
    ) -> None:
        check_pickles(policies)
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False)
        self.count, self._settings = count, settings
        self.model = dataclasses.replace(model, params=weights.shapes_of(model.params))
        leaves, structure = jax.tree.flatten(model.params)
        skeleton = dataclasses.replace(model, params=jax.tree.unflatten(structure, range(len(leaves))))
        shapes = [Shape(leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves]
        self._spec = ray.put(Spec(skeleton, shapes, list(policies), options, settings.tensor))
        content = self.put(dict(enumerate(leaves)))
        self._weights = content, FIRST, digests_of(model.params)  # buckets of all leaves, oldest first
        self._watch = Watch(settings.timeout)

    def put(self, leaves: Mapping[int, Any]) -> list[tuple[frozenset[int], Any]]:
        """Puts leaves into the object store, a bucket at a time: the leaves of each bucket, and its reference."""
        return [(frozenset(bucket.leaves), ray.put(bucket)) for bucket in pack(leaves)]

    def use(self, change: Change) -> None:
        """Keeps the newest buckets of all leaves, or another adapter; drops buckets that are no longer needed."""
        buckets, newest, digests = self._weights
        if change.digests is not None:
            new = frozenset[int]().union(*(owned for owned, _ in change.content))
            old = [(owned - new, reference) for owned, reference in buckets]
            buckets, digests = [one for one in old if one[0]] + change.content, change.digests
        self._weights = buckets, newest.after(change), digests

    def start(self, index: int, post: Post) -> Replica:
        """An actor with the newest weights; waits until its engine is built."""
        buckets, newest, digests = self._weights
        options = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "max_concurrency": CALLS_AT_ONCE} | dict(
            self._settings.actor
        )
        kind = ray.remote(EngineActor).options(**options)  # type: ignore[attr-defined]
        actor: Any = kind.remote(self._spec, [reference for _, reference in buckets], newest, digests)
        try:
            facts, version = ray.get(actor.facts.remote(), timeout=self._settings.timeout)
        except ray.exceptions.GetTimeoutError:
            ray.kill(actor)
            raise RuntimeError(
                f"Replica {index} did not start in {self._settings.timeout:g} seconds. Ray has {ray.available_resources()} "
                f"left, and an actor takes {options}. Lower num_replicas or what each takes, or raise timeout."
            ) from None
        except Exception as error:
            ray.kill(actor)
            cause = cause_of(error)
            if isinstance(cause, ValueError):
                raise cause from None
            raise RuntimeError(f"Replica {index} did not start: {cause}") from error
        return RayReplica(actor, facts, version, post, self._watch, self._settings.snapshot_chunks)

    def forget(self) -> None:
        """Nothing: what the object store has is a copy in host memory, from which lost actors start again."""

    def close(self) -> None:
        """Ends the thread that watches; weights leave the object store with this object."""
        self._watch.end()


def check_pickles(policies: Sequence[Policy]) -> None:
    """Refuses a policy that cannot be sent to another process.

    Raises:
      ValueError: its name, and the reason.
    """
    for policy in policies:
        try:
            ray.cloudpickle.loads(ray.cloudpickle.dumps(policy))
        except Exception as error:
            raise refused(
                f"A policy is sent to actors by pickle, and {policy.name} cannot be: {type(error).__name__}: {error}. Define "
                "its score without open files, locks, devices or clients, or use carrier='threads'.",
                policies="unsupported",
            ) from error


def cause_of(error: BaseException) -> BaseException:
    """The error inside of what Ray raises: that of the task, or of the actor's start."""
    inner: Any = getattr(error, "cause", None)
    if isinstance(inner, BaseException):
        return inner
    text = str(error)
    for kind in ("InputError: ", "ValueError: "):
        if kind in text:  # raised while the actor was built, which Ray gives as a text
            return ValueError(text.rpartition(kind)[2].strip())
    return error
