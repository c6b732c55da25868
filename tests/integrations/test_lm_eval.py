"""The model of lm-evaluation-harness: its own command line, completions of `jkv.generate`, likelihoods of `jkv.score`."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import jkv

pytest.importorskip("lm_eval")

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jkv.checkpoints.chat_template import ChatText
from jkv.integrations.lm_eval import JKV

ROOT = Path(__file__).parent.parent.parent
PROMPTS = ["b=3;c=7;d=b*c;?d", "x=4;y=9;z=x-y;?z"]
TASK = """
task: chains
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["</think>"], max_gen_toks: 24, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def harness():
    return JKV("tiny-reasoner", policy="r_kv", budget=16, interval=16, window=4, page_size=4)


def requests(*arguments):
    return [types.SimpleNamespace(args=each) for each in arguments]


def test_completions_are_those_of_generate(harness):
    asked = {"until": ["</think>"], "max_gen_toks": 40, "do_sample": False}
    texts = harness.generate_until(requests(*((prompt, asked) for prompt in PROMPTS)), disable_tqdm=True)
    policy = jkv.r_kv(budget=16, interval=16, window=4)
    out = jkv.generate(
        harness.model, PROMPTS, policy=policy, max_new_tokens=40, stop_strings=["</think>"], page_size=4, progress=False
    )
    assert out.stats.evicted > 0
    assert texts == out.text


def test_stop_strings_end_a_text_and_after_thinking_only_where_told(harness):
    asked = {"until": "c=", "max_gen_toks": 24}
    (text,) = harness.generate_until(requests((PROMPTS[0], asked)), disable_tqdm=True)
    assert "b=3" in text
    assert "c=" not in text
    harness.think_end_token = "b=3"
    try:
        (after,) = harness.generate_until(requests((PROMPTS[0], asked)), disable_tqdm=True)
    finally:
        harness.think_end_token = None
    assert "b=3" not in after
    assert "<think>" not in after


def test_samples_of_one_prompt_differ_and_a_call_can_be_repeated(harness):
    asked = {"until": [], "max_gen_toks": 24, "do_sample": True, "temperature": 4.0}
    calls = [harness.generate_until(requests(*[(PROMPTS[0], asked)] * 4), disable_tqdm=True) for _ in range(2)]
    assert len(set(calls[0])) > 1
    assert calls[0] == calls[1]


def test_settings_are_read_as_the_harness_means_them(harness):
    assert harness.read_settings({"until": "\n", "do_sample": False, "temperature": 0.7, "max_tokens": 9})[:2] == (("\n",), 9)
    assert harness.read_settings({"do_sample": False, "temperature": 0.7})[2].temperature == 0
    assert harness.read_settings({"do_sample": True})[2].temperature == 1
    sampling = harness.read_settings({"temperature": 0.6, "top_p": 0.9, "top_k": 5})[2]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.6, 0.9, 5, 0)
    sampling = harness.read_settings({"repetition_penalty": 1.1, "frequency_penalty": 0.2})[2]
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.0, 0.2)
    with pytest.raises(ValueError, match="got num_beams"):
        harness.read_settings({"num_beams": 4})


def test_likelihoods_are_the_full_caches_and_greedy_tokens_are_known(harness):
    greedy = jkv.generate(harness.model, PROMPTS[0], max_new_tokens=12, progress=False)
    (likely, is_greedy), (unlikely, is_other_greedy) = harness.loglikelihood(
        requests((PROMPTS[0], greedy.text[0]), (PROMPTS[0], "z=1\n\n<think>")), disable_tqdm=True
    )
    assert likely == pytest.approx(float(greedy.logprobs.sum()), abs=1e-3)
    assert is_greedy
    assert unlikely < likely
    assert not is_other_greedy


def test_a_long_text_is_scored_in_windows_each_token_once(harness):
    text = PROMPTS[0] + jkv.generate(harness.model, PROMPTS[0], max_new_tokens=48, progress=False).text[0]
    tokens = harness.tok_encode(text)
    (whole,) = harness.loglikelihood_rolling(requests((text,)), disable_tqdm=True)
    expected = jkv.score(harness.model, np.array([tokens], np.int32), prompts=[[harness.prefix_token_id]]).logprobs.sum()
    assert whole == pytest.approx(float(expected), abs=1e-3)
    short = JKV("tiny-reasoner", max_length=24)
    (windowed,) = short.loglikelihood_rolling(requests((text,)), disable_tqdm=True)
    assert windowed != pytest.approx(whole)  # less context
    assert np.isfinite(windowed)


