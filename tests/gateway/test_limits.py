"""What keeps a gateway standing: its limits count what they name, what has ended is dropped, what is not on record does
not hold, and a failure that is not the agent's is noted."""

import asyncio
import json
import resource
from collections import deque
from pathlib import Path
from typing import Any

import httpx
import pytest

from stretto.launch.recipe.extensions import GatewayConfig
from stretto_gateway.agents.groups import WaitingSessions
from stretto_gateway.sessions.app import GatewayApp
from tests.gateway.serving import ScriptedModel, ServedGateway, one_session, served_gateway

ASK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the bus, then 1+2?"}]


async def test_a_turn_on_record_answers_its_own_request_alone(tmp_path: Path) -> None:
    said = iter(("first", "second"))
    model = ScriptedModel(lambda prompt: next(said))
    async with one_session(model, tmp_path) as (gateway, session):
        first = await gateway.chat(session, ASK)
    async with served_gateway(model, tmp_path) as gateway:
        other = await gateway.chat(session, ASK, max_tokens=50)  # another request with the same prompt
        assert other.json()["choices"][0]["message"]["content"] == "second"
        assert (await gateway.chat(session, ASK)).content == first.content
        shown = await gateway.shown(session)
    assert len(shown["samples"]) == 2


async def test_the_limit_of_turns_counts_equal_ones_and_those_before_a_restart_but_no_replay(tmp_path: Path) -> None:
    model, config = ScriptedModel(lambda prompt: "yes"), GatewayConfig(turns=2)
    anew = {"x-stainless-retry-count": "0"}
    async with one_session(model, tmp_path, config=config) as (gateway, session):
        statuses = [(await gateway.chat(session, ASK, headers=anew)).status_code for _ in range(3)]
        assert statuses == [200, 200, 400]
    async with served_gateway(model, tmp_path, config=config) as gateway:
        statuses = [(await gateway.chat(session, ASK, headers=anew)).status_code for _ in range(3)]
        assert statuses == [200, 200, 400]
        assert (await gateway.chat(session, ASK[1:])).status_code == 400
    assert len(model.asked) == 2


