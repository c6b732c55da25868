"""Trails: every stated thing is true, half of the facts are idle, few tokens are live, and passes have no part in answers."""

import itertools
import re

import jax
import numpy as np
import pytest
from scipy import stats

from jkv.evaluation.chains import read_answer
from jkv.model.params import ModelConfig
from research.tasks import batches, live_set, trail_vocabulary, train, vocabulary
from research.tasks.live_set import live_share
from research.tasks.trails import CLOSE, PASSES, STOP, draw_facts, draw_trail, write_trace


@pytest.fixture(scope="module")
def tokenizer():
    return trail_vocabulary.make_tokenizer()


@pytest.fixture(scope="module")
def many():
    rng = np.random.default_rng(0)
    return [draw_trail(rng) for _ in range(300)]


def facts_of(prompt):
    """A prompt's values, operands of sums and links, read with regular expressions and none of the generator's fields."""
    values = {name: int(digit) for name, digit in re.findall(r"(?<![a-z])([a-z])=(\d);", prompt)}
    sums = {name: operands for name, *operands in re.findall(r"([a-z])=([a-z]) \1\+([a-z]) \1>", prompt)}
    links = dict(re.findall(r"([a-zA-L])>([a-zA-L.!]);", prompt))
    return values, sums, links


def solve(prompt):
    """The answer, the passes and branches in order, the names that are read and all values, by following the prompt's links."""
    values, sums, links = facts_of(prompt)
    start, close, first = re.search(r"\?(.)@(.)#(.)$", prompt).groups()
    read = set()

    def value_of(name):
        read.add(name)
        if name not in values:
            values[name] = sum(value_of(operand) for operand in sums[name]) % 10
        return values[name]

    def walk(name, end):
        names = []
        while name != end:
            names.append(name)
            name = links[name]
        return names

    order = walk(first, CLOSE)
    for name in [*walk(start, STOP), *(name for name in order if name.islower()), *(closing := walk(close, STOP))]:
        value_of(name)
    return f"{closing[-1]}={values[closing[-1]]}", order, read, values


def test_a_solver_that_only_reads_the_prompt_finds_the_same_answer_and_the_same_order(many):
    for trail in many:
        answer, order, _, _ = solve(trail.prompt)
        assert answer == trail.answer == read_answer(write_trace(trail))
        assert tuple(order) == trail.order


def test_everything_that_a_trace_states_is_true(many):
    for trail in many:
        _, _, _, known = solve(trail.prompt)
        _, sums, links = facts_of(trail.prompt)
        trace = write_trace(trail)
        stated = re.findall(r"([a-z])=(\d)", trace)
        results = re.findall(r"(\d)\+(\d)=(\d)", trace)
        assert len(stated) > 30
        assert len(results) >= 4
        assert all(known[name] == int(digit) for name, digit in stated)
        assert all((int(left) + int(right)) % 10 == int(result) for left, right, result in results)
        assert all(sums[name] == [*rest] for name, *rest in re.findall(r"([a-z])=([a-z]) \1\+([a-z])", trace))
        assert all(links[name] == after for name, after in re.findall(r"([a-zA-L])>([a-zA-L.!])", trace))


def test_about_half_of_the_facts_are_never_read(many):
    for trail in many:
        values, sums, _ = facts_of(trail.prompt)
        _, _, read, _ = solve(trail.prompt)
        assert 10 <= len(values) + len(sums) <= 20
        assert 0.4 <= len(read) / (len(values) + len(sums)) <= 0.6
        idle = (values.keys() | sums.keys()) - read
        assert not re.findall(f"(?<![a-z])[{''.join(idle)}][=+>]", write_trace(trail))


def test_three_facts_are_read_at_the_end_alone_and_branches_once(many):
    for trail in many:
        values, sums, _ = facts_of(trail.prompt)
        passes, end = write_trace(trail).split("finally")
        late = {name for name in values.keys() | sums.keys() if f"{name}=" in end and f"{name}=" not in passes}
        assert len(late) == 3
        for name in filter(str.islower, trail.order):
            assert len([thought for thought in (passes + end).split("\n\n") if f"{name}=" in thought]) == 1


