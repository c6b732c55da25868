"""Clients take turns: in which round each request is admitted.

A round has at most one request of each client, so a client with a thousand queued requests delays another's first by one round
at most. A request keeps its round until it ends, also while it is preempted. Where nobody is named, all are one client, and
rounds are the order of arrival. Each priority has rounds of its own.
"""


class Rounds:
    """The rounds of clients whose requests are unfinished.

    Attributes:
      current: the latest round with an admitted request.
    """

    def __init__(self) -> None:
        self.current = 0
        self._last: dict[str, tuple[int, int]] = {}  # of each client: its last ticket, and that one's round
        self._unfinished: dict[str, int] = {}  # samples of each client

    def add(self, client: str, ticket: int) -> int:
        """The round of one more sample: a client's next, but none that is over; samples of one ticket share it.

        >>> rounds = Rounds()
        >>> [rounds.add("a", 0), rounds.add("a", 1), rounds.add("b", 2), rounds.add("a", 3)]
        [0, 1, 0, 2]
        """
        last = self._last.get(client)
        if last is None or last[0] != ticket:
            self._last[client] = ticket, self.current if last is None else max(self.current, last[1] + 1)
        self._unfinished[client] = self._unfinished.get(client, 0) + 1
        return self._last[client][1]

    def admitted(self, number: int) -> None:
        """A sample of a round gets its row."""
        self.current = max(self.current, number)

    @property
    def are_over(self) -> bool:
        """Whether no sample is unfinished."""
        return not self._unfinished

    def finished(self, client: str) -> None:
        """A sample has ended. A client without unfinished samples is forgotten: its next request enters the current round."""
        self._unfinished[client] -= 1
        if not self._unfinished[client]:
            del self._unfinished[client], self._last[client]
