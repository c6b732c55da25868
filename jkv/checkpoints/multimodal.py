"""The text model inside of a checkpoint that also reads images or sound: its configuration and its tensors.

Only text goes through jkv. What belongs to images and sound is left where it is.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jkv.checkpoints.config_rules import MEANINGLESS, NAMES
from jkv.checkpoints.families import FAMILIES
from jkv.checkpoints.family import Family
from jkv.checkpoints.json_files import CORRECT, OBJECT, SWITCH, TEXT, Rule, check_fields, shown

OUTER = NAMES | {"model_type": TEXT, "text_config": OBJECT, "tie_word_embeddings": SWITCH}
KEPT = ("quantization_config", "compression_config", "tie_word_embeddings", "eos_token_id", "dtype", "torch_dtype")


def text_fields(fields: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The config.json of the text model in that of a multimodal one; any other config.json as it is.

    Raises:
      ValueError: no text model, a model of another class, or a field that may have a meaning.
    """
    families = {one.multimodal.name: one for one in FAMILIES.values() if one.multimodal}
    family = families.get(str(fields.get("model_type")))
    if family is None or family.multimodal is None:
        return fields
    whole, name = family.multimodal, family.name
    of_class = Rule(f"[{whole.architecture!r}]", lambda value: value == [whole.architecture])
    check_fields(fields, OUTER | {"architectures": of_class}, where, ["text_config"])
    unknown = sorted(fields.keys() - OUTER.keys() - MEANINGLESS - whole.ignored_fields)
    if unknown:
        raise ValueError(
            f"{where}: every field must be known for {whole.architecture}, got also {shown(unknown)}. Remove what has no "
            "effect, or choose a checkpoint without it."
        )
    text = dict(fields["text_config"])
    check_fields(text, {"model_type": Rule(repr(name), lambda value: value == name)}, f"{where}: text_config")
    text.pop("architectures", None)
    outer = {field: fields[field] for field in KEPT if field in fields}
    unequal = [field for field in outer if text.get(field) not in (None, outer[field])]
    if "tie_word_embeddings" in unequal:
        raise ValueError(f"{where}: tie_word_embeddings must be the same in text_config, got another value there. {CORRECT}")
    return text | outer | {"model_type": name, "architectures": [family.architecture]}


def text_tensors(names: Iterable[str], family: Family, where: str) -> dict[str, str]:
    """The tensors of a checkpoint by their names in the family's own checkpoints, without tensors of images and sound.

    Raises:
      ValueError: two tensors of one name.
    """
    names = list(names)
    if family.multimodal is None:
        return {name: name for name in names}
    found: dict[str, str] = {}
    for name in names:
        if name.startswith(family.multimodal.others):
            continue
        prefix = max((prefix for prefix in family.multimodal.prefixes if name.startswith(prefix)), key=len, default="")
        own = family.multimodal.prefixes.get(prefix, "") + name.removeprefix(prefix)
        if own in found:
            raise ValueError(f"{where} must have one tensor {own}, got {found[own]} and {name}. Remove either.")
        found[own] = name
    return found