def test_each_step_names_its_successor_and_each_pass_its_own(many):
    for trail in many:
        steps = [thought for thought in write_trace(trail).split("\n\n") if re.match(r"[A-L!] ", thought)]
        for this, after in itertools.pairwise(steps):
            named = this[-1]
            if named != STOP:
                assert re.search(r"([a-z])=", after).group(1) == named


def test_a_step_is_restated_in_three_kinds_of_words():
    trail = next(t for t in (draw_trail(np.random.default_rng(i)) for i in range(100)) if {0, 1, 2} == kinds(t))
    name = trail.main[0]
    steps = [thought[2:] for thought in write_trace(trail).split("\n\n") if re.search(rf"{name}>[a-z.]$", thought)]
    assert len(set(steps)) == 3


def kinds(trail):
    """Which kinds of words the passes of a trail use."""
    return {PASSES.index(name) % 3 for name in trail.order if name.isupper()}


def test_the_number_of_passes_says_nothing_about_the_answer(many):
    rng = np.random.default_rng(1)
    trails = [*many, *(draw_trail(rng) for _ in range(2_700))]
    counts = np.zeros((4, 10))
    for trail in trails:
        counts[sum(name.isupper() for name in trail.order) - 4, int(trail.answer[-1])] += 1
    assert (counts.sum(axis=1) > 600).all()
    assert stats.chi2_contingency(counts[:, counts.sum(axis=0) > 0]).pvalue > 0.001


def test_the_live_set_is_small_and_traces_long(many, tokenizer):
    lengths, shares = [], []
    for trail in many:
        prompt, trace = tokenizer.encode(trail.prompt), tokenizer.encode(write_trace(trail), add_special_tokens=False)
        lengths.append(len(prompt) + len(trace))
        shares.append(live_share(tokenizer.convert_ids_to_tokens(prompt + trace), len(prompt)))
    assert min(lengths) > 400
    assert max(lengths) < 1500
    assert np.mean(np.array(lengths) >= 600) > 0.75
    assert np.array(shares)[np.array(lengths) >= 600].max() <= 0.08


def test_the_tokenizer_gives_back_what_it_took_behind_its_first_token(many, tokenizer):
    for trail in many[:50]:
        text = trail.prompt + write_trace(trail)
        ids = tokenizer.encode(text)
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids[1:]) == text
    assert len(tokenizer) == trail_vocabulary.SIZE


def test_tokens_of_tiny_reasoner_keep_their_ids(tokenizer):
    old = vocabulary.make_tokenizer()
    text = "b=3;d=b*c Wait\n\n<think>\\boxed{}"
    assert tokenizer.encode(text, add_special_tokens=False) == old.encode(text)
    assert trail_vocabulary.is_own(tokenizer)
    assert not trail_vocabulary.is_own(old)
    assert not trail_vocabulary.is_own(None)


def test_a_drill_asks_for_the_contents_of_its_facts(tokenizer):
    given, asked = draw_facts(np.random.default_rng(0))
    assert set(asked.strip().split("\n\n")) <= set(given.strip(";").split(";"))
    stage = batches.Stage(steps=1, rows=1, length=256, low=1, high=1, drills=1.0)
    tokens, is_target = batches.draw_trail(tokenizer, stage, np.random.default_rng(0))
    learnt = [tokenizer.decode([token]) for token, is_one in zip(tokens, is_target, strict=True) if is_one]
    rng = np.random.default_rng(0)
    rng.random()  # the stage draws whether it is a drill
    wanted = re.findall(r"[a-zA-L][=+>](.)", draw_facts(rng)[1])
    assert "".join(learnt) == "".join(wanted)


def test_linked_drills_have_passes_that_other_passes_follow(tokenizer):
    def followers(linked):
        rng = np.random.default_rng(0)
        return re.findall(r"[A-L]>(.)", "".join(draw_facts(rng, linked)[0] for _ in range(200)))

    assert not set(followers(0.0)) & set(PASSES)
    assert set(followers(1.0)) == set(PASSES)
    share = np.mean([name in PASSES for name in followers(0.75)])
    assert 0.70 < share < 0.80
    stage = batches.Stage(steps=1, rows=1, length=256, low=1, high=1, drills=1.0, linked=1.0)
    tokens, is_target = batches.draw_trail(tokenizer, stage, np.random.default_rng(0))
    names = tokenizer.convert_ids_to_tokens(tokens)
    asked = [names[i] for i in np.flatnonzero(is_target) if names[i - 1][0] in PASSES]
    assert asked
    assert set(asked) <= set(PASSES)


