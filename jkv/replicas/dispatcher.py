"""The thread that gives items to replicas, and what comes back to those who wait for it.

One thread owns all records here; callers and replicas put calls into its queue. An item is in one place at a time: it waits, or
one replica has it. So it is done once, whatever ends in between:

- A replica that is lost or drained leaves items. Those whose rows are in its last snapshot go on elsewhere, the others start
  again; the random keys depend on seed, prompt, sample and position alone, so both draw equal tokens.
- What a replica posts after that is dropped.
- While weights are updated, replicas that have the old ones get no items, so that the versions of a sample's tokens ascend.
"""

import concurrent.futures
import dataclasses
import functools
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from jkv.checks import described
from jkv.engine.service import Reply
from jkv.replicas.replica import Carrier, Change, Failed, Finished, Item, Lost, Message, Replica, Rows, Updated
from jkv.replicas.waiting import Load, Waiting, assign

LOGGER = logging.getLogger("jkv")
MOST_MOVES = 3  # of an item: a replica that ends again and again may end because of it
NO_ROWS = Rows(frozenset(), {})


@dataclasses.dataclass(eq=False)
class Open:
    """An item that is not finished.

    Attributes:
      pages: the most that it holds.
      reply: is given what has finished.
      rows: the snapshot that has its row, where it goes on.
      num_moves: how many lost replicas have had it.
    """

    item: Item
    pages: int
    reply: Reply[Finished]
    rows: Rows | None = None
    num_moves: int = 0


@dataclasses.dataclass(eq=False)
class Member:
    """A replica, and what it has.

    Attributes:
      index: its place among all.
      replica: None until it is started.
      numbers: its items.
      pages: the most that they hold.
      version: of the weights that it uses.
      is_updating: whether newer ones are on their way to it.
      rows: its last snapshot.
      is_leaving: whether it is drained and gets no more items.
    """

    index: int
    replica: Replica | None = None
    numbers: set[int] = dataclasses.field(default_factory=set)
    pages: int = 0
    version: int = 0
    is_updating: bool = False
    rows: Rows = NO_ROWS
    is_leaving: bool = False


