"""Promise: whatever the body, the gateway answers it or refuses it with a 4xx in the form of its dialect, and goes on.

Bodies are those that schemathesis makes of the records into which they are decoded, and odd ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.gateway.agent_session import AgentSession
from stretto.gateway.anthropic import AnthropicDialect, MessagesBody
from stretto.gateway.app import GatewayApp
from stretto.gateway.chat import ChatDialect, ChatRequestBody
from stretto.gateway.config import GatewayConfig
from stretto.gateway.responses import ResponsesBody, ResponsesDialect
from stretto.gateway.sessions import RecordedSessions, SessionTable
from tests.gateway.serving import MODEL, ScriptedModel, speaker_of

BODIES = {"/v1/chat/completions": ChatRequestBody, "/v1/responses": ResponsesBody, "/v1/messages": MessagesBody}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
QUESTION = [{"role": "user", "content": "1+2?"}]
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["user", "text"])
)
NAMES = st.sampled_from(["role", "content", "type", "text", "name", "id", "function", "input", "tool_use_id", "output"])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=6,
)


def described() -> dict[str, Any]:
    """The three paths as OpenAPI."""
    references, schemas = msgspec.json.schema_components(BODIES.values(), ref_template="#/components/schemas/{name}")
    paths = {
        path: {
            "post": {
                "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
                "responses": {"200": {"description": "a reply"}},
            }
        }
        for path, reference in zip(BODIES, references, strict=True)
    }
    info = {"title": "gateway", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def bodies(path: str) -> st.SearchStrategy[bytes]:
    """Sound ones, right ones with fields of any kind, and bytes that are none."""
    schema = schemathesis.openapi.from_dict(described())
    sound = schema[path]["POST"].as_strategy().map(few)
    fields = [*BODIES[path].__struct_fields__, "x"]
    odd = st.dictionaries(st.sampled_from(fields), VALUES, max_size=3).map(lambda more: {**right(path), **more})
    return (sound | odd).map(lambda body: json.dumps(body, default=str).encode()) | st.binary(max_size=40)


def few(case: schemathesis.Case[Any]) -> dict[str, Any]:
    """The body with the model that is served, and few tokens where a limit is asked for."""
    body: Any = case.body
    return {**body, "model": MODEL, **{name: 8 for name in ("max_tokens", "max_output_tokens") if name in body}}


def right(path: str) -> dict[str, Any]:
    """A body without a mistake."""
    if path == "/v1/responses":
        return {"model": MODEL, "input": QUESTION}
    return {"model": MODEL, "messages": QUESTION, "max_tokens": 8}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, GatewayApp, AgentSession]]:
    """A gateway without sockets, and a session of it."""
    model = ScriptedModel(lambda prompt: CALL if len(prompt) % 2 else "It is 3.")
    folder: Path = tmp_path_factory.mktemp("sessions")
    speaker = speaker_of(model.tokenizer, GatewayConfig(turns=1_000_000))
    host = RecordedSessions(folder, speaker, model.sampler)
    table = SessionTable()
    app = GatewayApp(table, host, speaker, (ChatDialect(), ResponsesDialect(), AnthropicDialect()))
    with asyncio.Runner() as runner:
        opened = runner.run(host.open({}))
        table.add(opened)
        yield runner, app, opened


@pytest.mark.parametrize("path", sorted(BODIES))
def test_no_body_makes_the_gateway_fail(session: tuple[asyncio.Runner, GatewayApp, AgentSession], path: str) -> None:
    runner, app, opened = session
    statuses = set[int]()

    async def posted(body: bytes) -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post(path, content=body, headers={"Authorization": f"Bearer {opened.key}"})

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(body=bodies(path))
    def holds(body: bytes) -> None:
        response = runner.run(posted(body))
        statuses.add(response.status_code)
        assert response.status_code == 200 or 400 <= response.status_code < 500, (body, response.text)
        if response.status_code != 200:
            told = response.json()
            assert told["error"]["message"]
            assert (told.get("type") == "error") == (path == "/v1/messages")

    holds()
    assert {200, 400} <= statuses
    assert runner.run(posted(json.dumps(right(path)).encode())).status_code == 200
