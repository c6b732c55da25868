"""Errors of the engine in the words of clients: its names become those of OpenAI's fields and of the server's options."""

import re
from collections.abc import Container

SAME = (  # what the engine writes, and what clients know
    (r"Raise max_slots, or lower", "Lower"),
    (r"Raise kv_memory, or lower the budget, max_new_tokens or page_size", "Lower the budget or max_new_tokens"),
    (r"the engine's max_slots", "the server's --context"),
    (r"Build it with max_stop_ids=\d+", "Send fewer stop_ids"),
    (r"\bkeep=True\b", "store=true"),
    (r"\bLeave keep out\b", "Leave store out"),
    (r"\bstop_strings\b", "stop"),
    (r"\bstop_ids\b", "stop_token_ids"),
)
LIMIT = r"\bmax_new_tokens\b"
PARAMS = {"A stop string": "stop", "This engine takes at most": "stop_token_ids"}  # by how a message begins


def for_client(message: str, limit: str = "max_tokens") -> str:
    """A message of the engine in a client's words; `limit` is what the client called the most new tokens.

    >>> for_client("max_new_tokens must be at least 1; got -1.", "max_completion_tokens")
    'max_completion_tokens must be at least 1; got -1.'
    """
    for engines, clients in (*SAME, (LIMIT, limit)):
        message = re.sub(engines, clients, message)
    return message


def param_of(message: str, names: Container[str]) -> str | None:
    """The field that a message is about: the first word, or a policy's setting; None if it is none of the names.

    >>> param_of("stream_options are of streams", {"stream", "stream_options"}), param_of("r_kv needs budget=", {"budget"})
    ('stream_options', 'budget')
    """
    for begin, param in PARAMS.items():
        if message.startswith(begin):
            return param
    for pattern in (r"(\w+)", r"\w+ needs (\w+)=", r"\w+'s (\w+)"):
        found = re.match(pattern, message)
        if found and found[1] in names:
            return found[1]
    return None
