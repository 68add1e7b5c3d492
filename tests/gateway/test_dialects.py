"""Promises of OpenAI's Responses and of Anthropic's Messages, as Claude Code sends them: requests are read as messages,
a turn of the assistant as one message whatever its items; replies, whole or streamed, say the same, and are what
OpenAI's own library reads; what would lose a part of a conversation, and a wrong field, is refused by name.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai.types.responses import Response, ResponseCompletedEvent, ResponseStreamEvent
from pydantic import TypeAdapter

from stretto.core.errors import RefusedRequest
from stretto.core.records import StopReason
from stretto_gateway.dialects.messages import MessagesDialect
from stretto_gateway.dialects.responses import ResponsesDialect
from stretto_gateway.requests import NotServed
from stretto_workflows.chat.messages import ChatRequest, Message, SampledToken, SampledTurn, ToolCall

RESPONSES, MESSAGES = ResponsesDialect(), MessagesDialect()
CALLS = (ToolCall("call_0", "add", '{"a": 1,  "b": 2}'), ToolCall("call_1", "add", '{"a": 3}'))
SAID = SampledTurn(
    id="n0", created=9, model="tiny", message=Message("assistant", "So:", reasoning="hm", calls=CALLS),
    stop_reason=StopReason.STOP, prompt_tokens=5, sampled_tokens=4, reasoning_tokens=1,
)  # fmt: skip
QUESTION: dict[str, Any] = {"model": "tiny", "input": "1+2?"}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}


def openai(**fields: Any) -> Any:
    return RESPONSES.parse(json.dumps({**QUESTION, **fields}).encode())


def test_a_text_is_a_message_of_the_user_behind_the_instructions() -> None:
    asked = openai(instructions="Be brief.", tools=[TOOL], max_output_tokens=7, temperature=0.5)
    assert asked.messages == (Message("system", "Be brief."), Message("user", "1+2?"))
    assert asked.tools[0].function["function"]["parameters"] == {"type": "object"}
    assert (asked.options.max_tokens, asked.options.temperature) == (7, 0.5)


def test_what_a_reply_says_comes_back_as_the_same_message() -> None:
    reply = json.loads(RESPONSES.reply(openai(), [SAID]))
    result = {"type": "function_call_output", "call_id": "call_0", "output": [{"type": "input_text", "text": "3"}]}
    history = openai(input=[{"role": "user", "content": "1+2?"}, *reply["output"], result]).messages
    assert history == (Message("user", "1+2?"), SAID.message, Message("tool", "3", call_id="call_0"))


def test_two_turns_of_the_assistant_in_a_row_stay_two() -> None:
    answer = {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]}
    thought = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    assert openai(input=[answer, thought, answer]).messages == (
        Message("assistant", "a"),
        Message("assistant", "a", reasoning="t"),
    )


def test_a_developer_is_the_system() -> None:
    assert openai(input=[{"role": "developer", "content": "Be brief."}]).messages == (Message("system", "Be brief."),)


def test_a_reply_names_the_reply_that_it_goes_on_with() -> None:
    reply = json.loads(RESPONSES.reply(openai(), [SAID]))
    assert openai(previous_response_id=reply["id"]).previous == SAID.id


def test_the_whole_reply_is_a_response_to_openais_library() -> None:
    response = Response.model_validate_json(RESPONSES.reply(openai(tools=[TOOL], instructions="Be brief."), [SAID]))
    assert response.output_text == "So:"
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.usage is not None
    assert (response.usage.total_tokens, response.usage.output_tokens_details.reasoning_tokens) == (9, 1)
    assert (response.instructions, response.tools[0].type) == ("Be brief.", "function")


def test_the_events_tell_the_same_response() -> None:
    asked = openai()
    lines = b"".join(RESPONSES.events(asked, [SAID])).split(b"\n")
    events = [
        TypeAdapter[Any](ResponseStreamEvent).validate_json(line[6:]) for line in lines if line.startswith(b"data: ")
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "So:"
    assert isinstance(events[-1], ResponseCompletedEvent)
    assert events[-1].response == Response.model_validate_json(RESPONSES.reply(asked, [SAID]))
    told = [event.item for event in events if event.type == "response.output_item.done"]
    assert told == events[-1].response.output


def test_a_reply_that_was_cut_is_incomplete() -> None:
    cut = SampledTurn("n1", 9, "tiny", Message("assistant", "On and"), StopReason.LENGTH)
    response = json.loads(RESPONSES.reply(openai(), [cut]))
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][-1]["status"] == "incomplete"
    assert b"event: response.incomplete\n" in b"".join(RESPONSES.events(openai(), [cut]))


def test_logprobs_are_told_where_they_were_asked_for() -> None:
    asked = openai(include=["message.output_text.logprobs"], top_logprobs=2)
    assert (asked.options.logprobs, openai(top_logprobs=0).options.logprobs, openai().options.logprobs) == (2, 0, None)
    said = SampledTurn("n2", 9, "tiny", Message("assistant", "hi"), StopReason.STOP, tokens=(SampledToken("hi", -0.5),))
    part = json.loads(RESPONSES.reply(asked, [said]))["output"][0]["content"][0]
    assert part["logprobs"] == [{"token": "hi", "logprob": -0.5, "bytes": [104, 105], "top_logprobs": []}]


CALL = ToolCall("toolu_0", "add", '{"a": 1, "b": 2}')
TOLD = SampledTurn(
    id="n0", created=9, model="tiny", message=Message("assistant", "So:", reasoning="hm", calls=(CALL,)),
    stop_reason=StopReason.STOP, prompt_tokens=5, sampled_tokens=4,
)  # fmt: skip
EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
#: As Claude Code 2.1.330 asks, texts shortened.
CLAUDE: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "user", "content": "1+2?"},
        {"role": "system", "content": [{"type": "text", "text": "# Environment", **EPHEMERAL}]},
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.330.d01; cc_entrypoint=sdk-py;"},
        {"type": "text", "text": "You are an agent.", **EPHEMERAL},
        {"type": "text", "text": "Be brief.", **EPHEMERAL},
    ],
    "tools": [{"name": "add", "description": "Add.", "input_schema": {"type": "object"}, "defer_loading": True}],
    "metadata": {"user_id": "x"},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive", "display": "updates"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}


def claude(**fields: Any) -> ChatRequest:
    return MESSAGES.parse(json.dumps({**CLAUDE, **fields}).encode())


def events_of_claude(said: SampledTurn) -> list[dict[str, Any]]:
    lines = b"".join(MESSAGES.events(claude(), [said])).split(b"\n")
    told = [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]
    assert [line[7:].decode() for line in lines if line.startswith(b"event: ")] == [event["type"] for event in told]
    return told


def test_a_request_of_claude_code_is_read() -> None:
    asked = claude()
    assert asked.messages == (
        Message("system", "You are an agent.\nBe brief."),
        Message("user", "1+2?"),
        Message("system", "# Environment"),
    )
    assert (asked.stream, asked.options.max_tokens, asked.options.tool_choice) == (True, 32000, "auto")
    assert (asked.tools[0].name, asked.tools[0].parameters) == ("add", {"type": "object"})


def test_where_a_cache_may_end_changes_no_message() -> None:
    other = {"role": "user", "content": [{"type": "text", "text": "1+2?", **EPHEMERAL}]}
    assert claude(messages=[{"role": "user", "content": "1+2?"}]).messages == claude(messages=[other]).messages


def test_what_a_reply_of_anthropics_form_says_comes_back_as_the_same_message() -> None:
    said = json.loads(MESSAGES.reply(claude(), [TOLD]))
    result = {"type": "tool_result", "tool_use_id": "toolu_0", "content": [{"type": "text", "text": "3"}]}
    turns = [
        {"role": "assistant", "content": said["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
    ]
    asked = claude(system=None, messages=turns)
    assert asked.messages == (TOLD.message, Message("tool", "3", call_id="toolu_0"), Message("user", "Go on."))


def test_the_whole_reply_has_anthropics_form() -> None:
    assert json.loads(MESSAGES.reply(claude(), [TOLD])) == {
        "id": "msg_n0",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "n0"},
            {"type": "text", "text": "So:"},
            {"type": "tool_use", "id": "toolu_0", "name": "add", "input": {"a": 1, "b": 2}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 4,
        },
    }


def test_the_events_tell_the_blocks_of_the_whole_reply() -> None:
    """Put together as Anthropic's library does: a block begins empty, deltas fill it."""
    told = events_of_claude(TOLD)
    assert (told[0]["type"], told[0]["message"]["usage"]["output_tokens"]) == ("message_start", 0)
    blocks, arguments = dict[int, dict[str, Any]](), ""
    for event in told:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = event["content_block"]
        elif event["type"] == "content_block_delta":
            delta = {name: value for name, value in event["delta"].items() if name != "type"}
            arguments += delta.pop("partial_json", "")
            for name, value in delta.items():
                blocks[event["index"]][name] += value
    blocks[2]["input"] = json.loads(arguments)
    assert list(blocks.values()) == json.loads(MESSAGES.reply(claude(), [TOLD]))["content"]
    assert arguments == CALL.arguments  # as the model wrote them
    assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert told[-1] == {"type": "message_stop"}


