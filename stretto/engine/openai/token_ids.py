"""vLLM's token interface, ``POST /inference/v1/generate``: token ids in; token ids, log-probabilities and the weight
version of every token out. Trainers and environments that were written for vLLM (verifiers, prime-rl) use it.

    {"token_ids": [5, 12], "sampling_params": {"max_tokens": 8, "logprobs": 1}, "stream": false}

A reply has one choice. ``weight_versions`` are spans ``[start, end)`` of its tokens; a streamed reply tells them with
its last event, as vLLM does. Fields of vLLM that change nothing here are accepted with the value that changes nothing.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from stretto.core.engine import MOST_LIKELIEST
from stretto.core.errors import RefusedRequest
from stretto.core.records import Completion, GenerateRequest, Likeliest, Record, Sampling, StopReason
from stretto.engine.backend import ENDED
from stretto.engine.native.completions import Progress, rest_of
from stretto.engine.openai.replies import Usage
from stretto.engine.openai.translate import ServedModel
from stretto.processes.http.bodies import parse_record

PATH = "/inference/v1/generate"
_SEEDS = 2**63


class TokenSampling(Record, frozen=True, kw_only=True):
    """vLLM's `SamplingParams`, as far as they have a meaning here."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=0)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MOST_LIKELIEST)] | None = None
    # without effect on tokens
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    include_stop_str_in_output: bool = False
    # neutral
    n: Annotated[int, Meta(ge=1, le=1)] = 1
    min_tokens: Annotated[int, Meta(ge=0, le=0)] = 0
    presence_penalty: Annotated[float, Meta(ge=0, le=0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=0, le=0)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=1, le=1)] = 1.0
    prompt_logprobs: None = None
    logit_bias: None = None


class TokenBody(Record, frozen=True, kw_only=True):
    """POST /inference/v1/generate."""

    token_ids: list[int]
    sampling_params: TokenSampling
    model: str | None = None
    request_id: str | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    cache_salt: str | None = None  # prompts share no cache here
    priority: int = 0  # completions are served in the order in which they come
    kv_transfer_params: None = None
    features: None = None


class RankedId(Record, frozen=True):
    """`token` is the form in which vLLM writes an id where a text is expected."""

    token: str
    token_id: int
    logprob: float


class IdLogprob(RankedId, frozen=True):
    top_logprobs: list[RankedId]


class IdLogprobs(Record, frozen=True):
    content: list[IdLogprob]


class VersionSpan(Record, frozen=True):
    """Tokens ``[start, end)`` were sampled by the weights `version`."""

    version: str
    start: int
    end: int


class TokenChoice(Record, frozen=True):
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | None
    weight_versions: list[VersionSpan] | None
    logprobs: IdLogprobs | None
    index: int = 0
    routed_experts: None = None
    sampling_mask: None = None


_NOTHING = TokenChoice((), None, None, None, None)


class TokenReply(Record, frozen=True):
    request_id: str
    model: str
    created: int
    choices: list[TokenChoice]
    usage: Usage | None


class TokenListener:
    """The completion of one request (a `generation.CompletionListener`), in pieces that `next` hands out."""

    missing = 1

    def __init__(self, body: TokenBody) -> None:
        self.broken: str | None = None
        self.sampled = 0  # tokens
        self._body = body
        self._new: list[Progress] = []
        self._versions: list[int] = []
        self._reason: StopReason | None = None
        self.gone = False  # the client has disconnected
        self._wake = asyncio.Event()

    def progressed(self, progress: Progress) -> None:
        self.sampled += len(progress.segment.token_ids)
        self._versions += progress.segment.versions
        self._new.append(progress)
        self._wake.set()

    def ended(self, completion: Completion) -> None:
        self._reason, self.missing = completion.stop_reason, 0
        self.progressed(rest_of(completion, self.sampled))

    def refuse(self, error: RefusedRequest) -> None:
        self.break_off(str(error))

    def break_off(self, why: str = ENDED) -> None:
        self.broken = why if self.missing else None
        self._wake.set()

    def leave(self) -> None:
        self.gone = True
        self._wake.set()

    async def next(self) -> TokenChoice:
        """What is new, once there is something; the last choice has a finish reason. The client has the deadline."""
        await self._wake.wait()
        self._wake.clear()
        new, self._new = self._new, []
        tokens = tuple(token for progress in new for token in progress.segment.token_ids)
        if self.gone or self.broken is not None:
            return _NOTHING
        stopped = self._reason is StopReason.STOP and tokens[-1] in (self._body.sampling_params.stop_token_ids or ())
        return TokenChoice(
            token_ids=tokens,
            finish_reason=self._reason,
            stop_reason=tokens[-1] if stopped else None,
            weight_versions=None if self._reason is None else spans(self._versions),
            logprobs=None if self._body.sampling_params.logprobs is None else IdLogprobs(_content(new)),
        )


