"""The bits of 200 random mixes of requests, to be compared before and after code is moved.

    python -m tests.support.recorded_mixes record before.json            # in the old tree, about 15 minutes
    python -m tests.support.recorded_mixes record after.json             # in the new one
    python -m tests.support.recorded_mixes compare before.json after.json

A record has a digest of everything that a caller receives: tokens, log-probabilities, events, texts, evictions, traces,
experts, transcripts. Each mix runs on an engine of its own, of one of `KINDS`; requests arrive, are cancelled and continue at
random moments, weights change, the engine sleeps. Bits depend on the CPU and on JAX, so both records are made on one machine,
with the same versions, and only public calls are made here, which survive a move.
"""

import argparse
import collections
import dataclasses
import functools
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the number of devices is settled when JAX starts
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"

import jax
import numpy as np
from jax.sharding import Mesh

import jkv
from jkv.testing import TINY, tiny_model
from tests.model.test_experts import MIXED
from tests.support import gemma, learned_sinks
from tests.support.mixes import LOOSE, BreakingTokenizer
from tests.support.policies import build

NUM_MIXES = 200
COUNTS = "num_tokens", "compactions", "evicted", "shared", "preemptions", "is_forked", "cached_tokens", "saved", "peak_kv_bytes"
NUM_REQUESTS = 7  # of a mix, at most
PAGE_SIZE, MAX_SLOTS, NUM_ROWS = 4, 96, 3
WIDE = dataclasses.replace(TINY, head_size=32, max_positions=512)  # the fewest channels that 4-bit codes take
SMALL = {"budget": 16, "interval": 8, "window": 4}
COMMON = ("full", "r_kv", "h2o", "streaming_llm")


@dataclasses.dataclass(frozen=True)
class Kind:
    """One shape of engine, and what its requests may be.

    Attributes:
      policies: names of `jkv.POLICIES`, or policies.
      config: of the model, whose weights are random.
      fill: makes its norms and biases random too.
      options: of the engine.
      tensor: devices that KV heads are split over.
      keeps: whether rows are kept for later turns.
      replicas: engines that `jkv.generate` distributes the requests over; for more than one, nothing else happens.
      shared: the fewest and the most tokens that many prompts of a mix begin with.
      longest: the most tokens of a completion.
    """

    policies: tuple[Any, ...] = COMMON
    config: jkv.ModelConfig = TINY
    fill: Any = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tensor: int = 1
    keeps: bool = False
    replicas: int = 1
    shared: tuple[int, int] = (8, 30)
    longest: int = 32


