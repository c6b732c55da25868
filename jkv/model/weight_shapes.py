"""The shapes of a model's weights, which follow from its configuration; their names, and random ones of these shapes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from jkv.errors import refused
from jkv.model.delta_weights import delta_shapes
from jkv.model.joined import filled
from jkv.model.params import LayerInputs, LayerParams, ModelConfig, Params, fold
from jkv.model.weight_records import Codes, Experts, LowRank
from pallas_kernels.blocks import Blocks


def weight_shapes(config: ModelConfig, dtype: Any = jnp.float32) -> Params:
    """The `Params` of a configuration with `jax.ShapeDtypeStruct` leaves."""
    c, inputs = config, config.num_layers * config.layer_input_width

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    of_layers = LayerInputs(leaf(c.vocab_size, inputs), leaf(c.width, inputs), leaf(c.layer_input_width))
    return Params(
        embedding=leaf(c.vocab_size, c.width),
        layers=tuple(
            state_shapes(c, leaf, has_experts=layer in c.expert_layers)
            if layer in c.state_layers
            else layer_shapes(c.of_layer(layer), leaf, is_owner=layer < c.num_owners, has_experts=layer in c.expert_layers)
            for layer in range(c.num_layers)
        ),
        final_norm=leaf(c.width),
        unembedding=None if c.tie_embeddings else leaf(c.width, c.vocab_size),
        layer_inputs=of_layers if inputs else None,
        config=config,
    )


def state_shapes(config: ModelConfig, leaf: Callable[..., Any], *, has_experts: bool) -> LayerParams:
    """The weights of a layer with a recurrent state, each made by `leaf` of its shape."""
    assert config.delta_net is not None
    like = layer_shapes(config, leaf, is_owner=True, has_experts=has_experts)
    names = "attention_norm", "mlp_norm", "gate", "up", "down", "shared_gate", "experts"
    rest = {name: getattr(like, name) for name in names}
    delta = delta_shapes(config.width, config.delta_net, leaf)
    return LayerParams(query=None, key=None, value=None, out=None, delta=delta, **rest)


def layer_shapes(config: ModelConfig, leaf: Callable[..., Any], *, is_owner: bool, has_experts: bool) -> LayerParams:
    """The weights of a layer with this configuration, each made by `leaf` of its shape; an owner has keys and values."""
    c = config
    queries, keys = c.num_query_heads * c.head_size, c.num_kv_heads * c.head_size
    width = c.block_width(has_experts)
    between = leaf(c.width) if has_experts and c.norms_experts else None
    return LayerParams(
        attention_norm=leaf(c.width),
        query=leaf(c.width, queries * (1 + c.has_output_gate)),
        key=leaf(c.width, keys) if is_owner else None,
        value=leaf(c.width, keys) if is_owner and not c.keys_are_values else None,
        out=leaf(queries, c.width),
        mlp_norm=leaf(c.width),
        gate=leaf(c.width, width) if width else None,
        up=leaf(c.width, width) if width else None,
        down=leaf(width, c.width) if width else None,
        query_bias=leaf(queries) if c.qkv_bias else None,
        key_bias=leaf(keys) if c.qkv_bias and is_owner else None,
        value_bias=leaf(keys) if c.qkv_bias and is_owner else None,
        query_norm=leaf(c.head_size) if c.qk_norm else None,
        key_norm=leaf(c.head_size) if c.qk_norm and is_owner else None,
        out_bias=leaf(c.width) if c.out_bias else None,
        sink=leaf(c.num_query_heads) if c.has_sinks else None,
        all_query_norm=leaf(queries) if c.all_heads_norm else None,
        all_key_norm=leaf(keys) if c.all_heads_norm and is_owner else None,
        after_attention_norm=leaf(c.width) if c.norms_around else None,
        after_mlp_norm=leaf(c.width) if c.norms_around else None,
        layer_scale=leaf(1) if c.has_layer_scale else None,
        mlp_out_norm=between,
        shared_gate=leaf(c.width, 1) if has_experts and c.gates_shared else None,
        experts_norm=between,
        experts_out_norm=between,
        input_gate=leaf(c.width, c.layer_input_width) if c.layer_input_width else None,
        input_out=leaf(c.layer_input_width, c.width) if c.layer_input_width else None,
        input_norm=leaf(c.width) if c.layer_input_width else None,
        experts=expert_shapes(c, leaf) if has_experts else None,
    )


def expert_shapes(config: ModelConfig, leaf: Callable[..., Any]) -> Experts:
    """The experts of a layer, of leaves that `leaf` makes."""
    c, count = config, config.num_experts
    matrices = leaf(count, c.mlp_width, c.width)
    experts = Experts(router=leaf(c.width, count), gate=matrices, up=matrices, down=matrices)
    if c.routes_by_sigmoid:
        experts = experts.replace(choice_bias=jax.ShapeDtypeStruct((count,), jnp.float32))
    if c.expert_bias:
        of_width, of_out = leaf(count, c.mlp_width), leaf(count, c.width)
        biases = {"router_bias": leaf(count), "gate_bias": of_width, "up_bias": of_width, "down_bias": of_out}
        experts = experts.replace(**biases)
    if c.norms_experts:
        experts = experts.replace(router_scale=leaf(c.width), expert_scale=leaf(count))
    return experts


def leaf_name(path: Any) -> str:
    """The name of a leaf of `Params`, such as `layers.0.query`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named_leaves(params: Params) -> dict[str, Any]:
    """The folded weights by name, in the order of the tree. Refuses weights that do not fit their configuration."""
    wanted = {leaf_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(weight_shapes(params.config))[0]}
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: isinstance(x, Codes | LowRank | Blocks))
    named = {leaf_name(path): leaf for path, leaf in leaves}
    named = {name: fold(leaf, wanted[name].shape) if name in wanted else leaf for name, leaf in named.items()}
    for name in wanted | named:
        got, rule = (getattr(leaves.get(name), "shape", None) for leaves in (named, wanted))
        if got != rule:
            message = f"{name} must have shape {rule}, as params.config defines it; got {got}. Correct either."
            raise refused(message, params="does_not_fit")
    return named


