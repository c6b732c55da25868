"""What every policy must do, whatever its idea; a new line in the table of policies is enough to be tested here."""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache.pool import EMPTY
from jkv.engine.device_program import most_mappings, num_mappings
from jkv.engine.runner import Runner
from jkv.policies import POLICIES
from jkv.testing import random_view, tiny_model
from jkv.verify import CHECKS, Case, is_hashable, keeps_protected_slots, selects_filled_slots
from tests.support import policies

build = functools.partial(policies.build, model=tiny_model())
EVICTING = [name for name in POLICIES if build(name).evict]

OF_BITS = ("is_pure", "treats_rows_independently", "equals_full_when_nothing_is_due", "replays", "is_batch_invariant")
ROUNDING = {True: [pytest.mark.rounding], False: []}
RUNS = ("is_pure", "equals_full_when_nothing_is_due", "replays", "is_batch_invariant", "never_compiles_again")  # take long
OFTEN = ("full", "r_kv", "h2o")  # for which these run every day; for the others with `-m slow`


@pytest.fixture(scope="module", params=list(POLICIES))
def case(request):
    """Each policy, with the runs that its checks share."""
    yield Case(build(request.param))
    if num_mappings() > most_mappings() // 8:  # before an engine lets programs go in the midst of a check that counts them
        jax.clear_caches()


@pytest.mark.everyday
@pytest.mark.everyday(where=lambda case, check: case in OFTEN or check.__name__ not in RUNS)
@pytest.mark.parametrize("check", [pytest.param(one, id=name, marks=ROUNDING[name in OF_BITS]) for name, one in CHECKS.items()])
def test_promise_is_kept(case, check):
    assert check(case) is None


