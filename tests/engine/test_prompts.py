"""Prompts: conversations through the chat template, bare texts, and what is refused."""

import dataclasses
import json
import shutil
import warnings

import numpy as np
import pytest
import transformers
from tokenizers import processors

import jkv
from jkv.checkpoints import adapters
from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints.family import GENERATION, PENALTIES, SAMPLING, UNUSED, UNUSED_CUTS
from jkv.engine import memory
from jkv.engine.prompts import encode_prompts, warn_of_bare_text
from jkv.engine.requests import RequestOptions, make_requests
from jkv.engine.results import split_text
from jkv.reasoning.marks import TAGS
from research.tasks import vocabulary

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}={{ m.content }};{% endfor %}{% if add_generation_prompt %}?a{% endif %}"
TURNS = [{"role": "user", "content": "b=3"}, {"role": "assistant", "content": "7"}, {"role": "user", "content": "c=5"}]


@pytest.fixture(scope="module")
def chat(model):
    """A chat model: its tokens are those of the small tasks."""
    tokenizer = vocabulary.make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    config = dataclasses.replace(jkv.testing.TINY, vocab_size=len(tokenizer))
    return dataclasses.replace(jkv.testing.tiny_model(config=config), tokenizer=tokenizer, name="chatty")


def test_a_conversation_is_the_text_of_the_template(chat):
    expected = chat.tokenizer.apply_chat_template(TURNS, add_generation_prompt=True)["input_ids"]
    (one,) = encode_prompts(chat, TURNS)
    assert one.tolist() == expected
    several = encode_prompts(chat, [TURNS, [1, 2, 3], TURNS[:1]])
    assert [ids.tolist() for ids in several[:2]] == [expected, [1, 2, 3]]
    assert several[2].tolist() == chat.tokenizer.apply_chat_template(TURNS[:1], add_generation_prompt=True)["input_ids"]


def test_generate_engine_and_rollout_take_a_conversation(chat):
    settings = {"max_new_tokens": 5, "stop_ids": ()}
    text = chat.tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, tokenize=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = jkv.generate(chat, text, progress=False, **settings).tokens
    np.testing.assert_array_equal(jkv.generate(chat, TURNS, progress=False, **settings).tokens, expected)
    engine = jkv.Engine(chat, max_slots=64)
    ticket = engine.submit(TURNS, **settings)
    engine.run()
    np.testing.assert_array_equal(engine.result(ticket).tokens, expected)
    rollout = jkv.Rollout(chat, max_new_tokens=5)
    out = rollout([TURNS, TURNS], stop_ids=(), sampling=jkv.Sampling(temperature=0.0), progress=False)
    np.testing.assert_array_equal(out.tokens, np.repeat(expected, 2, axis=0))


def test_a_message_makes_no_control_tokens_unless_it_may(chat):
    end = chat.tokenizer.eos_token_id
    forged = [{"role": "user", "content": f"b=3{chat.tokenizer.eos_token}c=5"}]
    settings = {"max_new_tokens": 1, "stop_ids": ()}
    engine, rollout = jkv.Engine(chat, max_slots=64), jkv.Rollout(chat, max_new_tokens=5)
    for options, count in (({}, 0), ({"parse_special": True}, 1)):
        out = jkv.generate(chat, forged, progress=False, **settings, **options)
        ticket = engine.submit(forged, **settings, **options)
        engine.run()
        rolled = rollout([forged], progress=False, **settings, **options)
        for prompt in (out.prompts[0], engine.result(ticket).prompts[0], rolled.prompts[0]):
            assert prompt.tolist().count(end) == count
    with pytest.raises(ValueError, match="parse_special must be True or False"):
        jkv.generate(chat, forged, progress=False, parse_special="yes")


def test_a_bare_text_warns_once_and_a_rendered_one_does_not(chat):
    warn_of_bare_text.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode_prompts(chat, [TURNS, f"a=1;{chat.tokenizer.eos_token}"])
        encode_prompts(jkv.testing.tiny_model(tokenizer=jkv.testing.TinyTokenizer()), "AB")
    with pytest.warns(UserWarning, match="chatty is a chat model.*pass messages") as told:
        encode_prompts(chat, ["a=1", "b=2"])
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode_prompts(chat, "c=3")