async def test_what_no_context_holds_is_refused_before_it_is_encoded(tmp_path: Path) -> None:
    model = ScriptedModel(lambda prompt: "yes")
    encoded: list[int] = []
    encode = type(model.tokenizer).encode

    class Counting(type(model.tokenizer)):  # type: ignore[misc]
        """Knows how many texts it has encoded."""

        def encode(self, text: str, *, special_tokens: bool = True) -> tuple[int, ...]:
            encoded.append(len(text))
            return encode(self, text, special_tokens=special_tokens)

    tokenizer = model.tokenizer
    model.tokenizer = Counting(tokenizer.place, tokenizer.eos_token_ids, tokenizer._whole, tokenizer._backend)
    text = "x" * (400 * max(map(len, model.tokenizer.vocabulary)))
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": text})}}
    tool = {"type": "function", "function": {"name": "add", "description": text}}
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": text + "x"}]},
        {"messages": [ASK[1], {"role": "assistant", "tool_calls": [call]}]},
        {"messages": ASK, "tools": [tool]},
    ]
    async with served_gateway(model, tmp_path, context=400) as gateway:
        for body in bodies:
            refused = await gateway.chat(await gateway.open(), **body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
            assert "characters" in refused.json()["error"]["message"]
    assert encoded == []


async def test_ended_sessions_are_dropped_and_their_keys_are_known_for_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto_gateway.sessions.sessions._SHOWN", 1)
    monkeypatch.setattr("stretto_gateway.sessions.sessions._RETIRED", 1)
    model = ScriptedModel(lambda prompt: "yes")
    async with served_gateway(model, tmp_path, sessions=1) as gateway:
        sessions = []
        for _ in range(3):  # one at once, and each ends: there is always room
            sessions.append(await gateway.open())
            assert (await gateway.chat(sessions[-1], ASK)).status_code == 200
            await gateway.client.post(f"/sessions/{sessions[-1]['id']}/end")
        statuses = [(await gateway.chat(session, ASK)).status_code for session in sessions]
        assert statuses == [401, 409, 409]
        assert (await gateway.client.get(f"/sessions/{sessions[1]['id']}")).status_code == 404
        assert (await gateway.shown(sessions[2]))["samples"] == [[0, 1]]
    async with served_gateway(model, tmp_path) as gateway:
        statuses = [(await gateway.chat(session, ASK)).status_code for session in sessions]
    assert sorted(statuses) == [401, 409, 409]


async def test_where_no_room_is_left_the_session_that_was_idle_for_long_ends(tmp_path: Path) -> None:
    model = ScriptedModel(lambda prompt: "yes")
    async with served_gateway(model, tmp_path, sessions=2) as gateway:
        idle, used = await gateway.open(), await gateway.open()
        assert (await gateway.client.post("/sessions", json={})).status_code == 429
        for session in (idle, used):
            gateway.held(session).asked_at -= 4000  # seconds: longer than the hour that is allowed
        assert (await gateway.chat(used, ASK)).status_code == 200
        await gateway.open()
        assert (await gateway.chat(idle, ASK)).status_code == 409
        assert (await gateway.client.post("/sessions", json={})).status_code == 429
    async with served_gateway(model, tmp_path) as gateway:
        assert (await gateway.shown(idle))["state"] == "ended"
        assert (await gateway.shown(used))["state"] == "open"


async def test_a_turn_in_progress_for_more_than_an_hour_keeps_its_session_and_no_idle_one(tmp_path: Path) -> None:
    model = ScriptedModel(lambda prompt: "yes", gate=asyncio.Event())
    async with served_gateway(model, tmp_path, sessions=2) as gateway:
        busy, idle = await gateway.open(), await gateway.open()
        turn = asyncio.create_task(gateway.chat(busy, ASK))
        while not model.running:
            await asyncio.sleep(0.01)
        for session, seconds in ((busy, 5000), (idle, 4000)):
            gateway.held(session).asked_at -= seconds
        await gateway.open()
        assert (await gateway.shown(idle))["state"] == "ended"
        assert model.gate is not None
        model.gate.set()
        assert (await turn).status_code == 200
        assert (await gateway.client.post("/sessions", json={})).status_code == 429  # its agent has just got a reply


async def test_a_session_that_is_rewarded_is_not_idle(tmp_path: Path) -> None:
    async with one_session(ScriptedModel(lambda prompt: "yes"), tmp_path, sessions=1) as (gateway, session):
        gateway.held(session).asked_at -= 4000
        rewarded = await gateway.client.post(f"/sessions/{session['id']}/reward", json={"reward": 0.5})
        assert rewarded.status_code == 200
        assert (await gateway.client.post("/sessions", json={})).status_code == 429
        assert (await gateway.shown(session))["state"] == "open"


async def test_the_sessions_of_a_run_take_no_room_from_services(tmp_path: Path) -> None:
    model = ScriptedModel(lambda prompt: "yes")
    async with served_gateway(model, tmp_path, sessions=1) as gateway:
        waiting = gateway.held(await gateway.open())
        host = WaitingSessions(deque([waiting]))
        transport = httpx.ASGITransport(GatewayApp(gateway.app.sessions, host, waiting.model))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as service:
            assert (await service.post("/sessions", json={})).json()["id"] == waiting.id


async def test_what_is_not_on_record_was_neither_given_nor_ended(tmp_path: Path) -> None:
    model = ScriptedModel(lambda prompt: "yes")
    async with one_session(model, tmp_path) as (gateway, session):
        path, place = tmp_path / f"{session['id']}.jsonl", f"/sessions/{session['id']}"
        await gateway.client.post(f"{place}/reward", json={"reward": 0.25})
        whole = path.read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 5, limits[1]))  # as on a full disk, a line is cut
        try:
            asked: dict[str, dict[str, object]] = {"reward": {"reward": 1.0}, "end": {"failed": "no tram"}}
            told = [await gateway.client.post(f"{place}/{what}", json=body) for what, body in asked.items()]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [reply.status_code for reply in told] == [500, 500]
        assert path.read_bytes() == whole
        shown = await gateway.shown(session)
        assert (shown["state"], shown["reward"]) == ("open", 0.25)
        assert shown["failed"] is None
        assert (await gateway.client.post(f"{place}/end", json={"failed": "no bus"})).status_code == 200
        late = await gateway.client.post(f"{place}/reward", json={"reward": 1.0})
        assert (late.status_code, late.json()["error"]["code"]) == (409, "session_ended")
    async with served_gateway(model, tmp_path) as gateway:
        shown = await gateway.shown(session)
        assert (shown["state"], shown["reward"], shown["failed"]) == ("ended", 0.25, "the agent failed: no bus")


