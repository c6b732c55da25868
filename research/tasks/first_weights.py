"""The weights with which training starts: fresh ones that lean towards look-ups, or those of a model with fewer tokens."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from jkv.checkpoints import loading as checkpoint
from jkv.model.params import LayerParams, ModelConfig, Params
from jkv.model.rotary import rotary_frequency
from jkv.model.weight_shapes import init_params
from research.tasks import trails, vocabulary


def extend(name: str, config: ModelConfig, tokenizer: Any, key: PRNGKeyArray) -> Params:
    """The weights of a shipped model or a checkpoint folder in float32, with more rows of the embedding for the tokens that it
    does not know; a model that knows all of them is taken as it is.

    A new row is random, as long as an old one is on average, but `x>` and `x+` start half-way to `x=`, which heads can look up,
    and `A>` half-way to `A`.

    Raises:
      ValueError: the model has another shape.
    """
    model = checkpoint.load(name, joined=False)
    old = model.params.embedding.astype(jnp.float32)
    is_alike = (model.config.width, model.config.num_layers) == (config.width, config.num_layers)
    if not is_alike or old.shape[0] > config.vocab_size:
        raise ValueError(
            f"{name} must have the width and layers of {config=}, and at most its tokens; it is {model.config}. "
            "Start from another."
        )
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model.params)
    if old.shape[0] == config.vocab_size:
        return params.replace(config=config)
    size = jnp.linalg.norm(old, axis=1).mean()
    fresh = jax.random.normal(key, (config.vocab_size - old.shape[0], config.width))
    fresh *= size / jnp.linalg.norm(fresh, axis=1, keepdims=True)
    embedding = jnp.concatenate([old, fresh])
    for pair in vocabulary.PAIRS:
        known, *new = tokenizer.convert_tokens_to_ids([pair, f"{pair[0]}>", f"{pair[0]}+"])
        new = jnp.asarray(new)
        embedding = embedding.at[new].set((embedding[known] + embedding[new]) * 2**-0.5)
    for name in trails.PASSES:
        known, new = tokenizer.convert_tokens_to_ids([name, f"{name}>"])
        embedding = embedding.at[new].set((embedding[known] + embedding[new]) * 2**-0.5)
    return params.replace(embedding=embedding, config=config)


def init_to_look_up(config: ModelConfig, tokenizer: Any, key: PRNGKeyArray) -> Params:
    """Fresh weights that already lean towards looking things up, which random ones take most of a short training to find.

    Queries and keys of a group start equal, so that equal content attends to itself, and outputs start as transposed values,
    so that a head copies what it reads (mimetic initialisation, arXiv 2305.09828). In the first layer, query and key biases of
    heads 0, 2 and 3 differ by a rotation of one, two and three positions on the fastest channels: they start as heads that
    read the last three tokens. The tokens `x=`, and `x+` and `x>` if there are, start half-way to their letter's embedding.
    """
    params = init_params(config, key, scale=config.width**-0.5 / 2)
    embedding = params.embedding
    known = tokenizer.get_vocab()
    for token in (f"{name}{sign}" for name in (*vocabulary.LETTERS, *trails.PASSES) for sign in "=+>"):
        if token in known:
            ids = jnp.asarray([known[token], known[token[0]]])
            embedding = embedding.at[ids[0]].set(embedding[ids].sum(axis=0) * 2**-0.5)
    group, size = config.group_size, config.head_size

    def lean(weights: LayerParams) -> LayerParams:
        keys = weights.key.reshape(config.width, config.num_kv_heads, size)
        values = weights.value.reshape(config.width, config.num_kv_heads, size)
        query = jnp.repeat(keys, group, axis=1).reshape(weights.query.shape)
        out = 0.5 * jnp.repeat(values, group, axis=1).reshape(config.width, -1).T
        return weights.replace(query=0.5 * (weights.query + query) * 2**0.5, out=0.5 * weights.out + out)

    first, *others = (lean(weights) for weights in params.layers)
    fast = 3.8 * (jnp.arange(size // 2) < 8)  # channel pairs whose angle grows fast enough to separate neighbours
    angle = rotary_frequency(config)
    key_bias = jnp.concatenate([fast, jnp.zeros_like(fast)])
    fresh = params.layers[0]  # heads 2 and 3 do not copy as head 0 does, or what they read would blur what it reads
    first = first.replace(out=first.out.at[2 * size :].set(fresh.out[2 * size :] * 0.3))
    first = first.replace(key_bias=jnp.tile(key_bias, config.num_kv_heads))
    for head, back in ((0, 1), (2, 2), (3, 3)):
        span = slice(head * size, (head + 1) * size)
        bias = jnp.concatenate([fast * jnp.cos(back * angle), -fast * jnp.sin(back * angle)])
        first = first.replace(query=first.query.at[:, span].multiply(0.1), query_bias=first.query_bias.at[span].set(bias))
    return params.replace(embedding=embedding, layers=(first, *others))
