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

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jkv import notebook
from jkv.model.delta_weights import DeltaNet, DeltaParams
from jkv.model.digests import hash_sum, tokenizer_digest, weights_digest
from jkv.model.joined import separate_weights
from jkv.model.sampling import Sampling
from jkv.model.weight_records import AdapterStack as AdapterStack
from jkv.model.weight_records import ByRow as ByRow
from jkv.model.weight_records import Codes as Codes
from jkv.model.weight_records import Experts as Experts
from jkv.model.weight_records import LowRank as LowRank
from jkv.pytrees import PyTree, static
from jkv.resuming import digest_of
from pallas_kernels.blocks import Blocks


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary frequencies; the fields are as in a checkpoint's `rope_parameters`."""

    kind: str = "default"  # default | linear | llama3 | yarn | longrope | proportional
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
    share: float = 1.0  # "proportional": the share of channel pairs that rotate, the highest frequencies first


UNSCALED = RopeScaling()


MeshAxis = str | tuple[str, ...] | None  # over which weights are split: one axis of a mesh, several as one, or none


def as_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, with tuples in place of lists, so that a record of them can be hashed."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The static shape of a decoder of any supported family, with the letters of `jkv/__init__.py`."""

    family: str  # a key of `jkv.checkpoints.families.FAMILIES`
    vocab_size: int  # V
    width: int  # D
    num_layers: int  # L
    num_query_heads: int  # N
    num_kv_heads: int  # K
    head_size: int  # H
    mlp_width: int  # F, of an expert where there are some
    max_positions: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = UNSCALED
    rotary_size: int = 0  # leading channels of a head that are rotated; 0 means all
    layers_without_rope: tuple[int, ...] = ()  # whose queries and keys are not rotated
    window: int = 0  # tokens that a query reads in the `window_layers`, its own included
    window_layers: tuple[int, ...] = ()  # layers with a sliding window; the others have full attention
    window_theta: float | None = None  # RoPE of these layers, where it is another
    window_scaling: RopeScaling | None = None
    window_head_size: int = 0  # H and K in these layers, where they are others; 0 is the same
    window_kv_heads: int = 0
    state_layers: tuple[int, ...] = ()  # layers with a recurrent state in place of attention
    delta_net: DeltaNet | None = None  # their sizes
    norm_epsilon: float = 1e-6
    qkv_bias: bool = False
    out_bias: bool = False  # of the attention's output projection
    qk_norm: bool = False  # of each head
    all_heads_norm: bool = False  # a norm of queries, and one of keys, over all heads together
    norms_after: bool = False  # whether attention and MLP have their norms after them instead of before
    norms_around: bool = False  # whether they have norms before and after
    norm_offset: float | None = None  # added to weights of norms, which then multiply in float32; None: in the weights' dtype
    attention_scale: float = 0.0  # multiplies products of queries and keys; 0 is head_size ** -0.5
    activation: str = "silu"  # of a feed-forward block's gate: silu | gelu_tanh
    scales_embedding: bool = False  # whether embeddings are multiplied by the root of the width
    num_sharing_layers: int = 0  # last layers, each of which reads the keys and values of the last other layer of its kind
    sharing_mlp_width: int = 0  # F in these, where it is another; 0 is the same
    layer_input_width: int = 0  # of an input of each layer that depends on the token alone and its embedding; 0: there is none
    keys_are_values: bool = False  # in layers with full attention, before the norms: they have no value projection
    value_norm: bool = False  # a norm of each value, without weights
    has_layer_scale: bool = False  # whether a number multiplies the hidden state after each layer
    has_output_gate: bool = False  # whether attention is multiplied by a sigmoid of its input, for each channel of the heads
    final_softcap: float = 0.0  # bounds logits of tokens, as cap * tanh(logit / cap); 0 does not
    has_sinks: bool = False  # a learned logit of each query head in the softmax's denominator
    tie_embeddings: bool = False
    end_ids: tuple[int, ...] = ()
    num_experts: int = 0  # X; 0 means that every token has the same feed-forward block
    num_active_experts: int = 0  # of each token
    normalises_experts: bool = False  # whether the weights of a token's experts sum to 1
    num_dense_layers: int = 0  # first layers, which have no experts
    dense_layers: tuple[int, ...] = ()  # further layers without experts
    dense_width: int = 0  # MLP width of these layers
    shared_width: int = 0  # MLP width of what every token goes through beside its experts; 0 is nothing
    gates_shared: bool = False  # whether a sigmoid of the token multiplies what that block gives
    norms_experts: bool = False  # whether that block and the experts have norms of their own, and each expert a scale (Gemma 4)
    routes_by_sigmoid: bool = False  # whether the router rates each expert by itself, with a bias in the choice alone
    num_expert_groups: int = 1  # of which a token chooses some, and then experts of these alone
    num_active_groups: int = 1
    route_scale: float = 1.0  # multiplies the weights of a token's experts
    whole_experts: bool = True  # whether a mesh splits experts by their number, each on one device, in place of their width
    num_own_experts: int = 0  # of those whose matrices one device has, where a mesh splits them so; 0 means all
    expert_bias: bool = False  # of the router, and of all three matrices of an expert
    swiglu_limit: float = 0.0  # of experts: bounds gate and up, to which 1 is added; 0 is plain SwiGLU
    swiglu_alpha: float = 1.0  # which then multiplies the gate inside of the sigmoid

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "ModelConfig":
        """The configuration with fields as TOML and JSON write them: lists for tuples, and objects for records."""
        records: dict[str, type] = {"rope_scaling": RopeScaling, "window_scaling": RopeScaling, "delta_net": DeltaNet}
        given = {name: record for name, record in records.items() if fields.get(name) is not None}
        return cls(**as_tuples(fields) | {name: record(**as_tuples(fields[name])) for name, record in given.items()})

    @property
    def group_size(self) -> int:
        """Query heads for each KV head (G)."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def head_widths(self) -> tuple[int, ...]:
        """Columns of a layer's query, key and value, as `of_layer` has it; without the value where keys are values."""
        queries, keys = self.num_query_heads * self.head_size, self.num_kv_heads * self.head_size
        return queries * (1 + self.has_output_gate), *(keys,) * (1 if self.keys_are_values else 2)

    @property
    def unpaged_layers(self) -> tuple[int, ...]:
        """The layers whose cache is outside of the pool, as large for each row: with a sliding window, or with a state."""
        return tuple(sorted({*self.window_layers, *self.state_layers}))

    @property
    def paged_layers(self) -> tuple[int, ...]:
        """The layers whose keys and values are in the pool; their order is that of the pool's layers.

        They are those with full attention, without those that share what another layer has stored.
        """
        return tuple(layer for layer in range(self.num_owners) if layer not in self.unpaged_layers)

    @property
    def num_paged_layers(self) -> int:
        """The number of layers whose keys and values are in the pool: L of the pool, of policies and of traces."""
        return len(self.paged_layers)

    @property
    def num_ring_layers(self) -> int:
        """The number of layers with a window that store their keys and values."""
        return sum(layer < self.num_owners for layer in self.window_layers)

    @property
    def num_owners(self) -> int:
        """The number of layers that store their keys and values; those after them share."""
        return self.num_layers - self.num_sharing_layers

    def owner_of(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself, or the last layer of its kind that stores its own."""
        if layer < self.num_owners:
            return layer
        is_windowed = layer in self.window_layers
        return max(other for other in range(self.num_owners) if (other in self.window_layers) == is_windowed)

    @property
    def own_experts(self) -> int:
        """The experts of a layer whose matrices one device has."""
        return self.num_own_experts or self.num_experts

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers with a mixture of experts."""
        layers = range(self.num_dense_layers, self.num_layers) if self.num_experts else ()
        return tuple(layer for layer in layers if layer not in self.dense_layers)

    @property
    def in_windows(self) -> "ModelConfig":
        """The configuration with the RoPE, the heads and the values of the layers with a sliding window."""
        return dataclasses.replace(
            self,
            rope_theta=self.rope_theta if self.window_theta is None else self.window_theta,
            rope_scaling=self.window_scaling or self.rope_scaling,
            head_size=self.window_head_size or self.head_size,
            num_kv_heads=self.window_kv_heads or self.num_kv_heads,
            keys_are_values=False,
        )

    def block_width(self, has_experts: bool) -> int:
        """The width of the block that every token goes through in a layer with or without experts; 0 for none."""
        if has_experts:
            return self.shared_width
        return self.dense_width if self.num_experts else self.mlp_width

    def of_layer(self, layer: int) -> "ModelConfig":
        """The configuration as a layer has it."""
        config = self.in_windows if layer in self.window_layers else self
        if layer < self.num_owners or not self.sharing_mlp_width:
            return config
        return dataclasses.replace(config, mlp_width=self.sharing_mlp_width)

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
class LayerParams(PyTree):
    """The weights of one decoder layer; absent parts are None.

    Every token goes through `gate`, `up` and `down`, unless the layer has nothing but `experts`; it may have both. A layer
    without `value` has the products with `key` as its values. One with a recurrent state has `delta` in place of the
    attention's weights. With an output gate, `query` is twice as wide: of each head the query, then the gate.

    Matrices may also have the unfolded shapes of other libraries (`query` as [D, N, H], `out` as [N, H, D]); they are used
    without a copy. Or those that multiply the same input are one array (`jkv.join_weights`), and their own fields are None.
    """

    attention_norm: Annotated[Any, "D"]
    query: Annotated[Any, "D N*H"]
    key: Annotated[Any, "D K*H"]  # None in a layer that shares the keys and values of another, as `value` and `key_norm` are
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
    out_bias: Annotated[Any, "D"] = None
    sink: Annotated[Any, "N"] = None
    all_query_norm: Annotated[Any, "N*H"] = None
    all_key_norm: Annotated[Any, "K*H"] = None
    after_attention_norm: Annotated[Any, "D"] = None
    after_mlp_norm: Annotated[Any, "D"] = None
    layer_scale: Annotated[Any, "1"] = None
    delta: DeltaParams | None = None
    mlp_out_norm: Annotated[Any, "D"] = None  # with experts beside the feed-forward block: of its output
    shared_gate: Annotated[Any, "D 1"] = None  # of the block beside the experts
    experts_norm: Annotated[Any, "D"] = None  # and of the hidden state that these read
    experts_out_norm: Annotated[Any, "D"] = None  # and of what they give
    input_gate: Annotated[Any, "D E"] = None  # of the layer's own input, as the two that follow
    input_out: Annotated[Any, "E D"] = None
    input_norm: Annotated[Any, "D"] = None
    experts: Experts | None = None
    query_key_value: Annotated[Any, "D joined"] = None  # the columns of all three, or of the two that the layer has
    gate_up: Annotated[Any, "D joined"] = None


class LayerInputs(PyTree):
    """What gives each layer an input of its own (per-layer embeddings of Gemma 4): `decoder.inputs_of_layers`."""

    embedding: Annotated[Any, "V L*E"]
    projection: Annotated[Any, "D L*E"]
    norm: Annotated[Any, "E"]


class Params(PyTree):
    """All weights of a decoder. Layers are not stacked, because a scan over stacked weights copies them on CPU and GPU."""

    embedding: Annotated[Any, "V D"]
    layers: tuple[LayerParams, ...]
    final_norm: Annotated[Any, "D"]
    unembedding: Annotated[Any, "D V"]  # None if tied to the embedding
    config: ModelConfig = static()
    axis: MeshAxis = static(default=None)  # of a mesh that splits the weights
    layer_inputs: LayerInputs | None = None

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self, is_leaf=is_blocks)  # other trees of this shape hold gradients, shapes or shardings
        kinds = ", ".join(sorted({str(getattr(x, "kind", getattr(x, "dtype", type(x).__name__))) for x in leaves}))
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
      ends: its end tokens (`config.end_ids`), and which of its files name each; empty where it was read from no such files.
    """

    params: Params
    tokenizer: Any = None
    name: str = ""
    sampling: Sampling | None = None
    ends: Mapping[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        """The static configuration, a field of `params`."""
        return self.params.config

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the weights by the first numbers of each in bfloat16, whatever their dtype and however they are joined."""
        numbers = b"".join(np.asarray(row).tobytes() for row in first_numbers(self.params))
        return hashlib.blake2s(numbers, digest_size=8).hexdigest()

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """Identifies every weight, the configuration and the tokenizer, for records of runs (`jkv.resuming`)."""
        shapes = jax.tree_util.tree_leaves_with_path(jax.eval_shape(separate_weights, self.params), is_leaf=is_blocks)
        names = [(jax.tree_util.keystr(path), leaf.shape) for path, leaf in shapes]
        weights = weights_digest((*name, sums) for name, sums in zip(names, hash_sums(self.params), strict=True))
        config, tokenizer = digest_of(dataclasses.asdict(self.config)), tokenizer_digest(self.tokenizer)
        return {"weights": weights, "config": config, "tokenizer": tokenizer}

    def __repr__(self) -> str:
        c = self.config
        return f"Model({self.name or c.family}: {c.num_layers} layers, width {c.width}, {count_weights(self.params):,} weights)"

    def _repr_html_(self) -> str:
        return notebook.text(repr(self))


