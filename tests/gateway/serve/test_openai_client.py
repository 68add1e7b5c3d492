"""Promises, by the `openai` package against a process of ``stretto serve``: text and chat, streaming and not, say the
same; usage counts tokens; seeds reproduce, and the answers of one request differ; log-probabilities are the engine's; a
refusal is the exception that OpenAI's own would be.

Promises of `response_format` of ``stretto serve``, by the `openai` package: what a random model says is parsed as
the class that was asked for; a schema that cannot be served is OpenAI's own exception, and the server goes on."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pytest
from openai.types import Completion as Reply
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field

from stretto.core.records import Completion, GenerateRequest, Sampling, StopReason, derive_seed
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from tests.engine.byte_policy import CONTEXT, NAME, generated
from tests.gateway.serve.serving import Serving
from tests.tolerances import EXACT

PROMPT = "the cat"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say é."},
]
SEED = 11


@pytest.fixture(scope="module")
def client(serving: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(byte_folder: Path) -> Tokenizer:
    return load_tokenizer(byte_folder)


@pytest.fixture(scope="module")
def engine(byte_folder: Path) -> NativeEngine:
    return NativeEngine.load(byte_folder, EngineConfig())


def prompt_of(tokenizer: Tokenizer, kind: str) -> tuple[int, ...]:
    if kind == "chat":
        return tokenizer.encode("<system>Be brief.<user>Say é.<assistant>", special_tokens=False)
    return tokenizer.encode(PROMPT)


def expected(
    engine: NativeEngine, prompt: tuple[int, ...], answers: int, likeliest: int = 0, **sampling: Any
) -> list[Completion]:
    """What the engine itself makes of the same request."""
    seeds = (SEED, *(derive_seed(SEED, member) for member in range(1, answers)))
    wanted = Sampling(stop_token_ids=(2,), **sampling)
    request = GenerateRequest(id="a", prompt_token_ids=prompt, seeds=seeds, sampling=wanted, top_logprobs=likeliest)
    return generated(engine, request)


def ask(client: openai.OpenAI, kind: str, likeliest: int | None = None, **fields: Any) -> Any:
    """With log-probabilities, and the `likeliest` tokens, if that is given; a list of chunks, if it is streamed."""
    fields = {"model": NAME, "seed": SEED, **fields}
    told: Any
    if kind == "text":
        told = client.completions.create(prompt=PROMPT, logprobs=likeliest, **fields)
    else:
        asked: dict[str, Any] = {} if likeliest is None else {"logprobs": True, "top_logprobs": likeliest}
        told = client.chat.completions.create(messages=MESSAGES, **asked, **fields)
    return list(told) if fields.get("stream") else told


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "stretto"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_answers_are_the_engines(client: openai.OpenAI, engine: NativeEngine, tokenizer: Tokenizer, kind: str) -> None:
    prompt = prompt_of(tokenizer, kind)
    answers = expected(engine, prompt, 3, max_tokens=60, temperature=0.8)
    reply = ask(client, kind, 0, n=3, max_tokens=60, temperature=0.8)
    texts = [choice.text if kind == "text" else choice.message.content for choice in reply.choices]
    assert texts == [tokenizer.decode(answer.token_ids) for answer in answers]
    assert len(set(texts)) == 3
    assert [choice.finish_reason for choice in reply.choices] == [answer.stop_reason for answer in answers]
    for choice, answer in zip(reply.choices, answers, strict=True):
        if kind == "text":
            logprobs = choice.logprobs.token_logprobs
            assert choice.logprobs.tokens == [tokenizer.spell((token,)) for token in answer.token_ids]
            assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset)
        else:
            logprobs = [token.logprob for token in choice.logprobs.content]
            assert choice.message.role == "assistant"
        assert logprobs == pytest.approx(list(answer.behavior_logprobs), abs=EXACT)
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.completion_tokens == sum(len(answer.token_ids) for answer in answers)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


@pytest.mark.parametrize("kind", ["text", "chat"])
@pytest.mark.parametrize("likeliest", [None, 0, 3])
def test_a_streamed_answer_says_the_same(client: openai.OpenAI, kind: str, likeliest: int | None) -> None:
    whole = ask(client, kind, likeliest, n=2, max_tokens=60)
    chunks = ask(client, kind, likeliest, n=2, max_tokens=60, stream=True, stream_options={"include_usage": True})
    assert len(chunks) > 20
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        told = [part.logprobs for part in parts if part.logprobs is not None]
        assert bool(told) == (likeliest is not None)
        if kind == "text":
            assert "".join(part.text for part in parts) == choice.text
            for name in ("token_logprobs", "text_offset", "top_logprobs") if told else ():
                assert [x for each in told for x in getattr(each, name) or ()] == (getattr(choice.logprobs, name) or [])
        else:
            assert parts[0].delta.role == "assistant"
            assert "".join(part.delta.content or "" for part in parts) == choice.message.content
            assert not told or [x for each in told for x in each.content or ()] == choice.logprobs.content
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.8}, {"temperature": 0.0}, {"extra_body": {"top_k": 2}}], ids=str
)
def test_completions_tell_the_likeliest_tokens(
    client: openai.OpenAI, tokenizer: Tokenizer, engine: NativeEngine, sampling: dict[str, Any]
) -> None:
    plain = sampling.get("extra_body", sampling)
    (answer,) = expected(engine, prompt_of(tokenizer, "text"), 1, likeliest=3, max_tokens=30, **plain)
    told = ask(client, "text", 3, max_tokens=30, **sampling).choices[0].logprobs
    sampled = zip(answer.token_ids, answer.behavior_logprobs, strict=True)
    ranked = [{*ranks, token} for ranks, token in zip(answer.top_logprobs, sampled, strict=True)]
    for texts, ranks in zip(told.top_logprobs, ranked, strict=True):
        assert len({token for token, _ in ranks}) <= (2 if "top_k" in plain else 4)
        assert set(texts) == {tokenizer.spell((token,)) for token, _ in ranks}
        assert max(texts.values()) == max(logprob for _, logprob in ranks)


def test_chats_tell_the_likeliest_tokens(client: openai.OpenAI, tokenizer: Tokenizer, engine: NativeEngine) -> None:
    answers = expected(engine, prompt_of(tokenizer, "chat"), 2, likeliest=4, max_tokens=30, top_p=0.9)
    reply = ask(client, "chat", 4, n=2, max_tokens=30, top_p=0.9)
    for choice, answer in zip(reply.choices, answers, strict=True):
        for told, ranks in zip(choice.logprobs.content, answer.top_logprobs, strict=True):
            assert [each.token for each in told.top_logprobs] == [tokenizer.spell((token,)) for token, _ in ranks]
            logprobs = [logprob for _, logprob in ranks]
            assert [each.logprob for each in told.top_logprobs] == pytest.approx(logprobs, abs=EXACT)
            assert all(each.bytes in (None, list(each.token.encode())) for each in told.top_logprobs)


def test_the_helper_for_streams_understands_ours(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model=NAME, messages=MESSAGES, seed=SEED, max_tokens=30).choices[0].message
    assert plain.content is not None
    stop = plain.content[12:14]  # the helper insists on answers that end by themselves
    fields: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "seed": SEED, "max_tokens": 30, "stop": stop}
    with client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.content == plain.content[: plain.content.index(stop)]
    assert final.finish_reason == "stop"


def test_a_reply_can_be_sent_back_as_a_turn(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=NAME, messages=MESSAGES, seed=SEED, max_tokens=4).choices[0].message
    turns: list[Any] = [*MESSAGES, first, {"role": "user", "content": [{"type": "text", "text": "And é?"}]}]
    again = client.chat.completions.create(model=NAME, messages=turns, max_tokens=4)
    assert again.usage is not None
    assert again.usage.prompt_tokens > len(MESSAGES)


def test_seeds_reproduce_and_their_absence_does_not(client: openai.OpenAI) -> None:
    def text(**fields: Any) -> str:
        reply: Reply = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=40, **fields)
        return reply.choices[0].text

    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert text() != text()
    assert text(temperature=0) == text(temperature=0, seed=9)


def test_an_answer_may_end_early_or_fill_the_context(client: openai.OpenAI, engine: NativeEngine) -> None:
    """With enough seeds some answer ends by itself; without a limit, a chat's answer ends there or with the context."""
    answers = expected(engine, (7, 8), 40, max_tokens=100)
    assert StopReason.STOP in {answer.stop_reason for answer in answers}
    reply = client.completions.create(model=NAME, prompt=[7, 8], n=40, seed=SEED, max_tokens=100)
    assert [choice.finish_reason for choice in reply.choices] == [answer.stop_reason for answer in answers]
    chat = client.chat.completions.create(model=NAME, messages=MESSAGES, n=20, seed=SEED)
    assert chat.usage is not None
    assert {choice.finish_reason for choice in chat.choices} == {"stop", "length"}
    assert chat.usage.completion_tokens <= 20 * (CONTEXT - chat.usage.prompt_tokens)


