"""Steps of several tokens draw the tokens of plain decoding, whatever was guessed, and to the bit among themselves."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.engine.drafters import Proposal
from jkv.model import row_invariance
from jkv.testing import TINY, TinyTokenizer, find_copies, random_gate, tiny_model
from tests.support import gemma, learned_sinks
from tests.support.recurrent import recurrent_model

PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9, 1, 2], [3] * 11]
SIZES = {"max_running": 3, "max_slots": 96, "page_size": 4, "poison": True}
TOKENS = 40


@dataclasses.dataclass(frozen=True)
class Guess:
    """Proposes the true tokens of some texts, made wrong from a place on; `right` counts those that stay.

    Where it is None, their number, and how many are proposed, changes from token to token.
    """

    texts: tuple[tuple[int, ...], ...]
    right: int | None
    drafts: int = 3
    history: int = 64

    def propose(self, history, prompt):
        place, own = jnp.arange(self.history), (history >= 0).sum(axis=1, dtype=jnp.int32)
        ordered = jnp.take_along_axis(history, (place - own[:, None]) % self.history, axis=1)  # the first token first
        token, count = jnp.zeros((len(history), self.drafts), jnp.int32), jnp.zeros(len(history), jnp.int32)
        for text in self.texts:
            padded = jnp.asarray([*text, *[0] * (self.history + self.drafts - len(text))], jnp.int32)
            is_text = ((ordered == padded[: self.history]) | (place >= own[:, None])).all(axis=1) & (own < len(text))
            ahead = padded[own[:, None] + jnp.arange(self.drafts)]
            right = own % (self.drafts + 1) if self.right is None else jnp.full_like(own, self.right)
            proposed = jnp.where(own % 5 == 0, own % self.drafts, self.drafts) if self.right is None else self.drafts
            ahead = jnp.where(jnp.arange(self.drafts) < right[:, None], ahead, (ahead + 1) % 30)
            token, count = jnp.where(is_text[:, None], ahead, token), jnp.where(is_text, proposed, count)
        return Proposal(token, count)


def run(model, drafter, policies, *, prompts=PROMPTS, temperature=1.0, limits=None, stop_ids=(), **settings):
    """The results of a request for each prompt, and the engine."""
    policies = [policies] * len(prompts) if isinstance(policies, jkv.Policy) else policies
    engine = jkv.Engine(model, speculate=drafter, policies=policies, **SIZES | settings)
    limits = limits or [TOKENS] * len(prompts)
    tickets = [
        engine.submit(
            prompt,
            policy,
            jkv.Sampling(temperature=temperature, seed=1),
            limit,
            stop_ids=stop_ids,
            model_logprobs=True,
        )
        for prompt, policy, limit in zip(prompts, policies, limits, strict=True)
    ]
    engine.run()
    out = [engine.result(ticket) for ticket in tickets]
    pool = engine.runner.state.cache.pool
    assert engine.runner.num_held_pages == 0, "a page of a guess was lost"
    assert int(pool.refcount.sum()) == 0
    return out, engine


@functools.cache
def plain(policy):
    out, _ = run(tiny_model(), None, policy)
    return out


def texts_of(results, prompts=PROMPTS):
    return tuple((*prompt, *one.tokens[0].tolist()) for prompt, one in zip(prompts, results, strict=True))


def assert_guesses_change_nothing(model, policies, *, prompts=PROMPTS, history=64, **settings):
    """Bits with guesses of all kinds are those without any, and tokens those of an engine of plain steps; returns the runs."""
    settings |= {"prompts": prompts}
    expected, _ = run(model, None, policies, **settings)
    none, quiet = run(model, Guess((), 0, history=history), policies, **settings)
    mixed, engine = run(model, Guess(texts_of(expected, prompts), None, history=history), policies, **settings)
    assert quiet.stats.drafted == 0 < engine.stats.accepted < engine.stats.drafted
    assert_equal_bits(mixed, none)
    assert_equal_tokens(none, expected)
    return mixed, engine


def assert_equal_tokens(results, expected):
    """Of another engine, whose programs round otherwise."""
    for one, other in zip(results, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=5e-5, rtol=0)
        assert one.stats.evicted == other.stats.evicted


def assert_equal_bits(one, other):
    for a, b in zip(one, other, strict=True):
        for name in ("tokens", "logprobs", "model_logprobs", "lengths"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        assert (a.text, a.finish_reason, a.stats.evicted) == (b.text, b.finish_reason, b.stats.evicted)


POLICIES = {
    "full": jkv.full(),
    "r_kv": jkv.r_kv(budget=16, interval=8, window=4),
    "lag_kv": jkv.lag_kv(budget=16, interval=8),
    "rpc": jkv.rpc(interval=16, window=4),
}


def test_guesses_change_neither_tokens_nor_bits():
    """None, wrong ones, right ones, and some of each; beside an engine of plain steps, rounding aside."""
    expected = plain(POLICIES["full"])
    texts, runs = texts_of(expected), {}
    for what, drafter in {
        "none": Guess((), 0),
        "wrong": Guess(texts, 0),
        "right": Guess(texts, 3),
        "mixed": Guess(texts, 1),
    }.items():
        runs[what], engine = run(tiny_model(), drafter, POLICIES["full"])
        stats = engine.stats
        rate = {"none": 1.0, "wrong": 1.0, "right": 4.0, "mixed": 2.0}[what]
        assert stats.tokens_per_step == pytest.approx(rate, rel=0.1)
        assert (stats.drafted > 0) == (what != "none")
        assert stats.accepted == stats.tokens - stats.speculated_steps
    for what in ("wrong", "right", "mixed"):
        assert_equal_bits(runs[what], runs["none"])
    assert_equal_tokens(runs["none"], expected)


@pytest.mark.everyday(where=lambda name: name == "r_kv")
@pytest.mark.parametrize("name", [name for name in POLICIES if name != "full"])
def test_guesses_change_no_compaction(name):
    out, _ = assert_guesses_change_nothing(tiny_model(), POLICIES[name])
    assert all(one.stats.evicted > 0 for one in out)


MODELS = {
    "windows": tiny_model(1, dataclasses.replace(TINY, num_layers=4, window=6, window_layers=(0, 2)), TinyTokenizer()),
    "states": recurrent_model(),
    "heads by group": gemma.random_model(gemma.GEMMA4, TinyTokenizer()),
    "shared layers": gemma.random_model(gemma.SHARING, TinyTokenizer()),
    "learned sinks": learned_sinks.with_random_vectors(tiny_model(2, learned_sinks.CONFIG, TinyTokenizer())),
}


@pytest.mark.everyday(where=lambda name: name in ("windows", "states"))
@pytest.mark.parametrize("name", MODELS)
def test_layers_outside_of_the_pool_lose_nothing_to_a_rejected_guess(name):
    assert_guesses_change_nothing(MODELS[name], POLICIES["r_kv"])


@pytest.mark.everyday(where=lambda policy: policy == "full")
@pytest.mark.parametrize("policy", ["full", "random"])
def test_only_accepted_tokens_are_sealed(policy):
    """Guesses reach into the next page while the page before the last is still read as floats."""
    model = tiny_model(config=dataclasses.replace(TINY, head_size=32, max_positions=512))
    whole_pages = jkv.random(budget=48, interval=24, block=16, whole=True, sinks=1, recent=17)
    sizes = {"page_size": 16, "max_slots": 160, "kv_dtype": "kvarn", "history": 160}
    prompts = [PROMPTS[0], [7, 8, 9] * 13] if policy == "full" else [[4, 5, 6, 7] * 20, [7, 8, 9] * 13]
    chosen = POLICIES["full"] if policy == "full" else whole_pages
    out, _ = assert_guesses_change_nothing(model, chosen, prompts=prompts, limits=[66, 60], **sizes)
    assert any(one.stats.evicted > 0 for one in out) == (policy == "random")


def test_rows_that_decide_in_each_step_get_no_guesses_beside_rows_that_do():
    """Evictions, pages, sinks, steering and aligned thoughts, each in a row of its own; and the traces of all replay."""
    vector = jkv.SteeringVector(np.random.default_rng(0).standard_normal((2, 32)).astype(np.float32))
    by_step = {
        "h2o evicts by the attention of each step": jkv.h2o(budget=16),
        "tova evicts by the attention of each step": jkv.tova(budget=16),
        "quest chooses pages in each step": jkv.quest(budget=12, dense_layers=0),
        "streaming_llm moves its sinks in each step": jkv.streaming_llm(budget=16, interval=8, positions="cache"),
        "seal steers by each token": jkv.seal(vector, strength=3.0),
        "reason_cache starts thoughts on pages of their own": jkv.reason_cache(align_steps=True),
    }
    model, prompts = tiny_model(tokenizer=TinyTokenizer()), [[*PROMPTS[i % 3], 4 + i] for i in range(7)]
    gated = jkv.learned_gate(random_gate(model, "linear"), 16, window=4, interval=8, sinks=2)  # which may be guessed
    settings = {"max_running": 7, "return_trace": True, "prompts": prompts}
    out, engine = assert_guesses_change_nothing(model, [gated, *by_step.values()], **settings)
    assert out[0].stats.evicted > 0
    assert engine.stats.not_drafted == dict.fromkeys(by_step, TOKENS)
    assert out[0].stats.not_drafted == engine.stats.not_drafted
    for one in out:
        replayed = jkv.score(model, one, trace=one.trace).logprobs
        assert np.quantile(np.abs(replayed - one.logprobs), 0.99) <= 1e-5


def test_a_row_s_bits_depend_neither_on_its_neighbours_nor_on_chunks():
    policies = [POLICIES["full"], POLICIES["r_kv"], POLICIES["full"]]
    together, _ = run(tiny_model(), jkv.ngram(), policies)
    for chunk in (16, 4):
        alone = []
        for prompt, policy in zip(PROMPTS, policies, strict=True):
            (one,), _ = run(tiny_model(), jkv.ngram(), [policy], prompts=[prompt], chunk=chunk)
            alone.append(one)
        for a, b in zip(alone, together, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_nothing_follows_a_stop_token_or_the_limit():
    """Guesses reach beyond both."""
    expected = plain(POLICIES["full"])
    texts, tokens = texts_of(expected), [one.tokens[0].tolist() for one in expected]
    stop = next(token for token in tokens[0][9:] if token not in tokens[0][:9])
    limits = [TOKENS, 5, 18]
    out, _ = run(tiny_model(), Guess(texts, 3), POLICIES["full"], limits=limits, stop_ids=[stop])
    for result, own, limit in zip(out, tokens, limits, strict=True):
        own = own[:limit]
        own = own[: own.index(stop) + 1] if stop in own else own
        assert result.tokens[0, : result.lengths[0]].tolist() == own
        assert result.finish_reason == (["stop"] if own[-1] == stop else ["length"])
    assert out[0].finish_reason == ["stop"]


@pytest.mark.parametrize(
    "kv_dtype", ["int8", pytest.param("int4", marks=pytest.mark.slow), pytest.param("fp8", marks=pytest.mark.slow)]
)
def test_quantised_pages_hold_the_same_codes(kv_dtype):
    config = dataclasses.replace(TINY, head_size=32)
    model = tiny_model(config=config)
    expected, _ = run(model, None, POLICIES["r_kv"], kv_dtype=kv_dtype)
    out, _ = run(model, Guess(texts_of(expected), 2), POLICIES["r_kv"], kv_dtype=kv_dtype)
    for one, other in zip(out, expected, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)


def test_a_trace_of_accepted_tokens_replays():
    for policy in (POLICIES["full"], POLICIES["r_kv"]):
        model = tiny_model()
        drafter = Guess(texts_of(plain(policy)), 2)
        out, _ = run(model, drafter, policy, return_trace=True)
        for one in out:
            replayed = jkv.score(model, one, trace=one.trace).logprobs
            assert np.quantile(np.abs(replayed - one.logprobs), 0.99) <= 1e-5


def test_penalties_and_forced_tokens_are_as_in_plain_decoding():
    """A row with penalties gets no guesses; one with forced tokens may."""
    texts, results = texts_of(plain(POLICIES["full"])), []
    for drafter in (None, Guess(texts, 3)):
        engine = jkv.Engine(tiny_model(), speculate=drafter, **SIZES)
        penalised = jkv.Sampling(seed=1, presence_penalty=1.0, repetition_penalty=1.5)
        tickets = [
            engine.submit(PROMPTS[0], sampling=penalised, max_new_tokens=20, stop_ids=()),
            engine.submit(PROMPTS[1], sampling=jkv.Sampling(seed=1), max_new_tokens=30, stop_ids=(), forced_tokens=range(20)),
            engine.submit(PROMPTS[2], sampling=jkv.Sampling(seed=1, top_p=0.5), max_new_tokens=20, stop_ids=()),
        ]
        engine.run()
        results.append([engine.result(ticket) for ticket in tickets])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5, rtol=0)
        np.testing.assert_allclose(one.logprobs_full, other.logprobs_full, atol=2e-5, rtol=0)


@pytest.mark.everyday(where=lambda name: name in ("full layers", "windows"))
@pytest.mark.parametrize("name", ["full layers", "windows", "states"])
def test_samples_turns_and_preempted_rows_go_on_as_in_plain_decoding(name):
    """Forks of a prompt, a next turn of a kept row, and rows that are swapped out, in a pool that is too small for all."""
    results, model = [], MODELS.get(name, tiny_model())
    for drafter in (None, jkv.siblings(least=1, history=96)):
        settings = SIZES | {"num_pages": 92, "ahead": name != "full layers"}  # rows that have ended stay as they are
        engine = jkv.Engine(model, speculate=drafter, return_trace=True, **settings)
        sampling = jkv.Sampling(seed=3, top_k=3)  # texts that can be guessed
        many = engine.submit(PROMPTS[0], sampling=sampling, max_new_tokens=36, n=4, stop_ids=())
        turn = engine.submit(PROMPTS[1], sampling=sampling, max_new_tokens=13, stop_ids=(), keep=True)
        engine.run()
        again = engine.extend(turn, [7, 8, 9], max_new_tokens=21, stop_ids=(), keep=False)
        engine.run()
        results.append([engine.result(ticket) for ticket in (many, turn, again)])
        assert engine.runner.num_held_pages == 0
        assert engine.stats.preemptions > 0
    assert engine.stats.accepted > 0
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        replayed = jkv.score(model, other, trace=other.trace).logprobs
        assert np.quantile(np.abs(replayed - other.logprobs), 0.99) <= 1e-5


def test_other_prompts_lengths_and_guesses_compile_nothing():
    engine = jkv.Engine(tiny_model(), speculate=jkv.ngram(drafts=2, history=32), **SIZES)
    before = None
    for prompt, limit in (([1, 2, 3], 20), ([4] * 9, 33), ([8, 9, 8, 9, 8], 7)):
        engine.submit(prompt, jkv.full(), jkv.Sampling(seed=1), limit, stop_ids=())
        engine.run()
        program = jkv.engine.programs.decode_chunk
        before = program.num_compiled() if before is None else before
        assert program.num_compiled() == before


@pytest.mark.parametrize(
    "name", ["windows", "steps without guesses", "drafts over pages", pytest.param("states", marks=pytest.mark.slow)]
)
def test_no_step_copies_the_pool(name):
    """Where steps without guesses pass one token, two loops do so: with a branch, XLA copies the pool."""
    drafter = jkv.draft_pages() if name == "drafts over pages" else jkv.ngram(history=64)
    config = dataclasses.replace(MODELS["windows"].config, width=64, head_size=32, num_query_heads=2, num_kv_heads=1)
    model = MODELS[name] if name in MODELS else tiny_model(1, config, TinyTokenizer())
    engine = jkv.Engine(model, speculate=drafter, policies=[POLICIES["r_kv"]], **SIZES)
    engine.submit(PROMPTS[0], POLICIES["r_kv"], jkv.Sampling(seed=1), 20, stop_ids=())
    engine.step()
    runner = engine.runner
    inputs = runner._chunk_inputs(engine.scheduler.running)
    args = runner.params, runner.state, inputs, runner._carried, 16, runner.draws, False, runner.drafter
    text = jkv.engine.programs.decode_chunk.trace(*args).lower().compile().as_text()
    cache = runner.state.cache
    assert row_invariance.holds(runner.params, None, 12) == (name in ("steps without guesses", "drafts over pages"))
    beside = cache.states[0].memory if name == "states" else cache.windows.kv
    for array in (cache.pool.kv, cache.query_ring, beside):
        assert not find_copies(text, array.shape)
