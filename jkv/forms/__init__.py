"""Forms that an answer must have, such as a JSON schema, as finite automata over the tokens of a vocabulary, or as grammars.

`jkv.forms.json(...)`, `regex(...)`, `choice(...)` and `grammar(...)` make a `Form`, the argument `form` of a request.
"""

from jkv.forms.form import Form, choice, grammar, json, regex

__all__ = ["Form", "choice", "grammar", "json", "regex"]