@pytest.mark.parametrize(
    ("said", "reason", "sequence"),
    [
        (SampledTurn("a", 9, "tiny", Message("assistant", "3"), StopReason.STOP), "end_turn", None),
        (SampledTurn("a", 9, "tiny", Message("assistant", "3"), StopReason.STOP, stop="END"), "stop_sequence", "END"),
        (SampledTurn("a", 9, "tiny", Message("assistant", calls=(CALL,)), StopReason.LENGTH), "max_tokens", None),
    ],
)
def test_why_a_message_ended(said: SampledTurn, reason: str, sequence: str | None) -> None:
    assert events_of_claude(said)[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


SCHEMA = {"type": "object"}
TEXTS: list[tuple[ChatRequest, tuple[bool, Any]]] = [
    (openai(text={"format": {"type": "json_object"}}), (True, None)),
    (openai(text={"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}), (True, SCHEMA)),
    (openai(text={"format": {"type": "text"}}), (False, None)),
    (claude(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}), (True, SCHEMA)),
]


def test_the_form_of_the_text_and_the_choice_of_a_tool_are_read() -> None:
    assert [(asked.options.json, asked.options.schema) for asked, _ in TEXTS] == [wanted for _, wanted in TEXTS]
    for choice, read in (("none", "none"), ("required", "required"), ({"type": "function", "name": "add"}, "add")):
        assert openai(tool_choice=choice, tools=[TOOL]).options.tool_choice == read
    for choice, read in (("auto", "auto"), ("any", "required"), ("none", "none"), ("tool", "add")):
        wanted = claude(tool_choice={"type": choice, "name": "add", "disable_parallel_tool_use": True}).options
        assert (wanted.tool_choice, wanted.parallel_calls) == (read, False)


def said(role: str, **part: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": [part]}]


@pytest.mark.parametrize(
    ("asked", "fields", "field"),
    [
        (openai, {"input": []}, "input"),
        (openai, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (openai, {"input": [{"role": "user"}]}, "input[0].content"),
        (openai, {"input": [{"content": "hi"}]}, "input[0].role"),
        (openai, {"input": [{"type": "function_call", "name": "add", "arguments": "{}"}]}, "input[0].call_id"),
        (openai, {"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        (openai, {"input": said("user", type="input_image")}, "input[0].content[0].type"),
        (openai, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (openai, {"max_output_tokens": 0}, "max_output_tokens"),
        (openai, {"previous_response_id": "chatcmpl-1"}, "previous_response_id"),
        *[(openai, {name: value}, name) for name, value in (("background", True), ("conversation", "c"))],
        (openai, {"frobnicate": 1}, "frobnicate"),
        *[(claude, {"messages": []}, "messages"), (claude, {"max_tokens": None}, "max_tokens")],
        (claude, {"messages": said("user", type="image")}, "messages[0].content[0].type"),
        (claude, {"messages": said("user", type="thinking", thinking="x")}, "messages[0].content"),
        (claude, {"messages": said("assistant", type="tool_result", tool_use_id="x")}, "messages[0].content"),
        (claude, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        (claude, {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (claude, {"temperature": -1}, "temperature"),
    ],
)
def test_a_wrong_field_is_named(asked: Callable[..., ChatRequest], fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RefusedRequest) as refused:
        asked(**fields)
    assert refused.value.field == field


def test_an_error_has_the_form_of_its_dialect() -> None:
    refused = NotServed(404, "no such model", "model", "model_not_found")
    named = {"param": "model", "code": "model_not_found"}
    error = {"message": "no such model", "type": "invalid_request_error", **named}
    assert json.loads(RESPONSES.refuse(refused)) == {"error": error}
    told = json.loads(MESSAGES.refuse(refused))
    assert told == {"type": "error", "error": {"type": "not_found_error", "message": "model: no such model"}}