@jax.jit
def first_numbers(params: Params) -> list[Array]:
    """The first 64 numbers of each single matrix and vector, or its first row if that is shorter, in bfloat16."""
    rows = [first_row(leaf) for leaf in jax.tree.leaves(separate_weights(params), is_leaf=is_blocks)]
    return [jax.lax.bitcast_convert_type(row[:64].astype(jnp.bfloat16), jnp.uint16) for row in rows]


@jax.jit
def hash_sums(params: Params) -> list[Array]:
    """The `hash_sum` of each single matrix and vector."""
    leaves = jax.tree.leaves(separate_weights(params), is_leaf=is_blocks)
    return [hash_sum(leaf.dequantised if is_blocks(leaf) else leaf) for leaf in leaves]


def first_row(leaf: Any) -> Array:
    """The first row of a matrix, or at least 64 numbers of it; a vector itself."""
    return leaf.first_rows(64)[0] if is_blocks(leaf) else leaf[(0,) * (leaf.ndim - 1)]


def is_blocks(x: Any) -> bool:
    """Whether a leaf of weights is a matrix in the blocks of its file."""
    return isinstance(x, Blocks)


def count_weights(params: Params) -> int:
    """The number of weights; tied weights count once, and scales of codes are none."""
    return sum(leaf.size for leaf in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Codes | Blocks)))


def fold(weight: Any, shape: tuple[int, ...]) -> Any:
    """A weight in the shape of `weight_shapes`: unfolded sides are folded, and an adapter is added (in float32, rounded once).
    Codes and blocks become float32.

    A weight that has the shape already, or has another size, is returned unchanged.
    """
    if isinstance(weight, Codes | Blocks):
        weight = weight.dequantised
    if isinstance(weight, LowRank):
        whole = weight.base.dequantised if isinstance(weight.base, Codes | Blocks) else weight.base
        base, down, up = (jnp.asarray(x, jnp.float32) for x in (whole, weight.down, weight.up))
        rank = up.shape[0]
        added = weight.scale * (down.reshape(-1, rank) @ up.reshape(rank, -1))
        weight = (base.reshape(added.shape) + added).astype(whole.dtype)
    return weight.reshape(shape) if weight.shape != shape and weight.size == math.prod(shape) else weight
