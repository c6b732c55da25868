"""`jkv.verify(policy)`: a conformance suite of the guarantees that the engine, replay and users rely on.

Each check is a function of a `Case` that returns a message about what is wrong, or None. Runs are small: a random model of two
layers, with prompts and completions a little longer than the policy needs to act twice.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jkv.cache.pool import EMPTY
from jkv.engine import programs
from jkv.engine.engine import Engine
from jkv.engine.results import Result, complete, make_result
from jkv.eviction import CacheView, Policy
from jkv.model.sampling import Sampling
from jkv.policies import full
from jkv.reasoning.steering import SteeringVector
from jkv.replay.score import round_up, score
from jkv.testing import TINY, TinyTokenizer, looping_view, random_calibration, random_view, tiny_model
from pallas_kernels.largest_slots import ROUNDING

SAMPLING = Sampling(temperature=1.0, seed=3)
PAGE_SIZE = 4
NUM_ROWS, OTHER_ROWS = 5, 1  # of the engines that run a case; for one row, XLA rounds a decode step differently on a CPU
LOOPS = ([4], [4, 9], [4, 9, 11, 2, 5])  # the tokens that a text repeats
CHUNK = 4  # one length of a chunk is one program; short, so that staggered requests are due at different times


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `verify`.

    Attributes:
      policy: the policy's name.
      failures: a message for each failed check, by its name.
      passed: the names of the other checks.
    """

    policy: str
    failures: dict[str, str]
    passed: tuple[str, ...]

    @property
    def is_ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.failures

    def __repr__(self) -> str:
        lines = [f"{self.policy}: {len(self.passed)} checks passed, {len(self.failures)} failed"]
        lines += [f"  ok      {describe(name)}" for name in self.passed]
        lines += [f"  FAILED  {describe(name)}\n          {message}" for name, message in self.failures.items()]
        return "\n".join(lines)


def describe(name: str) -> str:
    """The guarantee of a check: the first line of its docstring."""
    return (CHECKS[name].__doc__ or name).splitlines()[0]


