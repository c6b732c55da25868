"""A model: a static configuration, a pytree of weights, and a tokenizer if it was loaded from a folder.

`ModelConfig` is hashable and a static field of `Params`. So `generate` needs nothing but `Params`, and new weights of the same
shapes do not compile anything again.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping
from typing import Annotated, Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from jkv import notebook
from jkv.model.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary frequencies; the fields are those of a checkpoint's `rope_parameters`."""

    kind: str = "default"  # default | linear | llama3 | yarn | longrope
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0  # of YaRN: turns over the original context, from which a frequency is kept
    beta_slow: float = 1.0  # and below which it is divided by the factor
    attention_factor: float = 1.0  # multiplies rotated queries and keys
    truncates: bool = True  # whether the ramp between the two ends at whole pairs of channels
    short_factor: tuple[float, ...] = ()  # of LongRoPE: divide each frequency, in models of at most the original context
    long_factor: tuple[float, ...] = ()  # and in longer ones


def as_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, with tuples in place of lists, so that a record of them can be hashed."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The static shape of a decoder of any supported family, with the letters of `jkv/__init__.py`."""

    family: str  # a key of `jkv.model.families.FAMILIES`
    vocab_size: int  # V
    width: int  # D
    num_layers: int  # L
    num_query_heads: int  # N
    num_kv_heads: int  # K
    head_size: int  # H
    mlp_width: int  # F, of an expert where there are some
    max_positions: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = RopeScaling()
    rotary_size: int = 0  # leading channels of a head that are rotated; 0 means all
    layers_without_rope: tuple[int, ...] = ()  # whose queries and keys are not rotated
    window: int = 0  # tokens that a query reads in the `window_layers`, its own included
    window_layers: tuple[int, ...] = ()  # layers with a sliding window; the others have full attention
    window_theta: float | None = None  # RoPE of these layers, where it is another
    window_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    end_ids: tuple[int, ...] = ()
    num_experts: int = 0  # X; 0 means that every token has the same feed-forward block
    num_active_experts: int = 0  # of each token
    normalises_experts: bool = False  # whether the weights of a token's experts sum to 1

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "ModelConfig":
        """The configuration with fields as TOML and JSON write them: lists for tuples, and an object for `rope_scaling`."""
        names = [name for name in ("rope_scaling", "window_scaling") if fields.get(name) is not None]
        return cls(**as_tuples(fields) | {name: RopeScaling(**as_tuples(fields[name])) for name in names})

    @property
    def group_size(self) -> int:
        """Query heads for each KV head (G)."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def paged_layers(self) -> tuple[int, ...]:
        """The layers with full attention, whose keys and values are in the pool; their order is that of the pool's layers."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.window_layers)

    @property
    def num_paged_layers(self) -> int:
        """The number of layers with full attention: L of the pool, of policies and of traces."""
        return self.num_layers - len(self.window_layers)

    @property
    def in_windows(self) -> "ModelConfig":
        """The configuration with the RoPE of the layers with a sliding window."""
        theta = self.rope_theta if self.window_theta is None else self.window_theta
        return dataclasses.replace(self, rope_theta=theta, rope_scaling=self.window_scaling or self.rope_scaling)

    @property
    def unrotated(self) -> tuple[int, ...]:
        """The layers of the pool without RoPE, by their index among those."""
        return tuple(i for i, layer in enumerate(self.paged_layers) if layer in self.layers_without_rope)

    @property
    def unrotated_windows(self) -> tuple[int, ...]:
        """The layers with a sliding window and without RoPE, by their index among those."""
        return tuple(i for i, layer in enumerate(self.window_layers) if layer in self.layers_without_rope)


# The axes of the fields are not checked as types, because JAX also builds these pytrees with leaves that are not arrays. A mesh
# splits the weights by these axes (`jkv.model.sharding`).
class LowRank(flax.struct.PyTreeNode):
    """A matrix and its low-rank adapter (LoRA, arXiv 2106.09685). The sum `base + down @ up * scale` is never materialised.

    It may replace any matrix of `LayerParams` but those of `Experts`, and `Params.unembedding`. Base and adapter are separate
    leaves, so an update of the adapter does not copy the base.
    """

    base: Any  # [in, out]
    down: Any  # [in, rank]
    up: Any  # [rank, out]
    scale: float = flax.struct.field(pytree_node=False, default=1.0)


