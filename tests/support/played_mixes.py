"""Random mixes of requests on engines of many kinds, and a digest of all that their callers receive.

`tests.support.recorded_mixes` writes the digests down. Only public calls are made here, which survive a move of the source.
Everything follows from a seed: where threads work, the order in which they do it is not asked about.
"""

import asyncio
import collections
import dataclasses
import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import jkv
from jkv.engine.service import Service
from jkv.testing import TINY, TinyTokenizer, tiny_model
from tests.support import gemma, learned_sinks
from tests.support.policies import build

COUNTS = "num_tokens", "compactions", "evicted", "shared", "saved"  # of a sample
OF_SCHEDULE = "peak_kv_bytes", "preemptions", "is_forked", "cached_tokens"  # of a sample, if one thread decides what runs when
RUN_COUNTS = (
    *("kv_bytes", "kv_bytes_per_sample", "peak_kv_bytes", "peak_sentence_bytes", "dense_kv_bytes", "amsr", "chunks", "steps"),
    *("sample_chunks", "row_steps", "tokens", "prefills", "forks", "prefix_queries", "prefix_hits", "preemptions", "started"),
    *("held_pages", "turns", "compactions"),
)
SHARED_COUNTS = "shifted", "empty_slots", "candidates", "judged", "near", "shared", "deferred"
NUM_REQUESTS = 16  # of a mix, at most
PAGE_SIZE, MAX_SLOTS, NUM_ROWS = 4, 96, 3
WIDE = dataclasses.replace(TINY, head_size=32, max_positions=512)  # the fewest channels that 4-bit codes take
MIXED = dataclasses.replace(
    TINY,
    family="qwen3_moe",
    qkv_bias=False,
    qk_norm=True,
    tie_embeddings=False,
    mlp_width=16,
    num_experts=8,
    num_active_experts=3,
    normalises_experts=True,
)
SMALL = {"budget": 16, "interval": 8, "window": 4}
LOOSE = {"strict": 0.0, "soft": 0.0, "structure": False, "threshold": 1e9, "match": 0.0, "pairing": "all", "interval": 4}
THINK = TinyTokenizer.pieces.index("<think>")
COMMON = ("full", "r_kv", "h2o", "streaming_llm")
FEW = ("full", "r_kv")


class BreakingTokenizer(TinyTokenizer):
    """Six of the tokens end a thought, so that short texts have several."""

    pieces = tuple(piece + "\n\n" if i in (7, 13, 19, 25) else piece for i, piece in enumerate(TinyTokenizer.pieces))


@dataclasses.dataclass(frozen=True)
class Kind:
    """One shape of engine, and what its requests may be.

    Attributes:
      policies: names of `jkv.POLICIES`, or policies.
      plays: which class of `PLAYERS` plays it.
      config: of the model, whose weights are random.
      fill: makes its norms and biases random too.
      options: of the engine.
      tensor: devices that KV heads are split over.
      replicas: engines behind one front.
      keeps: whether rows are kept for later turns.
      begins: the tokens that many prompts of a mix begin with, before others that the mix draws.
      shared: the fewest and the most of these.
      lengths: the fewest and the most tokens of a completion.
    """

    policies: tuple[Any, ...] = COMMON
    plays: str = "engine"
    config: jkv.ModelConfig = TINY
    fill: Any = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tensor: int = 1
    replicas: int = 1
    keeps: bool = False
    begins: tuple[int, ...] = ()
    shared: tuple[int, int] = (8, 30)
    lengths: tuple[int, int] = (1, 32)


