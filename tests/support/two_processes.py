"""One engine over two processes of two devices each: `test_mesh.py` starts both, and compares what each writes.

    python -m tests.support.two_processes PROCESS PORT FILE

Process -1 is one process with one device, and needs no port.
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np

import jkv
from jkv.testing import TINY, tiny_model

CONFIG = dataclasses.replace(TINY, num_query_heads=8, num_kv_heads=4)
LONG, SHORT = list(range(20)), [5, 1, 9]
R_KV = jkv.r_kv(16, 8, window=4)
REQUESTS = [
    {"prompt": LONG, "policy": jkv.full(), "n": 3},
    {"prompt": LONG, "policy": R_KV, "n": 2},
    {"prompt": SHORT, "policy": jkv.h2o(14)},
    {"prompt": SHORT, "policy": jkv.rpc(interval=8, window=4)},
    {"prompt": LONG, "policy": jkv.quest(12, dense_layers=1)},
    {"prompt": SHORT, "policy": jkv.ada_kv(8, interval=4, window=4)},
]


def play(mesh):
    """Groups, preemption, sleep and traces: what the requests drew, and how often a row was preempted."""
    pages = 2 * 4 * 13  # of a full row
    policies = [request["policy"] for request in REQUESTS]
    sizes = {"max_running": 3, "max_slots": 52, "page_size": 4, "num_pages": 2 * pages + pages // 2, "chunk": 4}
    engine = jkv.Engine(tiny_model(config=CONFIG), policies=policies, return_trace=True, poison=True, mesh=mesh, **sizes)
    fixed = jkv.Sampling(seed=7)
    tickets = [engine.submit(**request, sampling=fixed, max_new_tokens=24, stop_ids=()) for request in REQUESTS]
    for _ in range(4):
        engine.step()
    engine.sleep()
    engine.wake()
    engine.run()
    results = [engine.result(ticket) for ticket in tickets]
    fresh = engine.submit(SHORT, sampling=jkv.Sampling(), max_new_tokens=8, n=2, stop_ids=())
    kept = engine.submit(SHORT, policy=R_KV, sampling=fixed, max_new_tokens=12, stop_ids=(), keep=True)
    engine.run()
    later = engine.extend(kept, [3, 4, 5], max_new_tokens=8, stop_ids=())
    engine.run()
    results += [engine.result(kept), engine.result(later)]
    params = engine.model.params
    rollout = jkv.Rollout(engine.model, R_KV, mesh=mesh, max_prompt_tokens=20, max_new_tokens=16, page_size=4, max_running=4)
    results.append(rollout([LONG, SHORT], n=2, seed=3, stop_ids=(), return_trace=True))
    rollout.update(jax.tree.map(lambda x: x * 1.01, params))
    results.append(rollout([LONG, SHORT], n=2, seed=3, stop_ids=(), return_trace=True))
    assert results[-1].policy_version.tolist() == [[1] * 16] * 4
    return {
        "tokens": [out.tokens.tolist() for out in results],
        "logprobs": [out.logprobs.tolist() for out in results],
        "ends": [out.trace.end.tolist() for out in results],
        "preemptions": sum(one.preemptions for out in results for one in out.samples),
        "fresh": engine.result(fresh).tokens.tolist(),
        "free": jkv.engine.memory.free_pool_bytes(engine.model.params, 4),
    }


def load_and_generate(mesh):
    """A model that each process loads to its devices, with copies of its KV heads."""
    model = jkv.load("tiny-reasoner", mesh=mesh)
    out = jkv.generate(model, "b=3;c=7;d=b*c;?d", policy=jkv.r_kv(budget=24, interval=8), max_new_tokens=40, page_size=4)
    return out.tokens.tolist(), out.text[0]


def refusals(mesh, process):
    """What is said where the processes ask for different things, or where a mesh leaves one out."""
    engine = jkv.Engine(tiny_model(config=CONFIG), max_running=2, max_slots=52, mesh=mesh)
    messages, elsewhere = [], [device for device in jax.devices() if device.process_index != process]
    for call in (
        lambda: engine.submit([process], sampling=jkv.Sampling(seed=1), max_new_tokens=4),
        lambda: jkv.Engine(tiny_model(config=CONFIG), mesh=jax.sharding.Mesh(elsewhere, ("tensor",))),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def main(process: int, port: str, path: str) -> None:
    mesh = None
    if process >= 0:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("tensor",))
    out = play(mesh)
    out["loaded"] = load_and_generate(mesh)
    if mesh is not None:
        out["refusals"] = refusals(mesh, process)
    Path(path).write_text(json.dumps(out))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