MESSAGE = {"role": "user", "content": "b=3"}


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([{"content": "b=3"}], "message 0 of prompt 0 has no role"),
        ([MESSAGE, {"role": "user"}], "message 1 of prompt 0 has no content"),
        ([{"role": "user", "content": None}], "message 0 of prompt 0 has the content None"),
        ([{"role": 3, "content": "b=3"}], "has the role 3"),
        ([{"role": "user", "content": [{"type": "image"}]}], "has the content"),
        ([MESSAGE, "b=3"], "message 1 of prompt 0 is 'b=3'"),
        ([[MESSAGE], [{"role": "user"}]], "message 0 of prompt 1 has no content"),
        ([MESSAGE | {"tools": [1]}], "fields of a message must be texts"),
        (MESSAGE, "a list of chat messages"),
        ([{"role": "user", "content": "b" * 10**6}], "must fit the model's"),
        ([MESSAGE] * 10_001, "10,000"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_conversation_that_is_none_is_refused(chat, prompt, words):
    with pytest.raises(ValueError, match=words):
        jkv.generate(chat, prompt, progress=False)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "line 1"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}", "more than"),
    ],
    ids=["raises", "calls out", "loops"],
)
def test_a_template_that_fails_is_an_error_of_its_line(chat, template, words):
    tokenizer = vocabulary.make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=words):
        jkv.generate(dataclasses.replace(chat, tokenizer=tokenizer), TURNS, progress=False)


def test_a_model_without_a_template_takes_no_messages(model):
    with pytest.raises(ValueError, match="need a tokenizer with a chat template"):
        jkv.generate(model, TURNS, progress=False)


# Defaults of the model.


@pytest.fixture(scope="module")
def reasoner():
    return jkv.load("tiny-reasoner")


@pytest.fixture
def folder(tmp_path):
    """A copy of tiny-reasoner's folder."""
    return shutil.copytree(checkpoint.find_folder("tiny-reasoner"), tmp_path / "copy")


def with_generation(folder, **fields):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]} | fields))
    return jkv.load(folder)


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({}, None),
        ({"do_sample": False, "temperature": 0.6}, None),
        ({"do_sample": True, "temperature": 0}, None),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95}, jkv.Sampling(0.6, 0.95)),
        ({"do_sample": True, "top_k": 20, "min_p": 0.05}, jkv.Sampling(1.0, 1.0, 20, 0.05)),
        ({"do_sample": True, "top_k": -1}, jkv.Sampling()),
        ({"do_sample": True, "repetition_penalty": 1.05}, jkv.Sampling(repetition_penalty=1.05)),
        ({"repetition_penalty": 1.1, "temperature": 0.6}, jkv.Sampling(temperature=0.0, repetition_penalty=1.1)),
        ({"repetition_penalty": 1.0}, None),
        ({"repetition_penalty": None, "do_sample": True}, jkv.Sampling()),
        ({"do_sample": False, "top_k": 20.0, "temperature": -1}, None),  # not used
    ],
    ids=str,
)
def test_sampling_is_what_the_models_makers_say(folder, fields, sampling):
    model = with_generation(folder, **fields)
    assert model.sampling == sampling
    prompts = encode_prompts(model, "b=3;?b")
    drawn = make_requests(model, prompts, RequestOptions())[0][0].sampling
    assert drawn == (sampling or jkv.Sampling(temperature=0.0))
    own = jkv.Sampling(temperature=0.9, seed=3)
    assert make_requests(model, prompts, RequestOptions(sampling=own))[0][0].sampling == own


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": -1, "do_sample": True}, "temperature"),
        ({"temperature": 1e-9, "do_sample": True}, "temperature must be"),
        ({"top_p": 2, "do_sample": True}, "top_p"),
        ({"top_k": 1.5, "do_sample": True}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": "much", "do_sample": True}, "repetition_penalty"),
        ({"do_sample": "yes"}, "do_sample"),
    ],
    ids=str,
)
def test_a_bad_generation_config_names_file_and_field(folder, fields, words):
    with pytest.raises(ValueError, match=f"generation_config.json.*{words}"):
        with_generation(folder, **fields)


