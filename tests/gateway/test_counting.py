"""Promise: a client of Anthropic's that asks how many tokens a prompt has is told as many as its turn is then told, of
a first turn by the chat template and of a later one behind the tokens held; counting makes no turn."""

import json
from pathlib import Path
from typing import Any

from tests.gateway.serving import MODEL, ScriptedModel, one_session, served_gateway

TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}
ASK: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "the bus, then 1+2?"}]}]
PROMPT = (
    "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nthe bus, then 1+2?<|im_end|>\n<|im_start|>assistant\n"
)


async def test_the_count_is_that_of_the_turn(tmp_path: Path) -> None:
    model = ScriptedModel(lambda prompt: "the bus")
    async with one_session(model, tmp_path) as (gateway, session):
        address = session["base_url"].removesuffix("/v1")

        async def told(path: str, **fields: Any) -> dict[str, Any]:
            reply = await gateway.client.post(f"{address}/v1/messages{path}", json={"model": MODEL, **fields})
            assert reply.status_code == 200, reply.text
            return dict(reply.json())

        asked: dict[str, Any] = {"messages": ASK, "system": "be brief"}
        assert await told("/count_tokens", **asked) == {
            "input_tokens": len(model.tokenizer.encode(PROMPT, special_tokens=False))
        }
        with_tools = {**asked, "tools": [TOOL], "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}}
        counted = await told("/count_tokens", **with_tools)
        assert (model.asked, (await gateway.shown(session))["nodes"]) == ([], [])
        first = await told("", **with_tools, max_tokens=20)
        assert first["usage"]["input_tokens"] == counted["input_tokens"] == len(model.asked[0])
        # Behind an answer of one token a letter, which the encoder would have written shorter.
        history = [*ASK, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "and?"}]
        counted = await told("/count_tokens", **{**with_tools, "messages": history})
        await told("", **{**with_tools, "messages": history}, max_tokens=20)
        assert counted["input_tokens"] == len(model.asked[1])
        assert (await gateway.shown(session))["branches"] == {}


WRONG: list[tuple[bytes, int, str]] = [
    (b"{", 400, "invalid_request_error"),
    (b'{"model": "scripted"}', 400, "invalid_request_error"),
    (json.dumps({"model": "other", "messages": ASK}).encode(), 404, "not_found_error"),
    (json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x" * 90_000}]}).encode(), 400, ""),
]


async def test_a_wrong_question_is_refused_in_anthropics_form(tmp_path: Path) -> None:
    async with served_gateway(ScriptedModel(lambda prompt: "yes"), tmp_path, context=400) as gateway:
        session, path = await gateway.open(), "/v1/messages/count_tokens"
        headers = {"x-api-key": session["api_key"]}
        for content, status, kind in WRONG:
            refused = await gateway.client.post(path, content=content, headers=headers)
            assert (refused.status_code, refused.json()["type"]) == (status, "error")
            assert kind in refused.json()["error"]["type"]
            assert (await gateway.client.post(path, content=content)).status_code == 401
        await gateway.client.post(f"/sessions/{session['id']}/end")
        late = await gateway.client.post(path, json={"model": MODEL, "messages": ASK}, headers=headers)
        assert late.status_code == 409
