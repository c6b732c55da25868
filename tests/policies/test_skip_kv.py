"""SkipKV: sentences against a plain reading of the rule, from the replay's hidden states; what is flagged goes first."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.cache import pool as pages
from jkv.engine.engine import Engine
from jkv.engine.results import make_result
from jkv.eviction.evict import Evict
from jkv.eviction.scores import Recency
from jkv.model import decoder
from jkv.policies.skip_kv import LessRepeated
from jkv.reasoning.sentences import SentenceLog, SentenceMap, Sentences, ends_of, similarity_of_slots
from jkv.reasoning.steering import Steer, SteeringVector
from jkv.replay.columns import trace_columns
from jkv.replay.score import ReplayAttention
from jkv.testing import TinyTokenizer, random_view, tiny_model
from tests.policies.test_r_kv import reference as r_kv_reference

ENDS = (2, 3, 9, 17)  # tokens of the tiny tokenizer: two blank lines, and two letters
TAU = 0.4
SAMPLING = jkv.Sampling(temperature=2.0, seed=2)
SIZES = {"max_running": 4, "max_slots": 160, "page_size": 4, "chunk": 8, "return_trace": True}  # so that programs compile once
PROMPTS = [[5, 4, 9, 8, 7, 9, 5, 4, 9, 2, 2, 8, 8, 3, 5, 4, 9], [7, 8], [*range(4, 32), *range(4, 20), 5, 4, 9]]
VECTOR = SteeringVector(np.random.default_rng(0).standard_normal((2, 32)).astype(np.float32))


@pytest.fixture(scope="module")
def model():
    return tiny_model(tokenizer=TinyTokenizer())


def recipe(**settings):
    return jkv.skip_kv(**{"budget": 24, "interval": 16, "window": 4, "tau": TAU, "ends": ENDS} | settings)


def run(model, prompts, *policies, n=1, new_tokens=90):
    """A traced run of prompts, each with its policy, or all with the same one."""
    policies = policies if len(policies) == len(prompts) else policies * len(prompts)
    engine = Engine(model, policies=[recipe(), *(policy for policy in policies if policy.steer)], **SIZES)
    tickets = [
        engine.submit(prompt, policy, SAMPLING, new_tokens, n=n, stop_ids=())
        for prompt, policy in zip(prompts, policies, strict=True)
    ]
    engine.run()
    return make_result(model, engine.take(tickets), engine.stats, is_traced=True)


def hidden_states(model, out, i):
    """Those of a sample's whole text after the final norm, by replay; [T, D]."""
    tokens = np.concatenate([out.prompts[i], out.tokens[i]])[None]
    position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    trace = out.trace.replace(**{name: getattr(out.trace, name)[i : i + 1] for name in ("source", "begin", "end")})
    columns = trace_columns(trace, tokens.shape[1])
    attend = ReplayAttention(position, columns, None)
    hidden, _ = decoder.forward(model.params, jnp.asarray(tokens), position, attend, None)
    return tokens[0], np.asarray(hidden[0], np.float64)


def cut_into_sentences(tokens, ends):
    """`(start, end)` of every finished sentence."""
    found, start = [], 0
    for i, token in enumerate(tokens):
        if token in ends:
            found.append((start, i + 1))
            start = i + 1
    return found


def flags_by_the_rule(tokens, hidden, moments, tau=TAU, ends=ENDS):
    """`(moment, similarity of each token)`: at each moment the new sentences against all before them, the latest j written."""
    flags, compared, said = np.zeros(len(tokens)), 0, []
    for moment in moments:
        sentences = cut_into_sentences(tokens[:moment], ends)
        embedded = [hidden[a:b].mean(axis=0) / np.linalg.norm(hidden[a:b].mean(axis=0)) for a, b in sentences]
        for j in range(compared, len(sentences)):
            for i in range(j):
                if embedded[i] @ embedded[j] > tau:
                    flags[slice(*sentences[i])] = embedded[i] @ embedded[j]
        compared = len(sentences)
        said.append((moment, flags[:moment].copy()))
    return said


