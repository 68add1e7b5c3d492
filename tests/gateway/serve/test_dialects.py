"""Promises of ``stretto serve``: every dialect gets what the engine samples for the same prompt, whole and streamed;
tools are offered to the model and calls are read; a conversation that only a session knows is refused."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.byte_policy import NAME
from tests.gateway.serve.serving import Serving, serve_process
from tests.gateway.serving import build_chat_model, wished

ASK = [{"role": "user", "content": "1+2?"}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SUM = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server of a model whose context has room for tools."""
    with serve_process(build_chat_model(tmp_path_factory.mktemp("roomy") / NAME, context=2048)) as running:
        yield running


def posted(serving: Serving, path: str, **fields: Any) -> Any:
    reply = serving.post(path, {"model": NAME, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(serving: Serving, path: str, **fields: Any) -> list[Any]:
    """The data of a stream."""
    lines = serving.post(path, {"model": NAME, "stream": True, **fields}).content.decode().split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_each_dialect_has_the_greedy_completion(serving: Serving) -> None:
    greedy: dict[str, Any] = {"temperature": 0}
    chat = posted(serving, CHAT, messages=ASK, max_tokens=30, **greedy)
    response = posted(serving, RESPONSES, input=ASK, max_output_tokens=30, **greedy)
    message = posted(serving, MESSAGES, messages=ASK, max_tokens=30, **greedy)
    text = chat["choices"][0]["message"]["content"]
    assert text == response["output"][0]["content"][0]["text"] == message["content"][0]["text"] != ""
    assert chat["usage"]["prompt_tokens"] == response["usage"]["input_tokens"] == message["usage"]["input_tokens"]
    counted = posted(serving, f"{MESSAGES}/count_tokens", messages=ASK)
    assert counted == {"input_tokens": chat["usage"]["prompt_tokens"]}
    streamed = events(serving, RESPONSES, input=ASK, max_output_tokens=30, **greedy)
    assert "".join(event.get("delta", "") for event in streamed) == text
    blocks = events(serving, MESSAGES, messages=ASK, max_tokens=30, **greedy)
    assert "".join(event["delta"].get("text", "") for event in blocks if event["type"] == "content_block_delta") == text
    assert message["stop_reason"] == "max_tokens"


def test_a_stop_text_is_named_to_a_client_of_anthropic(serving: Serving) -> None:
    text = posted(serving, MESSAGES, messages=ASK, max_tokens=40, temperature=0)["content"][0]["text"]
    stop = next(text[at : at + 2] for at in range(6, 30) if "\ufffd" not in text[at : at + 2])
    cut = posted(serving, MESSAGES, messages=ASK, max_tokens=40, temperature=0, stop_sequences=[stop])
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", stop)
    assert cut["content"][0]["text"] == text[: text.index(stop)]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_forced_tool_is_called(roomy: Serving, path: str) -> None:
    body = wished(path, tool=SUM, one=True) | {"model": NAME}
    called = posted(roomy, path, **body)
    if path == CHAT:
        [call] = called["choices"][0]["message"]["tool_calls"]
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        [delta] = [
            one["delta"]["tool_calls"]
            for chunk in events(roomy, path, **body)
            for one in chunk["choices"]
            if "tool_calls" in one["delta"]
        ]
        assert delta[0]["function"]["name"] == "add"
    elif path == RESPONSES:
        call = called["output"][-1]
        name, arguments = call["name"], json.loads(call["arguments"])
    else:
        [call] = called["content"]
        name, arguments = call["name"], call["input"]
    assert (name, list(arguments)) == ("add", ["a"])


def test_several_completions_may_call_tools(roomy: Serving) -> None:
    choices = posted(roomy, CHAT, **wished(CHAT, tool=SUM, one=True) | {"model": NAME, "n": 3, "seed": 2})["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in choices}) == 3


def test_an_earlier_response_is_known_to_sessions_alone(serving: Serving) -> None:
    refused = serving.post(RESPONSES, {"model": NAME, "input": "a", "previous_response_id": "resp_x"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
