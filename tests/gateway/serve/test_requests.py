"""Promises: a body that is wrong is refused with the name of the field that is; a body that is right becomes the same
request as the token interface would have made; what other servers understand and this one does not is never ignored.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from stretto.core.engine import EngineHealth, Progress
from stretto.core.records import GenerateRequest, Sampling, Segment, StopReason
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto_gateway.serve.app import ServeApp
from stretto_workflows.chat.bridge import Renderer
from tests.engine.byte_policy import CONTEXT, NAME, VOCABULARY
from tests.gateway.serve.serving import CHAT, COMPLETIONS, served_model

HELLO = [{"role": "user", "content": "Hello"}]

WRONG: list[Any] = [  # what is said otherwise, the field that is named, and words of the message
    ({"model": "gpt-5"}, "model", "'gpt-5' is not served here"),
    *[({"model": 3}, "model", "Expected `str`, got `int`"), ({"n": 0}, "n", "Expected `int` >= 1")],
    *[({"n": 1.5}, "n", "got `float`"), ({"n": True}, "n", "got `bool`"), ({"n": 129}, "n", "Expected `int` <= 128")],
    ({"max_tokens": 0}, "max_tokens", ">= 1"),
    ({"max_tokens": CONTEXT}, "max_tokens", "of the context of 256 tokens"),
    ({"max_tokens": 10**30}, "max_tokens", "of the context of 256 tokens"),
    ({"temperature": -0.1}, "temperature", ">= 0"),
    ({"temperature": float("nan")}, "temperature", "NaN or infinite"),
    ({"temperature": float("inf")}, "temperature", "NaN or infinite"),
    ({"logit_bias": {"7": float("nan")}}, "logit_bias", "NaN or infinite"),
    ({"user": "\ud800x"}, "user", "half of a surrogate pair"),
    ({"stop": ["end", "\udfff"]}, "stop", "half of a surrogate pair"),
    *[({"temperature": "hot"}, "temperature", "got `str`"), ({"top_p": 0}, "top_p", "> 0")],
    *[({"top_p": 1.1}, "top_p", "<= 1"), ({"top_k": -2}, "top_k", ">= -1")],
    *[({"top_k": 2**40}, "top_k", "<= 2147483647"), ({"min_p": 2}, "min_p", "<= 1")],
    *[({"seed": 2**64}, "seed", "<= 9223372036854775807"), ({"stop": ["x"] * 100_000}, "stop", "length <= 64")],
    *[({"stop": ["x", ""]}, "stop[1]", "length >= 1"), ({"stop": "x" * 257}, "stop", "length <= 256")],
    *[({"stop": [1]}, "stop[0]", "got `int`"), ({"stream": "yes"}, "stream", "got `str`")],
    ({"stream_options": {"include_usage": True}}, "stream_options", 'only together with "stream": true'),
    ({"stream": True, "stream_options": {"chunks": 1}}, "stream_options.chunks", "unknown field"),
    ({"presence_penalty": 0.5}, "presence_penalty", "0.5; only 0 or null"),
    *[({"logit_bias": {"5": 1}}, "logit_bias", "only {} or null"), ({"temprature": 1}, "temprature", "unknown field")],
]
WRONG_PROMPTS: list[Any] = [
    *[({"prompt": None}, "prompt", "missing"), ({"prompt": []}, "prompt", "an empty list")],
    ({"prompt": ["a", 1]}, "prompt", "a list of different kinds"),
    ({"prompt": [[1], "a"]}, "prompt", "a list of different kinds"),
    *[({"prompt": [1, 2.5]}, "prompt[1]", "got `float`"), ({"prompt": [[1, "a"]]}, "prompt[0][1]", "got `str`")],
    *[({"prompt": "a" * CONTEXT}, "prompt", "256 tokens"), ({"prompt": ["a"] * 1025}, "prompt", "1,025 prompts")],
    ({"prompt": ["a"] * 100, "n": 100}, "n", "at most 4,096 completions"),
    *[({"echo": True}, "echo", "true; only false or null"), ({"suffix": "end"}, "suffix", '"end"; only "" or null')],
    *[({"best_of": 4}, "best_of", "4; only 1 or null"), ({"logprobs": 21}, "logprobs", "<= 20")],
    *[({"logprobs": True}, "logprobs", "got `bool`"), ({"messages": HELLO}, "messages", "unknown field")],
]
WRONG_CHATS: list[Any] = [
    ({"messages": []}, "messages", "length >= 1"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role", "Invalid enum value 'boss'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "image_url"),
    ({"messages": [{"role": "user", "content": "odd"}]}, "messages", "refused by the chat template: nothing odd"),
    ({"messages": [{"role": "user", "content": "a" * CONTEXT}]}, "messages", "tokens"),
    ({"max_completion_tokens": CONTEXT}, "max_completion_tokens", "of the context of 256 tokens"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "<= 20"),
    ({"top_logprobs": 3}, "top_logprobs", 'only together with "logprobs": true'),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "with no other"),
    ({"prompt": "x"}, "prompt", "unknown field"),
]


class RecordingEngine:
    """Takes the requests that a server makes, and ends them without a token, as `RemoteEngine` does with tokens."""

    stopping = False

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []

    @asynccontextmanager
    async def streaming(self, requests: Sequence[GenerateRequest], take: Any = None) -> AsyncIterator[Any]:
        """See `RemoteEngine`."""
        self.requests = list(requests)

        async def ended() -> AsyncIterator[list[Progress]]:
            over = Segment.of(stop_reason=StopReason.STOP)
            yield [Progress(one.id, member, over) for one in requests for member in range(len(one.seeds))]

        yield ended()

    async def health(self) -> EngineHealth:
        """See `RemoteEngine`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Asking:
    """A server without a model."""

    tokenizer: Tokenizer

    async def post(self, path: str, body: bytes) -> tuple[httpx.Response, list[GenerateRequest]]:
        """The reply, and the requests to the engine."""
        engine = RecordingEngine()
        app = ServeApp(engine, served_model(self.tokenizer), engine)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.post(path, content=body), engine.requests

    def refused(self, path: str, body: bytes) -> dict[str, Any]:
        """The error that a body gets."""
        reply, requests = asyncio.run(self.post(path, body))
        assert 400 <= reply.status_code < 500
        assert not requests
        return dict(reply.json()["error"])

    def made(self, path: str, **fields: Any) -> list[GenerateRequest]:
        """The requests to the engine that a body becomes."""
        base = {"prompt": "ab"} if path == COMPLETIONS else {"messages": HELLO}
        reply, requests = asyncio.run(self.post(path, json.dumps({"model": NAME, **base, **fields}).encode()))
        assert reply.status_code == 200, reply.text
        return requests