def init_params(
    config: ModelConfig, key: PRNGKeyArray, scale: float = 0.02, dtype: Any = jnp.float32, joins: bool = False
) -> Params:
    """Random weights: normal with standard deviation `scale`, smaller for outputs by depth; norms are 1, biases and sinks 0.

    Taps of convolutions are larger, and states halve in 1 to 55 tokens. With `joins`, the same numbers are joined as by
    `jkv.join_weights`, and at most one group of them is in memory twice.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(weight_shapes(config, dtype))
    shrink = (2.0 * config.num_layers) ** -0.5

    def draw(index: int) -> Float[Array, "..."]:
        path, shape = paths[index]
        name = jax.tree_util.keystr(path).rsplit(".", 1)[-1]
        if name in ("layer_scale", "router_scale", "expert_scale"):
            return jnp.ones(shape.shape, dtype)
        if name.endswith("norm"):
            is_offset = ".delta." not in jax.tree_util.keystr(path)
            return jnp.full(shape.shape, 1 - (config.norm_offset or 0) * is_offset, shape.dtype)
        if name == "log_decay":
            return jnp.linspace(-4.0, 0.0, shape.shape[0], dtype=dtype)
        if name.endswith("taps"):
            return jax.random.normal(jax.random.fold_in(key, index), shape.shape, dtype) * shape.shape[-1] ** -0.5
        if name.endswith("bias") or name == "sink":
            return jnp.zeros(shape.shape, shape.dtype)
        size = scale * (shrink if name in ("out", "down") else 1.0)
        return (size * jax.random.normal(jax.random.fold_in(key, index), shape.shape)).astype(dtype)

    return filled(treedef, draw, joins)
