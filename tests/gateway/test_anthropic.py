"""Promise: requests of Anthropic's Messages, as Claude Code sends them, are read as messages; replies, whole or
streamed, say the same; what would lose a part of a conversation is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stretto.conversation.messages import ChatRequest, Message, SampledTurn, ToolCall
from stretto.core.errors import RefusedRequest
from stretto.core.records import StopReason
from stretto_gateway.dialects.messages import MessagesDialect
from stretto_gateway.requests import NotServed

DIALECT = MessagesDialect()
CALL = ToolCall("toolu_0", "add", '{"a": 1, "b": 2}')
SAID = SampledTurn(
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


def parsed(**fields: Any) -> ChatRequest:
    return DIALECT.parse(json.dumps({**CLAUDE, **fields}).encode())


def events(said: SampledTurn) -> list[dict[str, Any]]:
    lines = b"".join(DIALECT.events(parsed(), [said])).split(b"\n")
    told = [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]
    assert [line[7:].decode() for line in lines if line.startswith(b"event: ")] == [event["type"] for event in told]
    return told


def test_a_request_of_claude_code_is_read() -> None:
    asked = parsed()
    assert asked.messages == (
        Message("system", "You are an agent.\nBe brief."),
        Message("user", "1+2?"),
        Message("system", "# Environment"),
    )
    assert (asked.stream, asked.options.max_tokens, asked.options.tool_choice) == (True, 32000, "auto")
    assert (asked.tools[0].name, asked.tools[0].parameters) == ("add", {"type": "object"})


def test_where_a_cache_may_end_changes_no_message() -> None:
    one = {"role": "user", "content": "1+2?"}
    other = {"role": "user", "content": [{"type": "text", "text": "1+2?", **EPHEMERAL}]}
    assert parsed(messages=[one]).messages == parsed(messages=[other]).messages


def test_what_a_reply_says_comes_back_as_the_same_message() -> None:
    said = json.loads(DIALECT.reply(parsed(), [SAID]))
    result = {"type": "tool_result", "tool_use_id": "toolu_0", "content": [{"type": "text", "text": "3"}]}
    turns = [
        {"role": "assistant", "content": said["content"]},
        {"role": "user", "content": [result, {"type": "text", "text": "Go on."}]},
    ]
    asked = parsed(system=None, messages=turns)
    assert asked.messages == (SAID.message, Message("tool", "3", call_id="toolu_0"), Message("user", "Go on."))


def test_the_whole_reply_has_anthropics_form() -> None:
    assert json.loads(DIALECT.reply(parsed(), [SAID])) == {
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
    told = events(SAID)
    assert told[0]["type"] == "message_start"
    assert told[0]["message"]["usage"]["output_tokens"] == 0
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
    assert list(blocks.values()) == json.loads(DIALECT.reply(parsed(), [SAID]))["content"]
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
    assert events(said)[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


@pytest.mark.parametrize(
    ("choice", "read"), [("auto", "auto"), ("any", "required"), ("none", "none"), ("tool", "add")]
)  # fmt: skip
def test_the_choice_of_a_tool_is_read(choice: str, read: str) -> None:
    wanted = parsed(tool_choice={"type": choice, "name": "add", "disable_parallel_tool_use": True}).options
    assert (wanted.tool_choice, wanted.parallel_calls) == (read, False)


def test_a_schema_for_the_text_is_read() -> None:
    wanted = parsed(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}}).options
    assert (wanted.json, wanted.schema) == (True, {"type": "object"})


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
            "messages[0].content",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RefusedRequest) as refused:
        parsed(**fields)
    assert refused.value.field == field


def test_an_error_has_anthropics_form() -> None:
    told = json.loads(DIALECT.refuse(NotServed(404, "no such model", "model", "model_not_found")))
    assert told == {"type": "error", "error": {"type": "not_found_error", "message": "model: no such model"}}