SET = {  # a value of each setting that changes draws
    "suppress_tokens": [1],
    "begin_suppress_tokens": [1, 2],
    "bad_words_ids": [[1]],
    "force_words_ids": [[1]],
    "constraints": [{}],
    "sequence_bias": [[[1], -1.0]],
    "no_repeat_ngram_size": 3,
    "encoder_no_repeat_ngram_size": 3,
    "encoder_repetition_penalty": 1.2,
    "presence_penalty": 1.5,
    "frequency_penalty": 0.1,
    "min_length": 8,
    "min_new_tokens": 8,
    "exponential_decay_length_penalty": [5, 1.5],
    "forced_bos_token_id": 0,
    "forced_eos_token_id": [1],
    "stop_strings": ["end"],
    "max_time": 2.5,
    "num_beams": 4,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "penalty_alpha": 0.6,
    "guidance_scale": 1.5,
    "dola_layers": "high",
    "watermarking_config": {"bias": 2.5},
    "token_healing": True,
}
CUTS = {"typical_p": 0.9, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "top_h": 0.4}


def test_generation_settings_that_cannot_be_applied_are_warned_of_by_name(folder):
    assert (set(SET), set(CUTS)) == (set(UNUSED), set(UNUSED_CUTS))
    for name, value in SET.items():
        with pytest.warns(UserWarning, match=rf"generation_config\.json: {name} would change what is drawn"):
            with_generation(folder, **{name: value})
    with pytest.warns(UserWarning, match=f"{', '.join(SET)} would change what is drawn, and jkv cannot apply them"):
        with_generation(folder, **SET)
    with pytest.warns(UserWarning, match=f"{', '.join(CUTS)} would change"):
        with_generation(folder, **CUTS, do_sample=True)
    harmless = UNUSED | UNUSED_CUTS | dict.fromkeys(("renormalize_logits", "use_cache"), True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_generation(folder)
        with_generation(folder, **harmless, do_sample=True)
        with_generation(folder, **dict.fromkeys(harmless), do_sample=True)
        with_generation(folder, **CUTS)  # which greedy decoding does not read
        with_generation(folder, temperature=0.6, top_p=0.95, do_sample=False)
        with_generation(folder, temperature=1.0, top_p=1.0, top_k=0)
        with_generation(folder, max_new_tokens=2048, max_length=4096, pad_token_id=0, transformers_version="4.57.1")


def test_settings_for_draws_without_do_sample_are_warned_of(folder):
    with pytest.warns(UserWarning, match=r"temperature, top_p would change .* do_sample is missing, so decoding is greedy"):
        assert with_generation(folder, temperature=0.6, top_p=0.95).sampling is None


def test_every_setting_of_transformers_is_used_or_warned_of_or_known_to_change_no_draw():
    known = {*UNUSED, *UNUSED_CUTS, *SAMPLING, *PENALTIES, *GENERATION}
    limits = {"max_length", "max_new_tokens", "max_cache_len", "num_return_sequences"}
    beams = {"length_penalty", "early_stopping", "low_memory", "renormalize_logits", "remove_invalid_values"}
    tokens = {"pad_token_id", "bos_token_id", "decoder_start_token_id"}
    speed = {"use_cache", "cache_implementation", "cache_config", "compile_config", "disable_compile", "prefill_chunk_size"}
    speed |= {"use_mtp", "speculation_type", "continuous_batching_config", "target_lookbehind", "prompt_lookup_num_tokens"}
    speed |= {"max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule"}
    outputs = {"return_dict_in_generate", "transformers_version"}
    fields = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    others = {name for name in fields if name.startswith(("output_", "assistant_", "is_assistant"))}
    assert fields - known - limits - beams - tokens - speed - outputs - others == set()


def test_an_older_folder_has_its_sampling_in_config_json(folder):
    (folder / "generation_config.json").unlink(missing_ok=True)
    fields = json.loads((folder / "config.json").read_text())
    more = {"do_sample": True, "temperature": 0.6, "no_repeat_ngram_size": 4}
    (folder / "config.json").write_text(json.dumps(fields | more))
    with pytest.warns(UserWarning, match=r"/config\.json: no_repeat_ngram_size would change"):
        assert jkv.load(folder).sampling == jkv.Sampling(temperature=0.6)
    assert with_generation(folder).sampling is None


@pytest.mark.tested("adapter", golden="*", shows="refused")
def test_an_adapter_that_is_not_applied_is_named(folder):
    for name in (adapters.CONFIG, adapters.TENSORS):
        (folder / name).write_text("{}")
        with pytest.warns(UserWarning, match=f"{name}: the adapter is not applied"):
            jkv.load(folder)
        (folder / name).unlink()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"must contain a full checkpoint, got the adapter adapter_config\.json alone"):
        jkv.load(folder)


