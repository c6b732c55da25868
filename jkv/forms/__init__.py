"""Forms that an answer must have, such as a JSON schema, as finite automata over the tokens of a vocabulary.

`jkv.forms.json(...)`, `jkv.forms.regex(...)` and `jkv.forms.choice(...)` make a `Form`, the argument `form` of a request.
"""

from jkv.forms.form import Form, choice, json, regex

__all__ = ["Form", "choice", "json", "regex"]
