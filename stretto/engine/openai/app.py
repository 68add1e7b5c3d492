"""OpenAI's HTTP interface to an engine, beside the token interface (`stretto.engine.wire`).

    GET  /v1/models  /v1/models/NAME
    POST /v1/completions  /v1/chat/completions      whole, or streamed as server-sent events
    POST /inference/v1/generate                     vLLM's: token ids in, token ids with weight versions out
    GET  /health  /metrics  /openapi.json
    else the token interface

Errors have OpenAI's form, ``{"error": {"message", "type", "param", "code"}}``; ``param`` is the wrong field.
"""

from __future__ import annotations

import asyncio
import hmac
import sys
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stretto.core.errors import EngineLost, RefusedRequest
from stretto.engine.http.prometheus import CONTENT_TYPE, Counters
from stretto.engine.native.generation import Generation
from stretto.engine.openai import token_ids
from stretto.engine.openai.choices import Choice, Choices, PromptListener
from stretto.engine.openai.replies import LAST_EVENT, ModelCard, ModelList, Part, Reply, Usage, error, event
from stretto.engine.openai.schema import openapi
from stretto.engine.openai.token_ids import TokenBody, TokenChoice, TokenInterface, TokenListener, merged
from stretto.engine.openai.translate import ServedModel, TranslatedRequest, Translator
from stretto.model.hf.tokenizer import Tokenizer
from stretto.processes.http.asgi import LARGEST_BODY, header, read_body, reply, when_gone
from stretto.processes.http.server import admit

_JSON = "application/json"
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_RETRY = (b"retry-after", b"1")
_MODELS, _COMPLETIONS, _CHAT = "/v1/models", "/v1/completions", "/v1/chat/completions"
_TOKEN_PATHS = frozenset({"/generate", "/update_weights", "/abort", "/partials", "/spans"})
_KNOWN = _TOKEN_PATHS | {_MODELS, token_ids.PATH, _COMPLETIONS, _CHAT, "/health", "/metrics", "/openapi.json"}

Understand = Callable[[bytes, str], Awaitable[TranslatedRequest]]