def test_a_batch_of_trails_masks_the_prompts_and_each_begins_with_the_first_token(tokenizer):
    stage = batches.Stage(steps=1, rows=2, length=512, low=1, high=2, passes=(1, 2))
    batch = batches.make_batch(tokenizer, stage, (0, 0), "trails")
    starts = batch["position"] == 0
    assert starts.sum() > 2
    assert (batch["token"][starts] == tokenizer.bos_token_id).all()
    first = batch["segment"][0] == 0
    text = tokenizer.decode(batch["token"][0][first][batch["is_target"][0][first] == 1])
    assert text.startswith("<think>\n\n")
    assert text.endswith("}<|end|>")


def test_trails_with_a_trimmed_cache_show_each_token_the_live_set_and_little_else(tokenizer):
    stage = batches.Stage(steps=1, rows=2, length=1024, low=1, high=2, passes=(2, 3), live=1.0)
    batch = batches.make_batch(tokenizer, stage, (0, 0), "trails")
    is_seen = np.asarray(train.seen(*(jax.numpy.asarray(batch[name]) for name in ("segment", "end"))))
    cut = 0
    for row, (token, segment) in enumerate(zip(batch["token"], batch["segment"], strict=True)):
        for problem in range(segment[-1]):  # the last one is cut at the row's end
            (place,) = np.nonzero(segment == problem)
            total, names = len(place), tokenizer.convert_ids_to_tokens(token[place].tolist())
            start = int(np.argmax(batch["is_target"][row, place]))
            either = [live_set.live_slots(names, is_latest=is_latest) for is_latest in (False, True)]
            assert not is_seen[row][place][:, segment != problem].any()
            for now in range(total):
                seen = is_seen[row, place[now], place]
                assert not seen[now + 1 :].any()
                assert seen[max(0, now - 3) : now + 1].all()  # itself and the tokens before it
                assert seen[: min(now, live_set.SINKS)].all()
                if now >= start + 2 * batches.LIVE_INTERVAL:
                    assert seen.sum() <= batches.LIVE_SHARES[1] * total + batches.LIVE_INTERVAL + 1
                    evicted = now - batches.LIVE_INTERVAL  # what is live since the last eviction, by one of both readings
                    assert any((seen | ~(live[now] & live[evicted]))[:now].all() for live in either)
                    cut += 1
    assert cut > 500


def test_without_a_trimmed_cache_each_token_sees_its_problem_up_to_itself(tokenizer):
    stage = batches.Stage(steps=1, rows=1, length=128, low=1, high=1, drills=1.0, live=1.0)  # drills are never trimmed
    batch = batches.make_batch(tokenizer, stage, (0, 0), "trails")
    segment = batch["segment"]
    expected = np.tril(np.ones((129, 129), bool)) & (segment[0][:, None] == segment[0])
    np.testing.assert_array_equal(train.seen(*(jax.numpy.asarray(batch[name]) for name in ("segment", "end")))[0], expected)


@pytest.fixture
def standard_promotion():
    """Training code runs as users run it: optax is not written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("standard_promotion")
def test_a_sink_in_the_loss_draws_attention_to_the_first_token(tokenizer):
    config = ModelConfig("qwen2", trail_vocabulary.SIZE, 16, 2, 2, 1, 8, 16, 256, qkv_bias=True, tie_embeddings=True)
    params = train.init_to_look_up(config, tokenizer, jax.random.key(0))
    stage = batches.Stage(steps=1, rows=1, length=256, low=1, high=1, passes=(1, 1), branches=0)
    drawn = batches.make_batch(tokenizer, stage, (0, 0), "trails")
    batch = {name: jax.numpy.asarray(field) for name, field in drawn.items()}

    def distance(params):
        return train.loss(params, batch, 1.0)[0] - train.loss(params, batch)[0]

    before, slope = jax.value_and_grad(distance)(params)
    after = distance(jax.tree.map(lambda leaf, one: leaf - 0.1 * one, params, slope))
    assert 0 < after < before < -np.log(train.LEAST_SHARE)