class Dispatcher:
    """Owns the replicas of a carrier.

    Args:
      carrier: starts them.
      restarts: how often each is started again after it was lost.

    Attributes:
      members: the replicas that are started, or are being started, by index.
      open: items by number.
      version: of the newest weights.

    Raises:
      ValueError: settings that an engine refuses.
      RuntimeError: a replica did not start.
    """

    def __init__(self, carrier: Carrier, restarts: int) -> None:
        self.carrier, self.version, self._restarts = carrier, 0, dict.fromkeys(range(carrier.count), restarts)
        self.members: dict[int, Member] = {index: Member(index) for index in range(carrier.count)}
        self.open: dict[int, Open] = {}
        self._waiting = Waiting()
        self._updates: list[tuple[int, Reply[None]]] = []  # to be answered when all members have the version
        self._changes: dict[int, Change] = {}  # by version, since the oldest that a replica may have
        self._drains: dict[int, Reply[None]] = {}
        self._error: BaseException | None = None  # why the last replica was lost
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        try:
            self._start_all()
        except BaseException:
            self._close_all()
            raise
        self._thread = threading.Thread(target=self._run, name="the dispatcher of replicas", daemon=True)
        self._thread.start()

    def _start_all(self) -> None:
        """Starts every replica, side by side where the carrier allows."""

        def start(member: Member) -> None:
            member.replica = self.carrier.start(member.index, functools.partial(self._post, member))

        with concurrent.futures.ThreadPoolExecutor(self.carrier.num_starts) as pool:
            list(pool.map(start, self.members.values()))

    def _post(self, member: Member, message: Message) -> None:
        """Queues a replica's message; any thread may call it."""
        self._queue.put(functools.partial(self._receive, member, message))

    def call(self, function: Callable[..., Any], *args: Any) -> Reply[Any]:
        """The reply of a function that the dispatcher's thread calls.

        Raises:
          RuntimeError: the replicas are closed.
        """
        if not self._thread.is_alive():
            raise RuntimeError("The replicas are closed. Make others.")
        reply: Reply[Any] = Reply()

        def run() -> None:
            try:
                reply.set_result(function(*args))
            except BaseException as error:
                reply.set_exception(error)

        self._queue.put(run)
        return reply

    def _run(self) -> None:
        """The thread's whole life: all that is queued, then one look at what can be given to whom."""
        while (command := self._queue.get()) is not None:
            try:
                command()
                if self._queue.empty():
                    self._settle()
                    self._dispatch()
            except Exception:
                LOGGER.exception("The dispatcher could not do a command")
        error = RuntimeError("The replicas were closed before this was finished.")
        for number in list(self.open):
            self._fail(number, error)
        for reply in (*(reply for _, reply in self._updates), *self._drains.values()):
            reply.set_exception(error)

    # What callers ask for; the thread calls these.

    def submit(self, groups: Sequence[Sequence[Open]]) -> None:
        """Queues the items of each prompt."""
        if not self.members:
            raise RuntimeError(f"All replicas are lost: {described(self._error)}. Make others.")
        if not self.open:
            for member in self._started():
                member.replica.reset_stats()  # type: ignore[union-attr]
        for group in groups:
            self.open |= {one.item.number: one for one in group}
            self._waiting.add([one.item.number for one in group])

    def cancel(self, numbers: Iterable[int]) -> None:
        """Ends items, which come back with the tokens that they have; one that waits is dropped."""
        numbers = {number for number in numbers if number in self.open}
        for number in numbers:
            if self._waiting.remove(number):
                self.open.pop(number).reply.cancel()
        for member in self._started():
            if own := sorted(member.numbers & numbers):
                member.replica.cancel(own)  # type: ignore[union-attr]

    def update(self, content: Any, digests: np.ndarray | None, reply: Reply[None], adapter: str = "") -> None:
        """Numbers new weights, of a carrier's `put`, and brings them to all replicas; the reply is given when all use them.

        With the name of an adapter, `content` is the adapter (`Change`).

        From here on nothing is lost if the caller waits no more: this thread alone gives the version its weights.
        """
        change = Change(self.version + 1, digests, content, adapter)
        self.carrier.use(change)
        self.version, self._changes[change.version] = change.version, change
        self._updates.append((self.version, reply))
        for member in self._started():
            self._advance(member)

    def drain(self, index: int, reply: Reply[None]) -> None:
        """Ends one replica, whose rows go on at others; the reply is given when it has given them up."""
        member = self.members.get(index)
        staying = [other for other in self._started() if not other.is_leaving]
        if member is None or member not in staying or len(staying) == 1:
            got = "it is the last" if staying == [member] else f"the others are {[other.index for other in staying]}"
            reply.set_exception(ValueError(f"A replica that runs beside others can be retired; got {index!r}, and {got}."))
            return
        member.is_leaving, self._drains[index] = True, reply
        member.replica.drain()  # type: ignore[union-attr]

    def loads(self) -> list[Load]:
        """What each replica has to do."""
        return [self._load(member) for member in self._started()]

    def replicas(self) -> list[Replica]:
        """Those that are started, for another thread to ask."""
        return [member.replica for member in self._started() if member.replica is not None]

    # What replicas post.

    def _receive(self, member: Member, message: Message) -> None:
        if self.members.get(member.index) is not member:  # lost or drained before
            return
        match message:
            case Finished(number=number):
                if self._gives_up(member, number):
                    self.open.pop(number).reply.set_result(message)
            case Failed(number=number, error=error):
                if self._gives_up(member, number):
                    self._fail(number, error)
            case Updated(version=version):
                member.version, member.is_updating = version, False
                self._advance(member)
            case Rows(is_last=True):
                member.rows = message
                self._remove(member)
                self._drains.pop(member.index).set_result(None)
            case Rows():
                member.rows = message
            case Lost(error=error):
                self._lose(member, error)

    def _gives_up(self, member: Member, number: int) -> bool:
        """Whether an item was a replica's; it is no more."""
        if number not in member.numbers:
            return False
        member.numbers.remove(number)
        member.pages -= self.open[number].pages
        return True

    def _advance(self, member: Member) -> None:
        """Sends a replica the weights after its own, if there are any, once it has those before."""
        if member.replica is not None and not member.is_updating and member.version < self.version:
            member.is_updating = True
            member.replica.update(self._changes[member.version + 1])

    def _lose(self, member: Member, error: BaseException) -> None:
        """A replica is gone: its items wait again, and another is started in its place, unless that happened too often."""
        LOGGER.warning("Replica %d was lost, and its items go elsewhere: %s", member.index, described(error))
        self._error = error
        for number in member.numbers:
            self.open[number].num_moves += 1
        self._remove(member)
        if (reply := self._drains.pop(member.index, None)) is not None:
            reply.set_result(None)  # it is gone all the same, and its items are not
        elif self._restarts[member.index] > 0:
            self._restarts[member.index] -= 1
            self._restart(member.index)
        if not self.members:
            for number in list(self.open):
                self._fail(number, RuntimeError(f"All replicas are lost; the last by {described(error)}. Make others."))

    def _remove(self, member: Member) -> None:
        """Takes a replica out; its items wait, each with the snapshot that has its row."""
        del self.members[member.index]
        left = sorted(member.numbers)
        for number in [number for number in left if self.open[number].num_moves > MOST_MOVES]:
            left.remove(number)
            self._fail(
                number, RuntimeError(f"The item was lost with {MOST_MOVES + 1} replicas; the last by {described(self._error)}.")
            )
        for number in left:
            one = self.open[number]
            one.rows = member.rows if number in member.rows.numbers else one.rows
        self._waiting.leave(member.index)
        self._waiting.add(left, is_first=True)
        threading.Thread(target=close_quietly, args=(member.replica,), daemon=True).start()

    def _restart(self, index: int) -> None:
        """Starts a replica again, in a thread of its own, with the weights of now; those that come meanwhile follow."""
        member = self.members[index] = Member(index)

        def start() -> None:
            try:
                replica = self.carrier.start(index, functools.partial(self._post, member))
            except BaseException as error:
                self._post(member, Lost(error))
                return
            self._queue.put(functools.partial(self._join, member, replica))
            if not self._thread.is_alive():  # closed in the meantime
                close_quietly(replica)

        threading.Thread(target=start, daemon=True).start()

    def _join(self, member: Member, replica: Replica) -> None:
        """A replica that was started again takes part."""
        member.replica, member.version = replica, replica.version
        self._advance(member)

    # Records.

    def _started(self) -> list[Member]:
        return [member for member in self.members.values() if member.replica is not None]

    def _load(self, member: Member) -> Load:
        assert member.replica is not None
        return Load(member.index, member.pages, len(member.numbers), member.replica.facts.max_running)

    def _dispatch(self) -> None:
        """Gives waiting items to replicas that have the newest weights and free rows."""
        ready = {m.index: m for m in self._started() if m.version == self.version and not m.is_leaving}
        loads, given = [self._load(member) for member in ready.values()], dict[int, list[Open]]()
        for number, index in assign(self._waiting, loads, lambda number: self.open[number].pages):
            one, member = self.open[number], ready[index]
            member.numbers.add(number)
            member.pages += one.pages
            given.setdefault(index, []).append(one)
        for index, items in given.items():
            replica = ready[index].replica
            assert replica is not None
            for rows in {id(one.rows): one.rows for one in items if one.rows is not None}.values():
                replica.restore([one.item for one in items if one.rows is rows], rows.content)
            if fresh := [one.item for one in items if one.rows is None]:
                replica.submit(fresh)

    def _settle(self) -> None:
        """Answers updates that all replicas have."""
        if not self.members:
            for _, reply in self._updates:
                reply.set_exception(RuntimeError(f"All replicas are lost; the last by {described(self._error)}. Make others."))
            self._updates.clear()
            return
        started = self._started()
        oldest = min((member.version for member in started), default=-1)
        for version, reply in [one for one in self._updates if one[0] <= oldest]:
            self._updates.remove((version, reply))
            reply.set_result(None)
        if len(started) == len(self.members):
            self._changes = {version: change for version, change in self._changes.items() if version > oldest}

    def _fail(self, number: int, error: BaseException) -> None:
        """An item cannot be finished."""
        self._waiting.remove(number)
        self.open.pop(number).reply.set_exception(error)

    def close(self) -> None:
        """Ends the thread and the replicas; what is unfinished gets an error."""
        self._queue.put(None)
        if self._thread is not threading.current_thread():  # which may be the last to hold the replicas
            self._thread.join()
        self._close_all()

    def _close_all(self) -> None:
        for member in self._started():
            close_quietly(member.replica)
        self.carrier.close()


def close_quietly(replica: Replica | None) -> None:
    """Closes a replica that may be gone."""
    try:
        if replica is not None:
            replica.close()
    except Exception as error:
        LOGGER.info("A replica did not close: %s", described(error))
