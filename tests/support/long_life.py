"""Many requests, engines and policies in one process, with what it holds on to: `python -m tests.support.long_life`.

Prints memory, memory mappings, threads and open files while 100,000 requests run on one engine, 1,000 engines of different
pools live and die, and 200 policies and 500 evaluation rows run. None of these may grow.
"""

import argparse
import gc
import os
import threading
import time

import jkv
from jkv.engine import device_program as mappings
from jkv.evaluation import generations
from jkv.evaluation.problems import Problem
from jkv.testing import TinyTokenizer, tiny_model


def held():
    """Resident megabytes, memory mappings, threads and open files."""
    gc.collect()
    with open("/proc/self/statm") as file:
        megabytes = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return round(megabytes), mappings.num_mappings(), threading.active_count(), len(os.listdir("/proc/self/fd"))


def tell(what, count, began):
    """Prints what is held after `count` of something."""
    megabytes, regions, threads, files = held()
    print(f"{count:7d} {what}: {megabytes} MB, {regions} mappings, {threads} threads, {files} files, "
          f"{time.perf_counter() - began:.0f} s", flush=True)  # fmt: skip


def many_requests(model, count):
    """Requests on one engine, at most a hundred at a time."""
    engine, began, done = jkv.Engine(model, max_running=16, max_slots=64, page_size=4, chunk=4), time.perf_counter(), 0
    policies = [jkv.full(), jkv.r_kv(budget=16, interval=8), jkv.streaming_llm(budget=12, interval=8)]
    while done < count:
        tickets = [
            engine.submit([1 + i % 7, 2, 3 + i % 11], policies[i % 3], max_new_tokens=4, stop_ids=()) for i in range(100)
        ]
        engine.run()
        for ticket in tickets:
            assert engine.result(ticket).finish_reason == ["length"]
        done += len(tickets)
        if done % (count // 5) < 100:
            tell("requests", done, began)


def many_engines(model, count):
    """Engines of one shape each; every one compiles its programs."""
    began = time.perf_counter()
    for i in range(count):
        settings = {"max_running": 1 + i % 5, "page_size": 4, "num_pages": 64 + i}
        out = jkv.generate(model, [[1, 2, 3]], max_new_tokens=4, stop_ids=(), progress=False, **settings)
        assert out.finish_reason == ["length"]
        if (i + 1) % (count // 5) == 0:
            tell("engines", i + 1, began)


def many_policies(model, count):
    """Policies of different settings; every one compiles a compaction."""
    began = time.perf_counter()
    engine = jkv.Engine(model, max_running=4, max_slots=512, page_size=4, policies=[jkv.r_kv(budget=16, window=4)])
    for i in range(count):
        policy = jkv.r_kv(budget=16 + i % 32, interval=8, window=4, importance=0.1 + 0.8 * i / count)
        ticket = engine.submit([1, 2, 3], policy, max_new_tokens=64, stop_ids=())
        engine.run()
        assert engine.result(ticket).stats.evicted > 0
        if (i + 1) % (count // 5) == 0:
            tell("policies", i + 1, began)


def many_rows(model, count):
    """Rows of an evaluation, each with a budget of its own."""
    problems, began = [Problem(f"a={i % 10};?a", str(i % 10)) for i in range(4)], time.perf_counter()
    for i in range(count):
        policy = jkv.streaming_llm(budget=12 + i % 100, interval=8 + i // 100)
        generations.run(model, problems, policy, max_new_tokens=64, max_running=2, page_size=4, progress=False)
        if (i + 1) % (count // 5) == 0:
            tell("rows", i + 1, began)


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="times the counts above")
    scale = parser.parse_args().scale
    model = tiny_model(tokenizer=TinyTokenizer())
    tell("at the start", 0, time.perf_counter())
    many_requests(model, int(100_000 * scale))
    many_policies(model, int(200 * scale))
    many_engines(model, int(1_000 * scale))
    many_rows(jkv.load("tiny-reasoner"), int(500 * scale))


if __name__ == "__main__":
    main()