def test_a_rendered_text_has_one_bos(chat):
    tokenizer = vocabulary.make_tokenizer()
    tokenizer.bos_token, tokenizer.chat_template = "?", "{{ bos_token }}" + TEMPLATE
    tokenizer.add_bos_token = True
    framed, begin = dataclasses.replace(chat, tokenizer=tokenizer), tokenizer.bos_token_id
    text = tokenizer.apply_chat_template(TURNS, tokenize=False)
    rendered, messages = encode_prompts(framed, [text, TURNS])
    assert text.startswith("?")
    assert rendered.tolist() == [begin, *tokenizer.encode(text[1:], add_special_tokens=False)]
    assert messages.tolist()[: len(rendered)] == rendered.tolist()
    (bare,) = encode_prompts(framed, "b=3")
    assert bare.tolist() == tokenizer.encode("b=3")
    assert bare[0] == begin


def test_a_rendered_text_has_the_tokens_before_it_once_whatever_they_are(chat):
    tokenizer = vocabulary.make_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(["?", "="])
    special = [("?", ids[0]), ("=", ids[1])]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="? = $A", special_tokens=special)
    prompts = encode_prompts(dataclasses.replace(chat, tokenizer=tokenizer), ["?=b=3", "b=3"])
    assert [prompt.tolist() for prompt in prompts] == [tokenizer.encode("b=3")] * 2
    assert prompts[0].tolist() == [*ids, *tokenizer.encode("b=3", add_special_tokens=False)]


def limit_of(model, **settings):
    engine = jkv.Engine(model, **settings)
    return engine.tickets[engine.submit([1, 2, 3], settings["policies"][0])][0].request.max_new_tokens


@pytest.mark.parametrize(
    "policy", [jkv.full(), jkv.r_kv(budget=16, interval=8, window=4), jkv.rpc(ratio=4, interval=64)], ids=str
)
def test_without_a_limit_a_completion_may_fill_positions_and_pool(model, policy):
    positions = model.config.max_positions
    assert limit_of(model, policies=[policy], max_slots=positions + 64, page_size=4) == positions - 3
    few = {"policies": [policy], "max_slots": 128, "page_size": 4, "num_pages": 96, "max_running": 1}
    found = limit_of(model, **few)
    assert found == positions - 3 if policy.is_bounded else found < positions - 3
    engine = jkv.Engine(model, **few)
    engine.submit([1, 2, 3], policy, max_new_tokens=found)
    if not policy.is_bounded:
        with pytest.raises(ValueError, match=r"max_slots|The pool must hold"):
            engine.submit([1, 2, 3], policy, max_new_tokens=found + 1)


def test_without_a_limit_generate_takes_no_more_memory_than_is_free(model, monkeypatch):
    bytes_of_row = memory.page_bytes(model.params, 4) * memory.num_row_pages(model.params, 40, 4)
    monkeypatch.setattr("jkv.engine.sizing.free_pool_bytes", lambda *args: bytes_of_row)
    out = jkv.generate(model, [1, 2, 3], stop_ids=(), page_size=4, progress=False)
    slots = 4 * memory.coarse(memory.num_row_pages(model.params, 40, 4)) // memory.num_layer_heads(model.params)
    assert 3 < slots <= 40  # in whole pages, and a number of pages that changes little with the free memory
    assert out.lengths.tolist() == [slots - 3]


