"""What a policy is: a frozen, hashable record of parts, each a set of pure functions.

A method's idea is its score; every other part is a mechanism that many methods share.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkv import notebook
from jkv.cache.moved_sinks import MOST_SINKS
from jkv.cache.pool import num_pages_of
from jkv.checks import did_you_mean, out_of_range, shown
from jkv.errors import InputError, refused
from jkv.eviction.calibration import Calibration
from jkv.eviction.evict import Cutoff, Evict, least_slots
from jkv.eviction.gate import Gate
from jkv.eviction.needs import Needs
from jkv.eviction.schedules import AfterPrompt, EachStep, Every, Read, Schedule, Threshold, ask, check_schedule
from jkv.eviction.scores import layer_of
from jkv.eviction.view import CacheView, FunctionScore, Score, Scored
from jkv.limits import MOST_SIZE
from jkv.model.params import Model, ModelConfig
from jkv.reasoning.sentences import Sentences, ends_of
from jkv.reasoning.sharing import Share, check_tokenizer
from jkv.reasoning.steering import Steer, marks_of
from jkv.reasoning.token_text import token_of

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of a function or an object, in this process alone
Slots: TypeAlias = tuple[int, ...] | tuple[tuple[int, ...], ...]  # of each layer, or of each layer and KV head


@dataclasses.dataclass(frozen=True, repr=False)
class Policy:
    """A method: its name and its parts. A part that is absent is None.

    Attributes:
      name: the method's name.
      evict: which slots stay.
      schedule: when slots are evicted, and how many stay.
      pyramid: the first layer's budget divided by the mean budget; later layers get evenly less. 1 makes all layers equal.
        Protected slots are excluded. The slope begins when a row has seen twice the mean (`budgets`).
      slots: the budget of each layer, `[L]`, or of each layer and KV head, `[L, K]`, in place of one for all; the schedule's is
        their mean, rounded up. `with_budgets` sets both.
      read: which pages a decode step reads; None reads all.
      moves_sinks: whether sinks are read at their place in the cache, right before the slots that are left, instead of at
        their true positions (`jkv.cache.moved_sinks`). The slots that are left must be a window.
      steer: what is added to hidden states (`jkv.reasoning.steering`).
      calibration: what was measured of the model, for a score that reads it (`jkv.eviction.calibration`); for one that reads a
        gate, the gate (`jkv.eviction.gate`).
      sentences: how repeated sentences are found, for a score that reads their similarity (`jkv.reasoning.sentences`).
      until: the text of a token, such as `</think>`, after which a row keeps all tokens; None evicts to the end.
      share: how pages to share are found (`jkv.reasoning.sharing`). If the policy also evicts, sharing stops at a row's first
        compaction.
      source: a digest of the file of a policy of your own that was found by its name, so that a resumed run notices a change.

    Raises:
      ValueError: a budget too small for the protected slots, one part without another that it needs, or parts that exclude
        each other.
    """

    name: str
    evict: Evict | None = None
    schedule: Schedule | Any | None = None  # Any: a wrong type must reach `check_schedule`, which names it
    pyramid: float = 1.0
    slots: Slots | None = None
    read: Read | None = None
    moves_sinks: bool = False
    steer: Steer | None = None
    calibration: Calibration | None = None
    sentences: Sentences | None = None
    share: Share | None = None
    until: str | None = None
    source: str = dataclasses.field(default="", compare=False)
    made_by: str = dataclasses.field(default="", init=False, compare=False)  # the call of a recipe, which `repr` shows

    def __post_init__(self) -> None:
        if (self.evict is None) != (self.schedule is None):
            rule = f"{self.name} needs both evict (which slots stay) and schedule (when, and how many), or neither."
            raise refused(rule, schedule="conflict")
        if not 1 <= self.pyramid < 2:
            raise out_of_range("pyramid", "lie in [1, 2), the first layer's share of the mean budget", self.pyramid)
        if self.read and self.evict:
            rule = f"{self.name} cannot evict and choose pages to read: compaction moves keys between pages."
            raise refused(rule, read="conflict")
        if self.until is not None and (self.evict is None or self.evicts_in_steps):
            raise refused(
                f"{self.name} can keep all tokens after until={self.until!r} only if it evicts between steps. Use the schedule "
                "Every(budget, interval).",
                until="unsupported",
            )
        if self.slots is not None:
            check_slots(self, self.slots)
        if self.share is not None:
            check_sharing(self, self.share)
        if (self.sentences is not None) != (self.evict is not None and self.evict.needs.similarity):
            rule = f"{self.name} needs both sentences and a score that reads their similarity, or neither."
            raise refused(rule, sentences="conflict")
        reads = (False, False) if self.evict is None else (self.evict.needs.gate, self.evict.needs.calibration)
        if reads != (isinstance(self.calibration, Gate), not isinstance(self.calibration, Gate | None)):
            rule = f"{self.name} needs both a calibration (or a gate) and a score that reads it, or neither."
            raise refused(rule, calibration="conflict")
        if self.evict is not None and self.schedule is not None:
            check_schedule(self.name, self.schedule)
            check_eviction(self, self.evict)

    def __repr__(self) -> str:
        return self.made_by or self.definition

    def _repr_html_(self) -> str:
        return notebook.text(repr(self))

    @property
    def definition(self) -> str:
        """Every part with all of its settings: equal for equal policies, whichever call and process made them."""
        fields = [(field, getattr(self, field.name)) for field in dataclasses.fields(self) if field.init]
        parts = ", ".join(f"{field.name}={value!r}" for field, value in fields if value != field.default)
        return f"Policy({ADDRESS.sub('', parts)})"

    @property
    def budget(self) -> int | None:
        """Slots that a compaction leaves in a layer and KV head, on average; None if no number is fixed."""
        return None if self.schedule is None else self.schedule.budget

    @property
    def smallest(self) -> int | None:
        """The smallest budget of any layer and KV head, without the slope of a pyramid; None if no number is fixed."""
        return self.budget if self.slots is None else int(np.min(self.slots))

    @property
    def is_even(self) -> bool:
        """Whether all layers have one budget, and so have their KV heads unless they compete."""
        return self.pyramid == 1 and self.slots is None

    def with_budgets(self, slots: Any) -> "Policy":
        """The policy with a budget of its own for each layer, `[L]`, or for each layer and KV head, `[L, K]`.

        Memory is planned and reserved by their sum: a row's pages are counted in each layer and KV head. A budget that is
        larger than any text keeps a head whole (DuoAttention, arXiv 2410.10819).

        Args:
          slots: whole numbers of slots, as lists, tuples or an array; layers with full attention alone are counted.

        Raises:
          ValueError: other numbers or shapes, a number below what the policy protects, or a policy that has no budget to
            divide. A model of another shape is refused when it meets the policy.

        >>> from jkv.policies import snap_kv
        >>> snap_kv(budget=64).with_budgets([[64, 32], [48, 48]]).budget
        48
        """
        own = whole_numbers(slots)
        if self.schedule is None or self.budget is None:
            rule = f"{self.name} has no budget that layers and heads could divide. Take a policy with budget=."
            raise refused(rule, slots="unsupported")
        schedule: Any = self.schedule
        schedule = dataclasses.replace(schedule, budget=mean_of(own))
        return noted(dataclasses.replace(self, schedule=schedule, slots=own), f"{self!r}.with_budgets", (own,), {})

    @functools.cached_property
    def needs(self) -> Needs:
        """What an engine must keep for the policy: the union of what its parts need."""
        union = Needs(
            mass=self.evicts_in_steps,
            moving_sinks=self.moves_sinks,
            steering=self.steer is not None,
            sharing=self.share is not None,
            aligning=self.share is not None and self.share.align_steps,
        )
        for part in (self.evict, self.read):
            union |= Needs() if part is None else part.needs
        return union

    @property
    def protected(self) -> int:
        """Slots that are never dropped, without the prompt's."""
        return 0 if self.evict is None else self.evict.sinks + self.evict.recent

    @property
    def longest_prompt(self) -> float:
        """The most tokens of a prompt that is never dropped: what the smallest budget of a layer leaves beside recent slots."""
        if self.evict is None or not self.evict.protect_prompt or self.budget is None:
            return math.inf
        if self.slots is not None:
            return int(np.min(self.slots)) - self.evict.recent
        return int(self.budgets(self.budget, 2).min()) - self.evict.recent  # of two layers, as of any number

    @property
    def evicts_in_steps(self) -> bool:
        """Whether the decode step itself evicts (`jkv.cache.in_step_eviction`)."""
        return isinstance(self.schedule, EachStep)

    @property
    def is_planned(self) -> bool:
        """Whether it is known before a compaction how many slots it leaves."""
        return not isinstance(self.schedule, Threshold)

    @property
    def num_moving_sinks(self) -> int:
        """How many sinks are read at their place in the cache."""
        return self.evict.sinks if self.evict is not None and self.moves_sinks else 0

    @property
    def is_bounded(self) -> bool:
        """Whether the cache of a row stops growing."""
        return self.until is None and self.schedule is not None and self.schedule.is_bounded

    def target(self, prompt: int, generated: int) -> int | None:
        """Slots that a row keeps after its `generated`-th token, if it has more; None if no compaction is due."""
        return None if self.schedule is None else ask(self.name, self.schedule, "target", prompt, generated)

    def steps_until_due(self, generated: int) -> int | None:
        """Steps from the `generated`-th new token to the next one at which a part has to act; None if none has to."""
        due = [part.steps_until_due(generated) for part in (self.steer, self.share) if part is not None]
        if self.schedule is not None:
            due.append(ask(self.name, self.schedule, "steps_until_due", generated))
        return min((steps for steps in due if steps is not None), default=None)

    def budgets(self, target: int, num_layers: int, seen: int | float = math.inf) -> np.ndarray:
        """Slots of each layer, `num_layers * target` in total, of a row that has seen so many tokens: [L]; or its own
        `slots`, [L] or [L, K].

        With a pyramid, all layers are equal until a row has seen twice the mean without the protected slots, and the first
        never has more than there are; the last then has as many more. A policy that evicts in steps has its slope at once.
        """
        if self.slots is not None:
            return np.array(self.slots)
        mean = target - self.protected
        if num_layers == 1 or self.pyramid == 1 or (seen < 2 * mean and not self.evicts_in_steps):
            return np.full(num_layers, target)
        first = self.pyramid * mean if self.evicts_in_steps else min(self.pyramid * mean, seen - self.protected)
        slope = np.linspace(first, 2 * mean - first, num_layers)
        return self.protected + np.diff(np.rint(np.cumsum(slope)).astype(int), prepend=0)

    def uncut(self, num_slots: int, num_layers: int) -> np.ndarray:
        """Slots of a row that has so many in every layer and KV head: [L], or [L, K] if its heads have budgets of their own."""
        return np.full(num_layers if self.slots is None else np.shape(self.slots), num_slots)

    def most_slots(self, prompt: int, new: int, num_layers: int) -> np.ndarray:
        """The most slots of each layer, on average over its heads, after prefill and its compaction: [L].

        [L, K] if its heads have budgets of their own.
        """
        budgets = self.layer_budgets(num_layers)
        return self._most(budgets if self.slots else np.maximum(budgets, self.budget or 0), prompt, new)

    def most_pages(self, prompt: int, new: int, num_layers: int, num_kv_heads: int, page_size: int, num_shards: int = 1) -> int:
        """The most pages that a row holds after prefill and its compaction."""
        if self.pyramid == 1:
            return self.num_pages(self.most_slots(prompt, new, num_layers), num_kv_heads, page_size, num_shards)
        # No slope has more slots in all than equal layers have, and each layer may begin one page more.
        equal = self._most(np.full(num_layers, self.budget or 0), prompt, new)
        if self.evict is not None and self.evict.scope == "compete":  # one shard may win all
            heads = num_kv_heads // num_shards
            return num_shards * int((num_kv_heads * equal + heads * (page_size - 1)).sum() // page_size)
        return num_kv_heads * int((equal + page_size - 1).sum() // page_size)

    def most_growth(self, steps: int, page_size: int) -> int:
        """The most slots that `steps` decode steps add, wherever in a page the row stands."""
        return steps if self.share is None else self.share.align_steps * page_size + self.share.most_slots(steps)

    def widest(self, prompt: int, new: int, num_layers: int, num_kv_heads: int) -> int:
        """The most slots of any layer and KV head."""
        budgets = self.layer_budgets(num_layers)
        if self.evict is not None and self.evict.scope == "compete":
            budgets = num_kv_heads * budgets - (num_kv_heads - 1) * least_slots(budgets, self.evict.floor)
        return max(prompt, int(self._most(budgets, prompt, new).max()))

    def layer_budgets(self, num_layers: int) -> np.ndarray:
        """Slots that the fixed budget leaves in each layer, [L], or in each KV head, [L, K]; 0 if there is no fixed budget."""
        return np.zeros(num_layers, int) if self.budget is None else self.budgets(self.budget, num_layers)

    def _most(self, budgets: np.ndarray, prompt: int, new: int) -> np.ndarray:
        if self.schedule is None:
            return np.full(len(budgets), prompt + new if self.share is None else self.share.most_slots(prompt + new))
        if self.until is not None:
            return np.full(budgets.shape, prompt + new)
        if self.budget is None:
            return np.full(len(budgets), self.schedule.most_slots(prompt, new))
        schedule: Any = self.schedule
        most = [dataclasses.replace(schedule, budget=int(b)).most_slots(prompt, new) for b in budgets.flat]
        return np.array(most).reshape(budgets.shape)

    def num_pages(self, slots: np.ndarray, num_kv_heads: int, page_size: int, num_shards: int = 1) -> int:
        """The most pages of a row whose layers hold `slots`: [L] in a KV head, on average over the heads, or [L, K].

        Each shard of a mesh takes as many pages as the fullest shard. Where heads compete, the heads of one shard may win all
        slots except the floor of the other heads.
        """
        if slots.ndim == 2:
            of_heads = num_pages_of(slots, page_size).sum(axis=0).reshape(num_shards, -1)
            return num_shards * int(of_heads.sum(axis=1).max())
        if self.evict is not None and self.evict.scope == "compete":  # any head's last page may hold a single slot
            heads = num_kv_heads // num_shards
            slots = num_kv_heads * slots - (num_kv_heads - heads) * least_slots(slots, self.evict.floor)
            return num_shards * int(((slots + heads * (page_size - 1)) // page_size).sum())
        return int(num_kv_heads * num_pages_of(slots, page_size).sum())

    def num_full_pages(self, slots: np.ndarray, num_kv_heads: int, page_size: int) -> int:
        """The fewest full pages of such a row."""
        if slots.ndim == 2:
            return int((slots // page_size).sum())
        if self.evict is not None and self.evict.scope == "compete":
            return int(np.maximum(0, num_kv_heads * (slots - page_size + 1) // page_size).sum())
        return int(num_kv_heads * (slots // page_size).sum())

    def select(self, view: CacheView) -> Int[Array, "B K S"]:
        """The slots of one layer that would stay, padded with EMPTY; pure, works under jit and vmap.

        `view.budget` defaults to the policy's own. Scope "all" sums over one layer, the view's.

        Raises:
          ValueError: a policy that evicts nothing, or a view without what the score needs.
        """
        if self.evict is None:
            raise refused(f"{self.name} evicts nothing, so there is nothing to select.", policy="unsupported")
        needs = self.evict.needs
        if needs.window and (view.query is None or view.query.shape[2] < needs.window):
            got = "none" if view.query is None else str(view.query.shape[2])
            rule = f"{self.name} reads the last {needs.window} queries; the view has {got}. Pass CacheView(query=)."
            raise refused(rule, view="missing")
        for field, is_read, words in (
            ("mass", needs.mass, "the accumulated attention mass"),
            ("similarity", needs.similarity, "the similarity of sentences"),
            ("carried", needs.carried, "what its last compaction carried on, by name (zeros if there was none)"),
            ("rope", needs.rope, "the rotary embedding"),
            ("projected_norm", needs.projected, "the norms of projected values"),
            ("gate", needs.gate, "what its gate computed of each slot"),
        ):
            if is_read and getattr(view, field) is None:
                raise refused(f"{self.name} reads {words}; the view has none. Pass CacheView({field}=).", view="missing")
        if missing := set(needs.carried) - set(view.carried or ()):
            rule = f"{self.name} carries {', '.join(needs.carried)}; the view's carried= has no {', '.join(sorted(missing))}."
            raise refused(rule, view="missing")
        if needs.calibration and self.calibration and not isinstance(view.calibration, self.calibration.kind):
            moments = jax.tree.map(lambda x: jnp.asarray(x)[layer_of(view)], self.calibration.arrays)
            view = view._replace(calibration=moments)
        if view.budget is None:
            if self.budget is None and self.is_planned:
                rule = f"{self.name}'s budget grows with the sequence. Pass it in the view: CacheView(budget=)."
                raise refused(rule, view="missing")
            view = view._replace(budget=self._budget_of(view))
        assert view.budget is not None
        return self.evict.choose(self.rate(view)[None], view.budget[None])[0]

    def _budget_of(self, view: CacheView) -> Int[Array, "B K"]:
        """The policy's own budget of each KV head in the layer of a view."""
        shape = view.position.shape[:2]
        if self.slots is None:
            return jnp.full(shape, view.position.shape[-1] if self.budget is None else self.budget, jnp.int32)
        if view.layer is None:
            rule = f"{self.name} has budgets by layer; the view names none. Pass CacheView(layer=) or CacheView(budget=)."
            raise refused(rule, view="missing")
        own = jnp.asarray(self.slots, jnp.int32).reshape(len(self.slots), -1)
        return jnp.broadcast_to(own[layer_of(view)], shape)

    def rate(self, view: CacheView) -> Float[Array, "B K S"]:
        """The scores that `select` ranks: `+inf` for protected slots, `-inf` for empty ones and those below a `Threshold`."""
        assert self.evict is not None
        score, cutoff = self.evict.rate(view), cutoff_of(self)
        if cutoff is None:
            return score
        return Cutoff(*(jnp.tile(x, len(score)) for x in cutoff))(score, view.age)


def cutoff_of(policy: Policy) -> Cutoff | None:
    """The cutoff of one row, on the host, if the schedule is a `Threshold`."""
    if not isinstance(policy.schedule, Threshold):
        return None
    arrays: Any = np.full(1, policy.schedule.threshold, np.float32), np.full(1, policy.schedule.window, np.int32)
    return Cutoff(*arrays)


def noted(policy: Policy, function: str, args: Sequence[Any], settings: Mapping[str, Any]) -> Policy:
    """The policy, which shows the call that made it."""
    arguments = [*(getattr(arg, "__name__", repr(arg)) for arg in args), *(f"{k}={v!r}" for k, v in settings.items())]
    return shown_as(policy, f"{function}({', '.join(arguments)})")


def shown_as(policy: Policy, text: str) -> Policy:
    """The policy, which shows this Python expression."""
    object.__setattr__(policy, "made_by", text)
    return policy


def evict_by(
    score: Score | Callable[[CacheView], Scored],
    budget: Any,
    interval: int = 128,
    name: str = "",
    needs: Needs | None = None,
    **settings: Any,
) -> Policy:
    """A policy of your own in one line: keeps the `budget` slots with the best scores, every `interval` generated tokens.

    `score` is a plain function of a `CacheView` that returns float32 `[B, K, S]`, or a frozen dataclass
    (`jkv.eviction.view.Score`). A function that reads more than keys, values, positions, the prompt's length and the budget
    says so in `needs`: `evict_by(score, budget=48, needs=jkv.Needs(window=8))` for one that reads the last 8 queries. A
    dataclass declares its own. A `budget` may be a number of each layer, or of each layer and KV head
    (`Policy.with_budgets`). `settings` are fields of `Evict` (sinks, recent, scope, ...). `name` defaults to the score's.

    Raises:
      ValueError: a setting out of its range, or a dataclass that declares no needs.

    >>> evict_by(lambda view: -view.position.astype("float32"), budget=64, name="oldest").budget
    64
    """
    if not isinstance(needs, Needs | None):
        rule = f"needs must be a jkv.Needs, such as jkv.Needs(window=8) for the last 8 queries; got {shown(needs)}."
        raise refused(rule, needs="wrong_type")
    known = [field.name for field in dataclasses.fields(Evict) if field.name != "score"]
    for setting in settings:
        if setting not in known:
            hint = " A score that reads queries says so in needs=jkv.Needs(window=8)." if setting == "window" else ""
            hint = hint or did_you_mean(setting, [*known, "interval", "budget", "needs"])
            raise TypeError(f"{setting!r} is no setting of evict_by.{hint} The settings are: {', '.join(known)}.")
    call = {"budget": budget, "interval": interval} | ({"name": name} if name else {}) | ({"needs": needs} if needs else {})
    author, name = score, name or getattr(score, "__name__", type(score).__name__)
    if dataclasses.is_dataclass(score):
        if needs is not None:
            rule = f"{name} is a dataclass and declares its needs itself; got {needs=}. Leave needs= out."
            raise refused(rule, needs="conflict")
    elif callable(score):
        score = FunctionScore(score, needs or Needs())
    evict: Any = Evict(score, **settings)  # which refuses what is no score
    if np.ndim(budget) == 0:
        policy = Policy(name, evict, Every(budget, interval))
    else:
        call["budget"] = own = whole_numbers(budget)
        policy = Policy(name, evict, Every(mean_of(own), interval), slots=own)
    return noted(policy, "evict_by", (author,), call | settings)


def whole_numbers(slots: Any) -> Slots:
    """Budgets as a policy has them.

    Raises:
      ValueError: no whole numbers from 1 to below 2**31, or neither `[L]` nor `[L, K]`.
    """
    try:
        numbers = np.asarray(slots)
    except ValueError:  # lists of several lengths
        numbers = np.zeros(0)
    if numbers.ndim not in (1, 2) or not numbers.size or numbers.dtype.kind not in "iu":
        raise refused(
            "Budgets of layers are whole numbers of slots, [L], or [L, K] with one for each KV head of every layer; got "
            f"{shown(slots)}.",
            budget="wrong_type",
        )
    if not ((numbers >= 1) & (numbers < MOST_SIZE)).all():
        rule = f"Each budget of a layer or KV head must be at least 1 slot, and below 2**31; got {shown(slots)}."
        raise refused(rule, budget="out_of_range")
    return tuple(numbers.tolist()) if numbers.ndim == 1 else tuple(map(tuple, numbers.tolist()))


def mean_of(slots: Slots) -> int:
    """The mean budget, rounded up."""
    numbers = np.array(slots)
    return -int(-numbers.sum() // numbers.size)


def check_slots(policy: Policy, slots: Slots) -> None:
    """Refuses budgets by layer or KV head of a policy that cannot keep to them."""
    name, evict, schedule = policy.name, policy.evict, policy.schedule
    if slots != whole_numbers(slots):
        raise refused(f"{name}'s slots must be tuples, which can be hashed; got {slots!r}.", slots="wrong_type")
    of_heads = isinstance(slots[0], tuple)
    if evict is None or type(schedule) not in (Every, AfterPrompt) or policy.pyramid != 1:
        raise refused(
            f"{name} cannot have budgets by layer: they need evict, a schedule Every or AfterPrompt, and pyramid=1.",
            slots="unsupported",
        )
    if evict.scope == "all" or (of_heads and evict.scope != "head"):
        raise refused(
            f"{name} has budgets by {'KV head' if of_heads else 'layer'}, which scope {evict.scope!r} makes equal. Use scope "
            "'head'.",
            scope="conflict",
        )
    if policy.budget != mean_of(slots):
        rule = f"{name}'s schedule must have the mean of its slots as budget, {mean_of(slots)}; got {policy.budget}."
        raise refused(rule + " Use Policy.with_budgets.", slots="conflict")


def check_shape(policy: Policy, config: ModelConfig) -> None:
    """Refuses budgets by layer or KV head of another model.

    Raises:
      ValueError: another number of layers with full attention, or of KV heads.
    """
    if policy.slots is None:
        return
    got, own = np.shape(policy.slots), (config.num_paged_layers, config.num_kv_heads)
    if got != own[: len(got)]:
        rule = "{name}'s {field} must have this model's shape, [L, K] = {own} or [L]; got {got}. Give one for each."
        raise InputError(rule, field="budget", code="unsupported", name=policy.name, own=list(own), got=list(got))


def compacted(policy: Policy, filled: np.ndarray, prompt: int, generated: int) -> np.ndarray:
    """Slots of each layer, on average over its heads, after the compaction that is due now, if any: [L], or [L, K] as `filled`.

    With a `Threshold`, they are the most that may stay: all.
    """
    target = policy.target(prompt, generated) if policy.is_planned else None
    return filled if target is None else np.minimum(filled, policy.budgets(target, len(filled), prompt + generated))


def check_parts(policy: Policy, model: Model, is_trained: bool = False) -> None:
    """Refuses a policy with a part that cannot work with the model.

    Statistics of queries stay in use while the model is trained (`is_trained`), although its weights are no longer those that
    were calibrated.

    Raises:
      ValueError: a window longer than any sequence, a steering vector or a calibration of another model, or a tokenizer that is
        missing or that cannot write what a part looks for.
    """
    if policy.needs.window > model.config.max_positions:
        rule = "{name}'s {field} must not exceed the model's {most} positions, as each's query is kept; got {got}. Lower it."
        most = model.config.max_positions
        raise InputError(rule, field="window", code="out_of_range", name=policy.name, most=most, got=policy.needs.window)
    check_shape(policy, model.config)
    if policy.steer is not None:
        config, got = model.config, policy.steer.vector.values.shape
        if got != (config.num_layers, config.width):
            rule = "{name}'s {field} must be of this model, {own}; it has {got}. Extract one with `jkv steer`."
            own, shape = f"{config.num_layers} layers of width {config.width}", f"{got[0]} of {got[1]}"
            raise InputError(rule, field="vector", code="unsupported", name=policy.name, own=own, got=shape)
        marks_of(model.tokenizer, config.vocab_size)
    if policy.calibration is not None:
        policy.calibration.check(policy.name, model, is_trained)
    if policy.sentences is not None:
        ends_of(model.tokenizer, model.config.vocab_size, policy.sentences.ends)
    if policy.share is not None:
        check_tokenizer(model, policy.name)
    until_token(policy, model)


def until_token(policy: Policy, model: Model) -> int | None:
    """The token after which a policy evicts no more, if there is one.

    Raises:
      ValueError: the model has no tokenizer, or the text is not one of its tokens.
    """
    if policy.until is None:
        return None
    token = -1 if model.tokenizer is None else token_of(model.tokenizer, policy.until)
    if token < 0:
        rule = "{name}'s {field} must be one token of the model's tokenizer; {got} is not."
        raise InputError(rule, field="until", name=policy.name, got=shown(policy.until))
    return token


def check_eviction(policy: Policy, evict: Evict) -> None:
    """Refuses an eviction whose parts exclude each other, or whose budget is too small."""
    name = policy.name
    if policy.sentences is not None and evict.order != "position":
        raise refused(f"{name} finds sentences among slots stored by position; got order={evict.order!r}.", order="unsupported")
    if policy.moves_sinks and not can_move_sinks(policy, evict):
        raise refused(
            f"{name} can move 1 to {MOST_SINKS} sinks up to a window without gaps, with the same budget in every layer and "
            f"head, an open prompt, compacted between steps and stored by position; got {policy}.",
            moves_sinks="unsupported",
        )
    if policy.evicts_in_steps and (not evict.needs.in_step or evict.scope not in ("head", "layer")):
        raise refused(
            f"{name} cannot evict inside a decode step, which knows the attention mass of slots only, by KV head or layer; "
            f"got {evict.score} and scope {evict.scope!r}. Use the schedule Every(budget, interval=1).",
            score="unsupported",
        )
    if policy.budget is None:
        if not policy.is_even or evict.scope == "compete":
            message = f"{name} has no fixed budget, so layers or heads cannot divide it; got {policy.schedule}."
            raise refused(message, schedule="unsupported")
        if not policy.is_planned and evict.scope != "head":
            message = f"{name} compares each KV head's scores with a threshold; got scope {evict.scope!r}. Use 'head'."
            raise refused(message, scope="unsupported")
        if policy.is_planned and not evict.protect_prompt:
            message = f"{name}'s schedule counts the prompt as kept: set protect_prompt=True in evict."
            raise refused(message, protect_prompt="unsupported")
        return
    if policy.pyramid > 1 and not policy.protected:
        message = f"{name} leaves its last layers next to nothing: pyramid > 1 needs sinks or recent slots."
        raise refused(message, pyramid="unsupported")
    if (smallest := policy.smallest) is not None and smallest < policy.protected:
        rule = "{name}'s {field} must hold its sinks and recent slots, {least}; got {field}={got}. Raise it, or lower them."
        least = f"{evict.sinks} + {evict.recent} = {policy.protected}"
        raise InputError(rule, field="budget", code="out_of_range", name=name, least=least, got=smallest)


def can_move_sinks(policy: Policy, evict: Evict) -> bool:
    """Whether the slots that are left after the sinks are a window, the same in every layer and head."""
    return (
        0 < evict.sinks <= MOST_SINKS
        and evict.needs.keeps_window
        and (evict.scope, evict.order, policy.is_even) == ("head", "position", True)
        and isinstance(policy.schedule, Every)
        and not evict.protect_prompt
    )


def check_sharing(policy: Policy, share: Share) -> None:
    """Refuses parts that exclude sharing."""
    name = policy.name
    if policy.needs.mass:
        raise refused(
            f"{name} cannot share pages: it evicts inside decode steps or reads the accumulated attention mass, and both need "
            "pages that a row has to itself. Share with a policy that compacts between steps by another score, such as r_kv.",
            share="unsupported",
        )
    if policy.read is not None or policy.moves_sinks:
        raise refused(
            f"{name} cannot share pages and choose pages to read (quest) or move its sinks: both need pages in the order of "
            "the text.",
            share="unsupported",
        )
    if share.align_steps and policy.evict is not None:
        rule = f"{name} cannot both evict and start thoughts on pages of their own: leave align_steps out."
        raise refused(rule, share="unsupported")
