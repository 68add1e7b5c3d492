"""OpenAI's ``/v1/completions``: prompts without a chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import UNSET

from stretto.core.engine import Progress
from stretto.core.errors import RefusedRequest
from stretto.processes.http.asgi import parse_record
from stretto_gateway.dialects.openai import ChoiceDialect, CompletionText, OpenAIBody, Part, TopLogprobs
from stretto_gateway.requests import PromptRequest
from stretto_workflows.chat.messages import SampledToken

MOST_PROMPTS = 1024
_USUAL_TOKENS = 16  # OpenAI's default


class _CompletionBody(OpenAIBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions. `echo`, `suffix` and `best_of` are refused unless without effect."""

    prompt: str | list[str | int | list[int]]
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """List the prompts, each as text or as token ids.

        Raises:
            RefusedRequest: the list is empty, mixes texts and token ids, or has more than 1,024 prompts.
        """
        if isinstance(self.prompt, str):
            return (self.prompt,)
        tokens = tuple(part for part in self.prompt if isinstance(part, int))
        if tokens and len(tokens) == len(self.prompt):
            return (tokens,)
        texts: list[str | tuple[int, ...]] = [part for part in self.prompt if isinstance(part, str)]
        lists: list[str | tuple[int, ...]] = [tuple(part) for part in self.prompt if isinstance(part, list)]
        found = texts or lists
        if not found or len(found) != len(self.prompt):
            shown = "an empty list" if not self.prompt else "a list of different kinds"
            raise RefusedRequest("prompt", shown, "a text, a list of token ids, or a list of either")
        if len(found) > MOST_PROMPTS:
            raise RefusedRequest("prompt", f"{len(found):,} prompts", f"at most {MOST_PROMPTS:,} in one request")
        return tuple(found)


class CompletionsDialect(ChoiceDialect):
    """Dialect of ``/v1/completions``."""

    path = "/v1/completions"
    body = _CompletionBody
    strict = True
    fields: Mapping[str, str] = {"prompt_token_ids": "prompt"}
    prefix, object, chunk = "cmpl-", "text_completion", "text_completion"

    def parse(self, body: bytes) -> PromptRequest:
        found = parse_record(body, _CompletionBody)
        found.check_neutral(echo=(False,), suffix=("",), best_of=(found.n or 1,))
        return PromptRequest(
            model=found.model,
            prompts=found.prompts(),
            options=found.options(found.max_tokens, found.logprobs),
            stream=bool(found.stream),
            dialect_fields={"usage": found.include_usage},
            n=found.n or UNSET,
            usual_tokens=_USUAL_TOKENS,
        )

    def text_part(self, index: int, text: str) -> Part:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def writer(self, request: PromptRequest, index: int, text: CompletionText) -> Callable[[Progress], list[Part]]:
        def write(progress: Progress) -> list[Part]:
            if (piece := text.take(progress)) is None:
                return []
            logprobs = None if request.options.logprobs is None else _logprobs(piece.tokens, request.options.logprobs)
            return [self.text_part(index, piece.text) | {"logprobs": logprobs, "finish_reason": piece.finish}]

        return write


def _logprobs(tokens: Sequence[SampledToken], likeliest: int) -> dict[str, Any]:
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "text_offset": [token.offset for token in tokens],
        "top_logprobs": [_by_text(token) for token in tokens] if likeliest else None,
    }


def _by_text(token: SampledToken) -> dict[str, float]:
    """Log-probabilities of the likeliest tokens and the sampled one, by text. Of several tokens with the same text the
    likeliest counts."""
    texts: dict[str, float] = {}
    for text, logprob in (*token.likeliest, (token.text, token.logprob)):
        texts.setdefault(text, logprob)
    return texts