@pytest.mark.parametrize("order", [("new", "k2", "k1"), ("k2", "new", "k1")])
async def test_a_key_has_its_reply_after_a_restart_whatever_was_before(tmp_path: Path, order: tuple[str, ...]) -> None:
    said = iter("abcdef")
    model = ScriptedModel(lambda prompt: next(said))

    async def ask(gateway: ServedGateway, session: dict[str, str], key: str) -> str:
        headers = {"Idempotency-Key": key} if key else {}
        return str((await gateway.chat(session, ASK, headers=headers)).json()["choices"][0]["message"]["content"])

    async with one_session(model, tmp_path) as (gateway, session):
        first = {key: await ask(gateway, session, key) for key in ("k1", "k2", "")}
        assert sorted(first.values()) == ["a", "b", "c"]
    async with served_gateway(model, tmp_path) as gateway:
        again = {key: await ask(gateway, session, key) for key in (*order, "")}
        misused = await gateway.chat(session, ASK[1:], headers={"Idempotency-Key": "k2"})
    assert {key: again[key] for key in ("k1", "k2")} == {key: first[key] for key in ("k1", "k2")}
    assert misused.status_code == 400


async def test_after_the_end_a_key_on_record_gets_its_reply_and_no_other_request_does(tmp_path: Path) -> None:
    model, key = ScriptedModel(lambda prompt: "yes"), {"Idempotency-Key": "k"}
    async with one_session(model, tmp_path) as (gateway, session):
        first = await gateway.chat(session, ASK, headers=key)
        await gateway.chat(session, ASK[1:])
        await gateway.client.post(f"/sessions/{session['id']}/end")
    for _ in range(2):  # gateways
        async with served_gateway(model, tmp_path) as gateway:
            assert (await gateway.chat(session, ASK, headers=key)).content == first.content
            others = [(ASK, {}), (ASK[1:], {}), (ASK[1:], key), (ASK, {"Idempotency-Key": "other"})]
            statuses = [(await gateway.chat(session, asked, headers=headers)).status_code for asked, headers in others]
            assert statuses == [409] * 4
            shown = await gateway.shown(session)
            assert (shown["retries"], shown["stragglers"]) == (1, 4)
    assert len(model.asked) == 2


async def test_a_reward_beyond_the_bound_is_refused_of_a_turn_and_of_the_session(tmp_path: Path) -> None:
    async with one_session(ScriptedModel(lambda prompt: "ok"), tmp_path) as (gateway, session):
        await gateway.chat(session, [{"role": "user", "content": "1"}])
        place = f"/sessions/{session['id']}/reward"
        for number in (b"1e6", b"-1e6"):
            for behind in (b"", b', "node": 1'):
                assert (await gateway.client.post(place, content=b'{"reward": %b%b}' % (number, behind))).is_success
        for number in (b"1000000.001", b"-1e7", b"1e300", b"-1.7e308", b"1e999", b"NaN", b"1" + b"0" * 400):
            for behind in (b"", b', "node": 1'):
                refused = await gateway.client.post(place, content=b'{"reward": %b%b}' % (number, behind))
                assert refused.status_code == 400, (number, behind)
        refused = await gateway.client.post(place, json={"reward": 1e300, "node": 1})
        assert refused.json()["error"]["message"] == "reward: 1e+300; a number between ±1e+06 is needed"
        shown = await gateway.shown(session)
    assert (shown["reward"], shown["nodes"][1]["reward"]) == (-1e6, -1e6)


async def test_turns_have_rewards_of_their_own(tmp_path: Path) -> None:
    async with one_session(ScriptedModel(lambda prompt: "yes"), tmp_path) as (gateway, session):
        place = f"/sessions/{session['id']}/reward"
        await gateway.chat(session, ASK)
        assert (await gateway.client.post(place, json={"reward": 0.25, "node": 1})).status_code == 200
        for node in (0, 2):  # what was given, and what is not there
            refused = await gateway.client.post(place, json={"reward": 1.0, "node": node})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "node")
            assert "a sampled node that has ended: 1" in refused.json()["error"]["message"]
        assert (await gateway.client.post(place, json={"reward": 1.0, "node": -1})).status_code == 400
        assert (await gateway.shown(session))["reward"] is None
        await gateway.client.post(place, json={"reward": 0.5})
    async with served_gateway(ScriptedModel(lambda prompt: "yes"), tmp_path) as gateway:
        shown = await gateway.shown(session)
    assert (shown["reward"], [node["reward"] for node in shown["nodes"]]) == (0.5, [None, 0.25])
