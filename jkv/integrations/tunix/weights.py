"""Weights of tunix models as `jkv.Params`: the same arrays in the layout of tunix, with LoRA adapters separate.

The shape of a query projection is [D, N, H] in tunix and [D, N*H] in jkv. `jkv.model.decoder` takes both without a copy, so
these `Params` use no memory. No weight of Qwen2, Qwen3 or Llama 3 in tunix is a transpose of that of jkv.
"""

import dataclasses
import functools
import inspect
import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from flax import nnx

from jkv.checkpoints.families import FAMILIES
from jkv.errors import refused
from jkv.model.params import LayerParams, LowRank, ModelConfig, Params
from jkv.model.weight_shapes import weight_shapes

TENSOR = "tp"  # tunix's name of the axis that splits heads; its others split samples, and may split weights at rest
MODULES = {  # module of tunix -> name of the family, and the configuration field that ties the embeddings
    "tunix.models.qwen2.model": ("qwen2", "use_tied_embedding"),
    "tunix.models.qwen3.model": ("qwen3", "use_tied_embedding"),
    "tunix.models.llama3.model": ("llama", "weight_tying"),
}
PATHS = {  # field of Params or LayerParams -> path in the nnx module, relative to the layer
    "embedding": "embedder.input_embedding",
    "final_norm": "final_norm.w",
    "unembedding": "lm_head.w",
    "attention_norm": "input_layernorm.w",
    "query": "attn.q_proj.w",
    "key": "attn.k_proj.w",
    "value": "attn.v_proj.w",
    "out": "attn.o_proj.w",
    "mlp_norm": "post_attention_layernorm.w",
    "gate": "mlp.gate_proj.kernel",
    "up": "mlp.up_proj.kernel",
    "down": "mlp.down_proj.kernel",
    "query_bias": "attn.q_bias",
    "key_bias": "attn.k_bias",
    "value_bias": "attn.v_bias",
    "query_norm": "attn.q_norm.w",
    "key_norm": "attn.k_norm.w",
}
ADAPTED = ("query", "key", "value", "out", "gate", "up", "down", "unembedding")  # fields that may carry LoRA
ADAPTERS = ("_lora_a", "_lora_b")  # suffixes that qwix adds to the name of a weight
MOST_POSITIONS = 131_072  # tunix models have no limit

Leaves = dict[str, Any]  # path -> array


def params_of(model: nnx.Module, *, lora_alpha: float | None = None, end_ids: tuple[int, ...] = ()) -> Params:
    """The weights of a Qwen2, Qwen3 or Llama 3 model of tunix, without a copy, for `jkv.generate` and `jkv.score`.

    LoRA adapters of qwix stay separate. `lora_alpha` is their alpha; None reads it from the rules of the model. Training in
    tunix replaces the arrays of a model, so call this again after an update.

    Raises:
      ValueError: the architecture is not supported, weights are quantised, or an adapter is at an unsupported weight.
    """
    leaves = leaves_of(model)
    config = dataclasses.replace(config_of(model), end_ids=end_ids)
    warn_of_dtype(model)
    return make_params(config, leaves, scales_of(model, leaves, lora_alpha))


def leaves_of(state: Any) -> Leaves:
    """The weights of an nnx module or state by path, such as `layers.0.attn.q_proj.w`."""
    if isinstance(state, nnx.Module):
        state = nnx.state(state)
    flat = nnx.to_flat_state(state if isinstance(state, nnx.State) else nnx.State(state))
    weights = [(path, leaf) for path, leaf in flat if isinstance(leaf, nnx.Param | nnx.LoRAParam | jax.Array)]
    return {".".join(map(str, path)): leaf if isinstance(leaf, jax.Array) else leaf.get_value() for path, leaf in weights}


def config_of(model: nnx.Module) -> ModelConfig:
    """The `ModelConfig` of a tunix model.

    Raises:
      ValueError: jkv cannot run the architecture.
    """
    kind = next((kind for kind in type(model).__mro__ if kind.__module__ in MODULES), None)
    config: Any = getattr(model, "config", None)
    if kind is None or getattr(config, "num_experts", None):
        got = type(model).__name__ + (f" with {config.num_experts} experts" if kind else "")
        rule = f"The model must be a dense Qwen2, Qwen3 or Llama3 of tunix; got {got}. Use one, or another rollout engine."
        raise refused(rule, model="unsupported")
    name, tie_field = MODULES[kind.__module__]
    return ModelConfig(
        family=name,
        vocab_size=config.vocab_size,
        width=config.embed_dim,
        num_layers=config.num_layers,
        num_query_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_dim,
        mlp_width=config.hidden_dim,
        max_positions=MOST_POSITIONS,
        rope_theta=rope_theta(sys.modules[kind.__module__], float(config.rope_theta)),
        norm_epsilon=config.norm_eps,
        qkv_bias=FAMILIES[name].qkv_bias,
        qk_norm=FAMILIES[name].qk_norm,
        tie_embeddings=getattr(config, tie_field),
    )


def rope_theta(module: Any, configured: float) -> float:
    """The RoPE base that a tunix model computes with. Qwen3 and Llama 3 of tunix 0.1.7 ignore their configuration.

    Rollouts must come from the model that is trained, so the base in use is returned, with a warning if the two differ.
    """
    rotate = getattr(module, "apply_rope", None)
    if rotate is None or "rope_theta" in module.Attention.block.__code__.co_names:
        return configured
    used = float(inspect.signature(rotate).parameters["rope_theta"].default)
    if used != configured:
        warnings.warn(
            f"{module.__name__} computes RoPE with a base of {used:,.0f}, but its configuration has {configured:,.0f}; jkv "
            "uses the same base as tunix. A pretrained checkpoint was trained with the other base.",
            stacklevel=4,
        )
    return used


