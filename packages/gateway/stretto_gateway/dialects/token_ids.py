"""vLLM's token interface, ``POST /inference/v1/generate``: token ids in; token ids, log-probabilities and the weight
version of every token out. Trainers and environments that were written for vLLM (verifiers, prime-rl) use it.

    {"token_ids": [5, 12], "sampling_params": {"max_tokens": 8, "logprobs": 1}, "stream": false}

A reply has one choice. ``weight_versions`` lists its spans ``[start, end)`` of tokens with equal version; in a stream
the last event has it, as in vLLM. Fields of vLLM that are not supported are accepted with a value without effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta

from stretto.core.engine import Progress
from stretto.core.records import Likeliest, Record, StopReason
from stretto.processes.http.asgi import parse_record, sent_event
from stretto_gateway.dialects.openai import (
    ChoiceDialect,
    CompletionText,
    MinP,
    MostTokens,
    Part,
    Temperature,
    TopLogprobs,
    TopP,
)
from stretto_gateway.requests import PromptRequest, shared_options
from stretto_workflows.chat.messages import SamplingOptions


class _TokenSampling(Record, frozen=True, kw_only=True):
    """The supported part of vLLM's `SamplingParams`. Options from `skip_special_tokens` on are ignored; those from `n`
    on must have the value without effect. A null field counts as absent."""

    max_tokens: MostTokens | None = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: MinP = 0.0
    seed: Annotated[int, Meta(ge=0)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: TopLogprobs | None = None
    # without effect on tokens
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    include_stop_str_in_output: bool = False
    # accepted only with the value without effect
    n: Annotated[int, Meta(ge=1, le=1)] = 1
    min_tokens: Annotated[int, Meta(ge=0, le=0)] = 0
    presence_penalty: Annotated[float, Meta(ge=0, le=0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=0, le=0)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=1, le=1)] = 1.0
    prompt_logprobs: None = None
    logit_bias: None = None


class _TokenBody(Record, frozen=True, kw_only=True):
    """Body of POST /inference/v1/generate. `model`: None: the served one. `request_id`: returned in the reply; None:
    the server chooses one. `stream_options`, `cache_salt` and `priority` are ignored."""

    token_ids: list[int]
    sampling_params: _TokenSampling
    model: str | None = None
    request_id: str | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    cache_salt: str | None = None  # prompts share no cache here
    priority: int = 0  # completions are served in the order in which they come
    kv_transfer_params: None = None
    features: None = None


class TokenIdsDialect(ChoiceDialect):
    """Dialect of ``/inference/v1/generate``."""

    path = "/inference/v1/generate"
    body = _TokenBody
    fields: Mapping[str, str] = {"prompt_token_ids": "token_ids", "sampling.": "sampling_params."}

    def parse(self, body: bytes) -> PromptRequest:
        found = parse_record(body, _TokenBody)
        params = found.sampling_params
        stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
        return PromptRequest(
            model=found.model,
            prompts=(tuple(found.token_ids),),
            options=SamplingOptions(
                max_tokens=params.max_tokens, stop=tuple(stop), logprobs=params.logprobs, **shared_options(params)
            ),
            stream=found.stream,
            dialect_fields={"id": found.request_id},
            stop_token_ids=tuple(params.stop_token_ids or ()),
            ignore_eos=params.ignore_eos,
        )

    def head(self, request: PromptRequest, id: str, created: int, model: str, *, whole: bool) -> dict[str, Any]:
        return {"request_id": request.dialect_fields["id"] or id, "model": model, "created": created}

    def event(self, request: PromptRequest, head: Any, choices: Sequence[Part], usage: Any = None) -> bytes:
        return sent_event({**head, "choices": choices, "usage": usage})

    def writer(self, request: PromptRequest, index: int, text: CompletionText) -> Callable[[Progress], list[Part]]:
        versions = list[int]()

        def write(progress: Progress) -> list[Part]:
            new = progress.segment
            versions.extend(new.versions)
            stopped = new.stop_reason is StopReason.STOP and new.token_ids[-1] in request.stop_token_ids
            part = {
                "token_ids": new.token_ids,
                "finish_reason": new.stop_reason,
                "stop_reason": new.token_ids[-1] if stopped else None,
                "weight_versions": None if new.stop_reason is None else spans(versions),
                "logprobs": None if request.options.logprobs is None else {"content": _content(progress)},
                "index": index,
                "routed_experts": None,
                "sampling_mask": None,
            }
            return [part]

        return write


def spans(versions: Sequence[int]) -> list[dict[str, Any]]:
    """Spans ``[start, end)`` of tokens with equal version, as JSON objects. `versions`: one for each token.

    >>> [(span["version"], span["start"], span["end"]) for span in spans([6, 6, 7])]
    [('6', 0, 2), ('7', 2, 3)]
    """
    begins = [place for place, version in enumerate(versions) if not place or version != versions[place - 1]]
    ends = [*begins[1:], len(versions)]
    return [
        {"version": str(versions[begin]), "start": begin, "end": end} for begin, end in zip(begins, ends, strict=False)
    ]


def _content(progress: Progress) -> list[Part]:
    new = progress.segment
    ranks: Sequence[Likeliest] = progress.top_logprobs or [()] * new.length
    return [
        {**_ranked(token, logprob), "top_logprobs": [_ranked(*ranked) for ranked in likeliest]}
        for token, logprob, likeliest in zip(new.token_ids, new.behavior_logprobs, ranks, strict=True)
    ]


def _ranked(token: int, logprob: float) -> Part:
    return {"token": f"token_id:{token}", "token_id": token, "logprob": logprob}  # vLLM's form of "token"
