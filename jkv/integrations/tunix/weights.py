"""The weights of tunix's models as `jkv` reads them: the arrays themselves, in tunix's own layout, LoRA beside its base.

tunix holds a query projection as [D, N, H] and jkv's own is [D, N*H]; `jkv.model.decoder` reads both without a copy, so a
`Params` made here costs no memory. No weight of Qwen2, Qwen3 or Llama 3 in tunix is a transpose of jkv's.
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

from jkv.model.families import FAMILIES
from jkv.model.params import LayerParams, LowRank, ModelConfig, Params, weight_shapes

MODULES = {  # of tunix -> the family's name, and the field of its configuration that ties the embeddings
    "tunix.models.qwen2.model": ("qwen2", "use_tied_embedding"),
    "tunix.models.qwen3.model": ("qwen3", "use_tied_embedding"),
    "tunix.models.llama3.model": ("llama", "weight_tying"),
}
PATHS = {  # field of Params or LayerParams -> path of the nnx module, below the layer
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
ADAPTERS = ("_lora_a", "_lora_b")  # what qwix adds to the name of a weight
MOST_POSITIONS = 131_072  # of a model that sets no limit

Leaves = dict[str, Any]  # path -> array


def params_of(model: nnx.Module, *, lora_alpha: float | None = None, end_ids: tuple[int, ...] = ()) -> Params:
    """The weights of a tunix Qwen2, Qwen3 or Llama 3 model, none copied; what `jkv.generate` and `jkv.score` take.

    LoRA adapters of qwix stay apart from what they adapt. `lora_alpha` is their alpha; None asks the model's own rules.
    tunix's training replaces a model's arrays, so call it again after an update.

    Raises:
      ValueError: another architecture, quantised weights, or adapters where jkv reads none.
    """
    leaves = leaves_of(model)
    config = dataclasses.replace(config_of(model), end_ids=end_ids)
    warn_of_dtype(model)
    return make_params(config, leaves, scales_of(model, leaves, lora_alpha))


def leaves_of(state: Any) -> Leaves:
    """The weights of an nnx module, or of a state of one, by path, as in `layers.0.attn.q_proj.w`."""
    if isinstance(state, nnx.Module):
        state = nnx.state(state)
    flat = nnx.to_flat_state(state if isinstance(state, nnx.State) else nnx.State(state))
    weights = [(path, leaf) for path, leaf in flat if isinstance(leaf, nnx.Param | nnx.LoRAParam | jax.Array)]
    return {".".join(map(str, path)): leaf if isinstance(leaf, jax.Array) else leaf.get_value() for path, leaf in weights}


def config_of(model: nnx.Module) -> ModelConfig:
    """The shape of a tunix model.

    Raises:
      ValueError: an architecture that jkv cannot run.
    """
    kind = next((kind for kind in type(model).__mro__ if kind.__module__ in MODULES), None)
    config: Any = getattr(model, "config", None)
    if kind is None or getattr(config, "num_experts", None):
        got = type(model).__name__ + (f" with {config.num_experts} experts" if kind else "")
        raise ValueError(
            f"jkv runs tunix's dense Qwen2, Qwen3 and Llama3 models; got {got}. Take one of these, or another rollout engine."
        )
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
    """The base that a tunix model rotates by: Qwen3 and Llama 3 in tunix 0.1.7 never pass their configuration's on.

    Rollouts must be of the model that is trained, so what tunix computes counts; it warns where the two differ.
    """
    rotate = getattr(module, "apply_rope", None)
    if rotate is None or "rope_theta" in module.Attention.block.__code__.co_names:
        return configured
    used = float(inspect.signature(rotate).parameters["rope_theta"].default)
    if used != configured:
        warnings.warn(
            f"{module.__name__} rotates by a base of {used:,.0f}, though its configuration says {configured:,.0f}; jkv uses "
            "the base of the model that is trained. Positions of a pretrained checkpoint are then not as it learned them.",
            stacklevel=4,
        )
    return used


def scales_of(model: nnx.Module, leaves: Leaves, lora_alpha: float | None = None) -> dict[str, float]:
    """The factor of each adapter, alpha / rank, by the path of its weight.

    Raises:
      ValueError: an adapter whose alpha is unknown.
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
            raise ValueError(f"The adapter of {weight} needs its alpha, which the model's rules do not give. Pass lora_alpha=.")
        scales[weight] = alpha / rank
    return scales


def lora_rules(model: nnx.Module) -> list[Any]:
    """The rules that `qwix.apply_lora_to_model` gave a model; it keeps them in the closure of the model's own call."""
    closure = getattr(type(model).__call__, "__closure__", None) or ()
    bound = [cell.cell_contents for cell in closure if isinstance(cell.cell_contents, functools.partial)]
    providers = {id(arg): arg for one in bound for arg in one.args if isinstance(arg, qwix.LoraProvider)}
    return [rule for provider in providers.values() for rule in provider._rules]


def make_params(config: ModelConfig, leaves: Mapping[str, Any], scales: Mapping[str, float]) -> Params:
    """A `Params` of these very arrays.

    Raises:
      ValueError: weights that are missing, of another size, or unknown.
    """
    shapes, left = weight_shapes(config), dict(leaves)

    def take(field: str, shape: jax.ShapeDtypeStruct | None, layer: str = "") -> Any:
        if shape is None:
            return None
        path = layer + PATHS[field]
        weight = left.pop(path, None)
        if weight is None or weight.size != shape.size:
            got = "none" if weight is None else f"one of shape {weight.shape}"
            raise ValueError(f"A {config.family} model holds {path} of {shape.size} numbers; got {got}. Pass all its weights.")
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
        raise ValueError(
            f"jkv reads plain weights, and LoRA of {', '.join(ADAPTED)}; got {', '.join(sorted(left)[:3])} too "
            f"({len(left)} in all). Adapt these alone, and quantise nothing."
        )
    if len({leaf.dtype for leaf in jax.tree.leaves(params)}) > 1:
        found = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(params)})
        raise ValueError(f"All weights must be of one dtype; got {', '.join(found)}. Cast the model before it is trained.")
    return params


def merged(leaves: Mapping[str, Any], new: Mapping[str, Any]) -> Leaves:
    """Weights, some of them replaced; those may be adapters alone.

    Raises:
      ValueError: weights that are not there, or of another shape or dtype.
    """
    for path, leaf in new.items():
        if path not in leaves:
            raise ValueError(f"New weights must be those of the model; it holds no {path}. Pass nnx.state of the same model.")
        old = leaves[path]
        if (leaf.shape, leaf.dtype) != (old.shape, old.dtype):
            raise ValueError(
                f"{path} must be {old.dtype}{list(old.shape)}, as before; got {leaf.dtype}{list(leaf.shape)}. Build anew."
            )
    if not new:
        raise ValueError("New weights must hold at least one; got none. Pass nnx.state(model, nnx.Param), or nnx.LoRAParam.")
    return {**leaves, **new}


def warn_of_dtype(model: nnx.Module) -> None:
    """Warns where tunix computes in another dtype than that of its weights, which jkv does not."""
    config: Any = getattr(model, "config", None)
    computes, holds = getattr(config, "dtype", None), getattr(config, "param_dtype", None)
    if computes is not None and jnp.dtype(computes) != jnp.dtype(holds):
        warnings.warn(
            f"the model computes in {jnp.dtype(computes)} with weights of {jnp.dtype(holds)}; jkv computes, and caches, in the "
            "weights' dtype, so log-probabilities differ by rounding. Give both one dtype to save memory.",
            stacklevel=3,
        )
