"""Replies to OpenAI's clients, with the fields that their libraries expect.

A `Form` makes the choices of one of the two endpoints from pieces:

    text    choices[].text            logprobs.tokens, .token_logprobs, .text_offset, .top_logprobs
    chat    choices[].message/.delta  logprobs.content[].token, .logprob, .bytes, .top_logprobs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from stretto.core.records import Record
from stretto.engine.native.detokenize import NO_CHARACTER
from stretto.engine.openai.choices import Piece, Token

#: The text of one token by itself.
Name = Callable[[int], str]


class Usage(Record, frozen=True):
    """Counts of tokens; a prompt is counted once for all its completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TextLogprobs(Record, frozen=True):
    tokens: list[str]
    token_logprobs: list[float]
    text_offset: list[int]
    top_logprobs: list[dict[str, float]] | None


class TextChoice(Record, frozen=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None


class RankedToken(Record, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(RankedToken, frozen=True):
    top_logprobs: list[RankedToken]


class ChatLogprobs(Record, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(Record, frozen=True):
    role: str
    content: str
    refusal: None = None


class ChatDelta(Record, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(Record, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunkChoice(Record, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


#: One choice in a chunk of a stream.
Part = TextChoice | ChatChunkChoice


class Reply(Record, frozen=True):
    """A whole reply, or one chunk of a stream. Chunks have `usage` only if the client requests it."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[TextChoice | ChatChoice | ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Record, frozen=True):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "stretto"


class ModelList(Record, frozen=True):
    data: list[ModelCard]
    object: str = "list"


class ErrorDetails(Record, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Record, frozen=True):
    error: ErrorDetails


class TextForm:
    """/v1/completions."""

    prefix = "cmpl-"
    object = chunk_object = "text_completion"

    def __init__(self, name: Name, logprobs: bool, likeliest: bool) -> None:
        self._name, self._logprobs, self._likeliest = name, logprobs, likeliest

    def choice(self, piece: Piece) -> TextChoice:
        return TextChoice(
            index=piece.index, text=piece.text, logprobs=self._logprobs_of(piece), finish_reason=piece.finish
        )

    def opening(self, index: int) -> list[Part]:
        """The parts of a stream before the first piece of a choice."""
        return []

    def chunk(self, piece: Piece) -> list[Part]:
        return [self.choice(piece)]

    def _logprobs_of(self, piece: Piece) -> TextLogprobs | None:
        if not self._logprobs:
            return None
        return TextLogprobs(
            tokens=[self._name(token.id) for token in piece.tokens],
            token_logprobs=[token.logprob for token in piece.tokens],
            text_offset=[token.offset for token in piece.tokens],
            top_logprobs=[self._ranked(token) for token in piece.tokens] if self._likeliest else None,
        )

    def _ranked(self, token: Token) -> dict[str, float]:
        """Log-probabilities by text, the sampled token included; of tokens with the same text, the likeliest."""
        texts: dict[str, float] = {}
        for token_id, logprob in (*token.likeliest, (token.id, token.logprob)):
            texts.setdefault(self._name(token_id), logprob)
        return texts


class ChatForm:
    """/v1/chat/completions."""

    prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, name: Name, logprobs: bool) -> None:
        self._name, self._logprobs = name, logprobs

    def choice(self, piece: Piece) -> ChatChoice:
        message = ChatMessage(role="assistant", content=piece.text)
        return ChatChoice(
            index=piece.index, message=message, logprobs=self._logprobs_of(piece), finish_reason=piece.finish
        )

    def opening(self, index: int) -> list[Part]:
        delta = ChatDelta(role="assistant", content="")
        return [ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)]

    def chunk(self, piece: Piece) -> list[Part]:
        """The parts of a piece; the last piece has two: its text, then an empty delta with the finish reason."""
        chunks: list[Part] = []
        if piece.text or piece.tokens:
            delta = ChatDelta(content=piece.text)
            chunks.append(
                ChatChunkChoice(index=piece.index, delta=delta, logprobs=self._logprobs_of(piece), finish_reason=None)
            )
        if piece.finish is not None:
            chunks.append(
                ChatChunkChoice(index=piece.index, delta=ChatDelta(), logprobs=None, finish_reason=piece.finish)
            )
        return chunks

    def _logprobs_of(self, piece: Piece) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        return ChatLogprobs(content=[self._token(token) for token in piece.tokens])

    def _token(self, token: Token) -> TokenLogprob:
        sampled = self._ranked(token.id, token.logprob)
        return TokenLogprob(
            token=sampled.token,
            logprob=sampled.logprob,
            bytes=sampled.bytes,
            top_logprobs=[self._ranked(*ranked) for ranked in token.likeliest],
        )

    def _ranked(self, token_id: int, logprob: float) -> RankedToken:
        text = self._name(token_id)
        whole = NO_CHARACTER not in text  # the bytes of a part of a character are not in its text
        return RankedToken(token=text, logprob=logprob, bytes=list(text.encode()) if whole else None)


#: One of the two interfaces.
Form = TextForm | ChatForm


def error(message: str, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """The body of an error reply."""
    return msgspec.json.encode(ErrorReply(error=ErrorDetails(message=message, type=kind, param=param, code=code)))


def event(message: Record) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(message) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"
