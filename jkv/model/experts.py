"""The feed-forward block of a mixture of experts: each token goes through the few blocks that a router chooses for it.

One function, `mixture`, and four ways to compute it, by the number of tokens and the platform. All give each token the same
numbers but for rounding, and in none of them does a token depend on the others.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jkv.model.params import Experts, LowRank, ModelConfig

FEW = 512  # tokens, as of a decode step, whose products with all experts take about as long as reading these
BLOCK = 2048  # tokens whose values in all experts are held at once
BY_ROWS = jax.lax.RaggedDotDimensionNumbers(  # [m, D] with [X, F, D], by their last axes
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def mixture(config: ModelConfig, weights: Experts, normed: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The weighted sum of each token's experts, as in Qwen3 (arXiv 2505.09388) and its code in transformers.

    Deviation: the router's logits, the weights and the sum are float32 in every dtype.

    Raises:
      ValueError: a low-rank adapter.
    """
    found = [name for name, weight in vars(weights).items() if isinstance(weight, LowRank)]
    if found:
        raise ValueError(f"Experts take no low-rank adapter; got one on {', '.join(found)}. Adapt the attention, or merge it.")
    token = normed.reshape(-1, config.width)
    share, expert = route(config, weights.router, token)
    if takes_few(config, len(token)):
        mixed = by_token(token, share, expert, weights)
    elif len(token) <= FEW:
        mixed = by_all(token, share, expert, weights)
    else:
        mixed = jax.lax.platform_dependent(token, share, expert, weights, tpu=by_expert, default=in_blocks)
    return mixed.astype(normed.dtype).reshape(normed.shape)


def takes_few(config: ModelConfig, num_tokens: int) -> bool:
    """Whether copies of the tokens' experts, which are written and read again, take less than reading all experts once."""
    return 3 * num_tokens * config.num_active_experts <= config.num_experts


def route(
    config: ModelConfig, router: Float[Array, "D X"], token: Float[Array, "n D"]
) -> tuple[Float[Array, "n A"], Int[Array, "n A"]]:
    """The weights of each token's A experts in the sum, and these experts: of equal logits the first."""
    logits = jnp.matmul(token, router, preferred_element_type=jnp.float32)
    share, expert = jax.lax.top_k(jax.nn.softmax(logits), config.num_active_experts)
    return share / share.sum(axis=-1, keepdims=True) if config.normalises_experts else share, expert


def by_token(
    token: Float[Array, "n D"], share: Float[Array, "n A"], expert: Int[Array, "n A"], weights: Experts
) -> Float[Array, "n D"]:
    """For few tokens: gathers the matrices of the chosen experts."""
    gate, up, down = (matrices[expert] for matrices in (weights.gate, weights.up, weights.down))
    inner = jax.nn.silu(jnp.einsum("nd,nafd->naf", token, gate)) * jnp.einsum("nd,nafd->naf", token, up)
    return jnp.einsum("naf,nafd->nd", scaled(inner, share), down, preferred_element_type=jnp.float32)


def by_all(
    token: Float[Array, "n D"], share: Float[Array, "n A"], expert: Int[Array, "n A"], weights: Experts
) -> Float[Array, "n D"]:
    """For tokens that together need most experts: products of all tokens with all experts, which read the matrices once.

    That is X / A times the arithmetic that is needed. On a GPU, XLA computes `jax.lax.ragged_dot` with X times of it.
    """
    row = jnp.arange(len(token), dtype=jnp.int32)[:, None]
    of_all = jnp.zeros((len(token), len(weights.gate)), share.dtype).at[row, expert].set(share)
    inner = jax.nn.silu(jnp.einsum("nd,xfd->nxf", token, weights.gate)) * jnp.einsum("nd,xfd->nxf", token, weights.up)
    return jnp.einsum("nxf,xfd->nd", scaled(inner, of_all), weights.down, preferred_element_type=jnp.float32)


def in_blocks(
    token: Float[Array, "n D"], share: Float[Array, "n A"], expert: Int[Array, "n A"], weights: Experts
) -> Float[Array, "n D"]:
    """`by_all` for one block of tokens after another."""
    if len(token) <= BLOCK:
        return by_all(token, share, expert, weights)
    short = -len(token) % BLOCK
    blocks = [jnp.pad(x, ((0, short), (0, 0))).reshape(-1, BLOCK, x.shape[1]) for x in (token, share, expert)]
    out = jax.lax.map(lambda block: by_all(block[0], block[1], block[2], weights), blocks)
    return out.reshape(-1, out.shape[-1])[: len(token)]


def by_expert(
    token: Float[Array, "n D"], share: Float[Array, "n A"], expert: Int[Array, "n A"], weights: Experts
) -> Float[Array, "n D"]:
    """For many tokens on a TPU: they are put together by expert, and a grouped product computes no more than is needed."""
    place, counts = places_of(expert, len(weights.gate))
    together = jnp.zeros((expert.size, token.shape[1]), token.dtype).at[place].set(token[:, None])
    gate, up = (jax.lax.ragged_dot_general(together, matrices, counts, BY_ROWS) for matrices in (weights.gate, weights.up))
    inner = jax.nn.silu(gate) * up
    out = jax.lax.ragged_dot(inner, weights.down, counts, preferred_element_type=jnp.float32)
    return jnp.sum(out[place] * share[..., None], axis=1)


def places_of(expert: Int[Array, "n A"], num_experts: int) -> tuple[Int[Array, "n A"], Int[Array, " X"]]:
    """The place of each entry when entries stand by expert, in their order; and the number of each expert's entries."""
    is_of = (expert.reshape(-1, 1) == jnp.arange(num_experts, dtype=jnp.int32)).astype(jnp.int32)
    counts = is_of.sum(axis=0)
    before = jnp.cumsum(is_of, axis=0) - is_of + jnp.cumsum(counts) - counts
    return jnp.sum(before * is_of, axis=1).reshape(expert.shape), counts


def scaled(inner: Float[Array, "n m F"], share: Float[Array, "n m"]) -> Float[Array, "n m F"]:
    """Values of experts times their weights in the sum, multiplied in float32."""
    return (inner.astype(jnp.float32) * share[..., None]).astype(inner.dtype)
