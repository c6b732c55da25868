"""The seam between the dispatcher and what carries an engine: a thread of this process, or an actor of Ray.

The dispatcher calls a `Replica`, whose methods do not wait for the engine. What happens there comes back as messages, from any
thread, through the function `Post` that a carrier was given.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from jkv.engine.engine import Engine
from jkv.engine.requests import Request
from jkv.engine.samples import Completion, Sample
from jkv.engine.service import Reply, Service
from jkv.eviction import Policy
from jkv.model.params import Model
from jkv.policies import full

T = TypeVar("T")


class Item(NamedTuple):
    """One sample to generate, as it is sent.

    Attributes:
      number: which identifies it among all items.
      policy: index of its policy among those that each replica has had since it was built.
      request: its request, with the full cache in the place of that policy.
      is_traced: whether its trace is asked for.
    """

    number: int
    policy: int
    request: Request
    is_traced: bool

    @classmethod
    def of(cls, number: int, request: Request, policies: Sequence[Policy], is_traced: bool) -> "Item":
        """An item of a checked request whose policy is one of these."""
        return cls(number, policies.index(request.policy), dataclasses.replace(request, policy=full()), is_traced)

    def restored(self, policies: Sequence[Policy]) -> Request:
        """The request with its policy."""
        return dataclasses.replace(self.request, policy=policies[self.policy])


class Facts(NamedTuple):
    """What the dispatcher knows of every replica's engine; all have the same."""

    max_running: int
    max_slots: int
    num_pages: int
    page_size: int
    page_bytes: int

    @classmethod
    def of(cls, engine: Engine) -> "Facts":
        """The facts of an engine."""
        capacity = engine.capacity
        return cls(capacity.max_running, engine.max_slots, engine.num_pages, capacity.page_size, engine.page_bytes)


# Messages of a replica.

LISTS = {  # of a completion
    "tokens": np.int32,
    **dict.fromkeys(("log_probs", "log_probs_full", "log_probs_own"), np.float32),
    "versions": np.int32,
}


class Finished(NamedTuple):
    """A finished item: no prompt, no policy, no tokenizer, and its trace once.

    Attributes:
      completion: with arrays in the place of lists.
    """

    number: int
    completion: Completion
    generated: int

    @classmethod
    def of(cls, number: int, sample: Sample) -> "Finished":
        """What is sent of a finished sample."""
        completion, error = sample.completion, sample.completion.error
        if completion.routes is not None:
            completion.routes.land()
        packed: Any = {name: np.array(getattr(completion, name), dtype) for name, dtype in LISTS.items()}
        packed["error"] = None if error is None else RuntimeError(repr(error))  # others may not pickle
        return cls(number, dataclasses.replace(completion, **packed), sample.generated)

    def land(self, sample: Sample) -> None:
        """Completes the waiting record of the sample."""
        lists: Any = {name: getattr(self.completion, name).tolist() for name in LISTS}
        sample.completion = dataclasses.replace(self.completion, **lists)
        sample.generated = self.generated


class Failed(NamedTuple):
    """An item that its engine could not finish."""

    number: int
    error: BaseException


class Updated(NamedTuple):
    """A replica uses weights of this version."""

    version: int


class Change(NamedTuple):
    """New weights, or another adapter, on their way to replicas.

    Attributes:
      version: their number.
      digests: digests of all leaves, to check that all weights arrived (`jkv.replicas.worker.digests_of`); None for an adapter.
      content: what a carrier's `put` returned: the leaves that are new since the previous version. For an adapter, an `Adapter`
        in host memory, or None if it is removed.
      adapter: the adapter's name; empty for the weights.
    """

    version: int
    digests: np.ndarray | None
    content: Any
    adapter: str = ""


class Newest(NamedTuple):
    """What a newly started replica needs besides the weights.

    Attributes:
      version: the number of the last change.
      versions: the version at which requests with an adapter last got new weights, by its name; "" for no adapter.
      adapters: all adapters, by name.
    """

    version: int
    versions: Mapping[str, int]
    adapters: Mapping[str, Any]

    def after(self, change: Change) -> "Newest":
        """The same after one more change."""
        if not change.adapter:
            return Newest(change.version, dict.fromkeys(self.versions, change.version), self.adapters)
        versions, adapters = ({n: x for n, x in of.items() if n != change.adapter} for of in (self.versions, self.adapters))
        if change.content is not None:
            versions[change.adapter], adapters[change.adapter] = change.version, change.content
        return Newest(change.version, versions, adapters)


FIRST = Newest(0, {"": 0}, {})


class Rows(NamedTuple):
    """A snapshot of rows (`jkv.engine.row_moves`).

    Attributes:
      numbers: of the items whose rows it has.
      content: bytes by number, or what the carrier's replicas read them from.
      is_last: whether the rows have left the replica, and all else that it had, by `drain`.
    """

    numbers: frozenset[int]
    content: Any
    is_last: bool = False


class Lost(NamedTuple):
    """The replica ended, and what it had is to be done by others."""

    error: BaseException


Message = Finished | Failed | Updated | Rows | Lost
Post = Callable[[Message], None]


class Replica(Protocol):
    """An engine somewhere. No call waits for it but `ask` and `close`.

    Attributes:
      facts: the sizes of its engine.
      version: that of the weights that it began with.
    """

    facts: Facts
    version: int

    def submit(self, items: Sequence[Item]) -> None:
        """Queues items; each comes back as `Finished` or `Failed`, unless the replica is `Lost` or drained."""

    def restore(self, items: Sequence[Item], content: Any) -> None:
        """Queues items whose rows are in the content of a snapshot, to go on where it was taken."""

    def cancel(self, numbers: Sequence[int]) -> None:
        """Ends items, which come back with the tokens that they have."""

    def update(self, change: Change) -> None:
        """Uses new weights, or an adapter, from the engine's next step on; then `Updated` comes.

        If the weights arrive damaged, the replica is `Lost`.
        """

    def drain(self) -> None:
        """Gives up all items: `Rows` come, the last message about any of them."""

    def reset_stats(self) -> None:
        """Statistics start from zero."""

    def ask(self, call: Callable[[Service], Reply[T]], seconds: float = math.inf) -> T | None:
        """What a method of its engine's service returns; None if it cannot be asked any more.

        A replica in another process also gives None if it does not answer within `seconds`.
        """

    def close(self) -> None:
        """Ends it, with all that it has."""


class Carrier(Protocol):
    """Starts replicas and brings weights to them.

    Attributes:
      count: the number of replicas.
      name: as the user writes it.
      num_starts: how many may be started side by side.
      model: with the newest weights, or their shapes where replicas have them in other processes.
    """

    count: int
    name: str
    num_starts: int

    @property
    def model(self) -> Model: ...

    def start(self, index: int, post: Post) -> Replica:
        """A replica with the newest weights; waits until its engine is built.

        Raises:
          ValueError: settings that its engine refuses.
          RuntimeError: it did not start.
        """

    def put(self, leaves: Mapping[int, Any]) -> Any:
        """Brings leaves, by their index, to where all replicas can take them; returns the content of a `Change`.

        Nothing uses them before `use`, so this may end in the middle.
        """

    def use(self, change: Change) -> None:
        """Makes replicas that are started from now on begin with these weights, or with this adapter."""

    def forget(self) -> None:
        """Lets the caller's weights go; the next `put` brings all leaves."""

    def close(self) -> None:
        """Ends what the replicas share."""