class Case:
    """A policy with the models, prompts and runs that its checks share."""

    def __init__(self, policy: Policy, group: int = 2, dtype: Any = jnp.float32) -> None:
        self.policy, self.group, self.dtype = policy, group, dtype
        config = dataclasses.replace(TINY, max_positions=1 << 20)
        self.model = tiny_model(config=config, tokenizer=TinyTokenizer())
        if policy.steer:  # with a vector of this model's shape
            values = np.random.default_rng(1).standard_normal((config.num_layers, config.width)).astype(np.float32)
            layer = min(policy.steer.layer, config.num_layers - 1)
            steer = dataclasses.replace(policy.steer, vector=SteeringVector(values), layer=layer)
            self.policy = dataclasses.replace(policy, steer=steer)
        if policy.calibration:  # of this model
            self.policy = dataclasses.replace(policy, calibration=random_calibration(policy.calibration, self.model))
        if policy.slots:
            shape = (config.num_paged_layers, config.num_kv_heads)[: np.ndim(policy.slots)]
            self.policy = self.policy.with_budgets(np.resize(policy.slots, shape))
        if policy.share:  # random text repeats little, so all thoughts count as similar
            alike = dataclasses.replace(policy.share.filter, strict=0.0, soft=0.0, structure=False)
            share = dataclasses.replace(policy.share, filter=alike, match=0.0, threshold=math.inf, cap=None)
            self.policy = dataclasses.replace(self.policy, share=share)
        schedule: Any = policy.schedule
        budget, due = policy.budget or 0, None if schedule is None else schedule.steps_until_due(0)
        self.new_tokens = max(64, budget // 2 + 2 * (due or 1) + 8)
        if policy.share:  # until some thoughts have ended
            self.new_tokens += 128 + 2 * policy.share.interval
        rng, size = np.random.default_rng(0), self.model.config.vocab_size
        lengths = (3, max(20, budget // 2), max(33, budget + 9))
        longest = max(1, policy.longest_prompt)  # a protected prompt must fit
        self.prompts = [rng.integers(1, size, int(min(length, longest)), dtype=np.int32) for length in lengths]
        self.loops = [np.resize(np.array(loop, np.int32), int(min(lengths[-1], longest))) for loop in LOOPS]

    def run(
        self,
        policy: Policy | None = None,
        prompts: Sequence[np.ndarray] | None = None,
        new_tokens: int | None = None,
        sampling: Sampling = SAMPLING,
        num_rows: int = NUM_ROWS,
        is_staggered: bool = False,
    ) -> Result:
        """A traced run of this or another policy; engines always have the same shape, so programs compile once.

        Staggered requests arrive one chunk apart.
        """
        prompts = self.prompts if prompts is None else prompts
        policy = self.policy if policy is None else policy
        engine = Engine(
            self.model,
            max_running=num_rows,
            max_slots=round_up(max(self.most_slots(full()), self.most_slots(self.policy))),
            page_size=PAGE_SIZE,
            policies=[self.policy],
            chunk=CHUNK,
            return_trace=True,
        )
        limit, tickets = self.new_tokens if new_tokens is None else new_tokens, []
        for prompt in prompts:
            tickets.append(engine.submit(prompt, policy, sampling, limit, stop_ids=()))
            if is_staggered:
                engine.step()
        engine.run()
        return complete(make_result(self.model, engine.take(tickets), engine.stats, is_traced=True))

    def most_slots(self, policy: Policy) -> int:
        """The most slots of any prompt in a layer and KV head."""
        config, lengths = self.model.config, [len(prompt) for prompt in self.prompts]
        return max(policy.widest(length, self.new_tokens, config.num_paged_layers, config.num_kv_heads) for length in lengths)

    @functools.cached_property
    def compressed(self) -> Result:
        """The result of the policy's run."""
        return self.run()

    def view(self, seed: int, batch: int = 3) -> CacheView:
        """A random view with room for more slots than the budget, of rows of different lengths; NaN in empty slots."""
        window = self.policy.needs.window
        slots = max(40, 2 * self.num_kept)
        rng = np.random.default_rng(seed)
        view = random_view(
            rng,
            batch=batch,
            slots=slots,
            window=max(8, window),
            group=self.group,
            dtype=self.dtype,
            carried_names=self.policy.needs.carried,
        )
        return view._replace(budget=jnp.full(view.position.shape[:2], self.num_kept, jnp.int32))

    def looping_view(self, period: int, has_rope: bool) -> CacheView:
        """A text that repeats tokens, in rows that differ by rounding alone; with the shapes of `view`."""
        slots, window = max(40, 2 * self.num_kept), max(8, self.policy.needs.window)
        rng = np.random.default_rng(period)
        view = looping_view(
            rng, period, has_rope, slots=slots, window=window, group=self.group, carried_names=self.policy.needs.carried
        )
        return view._replace(budget=jnp.full(view.position.shape[:2], self.num_kept, jnp.int32))

    @functools.cached_property
    def select(self) -> Callable[[CacheView], Any]:
        """The slots that the policy keeps of a view, by one program: what it computes step by step compiles as many."""
        return jax.jit(lambda view: self.policy.select(view))

    @property
    def num_kept(self) -> int:
        """The budget of `view`."""
        protected = self.policy.protected + (3 if self.policy.evict and self.policy.evict.protect_prompt else 0)
        return self.policy.budget or max(24, protected + 4)


def is_hashable(case: Case) -> str | None:
    """It is hashable, and equal to a copy of itself."""
    try:
        twin = copy.deepcopy(case.policy)
        is_equal = hash(twin) == hash(case.policy) and twin == case.policy
    except TypeError as error:
        return f"{error}: make the score a frozen dataclass or a plain function, not a closure over arrays or lists."
    return None if is_equal else "A copy of it is not equal, so programs compile again for it: compare and hash by value."


def selects_filled_slots(case: Case) -> str | None:
    """It keeps as many slots as the budget allows or the row has, each once, none of them empty."""
    if case.policy.evict is None:
        return None
    view = case.view(1)
    slots, filled = np.asarray(case.select(view)), np.asarray(view.is_filled)
    able = filled if case.policy.is_planned else np.asarray(case.policy.rate(view)) > -np.inf  # not below its threshold
    count, wanted = (slots != EMPTY).sum(axis=-1), np.minimum(case.num_kept, able.sum(axis=-1))
    if case.policy.evict.scope == "compete":
        count, wanted = count.sum(axis=-1), wanted.sum(axis=-1)
    if (count != wanted).any():
        return f"It keeps {count.tolist()} slots, not {wanted.tolist()}. Is the score NaN or -inf somewhere?"
    for b, k in np.ndindex(slots.shape[:2]):
        kept = slots[b, k][slots[b, k] != EMPTY]
        if len(set(kept.tolist())) < len(kept) or not filled[b, k, kept].all():
            return f"Row {b}, head {k} keeps a slot twice, or an empty one: {kept.tolist()}."
        if (slots[b, k, len(kept) :] != EMPTY).any():
            return f"Row {b}, head {k} has empty entries before kept ones: {slots[b, k].tolist()}."
    return None


def keeps_protected_slots(case: Case) -> str | None:
    """Sinks and recent tokens survive."""
    if case.policy.evict is None:
        return None
    view = case.view(2)
    slots, protected = np.asarray(case.select(view)), np.asarray(case.policy.evict.is_protected(view))
    for b, k in np.ndindex(slots.shape[:2]):
        lost = set(np.flatnonzero(protected[b, k]).tolist()) - set(slots[b, k].tolist())
        if lost:
            positions = sorted(np.asarray(view.position)[b, k, sorted(lost)].tolist())
            return f"Row {b}, head {k} drops the protected positions {positions}."
    return None


def is_pure(case: Case) -> str | None:
    """It selects the same slots eagerly, under jit and under vmap, and twice."""
    if case.policy.evict is None:
        return None
    view = case.view(3)._replace(layer=None)
    eager, jitted, again = (np.asarray(select(view)) for select in (case.policy.select, case.select, case.select))
    each = jax.tree.map(lambda x: x[:, None], view)
    mapped = np.asarray(jax.jit(jax.vmap(case.policy.select))(each)[:, 0])
    for name, other in (("under jit", jitted), ("a second time", again), ("under vmap", mapped)):
        if (eager != other).any():
            return f"It selects other slots {name}: the score depends on something besides the view, or on its batch."
    return None


def treats_rows_independently(case: Case) -> str | None:
    """A row's choice does not depend on the other rows of the batch."""
    if case.policy.evict is None:
        return None
    view = case.view(4)._replace(layer=None)
    together = np.asarray(case.select(view))
    for b in range(3):
        by_itself = np.asarray(case.select(jax.tree.map(lambda x, b=b: x[b : b + 1], view)))[0]
        if (by_itself != together[b]).any():
            return f"Row {b} keeps other slots by itself than in a batch: the score mixes rows."
    return None


def ignores_rounding(case: Case) -> str | None:
    """Rounding does not decide between slots that are equal because the text repeats a token or a phrase."""
    if case.policy.evict is None:
        return None
    for has_rope in (True, False):
        for loop in LOOPS:
            slots = np.asarray(case.select(case.looping_view(len(loop), has_rope)))
            if (slots != slots[:1]).any():
                where = "" if has_rope else ", in a layer without RoPE,"
                return (
                    f"It keeps other slots of a text that repeats {len(loop)} tokens{where} if its inputs are rounded "
                    f"otherwise. Scores that are equal but for rounding must differ by less than {ROUNDING:.1e} of their "
                    "size: set a difference of nearly equal numbers to 0."
                )
    return None


def equals_full_when_nothing_is_due(case: Case) -> str | None:
    """A budget as long as the sequence, no threshold, or a strength or distance of zero gives the full cache's results."""
    policy, schedule = case.policy, case.policy.schedule
    if policy.share is not None:
        policy = dataclasses.replace(policy, share=dataclasses.replace(policy.share, threshold=0.0, percentile=1e-9))
    new_tokens, enough = case.new_tokens, 2 * len(case.prompts) * (len(case.prompts[-1]) + case.new_tokens)
    if policy.read is not None:
        policy = dataclasses.replace(policy, read=dataclasses.replace(policy.read, budget=enough))
    elif policy.evict is not None and policy.budget is not None:
        wide: Any = schedule
        evict = dataclasses.replace(policy.evict, floor=1.0)
        policy = dataclasses.replace(
            policy, schedule=dataclasses.replace(wide, budget=enough), evict=evict, pyramid=1.0, slots=None
        )
    elif policy.steer is not None:
        policy = dataclasses.replace(policy, steer=dataclasses.replace(policy.steer, strength=0.0, growth=0.0))
    elif not policy.is_planned:
        wide = schedule
        policy = dataclasses.replace(policy, schedule=dataclasses.replace(wide, threshold=-math.inf))
    elif schedule is not None:  # it drops by its schedule, whatever the budget: stop before
        new_tokens = (schedule.steps_until_due(0) or 2) - 1
        new_tokens = new_tokens // CHUNK * CHUNK or new_tokens  # whole chunks: a shorter one is a program more
    uncut = case.run(full(), new_tokens=new_tokens)
    whole = case.run(policy, new_tokens=new_tokens)
    if whole.stats.evicted:
        return f"It drops {whole.stats.evicted:g} tokens though its budget holds them all."
    if not np.array_equal(whole.tokens, uncut.tokens):
        return "It gives other tokens than the full cache though nothing is dropped."
    return mismatch(whole.logprobs, uncut.logprobs, "the full cache")


def replays(case: Case) -> str | None:
    """Replaying its trace gives the log-probabilities that its tokens were drawn with."""
    out = case.compressed
    replayed = score(case.model, out, trace=out.trace).logprobs
    return mismatch(out.logprobs, replayed, "the replay of its trace")


def is_batch_invariant(case: Case) -> str | None:
    """A request gives the same tokens by itself as in a batch, however many rows are compacted in the same turn.

    Log-probabilities must be equal bit for bit in engines of the same number of rows. In an engine of one row, XLA rounds a
    decode step differently; tokens must be equal there too, and log-probabilities nearly so, also where the text repeats
    tokens, so that slots are equal but for rounding.
    """
    by_itself = [case.run(prompts=[prompt]) for prompt in case.prompts]
    several = [2] * NUM_ROWS  # all compacted in the same turns
    staggered = [0, 1, 1, 2, 2]  # each compacted in another turn
    batches = {
        "in a batch": (range(len(case.prompts)), case.compressed),
        f"as one of {NUM_ROWS} equal requests": (several, case.run(prompts=[case.prompts[i] for i in several])),
        "when the others arrive at other times": (
            staggered,
            case.run(prompts=[case.prompts[i] for i in staggered], is_staggered=True),
        ),
    }
    for where, (order, out) in batches.items():
        for row, i in enumerate(order):
            if difference := differs(by_itself[i], 0, out, row):
                return f"Prompt {i} gives {difference} by itself than {where}."
    prompts = [*case.loops, case.prompts[0]]
    many, one = (case.run(prompts=prompts, num_rows=num_rows) for num_rows in (NUM_ROWS, OTHER_ROWS))
    names = [f"A text that repeats {len(loop)} tokens" for loop in LOOPS] + ["Prompt 0"]
    for name, tokens, others in zip(names, many.tokens, one.tokens, strict=True):
        if not np.array_equal(tokens, others):
            return f"{name} gives other tokens in an engine of {OTHER_ROWS} row than in one of {NUM_ROWS}: rounding decides."
    return mismatch(many.logprobs, one.logprobs, f"an engine of {OTHER_ROWS} row")


def differs(first: Result, row: int, other: Result, other_row: int) -> str | None:
    """A message about the first difference between rows of two results; None if they are equal bit for bit."""
    token, log_prob = (
        np.flatnonzero(getattr(first, field)[row] != getattr(other, field)[other_row]) for field in ("tokens", "logprobs")
    )
    if token.size:
        return f"other tokens, from token {token[0]} on,"
    return f"other log-probabilities, from token {log_prob[0]} on," if log_prob.size else None


def never_compiles_again(case: Case) -> str | None:
    """Other prompts, lengths and seeds compile nothing."""
    assert case.compressed.tokens.size
    before = num_compiled()
    rng = np.random.default_rng(9)
    others = [rng.permutation(prompt)[: len(prompt) - i] for i, prompt in enumerate(case.prompts)]
    case.run(copy.deepcopy(case.policy), others, sampling=Sampling(seed=8))
    if num_compiled() > before:
        return f"{num_compiled() - before} programs compiled for other prompts, or for a copy of the policy."
    return None


def num_compiled() -> int:
    """Programs that the engine has compiled in this process."""
    names = ("decode_chunk", "prefill_chunk", "compact", "release", "take_pages", "measure_pages")
    return sum(getattr(programs, name).num_compiled() for name in names)


def frees_memory(case: Case) -> str | None:
    """A bounded policy evicts and holds fewer bytes than the full cache; a policy with sharing shares pages."""
    if case.policy.share is not None and not case.compressed.stats.shared:
        return (
            f"It shared nothing in {case.new_tokens} tokens, though all thoughts count as similar and no distance is too large."
        )
    if not case.policy.is_bounded:
        return None
    held, dense = case.compressed.stats.peak_kv_bytes, case.compressed.stats.dense_kv_bytes
    if not case.compressed.stats.evicted:
        return f"It dropped nothing in {case.new_tokens} tokens."
    if held >= dense:
        return f"It held {held} bytes at its peak; full caches would hold {dense}."
    return None


def mismatch(ours: Any, theirs: Any, name: str) -> str | None:
    """A message if log-probabilities differ by more than 1e-4 anywhere, or by more than 1e-5 in 1 % of places."""
    difference = np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64))
    if not np.isfinite(difference).all():
        return f"Log-probabilities are not finite, or differ from {name}'s."
    if difference.max() > 1e-4 or np.percentile(difference, 99) > 1e-5:
        return f"Log-probabilities differ from {name}'s by up to {difference.max():.1e}, 1e-4 allowed."
    return None


CHECKS: dict[str, Callable[[Case], str | None]] = {
    check.__name__: check
    for check in (
        is_hashable,
        selects_filled_slots,
        keeps_protected_slots,
        is_pure,
        treats_rows_independently,
        ignores_rounding,
        equals_full_when_nothing_is_due,
        replays,
        is_batch_invariant,
        never_compiles_again,
        frees_memory,
    )
}


def verify(policy: Any) -> Report:
    """Runs the conformance suite on a policy; print the report.

    A check that raises has failed, with the error as its message. Takes seconds at budgets of hundreds; lengths grow with
    budget and interval, so verify a method with small ones.

    Raises:
      TypeError: `policy` is not a `Policy`.

    >>> import jkv
    >>> print(jkv.verify(jkv.streaming_llm(budget=16, interval=8)))  # doctest: +ELLIPSIS
    streaming_llm: 11 checks passed, 0 failed
    ...
    """
    if not isinstance(policy, Policy):
        raise TypeError(
            "verify takes a policy with its budget in slots, such as jkv.r_kv(budget=128) or jkv.evict_by(score, budget=64); "
            f"got {policy!r}."
        )
    case, failures = Case(policy), {}
    for name, check in CHECKS.items():
        try:
            message = check(case)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
        if message:
            failures[name] = message
    return Report(policy.name, failures, tuple(name for name in CHECKS if name not in failures))