class Experts(flax.struct.PyTreeNode):
    """The feed-forward blocks of a layer among which a router chooses some for each token (a mixture of experts)."""

    router: Annotated[Any, "D X"]
    gate: Annotated[Any, "X F D"]  # so that one product of a token with all experts reads it as it lies
    up: Annotated[Any, "X F D"]
    down: Annotated[Any, "X F D"]


class LayerParams(flax.struct.PyTreeNode):
    """The weights of one decoder layer; absent parts are None. It has either `gate`, `up` and `down`, or `experts`.

    Matrices may also have the unfolded shapes of other libraries (`query` as [D, N, H], `out` as [N, H, D]); they are used
    without a copy.
    """

    attention_norm: Annotated[Any, "D"]
    query: Annotated[Any, "D N*H"]
    key: Annotated[Any, "D K*H"]
    value: Annotated[Any, "D K*H"]
    out: Annotated[Any, "N*H D"]
    mlp_norm: Annotated[Any, "D"]
    gate: Annotated[Any, "D F"] = None
    up: Annotated[Any, "D F"] = None
    down: Annotated[Any, "F D"] = None
    query_bias: Annotated[Any, "N*H"] = None
    key_bias: Annotated[Any, "K*H"] = None
    value_bias: Annotated[Any, "K*H"] = None
    query_norm: Annotated[Any, "H"] = None
    key_norm: Annotated[Any, "H"] = None
    experts: Experts | None = None


class Params(flax.struct.PyTreeNode):
    """All weights of a decoder. Layers are not stacked, because a scan over stacked weights copies them on CPU and GPU."""

    embedding: Annotated[Any, "V D"]
    layers: tuple[LayerParams, ...]
    final_norm: Annotated[Any, "D"]
    unembedding: Annotated[Any, "D V"]  # None if tied to the embedding
    config: ModelConfig = flax.struct.field(pytree_node=False)
    axis: str | None = flax.struct.field(pytree_node=False, default=None)  # mesh axis over which the weights are split

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self)  # other trees of this shape hold gradients, shapes or shardings
        kinds = ", ".join(sorted({str(getattr(leaf, "dtype", type(leaf).__name__)) for leaf in leaves}))
        number = sum(getattr(leaf, "size", 1) for leaf in leaves)
        return f"Params({len(self.layers)} layers, {number:,} weights in {len(leaves)} leaves, {kinds})"


@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model.

    Attributes:
      params: its weights and static configuration.
      tokenizer: None if the folder has none.
      name: as it was loaded.
      sampling: how its makers draw tokens (generation_config.json); None is greedy. `jkv.generate` takes it by default.
    """

    params: Params
    tokenizer: Any = None
    name: str = ""
    sampling: Sampling | None = None

    @property
    def config(self) -> ModelConfig:
        """The static configuration, a field of `params`."""
        return self.params.config

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the weights by the first numbers of each in bfloat16, whatever dtype they were loaded in."""
        numbers = b"".join(np.asarray(row).tobytes() for row in first_numbers(self.params))
        return hashlib.blake2s(numbers, digest_size=8).hexdigest()

    def __repr__(self) -> str:
        c = self.config
        return f"Model({self.name or c.family}: {c.num_layers} layers, width {c.width}, {count_weights(self.params):,} weights)"

    def _repr_html_(self) -> str:
        return notebook.text(repr(self))


@jax.jit
def first_numbers(params: Params) -> list[Array]:
    """The first 64 numbers of each weight, or its first row if that is shorter, in bfloat16."""
    rows = [leaf[(0,) * (leaf.ndim - 1)] for leaf in jax.tree.leaves(params)]
    return [jax.lax.bitcast_convert_type(row[:64].astype(jnp.bfloat16), jnp.uint16) for row in rows]


