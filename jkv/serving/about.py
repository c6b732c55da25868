"""The endpoints about the model that is served: its name and length, and its tokenizer."""

import asyncio
import functools
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jkv.engine.requests import spread_policies
from jkv.engine.service import Service
from jkv.policies import make as make_policy
from jkv.serving.jobs import Encoder, longest_text
from jkv.serving.options import ServerOptions
from jkv.serving.requests import DetokenizeFields, F, TokenizeFields

TOKENIZER_FIELDS = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")


class Serving(Protocol):
    """What these endpoints ask of the server."""

    service: Service
    options: ServerOptions
    encoder: Encoder
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
        engine, options = self.server.service.engine, self.server.options
        policy = make_policy(options.policy, options.settings)
        (policy,) = spread_policies(policy, 1, engine.model.params, engine.options.kv_format)
        return longest_text(engine, policy)

    @property
    def card(self) -> dict[str, Any]:
        """What clients see of the model."""
        own = {"id": self.server.name, "object": "model", "created": self.server.began, "owned_by": "jkv"}
        return own | {"max_model_len": self.max_model_len, "policy": self.server.options.policy}

    async def models(self, request: Request) -> Response:
        """`/v1/models`: the one that is served."""
        return JSONResponse({"object": "list", "data": [self.card]})

    async def one_model(self, request: Request) -> Response:
        """`/v1/models/{name}`: the same, by its name."""
        self.server.check_model(request.path_params["name"])
        return JSONResponse(self.card)

    async def tokenize(self, request: Request) -> Response:
        """`/tokenize`: the token ids of `prompt`, or of `messages`, of any length."""
        fields = await self.server.read(TokenizeFields, request)
        self.server.check_model(fields.model)
        tokens = await asyncio.to_thread(self.server.encoder.tokenize, fields)
        return JSONResponse({"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        """`/detokenize`: the text of `tokens`."""
        fields = await self.server.read(DetokenizeFields, request)
        self.server.check_model(fields.model)
        encoder = self.server.encoder
        (ids,) = await asyncio.to_thread(encoder.encode, [fields.tokens]) if fields.tokens else ([],)
        return JSONResponse({"prompt": encoder.model.tokenizer.decode(ids)})

    async def tokenizer_info(self, request: Request) -> Response:
        """`/tokenizer_info`: the special tokens and the chat template, for clients without the tokenizer."""
        tokenizer = self.server.encoder.model.tokenizer
        return JSONResponse({name: getattr(tokenizer, name, None) for name in TOKENIZER_FIELDS})