def test_compaction_is_told_what_a_plain_reading_of_the_rule_flags(model, monkeypatch):
    told, by_position = {}, SentenceLog.by_position

    def note(log, width):
        sentence, similarity = by_position(log, width)
        count = len(log.sentence)
        told.setdefault(log, []).append((sentence[:count].copy(), similarity[:count].copy()))
        return sentence, similarity

    monkeypatch.setattr(SentenceLog, "by_position", note)
    out = run(model, PROMPTS, recipe())
    flagged, unlike = 0, 0
    by_length = {len(calls[-1][0]): calls for calls in told.values()}
    for i, prompt in enumerate(PROMPTS):
        tokens, hidden = hidden_states(model, out, i)
        first = 0 if len(prompt) > 24 else next(n for n in range(16, 90, 16) if len(prompt) + n > 24)
        moments = [len(prompt) + n for n in range(first, 90, 16)]
        calls = by_length[moments[-1]]
        assert [len(sentence) for sentence, _ in calls] == moments
        for (moment, expected), (sentence, similarity) in zip(flags_by_the_rule(tokens, hidden, moments), calls, strict=True):
            starts = [0, *(end for _, end in cut_into_sentences(tokens[:moment], ENDS))]
            np.testing.assert_array_equal(sentence, np.searchsorted(starts, np.arange(moment), side="right") - 1)
            alive = [out.trace.end[i, :, :, a:b].max() >= moment for a, b in cut_into_sentences(tokens[:moment], ENDS)]
            is_alive = np.array([*alive, True])[sentence]  # flags of what is gone no longer change
            np.testing.assert_allclose(similarity[is_alive], expected[is_alive], atol=1e-4)
        flagged, unlike = flagged + (expected > 0).sum(), unlike + (expected == 0).sum()
    assert flagged > 20
    assert unlike > 20


@pytest.mark.parametrize("group", [1, 2, 4, 6, 7])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_kept_slots_are_those_of_r_kv_less_the_similarity(group, dtype):
    view = random_view(np.random.default_rng(group), slots=60, group=group, dtype=dtype)
    slots = np.asarray(jax.jit(jkv.skip_kv(budget=20, window=4).select)(view))
    key, query, position, similarity = (
        np.asarray(x, np.float64) for x in (view.key, view.query, view.position, view.similarity)
    )
    for b, k in np.ndindex(slots.shape[:2]):
        size = int((position[b, k] >= 0).sum())
        _, score = r_kv_reference(key[b, k, :size], position[b, k, :size], query[b, group * k : group * (k + 1)], 20)
        score = score - similarity[b, k, : size - 4]
        kept = set(slots[b, k][slots[b, k] >= 0].tolist())
        assert set(range(size - 4, size)) <= kept
        cut = np.sort(score)[::-1][15]
        band = 1e-5 if dtype == jnp.float32 else 1e-3  # max-pooling makes ties common
        assert set(np.flatnonzero(score > cut + band).tolist()) <= kept
        assert kept - set(range(size - 4, size)) <= set(np.flatnonzero(score > cut - band).tolist())


def test_a_slot_is_alike_only_beside_another_of_its_sentence():
    rng = np.random.default_rng(0)
    position = np.full((3, 2, 12), -1, np.int32)
    for b, k in np.ndindex(3, 2):
        position[b, k, : 7 + b] = np.sort(rng.permutation(20)[: 7 + b])
    sentence = np.cumsum(rng.random((3, 20)) < 0.3, axis=1).astype(np.int32)
    similarity = np.where(sentence % 2, 0.9, 0.0).astype(np.float32)
    got = np.asarray(similarity_of_slots(SentenceMap(jnp.asarray(sentence), jnp.asarray(similarity)), jnp.asarray(position)))
    for b, k, s in np.ndindex(position.shape):
        held = [sentence[b, p] for p in position[b, k] if p >= 0]
        at = position[b, k, s]
        expected = similarity[b, at] if at >= 0 and held.count(sentence[b, at]) >= 2 else 0.0
        assert got[b, k, s] == np.float32(expected)
    assert 0 < (got > 0).sum() < (position >= 0).sum() / 2


def new_log(tau=0.5):
    return SentenceLog(ends_of(None, 32, (2,)), tau, 3)


def test_a_log_does_not_depend_on_how_its_tokens_came():
    rng = np.random.default_rng(1)
    tokens, hidden = rng.integers(1, 4, 60), rng.standard_normal((60, 3)).astype(np.float32)
    whole, pieces = new_log(), new_log()
    whole.take(tokens, hidden)
    for cut in np.split(np.arange(60), [1, 2, 17, 30, 31]):
        pieces.take(tokens[cut], hidden[cut])
    for log in (whole, pieces):
        log.compare()
    assert whole.sentence == pieces.sentence
    np.testing.assert_array_equal(whole.embedding, pieces.embedding)
    np.testing.assert_array_equal(whole.similarity, pieces.similarity)


