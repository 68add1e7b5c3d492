"""Common parts of OpenAI's interfaces: request fields, errors, usage, log-probabilities, and the streaming of text in
pieces.

engine ─► new tokens ─► characters ─► text before a stop ─► pieces ─► client
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from stretto.core.engine import LONGEST_STOP, MOST_LIKELIEST, MOST_STOPS, Progress
from stretto.core.errors import RefusedRequest
from stretto.core.records import Record, StopReason
from stretto.engine.text import NO_CHARACTER, RunningText, StopFinder
from stretto.processes.http.asgi import KEEP_ALIVE, sent_event
from stretto_gateway.dialects.dialect import TokenCount
from stretto_gateway.model import ServedModel
from stretto_gateway.requests import NotServed, Request, shared_options
from stretto_workflows.chat.messages import SampledToken, SamplingOptions


class _Piece(NamedTuple):
    """New text of a completion. `tokens`: its tokens; empty unless the client wants log-probabilities. `finish`: why
    the completion ended; None except in its last piece."""

    text: str
    tokens: Sequence[SampledToken]
    finish: StopReason | None


class CompletionText:
    """Text of one completion while it is sampled; it ends before the first stop text."""

    def __init__(self, model: ServedModel, options: SamplingOptions) -> None:
        self._model, self._with_tokens = model, options.logprobs is not None
        self._running, self._stop = RunningText(model.template), StopFinder(options.stop)
        self._length = 0  # of the text so far, held-back characters included
        self._text: list[str] = []
        self._tokens: list[SampledToken] = []
        self._finish: StopReason | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the client gets text only (no log-probabilities) and there is no stop text to look for."""
        return not self._with_tokens and not self._stop.has_stops

    def push(self, token: int) -> str:
        """Add one token of a plain completion (`is_plain`); returns the characters that are complete with it, "" if
        none is."""
        return self._running.push((token,))

    def take(self, progress: Progress) -> _Piece | None:
        """Add new tokens; returns the piece since the last call that returned one. None if it would have no text and
        the completion has not ended, and after the last piece. Characters that may begin a stop text are held back."""
        new = progress.segment
        if self._finish is not None:
            return None
        if not self._with_tokens:
            self._add(self._running.push(new.token_ids))
        else:
            for id, token in zip(new.token_ids, self._model.tokens(new, progress.top_logprobs), strict=True):
                self._tokens.append(replace(token, offset=self._length))
                self._add(self._running.push((id,)))
        if new.stop_reason is not None and not self._stop.found:
            self._add(self._running.end())
            self._text.append(self._stop.end())
        self._finish = StopReason.STOP if self._stop.found else new.stop_reason
        text = "".join(self._text)
        if not text and self._finish is None:
            return None
        piece = _Piece(text, self._tokens, self._finish)
        self._text, self._tokens = [], []
        return piece

    def _add(self, text: str) -> None:
        self._length += len(text)
        self._text.append(self._stop.push(text))


