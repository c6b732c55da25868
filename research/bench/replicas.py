"""Throughput of replicas, and what the dispatcher and the messages cost: `python -m research.bench.replicas --replicas 2`.

    taskset -c 0 python -m research.bench.replicas --replicas 1      # one engine on one core
    python -m research.bench.replicas --replicas 2                   # two engines in threads
    python -m research.bench.replicas --replicas 2 --carrier ray
    python -m research.bench.replicas --paper 1000                   # replicas that finish at once: the dispatcher alone

Prints one JSON record. Tokens a second leave out a first call, in which programs compile.
"""

import argparse
import json
import os
import pickle
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jkv.checkpoints import loading as checkpoint
from jkv.engine.requests import RequestOptions, make_requests
from jkv.engine.results import complete
from jkv.engine.samples import Completion
from jkv.engine.service import Reply
from jkv.engine.stats import RunStats
from jkv.limits import parse
from jkv.model.params import Model
from jkv.model.sampling import Sampling
from jkv.policies import full
from jkv.policies.table import r_kv
from jkv.replicas import Replicas
from jkv.replicas.dispatcher import Dispatcher, Open
from jkv.replicas.replica import Change, Facts, Finished, Item, Post
from jkv.replicas.worker import pack, unpack

ROWS, TOKENS = 16, 512


class Paper:
    """A replica that finishes items as soon as it gets them."""

    facts, version = Facts(ROWS, 1 << 20, 1 << 20, 16, 1), 0

    def __init__(self, post: Post) -> None:
        self._post = post

    def submit(self, items: Sequence[Item]) -> None:
        """Finishes items."""
        for item in items:
            self._post(Finished(item.number, Completion([1], finish_reason="length"), 1))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: RunStats()


class PaperCarrier:
    """Any number of replicas of paper."""

    name, num_starts = "paper", 1

    def __init__(self, count: int, model: Model) -> None:
        self.count, self.model = count, model

    def start(self, index: int, post: Post) -> Any:
        """A replica of paper."""
        return Paper(post)

    def put(self, leaves: Mapping[int, Any]) -> Any:
        """Nothing travels."""

    def use(self, change: Change) -> None:
        """Paper has no weights."""

    def forget(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is shared."""


def time_dispatcher(count: int, groups: int = 4_000, n: int = 8) -> dict[str, Any]:
    """Microseconds of this process for each item, with `count` replicas of `ROWS` rows and `n` samples a prompt."""
    model = checkpoint.load("tiny-reasoner")
    request = make_requests(model, [np.array([5, 1])], RequestOptions(max_new_tokens=4, policy=full()))[0][0]
    dispatcher, numbers = Dispatcher(PaperCarrier(count, model), restarts=0), iter(range(groups * n))
    items = [
        [Open(Item.of(next(numbers), request, [full()], is_traced=False), 10, Reply()) for _ in range(n)] for _ in range(groups)
    ]
    began = time.process_time()
    dispatcher.call(dispatcher.submit, items).result()
    for group in items:
        for one in group:
            one.reply.result()
    seconds = time.process_time() - began
    dispatcher.close()
    return {"replicas": count, "items": groups * n, "microseconds_an_item": 1e6 * seconds / (groups * n)}


def time_weights(params: Any) -> dict[str, Any]:
    """Seconds of this process for a gigabyte of weights, into buckets and out of them."""
    leaves = jax.tree.leaves(params)
    began = time.process_time()
    buckets = list(pack(dict(enumerate(leaves))))
    packed = time.process_time()
    for bucket in buckets:
        unpack(bucket, leaves)
    size = sum(bucket.data.nbytes for bucket in buckets) / 1e9
    return {"bytes": size * 1e9, "pack_s_a_GB": (packed - began) / size, "unpack_s_a_GB": (time.process_time() - packed) / size}


def time_replicas(count: int, carrier: str, problems: int) -> dict[str, Any]:
    """Tokens a second of replicas in this machine, best of three calls, and the bytes of what they send."""
    model, policy = checkpoint.load("tiny-reasoner"), r_kv(budget=128)
    settings: Any = {"max_running": ROWS, "max_slots": 1024, "return_trace": True}
    with Replicas(model, num_replicas=count, carrier=carrier, policies=[policy], **settings) as replicas:
        prompts = [f"b={i % 10};c={i // 10};d=b*c;?d" for i in range(problems)]
        call: Any = {"n": 8, "max_new_tokens": TOKENS, "stop_ids": (), "sampling": Sampling(seed=1)}
        seconds, busy = [], []
        for _ in range(4):
            began, used = time.perf_counter(), time.process_time()
            out = complete(replicas.generate(prompts, progress=False, **call))
            seconds.append(time.perf_counter() - began)
            busy.append(time.process_time() - used)
        ticket = replicas.submit_requests(replicas.requests(prompts[0], call)[0])
        replicas.run()
        sent = [Finished.of(number, sample) for number, sample in enumerate(replicas.take([ticket]))]
    tokens = int(out.lengths.sum())
    best = int(np.argmin(seconds[1:])) + 1
    return {
        "replicas": count,
        "carrier": carrier,
        "tokens_per_second": tokens / seconds[best],
        "seconds": seconds[best],
        "process_seconds": busy[best],
        "all_seconds": seconds,
        "occupancy": out.stats.occupancy,
        "bytes_a_token": len(pickle.dumps(sent)) / (len(sent) * TOKENS),
        "of_which_trace": sum(one.completion.trace.ended.nbytes for one in sent if one.completion.trace) / (len(sent) * TOKENS),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Runs what the arguments ask for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2, help="engines")
    parser.add_argument("--carrier", default="threads", help="threads or ray")
    parser.add_argument("--problems", type=int, default=8, help="prompts, of 8 samples each")
    parser.add_argument("--paper", type=int, default=0, help="time the dispatcher with so many replicas of paper instead")
    args = parse(parser)
    if args.paper:
        record = time_dispatcher(args.paper) | {"weights": time_weights(checkpoint.load("tiny-reasoner").params)}
    else:
        record = time_replicas(args.replicas, args.carrier, args.problems)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
