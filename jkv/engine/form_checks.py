"""Checks a request's form before anything compiles: the settings beside it, and that the model's tokens can write it."""

from collections.abc import Sequence
from typing import Any

from jkv.checks import shown
from jkv.errors import InputError
from jkv.forms import Form
from jkv.forms.host_walks import HostRules, walker_of
from jkv.forms.tables import ANSWERS, MAY_THINK, THINKS
from jkv.model.params import Model
from jkv.reasoning.marks import MOST_MARK, marks_of

# They could end an answer early, or leave it no token.
EXCLUDE = "stop_strings", "min_tokens", "allowed_token_ids", "bad_words"


def check_form(model: Model, options: Any, ends: Sequence[int], most_ends: int) -> bool:
    """Refuses a form (of `jkv.RequestOptions`) that a request cannot have. Returns whether the host must follow it.

    `ends` are the tokens that end the request. The form's table, or its rules on the host, are made here.

    Raises:
      ValueError: the reason.
    """
    form = options.form
    if form is None:
        return False
    if not isinstance(form, Form):
        rule = "{field} must be made by jkv.forms.json, regex, choice or grammar, such as jkv.forms.json(schema); got {got}."
        raise InputError(rule, field="form", code="wrong_type", got=shown(form))
    if model.tokenizer is None:
        rule = "{field} needs a model with a tokenizer; this one has none. Restrict its tokens by their ids."
        raise InputError(rule, field="form", code="unsupported")
    for name in EXCLUDE:
        if getattr(options, name):
            rule = "{field} could break the form of the answer; got both. Leave one out."
            raise InputError(rule, field=name, code="conflict")
    if options.forced_tokens is not None:
        raise InputError(
            "{field} may break the form of the answer; got both. Leave one out.", field="forced_tokens", code="conflict"
        )
    if not 0 < len(ends) <= most_ends:
        rule = "{field} must be 1 to {most} token ids with a form, whose answer ends by one of them; got {got}."
        raise InputError(rule, field="stop_ids", code="conflict", most=most_ends, got=len(ends))
    return isinstance(walker_of(form, model.tokenizer, model.config.vocab_size), HostRules)


def start_of(model: Model, prompt: Any) -> int:
    """How a completion of a prompt begins: within thinking, after it, or before it, where the model may think or answer."""
    tail, marks = model.tokenizer.decode(prompt[-MOST_MARK:]), marks_of(model.tokenizer)
    if marks.is_open(tail):
        return THINKS
    return ANSWERS if tail.rstrip().endswith(marks.ends) else MAY_THINK
