"""Promise: in every dialect a field that is null counts as absent, known or not, wherever in a request it stands; null
in what is the client's own JSON, the arguments of a call or a schema, stays null."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import RefusedRequest
from stretto_gateway.dialects.chat import ChatDialect
from stretto_gateway.dialects.dialect import Dialect
from stretto_gateway.dialects.messages import MessagesDialect
from stretto_gateway.dialects.responses import ResponsesDialect
from tests.gateway.serving import wished

SCHEMA = {"type": "object", "properties": {"a": {"enum": [None, 1], "default": None}}, "x": None}
OWN = {"parameters", "input_schema", "schema", "input_json", "metadata"}  # JSON of the client's own
ASK = {"role": "user", "content": [{"type": "text", "text": "1+2?"}]}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": null}'}}
THOUGHT, USE = (
    {"type": "thinking", "thinking": "hm"},
    {"type": "tool_use", "id": "c", "name": "add", "input": {"a": None}},
)
TOLD = {"role": "tool", "tool_call_id": "c", "content": "3"}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "3"}]}
FURTHER: dict[Dialect, dict[str, Any]] = {
    ChatDialect(): {
        "messages": [ASK, {"role": "assistant", "tool_calls": [CALL]}, TOLD],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "stream_options": {"include_usage": True},
    },
    ResponsesDialect(): {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1+2?"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": null}'},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
        ]
    },
    MessagesDialect(): {
        "system": [{"type": "text", "text": "be brief"}],
        "messages": [ASK, {"role": "assistant", "content": [THOUGHT, USE]}, {"role": "user", "content": [RESULT]}],
        "tool_choice": {"type": "tool", "name": "add"},
    },
}
BODIES = {dialect: wished(dialect.path, tool=SCHEMA, schema=SCHEMA) | further for dialect, further in FURTHER.items()}
#: Fields that clients' libraries tell as null: unknown ones, and known ones that take no null.
NULLS = ("toolset_name", "parsed", "signature", "annotations", "refusal", "index", "stop", "name_of_the_future")


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Those that are fields of a request."""
    if isinstance(value, dict):
        yield value
        for name, child in value.items():
            if name not in OWN and not (name == "input" and isinstance(child, dict)):
                yield from objects(child)
    elif isinstance(value, list):
        for child in value:
            yield from objects(child)


@pytest.mark.parametrize("dialect", list(BODIES), ids=lambda dialect: dialect.path)
@given(st.data())
def test_a_null_changes_nothing(dialect: Dialect, data: st.DataObject) -> None:
    body = copy.deepcopy(BODIES[dialect])
    expected = dialect.parse(json.dumps(body).encode())
    for place in data.draw(st.lists(st.sampled_from(list(objects(body))), min_size=1, max_size=4)):
        place.setdefault(data.draw(st.sampled_from(NULLS)), None)
    assert dialect.parse(json.dumps(body).encode()) == expected
    assert "null" in json.dumps([tool.parameters for tool in expected.tools])
    assert any("null" in call.arguments for message in expected.messages for call in message.calls)


@pytest.mark.parametrize("dialect", list(BODIES), ids=lambda dialect: dialect.path)
def test_what_is_needed_and_null_is_missing(dialect: Dialect) -> None:
    with pytest.raises(RefusedRequest, match="model: missing"):
        dialect.parse(json.dumps({**BODIES[dialect], "model": None}).encode())