def test_prompts_in_a_list_are_answered_in_its_order(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    texts = ["the", "cat", "sat"]
    alone = [client.completions.create(model=NAME, prompt=text, seed=SEED, n=2).choices for text in texts]
    together = client.completions.create(model=NAME, prompt=texts, seed=SEED, n=2)
    assert [choice.text for choice in together.choices] == [choice.text for choices in alone for choice in choices]
    assert [choice.index for choice in together.choices] == list(range(6))
    tokens = [list(tokenizer.encode(text)) for text in texts]
    assert client.completions.create(model=NAME, prompt=tokens, seed=SEED, n=2).choices == together.choices


def test_extensions_travel_in_the_extra_body(client: openai.OpenAI) -> None:
    def text(**extra: float) -> str:
        reply = client.completions.create(model=NAME, prompt=PROMPT, seed=3, max_tokens=30, extra_body=extra)
        return str(reply.choices[0].text)

    greedy = client.completions.create(model=NAME, prompt=PROMPT, temperature=0, max_tokens=30).choices[0].text
    assert text(top_k=1) == text(min_p=1) == greedy != text()


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_the_clients_own_exception(client: openai.OpenAI, stream: bool) -> None:
    """`test_requests.py` has the others; these need the tokenizer of the model, or the package's own field."""
    cases: list[tuple[dict[str, Any], type[openai.APIStatusError], str]] = [
        ({"model": "gpt-5"}, openai.NotFoundError, "model"),
        ({"prompt": [1, -1]}, openai.BadRequestError, "prompt"),
        ({"prompt": [1, 10**9]}, openai.BadRequestError, "prompt"),
        ({"temperature": 1e-30}, openai.BadRequestError, "temperature"),
        ({"stop": ["a", "\ufffd"]}, openai.BadRequestError, "stop"),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, "temprature"),
    ]
    for fields, error, param in cases:
        with pytest.raises(error) as refused:
            client.completions.create(**{"model": NAME, "prompt": PROMPT, "stream": stream, **fields})
        assert refused.value.param == param
        assert param in refused.value.message