MOST_CHOICES = 128
_CHOICES = b'"choices":[]'  # in a JSON string the quotes would be escaped
_MARK = "text"
LAST_EVENT = b"data: [DONE]\n\n"
_SHOWN = 60  # most characters of a value in a message
Stop = Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]
Stops = Annotated[list[Stop], Meta(max_length=MOST_STOPS)]
MostTokens = Annotated[int, Meta(ge=1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MOST_LIKELIEST)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

encode = msgspec.json.Encoder().encode

Part = dict[str, Any]
"""One choice of a reply or of an event."""


class _StreamOptions(Record, frozen=True):
    include_usage: bool | None = None
    # accepted and ignored
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields shared by completions and chats. A null field counts as absent. Fields from `user` to
    `prompt_cache_retention` are ignored; those of `NEUTRAL` must have these values (`check_neutral`)."""

    model: str
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: MostTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    stop: Stop | Stops | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    # accepted and ignored
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # `stretto serve` accepts only values without effect (`check_neutral`)
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "logit_bias": ({},),
    }

    @property
    def include_usage(self) -> bool:
        """Whether the reply is a stream, and ends with the token counts."""
        return bool(self.stream and self.stream_options and self.stream_options.include_usage)

    def options(self, max_tokens: int | None, logprobs: int | None, **further: Any) -> SamplingOptions:
        """Sampling options of the request. `max_tokens`, `logprobs` and `further`: fields of `SamplingOptions`."""
        return SamplingOptions(
            max_tokens=max_tokens,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            logprobs=logprobs,
            **shared_options(self),
            **further,
        )

    def check_neutral(self, **further: tuple[object, ...]) -> None:
        """Check that fields which the engine does not support are null or have a value without effect.

        Args:
            further: such fields beside `NEUTRAL`, each with its values without effect.

        Raises:
            RefusedRequest: a field has another value, or `stream_options` is set without `stream`.
        """
        for field, values in {**self.NEUTRAL, **further}.items():
            found = getattr(self, field)
            if found is not None and found not in values:
                shown, allowed = json.dumps(found), " or ".join(json.dumps(value) for value in values)
                shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."
                raise RefusedRequest(field, shown, f"only {allowed} or null: the engine supports nothing else")
        if self.stream_options is not None and not self.stream:
            raise RefusedRequest("stream_options", "set without stream", 'only together with "stream": true')


class OpenAIDialect:
    """Base class of OpenAI's dialects: errors and other shared parts of `Dialect`."""

    keep_alive = KEEP_ALIVE
    counts: Sequence[TokenCount] = ()
    strict = False
    fields: Mapping[str, str] = {"prompt_token_ids": "messages"}

    def refuse(self, why: NotServed) -> bytes:
        return msgspec.json.encode({"error": error_of(why)})

    def fail(self, why: NotServed) -> bytes:
        return sent_event({"error": error_of(why)})

    def reply_headers(self, id: str) -> Mapping[str, str]:
        return {"x-request-id": f"req_{id}"}


class ChoiceDialect(OpenAIDialect):
    """Base class of dialects whose replies list choices, one for each completion, which can be streamed token by token.
    `prefix`: of a reply's id. `object`, `chunk`: type names of a whole reply and of an event."""

    path: str
    body: type[msgspec.Struct]
    prefix: str
    object: str
    chunk: str

    @abstractmethod
    def parse(self, body: bytes) -> Request:
        """Decode a body. Raises RefusedRequest, which names the first wrong field and its allowed values."""

    @abstractmethod
    def writer(self, request: Any, index: int, text: CompletionText) -> Callable[[Progress], list[Part]]:
        """Make a function that converts new tokens of choice `index` to entries of `choices`; it returns [] if there is
        nothing to send yet. `text`: text of this choice, to which the function adds the tokens."""

    def text_part(self, index: int, text: str) -> Part | None:
        """Entry of `choices` for a new piece of plain text; None if the dialect's entries always hold more than
        text."""
        return None

    def opening(self, index: int) -> list[Part]:
        """Entries of `choices` to send before the first token of choice `index`; none by default."""
        return []

    def head(self, request: Any, id: str, created: int, model: str, *, whole: bool) -> dict[str, Any]:
        """Fields of a reply (`whole`) or of an event, without its choices and usage. `id`: id of the reply, without
        prefix. `created`: Unix time in seconds."""
        return {
            "id": self.prefix + id,
            "object": self.object if whole else self.chunk,
            "created": created,
            "model": model,
        }

    def event(self, request: Any, head: Mapping[str, Any], choices: Sequence[Part], usage: Any = None) -> bytes:
        """Encode one event of a stream. `head`: from `head`. `usage`: token counts, included only if the client has
        requested them; null except in the last event."""
        shown = {"usage": usage} if request.dialect_fields.get("usage") else {}
        return sent_event({**head, "choices": choices, **shown})

    def encoder(self, request: Any, head: Mapping[str, Any]) -> Callable[[Sequence[Part]], bytes]:
        """Make a function that encodes entries of `choices`, each as an event of its own, and returns all their bytes.
        These equal the bytes of `event`, but the rest of the event (`head`) is encoded only once."""
        before, after = self.event(request, head, []).split(_CHOICES, 1)
        before, after = before + _CHOICES[:-1], _CHOICES[-1:] + after
        return lambda parts: b"".join([b"%b%b%b" % (before, encode(part), after) for part in parts])

    def text_encoder(self, request: Any, head: Mapping[str, Any], index: int) -> Callable[[str], bytes] | None:
        """Make a function that encodes the event for a piece of plain text of choice `index`. The rest of the event,
        `head` included, is encoded only once. None if `text_part` returns None: the dialect has no such events."""
        if (part := self.text_part(index, _MARK)) is None:
            return None
        before, after = self.event(request, head, [part]).rsplit(encode(_MARK), 1)
        return lambda text: b"%b%b%b" % (before, encode(text), after)

    def closing(self, request: Any, head: Mapping[str, Any], usage: Mapping[str, int]) -> bytes:
        """Encode the end of a stream: an event with `usage`, if the client has requested it, and ``[DONE]``."""
        shown = request.dialect_fields.get("usage")
        return (self.event(request, head, [], usage) if shown else b"") + LAST_EVENT


def error_of(why: NotServed) -> dict[str, Any]:
    """Error object in OpenAI's format: message, field (`param`) and code of `why`, and a type by its status."""
    kind = "server_error" if why.status >= 500 else "rate_limit_error" if why.status == 429 else "invalid_request_error"
    return {"message": why.message, "type": kind, "param": why.field or None, "code": why.code or None}


def usage_of(prompt: int, sampled: int) -> dict[str, int]:
    """Token counts of a reply in OpenAI's format. `prompt`: tokens of the prompts, each counted once for all its
    completions; `sampled`: tokens of all completions."""
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def logprob_of(token: SampledToken) -> dict[str, Any]:
    """Log-probability of a sampled token and of the likeliest tokens at its position, in OpenAI's format."""
    return {**_ranked(token.text, token.logprob), "top_logprobs": [_ranked(*ranked) for ranked in token.likeliest]}


def _ranked(text: str, logprob: float) -> dict[str, Any]:
    # A token that holds a part of a character has no text, so its bytes are unknown.
    return {"token": text, "logprob": logprob, "bytes": None if NO_CHARACTER in text else list(text.encode())}
