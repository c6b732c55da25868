"""Encodes and checks requests in separate threads, with a limit for each client.

A prompt of megabytes takes seconds to encode. Meanwhile requests of other clients are encoded, and the event loop runs on.
"""

import asyncio
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from jkv.serving.errors import RefusalError

THREADS = 4
OF_CLIENT = 3  # requests of one client that are encoded at a time, so that one thread is free for other clients
RETRY_SECONDS = 1  # until a refused client may try again

P = ParamSpec("P")
T = TypeVar("T")


class Encodings:
    """Runs functions in its threads; only one event loop may call the methods.

    Args:
      most: the most unfinished calls at a time; further calls are refused.
    """

    def __init__(self, most: int) -> None:
        self.most, self.num_open = most, 0
        self._threads = ThreadPoolExecutor(THREADS, "jkv-encoding")
        self._turns = weakref.WeakValueDictionary[str, asyncio.Semaphore]()

    async def run(self, client: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a function for a client, and returns its result.

        Raises:
          RefusalError: too many calls are unfinished.
        """
        if self.num_open >= self.most:
            message = f"At most {self.most} requests may be encoded or wait for it, and there are as many. Try again later."
            raise RefusalError(429, message, headers={"retry-after": str(RETRY_SECONDS)})
        turn = self._turns.setdefault(client, asyncio.Semaphore(OF_CLIENT))
        self.num_open += 1
        try:
            async with turn:
                return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
        finally:
            self.num_open -= 1

    def close(self) -> None:
        """Starts no further function."""
        self._threads.shutdown(wait=False, cancel_futures=True)
