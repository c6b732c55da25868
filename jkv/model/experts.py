"""The feed-forward block of a mixture of experts: each token goes through the few blocks that a router chooses for it.

One function, `mixture`, and four ways to compute it, by the number of tokens and the platform. All give each token the same
numbers but for rounding, and in none of them does a token depend on the others. `Routes` are the experts chosen, which a replay
takes in place of its own.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from jkv.errors import refused
from jkv.model.norms import norm
from jkv.model.params import Codes, Experts, LowRank, MeshAxis, ModelConfig

Choose = Callable[[int, Array, Any], tuple[Array, Any]]  # see `jkv.model.decoder.forward`


def index_dtype(config: ModelConfig) -> Any:
    """The smallest integers that hold an expert's index."""
    return np.dtype(np.uint8 if config.num_experts <= 256 else np.uint16)


def no_routes(config: ModelConfig, token: Int[Array, "B T"]) -> UInt[Array, "B T L A"]:
    """Where `recorder` writes the experts of tokens: L counts the layers with experts."""
    return jnp.zeros((*token.shape, len(config.expert_layers), config.num_active_experts), index_dtype(config))


def route_recorder(config: ModelConfig, is_on: bool = True) -> Choose | None:
    """A `choose` of the decoder that writes the router's choice into `cache.experts`, and keeps it."""

    def choose(layer: int, expert: Int[Array, "B T A"], cache: Any) -> tuple[Int[Array, "B T A"], Any]:
        index = config.expert_layers.index(layer)
        return expert, cache._replace(experts=cache.experts.at[:, :, index].set(expert.astype(cache.experts.dtype)))

    return choose if is_on else None


def given_routes(config: ModelConfig, experts: UInt[Array, "n T L A"] | None) -> Choose | None:
    """A `choose` of the decoder that takes these experts in place of the router's choice; None leaves the choice to it."""
    if experts is None:
        return None

    def choose(layer: int, expert: Int[Array, "n T A"], cache: Any) -> tuple[Int[Array, "n T A"], Any]:
        return experts[:, :, config.expert_layers.index(layer)].astype(expert.dtype), cache

    return choose


def check_experts(experts: Any, config: ModelConfig, totals: list[int]) -> np.ndarray:
    """The experts of sequences of `totals` tokens, checked: [n, T, L, A], T at least that of the longest.

    Raises:
      ValueError: another shape, or what is no index of an expert.
    """
    experts, count = np.asarray(experts), config.num_experts
    if not count:
        rule = "routed_experts are of a model with a mixture of experts; this one has none. Leave them out."
        raise refused(rule, routed_experts="unsupported")
    num_tokens, of_token = max(totals, default=0), (len(config.expert_layers), config.num_active_experts)
    if experts.ndim != 4 or (len(experts), *experts.shape[2:]) != (len(totals), *of_token) or experts.shape[1] < num_tokens:
        raise refused(
            "routed_experts must have an entry for each token of prompt and completion, MoE layer and choice, here "
            f"{(len(totals), num_tokens, *of_token)}; got {experts.shape}. Pass `out.routed_experts` of the call that made the "
            "tokens.",
            routed_experts="does_not_fit",
        )
    if not np.issubdtype(experts.dtype, np.integer) or (experts.size and not 0 <= experts.min() <= experts.max() < count):
        got = f"{experts.dtype} in [{experts.min()}, {experts.max()}]" if experts.size else experts.dtype
        rule = f"routed_experts must be integers in [0, {count}); got {got}. Pass `out.routed_experts`."
        raise refused(rule, routed_experts="out_of_range")
    return experts.astype(index_dtype(config))