def test_the_latest_of_several_counts_and_only_above_the_threshold():
    log = new_log(tau=0.5)
    east, near, north = [1, 0, 0], [0.6, 0.8, 0], [0, 1, 0]

    def say(*vectors):
        for vector in vectors:
            log.take([5, 2], np.array([vector, vector], np.float32))
        log.compare()

    say(east, east)
    np.testing.assert_allclose(log.similarity, [1, 0])  # the earlier one
    say(near)
    np.testing.assert_allclose(log.similarity, [0.6, 0.6, 0], atol=1e-6)  # the latest, not the largest
    say([0.5, 0, 0.75**0.5])  # at the threshold for east
    np.testing.assert_allclose(log.similarity, [0.6, 0.6, 0, 0], atol=1e-6)
    say(north)
    np.testing.assert_allclose(log.similarity, [0.6, 0.6, 0.8, 0, 0], atol=1e-6)
    unfinished = 3 * 8
    assert log.nbytes == 5 * 3 * 4 + unfinished
    is_left = np.zeros(32, bool)
    is_left[[4, 9]] = True  # a token of the third and one of the fifth
    log.forget(is_left)
    assert log.known.tolist() == [2, 4]
    assert log.nbytes == 2 * 3 * 4 + unfinished
    say(near)
    np.testing.assert_allclose(log.similarity, [0.6, 0.6, 1.0, 0, 0.8, 0], atol=1e-6)  # what is forgotten stays as it was


def test_flagged_sentences_go_first_and_the_rest_is_r_kvs(model):
    out = run(model, PROMPTS[2:], recipe(importance=0.0), new_tokens=1)
    tokens, hidden = hidden_states(model, out, 0)
    size = len(PROMPTS[2])
    ((_, flags),) = flags_by_the_rule(tokens, hidden, [size])
    sentences = [pair for pair in cut_into_sentences(tokens[:size], ENDS) if pair[1] - pair[0] > 1]
    said_again = {at for a, b in sentences for at in range(a, b) if flags[at] and at < size - 4}
    dropped = out.trace.end[0, :, :, :size] <= size
    assert said_again
    for layer, head in np.ndindex(dropped.shape[:2]):
        gone = set(np.flatnonzero(dropped[layer, head]).tolist())
        assert len(gone) == size - 24
        assert gone <= said_again or said_again <= gone


def test_without_what_is_said_again_it_is_r_kv(model):
    plain = run(model, PROMPTS, jkv.r_kv(24, 16, window=4))
    for policy in (recipe(tau=1.0), recipe(sentences=False)):
        same = run(model, PROMPTS, policy)
        np.testing.assert_array_equal(plain.tokens, same.tokens)
        assert (same.stats.peak_sentence_bytes > 0) == (policy.sentences is not None)
    other = run(model, PROMPTS, recipe())
    assert (plain.tokens != other.tokens).any()


def test_steering_comes_with_it_and_replays(model):
    policy = recipe(steer=VECTOR)
    assert policy.steer == Steer(VECTOR, layer=1, strength=-1.0, growth=0.02, interval=16)
    own = recipe(steer=Steer(VECTOR, 0, -3.0, keywords=("E",), growth=0.5, interval=8))
    out = run(model, [[0, 5, 6], *PROMPTS[1:]], own)
    assert len(set(out.trace.steer.amount[0].tolist())) > 1
    replayed = np.asarray(jkv.score(model, out, trace=out.trace).logprobs)
    assert np.abs(replayed - out.logprobs).max() <= 1e-4


def test_embeddings_are_counted_while_they_are_held_and_gone_with_the_sample(model):
    engine = Engine(model, policies=[recipe()], **SIZES)
    tickets = [engine.submit(prompt, recipe(budget=100), SAMPLING, 60, stop_ids=()) for prompt in PROMPTS[:2]]
    most = 0
    while engine.scheduler.running or engine.scheduler.waiting:
        engine.step()
        held = 0
        for sample in engine.scheduler.running.values():
            tokens = [*sample.request.prompt.tolist(), *sample.completion.tokens]
            held += len(cut_into_sentences(tokens, ENDS)) * 32 * 4 + 32 * 8  # float32, and the sum of the unfinished in float64
        most = max(most, held)
    assert 0 < most <= engine.stats.peak_sentence_bytes <= most + 16 * 2 * 32 * 4  # the last chunk's are gone after the step
    assert all(sample.row.records is None for ticket in tickets for sample in engine.tickets[ticket])


def test_what_a_tokenizer_cannot_write_ends_nothing():
    reasoner = jkv.load("tiny-reasoner")
    is_end = ends_of(reasoner.tokenizer, reasoner.params.config.vocab_size, jkv.skip_kv(64).sentences.ends)
    assert [reasoner.tokenizer.decode([i]) for i in np.flatnonzero(is_end)] == ["\n\n"]
    is_end = ends_of(TinyTokenizer(), 32, jkv.skip_kv(64).sentences.ends)
    assert np.flatnonzero(is_end).tolist() == [2, 3]


