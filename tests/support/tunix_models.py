"""Small models of tunix and rollouts of them, for its tests; importing it skips a test file where tunix is not installed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv

pytest.importorskip("tunix")

import qwix
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common
from tunix.rl.rollout.base_rollout import RolloutConfig

from jkv.integrations.tunix import JkvRollout

SHAPE = {"num_layers": 2, "vocab_size": 32, "embed_dim": 32, "hidden_dim": 48, "num_heads": 4, "head_dim": 8}
SHAPE |= {"num_kv_heads": 2, "norm_eps": 1e-6}
KINDS = {
    "qwen2": lambda **settings: qwen2.Qwen2(qwen2.ModelConfig(**SHAPE | settings, use_tied_embedding=True), rngs=nnx.Rngs(0)),
    "qwen3": lambda **settings: qwen3.Qwen3(qwen3.ModelConfig(**SHAPE | settings), rngs=nnx.Rngs(0)),
    "llama3": lambda **settings: llama3.Llama3(llama3.ModelConfig(**SHAPE | settings), rngs=nnx.Rngs(0)),
}
PAD, EOS, LIMIT, WIDTH = 0, 1, 24, 12
TINY_CACHE = jkv.r_kv(budget=12, interval=8, window=4)
SETTINGS = {"page_size": 4, "max_running": 4}


class Letters:
    """A token is a letter; 0 pads and 1 ends."""

    def encode(self, text):
        return [ord(letter) - 95 for letter in text]

    def decode(self, ids):
        return "".join(chr(token + 95) for token in ids)

    def bos_id(self):
        return 0

    def eos_id(self):
        return EOS

    def pad_id(self):
        return PAD


class EndPads(Letters):
    """As many tokenizers come: the padding token ends texts."""

    def pad_id(self):
        return EOS


@pytest.fixture(autouse=True, scope="module")
def tunix_rules():
    """tunix mixes dtypes as JAX's own rules allow."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "strict")


def randomised(model, seed=0):
    """The model with random weights, biases and adapters too."""
    state = nnx.state(model)
    for i, (path, leaf) in enumerate(nnx.to_flat_state(state)):
        if isinstance(leaf, nnx.Param | nnx.LoRAParam):
            drawn = 0.3 * jax.random.normal(jax.random.key(seed + i), leaf.get_value().shape, leaf.get_value().dtype)
            leaf.set_value(drawn + 1 if "norm" in str(path) else drawn)
    nnx.update(model, state)
    return model


def make_model(kind="qwen2", lora=False, seed=0):
    theta = 10_000 if kind == "qwen2" else 1_000_000
    model = KINDS[kind](rope_theta=theta)
    if lora:
        provider = qwix.LoraProvider(module_path=".*(q_proj|v_proj|o_proj|gate_proj|down_proj|lm_head)", rank=3, alpha=4.5)
        model = qwix.apply_lora_to_model(model, provider, **model.get_model_input(), rngs=nnx.Rngs(1))
    return randomised(model, seed)


def dense_of(model, prompts, tokens, temperature=1.0):
    """tunix's own log-probabilities."""
    graphdef, state = nnx.split(model)
    arrays = {"prompt_tokens": jnp.asarray(prompts), "completion_tokens": jnp.asarray(tokens)}
    return common.compute_per_token_logps(graphdef, state, **arrays, pad_id=PAD, eos_id=EOS, temperature=temperature)


def padded(rows, width=LIMIT, fill=PAD):
    out = np.full((len(rows), width), fill, np.asarray(rows[0]).dtype)
    for row, values in zip(out, rows, strict=True):
        row[: len(values)] = values
    return out


def rollout_config(**changes):
    return RolloutConfig(max_tokens_to_generate=LIMIT, max_prompt_length=WIDTH, temperature=1.0, **changes)


def make_rollout(model, tokenizer=None, config=None, **settings):
    adapter = TokenizerAdapter(tokenizer or Letters())
    return JkvRollout(model, adapter, None, config or rollout_config(), **SETTINGS | settings)