class OpenAIApp:
    """The ASGI application of `stretto serve`."""

    def __init__(
        self, generation: Generation, model: ServedModel, tokenizer: Tokenizer, tokens: ASGIApp, api_key: str = ""
    ) -> None:
        """`tokens` is the token interface on the same generation. Without the `api_key`, if there is one, /health alone
        is served."""
        self._api_key = api_key.encode()
        self._generation, self._tokenizer, self._tokens = generation, tokenizer, tokens
        self._translator = Translator(model, tokenizer)
        self._by_id = TokenInterface(model, tokenizer.eos_token_ids)
        self._card = ModelCard(id=model.name, created=int(time.time()), max_model_len=model.context_length)
        self._counters = Counters()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, started = scope["path"], False

        async def watched(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._counters.replied(path if path in _KNOWN else "other", message["status"])
            await send(message)

        try:
            if self._api_key and self._has_key(scope):
                admit(scope)
            if path == "/health" or self._has_key(scope):
                await self._dispatch(path, scope, receive, watched)
            else:
                message, headers = "the API key is missing or wrong", [(b"www-authenticate", b"Bearer")]
                await _fail(watched, 401, message, _INVALID, code="invalid_api_key", headers=headers)
        except Exception:  # a bug: its traceback goes to the server's log, the client gets a 500
            traceback.print_exc(file=sys.stderr)
            if not started:
                await _fail(watched, 500, "internal error of the server; its log has the traceback", "server_error")

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, key = (header(scope, b"authorization") or b"").partition(b" ")
        return not self._api_key or (scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._api_key))

    async def _dispatch(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        msgpack = b"msgpack" in (header(scope, b"accept") or b"")
        if path in _TOKEN_PATHS or (path == "/health" and msgpack):
            await self._tokens(scope, receive, send)
            return
        allowed = "POST" if path in (_COMPLETIONS, _CHAT, token_ids.PATH) else "GET"
        if path not in _KNOWN and not path.startswith(f"{_MODELS}/"):
            await _fail(send, 404, f"{scope['method']} {path[:80]}: no such path", _INVALID)
        elif scope["method"] != allowed:
            message = f"{path} allows {allowed}, not {scope['method']}"
            await _fail(send, 405, message, _INVALID, headers=[(b"allow", allowed.encode())])
        elif path == _COMPLETIONS:
            await self._complete(self._translator.completion, scope, receive, send)
        elif path == _CHAT:
            await self._complete(self._translator.chat, scope, receive, send)
        elif path == token_ids.PATH:
            await self._complete_ids(scope, receive, send)
        else:
            await self._tell(path, send)

    async def _tell(self, path: str, send: Send) -> None:
        """The replies to GET."""
        health = self._generation.engine.health()
        if path == "/metrics":
            await reply(send, 200, CONTENT_TYPE, self._counters.text(health).encode())
        elif path == "/health":
            stopping = self._generation.stopping
            told = {"status": "stopping" if stopping else "ok", "model": self._card.id, "engine": health}
            status, headers = (503, [_RETRY]) if stopping else (200, [])
            await reply(send, status, _JSON, msgspec.json.encode(told), headers)
        elif path == "/openapi.json":
            await reply(send, 200, _JSON, openapi(self._card.id))
        elif path == _MODELS:
            await reply(send, 200, _JSON, msgspec.json.encode(ModelList(data=[self._card])))
        elif path == f"{_MODELS}/{self._card.id}":
            await reply(send, 200, _JSON, msgspec.json.encode(self._card))
        else:
            await _refuse(send, RefusedRequest("model", "not served here", f"the model is {self._card.id!r}"))

    async def _complete(self, understand: Understand, scope: Scope, receive: Receive, send: Send) -> None:
        start, name = time.monotonic(), uuid.uuid4().hex

        async def submit(raw: bytes) -> tuple[TranslatedRequest, Choices]:
            translated = await understand(raw, name)
            try:
                await self._generation.prepare(translated.requests)
            except RefusedRequest as refused:
                raise self._translator.field(refused, translated) from None
            return translated, self._open(translated)

        if (opened := await _opened(submit, scope, receive, send)) is None:
            return
        translated, choices = opened
        watch = asyncio.create_task(when_gone(receive, choices.leave))
        try:
            answering = self._stream if translated.body.stream else self._whole
            await answering(translated, f"{translated.form.prefix}{name}", choices, send)
        finally:
            watch.cancel()
            for request in translated.requests:
                self._generation.close(request.id)
        if not choices.missing:
            first = choices.first_token - start if translated.body.stream and choices.first_token is not None else None
            self._counters.answered(translated.prompt_tokens, choices.sampled, first, time.monotonic() - start)

    async def _complete_ids(self, scope: Scope, receive: Receive, send: Send) -> None:
        start, name = time.monotonic(), uuid.uuid4().hex

        async def submit(raw: bytes) -> tuple[TokenBody, TokenListener]:
            body, request = self._by_id.understand(raw, name)
            listener = TokenListener(body)
            try:
                self._generation.submit(request, listener, every_token=body.stream)
            except RefusedRequest as refused:
                raise self._by_id.field(refused) from None
            return body, listener

        if (opened := await _opened(submit, scope, receive, send)) is None:
            return
        body, listener = opened
        watch = asyncio.create_task(when_gone(receive, listener.leave))
        try:
            await self._send_ids(body, name, listener, send)
        finally:
            watch.cancel()
            self._generation.close(name)
        if not listener.missing:
            self._counters.answered(len(body.token_ids), listener.sampled, None, time.monotonic() - start)

    async def _send_ids(self, body: TokenBody, name: str, listener: TokenListener, send: Send) -> None:
        """The completion as events, or whole."""
        pieces: list[TokenChoice] = []
        created = int(time.time())
        if body.stream:
            await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        while not pieces or pieces[-1].finish_reason is None:
            piece = await listener.next()
            if listener.gone:
                return
            if listener.broken is not None:
                lost = EngineLost(self._generation.engine.name, listener.broken)
                if body.stream:
                    last = b"data: " + error(str(lost), "server_error") + b"\n\n"
                    await send({"type": "http.response.body", "body": last})
                else:
                    await _unavailable(send, lost)
                return
            pieces.append(piece)
            if body.stream:
                data = b"data: " + self._by_id.reply(body, name, created, piece, None) + b"\n\n"
                await send({"type": "http.response.body", "body": data, "more_body": True})
        if body.stream:
            await send({"type": "http.response.body", "body": LAST_EVENT})
            return
        prompt, sampled = len(body.token_ids), listener.sampled
        usage = Usage(prompt_tokens=prompt, completion_tokens=sampled, total_tokens=prompt + sampled)
        await reply(send, 200, _JSON, self._by_id.reply(body, name, created, merged(pieces), usage))

    def _open(self, translated: TranslatedRequest) -> Choices:
        """Submit all prompts to the engine, or none.

        Raises:
            RefusedRequest, EngineLost: as `Generation.submit`, with the client's field names.
        """
        body, count = translated.body, translated.completions
        total = count * len(translated.requests)
        each = [Choice(k, self._tokenizer, body.stops, token_by_token=body.wants_logprobs) for k in range(total)]
        choices = Choices(each)
        try:
            for number, request in enumerate(translated.requests):
                listener = PromptListener(choices, each[number * count : (number + 1) * count])
                self._generation.submit(request, listener, every_token=bool(body.stream))
        except (RefusedRequest, EngineLost) as refused:
            for request in translated.requests:
                self._generation.close(request.id)
            raise (
                self._translator.field(refused, translated) if isinstance(refused, RefusedRequest) else refused
            ) from None
        return choices

    async def _whole(self, translated: TranslatedRequest, name: str, choices: Choices, send: Send) -> None:
        pieces = await choices.whole()
        if choices.gone:
            return
        if choices.refused is not None and not pieces:
            await _refuse(send, self._translator.field(choices.refused, translated))
            return
        if choices.broken is not None and not pieces:
            await _unavailable(send, EngineLost(self._generation.engine.name, choices.broken))
            return
        whole = Reply(
            id=name,
            object=translated.form.object,
            created=int(time.time()),
            model=self._card.id,
            choices=[translated.form.choice(piece) for piece in pieces],
            usage=_usage(translated, choices),
        )
        await reply(send, 200, _JSON, msgspec.json.encode(whole))

    async def _stream(self, translated: TranslatedRequest, name: str, choices: Choices, send: Send) -> None:
        """Send one event for each piece of a choice; if the engine fails, the last event is the error."""
        form, usage = translated.form, translated.body.include_usage
        chunk = Reply(
            id=name,
            object=form.chunk_object,
            created=int(time.time()),
            model=self._card.id,
            choices=[],
            usage=None if usage else msgspec.UNSET,
        )
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        parts = [part for choice in choices.choices for part in form.opening(choice.index)]
        unfinished = len(choices.choices)
        while unfinished:
            await send({"type": "http.response.body", "body": _events(chunk, parts), "more_body": True})
            pieces = await choices.pieces()
            unfinished -= sum(piece.finish is not None for piece in pieces)
            if choices.gone:
                return
            if choices.broken is not None and unfinished:
                told = error(f"{self._generation.engine.name} {choices.broken}", "server_error")
                await send({"type": "http.response.body", "body": b"data: " + told + b"\n\n"})
                return
            parts = [part for piece in pieces for part in form.chunk(piece)]
        last = event(msgspec.structs.replace(chunk, usage=_usage(translated, choices))) if usage else b""
        await send({"type": "http.response.body", "body": _events(chunk, parts) + last + LAST_EVENT})


_INVALID = "invalid_request_error"
Opened = TypeVar("Opened")


async def _opened(
    submit: Callable[[bytes], Awaitable[Opened]], scope: Scope, receive: Receive, send: Send
) -> Opened | None:
    """What `submit` makes of the body; None where the client was told why it makes nothing of it."""
    if (raw := await read_body(scope, receive)) is None:
        message = f"body: more than {LARGEST_BODY:,} bytes, which is the limit"
        await _fail(send, 413, message, _INVALID, "body", "body_too_large")
        return None
    try:
        return await submit(raw)
    except RefusedRequest as refused:
        await _refuse(send, refused)
    except EngineLost as lost:
        await _unavailable(send, lost)
    return None


def _events(chunk: Reply, parts: Iterable[Part]) -> bytes:
    """The events of the parts, one chunk each."""
    return b"".join(event(msgspec.structs.replace(chunk, choices=[part])) for part in parts)


def _usage(translated: TranslatedRequest, choices: Choices) -> Usage:
    prompt, completions = translated.prompt_tokens, choices.sampled
    return Usage(prompt_tokens=prompt, completion_tokens=completions, total_tokens=prompt + completions)


async def _refuse(send: Send, refused: RefusedRequest) -> None:
    """Reply 404 for a model that is not served, and 400 for all other mistakes of a request."""
    unknown = refused.field == "model" and "not served" in refused.found
    long = "context" in refused.allowed
    code = "model_not_found" if unknown else "context_length_exceeded" if long else None
    param = None if refused.field == "body" else refused.field
    await _fail(send, 404 if unknown else 400, str(refused), _INVALID, param, code)


async def _unavailable(send: Send, lost: EngineLost) -> None:
    await _fail(send, 503, str(lost), "server_error", code="unavailable", headers=[_RETRY])


async def _fail(
    send: Send,
    status: int,
    message: str,
    kind: str,
    param: str | None = None,
    code: str | None = None,
    headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    await reply(send, status, _JSON, error(message, kind, param, code), headers or [])