def test_samples_of_a_prompt_share_it_and_then_remember_their_own_sentences(model):
    for prompt in (PROMPTS[0], PROMPTS[2]):  # kept whole, and compacted before the samples part
        out = run(model, [prompt], recipe(), n=3)
        assert (out.stats.prefills, out.stats.forks) == (1, 3)
        alone = run(model, [[1], prompt, [3, 4]], recipe())
        np.testing.assert_array_equal(out.tokens[0], alone.tokens[1])
        beside = run(model, [prompt] * 3, jkv.full(), recipe(), recipe(ends=(9,)))
        assert beside.stats.forks == 0  # what is known of the prompt's sentences differs
        assert np.abs(np.asarray(jkv.score(model, out, trace=out.trace).logprobs) - out.logprobs).max() <= 1e-4


def test_ragged_prompts_need_no_grouping_for_no_slot_ever_holds_padding(model):
    """SkipKV 4.3 sorts batches by length, since padding takes slots from the budget; here rows have none (its Appendix A.3)."""
    prompts = [[7], PROMPTS[0], PROMPTS[2], [*PROMPTS[2], *PROMPTS[2]]]  # 1 to 102 tokens, side by side
    budget, interval = 24, 16

    def num_held(prompt, generated):
        held = min(prompt, budget)
        for g in range(generated):
            held = (min(held, budget) if g % interval == 0 else held) + 1
        return held

    engine = Engine(model, policies=[recipe()], **SIZES)
    for prompt in prompts:
        engine.submit(prompt, recipe(), SAMPLING, 90, stop_ids=())
    full_rows, row, positions = 0, jnp.arange(4, dtype=jnp.int32), jax.jit(pages.positions)
    while engine.scheduler.waiting or engine.scheduler.running:
        engine.step()
        pool = engine.runner.state.cache.pool
        position = np.stack([np.asarray(positions(pool, layer, row)) for layer in range(2)])
        for i, sample in engine.scheduler.running.items():
            expected = num_held(len(sample.request.prompt), sample.generated)
            for of_head in position[:, i].reshape(-1, position.shape[-1]):
                held = of_head[of_head >= 0].tolist()
                assert len(set(held)) == len(held)  # every slot a token of its own ...
                assert set(held) <= set(range(len(sample.request.prompt) + sample.generated))  # ... and the row's
                assert len(held) in (expected, min(expected, budget) if sample.generated % interval == 0 else expected)
                full_rows += len(held) >= budget
    assert full_rows > 100


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: recipe(tau=0.0), r"must lie in \(0, 1\]"),
        (lambda: recipe(tau=1.01), r"must lie in \(0, 1\]"),
        (lambda: recipe(ends=()), "one or more texts"),
        (lambda: jkv.generate(tiny_model(), [1], policy=recipe(ends=[np.int64(2), 99])), "must be tokens of the model"),
        (lambda: recipe(steer=VECTOR, keywords="Wait"), "keywords is a list of texts, not one"),
        (lambda: recipe(ends=("",)), "texts or token ids"),
        (lambda: recipe(ends="\n"), "ends is a list of texts, not one"),
        (lambda: recipe(ends=(True,)), "texts or token ids"),
        (lambda: recipe(ends=(2.5,)), "texts or token ids"),
        (lambda: recipe(budget=3), "must hold its sinks and recent"),
        (lambda: recipe(interval=0), "interval must be at least 1"),
        (lambda: recipe(steer=VECTOR, keywords=("",)), "keywords must be"),
        (lambda: jkv.evict_by(LessRepeated(Recency()), budget=24), "needs both sentences and a score"),
        (lambda: dataclasses.replace(jkv.r_kv(24), sentences=Sentences(0.9)), "needs both sentences and a score"),
        (lambda: dataclasses.replace(recipe(), evict=Evict(LessRepeated(Recency()), order="score")), "stored by position"),
        (lambda: recipe().select(random_view(np.random.default_rng(0))._replace(similarity=None)), "the view has none"),
        (lambda: jkv.generate(tiny_model(), [1, 2], policy=jkv.skip_kv(24)), "need a tokenizer, and this model has none"),
        (lambda: jkv.generate(tiny_model(), [1, 2], policy=recipe(ends=(32,))), "must be tokens of the model"),
        (lambda: jkv.Engine(tiny_model(), max_slots=64).submit([1], recipe()), "needs similarity=True"),
    ],
)
def test_bad_settings_are_refused_before_anything_compiles(make, words):
    with pytest.raises(ValueError, match=words):
        make()