def test_a_stream_that_is_left_does_not_disturb_others(client: openai.OpenAI, serving: Serving) -> None:
    stream = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=200, n=16, seed=SEED, stream=True)
    next(iter(stream))
    stream.close()
    reply = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=5, seed=SEED)
    assert reply.choices[0].finish_reason == "length"


async def test_many_clients_at_once_get_what_they_would_get_alone(client: openai.OpenAI, serving: Serving) -> None:
    alone = [
        client.completions.create(model=NAME, prompt=PROMPT, seed=seed, max_tokens=30).choices[0].text
        for seed in range(8)
    ]

    async with openai.AsyncOpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=60) as many:

        async def streamed(seed: int) -> str:
            chunks = await many.completions.create(model=NAME, prompt=PROMPT, seed=seed, max_tokens=30, stream=True)
            return "".join([part.text async for chunk in chunks for part in chunk.choices])

        assert await asyncio.gather(*(streamed(seed % 8) for seed in range(64))) == alone * 8


class Town(BaseModel):
    """Strict schemas of OpenAI's, with bounds, so that a random model comes to an end."""

    name: Literal["Paris", "Rom", "Łódź"]
    people: Annotated[int, Field(ge=0, le=9999)]
    old: bool
    rivers: Annotated[list[Literal["Seine", "Tiber"]], Field(max_length=2)]


def client_of(serving: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0, timeout=60)


ASK: list[Any] = [{"role": "user", "content": "a town"}]


def test_what_is_said_is_parsed_as_the_class_that_was_asked_for(serving: Serving) -> None:
    with client_of(serving) as client:
        told = client.chat.completions.parse(
            model=NAME, messages=ASK, response_format=Town, n=6, temperature=2, seed=4, logprobs=True
        )
        towns = [choice.message.parsed for choice in told.choices]
        streamed = client.chat.completions.create(
            model=NAME, messages=ASK, response_format={"type": "json_object"}, max_tokens=9, seed=1, stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert all(isinstance(town, Town) for town in towns)
    assert len({town.model_dump_json() for town in towns if town}) > 1
    assert {choice.finish_reason for choice in told.choices} == {"stop"}
    assert text.startswith("{")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}, "Invalid type"),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"pattern": "(?=a)", "type": "string"}}},
            "look",
        ),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["x" * 40_000]}}}, "at most 32,768"),
        ({"type": "json_schema"}, "response_format"),
        ({"type": "regex"}, "response_format"),
    ],
)
def test_a_schema_that_cannot_be_served_is_a_bad_request(serving: Serving, form: Any, message: str) -> None:
    with client_of(serving) as client:
        with pytest.raises(openai.BadRequestError, match=message) as refused:
            client.chat.completions.create(model=NAME, messages=ASK, response_format=form)
        assert json.dumps(refused.value.body).count("response_format")
        assert client.chat.completions.create(model=NAME, messages=ASK, max_tokens=2).choices[0].finish_reason