SHARING = (
    jkv.reason_cache(include_prompt=True, **LOOSE),
    jkv.random_share(jkv.reason_cache(**LOOSE)),
    jkv.chain(jkv.reason_cache(include_prompt=True, **LOOSE), jkv.r_kv(budget=36, interval=8, window=4)),
    jkv.mem_share(),
)
MOVED = jkv.streaming_llm(budget=12, interval=8, positions="cache")
SCORES = ("caote", "critical_kv", "cur", "expected_attention", "g_kv", "key_diff", "lag_kv", "random")
LEARNED = ("foresight", "learned_gate", "tri_attention", "random_attention", "vase", "rpc", "tova", "snap_kv")
ROW = TINY.num_layers * TINY.num_kv_heads * MAX_SLOTS // PAGE_SIZE  # pages of a full row
KINDS = {
    "common": Kind(),
    "scores": Kind(SCORES),
    "learned": Kind(LEARNED),
    "heads that compete": Kind(("ada_kv", "pyramid_kv", "full")),
    "shared pages": Kind((*SHARING, "full"), longest=64),
    "sentences and steering": Kind(("skip_kv", "seal", "full")),
    "chosen pages": Kind((jkv.quest(budget=12, dense_layers=1), MOVED, "full")),
    "swapped rows": Kind(options={"max_running": 8, "num_pages": ROW + ROW // 4}, longest=60),
    "prefix cache": Kind(options={"prefix_cache": True, "max_slots": 384}, shared=(257, 300)),
    "conversations": Kind(keeps=True, options={"num_pages": 2 * ROW, "copy_kept": True}),
    "conversations and prefix cache": Kind(
        ("full", "r_kv", "key_diff"), keeps=True, options={"prefix_cache": True, "max_slots": 384}, shared=(257, 300)
    ),
    "dispatched ahead": Kind(options={"ahead": True}),
    "8 bits": Kind(options={"kv_dtype": "int8"}),
    "fp8": Kind(options={"kv_dtype": "fp8"}),
    "4 bits": Kind(config=WIDE, options={"kv_dtype": "int4"}),
    "sealed pages": Kind(("full",), config=WIDE, options={"kv_dtype": "kvarn", "page_size": 16}, keeps=True),
    "experts": Kind(config=MIXED, options={"routed_experts": True}),
    "windows and learned sinks": Kind(config=learned_sinks.CONFIG, fill=learned_sinks.with_random_vectors),
    "Gemma": Kind(config=gemma.GEMMA3),
    "mesh": Kind((*COMMON, "quest", "skip_kv"), tensor=2),
    "replicas": Kind(replicas=2),
}


def digest(*values: Any) -> str:
    """Of arrays with their dtypes and shapes, and of anything else as JSON."""
    total = hashlib.sha256()
    for value in values:
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            array = np.asarray(value)
            total.update(f"{array.dtype} {array.shape} ".encode() + array.tobytes())
        else:
            total.update(json.dumps(value).encode())
    return total.hexdigest()[:16]


def digests_of(out: jkv.Result, with_counts: bool = True) -> dict[str, str]:
    """A digest of each part of a result, by name."""
    parts: dict[str, tuple[Any, ...]] = {
        "tokens": (out.tokens, out.lengths, out.text, out.finish_reason),
        "log-probabilities": (out.logprobs, out.logprobs_full),
        "versions": (out.policy_version,),
    }
    if with_counts:
        parts["counts"] = tuple([getattr(sample, name) for name in COUNTS] for sample in out.samples)
    if out.trace is not None:
        trace = out.trace
        more = [trace.sinks, trace.sink_shift, *jax.tree.leaves(trace.steer), str(trace.kv_format)]
        parts["trace"] = trace.source, trace.begin, trace.end, *more
    if out.routed_experts is not None:
        parts["experts"] = (out.routed_experts,)
    for one in out.transcripts or ():
        parts["transcript"] = (*parts.get("transcript", ()), *(one.__dict__.values() if one else (None,)))
    return {name: digest(*values) for name, values in parts.items()}


@functools.cache
def model_of(name: str) -> jkv.Model:
    """The model of a kind."""
    model = tiny_model(1, KINDS[name].config, BreakingTokenizer())
    fill = KINDS[name].fill
    return fill(model) if fill else model


def counts_of(out: jkv.Result) -> dict[str, int]:
    """What happened to the samples of a result."""
    return {
        "tokens": int(out.lengths.sum()),
        "compactions": sum(one.compactions for one in out.samples),
        "evicted": round(sum(one.evicted for one in out.samples)),
        "shared": sum(one.shared for one in out.samples),
        "preemptions": sum(one.preemptions for one in out.samples),
        "forks": sum(one.is_forked for one in out.samples),
        "cached": sum(one.cached_tokens for one in out.samples),
        "penalised": sum(one.penalises for one in out.sampling),
    } | {f"ended by {reason}": out.finish_reason.count(reason) for reason in set(out.finish_reason)}


class Mix:
    """One random mix on an engine of its own.

    Attributes:
      digests: of each result by its ticket, and of the events.
      counts: what happened, so that one sees what a record covers.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.kind, self.rng = KINDS[name], np.random.default_rng([seed, list(KINDS).index(name)])
        self.model = model_of(name)
        self.policies = [build(one, self.model, **SMALL) if isinstance(one, str) else one for one in self.kind.policies]
        devices = np.array(jax.devices()[: self.kind.tensor * self.kind.replicas]).reshape(self.kind.replicas, -1)
        mesh = None if devices.size == 1 else Mesh(devices[0], ("tensor",))
        if self.kind.replicas > 1:
            mesh = Mesh(devices, ("data", "tensor"))
        self.settings = {"max_running": NUM_ROWS, "max_slots": MAX_SLOTS, "page_size": PAGE_SIZE, "chunk": 8, "mesh": mesh}
        self.settings |= {"return_trace": True, "poison": True} | self.kind.options
        self.shared = self.ids(int(self.rng.integers(*self.kind.shared)))  # what many of its prompts begin with
        self.running: dict[int, int] = {}  # samples that have not ended, by ticket
        self.is_kept: set[int] = set()  # tickets
        self.kept: list[int] = []  # those that can be continued
        self.events: list[Any] = []
        self.digests: dict[str, dict[str, str]] = {}
        self.counts: collections.Counter[str] = collections.Counter()

    def ids(self, count: int) -> list[int]:
        """Random token ids; a third of the lists repeat a few."""
        few = self.rng.integers(4, 32, 3) if self.rng.random() < 1 / 3 else np.arange(4, 32)
        return self.rng.choice(few, count).tolist()

    def is_so(self, share: float) -> bool:
        """A random choice."""
        return bool(self.rng.random() < share)

    def run(self) -> "Mix":
        """Plays it to its end."""
        if self.kind.replicas > 1:
            prompts = [self.ids(int(self.rng.integers(1, 30))) for _ in range(NUM_REQUESTS)]
            policies = [self.policies[int(self.rng.integers(len(self.policies)))] for _ in prompts]
            options = {"n": 2, "max_new_tokens": 24, "sampling": self.sampling(cuts=True), "stop_ids": (), "progress": False}
            out = jkv.generate(self.model, prompts, policies, **options, **self.settings)
            self.digests["all"] = digests_of(out, with_counts=False)  # which engine is free first is a matter of time
            self.counts.update(counts_of(out))
            return self
        self.engine = jkv.Engine(self.model, policies=self.policies, **self.settings)
        while sum(self.counts[name] for name in ("submitted", "continued")) < NUM_REQUESTS or not self.engine.is_idle:
            self.act()
        for ticket in self.kept:
            self.engine.release(ticket)
        self.digests["events"] = {"all": digest(self.events)}
        return self

    def act(self) -> None:
        """Submits, continues, steps, or something rarer."""
        is_full = self.counts["submitted"] + self.counts["continued"] >= NUM_REQUESTS
        if not is_full and self.kept and self.is_so(0.3):
            self.extend()
        elif not is_full and self.is_so(0.1 if self.kind.keeps else 0.4):
            self.submit()
        elif self.running and self.is_so(0.03):
            self.happens("cancelled", lambda: self.engine.cancel(int(self.rng.choice(list(self.running)))))
        elif self.is_so(0.02):
            self.happens("updated", self.update)
        elif not self.kept and self.is_so(0.02):
            self.happens("slept", lambda: (self.engine.sleep(), self.engine.wake()))
        else:
            self.step()

    def update(self) -> None:
        """Brings other weights."""
        self.engine.update(jax.tree.map(lambda leaf: leaf * 1.0625, self.engine.model.params))

    def happens(self, name: str, act: Any) -> None:
        """Does something rare, and counts it."""
        self.counts[name] += 1
        act()

    def submit(self) -> None:
        """A random request."""
        policy = self.policies[int(self.rng.integers(len(self.policies)))]
        prompt = self.shared * self.is_so(0.6) + self.ids(int(self.rng.integers(1, 12)))
        if self.is_so(0.2):
            prompt = list(self.shared)
        settings: dict[str, Any] = {
            "max_new_tokens": int(self.rng.integers(1, self.kind.longest)),
            "n": int(self.rng.choice([1, 1, 2, 3])),
        }
        settings["stop_ids"] = (3,) if self.is_so(0.5) else ()
        if self.is_so(0.3):
            settings["forced_tokens"] = self.ids(int(self.rng.integers(1, settings["max_new_tokens"] + 1)))
        if self.is_so(0.2):
            settings["cache_salt"] = "another"
        is_kept = self.kind.keeps and self.is_so(0.7)
        if not is_kept and "forced_tokens" not in settings and self.is_so(0.2):
            settings["stop_strings"] = ("7", "a;")
        sampling = self.sampling(cuts="forced_tokens" not in settings)
        self.counts["submitted"] += 1
        try:
            ticket = self.engine.submit(prompt, policy, sampling, keep=is_kept, **settings)
        except ValueError:  # such as a protected prompt that is longer than the budget
            self.counts["refused"] += 1
            self.events.append("refused")
            return
        self.queued(ticket, settings["n"], is_kept)

    def sampling(self, cuts: bool) -> jkv.Sampling:
        """Random settings of the draws; forced tokens need a distribution that cuts none of them."""
        if self.is_so(0.3):
            return jkv.Sampling(temperature=0.0, frequency_penalty=0.5 * self.is_so(0.3))
        cut = [{}, {}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.05}][int(self.rng.integers(5))]
        penalty = [{}, {}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.4, "frequency_penalty": -0.3}]
        return jkv.Sampling(seed=int(self.rng.integers(99)), **(cut if cuts else {}), **penalty[int(self.rng.integers(4))])

    def extend(self) -> None:
        """A further turn of a kept request, or its end."""
        ticket = self.kept.pop(int(self.rng.integers(len(self.kept))))
        if self.is_so(0.2):
            self.engine.release(ticket)
            return
        is_kept = self.is_so(0.6)
        new = self.ids(int(self.rng.integers(1, 14)))
        later = self.engine.extend(ticket, new, max_new_tokens=int(self.rng.integers(1, 16)), stop_ids=(), keep=is_kept)
        self.counts["continued"] += 1
        self.queued(later, 1, is_kept)

    def queued(self, ticket: int, num_samples: int, is_kept: bool) -> None:
        """Follows a request to its end."""
        self.running[ticket] = num_samples
        if is_kept:
            self.is_kept.add(ticket)

    def step(self) -> None:
        """One step, and the results of what has ended."""
        for event in self.engine.step():
            self.events.append([event.ticket, event.sample, event.tokens, event.logprobs, event.text, event.evicted])
            self.running[event.ticket] -= bool(event.finish_reason)
        for ticket in [ticket for ticket, count in self.running.items() if count == 0]:
            self.take(ticket)

    def take(self, ticket: int) -> None:
        """The result of a request."""
        out = self.engine.result(ticket)
        del self.running[ticket]
        if ticket in self.is_kept and len(out.lengths) == 1 and out.finish_reason[0] in ("stop", "length"):
            self.kept.append(ticket)
        self.digests[str(ticket)] = digests_of(out)
        self.counts.update(counts_of(out))


def record(path: Path, num_mixes: int) -> None:
    """Writes the digests of mixes, of all kinds in turn."""
    mixes, began = [], time.perf_counter()
    for number in range(num_mixes):
        name = list(KINDS)[number % len(KINDS)]
        mix = Mix(name, number // len(KINDS)).run()
        mixes.append({"kind": name, "seed": number // len(KINDS), "digests": mix.digests, "counts": dict(mix.counts)})
        print(f"{number + 1} of {num_mixes}, {time.perf_counter() - began:.0f} s: {name}, {mix.counts}", flush=True)
    path.write_text(json.dumps({"machine": machine(), "mixes": mixes}, indent=1))
    total = sum((collections.Counter(mix["counts"]) for mix in mixes), collections.Counter[str]())
    print(f"{num_mixes} mixes of {len(KINDS)} kinds: {dict(total)}")


def machine() -> dict[str, str]:
    """What bits depend on."""
    models = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    return {"cpu": models[0] if models else platform.processor(), "jax": jax.__version__, "jaxlib": jax.lib.__version__}


def compare(before: Path, after: Path) -> int:
    """Prints what differs, and returns how many mixes do."""
    one, other = (json.loads(path.read_text()) for path in (before, after))
    if one["machine"] != other["machine"]:
        raise SystemExit(f"Both records must be of one machine; got {one['machine']} and {other['machine']}.")
    if len(one["mixes"]) != len(other["mixes"]):
        raise SystemExit(f"Both records must have the same mixes; got {len(one['mixes'])} and {len(other['mixes'])}.")
    differing = 0
    for a, b in zip(one["mixes"], other["mixes"], strict=True):
        tickets = [*a["digests"], *(ticket for ticket in b["digests"] if ticket not in a["digests"])]
        found = [(ticket, a["digests"].get(ticket), b["digests"].get(ticket)) for ticket in tickets]
        lines = [f"  {ticket}: {differences(x, y)}" for ticket, x, y in found if x != y]
        if lines:
            print("\n".join([f"{a['kind']}, seed {a['seed']}:", *lines]))
        differing += bool(lines)
    print(f"{differing} of {len(one['mixes'])} mixes differ.")
    return differing


def differences(one: Mapping[str, str] | None, other: Mapping[str, str] | None) -> str:
    """The names of the parts that differ."""
    if one is None or other is None:
        return "only in the second" if one is None else "only in the first"
    return ", ".join(name for name in {**one, **other} if one.get(name) != other.get(name))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writes, compares = commands.add_parser("record"), commands.add_parser("compare")
    writes.add_argument("path", type=Path)
    writes.add_argument("--mixes", type=int, default=NUM_MIXES)
    compares.add_argument("before", type=Path)
    compares.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "record":
        record(options.path, options.mixes)
    else:
        sys.exit(compare(options.before, options.after) > 0)


if __name__ == "__main__":
    main()
