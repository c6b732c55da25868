"""`jkv.generate` as a user meets it: results, statistics, invariance, compile counts, and every kind of bad input."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv.checks import check_counts
from jkv.engine import chunk_inputs, memory, programs
from jkv.engine.requests import check_model, check_sampling, check_stop_ids, spread_policies

PROMPTS = [[5, 1, 9], list(range(20)), [3, 7] * 16 + [1]]
KNOBS = {"max_new_tokens": 48, "page_size": 4, "stop_ids": (), "progress": False}
POLICY = jkv.r_kv(budget=24, interval=16, window=4)


class Letters:
    """A tokenizer of 26 letters and some spare ids."""

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(ord("a") + int(i)) for i in ids)


@pytest.fixture(scope="module")
def lettered(model):
    return dataclasses.replace(model, tokenizer=Letters())


def test_a_result_is_indexed_by_sample_prompt_major(model):
    out = jkv.generate(model, PROMPTS[:2], sampling=jkv.Sampling(seed=1), n=2, **KNOBS)
    assert out.tokens.shape == out.logprobs.shape == (4, 48)
    assert out.tokens.dtype == np.int32
    assert out.logprobs.dtype == np.float32
    assert [len(p) for p in out.prompts] == [3, 3, 20, 20]
    assert out.finish_reason == ["length"] * 4
    assert (out.lengths == 48).all()
    assert len({tuple(row) for row in out.tokens.tolist()}) == 4  # samples differ
    assert out.stats.generated_tokens == 4 * 48
    assert out.text is None
    assert out.trace is None


def test_statistics_name_the_kernels_used(model):
    out = jkv.generate(model, PROMPTS[0], policy=jkv.r_kv(budget=12, interval=16), **KNOBS)
    assert {"native", "cpu"} & set(out.stats.kernels["paged_attention"].split(", "))
    assert {"attention_mass", "key_redundancy", "row_product", "take_slots"} <= set(out.stats.kernels)


def test_the_peak_counts_a_prompt_before_it_is_compacted(model):
    prompt = [1, 2, 3] * 40
    out = jkv.generate(model, prompt, policy=jkv.streaming_llm(budget=12, interval=16), **KNOBS)
    assert out.stats.peak_kv_bytes == 2 * 2 * 30 * memory.page_bytes(model.params, 4)
    assert out.stats.kv_bytes < out.stats.peak_kv_bytes / 3


def test_statistics_are_counted_on_the_real_pool(model):
    out = jkv.generate(model, PROMPTS[0], **KNOBS)
    layers, heads, size = 2, 2, 8
    page = 4 * (2 * size * 4 + 4)  # float32 keys and values, int32 positions
    assert out.stats.peak_kv_bytes == layers * heads * -(-51 // 4) * page
    assert out.stats.dense_kv_bytes == 51 * layers * heads * 2 * size * 4
    assert 0 < out.stats.kv_bytes <= out.stats.peak_kv_bytes
    assert out.stats.prefills == 1


@pytest.mark.rounding
@pytest.mark.everyday(where=lambda policy, temperature: (policy == POLICY) == (temperature > 0))
@pytest.mark.parametrize("policy", [jkv.full(), POLICY], ids=["full", "r_kv"])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_a_rows_tokens_do_not_depend_on_the_other_rows(model, policy, temperature):
    knobs = KNOBS | {"policy": policy, "sampling": jkv.Sampling(temperature, seed=5), "max_running": 4}
    together = jkv.generate(model, PROMPTS, **knobs)
    backwards = jkv.generate(model, PROMPTS[::-1], **knobs)
    np.testing.assert_array_equal(together.tokens, backwards.tokens[::-1])
    np.testing.assert_array_equal(together.logprobs, backwards.logprobs[::-1])
    for i, prompt in enumerate(PROMPTS):
        alone = jkv.generate(model, prompt, **knobs)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[i])
        if policy.is_bounded:  # the same table width, so the same program
            np.testing.assert_array_equal(alone.logprobs[0], together.logprobs[i])
        else:
            np.testing.assert_allclose(alone.logprobs[0], together.logprobs[i], atol=1e-5)


@pytest.mark.rounding
def test_a_batch_may_mix_policies_and_each_row_is_as_by_itself(model):
    policies = [jkv.full(), POLICY, jkv.streaming_llm(budget=12, interval=16)]
    knobs = KNOBS | {"max_running": 4}
    mixed = jkv.generate(model, PROMPTS, policy=policies, **knobs)
    for i, policy in enumerate(policies):
        alone = jkv.generate(model, PROMPTS[i], policy=policy, **knobs)
        np.testing.assert_array_equal(alone.tokens[0], mixed.tokens[i])


def test_more_requests_than_rows_are_served_in_order(model):
    many = [PROMPTS[i % 3] for i in range(7)]
    sampling = jkv.Sampling(seed=2)
    wide = jkv.generate(model, many, sampling=sampling, max_running=4, **KNOBS)
    narrow = jkv.generate(model, many, sampling=sampling, max_running=2, **KNOBS)
    np.testing.assert_array_equal(wide.tokens, narrow.tokens)
    assert narrow.stats.peak_kv_bytes < wide.stats.peak_kv_bytes


@pytest.mark.rounding
def test_a_small_pool_makes_requests_wait_and_changes_nothing_else(model):
    wide = jkv.generate(model, PROMPTS, policy=POLICY, max_running=4, **KNOBS)
    page = memory.page_bytes(model.params, 4)
    tight = jkv.generate(model, PROMPTS, policy=POLICY, max_running=4, kv_memory=4 * 11 * page, **KNOBS)
    np.testing.assert_array_equal(wide.tokens, tight.tokens)
    assert tight.stats.peak_kv_bytes - 2 * 4 * 4 * 4 * 8 * 4 <= 4 * 11 * page  # the query ring comes on top


@pytest.mark.parametrize("recipe", [functools.partial(jkv.r_kv, window=4), jkv.h2o], ids=["r_kv", "h2o"])
def test_nothing_compiles_again_for_other_prompts_lengths_budgets_or_weights(recipe, model):
    knobs = KNOBS | {"max_running": 4}
    for temperature in (1.0, 0.0):  # drawing and not drawing are two programs
        sampling = jkv.Sampling(temperature, seed=0)
        jkv.generate(model, PROMPTS, policy=recipe(budget=24, interval=16), **knobs | {"sampling": sampling})
    device = (programs.decode_chunk, programs.prefill_chunk, programs.compact, programs.release)
    before = [program.num_compiled() for program in device]
    others = jkv.testing.tiny_model(seed=9)
    for budget, prompts, temperature in [(20, PROMPTS[::-1], 0.7), (22, [[1, 2, 3, 4], [9] * 13], 0.0)]:
        for weights in (model, others):
            changed = recipe(budget=budget, interval=16)
            sampling = jkv.Sampling(temperature, seed=budget)
            jkv.generate(weights, prompts, policy=changed, **knobs | {"sampling": sampling, "max_new_tokens": 40})
    assert [program.num_compiled() for program in device] == before


def test_the_same_seed_gives_the_same_tokens_and_none_draws_a_fresh_one(model):
    draw = lambda seed: jkv.generate(model, PROMPTS[0], sampling=jkv.Sampling(seed=seed), **KNOBS)  # noqa: E731
    np.testing.assert_array_equal(draw(4).tokens, draw(4).tokens)
    first, second = draw(None), draw(None)
    assert first.stats.seed != second.stats.seed
    assert (first.tokens != second.tokens).any()
    np.testing.assert_array_equal(draw(first.stats.seed).tokens, first.tokens)


def test_equal_prompts_continue_the_sample_index(model):
    knobs = KNOBS | {"sampling": jkv.Sampling(seed=1), "max_running": 4}
    grouped = jkv.generate(model, [PROMPTS[0], PROMPTS[1]], n=2, **knobs)
    listed = jkv.generate(model, [PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[1]], **knobs)
    np.testing.assert_array_equal(grouped.tokens, listed.tokens)


def test_a_stop_id_ends_a_row_and_is_kept(model):
    knobs = KNOBS | {"max_running": 2}
    full = jkv.generate(model, PROMPTS[:2], **knobs)
    stop = int(full.tokens[0, 20])
    out = jkv.generate(model, PROMPTS[:2], **knobs | {"stop_ids": (stop,)})
    for i in range(2):
        hits = np.flatnonzero(full.tokens[i] == stop)
        length = hits[0] + 1 if len(hits) else 48
        assert out.lengths[i] == length
        assert out.finish_reason[i] == ("stop" if len(hits) else "length")
        np.testing.assert_array_equal(out.tokens[i, :length], full.tokens[i, :length])
        assert (out.tokens[i, length:] == 0).all()
        assert (out.logprobs[i, length:] == 0).all()


@pytest.mark.parametrize("chunk", [1, 16])
def test_the_token_that_ended_a_sample_is_in_neither_text_nor_events(lettered, chunk):
    whole = jkv.generate(lettered, "hello", **KNOBS)
    end = int(whole.tokens[0, 20])
    at = whole.tokens[0].tolist().index(end)
    parts = []
    knobs = KNOBS | {"stop_ids": (end,), "on_tokens": parts.append, "chunk": chunk}
    out = jkv.generate(lettered, "hello", **knobs)
    assert out.tokens[0].tolist() == whole.tokens[0, : at + 1].tolist()
    assert out.text[0] == "".join(event.text for event in parts) == whole.text[0][:at]
    assert [token for event in parts for token in event.tokens] == out.tokens[0].tolist()
    forced = jkv.generate(lettered, "hello", forced_tokens=[end], **KNOBS | {"stop_ids": (end,), "max_new_tokens": 1})
    assert forced.text[0] == Letters().decode([end])  # it ended nothing


def test_the_models_own_end_tokens_finish_as_stop(model):
    full = jkv.generate(model, PROMPTS[0], **KNOBS)
    end = int(full.tokens[0, 10])
    config = dataclasses.replace(model.config, end_ids=(end,))
    ending = jkv.Model(model.params.replace(config=config))
    knobs = KNOBS | {"stop_ids": None}
    out = jkv.generate(ending, PROMPTS[0], **knobs)
    assert out.finish_reason == ["stop"]
    assert out.tokens[0, -1] == end
    assert jkv.generate(ending, PROMPTS[0], **KNOBS).finish_reason == ["length"]  # stop_ids=() never stops


def test_a_stop_string_cuts_exactly_where_it_appears(lettered):
    knobs = KNOBS | {"sampling": jkv.Sampling(temperature=1.0, seed=3)}
    full = jkv.generate(lettered, "hello", **knobs)
    stop = full.text[0][20:22]
    cut = full.text[0].index(stop)
    out = jkv.generate(lettered, "hello", stop_strings=[stop], **knobs)
    assert out.text[0] == full.text[0][:cut]
    assert out.lengths[0] == cut + 2
    assert out.finish_reason == ["stop"]


def test_a_model_that_gives_nan_finishes_with_nan(model):
    overflowing = model.params.replace(final_norm=model.params.final_norm * jnp.float32(3e38))
    out = jkv.generate(overflowing, PROMPTS[0], **KNOBS)
    assert out.finish_reason == ["nan"]
    assert out.lengths[0] == 1


def test_bare_params_and_arrays_are_taken(model):
    out = jkv.generate(model.params, np.array(PROMPTS[1]), **KNOBS)
    np.testing.assert_array_equal(out.tokens, jkv.generate(model, [PROMPTS[1]], **KNOBS).tokens)


@pytest.mark.rounding
def test_a_long_prompt_is_prefilled_in_pieces_like_in_one(model, monkeypatch):
    prompt = np.random.default_rng(0).integers(0, 32, 70).tolist()
    whole = jkv.generate(model, prompt, **KNOBS)
    monkeypatch.setattr(chunk_inputs, "OF_CPU", chunk_inputs.PrefillPrograms((16,), 8))
    pieces = jkv.generate(model, prompt, policy=jkv.r_kv(budget=500, interval=16), **KNOBS)
    np.testing.assert_array_equal(whole.tokens, pieces.tokens)
    np.testing.assert_allclose(whole.logprobs, pieces.logprobs, atol=1e-4)


BAD_INPUT = {
    "no prompt": ({"prompt": []}, "at least one prompt"),
    "empty string": ({"prompt": ""}, "needs a model with a tokenizer|at least one token"),
    "empty prompt": ({"prompt": [[1, 2], []]}, "prompt 1 is empty"),
    "token out of range": ({"prompt": [1, 32]}, r"lie in \[0, 32\); prompt 0 holds 32"),
    "negative token": ({"prompt": [1, -1]}, "prompt 0 holds -1"),
    "fractional tokens": ({"prompt": [0.5, 1.5]}, "flat sequence of token ids"),
    "text without tokenizer": ({"prompt": "hello"}, "needs a model with a tokenizer"),
    "prompt beyond the limit": ({"prompt": [1] * 4096}, "must fit the model's 4096 positions; prompt 0 has 4096"),
    "completion beyond the limit": ({"prompt": [1] * 4000, "max_new_tokens": 100}, "max_new_tokens is 100"),
    "n below one": ({"n": 0}, "n must be at least 1; got 0"),
    "no new tokens": ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    "no rows": ({"max_running": 0}, "max_running must be at least 1"),
    "no page": ({"page_size": 0}, "page_size must be at least 1"),
    "policies of another number": ({"policy": [jkv.full()] * 2}, "got 2 for 1 prompts"),
    "a pool too small": ({"kv_memory": 1000}, "must hold the largest request: up to 51 slots = 13 pages of 4 in each of 4"),
    "stop id out of range": ({"stop_ids": (99,)}, r"stop_ids must be token ids in \[0, 32\)"),
    "no sequence": ({"prompt": 5}, "flat sequence of token ids; got 5"),
    "nothing": ({"prompt": None}, "flat sequence of token ids; got None"),
    "ragged": ({"prompt": [[[1], [2, 3]]]}, "flat sequence of token ids; prompt 0 is ragged"),
    "stop string without tokenizer": ({"stop_strings": ["x"]}, "stop_strings need a model with a tokenizer"),
}


@pytest.mark.parametrize(("changes", "words"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_is_refused_before_anything_compiles(model, changes, words):
    before = programs.decode_chunk.num_compiled(), programs.prefill_chunk.num_compiled()
    arguments = KNOBS | {"prompt": PROMPTS[0]} | changes
    with pytest.raises(ValueError, match=words):
        jkv.generate(model, arguments.pop("prompt"), **arguments)
    assert (programs.decode_chunk.num_compiled(), programs.prefill_chunk.num_compiled()) == before


def test_other_types_than_a_model_or_sampling_are_refused():
    with pytest.raises(ValueError, match=r"what jkv.load returns, or bare Params; got 'tiny-reasoner'. Write model = jkv.load"):
        check_model("tiny-reasoner")
    with pytest.raises(ValueError, match=r"sampling must be a jkv.Sampling, such as .*; got 0.7"):
        check_sampling(0.7)


def test_equal_prompts_compile_nothing_that_different_ones_did_not(model):
    a, b, c, d = ([i, 2, 3] for i in range(4))
    for sampling in (None, jkv.Sampling(seed=0)):
        jkv.generate(model, [a, b, c, d], sampling=sampling, policy=POLICY, max_running=4, **KNOBS)
    jkv.generate(model, [a, a, a, b], policy=POLICY, max_running=4, **KNOBS)  # forks, once
    before = [program.num_compiled() for program in (programs.decode_chunk, programs.prefill_chunk, programs.compact)]
    before += [programs.fork.num_compiled()]
    for prompts in ([a, a, b, c], [a, a, a, a], [a, a, b, b], [d, c, b, a]):
        jkv.generate(model, prompts, policy=POLICY, max_running=4, **KNOBS)
    after = [program.num_compiled() for program in (programs.decode_chunk, programs.prefill_chunk, programs.compact)]
    assert [*after, programs.fork.num_compiled()] == before


def test_a_policy_by_its_bare_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"made by a recipe such as .*known: ada_kv, ams, caote"):
        spread_policies("r_kv", 1)


def test_other_types_than_a_policy_count_or_list_of_ids_are_refused():
    with pytest.raises(ValueError, match=r"made by a recipe such as jkv.r_kv\(budget=256\).*got <function r_kv"):
        spread_policies(jkv.r_kv, 2)
    for value in (2.5, True, "3"):
        with pytest.raises(ValueError, match="n must be"):
            check_counts(n=value)
    check_counts(n=np.int64(3), max_new_tokens=None)
    for ids in (5, "5", [[5]], [1.5]):
        with pytest.raises(ValueError, match="stop_ids must be a list of token ids"):
            check_stop_ids(ids, 32)


def test_weights_with_nan_are_refused_by_name(model):
    layers = (model.params.layers[0].replace(up=model.params.layers[0].up.at[3, 4].set(jnp.nan)), model.params.layers[1])
    with pytest.raises(ValueError, match=r"params.layers\[0\].up holds NaN"):
        jkv.generate(model.params.replace(layers=layers), PROMPTS[0], **KNOBS)


def test_a_protected_prompt_longer_than_the_budget_is_refused(model):
    evict = dataclasses.replace(POLICY.evict, protect_prompt=True)
    with pytest.raises(ValueError, match="the 4 most recent slots; prompt 0 has 33 tokens, the budget is 24 slots"):
        jkv.generate(model, PROMPTS[2], policy=jkv.Policy("mine", evict, POLICY.schedule), **KNOBS)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"top_k": -2}, "top_k must be 0 or -1"),
        ({"min_p": 1.5}, r"min_p must lie in \[0, 1\], 0 keeps all tokens; got 1.5"),
        ({"seed": -1}, "seed must lie in"),
    ],
    ids=["temperature", "nan", "top_p", "top_k", "min_p", "seed"],
)
def test_sampling_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        jkv.Sampling(**settings)


def test_the_fields_of_a_sampling_may_be_given_by_themselves(model):
    model = dataclasses.replace(model, sampling=jkv.Sampling(temperature=0.5, top_k=5))
    given = {"max_new_tokens": 4, "progress": False}
    wanted = jkv.generate(model, PROMPTS[0], sampling=jkv.Sampling(temperature=2.0, top_k=5, seed=1), **given)
    assert jkv.generate(model, PROMPTS[0], temperature=2.0, seed=1, **given).tokens.tolist() == wanted.tokens.tolist()
    with pytest.raises(ValueError, match="sampling and its fields exclude each other; got both, with temperature"):
        jkv.generate(model, PROMPTS[0], sampling=jkv.Sampling(), temperature=1.0)


def test_a_cut_of_draws_is_no_choice_of_draws(model):
    greedy = dataclasses.replace(model, sampling=None)
    with pytest.raises(ValueError, match=r"top_p would cut draws, and this model is decoded greedily.*Give temperature too"):
        jkv.generate(greedy, PROMPTS[0], top_p=0.9)


def test_no_top_k_has_two_names():
    assert jkv.Sampling(top_k=-1) == jkv.Sampling(top_k=0)


def test_the_pool_that_generate_sizes_holds_the_pages_that_competing_heads_may_round_up_to(model):
    policy = jkv.ada_kv(budget=112, interval=16, floor=1.0)
    out = jkv.generate(model, list(range(1, 11)), policy=policy, max_new_tokens=54, stop_ids=(), progress=False)
    assert out.lengths.tolist() == [54]


def test_a_pool_larger_than_the_memory_is_cut_to_it(model, monkeypatch):
    """Fewer rows run at a time; a request that fits by itself is served."""
    monkeypatch.setattr(memory, "free_bytes", lambda device, share=0.5: 40 * memory.page_bytes(model.params, 4))
    out = jkv.generate(model, [[1, 2, 3], [4, 5, 6], [7, 8, 9]], **KNOBS | {"max_new_tokens": 20})
    assert out.stats.peak_kv_bytes <= 40 * memory.page_bytes(model.params, 4)
    assert out.lengths.tolist() == [20, 20, 20]


def test_a_model_in_float16_answers_as_in_float32_and_replays():
    prompt, policy = "b=3;c=7;d=b*c;?d", jkv.lag_kv(budget=64, interval=16)
    half, reasoner = jkv.load("tiny-reasoner", dtype="float16"), jkv.load("tiny-reasoner")
    out, whole = (jkv.generate(one, prompt, policy, return_trace=True, progress=False) for one in (half, reasoner))
    assert half.params.embedding.dtype == np.float16
    assert out.stats.peak_kv_bytes < 0.6 * whole.stats.peak_kv_bytes
    assert out.text == whole.text
    np.testing.assert_allclose(jkv.score(half, out, trace=out.trace).logprobs, out.logprobs, atol=1e-3)
