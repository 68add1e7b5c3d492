"""From an OpenAI request to requests of the engine: text to tokens, fields to `Sampling`, one seed per completion."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from stretto.core.errors import DataError, ModelFolderError, Problem, RefusedRequest
from stretto.core.records import GenerateRequest, Sampling, derive_seed
from stretto.engine.openai.replies import ChatForm, Form, TextForm
from stretto.engine.openai.requests import Body, ChatBody, CompletionBody, parse
from stretto.model.hf.tokenizer import Tokenizer

Tokens = tuple[int, ...]

_MOST_COMPLETIONS = 4096
_LONG_TEXT = 20_000  # characters; encoding them takes milliseconds, and releases the GIL
_LONGEST_MESSAGE = 400
_SEEDS = 2**64
_NAMES = 65_536  # texts of single tokens that are kept


@dataclass(frozen=True)
class TranslatedRequest:
    """One HTTP request as requests to the engine."""

    body: Body
    form: Form
    requests: list[GenerateRequest]  # one per prompt
    completions: int  # per prompt

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests)


@dataclass(frozen=True)
class ServedModel:
    """The facts about the model that requests depend on."""

    name: str
    context_length: int  # most tokens of prompt and completion: those that the context and the KV cache hold
    vocab_size: int


class Translator:
    """Translates requests for one model."""

    def __init__(self, model: ServedModel, tokenizer: Tokenizer) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._name = lru_cache(maxsize=_NAMES)(tokenizer.name)

    async def completion(self, raw: bytes, name: str) -> TranslatedRequest:
        """Translate a body of /v1/completions; the engine's requests are called `name` with the number of the prompt.

        Raises:
            RefusedRequest: names the wrong field; ``model`` if another model is served.
        """
        body = parse(raw, CompletionBody)
        self._check_model(body)
        prompts = await self._encoded(body.prompts())
        form = TextForm(self._name, body.wants_logprobs, body.likeliest > 0)
        return self._translate(body, form, prompts, name, "prompt")

    async def chat(self, raw: bytes, name: str) -> TranslatedRequest:
        """Translate a body of /v1/chat/completions.

        Raises:
            RefusedRequest: as `completion`; ``messages`` if there is no chat template, or it refuses the conversation.
        """
        body = parse(raw, ChatBody)
        self._check_model(body)
        turns = [message.turn() for message in body.messages]
        long = sum(len(turn["content"]) for turn in turns) > _LONG_TEXT
        encode = partial(self._tokenizer.encode_chat, turns)
        try:
            prompt = await asyncio.to_thread(encode) if long else encode()
        except (ModelFolderError, DataError) as error:
            raise _refused("messages", error.problems[0]) from None
        form = ChatForm(self._name, body.wants_logprobs)
        return self._translate(body, form, [prompt], name, "messages")

    def field(self, error: RefusedRequest, request: TranslatedRequest) -> RefusedRequest:
        """The engine's refusal with the client's field names."""
        chat = isinstance(request.body, ChatBody)
        names = {"prompt_token_ids": "messages" if chat else "prompt", "sampling.max_tokens": _limit(request.body)}
        names["sampling.grammar"] = "response_format"
        name = names.get(error.field, error.field.removeprefix("sampling."))
        return RefusedRequest(name, error.found, error.allowed)

    def _check_model(self, body: Body) -> None:
        if body.model != self._model.name:
            shown = repr(body.model[:80])
            raise RefusedRequest("model", f"{shown} is not served here", f"the model is {self._model.name!r}")

    async def _encoded(self, prompts: Sequence[str | Tokens]) -> list[Tokens]:
        def encode() -> list[Tokens]:
            return [self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

        long = sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) > _LONG_TEXT
        try:
            return await asyncio.to_thread(encode) if long else encode()
        except DataError as error:
            raise _refused("prompt", error.problems[0]) from None

    def _translate(self, body: Body, form: Form, prompts: Sequence[Tokens], name: str, field: str) -> TranslatedRequest:
        completions = body.n or 1
        if completions * len(prompts) > _MOST_COMPLETIONS:
            found = f"{completions} completions to each of {len(prompts):,} prompts"
            raise RefusedRequest("n", found, f"at most {_MOST_COMPLETIONS:,} completions in one request")
        requests = [
            GenerateRequest(
                id=f"{name}/{number}",
                prompt_token_ids=prompt,
                seeds=_seeds(body, completions),
                sampling=self._sampling(body, prompt, field),
                top_logprobs=body.likeliest,
            )
            for number, prompt in enumerate(prompts)
        ]
        return TranslatedRequest(body, form, requests, completions)

    def _sampling(self, body: Body, prompt: Tokens, field: str) -> Sampling:
        left = self._model.context_length - len(prompt)
        if left < 1:
            allowed = f"at most {self._model.context_length - 1:,}, so that the context has room for a completion"
            raise RefusedRequest(field, f"{len(prompt):,} tokens", allowed)
        most = body.most_tokens(left)
        if most > left:
            allowed = (
                f"at most {left:,}: the rest of the context of {self._model.context_length:,} tokens after the prompt"
            )
            raise RefusedRequest(_limit(body), f"{most}"[:40], allowed)
        top_k = body.top_k or 0
        return Sampling(
            max_tokens=most,
            temperature=1.0 if body.temperature is None else body.temperature,
            stop_token_ids=self._tokenizer.eos_token_ids,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=top_k if 0 < top_k < self._model.vocab_size else 0,
            min_p=body.min_p or 0.0,
            stop=body.stops,
            grammar=body.grammar,
        )


def _limit(body: Body) -> str:
    """The name of the field that limits a completion's length."""
    newer = isinstance(body, ChatBody) and body.max_completion_tokens is not None
    return "max_completion_tokens" if newer else "max_tokens"


def _seeds(body: Body, completions: int) -> tuple[int, ...]:
    """The seeds of one prompt: the request's (random without one), then seeds derived from it; all are different."""
    first = secrets.randbits(63) if body.seed is None else body.seed % _SEEDS
    return (first, *(derive_seed(first, member) for member in range(1, completions)))


def _refused(field: str, problem: Problem) -> RefusedRequest:
    """The refusal for a problem, without its place, which is a folder of the server."""
    found, remedy = problem.found[:_LONGEST_MESSAGE], problem.remedy[:_LONGEST_MESSAGE]
    return RefusedRequest(field, found, remedy or "see docs/serve.md")