def shown(value: object) -> str:
    """A short name of a case."""
    return str(value)[:40]


@pytest.fixture(scope="module")
def asking(byte_folder: Path) -> Asking:
    return Asking(load_tokenizer(byte_folder))


def completion(asking: Asking, **fields: Any) -> list[GenerateRequest]:
    return asking.made(COMPLETIONS, **fields)


def chat(asking: Asking, **fields: Any) -> list[GenerateRequest]:
    return asking.made(CHAT, **fields)


def unnamed(requests: list[GenerateRequest]) -> list[GenerateRequest]:
    """Requests without their ids, which are random."""
    return [msgspec.structs.replace(request, id="") for request in requests]


WRONG_BODIES = [(COMPLETIONS, {"prompt": "ab"}, *wrong) for wrong in WRONG + WRONG_PROMPTS] + [
    (CHAT, {"messages": HELLO}, *wrong) for wrong in WRONG + WRONG_CHATS
]


@pytest.mark.parametrize(("path", "base", "fields", "field", "found"), WRONG_BODIES, ids=shown)
def test_a_wrong_body_names_its_field(
    asking: Asking, path: str, base: dict[str, Any], fields: dict[str, Any], field: str, found: str
) -> None:
    error = asking.refused(path, json.dumps({"model": NAME, **base, **fields}).encode())
    assert error["param"] == field
    assert found in error["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": "\\ud800"}', b"[" * 100_000, b'{"a":' * 100_000],
)
def test_what_is_no_object_is_no_request(asking: Asking, body: bytes) -> None:
    for path in (COMPLETIONS, CHAT):
        assert asking.refused(path, body)["type"] == "invalid_request_error"


def test_a_model_without_a_chat_template_says_so(folder: Path) -> None:
    error = Asking(load_tokenizer(folder)).refused(CHAT, json.dumps({"model": NAME, "messages": HELLO}).encode())
    assert error["message"].startswith("messages: the tokenizer has no chat template")


def test_the_defaults_are_those_of_openai(asking: Asking) -> None:
    (asked,) = completion(asking)
    assert asked.sampling == Sampling(max_tokens=16, temperature=1.0, stop_token_ids=(2,))
    (asked,) = chat(asking)
    assert asked.sampling.max_tokens == CONTEXT - len(asked.prompt_token_ids)
    (asked,) = completion(asking, prompt=[5] * (CONTEXT - 3))
    assert asked.sampling.max_tokens == 3  # no more than there is room for, when nothing was said