class RouteRecorder:
    """The experts of each token of one sample, while it is decoded: prompt first, then the completion."""

    def __init__(self, pieces: "list[tuple[Any, int]] | None" = None) -> None:
        self._pieces = list(pieces or [])  # experts [T, L, A], on the host or on the device, and how many of them count

    def add(self, experts: Any, count: int | None = None) -> None:
        """Appends the experts [T, L, A] of the first `count` tokens, or of all tokens; nothing is read from the device."""
        self._pieces.append((experts, len(experts) if count is None else count))

    def copy(self) -> "RouteRecorder":
        """Another recorder with the same tokens."""
        return RouteRecorder(self._pieces)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled is on the host."""
        self.land()
        return vars(self)

    def land(self) -> None:
        """Reads what is on the device, once that is there."""
        self._pieces = [(np.asarray(experts), count) for experts, count in self._pieces]

    def finish(self, num_tokens: int, config: ModelConfig) -> np.ndarray:
        """The experts of the first `num_tokens` tokens, [T, L, A]; 0 for those that never went through the model."""
        self.land()
        out = np.zeros((num_tokens, len(config.expert_layers), config.num_active_experts), index_dtype(config))
        known = np.concatenate([out[:0], *(experts[:count] for experts, count in self._pieces)])[:num_tokens]
        out[: len(known)] = known
        return out


FEW = 512  # tokens, as of a decode step, whose products with all experts take about as long as reading these
TINY = 1e-20  # what transformers adds to a sum of weights, which may all be 0 if they are sigmoids
BLOCK = 2048  # tokens whose values in all experts are held at once
BY_ROWS = jax.lax.RaggedDotDimensionNumbers(  # [m, D] with [X, F, D], by their last axes
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


class Gating(NamedTuple):
    """How the products of a token with an expert's two matrices become the values that the third one multiplies."""

    limit: float = 0.0  # `ModelConfig.swiglu_limit`
    alpha: float = 1.0  # `ModelConfig.swiglu_alpha`
    activation: str = "silu"  # `ModelConfig.activation`

    def __call__(self, gate: Float[Array, "*B F"], up: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
        """SwiGLU or GeGLU; with a limit the SwiGLU of gpt-oss (arXiv 2508.10925 and its code in transformers).

        The limit bounds the gate from above and `up` on both sides, `up` is raised by 1, and `alpha` sharpens the sigmoid.
        """
        if not self.limit:
            return activate(self.activation, gate) * up
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


SWIGLU = Gating()


def activate(name: str, x: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
    """A function of `ModelConfig.activation`."""
    return jax.nn.gelu(x, approximate=True) if name == "gelu_tanh" else jax.nn.silu(x)


def gating_of(config: ModelConfig) -> Gating:
    """The gating of a model's feed-forward blocks."""
    return Gating(config.swiglu_limit, config.swiglu_alpha, config.activation)


def refuse_adapters(weights: Experts) -> None:
    """Experts are computed without adapters.

    Raises:
      ValueError: a low-rank adapter.
    """
    found = [name for name, weight in vars(weights).items() if isinstance(weight, LowRank)]
    if found:
        rule = f"Experts take no low-rank adapter; got one on {', '.join(found)}. Adapt the attention, or merge it."
        raise refused(rule, params="unsupported")


def mixture(
    config: ModelConfig,
    weights: Experts,
    normed: Float[Array, "B T D"],
    routed: Float[Array, "B T D"] | None = None,
    *,
    axis: MeshAxis = None,
    choose: Callable[[Array, Any], tuple[Array, Any]] | None = None,
    cache: Any = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"] | None, Any]:
    """The weighted sum of each token's experts, as in Qwen3 (arXiv 2505.09388) and its code in transformers.

    It is the sum without the biases of the experts' last products, of which each shard of a mesh has a part; the weighted sum
    of these biases, which is the same on all shards, None without biases; and the cache. Where each shard has whole experts,
    its part is the sum of those, biases included. The router reads `routed`, by default what the experts read.

    `choose` sees the chosen experts, [B, T, A], and returns those that are used, and the cache.

    Deviation: the router's logits, the weights and the sum are float32 in every dtype.

    Raises:
      ValueError: a low-rank adapter.
    """
    refuse_adapters(weights)
    token = normed.reshape(-1, config.width)

    def choose_of_all(expert: Int[Array, "n A"]) -> Int[Array, "n A"]:
        nonlocal cache
        assert choose is not None
        chosen, cache = choose(expert.reshape(*normed.shape[:-1], -1), cache)
        return chosen.reshape(expert.shape)

    reads = token if routed is None else routed.reshape(token.shape)
    share, expert = route(config, weights, reads, None if choose is None else choose_of_all)
    is_part = num_own(weights) < config.num_experts
    if is_part:
        share, expert = of_shard(share, expert, num_own(weights), axis)
    mixed, of_biases = products(config, weights, token, share, expert), bias_sum(weights, share, expert)
    if is_part and of_biases is not None:
        mixed, of_biases = mixed + of_biases, None
    whole = None if of_biases is None else of_biases.astype(normed.dtype).reshape(normed.shape)
    return mixed.astype(normed.dtype).reshape(normed.shape), whole, cache


def products(
    config: ModelConfig, weights: Experts, token: Float[Array, "n D"], share: Float[Array, "n A"], expert: Int[Array, "n A"]
) -> Float[Array, "n D"]:
    """The weighted sum of the products of each token with its experts, computed in the way that suits their number."""
    gating = gating_of(config)
    if takes_few(config, len(token)):
        return by_token(token, share, expert, weights, gating)
    if len(token) <= FEW:
        return by_all(token, share, expert, weights, gating)
    ways = {name: functools.partial(way, gating=gating) for name, way in (("tpu", by_expert), ("default", in_blocks))}
    return jax.lax.platform_dependent(token, share, expert, weights, **ways)


def bias_sum(weights: Experts, share: Float[Array, "n A"], expert: Int[Array, "n A"]) -> Float[Array, "n D"] | None:
    """The weighted sum of the biases of each token's experts' last products; None where they have none."""
    if weights.down_bias is None:
        return None
    bias = weights.down_bias[jnp.minimum(expert, num_own(weights) - 1)].astype(jnp.float32)
    return jnp.einsum("na,nad->nd", share, bias, precision="highest")


def num_own(weights: Experts) -> int:
    """The experts whose matrices a device has."""
    return int(weights.gate.shape[0])


def of_shard(
    share: Float[Array, "n A"], expert: Int[Array, "n A"], own: int, axis: MeshAxis
) -> tuple[Float[Array, "n A"], Int[Array, "n A"]]:
    """The weights and the indices of a shard's own experts; other experts have the weight 0 and the index `own`."""
    assert axis is not None
    local = expert - own * jax.lax.axis_index(axis)
    is_own = (local >= 0) & (local < own)
    return jnp.where(is_own, share, 0), jnp.where(is_own, local, own)


def takes_few(config: ModelConfig, num_tokens: int) -> bool:
    """Whether copies of the tokens' experts, which are written and read again, take less than reading all experts once."""
    return 3 * num_tokens * config.num_active_experts <= config.own_experts


def route(
    config: ModelConfig,
    weights: Experts,
    token: Float[Array, "n D"],
    choose: Callable[[Int[Array, "n A"]], Int[Array, "n A"]] | None = None,
) -> tuple[Float[Array, "n A"], Int[Array, "n A"]]:
    """The weights of each token's A experts in the sum, and these experts: of equal ratings the first.

    A softmax over all experts rates them, or a sigmoid of each logit (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): then a
    bias is added for the choice alone, and the choice may be among the experts of a few groups. With scales, as in Gemma 4, the
    router reads the hidden state normalised and divided by the root of its width. `choose` may replace the choice; the weights
    still come from the router.
    """
    if weights.router_scale is not None:
        factor = weights.router_scale.astype(jnp.float32) * config.width**-0.5
        token = (norm(config, token.astype(jnp.float32), None) * factor).astype(token.dtype)
    logits = jnp.matmul(token, weights.router, preferred_element_type=jnp.float32)
    logits = plus(logits, weights.router_bias)
    rating = jax.nn.sigmoid(logits) if config.routes_by_sigmoid else jax.nn.softmax(logits)
    choice = in_best_groups(config, rating + weights.choice_bias) if config.routes_by_sigmoid else rating
    share, expert = jax.lax.top_k(choice, config.num_active_experts)
    if choose is not None:
        expert = choose(expert)
    if choose is not None or config.routes_by_sigmoid:
        share = jnp.take_along_axis(rating, expert, axis=-1)
    if config.normalises_experts:
        share = share / (share.sum(axis=-1, keepdims=True) + TINY)
    share = share * config.route_scale
    return share if weights.expert_scale is None else share * weights.expert_scale.astype(jnp.float32)[expert], expert


def in_best_groups(config: ModelConfig, choice: Float[Array, "n X"]) -> Float[Array, "n X"]:
    """The ratings of the experts in the best groups, by the sum of the two best of each; `-inf` for all others."""
    if config.num_active_groups == config.num_expert_groups:
        return choice
    by_group = choice.reshape(len(choice), config.num_expert_groups, -1)
    best = jax.lax.top_k(jax.lax.top_k(by_group, 2)[0].sum(axis=-1), config.num_active_groups)[1]
    is_open = (best[..., None] == jnp.arange(config.num_expert_groups, dtype=jnp.int32)).any(axis=1)
    return jnp.where(is_open[..., None], by_group, -jnp.inf).reshape(choice.shape)


def by_token(
    token: Float[Array, "n D"], share: Float[Array, "n A"], expert: Int[Array, "n A"], weights: Experts, gating: Gating = SWIGLU
) -> Float[Array, "n D"]:
    """For few tokens: gathers the matrices of the chosen experts."""
    expert = jnp.minimum(expert, num_own(weights) - 1)  # other shards' experts become the last one, with weight 0
    gate, up, down = (jax.tree.map(lambda x: x[expert], matrices) for matrices in (weights.gate, weights.up, weights.down))
    of_gate, of_up = (None if bias is None else bias[expert] for bias in (weights.gate_bias, weights.up_bias))
    inner = gating(plus(into("nd,nafd->naf", token, gate), of_gate), plus(into("nd,nafd->naf", token, up), of_up))
    return out_of("naf,nafd->nd", scaled(inner, share), down)


def by_all(
    token: Float[Array, "n D"], share: Float[Array, "n A"], expert: Int[Array, "n A"], weights: Experts, gating: Gating = SWIGLU
) -> Float[Array, "n D"]:
    """For tokens that together need most experts: products of all tokens with all experts, which read the matrices once.

    That is X / A times the arithmetic that is needed. On a GPU, XLA computes `jax.lax.ragged_dot` with X times of it.
    """
    row = jnp.arange(len(token), dtype=jnp.int32)[:, None]
    of_all = jnp.zeros((len(token), num_own(weights)), share.dtype).at[row, expert].set(share, mode="drop")
    inner = gating(
        plus(into("nd,xfd->nxf", token, weights.gate), weights.gate_bias),
        plus(into("nd,xfd->nxf", token, weights.up), weights.up_bias),
    )
    return out_of("nxf,xfd->nd", scaled(inner, of_all), weights.down)


def in_blocks(
    token: Float[Array, "n D"], share: Float[Array, "n A"], expert: Int[Array, "n A"], weights: Experts, gating: Gating = SWIGLU
) -> Float[Array, "n D"]:
    """`by_all` for one block of tokens after another."""
    if len(token) <= BLOCK:
        return by_all(token, share, expert, weights, gating)
    short = -len(token) % BLOCK
    blocks = [jnp.pad(x, ((0, short), (0, 0))).reshape(-1, BLOCK, x.shape[1]) for x in (token, share, expert)]
    out = jax.lax.map(lambda block: by_all(block[0], block[1], block[2], weights, gating), blocks)
    return out.reshape(-1, out.shape[-1])[: len(token)]


def by_expert(
    token: Float[Array, "n D"], share: Float[Array, "n A"], expert: Int[Array, "n A"], weights: Experts, gating: Gating = SWIGLU
) -> Float[Array, "n D"]:
    """For many tokens on a TPU: they are put together by expert, and a grouped product computes no more than is needed."""
    own = num_own(weights)
    is_part = own < weights.router.shape[-1]
    place, counts = places_of(expert, own + is_part)  # entries of other shards' experts are the last
    counts = counts[:own]
    together = jnp.zeros((expert.size, token.shape[1]), token.dtype).at[place].set(token[:, None])
    of_entry = jnp.zeros(expert.size, expert.dtype).at[place].set(expert)

    def product(matrices: Any, bias: Any) -> Array:
        values = jax.lax.ragged_dot_general(together, codes_of(matrices, token.dtype), counts, BY_ROWS)
        if isinstance(matrices, Codes):
            values = (values * matrices.scale[of_entry]).astype(values.dtype)
        return values if bias is None else plus(values, bias[of_entry])

    inner = gating(product(weights.gate, weights.gate_bias), product(weights.up, weights.up_bias))
    if isinstance(weights.down, Codes):
        inner = (inner * weights.down.scale[of_entry]).astype(inner.dtype)
    down = codes_of(weights.down, inner.dtype)
    out = jax.lax.ragged_dot(inner, down, counts, preferred_element_type=jnp.float32)
    of_entries = jnp.where((expert < own)[..., None], out[place], 0) if is_part else out[place]
    return jnp.sum(of_entries * share[..., None], axis=1)


def into(equation: str, token: Float[Array, "n D"], matrices: Any) -> Float[Array, "n m F"]:
    """The product of tokens with `gate` or `up`, which may be `Codes`."""
    if not isinstance(matrices, Codes):
        return jnp.einsum(equation, token, matrices)
    product = jnp.einsum(equation, token, codes_of(matrices, token.dtype), preferred_element_type=jnp.float32)
    return (product * matrices.scale).astype(token.dtype)


def out_of(equation: str, inner: Float[Array, "n m F"], down: Any) -> Float[Array, "n D"]:
    """The product of an expert's values with `down`, which may be `Codes`: float32."""
    if isinstance(down, Codes):
        inner = (inner * down.scale).astype(inner.dtype)
    return jnp.einsum(equation, inner, codes_of(down, inner.dtype), preferred_element_type=jnp.float32)


def codes_of(matrices: Any, dtype: Any) -> Any:
    """The numbers that a product reads; every dtype of weights holds codes exactly."""
    return matrices.code.astype(dtype) if isinstance(matrices, Codes) else matrices


def places_of(expert: Int[Array, "n A"], num_experts: int) -> tuple[Int[Array, "n A"], Int[Array, " X"]]:
    """The place of each entry when entries stand by expert, in their order; and the number of each expert's entries."""
    is_of = (expert.reshape(-1, 1) == jnp.arange(num_experts, dtype=jnp.int32)).astype(jnp.int32)
    counts = is_of.sum(axis=0)
    before = jnp.cumsum(is_of, axis=0) - is_of + jnp.cumsum(counts) - counts
    return jnp.sum(before * is_of, axis=1).reshape(expert.shape), counts


def plus(product: Float[Array, "*B"], bias: Any) -> Float[Array, "*B"]:
    """A product and its bias, where it has one."""
    return product if bias is None else product + bias.astype(product.dtype)


def scaled(inner: Float[Array, "n m F"], share: Float[Array, "n m"]) -> Float[Array, "n m F"]:
    """Values of experts times their weights in the sum, multiplied in float32."""
    return (inner.astype(jnp.float32) * share[..., None]).astype(inner.dtype)
