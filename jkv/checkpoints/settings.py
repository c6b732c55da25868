"""The settings of a config.json: its fields, completed with what a file may leave out.

The defaults are transformers', written down here and in the families. So a file means the same whatever version of
transformers is installed, and whichever wrote it: versions 4, 5.0 and later ones write RoPE, layers and experts in forms of
their own. `jkv.checkpoints.architectures` checks the fields before, and makes a `ModelConfig` of the settings.
"""

import types
from collections.abc import Mapping
from typing import Any

from jkv.checkpoints.family import FULL, WINDOWED, Family
from jkv.checkpoints.json_files import Rule

DEFAULTS: Mapping[str, Any] = {  # where a family has no default of its own
    "num_key_value_heads": None,  # as many as query heads
    "head_dim": None,  # the width divided by the query heads
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "layer_types": None,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": None,
}
UNSET = frozenset(  # null is as good as absent
    {"rope_parameters", "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings", "tie_word_embeddings"}
)
ORIGINAL = "original_max_position_embeddings"
EXTENDED = ("llama3", "yarn", "longrope")  # kinds of RoPE that need the positions before they were extended
OLD_NAMES = {"su": "longrope"}  # of kinds of RoPE
BESIDE_KINDS = (("rope_type", "default"), ("rope_theta", None))  # what transformers 5.0 to 5.12 add to one object for each kind


def settings_of(fields: Mapping[str, Any], family: Family, rules: Mapping[str, Rule]) -> Any:
    """The settings as attributes with the names of config.json.

    They also have `rope`, the RoPE parameters of layers with full attention, and `window_rope`. `fields` are checked before;
    those without a rule are left out.
    """
    given = {name: fields[name] for name in rules.keys() & fields.keys() if fields[name] is not None or name not in UNSET}
    settings = types.SimpleNamespace(**{**DEFAULTS, **family.defaults, **given})
    if settings.num_key_value_heads is None:
        settings.num_key_value_heads = settings.num_attention_heads
    if settings.head_dim is None:
        settings.head_dim = settings.hidden_size // settings.num_attention_heads
    if family.has_window_switch and not settings.use_sliding_window:
        settings.sliding_window = None
    if family.has_layers_without_rope and not settings.no_rope_layers:
        interval = settings.no_rope_layer_interval
        settings.no_rope_layers = [int((layer + 1) % interval != 0) for layer in range(settings.num_hidden_layers)]
    settings.layer_types = family.kinds(settings)
    settings.rope, settings.window_rope = ropes_of(given, settings, family)
    return settings


def ropes_of(given: Mapping[str, Any], settings: Any, family: Family) -> tuple[dict[str, Any], dict[str, Any]]:
    """The RoPE parameters of layers with full attention and of layers with a window, both complete.

    A file may have an object for each kind of layer. Otherwise its one object is for all layers. In a family with RoPE by kind
    it is for layers with full attention: the others then have plain RoPE, as in version 4 of transformers.
    """
    rope = given.get("rope_parameters") or given.get("rope_scaling") or family.defaults.get("rope_parameters") or {}
    if not family.has_rope_by_kind:
        own = completed_rope(rope, settings, settings.rope_theta)
        return own, own
    by_kind = rope if rope.keys() & {FULL, WINDOWED} else {FULL: rope}
    local = getattr(settings, "rope_local_base_freq", None) or by_kind[FULL].get("rope_theta", settings.rope_theta)
    return (
        completed_rope(by_kind.get(FULL, {}), settings, settings.rope_theta),
        completed_rope(by_kind.get(WINDOWED, {}), settings, local),
    )


def completed_rope(rope: Mapping[str, Any], settings: Any, theta: float) -> dict[str, Any]:
    """RoPE parameters with their kind, base, rotated share and original positions."""
    kind = kind_of_rope(rope)
    whole = {"rope_theta": theta, "partial_rotary_factor": settings.partial_rotary_factor, **rope, "rope_type": kind}
    if kind in EXTENDED:
        whole[ORIGINAL] = rope.get(ORIGINAL) or settings.original_max_position_embeddings or settings.max_position_embeddings
    return whole


def kind_of_rope(rope: Mapping[str, Any]) -> Any:
    """The kind that RoPE parameters name, by its present name."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    return OLD_NAMES.get(kind, kind) if isinstance(kind, str) else kind