SHARING = (
    jkv.reason_cache(include_prompt=True, **LOOSE),
    jkv.random_share(jkv.reason_cache(**LOOSE)),
    jkv.chain(jkv.reason_cache(include_prompt=True, **LOOSE), jkv.r_kv(budget=36, interval=8, window=4)),
    jkv.mem_share(similarity=0.0, threshold=1e9, interval=4),
    jkv.mem_share(similarity=0.0, percentile=90.0, warm_up=4, interval=4),
)
STEERING = jkv.skip_kv(
    **SMALL,
    tau=0.2,
    ends=(5, 9, 17),
    steer=jkv.SteeringVector(np.ones((TINY.num_layers, TINY.width), np.float32)),
    growth=0.1,
    keywords=("H",),
)
MOVED = jkv.streaming_llm(budget=12, interval=8, positions="cache")
SCORES = ("caote", "critical_kv", "cur", "expected_attention", "g_kv", "key_diff", "lag_kv", "random")
LEARNED = ("foresight", "learned_gate", "tri_attention", "random_attention", "vase", "rpc", "tova", "snap_kv")
ROW = TINY.num_layers * TINY.num_kv_heads * MAX_SLOTS // PAGE_SIZE  # pages of a full row
REUSING = {"options": {"prefix_cache": True, "max_slots": 384}, "shared": (257, 300)}
KINDS = {
    "common": Kind(),
    "scores": Kind(SCORES),
    "learned": Kind(LEARNED),
    "heads that compete": Kind(("ada_kv", "pyramid_kv", "full")),
    "shared pages": Kind((*SHARING, "full"), lengths=(20, 64)),
    "sentences and steering": Kind((STEERING, "skip_kv", "seal", "full"), begins=(THINK,), lengths=(16, 50)),
    "chosen pages": Kind((jkv.quest(budget=12, dense_layers=1), MOVED, "full")),
    "swapped rows": Kind(("full", "full", "r_kv"), options={"max_running": 8, "num_pages": ROW + ROW // 4}, lengths=(20, 60)),
    "prefix cache": Kind(**REUSING),
    "conversations": Kind(keeps=True, options={"num_pages": 2 * ROW, "copy_kept": True}),
    "conversations and prefix cache": Kind(("full", "r_kv", "key_diff"), keeps=True, **REUSING),
    "dispatched ahead": Kind(options={"ahead": True}),
    "8 bits": Kind(options={"kv_dtype": "int8"}),
    "fp8": Kind(options={"kv_dtype": "fp8"}),
    "4 bits": Kind(config=WIDE, options={"kv_dtype": "int4"}),
    "sealed pages": Kind(
        ("full",), config=WIDE, options={"kv_dtype": "kvarn", "page_size": 16, "max_slots": 192}, keeps=True, lengths=(16, 50)
    ),
    "experts": Kind(config=MIXED, options={"routed_experts": True}),
    "windows and learned sinks": Kind(config=learned_sinks.CONFIG, fill=learned_sinks.with_random_vectors),
    "Gemma": Kind(config=gemma.GEMMA3),
    "mesh": Kind((*COMMON, "quest", "skip_kv"), tensor=2),
    "service": Kind(plays="service", keeps=True),
    "rollout": Kind(FEW, plays="rollout"),
    "replicas": Kind(COMMON, plays="replicas", replicas=2),
}


# Digests.


def digest(*values: Any) -> str:
    """Of arrays with their dtypes and shapes, and of anything else as JSON."""
    total = hashlib.sha256()
    for value in values:
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            array = np.asarray(value)
            total.update(f"{array.dtype} {array.shape} ".encode() + array.tobytes())
        else:
            total.update(json.dumps(value, default=float).encode())
    return total.hexdigest()[:16]


def digests_of(out: jkv.Result, counts: Sequence[str]) -> dict[str, str]:
    """A digest of each part of a result, by name; `counts` are those of its samples."""
    parts: dict[str, tuple[Any, ...]] = {
        "tokens": (out.tokens, out.lengths, out.finish_reason, *out.prompts),
        "texts": (out.text, out.split()),
        "log-probabilities": (out.logprobs, out.logprobs_full, out.model_logprobs),
        "versions": (out.policy_version,),
        "errors": tuple(repr(sample.error) for sample in out.samples),
        "counts": tuple([getattr(sample, name) for name in counts] for sample in out.samples),
    }
    if out.trace is not None:
        trace = out.trace
        more = [trace.sinks, trace.sink_shift, *jax.tree.leaves(trace.steer), str(trace.kv_format)]
        parts["trace"] = trace.source, trace.begin, trace.end, *more
    if out.routed_experts is not None:
        parts["experts"] = (out.routed_experts,)
    for one in out.transcripts or ():
        fields = [] if one is None else [getattr(one, field.name) for field in dataclasses.fields(one)]
        parts["transcripts"] = (*parts.get("transcripts", ()), len(fields), *fields)
    if isinstance(out, jkv.Rollouts):
        parts["rollouts"] = out.mask, out.prompt_index, out.sample_index, out.seeds, out.pad_id
    return {name: digest(*values) for name, values in parts.items()}


def counts_of(out: jkv.Result) -> collections.Counter[str]:
    """What happened to the samples of a result."""
    counts = collections.Counter[str]()
    for i, one in enumerate(out.samples):
        name, sampling, length = out.policies[i].name, out.sampling[i], int(out.lengths[i])
        found = {
            "tokens": length,
            "compactions": one.compactions,
            "evicted": round(one.evicted),
            "shared": one.shared,
            "preemptions": one.preemptions,
            "forks": one.is_forked,
            "penalised tokens": length * sampling.penalises,
            "cut tokens": length * (sampling.draws == "truncated"),
            "greedy tokens": length * (sampling.draws == "greedy"),
            f"tokens of {name}": length,
            f"ended by {out.finish_reason[i]}": 1,
        }
        if out.trace is not None:
            trace = out.trace.part([i])
            steered = 0 if trace.steer is None else np.count_nonzero(trace.steer.amount)
            moved = 0 if trace.sinks is None else np.count_nonzero(trace.sink_shift)
            found |= {"traces": 1, "steered tokens": int(steered), "queries of moved sinks": int(moved)}
            found["chosen columns"] = trace.shape[-1] * (out.policies[i].read is not None)
            changed = found["evicted"] + found["shared"] + found["steered tokens"] + found["chosen columns"]
            found[f"changed by {name}"] = changed
        if out.routed_experts is not None:
            found["routes"] = 1
        counts.update(found)
    return counts


@functools.cache
def model_of(name: str) -> jkv.Model:
    """The model of a kind."""
    model = tiny_model(1, KINDS[name].config, BreakingTokenizer())
    fill = KINDS[name].fill
    return fill(model) if fill else model


def scaled(params: jkv.Params) -> jkv.Params:
    """Other weights."""
    return jax.tree.map(lambda leaf: leaf * 1.0625, params)


# Players.


class Mix:
    """One random mix on an engine of its own; `run` of a class of `PLAYERS` plays it.

    Attributes:
      digests: of each result, by its name, and of the events.
      counts: what happened, so that one sees what a record covers.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.kind, self.rng = KINDS[name], np.random.default_rng([seed, *name.encode()])
        self.model = model_of(name)
        self.policies = [build(one, self.model, **SMALL) if isinstance(one, str) else one for one in self.kind.policies]
        num_devices = self.kind.tensor * self.kind.replicas
        assert len(jax.devices()) >= num_devices, "XLA_FLAGS must ask for more devices, as `tests.support.recorded_mixes` does"
        devices = np.array(jax.devices()[:num_devices]).reshape(self.kind.replicas, -1)
        self.mesh = None if devices.size == 1 else Mesh(devices[0], ("tensor",))
        if self.kind.replicas > 1:
            self.mesh = Mesh(devices, ("data", "tensor"))
        self.settings = {"max_running": NUM_ROWS, "max_slots": MAX_SLOTS, "page_size": PAGE_SIZE, "chunk": 8}
        self.settings |= {"poison": True} | self.kind.options
        self.shared = [*self.kind.begins, *self.ids(*self.kind.shared)]  # what many of its prompts begin with
        self.events: list[Any] = []
        self.digests: dict[str, dict[str, str]] = {}
        self.counts: collections.Counter[str] = collections.Counter()

    def run(self) -> None:
        """Plays it to its end."""
        raise NotImplementedError

    # Draws.

    def number(self, least: int, most: int) -> int:
        """A random number, `most` included."""
        return int(self.rng.integers(least, most + 1))

    def is_so(self, share: float) -> bool:
        """A random choice."""
        return bool(self.rng.random() < share)

    def one_of(self, choices: Sequence[Any]) -> Any:
        """A random choice of several."""
        return choices[int(self.rng.integers(len(choices)))]

    def ids(self, least: int, most: int) -> list[int]:
        """Random token ids; a third of the lists repeat a few."""
        few = self.rng.integers(4, 32, 3) if self.is_so(1 / 3) else np.arange(4, 32)
        return self.rng.choice(few, self.number(least, most)).tolist()

    def prompt(self) -> list[int]:
        """A prompt, which often begins as others do."""
        if self.is_so(0.2):
            return list(self.shared)
        return self.shared * self.is_so(0.6) + self.ids(1, 11)

    def sampling(self, cuts: bool = True) -> jkv.Sampling:
        """Random settings of the draws; forced tokens need a distribution that cuts none of them."""
        if self.is_so(0.3):
            return jkv.Sampling(temperature=0.0, seed=0, frequency_penalty=0.5 * self.is_so(0.3))
        cut = self.one_of([{}, {}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.05}])
        penalty = self.one_of([{}, {}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.4, "frequency_penalty": -0.3}])
        return jkv.Sampling(seed=self.number(0, 98), **(cut if cuts else {}), **penalty)

    # Records.

    def happens(self, name: str, act: Callable[[], Any]) -> Any:
        """Does something, and counts it."""
        self.counts[name] += 1
        return act()

    def refused(self, error: ValueError) -> None:
        """Writes down why a request was refused."""
        self.counts["refusals"] += 1
        self.events.append(str(error))

    def take(self, name: str, out: jkv.Result, counts: Sequence[str] = (*COUNTS, *OF_SCHEDULE)) -> jkv.Result:
        """Writes down a result."""
        self.digests[name] = digests_of(out, counts)
        self.counts.update(counts_of(out))
        num_tokens, kind = int(out.lengths.sum()), self.kind
        places = {
            "in " + kind.options.get("kv_dtype", "float32"): 1,
            "on a mesh": kind.tensor > 1,
            "of replicas": kind.replicas > 1,
        }
        self.counts.update({f"tokens {place}": num_tokens * is_so for place, is_so in places.items()})
        if kind.options.get("kv_dtype") == "kvarn":
            seen = [len(prompt) + int(length) for prompt, length in zip(out.prompts, out.lengths, strict=True)]
            self.counts["sealed pages that were read"] += sum(max(0, total // kind.options["page_size"] - 2) for total in seen)
        return out

    def take_stats(self, stats: Any) -> None:
        """Writes down the counts of an engine."""
        values = [getattr(stats, name) for name in RUN_COUNTS] + [getattr(stats.sharing, name) for name in SHARED_COUNTS]
        self.digests["engine"] = {"counts": digest(values)}
        self.counts.update({"turns of kept rows": stats.turns, "prompt tokens from the prefix cache": stats.prefix_hits})


class EngineMix(Mix):
    """Calls of `jkv.Engine`, one turn at a time, with something rare between two of them."""

    def run(self) -> None:
        self.running: dict[int, int] = {}  # samples that have not ended, by ticket
        self.asked: dict[int, dict[str, Any]] = {}  # the settings of each ticket
        self.kept: list[int] = []  # tickets that can be continued
        self.left = NUM_REQUESTS
        self.engine = jkv.Engine(self.model, policies=self.policies, mesh=self.mesh, return_trace=True, **self.settings)
        while self.left or not self.engine.is_idle:
            self.act()
        for ticket in self.kept:
            self.engine.release(ticket)
        self.digests["events"] = {"all": digest(self.events)}
        self.take_stats(self.engine.stats)
        self.counts["engines that swapped rows"] += self.engine.stats.swap_seconds > 0

    def act(self) -> None:
        """Submits, continues, steps, or something rarer."""
        if self.left and self.kept and self.is_so(0.3):
            self.extend()
        elif self.left and self.is_so(0.1 if self.kind.keeps else 0.4):
            self.submit()
        elif self.running and self.is_so(0.03):
            self.happens("cancellations", lambda: self.engine.cancel(self.one_of(list(self.running))))
        elif self.is_so(0.02):
            self.happens("updates", lambda: self.engine.update(scaled(self.engine.model.params)))
            if self.is_so(0.5):
                self.restart()
        elif self.is_so(0.02):
            self.happens("sleeps", lambda: (self.engine.sleep(), self.engine.wake()))
        elif self.is_so(0.02):
            self.stream()
        else:
            self.hear(self.engine.step())

    def restart(self) -> None:
        """What runs starts again, with the new weights; kept rows go, unless the host has a copy."""
        self.counts["samples restarted after an update"] += sum(self.running.values())
        if not self.engine.options.copy_kept:
            self.kept.clear()
        self.engine.reset()

    def stream(self) -> None:
        """A stream that its reader leaves early."""
        self.counts["streams"] += 1
        for count, event in enumerate(self.engine.stream()):
            self.hear([event])
            if count == 2:
                break

    def submit(self) -> None:
        """A random request."""
        settings: dict[str, Any] = {"max_new_tokens": self.number(*self.kind.lengths), "n": self.one_of([1, 1, 2, 3])}
        settings["stop_ids"] = (3,) if self.is_so(0.5) else ()
        if self.is_so(0.3):
            settings["forced_tokens"] = self.ids(1, settings["max_new_tokens"])
        if self.is_so(0.2):
            settings["cache_salt"] = "another"
        settings["keep"] = self.kind.keeps and self.is_so(0.7)
        if self.kind.keeps and self.is_so(0.2):
            settings["prompt_piece"] = 8
        if not settings["keep"] and "forced_tokens" not in settings and self.is_so(0.2):
            settings["stop_strings"] = ("H", "a\n")
        if self.is_so(0.2):
            settings["on_tokens"] = self.called if self.is_so(0.8) else broken
        sampling = self.sampling(cuts="forced_tokens" not in settings)
        self.left -= 1
        try:
            ticket = self.engine.submit(self.prompt(), self.one_of(self.policies), sampling, **settings)
        except ValueError as error:  # such as a protected prompt that is longer than the budget
            self.refused(error)
            return
        self.running[ticket], self.asked[ticket] = settings["n"], settings

    def extend(self) -> None:
        """A further turn of a kept request, or its end."""
        ticket = self.kept.pop(self.number(0, len(self.kept) - 1))
        if self.is_so(0.2):
            self.happens("releases", lambda: self.engine.release(ticket))
            return
        settings = {"max_new_tokens": self.number(1, 15), "stop_ids": (), "keep": self.is_so(0.6)}
        self.left -= 1
        try:
            later = self.engine.extend(ticket, self.ids(1, 13), **settings)
        except ValueError as error:  # the conversation is too long
            self.refused(error)
            self.engine.release(ticket)
            return
        self.running[later], self.asked[later] = 1, settings

    def called(self, event: jkv.Event) -> None:
        """The callback of some requests."""
        self.counts["events of callbacks"] += 1
        self.events.append(["called", event.ticket, event.tokens, event.text])

    def hear(self, events: Sequence[jkv.Event]) -> None:
        """Writes down events, and the results of what has ended."""
        for event in events:
            self.events.append(list_of(event))
            self.running[event.ticket] -= bool(event.finish_reason)
        for ticket in [ticket for ticket, count in self.running.items() if count == 0]:
            del self.running[ticket]
            settings, out = self.asked[ticket], self.take(str(ticket), self.engine.result(ticket))
            if settings["keep"] and len(out.lengths) == 1 and out.finish_reason[0] in ("stop", "length"):
                self.kept.append(ticket)
            forced = settings.get("forced_tokens", ())
            self.counts["prompts in pieces"] += len(out.prompts[0]) > settings.get("prompt_piece", TINY.max_positions)
            self.counts["forced tokens"] += sum(min(len(forced), int(length)) for length in out.lengths)


def broken(event: jkv.Event) -> None:
    """A callback that raises."""
    raise OSError("the socket is closed")


class ServiceMix(Mix):
    """Rounds of requests to a served engine, which is paused while they are submitted, so that their order is known."""

    def run(self) -> None:
        engine = jkv.Engine(self.model, policies=self.policies, return_trace=True, **self.settings)
        with Service(engine) as service:
            tickets: list[Any] = []
            for number in range(3):
                service.pause().result()
                if number and self.is_so(0.5):
                    self.happens("updates", service.update(scaled(engine.model.params)).result)
                if self.is_so(0.3):
                    self.happens("sleeps", service.call(lambda engine: (engine.sleep(), engine.wake())).result)
                tickets = self.round(service, tickets)
                service.resume().result()
                for index, out in enumerate(asyncio.run(results_of(tickets))):
                    self.take(f"{number}, {index}", out)
                self.events += [list_of(event) for ticket in tickets if ticket.streams for event in ticket]
            self.take_stats(service.call(lambda engine: engine.stats).result())
            service.close("wait").result()
        self.digests["events"] = {"all": digest(self.events)}

    def round(self, service: Any, earlier: Sequence[Any]) -> list[Any]:
        """The tickets of new requests, and of those that continue earlier ones."""
        tickets = []
        for ticket in earlier:
            if ticket.keep and ticket.result().finish_reason[0] in ("stop", "length"):
                settings = {"max_new_tokens": self.number(1, 15), "stop_ids": (), "keep": self.is_so(0.6)}
                try:
                    tickets.append(ticket.extend(self.ids(1, 13), streams=self.is_so(0.5), **settings))
                except ValueError as error:  # the conversation is too long
                    self.refused(error)
        for _ in range(self.number(1, 3)):
            settings = {"policy": self.one_of(self.policies), "sampling": self.sampling(), "n": self.one_of([1, 2])}
            settings |= {"max_new_tokens": self.number(*self.kind.lengths), "stop_ids": (3,), "model_logprobs": self.is_so(0.5)}
            tickets.append(service.submit(self.prompt(), streams=self.is_so(0.5), keep=self.is_so(0.5), **settings))
            if self.is_so(0.1):
                self.happens("cancellations", tickets[-1].cancel)
        return tickets


async def results_of(tickets: Sequence[Any]) -> list[jkv.Result]:
    """What tasks that await them receive."""

    async def wait(ticket: Any) -> jkv.Result:
        return await ticket

    return await asyncio.gather(*map(wait, tickets))


class RolloutMix(Mix):
    """Calls of `jkv.Rollout`, with updates and sleeps between them, and what a trainer makes of the samples."""

    def run(self) -> None:
        limits = {"max_prompt_tokens": 48, "max_new_tokens": 40}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that cut and penalised draws bias a trainer
            rollout = jkv.Rollout(self.model, self.one_of(self.policies), **limits, **self.settings)
            for number in range(3):
                self.round(rollout, str(number))
                if self.is_so(0.5):
                    self.happens("updates", lambda: rollout.update(scaled(rollout.model.params)))
                if self.is_so(0.5):
                    self.happens("sleeps", rollout.sleep)
            out = rollout.converse([self.prompt() for _ in range(2)], self.reply, max_turns=3, max_turn_tokens=8, n=2, seed=3)
        self.take("conversations", out)
        self.counts["turns of kept rows"] += out.stats.turns

    def round(self, rollout: jkv.Rollout, name: str) -> None:
        """Some samples of which a part comes first, and their scores."""
        settings = {"n": 2, "stop_ids": (3,), "max_new_tokens": self.number(8, 32), "return_trace": True}
        rollout.submit([self.prompt() for _ in range(2)], sampling=self.sampling(), **settings)
        if self.is_so(0.5):
            self.take(f"{name}, first", rollout.run(until_done=2))
        if not rollout.pending:
            return
        out = self.take(f"{name}, rest", rollout.run())
        scores = jkv.score(rollout.model, out)
        batch = jkv.rl.make_batch(out, np.arange(len(out.lengths), dtype=np.float32), replay=True)
        self.digests[f"{name}, scores"] = {"scores": digest(*jax.tree.leaves(vars(scores)))}
        self.digests[f"{name}, batch"] = {"batch": digest(*jax.tree.leaves(batch))}
        self.counts["scored tokens"] += int(out.lengths.sum())

    def reply(self, turn: Any) -> list[int] | None:
        """What a tool says; of the turn alone, for turns may end in any order."""
        return None if turn.number == 2 else [int(token) for token in turn.tokens[:3]] + [5]


class ReplicasMix(Mix):
    """Calls of `jkv.Replicas` and of `jkv.generate` on a mesh of several engines; which of them has a request is not asked."""

    def run(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that limits cut most samples
            out = jkv.generate(self.model, **self.call(), policy=self.policies[1], **self.engines())
        self.take("generated", out, COUNTS)
        with jkv.Replicas(self.model, policies=self.policies, **self.engines()) as replicas:
            for number in range(2):
                settings = self.call() | {"policy": [self.one_of(self.policies) for _ in range(3)]}
                self.take(str(number), replicas.generate(settings.pop("prompt_or_prompts"), **settings), COUNTS)
                if self.is_so(0.5):
                    self.happens("updates", lambda: replicas.update(scaled(replicas.model.params)))
                if self.is_so(0.5):
                    self.happens("sleeps", lambda: (replicas.sleep(), replicas.wake()))
            settings = self.call()
            for index, out in sorted(replicas.stream(settings.pop("prompt_or_prompts"), **settings), key=lambda one: one[0]):
                self.take(f"streamed {index}", out, COUNTS)

    def engines(self) -> dict[str, Any]:
        """Their settings."""
        return {"mesh": self.mesh, "return_trace": True, **self.settings}

    def call(self) -> dict[str, Any]:
        """A call of several requests."""
        settings = {"max_new_tokens": self.number(8, 32), "n": 2, "stop_ids": (3,), "sampling": self.sampling()}
        return {"prompt_or_prompts": [self.prompt() for _ in range(3)], **settings}


def list_of(event: jkv.Event) -> list[Any]:
    """All of an event."""
    return [getattr(event, field.name) for field in dataclasses.fields(event)]


PLAYERS = {"engine": EngineMix, "service": ServiceMix, "rollout": RolloutMix, "replicas": ReplicasMix}


def play(name: str, seed: int) -> Mix:
    """Plays a mix of a kind."""
    mix = PLAYERS[KINDS[name].plays](name, seed)
    mix.run()
    return mix