def scales_of(model: nnx.Module, leaves: Leaves, lora_alpha: float | None = None) -> dict[str, float]:
    """The scale of each adapter, alpha / rank, by the path of its weight.

    Raises:
      ValueError: the alpha of an adapter is unknown.
    """
    scales, rules = {}, lora_rules(model)
    for path in leaves:
        if not path.endswith(ADAPTERS[0]):
            continue
        weight = path.removesuffix(ADAPTERS[0])
        rank, module = leaves[path].shape[-1], weight.rpartition(".")[0].replace(".", "/")
        rule = next((rule for rule in rules if re.fullmatch(rule.module_path, module)), None)
        alpha = getattr(rule, "alpha", None) if lora_alpha is None else lora_alpha
        if alpha is None:
            message = f"The adapter of {weight} needs an alpha; the rules of the model have none. Pass lora_alpha=."
            raise refused(message, lora_alpha="missing")
        scales[weight] = alpha / rank
    return scales


def lora_rules(model: nnx.Module) -> list[Any]:
    """The rules of `qwix.apply_lora_to_model`, which stores them in the closure of the model's `__call__`."""
    closure = getattr(type(model).__call__, "__closure__", None) or ()
    bound = [cell.cell_contents for cell in closure if isinstance(cell.cell_contents, functools.partial)]
    providers = {id(arg): arg for one in bound for arg in one.args if isinstance(arg, qwix.LoraProvider)}
    return [rule for provider in providers.values() for rule in provider._rules]


def make_params(config: ModelConfig, leaves: Mapping[str, Any], scales: Mapping[str, float]) -> Params:
    """`Params` of the same array objects.

    Raises:
      ValueError: weights are missing, unknown, or of another size.
    """
    shapes, left = weight_shapes(config), dict(leaves)

    def take(field: str, shape: jax.ShapeDtypeStruct | None, layer: str = "") -> Any:
        if shape is None:
            return None
        path = layer + PATHS[field]
        weight = left.pop(path, None)
        if weight is None or weight.size != shape.size:
            got = "none" if weight is None else f"one of shape {weight.shape}"
            rule = f"A {config.family} model must have {path} of {shape.size} numbers; got {got}. Pass all weights."
            raise refused(rule, weights="does_not_fit")
        if field not in ADAPTED or path + ADAPTERS[0] not in left:
            return weight
        down, up = (left.pop(path + adapter) for adapter in ADAPTERS)
        return LowRank(weight, down, up, scales[path])

    def take_layer(index: int, layer: LayerParams) -> LayerParams:
        fields = [field.name for field in dataclasses.fields(layer)]
        return LayerParams(**{field: take(field, getattr(layer, field), f"layers.{index}.") for field in fields})

    params = shapes.replace(
        embedding=take("embedding", shapes.embedding),
        layers=tuple(take_layer(i, layer) for i, layer in enumerate(shapes.layers)),
        final_norm=take("final_norm", shapes.final_norm),
        unembedding=take("unembedding", shapes.unembedding),
    )
    if left:
        raise refused(
            f"Weights must be plain, or have LoRA adapters at {', '.join(ADAPTED)}; got also {', '.join(sorted(left)[:3])} "
            f"({len(left)} in all). Adapt only these weights, and do not quantise.",
            weights="unsupported",
        )
    if len({leaf.dtype for leaf in jax.tree.leaves(params)}) > 1:
        found = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(params)})
        rule = f"All weights must have one dtype; got {', '.join(found)}. Cast the model before training."
        raise refused(rule, weights="unsupported")
    return params


def merged(leaves: Mapping[str, Any], new: Mapping[str, Any]) -> Leaves:
    """The weights with the new ones in place of the old; the new ones may be adapters alone.

    Raises:
      ValueError: a new weight is unknown, or has another shape or dtype.
    """
    for path, leaf in new.items():
        if path not in leaves:
            rule = f"New weights must be weights of the model; it has no {path}. Pass nnx.state of the same model."
            raise refused(rule, weights="unknown_name")
        old = leaves[path]
        if (leaf.shape, leaf.dtype) != (old.shape, old.dtype):
            raise refused(
                f"{path} must be {old.dtype}{list(old.shape)}, as before; got {leaf.dtype}{list(leaf.shape)}. Build a new one.",
                weights="does_not_fit",
            )
    if not new:
        rule = "New weights must have at least one array; got none. Pass nnx.state(model, nnx.Param), or nnx.LoRAParam."
        raise refused(rule, weights="missing")
    return {**leaves, **new}


def warn_of_dtype(model: nnx.Module) -> None:
    """Warns if tunix computes in another dtype than that of the weights; jkv uses that of the weights."""
    config: Any = getattr(model, "config", None)
    computes, holds = getattr(config, "dtype", None), getattr(config, "param_dtype", None)
    if computes is not None and jnp.dtype(computes) != jnp.dtype(holds):
        warnings.warn(
            f"the model computes in {jnp.dtype(computes)} with weights of {jnp.dtype(holds)}; jkv computes and caches in the "
            "dtype of the weights, so log-probabilities differ by rounding. Use one dtype for both to save memory.",
            stacklevel=3,
        )