def test_host_memory_is_what_linux_calls_available_or_what_the_caller_says(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable:   12 kB\n")
    monkeypatch.setattr(memory, "MEMORY", tmp_path / "meminfo")
    monkeypatch.delenv(memory.HOST_MEMORY, raising=False)
    assert memory.free_host_bytes() == 12 * 1024
    monkeypatch.setenv(memory.HOST_MEMORY, "16e9")
    assert memory.free_host_bytes() == 16_000_000_000
    for given in ("much", "-1", "inf"):
        monkeypatch.setenv(memory.HOST_MEMORY, given)
        with pytest.raises(ValueError, match=f"JKV_HOST_MEMORY must be a number of bytes, such as 16e9; got '{given}'"):
            memory.free_host_bytes()


def test_a_warning_tells_that_most_samples_were_cut(reasoner):
    settings = {"n": 3, "sampling": jkv.Sampling(seed=0), "progress": False}
    with pytest.warns(UserWarning, match=r"cut by the default limit.*Give max_new_tokens"):
        jkv.generate(reasoner, "b=3;c=7;d=b*c;?d", max_slots=16, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jkv.generate(reasoner, "b=3;c=7;d=b*c;?d", max_new_tokens=4, **settings)  # as it was asked
        jkv.generate(reasoner, "b=3;?b", **settings)


def test_characters_without_a_token_are_named(reasoner):
    with pytest.warns(UserWarning, match=r"tiny-reasoner has no tokens for 'W!' of prompt 1, and reads <\|unknown\|> for each"):
        encode_prompts(reasoner, ["b=3;?b", "What!"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode_prompts(reasoner, "b=3;?b")


# Reasoning and answer.


@pytest.mark.parametrize(
    ("text", "thinks", "expected"),
    [
        ("<think>\nyes\n</think>\n\nNo.", False, ("yes", "No.")),
        ("yes</think>No.", True, ("yes", "No.")),
        ("yes", True, ("yes", "")),
        ("<think>yes", False, ("yes", "")),
        ("No.", False, ("", "No.")),
        ("a</think>b</think>c", True, ("a", "b</think>c")),
        ("so <think>a</think>b", False, ("so <think>a", "b")),
        ("", False, ("", "")),
        ("The answer is 4.", False, ("", "The answer is 4.")),
    ],
)
def test_reasoning_ends_where_the_model_says_so(text, thinks, expected):
    assert split_text(text, thinks, TAGS) == expected


def test_a_result_has_reasoning_and_answer(reasoner):
    out = jkv.generate(reasoner, "b=3;c=7;d=b*c;?d", progress=False)
    assert "boxed" in out.answer[0]
    assert out.reasoning[0].startswith("b=3")
    assert "think>" not in out.reasoning[0] + out.answer[0]
    other = out.split(begin="<think>", end="\\boxed")
    assert other[0][1].startswith("{")
    with pytest.raises(ValueError, match="marks must be texts"):
        out.split(end="")


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("<think>", [("A", "B")]),  # the prompt begins the thinking
        ("<think>A</think>", [("A", "B")]),  # and ends it: only the text's own mark counts
    ],
)
def test_a_prompt_may_begin_the_thinking_and_end_it(prompt, parts):
    tokenizer = jkv.testing.TinyTokenizer()
    model = jkv.testing.tiny_model(tokenizer=tokenizer)
    out = jkv.generate(model, prompt, max_new_tokens=3, stop_ids=(), progress=False)
    assert dataclasses.replace(out, text=["A</think>B"]).split() == parts
    whole = dataclasses.replace(out, text=["A"]).split()
    assert whole == ([("A", "")] if prompt.endswith("<think>") else [("", "A")])


def test_the_number_of_pages_changes_little_with_the_free_memory(model, monkeypatch):
    """The pool is a compiled shape: with every page that happens to be free, each call would compile again."""
    made = set()
    for free in (10_000_000, 10_100_000, 9_900_000, 10_050_000):
        monkeypatch.setattr(memory, "free_bytes", lambda device, share=None, free=free: free)
        made.add(memory.cap_to_free(model.params, 10**9, 1088))
    assert len(made) == 1
    assert made.pop() * 1088 <= 9_900_000
    assert memory.cap_to_free(model.params, 7, 1088) == 7  # as many as were asked for, where they fit