def spans(versions: Sequence[int]) -> list[VersionSpan]:
    """Runs of equal versions.

    >>> [(span.version, span.start, span.end) for span in spans([6, 6, 7])]
    [('6', 0, 2), ('7', 2, 3)]
    """
    begins = [place for place, version in enumerate(versions) if not place or version != versions[place - 1]]
    ends = [*begins[1:], len(versions)]
    return [VersionSpan(str(versions[begin]), begin, end) for begin, end in zip(begins, ends, strict=False)]


class TokenInterface:
    """Decodes requests and makes replies; the server sends them."""

    def __init__(self, model: ServedModel, eos_token_ids: Sequence[int]) -> None:
        self._model, self._eos_token_ids = model, tuple(eos_token_ids)

    @staticmethod
    def field(error: RefusedRequest) -> RefusedRequest:
        """The engine's refusal with the client's field names."""
        ours = error.field.replace("prompt_token_ids", "token_ids").replace("sampling.", "sampling_params.")
        return RefusedRequest(ours, error.found, error.allowed)

    def understand(self, raw: bytes, name: str) -> tuple[TokenBody, GenerateRequest]:
        """The body, and the request to the engine.

        Raises:
            RefusedRequest: names the wrong field.
        """
        body = parse_record(raw, TokenBody)
        if body.model is not None and body.model != self._model.name:
            shown = repr(body.model[:80])
            raise RefusedRequest("model", f"{shown} is not served here", f"the model is {self._model.name!r}")
        wanted, left = body.sampling_params, self._model.context_length - len(body.token_ids)
        stops = [] if wanted.stop is None else [wanted.stop] if isinstance(wanted.stop, str) else wanted.stop
        ends = (() if wanted.ignore_eos else self._eos_token_ids) + tuple(wanted.stop_token_ids or ())
        return body, GenerateRequest(
            id=name,
            prompt_token_ids=tuple(body.token_ids),
            seeds=(secrets.randbelow(_SEEDS) if wanted.seed is None else wanted.seed % _SEEDS,),
            sampling=Sampling(
                max_tokens=max(1, left if wanted.max_tokens is None else min(wanted.max_tokens, left)),
                temperature=wanted.temperature,
                stop_token_ids=tuple(dict.fromkeys(ends)),
                top_p=wanted.top_p,
                top_k=wanted.top_k if 0 < wanted.top_k < self._model.vocab_size else 0,
                min_p=wanted.min_p,
                stop=tuple(stops),
            ),
            top_logprobs=wanted.logprobs or 0,
        )

    def reply(self, body: TokenBody, name: str, created: int, choice: TokenChoice, usage: Usage | None) -> bytes:
        """A reply, or an event of one, as JSON."""
        told = TokenReply(
            request_id=body.request_id or name,
            model=self._model.name,
            created=created,
            choices=[choice],
            usage=usage,
        )
        return msgspec.json.encode(told)


def merged(choices: Sequence[TokenChoice]) -> TokenChoice:
    """The pieces of one completion as one."""
    return msgspec.structs.replace(
        choices[-1],
        token_ids=tuple(token for choice in choices for token in choice.token_ids),
        logprobs=None
        if choices[-1].logprobs is None
        else IdLogprobs([token for choice in choices if choice.logprobs for token in choice.logprobs.content]),
    )


def _content(new: Sequence[Progress]) -> list[IdLogprob]:
    return [
        IdLogprob(f"token_id:{token}", token, logprob, _ranked(likeliest))
        for progress in new
        for token, logprob, likeliest in zip(
            progress.segment.token_ids,
            progress.segment.behavior_logprobs,
            progress.top_logprobs or [()] * len(progress.segment.token_ids),
            strict=True,
        )
    ]


def _ranked(likeliest: Likeliest) -> list[RankedId]:
    return [RankedId(f"token_id:{token}", token, logprob) for token, logprob in likeliest]
