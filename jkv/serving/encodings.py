"""Where requests are encoded and checked: in threads of their own, a few of each client at a time.

A prompt of megabytes takes seconds. Meanwhile requests of others are encoded, and neither the event loop nor other work waits.
"""

import asyncio
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from jkv.serving.errors import RefusalError

THREADS = 4
OF_CLIENT = 3  # requests of a client that are encoded at a time; one thread is left to others
RETRY_SECONDS = 1  # after which a client that was refused may try again

P = ParamSpec("P")
T = TypeVar("T")


class Encodings:
    """Runs functions in its threads; the methods are for one event loop.

    Args:
      most: calls that may be unfinished at a time; others are refused.
    """

    def __init__(self, most: int) -> None:
        self.most, self.num_open = most, 0
        self._threads = ThreadPoolExecutor(THREADS, "jkv-encoding")
        self._turns = weakref.WeakValueDictionary[str, asyncio.Semaphore]()

    async def run(self, client: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a function returns for a client.

        Raises:
          RefusalError: too many calls are unfinished.
        """
        if self.num_open >= self.most:
            message = f"{self.num_open} requests are being read, as many as may be. Try again later."
            raise RefusalError(429, message, headers={"retry-after": str(RETRY_SECONDS)})
        turn = self._turns.setdefault(client, asyncio.Semaphore(OF_CLIENT))
        self.num_open += 1
        try:
            async with turn:
                return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
        finally:
            self.num_open -= 1

    def close(self) -> None:
        """Lets no further function begin."""
        self._threads.shutdown(wait=False, cancel_futures=True)