def count_weights(params: Params) -> int:
    """The number of weights; tied weights count once."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def fold(weight: Any, shape: tuple[int, ...]) -> Any:
    """A weight in the shape of `weight_shapes`: unfolded sides are folded, and an adapter is added (in float32, rounded once).

    A weight that has the shape already, or has another size, is returned unchanged.
    """
    if isinstance(weight, LowRank):
        base, down, up = (jnp.asarray(x, jnp.float32) for x in (weight.base, weight.down, weight.up))
        rank = up.shape[0]
        added = weight.scale * (down.reshape(-1, rank) @ up.reshape(rank, -1))
        weight = (base.reshape(added.shape) + added).astype(weight.base.dtype)
    return weight.reshape(shape) if weight.shape != shape and weight.size == math.prod(shape) else weight


def weight_shapes(config: ModelConfig, dtype: Any = jnp.float32) -> Params:
    """The `Params` of a configuration with `jax.ShapeDtypeStruct` leaves."""
    c = config
    queries, keys = c.num_query_heads * c.head_size, c.num_kv_heads * c.head_size

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    experts = None
    if c.num_experts:
        matrices = leaf(c.num_experts, c.mlp_width, c.width)
        experts = Experts(router=leaf(c.width, c.num_experts), gate=matrices, up=matrices, down=matrices)
    layer = LayerParams(
        attention_norm=leaf(c.width),
        query=leaf(c.width, queries),
        key=leaf(c.width, keys),
        value=leaf(c.width, keys),
        out=leaf(queries, c.width),
        mlp_norm=leaf(c.width),
        gate=None if experts else leaf(c.width, c.mlp_width),
        up=None if experts else leaf(c.width, c.mlp_width),
        down=None if experts else leaf(c.mlp_width, c.width),
        query_bias=leaf(queries) if c.qkv_bias else None,
        key_bias=leaf(keys) if c.qkv_bias else None,
        value_bias=leaf(keys) if c.qkv_bias else None,
        query_norm=leaf(c.head_size) if c.qk_norm else None,
        key_norm=leaf(c.head_size) if c.qk_norm else None,
        experts=experts,
    )
    return Params(
        embedding=leaf(c.vocab_size, c.width),
        layers=(layer,) * c.num_layers,
        final_norm=leaf(c.width),
        unembedding=None if c.tie_embeddings else leaf(c.width, c.vocab_size),
        config=config,
    )


def leaf_name(path: Any) -> str:
    """The name of a leaf of `Params`, such as `layers.0.query`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named_leaves(params: Params) -> dict[str, Any]:
    """The folded weights by name, in the order of the tree. Refuses weights that do not fit their configuration."""
    wanted = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(weight_shapes(params.config))[0]}
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, LowRank))
    named = {leaf_name(path): leaf for path, leaf in leaves}
    named = {name: fold(leaf, wanted[name].shape) if name in wanted else leaf for name, leaf in named.items()}
    for name in wanted | named:
        got, rule = (getattr(leaves.get(name), "shape", None) for leaves in (named, wanted))
        if got != rule:
            raise ValueError(f"{name} must have shape {rule}, as params.config defines it; got {got}. Correct either.")
    return named


def init_params(config: ModelConfig, key: PRNGKeyArray, scale: float = 0.02, dtype: Any = jnp.float32) -> Params:
    """Random weights: normal with standard deviation `scale`, smaller for outputs by depth; norms are one, biases zero."""
    paths, treedef = jax.tree_util.tree_flatten_with_path(weight_shapes(config, dtype))
    shrink = (2.0 * config.num_layers) ** -0.5

    def draw(index: int, path: Any, shape: Any) -> Float[Array, "..."]:
        name = jax.tree_util.keystr(path).rsplit(".", 1)[-1]
        if name.endswith("norm"):
            return jnp.ones(shape.shape, dtype)
        if name.endswith("bias"):
            return jnp.zeros(shape.shape, dtype)
        size = scale * (shrink if name in ("out", "down") else 1.0)
        return (size * jax.random.normal(jax.random.fold_in(key, index), shape.shape)).astype(dtype)

    return jax.tree.unflatten(treedef, [draw(i, path, shape) for i, (path, shape) in enumerate(paths)])