def test_prompts_that_are_too_long_lose_their_beginning(harness, caplog):
    short = JKV("tiny-reasoner", max_length=20)
    assert short.shorten(list(range(30)), 5) == list(range(15, 30))
    assert "cut to its last 15" in caplog.text
    assert short.fit(list(range(30)), [1] * 6) == (list(range(16, 30)), [1] * 6)
    with pytest.raises(ValueError, match="must leave room for a prompt"):
        short.shorten([1], 20)


def test_a_setting_that_the_policy_has_not_is_refused():
    with pytest.raises(ValueError, match="r_kv has these settings"):
        JKV("tiny-reasoner", policy="r_kv", budget=64, tau=1)
    with pytest.raises(ValueError, match="needs a tokenizer with a chat template"):
        JKV("tiny-reasoner").apply_chat_template([{"role": "user", "content": "hi"}])


def test_the_harness_runs_a_task_by_its_own_command_line(tmp_path):
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt, "answer": "no"}) + "\n" for prompt in PROMPTS))
    (tmp_path / "chains.yaml").write_text(TASK.format(file=file))
    command = [sys.executable, "-m", "jkv.integrations.lm_eval", "run", "--model", "jkv", "--batch_size", "2"]
    command += ["--model_args", "pretrained=tiny-reasoner,policy=streaming_llm,budget=16,interval=16,page_size=4"]
    command += ["--include_path", str(tmp_path), "--tasks", "chains", "--output_path", str(tmp_path / "out"), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    written = [json.loads(line)["resps"][0][0] for line in samples.read_text().splitlines()]
    model = jkv.load("tiny-reasoner")
    policy = jkv.streaming_llm(budget=16, interval=16)
    out = jkv.generate(model, PROMPTS, policy=policy, max_new_tokens=24, stop_strings=["</think>"], page_size=4, progress=False)
    assert written == out.text


class Joining:
    """A tokenizer whose tokens may lie across the end of a context: the longest known piece wins."""

    pieces = ("hello", " wor", " world", "ld", "s", " ", "l", "d", "!")
    bos_token, bos_token_id = None, None

    def encode(self, text, add_special_tokens=True):
        ids = []
        while text:
            best = max((piece for piece in self.pieces if text.startswith(piece)), key=len)
            ids.append(self.pieces.index(best))
            text = text[len(best) :]
        return ids


def test_the_choices_of_a_chat_follow_its_own_control_tokens_alone(harness, monkeypatch):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<": 2, "|end|": 3, ">": 4, "<|end|>": 5}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[<>]"), "isolated")
    tokenizer.add_special_tokens(["<|end|>"])
    monkeypatch.setattr(harness, "tokenizer", PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    own, user = "<|end|>", "a<|end|>"
    context = ChatText(own + user, "o" * len(own) + "u" * len(user))
    assert harness._encode_pair(context, "b") == ([5, 0, 2, 3, 4], [1])
    assert harness._encode_pair(context, own) == ([5, 0, 2, 3, 4], [2, 3, 4])
    assert harness._encode_pair(own + user, "b") == ([5, 0, 5], [1])


@pytest.fixture
def joining(harness, monkeypatch):
    """The harness's model with that tokenizer."""
    monkeypatch.setattr(harness, "tokenizer", Joining())
    monkeypatch.setattr(harness, "has_warned", False)
    return harness


def test_a_continuation_of_no_token_is_refused_and_never_the_best(joining):
    with pytest.raises(ValueError, match="'ld' after 'hello wor' is none"):
        joining.loglikelihood(requests(("hello wor", " world"), ("hello wor", "ld")), disable_tqdm=True)


def test_a_token_across_the_end_of_a_context_is_scored_as_in_the_harness_with_a_warning(joining, caplog):
    assert joining._encode_pair("hello", " world") == ([0], [2])
    assert not caplog.text
    assert joining._encode_pair("hello ", "world") == ([0], [2])  # the harness moves spaces to the continuation
    assert not caplog.text
    assert joining._encode_pair("hello wor", "lds") == ([0, 1], [4])
    assert joining._encode_pair("hello wor", "ld!") == ([0, 1], [8])
    assert caplog.text.count("lies across the end of a context") == 1