@pytest.mark.parametrize(
    ("group", "dtype"),
    [
        pytest.param(1, jnp.float32, id="group1-float32"),
        pytest.param(4, jnp.bfloat16, id="group4-bfloat16"),
        pytest.param(1, jnp.bfloat16, id="group1-bfloat16", marks=pytest.mark.slow),
        pytest.param(4, jnp.float32, id="group4-float32", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", EVICTING)
def test_select_keeps_the_budget_and_what_is_protected_in_order(name, group, dtype):
    case = Case(build(name), group, dtype)
    assert selects_filled_slots(case) is None
    assert keeps_protected_slots(case) is None
    slots, position = np.asarray(case.select(case.view(1))), np.asarray(case.view(1).position)
    for b, k in np.ndindex(slots.shape[:2]):
        assert (np.diff(position[b, k, slots[b, k][slots[b, k] != EMPTY]]) > 0).all()


def simulate(policy, prompt, steps, num_layers=2):
    """When a row of `prompt` tokens is compacted in `steps` steps, and how much each layer drops; the last step ends it."""
    filled, when = np.full(num_layers, prompt), set()
    dropped = np.zeros(num_layers, int)
    for generated in range(steps):
        target = policy.target(prompt, generated)
        kept = filled if target is None else np.minimum(filled, policy.budgets(target, num_layers, prompt + generated))
        if (kept < filled).any():
            when.add(prompt + generated)
        dropped += filled - kept
        filled = kept + 1
    return when, dropped


def test_a_plain_schedule_is_what_it_says():
    """Prompt of 3: due after 32 steps (35 slots), then every 16. Prompt of 33: after prefill as well."""
    assert simulate(build("streaming_llm"), 3, 96)[0] == {3 + 16 * i for i in range(2, 6)}
    assert simulate(build("streaming_llm"), 33, 96)[0] == {33 + 16 * i for i in range(6)}
    assert simulate(build("streaming_llm"), 33, 96)[1].tolist() == [33 + 80 - 24] * 2


@pytest.mark.rounding
def test_compaction_happens_when_due_and_the_trace_tells_what_it_dropped(case):
    policy, out, prompts = case.policy, case.compressed, case.prompts
    expected = [simulate(policy, len(prompt), case.new_tokens) for prompt in prompts]
    assert out.stats.compactions == sum(len(when) for when, _ in expected)
    assert out.stats.evicted == sum(dropped.mean() for _, dropped in expected)
    if policy.read or policy.share:  # columns end where a page is not read for a while, or another stands for it
        return
    end = out.trace.end  # [n, L, K, columns]
    ended = end < 2**31 - 1
    real = np.arange(end.shape[-1]) < np.array([len(prompt) + case.new_tokens for prompt in prompts])[:, None, None, None]
    for row, (when, dropped) in enumerate(expected):
        by_head = (ended & real)[row].sum(axis=-1)
        if policy.evict and policy.evict.scope == "compete":
            np.testing.assert_array_equal(by_head.mean(axis=-1), dropped)
        else:
            np.testing.assert_array_equal(by_head, np.broadcast_to(dropped[:, None], by_head.shape))
        assert set(end[row][(ended & real)[row]].tolist()) <= when


def assert_counts(policy, view, slots):
    """Every head keeps its budget, or what it has; heads that compete keep it together, each at least the floor."""
    count = (np.asarray(slots) != EMPTY).sum(axis=-1)
    filled = np.asarray(view.is_filled).sum(axis=-1)
    if policy.evict.scope == "compete":
        budget = np.asarray(view.budget)
        np.testing.assert_array_equal(count.sum(axis=-1), np.minimum(budget.sum(axis=-1), filled.sum(axis=-1)))
        assert (count >= np.minimum(filled, np.floor(budget * policy.evict.floor))).all()
    else:
        np.testing.assert_array_equal(count, np.minimum(view.budget, filled))


@pytest.mark.parametrize("name", EVICTING)
def test_a_views_budget_overrides_the_policys(name):
    policy = build(name)
    view = random_view(np.random.default_rng(3), carried_names=policy.needs.carried)
    budget = jnp.asarray([[9, 24], [12, 30]], jnp.int32)
    view = view._replace(budget=budget)
    select = jax.jit(policy.select)
    assert_counts(policy, view, select(view))
    if policy.budget is not None:
        view = view._replace(budget=None)
        assert_counts(policy, view._replace(budget=jnp.full((2, 2), policy.budget)), select(view))


@pytest.mark.parametrize("name", EVICTING)
def test_sets_shared_by_scope_are_the_same_for_every_head(name):
    policy = build(name)
    policy = dataclasses.replace(policy, evict=dataclasses.replace(policy.evict, scope="layer"))
    view = random_view(np.random.default_rng(4), budget=24, carried_names=policy.needs.carried)
    view = view._replace(position=jnp.broadcast_to(view.position[:, :1], view.position.shape))
    slots = np.asarray(jax.jit(policy.select)(view))
    np.testing.assert_array_equal(slots[:, 0], slots[:, 1])


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_policy_is_hashable_and_prints_its_settings(name):
    assert hash(build(name)) == hash(build(name))
    assert name in repr(build(name))


@dataclasses.dataclass(frozen=True)
class Planted:
    """A score with one thing wrong."""

    wrong: str
    needs = jkv.Needs()

    def __call__(self, view):
        score = -view.position.astype(jnp.float32)
        if self.wrong == "mixes rows":
            return score * jnp.where(view.key[0, 0, 0, 0] > 0, 1, -1)
        if self.wrong == "nan":
            return jnp.where(view.position % 3 == 0, jnp.nan, score)
        if self.wrong == "hidden state":
            HIDDEN.append(len(HIDDEN))
            return score * (-1) ** len(HIDDEN)
        return score

    def __hash__(self):
        return id(self) if self.wrong == "hash" else hash(self.wrong)


HIDDEN = []


def unprotected(self, view):
    return jnp.zeros(view.position.shape, bool)


@pytest.mark.parametrize(
    ("wrong", "check", "words"),
    [
        ("mixes rows", "treats_rows_independently", "the score mixes rows"),
        ("nan", "selects_filled_slots", "NaN"),
        ("hidden state", "is_pure", "besides the view"),
        ("hash", "is_hashable", "hash by value"),
        ("nothing", None, None),
    ],
)
def test_verify_says_in_words_what_is_wrong(wrong, check, words, monkeypatch):
    if check:  # the others have nothing to say of it; the whole suite runs on what is right
        monkeypatch.setattr(importlib.import_module("jkv.verify"), "CHECKS", {check: CHECKS[check]})
    report = jkv.verify(jkv.evict_by(Planted(wrong), budget=24, interval=16, name="planted"))
    assert report.is_ok == (check is None)
    if check:
        assert words in report.failures[check]
        assert "FAILED" in str(report)
        assert words in str(report)
    else:
        assert str(report).startswith(f"planted: {len(CHECKS)} checks passed, 0 failed")


def test_verify_notices_a_protected_token_dropped_and_a_score_without_a_hash(monkeypatch):
    case = Case(jkv.streaming_llm(budget=24, sinks=4))
    view, rate = case.view(2), jkv.Evict.rate
    monkeypatch.setattr(jkv.Evict, "rate", lambda self, view: jnp.where(view.position < 4, -9.0, rate(self, view)))
    monkeypatch.setattr(Case, "view", lambda self, seed: view)
    assert "drops the protected positions" in (keeps_protected_slots(case) or "")
    assert "frozen dataclass" in (is_hashable(Case(jkv.evict_by(Unhashable(), budget=24))) or "")


class Unhashable:
    """A score that compares by value and forgot its hash."""

    __hash__ = None

    def __call__(self, view):
        return -view.position.astype(jnp.float32)


def norm_of_keys(view):
    """Scores so near to each other that rounding decides which of two slots stays."""
    return jnp.linalg.norm(view.key, axis=-1)


@pytest.mark.rounding
def test_the_readmes_policy_of_nearly_tied_scores_keeps_every_promise():
    report = jkv.verify(jkv.evict_by(norm_of_keys, budget=48, interval=16, sinks=4, recent=8))
    assert report.is_ok, str(report)


def difference_from_the_mean(view):
    """Rounding errors, where all values are equal."""
    return jnp.linalg.norm(view.value - view.value.mean(axis=2, where=view.is_filled[..., None], keepdims=True), axis=-1)


def test_verify_notices_that_rounding_ranks_equal_slots():
    check, settings = CHECKS["ignores_rounding"], {"budget": 24, "interval": 16, "sinks": 4, "recent": 8}
    assert check(Case(jkv.evict_by(norm_of_keys, **settings))) is None
    message = check(Case(jkv.evict_by(difference_from_the_mean, **settings))) or ""
    assert "keeps other slots of a text that repeats 1 tokens if its inputs are rounded otherwise" in message


def compact_together(self, due):
    """Planted: due rows compacted by one program, whose shape is the number of rows; padded with rows that keep everything."""
    size = next(size for size in (1, 4, 16) if size >= len(due))
    padding = [row for row in range(self.capacity.max_running) if row not in due][: size - len(due)]
    if not due:
        return
    samples, zeros = list(due.values()), np.zeros(len(padding), np.int32)
    budget = np.stack([*(sample.compacted for sample in samples), *[np.full(2, 1 << 20)] * len(padding)], axis=1)
    evict = samples[0].request.policy.evict
    self.state, dropped, *_ = self.programs.compact(
        self.state,
        np.asarray([*due, *padding], np.int32),
        np.repeat(budget.astype(np.int32)[..., None], self.capacity.num_kv_heads, axis=-1),
        np.asarray([*(len(sample.request.prompt) for sample in samples), *zeros], np.int32),
        np.tile(np.asarray([[evict.sinks], [evict.recent]], np.int32), len(due) + len(padding)),
        evict=evict.static,
        is_traced=self.is_traced,
    )
    for j, sample in enumerate(samples):
        sample.compact(np.asarray(dropped)[:, j])


def rounded_by_shape(view):
    """Norms of keys rounded in another way for another number of rows: as XLA may do, but coarsely, so that ties are many."""
    digits = view.key.shape[0]
    return jnp.round(norm_of_keys(view) * digits) / digits


@pytest.mark.rounding
def test_verify_notices_rounding_that_differs_with_the_number_of_rows_that_are_due(monkeypatch):
    policy = jkv.evict_by(rounded_by_shape, budget=48, interval=16, sinks=4, recent=8)
    check = CHECKS["is_batch_invariant"]
    assert check(Case(policy)) is None
    monkeypatch.setattr(Runner, "compact", compact_together)
    assert "by itself than in a batch" in (check(Case(policy)) or "")


def test_verify_takes_policies_alone():
    with pytest.raises(TypeError, match="verify takes a policy"):
        jkv.verify("r_kv")


def other(out, **fields):
    """A result with some fields changed."""
    return dataclasses.replace(out, **fields)


def ended_early(trace):
    """Every eviction one query too soon."""
    return trace.replace(end=trace.end - (trace.end < 2**31 - 1))


@pytest.fixture(scope="module")
def window_case():
    return Case(jkv.streaming_llm(budget=24, interval=16))


@pytest.mark.parametrize(
    ("check", "plant", "words"),
    [
        (
            "replays",
            lambda out: other(out, trace=out.trace.replace(end=out.trace.end - (out.trace.end < 2**31 - 1))),
            "differ",
        ),
        ("frees_memory", lambda out: other(out, stats=dataclasses.replace(out.stats, evicted=0.0)), "dropped nothing"),
        ("frees_memory", lambda out: other(out, stats=dataclasses.replace(out.stats, peak_kv_bytes=1 << 40)), "It held"),
        (
            "is_batch_invariant",
            lambda out: other(out, tokens=out.tokens[:, ::-1]),
            "other tokens, from token 0 on, by",
        ),
        ("is_batch_invariant", lambda out: other(out, logprobs=out.logprobs - 1e-6), "other log-probabilities, from"),
    ],
)
def test_verify_notices_what_a_run_does_wrong(check, plant, words, window_case):
    assert CHECKS[check](window_case) is None
    planted = Case(window_case.policy)
    planted.compressed = plant(window_case.compressed)
    assert words in CHECKS[check](planted)


def test_verify_notices_drops_below_the_budget_and_programs_compiled_for_a_copy(window_case, monkeypatch):
    planted = Case(window_case.policy)
    run = planted.run
    monkeypatch.setattr(planted, "run", lambda policy=None, *args, **options: run(None, *args, **options))
    assert "though its budget holds them all" in CHECKS["equals_full_when_nothing_is_due"](planted)
    assert "programs compiled" in CHECKS["never_compiles_again"](Case(jkv.evict_by(Planted("hash"), budget=24, interval=16)))
