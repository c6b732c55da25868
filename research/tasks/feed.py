"""Batches of a training run in the order of its steps, made ahead by other processes."""

import collections
import concurrent.futures
import multiprocessing
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from research.tasks import trail_vocabulary, vocabulary
from research.tasks.batches import make_batch
from research.tasks.train_config import TrainConfig

TOKENIZERS = {"chains": vocabulary.make_tokenizer, "trails": trail_vocabulary.make_tokenizer}  # by task
Batch = dict[str, np.ndarray]
AHEAD = 6  # batches that each worker may have made before they are needed

_own: dict[str, Any] = {}  # what a worker keeps between batches: its tokenizer and the run


class Feed:
    """The batch of each step from a first one on, without end; `close` stops the workers.

    The batch of a step depends on nothing but the run's seed and the step, so the number of workers changes nothing in it.

    Args:
      config: the run; of its last stage the number of steps is not used.
      start: the first step.
      workers: processes that make batches ahead, each on one core, from now on; 0 makes each batch when it is asked for.
    """

    def __init__(self, config: TrainConfig, start: int, workers: int = 0) -> None:
        self.following = start
        self.pool: concurrent.futures.ProcessPoolExecutor | None = None
        self.waiting: collections.deque[concurrent.futures.Future[Batch]] = collections.deque()
        if not workers:
            prepare(config)
            return
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        context = multiprocessing.get_context("spawn")
        self.pool = concurrent.futures.ProcessPoolExecutor(workers, context, initializer=start_worker, initargs=(config,))
        for _ in range(AHEAD * workers):
            self._ask(self.pool)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.pool is None:
            self.following += 1
            return batch_of(self.following - 1)
        batch = self.waiting.popleft().result()
        self._ask(self.pool)
        return batch

    def _ask(self, pool: concurrent.futures.ProcessPoolExecutor) -> None:
        self.waiting.append(pool.submit(batch_of, self.following))
        self.following += 1

    def close(self) -> None:
        """Stops the workers once they have finished the batches that they work on."""
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)


def start_worker(config: TrainConfig) -> None:
    """Prepares a worker. It must never touch the accelerator, which the training process owns."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    prepare(config)


def prepare(config: TrainConfig) -> None:
    """Keeps what `batch_of` needs."""
    _own.update(config=config, tokenizer=TOKENIZERS[config.task]())


def batch_of(step: int) -> Batch:
    """The batch of a step."""
    config = _own["config"]
    return make_batch(_own["tokenizer"], config.stage(step), (config.seed, step), config.task)
