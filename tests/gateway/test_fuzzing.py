"""Whatever comes in, each dialect answers it or refuses it with a 4xx in its own form; nothing makes it fail."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.core.result import Ok

from stretto.launch.recipe.extensions import GatewayConfig
from tests.gateway.serving import MODEL, ScriptedModel, one_session

PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"]
#: Of bodies that are right, as little work as possible.
SMALL = {"model": MODEL}
CALL = '<tool_call>{"name": "a", "arguments": {"b": "\\u00e4"}}</tool_call>'
QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def assert_refused_in_its_form(path: str, status: int, told: Any) -> None:
    assert 400 <= status < 500, told
    assert isinstance(told["error"]["message"], str)
    assert (told.get("type") == "error") == path.startswith("/v1/messages")


async def test_nothing_that_the_description_allows_makes_it_fail(tmp_path: Path) -> None:
    model = ScriptedModel(lambda prompt: CALL if "a" in prompt[-40:] else "yes")
    async with one_session(model, tmp_path, config=GatewayConfig(turns=10_000)) as (gateway, session):
        description = (await gateway.client.get("/openapi.json")).json()
        description["paths"] = {path: description["paths"][path] for path in PATHS}
        schema = schemathesis.openapi.from_dict(description)
        operations = [found.ok() for found in schema.get_all_operations() if isinstance(found, Ok)]
        statuses = {path: Counter[int]() for path in PATHS}

        def check() -> None:
            with httpx.Client(
                base_url=session["base_url"].removesuffix("/v1"), trust_env=False, verify=False
            ) as client:

                @settings(max_examples=8, suppress_health_check=QUIET, deadline=None, database=None)
                @given(data=st.data(), known=st.booleans())
                def ask(operation: Any, data: st.DataObject, known: bool) -> None:
                    case, path = data.draw(operation.as_strategy()), operation.path
                    body: Any = {**case.body, **SMALL} if isinstance(case.body, dict) and known else case.body
                    reply = client.post(path, json=body)
                    statuses[path][reply.status_code] += 1
                    if reply.status_code != 200:
                        assert_refused_in_its_form(path, reply.status_code, reply.json())

                for operation in operations:
                    ask(operation=operation)

        await asyncio.to_thread(check)
    assert all(found.keys() & {200, 400} for found in statuses.values()), statuses


async def test_no_bytes_make_it_fail(tmp_path: Path) -> None:
    paths = [*PATHS, "/../reward", "/v1/models/x"]
    odd = [b"", b"null", b"{}", b'"', b"[" * 100_000, b"\xff\xfe", b'{"model": NaN}', b'{"messages": [{"role": 1}]}']
    async with one_session(ScriptedModel(lambda prompt: "yes"), tmp_path) as (gateway, session):
        for path in paths:
            for content in odd:
                elsewhere = ("", f"/s/{'x' * 4000}") if content in odd[:2] else ()
                for base in (session["base_url"].removesuffix("/v1"), *elsewhere):
                    reply = await gateway.client.post(f"{base}{path}", content=content)
                    assert_refused_in_its_form(path, reply.status_code, reply.json())
        for content in odd[2:]:
            for path in ("/sessions", f"/sessions/{session['id']}/reward"):
                reply = await gateway.client.post(path, content=content)
                assert reply.status_code < 500
        huge = b'{"reward": 1e999}'
        assert (await gateway.client.post(f"/sessions/{session['id']}/reward", content=huge)).status_code == 400
