"""Promise: requests of OpenAI's Responses are read as messages, a turn of the assistant as one message whatever its
items; replies, whole or streamed, are what OpenAI's own library reads; a wrong field is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseCompletedEvent, ResponseStreamEvent
from pydantic import TypeAdapter

from stretto.conversation.messages import Message, SampledToken, SampledTurn, ToolCall
from stretto.core.errors import RefusedRequest
from stretto.core.records import StopReason
from stretto_gateway.dialects.responses import ResponsesDialect
from stretto_gateway.requests import NotServed

DIALECT = ResponsesDialect()
CALLS = (ToolCall("call_0", "add", '{"a": 1,  "b": 2}'), ToolCall("call_1", "add", '{"a": 3}'))
SAID = SampledTurn(
    id="n0", created=9, model="tiny", message=Message("assistant", "So:", reasoning="hm", calls=CALLS),
    stop_reason=StopReason.STOP, prompt_tokens=5, sampled_tokens=4, reasoning_tokens=1,
)  # fmt: skip
QUESTION: dict[str, Any] = {"model": "tiny", "input": "1+2?"}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


def parsed(**fields: Any) -> Any:
    return DIALECT.parse(json.dumps({**QUESTION, **fields}).encode())


def test_a_text_is_a_message_of_the_user_behind_the_instructions() -> None:
    asked = parsed(instructions="Be brief.", tools=[TOOL], max_output_tokens=7, temperature=0.5)
    assert asked.messages == (Message("system", "Be brief."), Message("user", "1+2?"))
    assert asked.tools[0].function["function"]["parameters"] == {"type": "object"}
    assert (asked.options.max_tokens, asked.options.temperature) == (7, 0.5)


def test_what_a_reply_says_comes_back_as_the_same_message() -> None:
    reply = json.loads(DIALECT.reply(parsed(), [SAID]))
    result = {"type": "function_call_output", "call_id": "call_0", "output": [{"type": "input_text", "text": "3"}]}
    history = parsed(input=[{"role": "user", "content": "1+2?"}, *reply["output"], result]).messages
    assert history == (Message("user", "1+2?"), SAID.message, Message("tool", "3", call_id="call_0"))


def test_two_turns_of_the_assistant_in_a_row_stay_two() -> None:
    answer = {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]}
    thought = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    assert parsed(input=[answer, thought, answer]).messages == (
        Message("assistant", "a"),
        Message("assistant", "a", reasoning="t"),
    )


def test_a_developer_is_the_system() -> None:
    assert parsed(input=[{"role": "developer", "content": "Be brief."}]).messages == (Message("system", "Be brief."),)


def test_a_reply_names_the_reply_that_it_goes_on_with() -> None:
    reply = json.loads(DIALECT.reply(parsed(), [SAID]))
    assert parsed(previous_response_id=reply["id"]).previous == SAID.id


def test_the_whole_reply_is_a_response_to_openais_library() -> None:
    response = Response.model_validate_json(DIALECT.reply(parsed(tools=[TOOL], instructions="Be brief."), [SAID]))
    assert response.output_text == "So:"
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.usage is not None
    assert (response.usage.total_tokens, response.usage.output_tokens_details.reasoning_tokens) == (9, 1)
    assert (response.instructions, response.tools[0].type) == ("Be brief.", "function")


def test_the_events_tell_the_same_response() -> None:
    asked = parsed()
    lines = b"".join(DIALECT.events(asked, [SAID])).split(b"\n")
    events = [
        TypeAdapter[Any](ResponseStreamEvent).validate_json(line[6:]) for line in lines if line.startswith(b"data: ")
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "So:"
    assert isinstance(events[-1], ResponseCompletedEvent)
    assert events[-1].response == Response.model_validate_json(DIALECT.reply(asked, [SAID]))
    told = [event.item for event in events if event.type == "response.output_item.done"]
    assert told == events[-1].response.output


def test_a_reply_that_was_cut_is_incomplete() -> None:
    cut = SampledTurn("n1", 9, "tiny", Message("assistant", "On and"), StopReason.LENGTH)
    response = json.loads(DIALECT.reply(parsed(), [cut]))
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][-1]["status"] == "incomplete"
    assert b"event: response.incomplete\n" in b"".join(DIALECT.events(parsed(), [cut]))


def test_logprobs_are_told_where_they_were_asked_for() -> None:
    asked = parsed(include=["message.output_text.logprobs"], top_logprobs=2)
    assert (asked.options.logprobs, parsed(top_logprobs=0).options.logprobs, parsed().options.logprobs) == (2, 0, None)
    said = SampledTurn("n2", 9, "tiny", Message("assistant", "hi"), StopReason.STOP, tokens=(SampledToken("hi", -0.5),))
    part = json.loads(DIALECT.reply(asked, [said]))["output"][0]["content"][0]
    assert part["logprobs"] == [{"token": "hi", "logprob": -0.5, "bytes": [104, 105], "top_logprobs": []}]


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        ({"type": "json_object"}, (True, None)),
        ({"type": "json_schema", "name": "x", "schema": {"type": "object"}}, (True, {"type": "object"})),
        ({"type": "text"}, (False, None)),
    ],
)
def test_the_form_of_the_text_is_read(form: dict[str, Any], wanted: object) -> None:
    asked = parsed(text={"format": form}).options
    assert (asked.json, asked.schema) == wanted


@pytest.mark.parametrize(
    ("choice", "read"), [("none", "none"), ("required", "required"), ({"type": "function", "name": "add"}, "add")]
)
def test_the_choice_of_a_tool_is_read(choice: object, read: str) -> None:
    assert parsed(tool_choice=choice, tools=[TOOL]).options.tool_choice == read


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        *[({"input": []}, "input"), ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type")],
        *[({"input": [{"role": "user"}]}, "input[0].content"), ({"input": [{"content": "hi"}]}, "input[0].role")],
        ({"input": [{"type": "function_call", "name": "add", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        *[({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"max_output_tokens": 0}, "max_output_tokens")],
        *[({"previous_response_id": "chatcmpl-1"}, "previous_response_id"), ({"background": True}, "background")],
        *[({"conversation": "c"}, "conversation"), ({"frobnicate": 1}, "frobnicate")],
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RefusedRequest) as refused:
        parsed(**fields)
    assert refused.value.field == field


def test_an_error_has_openais_form() -> None:
    refused = NotServed(404, "no such model", "model", "model_not_found")
    named = {"param": "model", "code": "model_not_found"}
    error = {"message": "no such model", "type": "invalid_request_error", **named}
    assert json.loads(DIALECT.refuse(refused)) == {"error": error}
