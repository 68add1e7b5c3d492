"""Promise: a stream whose turn is still sampled says that it lives, before its first event and never behind its last
one; what goes wrong after that is the stream's last event, in the form of its dialect."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from stretto.core.errors import EngineLost
from tests.gateway.serving import ScriptedModel, one_session, wished

COMMENT, PING = ": keep-alive", 'event: ping\ndata: {"type":"ping"}'
DIALECTS = [("chat/completions", COMMENT), ("responses", COMMENT), ("messages", PING)]


def asked(path: str) -> dict[str, Any]:
    return {"stream": True, **wished(path)}


@pytest.mark.parametrize(("path", "alive"), DIALECTS)
async def test_a_stream_lives_until_its_turn_is_there_and_then_says_no_more_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, alive: str
) -> None:
    monkeypatch.setattr("stretto_gateway.app._KEEP_ALIVE_SECONDS", 0.02)
    model = ScriptedModel(lambda prompt: "3", gate=asyncio.Event())
    async with one_session(model, tmp_path) as (gateway, session):
        url = f"{session['base_url']}/{path}"
        told: list[str] = []
        async with gateway.client.stream("POST", url, json=asked(path)) as reply:
            assert reply.status_code == 200
            assert reply.headers["content-type"].startswith("text/event-stream")
            async for part in reply.aiter_text():
                told.append(part)
                if "".join(told).count(alive) >= 3 and model.gate is not None:
                    model.gate.set()
        events = "".join(told).split("\n\n")
        alone = [at for at, event in enumerate(events) if event == alive]
        assert alone == list(range(len(alone)))
        assert len(alone) >= 3
        # Another client's retry gets the same events, and has nothing to wait for.
        again = await gateway.client.post(url, json=asked(path))
        assert again.text.split("\n\n") == events[len(alone) :]
        assert len(model.asked) == 1


@pytest.mark.parametrize("path", [path for path, _ in DIALECTS])
async def test_a_turn_that_is_lost_while_its_stream_lives_is_its_last_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("stretto_gateway.app._KEEP_ALIVE_SECONDS", 0.02)

    def lost(prompt: str) -> str:
        raise EngineLost("engine-0", "is gone")

    model = ScriptedModel(lost, gate=asyncio.Event())
    async with one_session(model, tmp_path) as (gateway, session):
        told = ""
        async with gateway.client.stream("POST", f"{session['base_url']}/{path}", json=asked(path)) as reply:
            async for part in reply.aiter_text():
                told += part
                assert model.gate is not None
                model.gate.set()
        *_, last, end = told.split("\n\n")
        event = json.loads(last.partition("data: ")[2])
        assert end == ""
        assert "engine-0 is gone" in event["error"]["message"]
        if path != "chat/completions":
            assert (last.split("\n")[0], event["type"]) == ("event: error", "error")


async def test_who_leaves_its_living_stream_frees_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto_gateway.app._KEEP_ALIVE_SECONDS", 0.02)
    model = ScriptedModel(lambda prompt: "3", gate=asyncio.Event())
    async with one_session(model, tmp_path) as (gateway, session):
        url = f"{session['base_url']}/chat/completions"
        async with gateway.client.stream("POST", url, json=asked("chat/completions")) as reply:
            assert await anext(reply.aiter_text()) == f"{COMMENT}\n\n"
        while model.running:
            await asyncio.sleep(0.005)
    assert model.broken_off == 1
