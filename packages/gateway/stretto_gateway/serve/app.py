"""HTTP application of `stretto serve`: an engine for any client, without sessions.

GET  /v1/models  /v1/models/NAME
POST /v1/completions  /v1/chat/completions      whole, or streamed token by token
POST /v1/responses  /v1/messages  /v1/messages/count_tokens
POST /inference/v1/generate                     vLLM's: token ids in, token ids with weight versions out
GET  /health  /metrics  /openapi.json
/generate  /update_weights  /abort  /partials  /spans     the engine's own interface, in MessagePack
"""

from __future__ import annotations

import hmac
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import TypeVar, cast

import msgspec
from msgspec import UNSET
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stretto.core.deadlines import deadline
from stretto.core.errors import DeadlineExceeded, EngineLost, RefusedRequest, several
from stretto.core.records import GenerateRequest, derive_seed
from stretto.processes.http.asgi import HostNames, header
from stretto.processes.http.prometheus import CONTENT_TYPE
from stretto.processes.http.server import admit
from stretto_gateway.app import ChatExchange, ChatServer, Handler, unknown_key
from stretto_gateway.dialects.chat import ChatDialect
from stretto_gateway.dialects.completions import CompletionsDialect
from stretto_gateway.dialects.dialect import Dialect, TokenCount
from stretto_gateway.dialects.messages import MessagesDialect
from stretto_gateway.dialects.openai import ChoiceDialect
from stretto_gateway.dialects.responses import ResponsesDialect
from stretto_gateway.dialects.token_ids import TokenIdsDialect
from stretto_gateway.model import ServedModel, characters_of
from stretto_gateway.requests import PromptRequest, Request
from stretto_gateway.serve.completing import Completing, Stream
from stretto_gateway.serve.metrics import Counters
from stretto_gateway.serve.remote import RemoteEngine
from stretto_workflows.chat.messages import ChatRequest

_TOKEN_PATHS = frozenset({"/generate", "/update_weights", "/abort", "/partials", "/spans"})
_MOST_COMPLETIONS = 4096
_SEEDS = 2**64
_COUNTERS_SECONDS = 5.0  # a scrape of Prometheus has ten
Tokens = tuple[int, ...]
Result = TypeVar("Result")


async def _within(
    submitted: AbstractAsyncContextManager[Stream], work: Callable[[Stream], Awaitable[Result]]
) -> Result:
    """Await `work` with the stream of submitted requests. To submit them is part of it, since they may wait for an
    engine: a client that goes ends this wait too."""
    async with submitted as stream:
        return await work(stream)


