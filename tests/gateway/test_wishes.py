"""Promise: what a client wishes and the gateway does not do is never passed over in silence: it is named in a header of
the reply and counted in the session, or refused where no model could do it."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from stretto.core.records import Sampling
from stretto_gateway.requests import DISTRIBUTION, SamplingRule
from stretto_workflows.chat.messages import ChatRequest, SamplingOptions, Tool
from tests.gateway.serving import MODEL, ScriptedModel, served_gateway, wished

CHAT_TOOL = {"type": "function", "function": {"name": "add"}}
SCHEMA = {"type": "object"}
ASK = [{"role": "user", "content": "1+2?"}]
FORCED = "tool_choice, response_format"


async def test_what_does_not_constrain_sampling_is_named_and_counted(tmp_path: Path) -> None:
    async with served_gateway(ScriptedModel(lambda prompt: "It is 3."), tmp_path) as gateway:
        for path, stream in product(("chat/completions", "responses", "messages"), (False, True)):
            session = await gateway.open()
            url, fields = (
                f"{session['base_url']}/{path}",
                {"stream": stream, **wished(path, tool=SCHEMA, schema=SCHEMA)},
            )
            told = [await gateway.client.post(url, json=fields) for _ in range(2)]
            assert [(reply.status_code, reply.headers["x-stretto-unapplied"]) for reply in told] == [(200, FORCED)] * 2
            plain = await gateway.client.post(url, json={"stream": stream, **wished(path)})
            assert "x-stretto-unapplied" not in plain.headers
            shown = await gateway.shown(session)
            assert shown["unapplied"] == {"tool_choice": 1, "response_format": 1}  # turns, not replays
            assert shown["retries"] == 1


@pytest.mark.parametrize(
    ("choice", "tools"), [("required", []), ({"type": "function", "function": {"name": "sub"}}, [CHAT_TOOL])]
)
async def test_a_call_of_a_tool_that_is_not_offered_is_refused(tmp_path: Path, choice: Any, tools: list[Any]) -> None:
    async with served_gateway(ScriptedModel(lambda prompt: "yes"), tmp_path) as gateway:
        refused = await gateway.chat(await gateway.open(), ASK, tools=tools, tool_choice=choice)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    assert f"that the request offers: {'add' if tools else 'none'}" in refused.json()["error"]["message"]


async def test_a_refusal_that_names_a_tool_called_context_is_not_about_the_context_length(tmp_path: Path) -> None:
    tool, other = ({"type": "function", "function": {"name": name}} for name in ("get_context", "sub"))
    async with served_gateway(ScriptedModel(lambda prompt: "yes"), tmp_path) as gateway:
        refused = await gateway.chat(await gateway.open(), ASK, tools=[tool], tool_choice=other)
    error = refused.json()["error"]
    assert "get_context" in error["message"]
    assert (error["param"], error["code"]) == ("tool_choice", None)


@pytest.mark.parametrize("top_k", [0, -1, 500])
def test_a_top_k_that_filters_nothing_where_nothing_is_filtered_is_no_wish(top_k: int) -> None:
    rule = SamplingRule(Sampling(max_tokens=10), context=100, chosen=(), vocabulary=500)
    assert rule.unapplied(ChatRequest(MODEL, (), options=SamplingOptions(top_k=top_k))) == ()
    assert rule.unapplied(ChatRequest(MODEL, (), options=SamplingOptions(top_k=5))) == ("top_k",)


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (DISTRIBUTION, ("parallel_tool_calls", "seed")),
        (("temperature",), ("parallel_tool_calls", "seed", "top_p")),  # of an engine whose numbers do not follow top_p
        ((), ("parallel_tool_calls", "seed", "top_p")),
    ],
)
def test_what_no_client_may_choose_of_a_distribution_is_left(chosen: tuple[str, ...], names: tuple[str, ...]) -> None:
    rule = SamplingRule(Sampling(max_tokens=8, temperature=0.7), context=32, chosen=chosen)
    wanted = SamplingOptions(temperature=0.7, top_p=0.5, seed=3, parallel_calls=False)
    assert rule.unapplied(ChatRequest(MODEL, (), (Tool("add"),), wanted)) == names
    assert (
        rule.unapplied(ChatRequest(MODEL, (), options=SamplingOptions(tool_choice="none", parallel_calls=False))) == ()
    )