def test_every_field_of_the_sampling_arrives(asking: Asking) -> None:
    fields = {"max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "stop": ["a", "b"]}
    (asked,) = completion(asking, **fields)
    assert asked.sampling == Sampling(
        max_tokens=9, temperature=0.7, stop_token_ids=(2,), top_p=0.9, top_k=40, min_p=0.05, stop=("a", "b")
    )
    assert completion(asking, stop="x")[0].sampling.stop == ("x",)
    assert [completion(asking, top_k=k)[0].sampling.top_k for k in (-1, 0, 1, VOCABULARY)] == [0, 0, 1, 0]
    assert chat(asking, max_tokens=5, max_completion_tokens=7)[0].sampling.max_tokens == 7


def test_null_is_as_good_as_absent_and_harmless_fields_are_accepted(asking: Asking) -> None:
    nothing = dict.fromkeys(("n", "temperature", "top_p", "seed", "stop", "stream", "stream_options", "logit_bias"))
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "presence_penalty": 0, "frequency_penalty": 0.0}
    plain = unnamed(completion(asking, seed=1))
    assert unnamed(completion(asking, **{**nothing, **harmless, "seed": 1, "echo": False, "best_of": 1})) == plain
    neutral = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "parallel_tool_calls": True}
    assert unnamed(chat(asking, **neutral, seed=1)) == unnamed(chat(asking, seed=1))


def test_prompts_come_as_text_or_tokens_alone_or_in_lists(asking: Asking) -> None:
    (text,) = completion(asking, prompt="the")
    ids = list(text.prompt_token_ids)
    assert ids == [VOCABULARY - 1]
    assert completion(asking, prompt=ids)[0].prompt_token_ids == text.prompt_token_ids
    for prompts in (["the", "a"], [ids, [3]]):
        asked = completion(asking, prompt=prompts, n=2)
        assert [request.id.rpartition("/")[2] for request in asked] == ["0", "1"]
        assert asked[0].prompt_token_ids == text.prompt_token_ids
        assert [len(request.seeds) for request in asked] == [2, 2]


def test_answers_have_different_seeds_that_follow_from_the_requests(asking: Asking) -> None:
    (first,), (again,) = (completion(asking, seed=-7, n=5) for _ in range(2))
    assert first.seeds == again.seeds
    assert len(set(first.seeds)) == 5
    assert first.seeds[0] == 2**64 - 7
    assert completion(asking, seed=-7)[0].seeds == first.seeds[:1]
    assert completion(asking)[0].seeds != completion(asking)[0].seeds
    assert len({seed for request in completion(asking, prompt=["Hello"] * 8, n=2) for seed in request.seeds}) == 16
    assert {request.seeds for request in completion(asking, prompt=["Hello"] * 8, n=5, seed=-7)} == {first.seeds}


def test_a_conversation_goes_through_the_folders_template(asking: Asking) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    reply: dict[str, Any] = {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": None}
    reply["annotations"] = []
    asked = chat(asking, messages=[{"role": "system", "content": "S"}, {"role": "user", "content": parts}, reply])
    assert asking.tokenizer.decode(asked[0].prompt_token_ids) == "<system>S<user>Hello<assistant>Hi<assistant>"


async def test_a_long_prompt_is_refused_without_holding_up_the_server(asking: Asking) -> None:
    body = json.dumps({"model": NAME, "prompt": "abc " * 250_000}).encode()
    task, turns = asyncio.create_task(asking.post(COMPLETIONS, body)), 0
    while not task.done():
        await asyncio.sleep(0.001)
        turns += 1
    reply, _ = await task
    assert "prompt: 1,000,000 tokens" in reply.json()["error"]["message"]
    assert turns > 1  # had it been held up, it would have had one turn


async def test_a_long_conversation_is_encoded_beside_the_server_wherever_its_text_is(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, whole = list[threading.Thread](), Renderer.whole

    def noted(renderer: Renderer, history: Any, tools: Any) -> tuple[int, ...]:
        encoded.append(threading.current_thread())
        return whole(renderer, history, tools)

    monkeypatch.setattr(Renderer, "whole", noted)
    long = "a" * 30_000
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": long})}}
    tool = {"type": "function", "function": {"name": "add", "description": long}}
    for messages, tools in (
        ([{"role": "user", "content": long}], []),
        (
            [
                *HELLO,
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "3"},
            ],
            [],
        ),
        (HELLO, [tool]),
        (HELLO, []),
    ):
        body = {"model": NAME, "messages": messages, **({"tools": tools} if tools else {})}
        await asking.post(CHAT, json.dumps(body).encode())
    assert [thread is threading.main_thread() for thread in encoded] == [False, False, False, True]
