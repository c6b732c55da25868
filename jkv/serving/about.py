"""The endpoints about the model that is served: its name and length, and its tokenizer."""

import asyncio
import contextlib
import functools
from collections.abc import Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jkv.engine.memory import num_layer_heads
from jkv.engine.requests import spread_policies
from jkv.engine.service import Service
from jkv.policies import POLICIES, has_budget
from jkv.policies import make as make_policy
from jkv.serving.access import client_of
from jkv.serving.encodings import Encodings
from jkv.serving.jobs import Encoder, longest_text
from jkv.serving.options import ServerOptions
from jkv.serving.requests import DetokenizeFields, F, TokenizeFields

TRIED_BUDGET = 512  # slots of a policy that is tried
TOKENIZER_FIELDS = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")


class Serving(Protocol):
    """What these endpoints ask of the server."""

    service: Service
    options: ServerOptions
    encoder: Encoder
    encodings: Encodings
    name: str
    began: int

    def check_model(self, name: str | None) -> None: ...
    async def read(self, kind: type[F], request: Request) -> F: ...


class About:
    """The endpoints, which draw no tokens.

    Args:
      server: whose model it is.
    """

    def __init__(self, server: Serving) -> None:
        self.server = server

    @functools.cached_property
    def max_model_len(self) -> int:
        """The most tokens of prompt and completion together, with the server's own policy."""
        return self._longest(self.server.options.policy, self.server.options.settings)

    def _longest(self, name: str, settings: Mapping[str, Any]) -> int:
        engine = self.server.service.engine
        (policy,) = spread_policies(make_policy(name, settings), 1, engine.model.params, engine.options.kv_format)
        return longest_text(engine, policy)

    @functools.cached_property
    def policies(self) -> list[dict[str, Any]]:
        """The policies that a request may name with nothing but a budget, and whether each has one."""
        options, found = self.server.options, []
        for name in dict.fromkeys((options.policy, *(options.allowed or (*POLICIES, *options.own)))):
            with contextlib.suppress(ValueError):  # it needs more settings, or more than the engine keeps
                if self._longest(name, {"budget": TRIED_BUDGET} if has_budget(name) else {}) > 1:
                    found.append({"name": name, "has_budget": has_budget(name)})
        return found

    @property
    def memory(self) -> dict[str, Any]:
        """Bytes of the pool of pages, and of one token's keys and values in all layers with pages."""
        engine = self.server.service.engine
        of_token = num_layer_heads(engine.model.params) * engine.page_bytes / engine.capacity.page_size
        return {"kv_pool_bytes": engine.num_pages * engine.page_bytes, "kv_bytes_per_token": of_token}

    def cards(self) -> list[dict[str, Any]]:
        """What clients see of the model and its adapters; each adapter names the model as its parent."""
        own = self.card()
        return [own, *({**own, "id": name, "parent": own["id"]} for name in self.server.service.engine.adapters)]

    def card(self) -> dict[str, Any]:
        """What clients see of the model."""
        options, template = self.server.options, getattr(self.server.encoder.model.tokenizer, "chat_template", None)
        own = {"id": self.server.name, "object": "model", "created": self.server.began, "owned_by": "jkv"}
        own |= {"max_model_len": self.max_model_len, "is_chat": bool(template)}
        return (
            own | {"policy": options.policy, "budget": options.settings.get("budget"), "policies": self.policies} | self.memory
        )

    async def models(self, request: Request) -> Response:
        """`/v1/models`: the one that is served, and its adapters."""
        return JSONResponse({"object": "list", "data": await asyncio.to_thread(self.cards)})

    async def one_model(self, request: Request) -> Response:
        """`/v1/models/{name}`: one of them, by its name."""
        name = request.path_params["name"]
        self.server.check_model(name)
        cards = await asyncio.to_thread(self.cards)
        return JSONResponse(next(card for card in cards if card["id"] == name))

    async def tokenize(self, request: Request) -> Response:
        """`/tokenize`: the token ids of `prompt`, or of `messages`, of any length."""
        fields = await self.server.read(TokenizeFields, request)
        self.server.check_model(fields.model)
        tokens = await self.server.encodings.run(client_of(request), self.server.encoder.tokenize, fields)
        return JSONResponse({"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        """`/detokenize`: the text of `tokens`."""
        fields = await self.server.read(DetokenizeFields, request)
        self.server.check_model(fields.model)
        encoder = self.server.encoder

        def text() -> Any:
            return encoder.model.tokenizer.decode(encoder.encode([fields.tokens])[0] if fields.tokens else [])

        return JSONResponse({"prompt": await self.server.encodings.run(client_of(request), text)})

    async def tokenizer_info(self, request: Request) -> Response:
        """`/tokenizer_info`: the special tokens and the chat template, for clients without the tokenizer."""
        tokenizer = self.server.encoder.model.tokenizer
        return JSONResponse({name: getattr(tokenizer, name, None) for name in TOKENIZER_FIELDS})