class ServeApp(ChatServer):
    """ASGI application of `stretto serve`: serves an engine, without sessions, to every client that has the key (if one
    is set), in the dialects of OpenAI and Anthropic, by token ids, and by the interface of engines."""

    title = "stretto serve"

    def __init__(
        self,
        engine: RemoteEngine,
        model: ServedModel,
        tokens: ASGIApp,
        *,
        api_key: str = "",
        names: HostNames | None = None,
    ) -> None:
        """Serve the requests of every dialect with `engine`.

        Args:
            tokens: application with the engine's own interface (MessagePack).
            api_key: key that is required for all paths but /health; "" for none.
            names: names of this server; requests with another ``Host`` are refused. None allows every name.
        """
        conversations: list[Dialect] = [ChatDialect(strict=True), ResponsesDialect(), MessagesDialect()]
        super().__init__(model, [*conversations, CompletionsDialect(), TokenIdsDialect()], names)
        self._engine, self._tokens, self._api_key = engine, tokens, api_key.encode()
        self._counters = Counters()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["path"] in self.paths | _TOKEN_PATHS else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counters.replied(path, message["status"])
            await send(message)

        await super().__call__(scope, receive, counted)

    async def serve(self, call: ChatExchange) -> None:
        if self._api_key and hmac.compare_digest(call.key.encode("latin-1"), self._api_key):
            admit(call.scope)
        elif self._api_key and call.path != "/health":
            raise unknown_key()
        msgpack = b"msgpack" in (header(call.scope, b"accept") or b"")
        if call.path in _TOKEN_PATHS or (call.path == "/health" and msgpack):
            await self._tokens(call.scope, call.receive, call.send)
        else:
            await super().serve(call)

    def pages(self) -> dict[str, Handler]:
        return {**super().pages(), "/metrics": self._metrics}

    async def health(self, call: ChatExchange) -> None:
        stopping = self._engine.stopping
        status = {"status": "stopping" if stopping else "ok", "model": self.model.name}
        call.headers = [(b"retry-after", b"1")] if stopping else []
        body = msgspec.json.encode({**status, "engine": await self._engine.health()})
        await call.reply(body, 503 if stopping else 200)

    async def _metrics(self, call: ChatExchange) -> None:
        health = None  # while the engine is replaced
        with suppress(EngineLost, DeadlineExceeded):
            async with deadline("the server", "the engine's counters", _COUNTERS_SECONDS):
                health = await self._engine.health()
        await call.reply(self._counters.text(health).encode(), media=CONTENT_TYPE)

    async def count(self, count: TokenCount, call: ChatExchange) -> None:
        [prompt] = await self._prompts(await self.parsed(count.parse, call))
        await call.reply(count.reply(len(prompt)))

    async def complete(self, dialect: Dialect | ChoiceDialect, call: ChatExchange) -> None:
        began, name = time.monotonic(), uuid.uuid4().hex
        request: Request = await self.parsed(dialect.parse, call)
        requests = self._requests(request, await self._prompts(request), name, strict=dialect.strict)
        completing = Completing(request, requests, name, self.model, began)
        # With tools, a message is sent whole, because tool calls are parsed only at its end.
        in_parts = isinstance(request, PromptRequest) or (request.stream and not request.tools)
        choices = dialect if in_parts and isinstance(dialect, ChoiceDialect) else None
        take = completing.take if request.stream and choices is not None else None
        submitted = self._engine.streaming(requests, take)
        if choices is None:
            await self.send(cast(Dialect, dialect), call, _within(submitted, completing.turns))
        else:
            call.add_headers(choices.reply_headers(name))
            await self.stream(call, _within(submitted, partial(completing.write, choices, call)))
        if completing.last_token is not None:
            first = completing.first_token if request.stream else None
            self._counters.completed(completing.prompt_tokens, completing.sampled, first, completing.last_token)

    async def _prompts(self, request: Request) -> list[Tokens]:
        model = self.model
        if isinstance(request, ChatRequest):
            if request.previous:
                allowed = "null: this server keeps no conversation"
                raise RefusedRequest("previous_response_id", repr(request.previous[:80]), allowed)
            messages, tools = request.messages, request.tools
            characters = characters_of(messages, tools)
            return [await model.encoded(characters, lambda: model.renderer.whole(messages, tools))]
        prompts, encode = request.prompts, model.template.encode
        characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        return await model.encoded(
            characters, lambda: [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        )

    def _requests(
        self, request: Request, prompts: Sequence[Tokens], name: str, *, strict: bool
    ) -> list[GenerateRequest]:
        """Make the requests to the engine, one per prompt, with the ids ``name/0``, ``name/1``, ... The completions of
        a prompt have different seeds. Raises RefusedRequest for more than 4,096 completions, and as
        `SamplingRule.sampling` does, which gets `strict`."""
        options, completions = request.options, 1 if request.n is UNSET else request.n
        if completions * len(prompts) > _MOST_COMPLETIONS:
            found = f"{several(completions, 'completion')} to each of {several(len(prompts), 'prompt')}"
            raise RefusedRequest("n", found, f"at most {_MOST_COMPLETIONS:,} completions in one request")
        engine_requests = []
        for number, prompt in enumerate(prompts):
            seed = secrets.randbits(63) if options.seed is None else options.seed % _SEEDS
            engine_requests.append(
                GenerateRequest(
                    id=f"{name}/{number}",
                    prompt_token_ids=prompt,
                    seeds=(seed, *(derive_seed(seed, member) for member in range(1, completions))),
                    sampling=self.model.rule.sampling(request, len(prompt), strict=strict),
                    top_logprobs=options.logprobs or 0,
                )
            )
        return engine_requests
