"""Fields that clients of other servers send under other names, as the fields that they mean here."""

from collections.abc import Mapping
from typing import Any

from jkv.checks import shown
from jkv.errors import InputError

SAME = {  # one for one, the names of llama.cpp, Ollama, SGLang and text-generation-inference
    "json_schema": "guided_json",
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "regex": "guided_regex",
    "grammar": "guided_grammar",
    "repeat_penalty": "repetition_penalty",
}
THINKING = ("enable_thinking", "think", "thinking", "reasoning")  # of vLLM and Qwen, Ollama, Anthropic and GLM, OpenRouter
EFFORTS = ("minimal", "low", "medium", "high")


def renamed(body: Mapping[str, Any], is_chat: bool) -> dict[str, Any]:
    """A body in which fields of other servers have the names that they have here; a field of our own name comes first.

    Raises:
      InputError: a field that switches thinking, of another form than its server has.

    >>> renamed({"repeat_penalty": 1.1, "think": False, "top_k": 5}, is_chat=True)
    {'top_k': 5, 'repetition_penalty': 1.1, 'chat_template_kwargs': {'enable_thinking': False}}
    """
    found = {name: value for name, value in body.items() if name not in SAME and not (is_chat and name in THINKING)}
    for name, own in SAME.items():
        if body.get(name) is not None and found.get(own) is None:
            found[own] = body[name]
    for name in THINKING if is_chat else ():
        if body.get(name) is not None:
            for own, value in thinking(name, body[name]).items():
                if own != "enable_thinking" and found.get(own) is None:
                    found[own] = value
                elif own == "enable_thinking" and isinstance(found.get("chat_template_kwargs") or {}, dict):
                    found["chat_template_kwargs"] = {own: value, **(found.get("chat_template_kwargs") or {})}
    return found


def thinking(name: str, value: Any) -> dict[str, Any]:
    """What a field that switches thinking means here: whether to think, how much, and whether the response has it.

    >>> thinking("reasoning", {"effort": "low", "exclude": True}), thinking("thinking", {"type": "disabled"})
    ({'reasoning_effort': 'low', 'include_reasoning': False}, {'enable_thinking': False})
    """
    value = {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value
    if isinstance(value, bool):
        return {"enable_thinking": value}
    if name != "enable_thinking" and value in EFFORTS:
        return {"reasoning_effort": value}
    if name in ("thinking", "reasoning") and isinstance(value, dict):
        found: dict[str, Any] = {}
        effort, exclude = value.get("effort"), value.get("exclude")
        kind = value.get("type")
        of_kind = {"enabled": True, "adaptive": True, "disabled": False}.get(kind) if isinstance(kind, str) else None
        is_on = value.get("enabled", of_kind)
        if isinstance(is_on, bool) or effort == "none":
            found["enable_thinking"] = is_on is True and effort != "none"
        if isinstance(effort, str) and effort != "none":
            found["reasoning_effort"] = effort
        if isinstance(exclude, bool):
            found["include_reasoning"] = not exclude
        return found
    rule = "{field} switches thinking: true, false, or an object of its server; got {got}. Send chat_template_kwargs instead."
    raise InputError(rule, field=name, code="wrong_type", got=shown(value))
