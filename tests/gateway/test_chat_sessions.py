"""Sessions of the gateway, by chat completions over real sockets: what was sampled is never encoded again; a history
that cannot be proven begins a branch with its cause; retries, restarts, ends, and the walls between sessions."""

import asyncio
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from stretto.core.errors import EngineLost
from stretto.core.forest import TurnRequest
from stretto.core.records import Segment
from stretto.launch.recipe.extensions import GatewayConfig
from stretto_gateway.sessions.agent_session import Attempt
from stretto_workflows.chat.messages import ChatRequest, Message
from stretto_workflows.session import Sampler, SessionRecord
from tests.asynchronous import until
from tests.gateway.serving import MODEL, ScriptedModel, ServedGateway, one_session, served_gateway, tokenizer_of, wished

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1,  "b": 2}}\n</tool_call>'
RECORDED = Path(__file__).parents[1] / "data" / "session"
ASK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the bus, then 1+2?"}]


def calculator(prompt: str) -> str:
    """Calls the tool once, then says the result."""
    return "It is 3." if "<tool_response>" in prompt else CALL


async def turn(gateway: ServedGateway, session: dict[str, str], messages: list[Any], **fields: Any) -> dict[str, Any]:
    reply = await gateway.chat(session, messages, **fields)
    assert reply.status_code == 200, reply.text
    return dict(reply.json()["choices"][0]["message"])


async def calculated(gateway: ServedGateway, session: dict[str, str], **back: Any) -> list[Any]:
    """Two turns of an agent that sends the first back with the changes `back`; the whole history."""
    said = await turn(gateway, session, ASK, tools=[ADD])
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3"}
    history = [*ASK, {**said, **back}, result]
    return [*history, await turn(gateway, session, history, tools=[ADD])]


async def test_the_next_prompt_is_what_is_held_and_the_new_tail(tmp_path: Path) -> None:
    model = ScriptedModel(calculator)
    async with served_gateway(model, tmp_path) as gateway:
        session = await gateway.open(question="1+2")
        history = await calculated(gateway, session)
        assert history[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1,  "b": 2}'}
        assert history[2]["content"] is None
        assert history[4]["content"] == "It is 3."
        shown = await gateway.shown(session)
    first, second = model.asked
    sampled = tuple(shown["nodes"][1]["token_ids"])
    assert second[: len(first) + len(sampled)] == first + sampled
    # One byte a token, "the" and "us" too, in the sampled call; the encoder would have taken longer pieces.
    assert len(sampled) == len(CALL) + 1
    tail = "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert model.tokenizer.spell(second[len(first) + len(sampled) :]) == tail
    assert [(node["parent"], node["sampled"]) for node in shown["nodes"]] == [
        (None, False),
        (0, True),
        (1, False),
        (2, True),
    ]
    assert (shown["samples"], shown["branches"]) == ([[0, 1, 2, 3]], {})


async def test_arguments_written_otherwise_are_the_same_arguments(tmp_path: Path) -> None:
    model = ScriptedModel(calculator)
    async with one_session(model, tmp_path) as (gateway, session):
        said = await turn(gateway, session, ASK, tools=[ADD])
        said["tool_calls"][0]["function"]["arguments"] = '{"b":2,"a":1}'
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3"}
        await turn(gateway, session, [*ASK, said, result], tools=[ADD])
        shown = await gateway.shown(session)
    assert (shown["samples"], shown["branches"], shown["equal_as_json"]) == ([[0, 1, 2, 3]], {}, 1)


async def test_an_answer_that_comes_back_otherwise_begins_a_branch(tmp_path: Path) -> None:
    async with served_gateway(ScriptedModel(calculator), tmp_path) as gateway:
        for back in ({"content": "Calling tools: add", "tool_calls": None}, {"content": "Let me see."}):
            session = await gateway.open()
            await calculated(gateway, session, **back)
            shown = await gateway.shown(session)
            assert shown["branches"] == {"history_rewritten": 1}
            trained = [node for sample in shown["samples"] for node in sample if shown["nodes"][node]["sampled"]]
            assert len(shown["samples"]) == 2
            assert sorted(trained) == [node["id"] for node in shown["nodes"] if node["sampled"]]


async def test_causes_of_branches(tmp_path: Path) -> None:
    thought = "<think>\nhm\n</think>\n\n"
    model = ScriptedModel(lambda prompt: thought + (CALL if "call<" in prompt else "yes"), tokenizer_of("qwen3"))
    async with one_session(model, tmp_path) as (gateway, session):
        said = await turn(gateway, session, ASK)
        assert said["reasoning_content"] == "hm"
        more = {"role": "user", "content": "and?"}
        await turn(gateway, session, [*ASK, said, more])  # goes on
        await turn(gateway, session, [*ASK, said, {"role": "user", "content": "or?"}])
        await turn(gateway, session, [*ASK, {**said, "reasoning_content": None}, more])
        await turn(gateway, session, [{"role": "system", "content": "search"}, *ASK[1:]])
        await turn(gateway, session, [*ASK, said, more], tools=[ADD])
        await turn(gateway, session, [ASK[0], {"role": "user", "content": "a summary"}])
        ask = [{"role": "user", "content": "call"}]
        called = await turn(gateway, session, ask, tools=[ADD])
        called["tool_calls"][0]["function"]["arguments"] = '{"a": 5}'
        result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "3"}
        await turn(gateway, session, [*ask, called, result], tools=[ADD])
        await turn(gateway, session, [*ASK, said, more], headers={"x-stainless-retry-count": "0"})
        shown = await gateway.shown(session)
    once = ["fork", "reasoning_stripped", "tools_changed", "compaction", "arguments", "again"]
    assert shown["branches"] == dict.fromkeys(once, 1) | {"subagent": 2}


async def test_a_retry_is_answered_by_the_reply_on_record(tmp_path: Path) -> None:
    model = ScriptedModel(lambda prompt: "yes")
    async with one_session(model, tmp_path) as (gateway, session):
        first = await gateway.chat(session, ASK)
        same_body = await gateway.chat(session, ASK)
        by_header = await gateway.chat(session, ASK, headers={"x-stainless-retry-count": "1"})
        keyed = [await gateway.chat(session, ASK, headers={"Idempotency-Key": "k"}) for _ in range(2)]
        misused = await gateway.chat(session, ASK[1:], headers={"Idempotency-Key": "k"})
        shown = await gateway.shown(session)
    assert first.content == same_body.content == by_header.content
    assert keyed[0].content == keyed[1].content != first.content
    assert misused.status_code == 400
    assert len(model.asked) == 2
    assert shown["retries"] == 3


async def test_a_restarted_gateway_answers_a_restarted_agent_byte_for_byte_until_it_diverges(tmp_path: Path) -> None:
    model = ScriptedModel(calculator)
    async with one_session(model, tmp_path) as (gateway, session):
        first = await gateway.chat(session, ASK, tools=[ADD])
        said = first.json()["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3"}
        second = await gateway.chat(session, [*ASK, said, result], tools=[ADD], stream=True)
    again = ScriptedModel(calculator)
    async with served_gateway(again, tmp_path) as gateway:
        assert (await gateway.chat(session, ASK, tools=[ADD])).content == first.content
        assert (await gateway.chat(session, [*ASK, said, result], tools=[ADD], stream=True)).content == second.content
        assert again.asked == []
        await gateway.chat(session, [*ASK, said, {**result, "content": "4"}], tools=[ADD])
        shown = await gateway.shown(session)
    assert len(again.asked) == 1
    assert again.asked[0][: len(model.asked[0])] == model.asked[0]
    assert len(shown["samples"]) == 2


async def test_an_agent_that_lives_on_does_not_notice_a_restart(tmp_path: Path) -> None:
    model = ScriptedModel(calculator)
    async with one_session(model, tmp_path) as (gateway, session):
        history = await calculated(gateway, session)
        await gateway.client.post(f"/sessions/{session['id']}/reward", json={"reward": 0.5})
    with (tmp_path / f"{session['id']}.jsonl").open("ab") as file:
        file.write(b'{"type": "Rep')  # a line that was cut short
    async with served_gateway(model, tmp_path) as gateway:
        await turn(gateway, session, [*history, {"role": "user", "content": "sure?"}], tools=[ADD])
        shown = await gateway.shown(session)
    assert (shown["samples"], shown["branches"], shown["reward"]) == ([[0, 1, 2, 3, 4, 5]], {}, 0.5)


async def test_a_sealed_session_answers_409_and_counts_stragglers(tmp_path: Path) -> None:
    model = ScriptedModel(calculator, gate=asyncio.Event())
    async with one_session(model, tmp_path) as (gateway, session):
        under_way = asyncio.create_task(gateway.chat(session, ASK))
        await until(lambda: model.running)
        assert (await gateway.client.post(f"/sessions/{session['id']}/end")).json()["state"] == "ended"
        assert (await under_way).status_code == 409
        late = await gateway.chat(session, ASK)
        assert (late.status_code, late.json()["error"]["code"]) == (409, "session_ended")
        assert late.headers["x-should-retry"] == "false"  # clients try a 409 again without
        shown = await gateway.shown(session)
        assert (shown["state"], shown["stragglers"], model.broken_off) == ("ended", 1, 1)
    async with served_gateway(model, tmp_path) as gateway:
        assert (await gateway.chat(session, ASK)).status_code == 409


async def test_a_client_that_hangs_up_frees_its_turn_unless_another_waits_for_it(tmp_path: Path) -> None:
    gate = asyncio.Event()
    model = ScriptedModel(calculator, gate=gate)
    async with one_session(model, tmp_path) as (gateway, session):
        leaver, stayer = (asyncio.create_task(gateway.chat(session, ASK)) for _ in range(2))
        await until(lambda: gateway.held(session).retries >= 1)
        leaver.cancel()
        await asyncio.sleep(0.1)
        assert (model.running, model.broken_off) == (1, 0)
        stayer.cancel()
        async with asyncio.timeout(10):
            await until(lambda: not model.running)
        assert model.broken_off == 1
        gate.set()
        anew = {"x-stainless-retry-count": "0"}  # its program tries again, and its library counts anew
        assert (await gateway.chat(session, ASK, headers=anew)).status_code == 200
        shown = await gateway.shown(session)
    assert len([node for node in shown["nodes"] if node["sampled"]]) == 1


@pytest.mark.parametrize("key", ["", "one"])
async def test_retries_while_an_engine_still_breaks_the_turn_off_get_one_answer(tmp_path: Path, key: str) -> None:
    """The engine takes a moment to end a turn that nobody waits for, and by then the client has asked again."""
    gate, ends = asyncio.Event(), asyncio.Event()

    class SlowToEnd(ScriptedModel):
        def sampler(self, name: str, record: SessionRecord) -> Sampler:
            sample = super().sampler(name, record)

            async def until_ended(request: TurnRequest) -> Segment:
                try:
                    return await sample(request)
                except asyncio.CancelledError:
                    await ends.wait()
                    raise

            return until_ended

    model = SlowToEnd(calculator, gate=gate)
    async with one_session(model, tmp_path) as (gateway, session):
        held = gateway.held(session)
        request = ChatRequest(MODEL, (Message("user", "1+2?"),))
        attempts = []
        for number in range(3):
            attempts.append(asyncio.create_task(held.answer(request, Attempt(key, number))))
            while len(model.asked) < min(2, number + 1):
                await asyncio.sleep(0.005)
            if not number:
                attempts[0].cancel()
                await asyncio.wait(attempts)
        ends.set()
        gate.set()
        first, second = await asyncio.gather(*attempts[1:])
        assert first.id == second.id
        assert len(model.asked) == 2
        assert held.retries == 1


async def test_a_turn_that_an_engine_breaks_off_is_noted_until_its_request_has_a_reply(tmp_path: Path) -> None:
    errors: list[Exception] = [EngineLost("engine-0", "is gone"), OSError(28, "no room")]

    def failing(prompt: str) -> str:
        if errors:
            raise errors.pop(0)
        return "yes"

    async with one_session(ScriptedModel(failing), tmp_path, context=400) as (gateway, session):
        held = gateway.held(session)
        assert (await gateway.chat(session, ASK)).status_code == 503
        assert held.broken == "a turn gave no reply: EngineLost: engine-0 is gone"
        assert (await gateway.chat(session, ASK)).status_code == 500
        assert "no room" in held.broken
        assert (await gateway.chat(session, [{"role": "user", "content": "something else"}])).status_code == 200
        assert "no room" in held.broken  # going on as if nothing had been mends nothing
        assert (await gateway.chat(session, ASK)).status_code == 200
        assert held.broken == ""
        assert (await gateway.chat(session, [{"role": "user", "content": "x" * 500}])).status_code == 400
        assert held.broken == ""  # the agent's own mistake


async def test_no_session_reads_or_influences_another(tmp_path: Path) -> None:
    model = ScriptedModel(lambda prompt: "my secret" if "secret" in prompt else "nothing")
    async with served_gateway(model, tmp_path, operator_key="boss") as gateway:
        boss = {"Authorization": "Bearer boss"}
        assert (await gateway.client.post("/sessions", json={})).status_code == 401
        mine, yours = [(await gateway.client.post("/sessions", json={}, headers=boss)).json() for _ in range(2)]
        told = await turn(gateway, mine, [{"role": "user", "content": "a secret"}])
        assert told["content"] == "my secret"
        # The history of one session in another is text that was given, and answers nothing from its record.
        stolen = [{"role": "user", "content": "a secret"}, told, {"role": "user", "content": "again"}]
        await turn(gateway, yours, stolen)
        await turn(gateway, yours, [{"role": "user", "content": "a secret"}])
        assert len(model.asked) == 3
        key = {"Authorization": f"Bearer {yours['api_key']}"}
        for method, path in [("GET", ""), ("POST", "/reward"), ("POST", "/end")]:
            path = f"/sessions/{mine['id']}{path}"
            body = {"reward": 1.0}
            assert (await gateway.client.request(method, path, headers=key, json=body)).status_code == 401
        shown = (await gateway.client.get(f"/sessions/{mine['id']}", headers=boss)).json()
        other = (await gateway.client.get(f"/sessions/{yours['id']}", headers=key)).json()
    assert (shown["state"], shown["reward"], len(shown["nodes"])) == ("open", None, 2)
    assert sum(node["sampled"] for node in other["nodes"]) == 2  # its own: what the other was told is text here


async def test_the_key_may_stand_in_the_path_or_in_either_header(tmp_path: Path) -> None:
    async with one_session(ScriptedModel(lambda prompt: "yes"), tmp_path) as (gateway, session):
        body = {"model": MODEL, "messages": ASK}
        for headers, base in [
            ({"Authorization": "Bearer x"}, session["base_url"]),
            ({"x-api-key": session["api_key"]}, "/v1"),
        ]:
            reply = await gateway.client.post(f"{base}/chat/completions", json=body, headers=headers)
            assert reply.status_code == 200
        assert (await gateway.client.get(f"{session['base_url']}/models")).json()["data"][0]["id"] == MODEL


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_what_is_not_served_is_refused_in_the_form_of_the_dialect(tmp_path: Path, path: str) -> None:
    config = GatewayConfig(body_bytes=4096, turns=2)
    async with served_gateway(
        ScriptedModel(lambda prompt: "yes"), tmp_path, config=config, context=400, sessions=1
    ) as gateway:
        session = await gateway.open()
        assert (await gateway.client.post("/sessions", json={"task": {}})).status_code == 429

        async def told(content: bytes, key: str = session["api_key"]) -> tuple[int, str]:
            reply = await gateway.client.post(path, content=content, headers={"Authorization": f"Bearer {key}"})
            error = reply.json()["error"]
            assert isinstance(error["message"], str)
            assert ("type" in reply.json()) == (path == "/v1/messages")
            return reply.status_code, str(error.get("code"))

        def body(text: str, model: str = MODEL) -> bytes:
            return json.dumps({**wished(path), "model": model}).replace("1+2?", text).encode()

        assert (await told(body("hi"), key="wrong"))[0] == 401
        assert (await told(body("hi"), key="x"))[0] == 401
        assert (await told(body("hi", "gpt-9")))[0] == 404
        assert (await told(b'{"model": '))[0] == 400
        assert (await told(b"[]"))[0] == 400
        assert (await told(body("x" * 5000)))[0] == 413
        assert (await told(body("x" * 500)))[0] == 400
        assert (await gateway.chat(session, [{"role": "user", "content": "one"}])).status_code == 200
        assert (await told(body("one more")))[0] == 400
        assert (await gateway.client.get(path)).status_code == 405
        unknown = await gateway.client.post("/v1/nothing")
        assert (unknown.status_code, "GET /openapi.json lists all" in unknown.text) == (404, True)
        assert (await gateway.client.get("/sessions/unknown")).status_code == 404


async def test_events_say_what_the_whole_reply_says(tmp_path: Path) -> None:
    async with one_session(ScriptedModel(lambda prompt: f"Well. {CALL}"), tmp_path) as (gateway, session):
        fields: dict[str, Any] = {"tools": [ADD], "logprobs": True}
        whole = (await gateway.chat(session, ASK, **fields)).json()
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        lines = (await gateway.chat(session, ASK, **fields)).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    deltas = [chunk["choices"][0] for chunk in chunks[:-1]]
    text = "".join(delta["delta"].get("content", "") for delta in deltas)
    message = whole["choices"][0]["message"]
    assert text == message["content"] == "Well. "
    assert deltas[-2]["delta"]["tool_calls"][0]["function"] == message["tool_calls"][0]["function"]
    assert deltas[-1]["finish_reason"] == whole["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"] == whole["usage"]
    assert [token["logprob"] for token in whole["choices"][0]["logprobs"]["content"]][:3] == [-0.01, -0.02, -0.03]


async def test_a_slow_client_holds_nobody_up(tmp_path: Path) -> None:
    async with one_session(ScriptedModel(lambda prompt: "yes" * 2000), tmp_path) as (gateway, session):
        host, port = gateway.address.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"model": MODEL, "messages": ASK, "max_tokens": 5}).encode()
        head = f"POST /s/{session['api_key']}/v1/chat/completions HTTP/1.1\r\n"
        head += f"Host: localhost\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"\r\n" + body[:10])  # and never the rest
        assert (await gateway.chat(session, ASK, max_tokens=5)).status_code == 200
        writer.close()


async def test_a_client_that_reads_nothing_of_a_long_reply_holds_no_row_and_nobody_up(tmp_path: Path) -> None:
    model = ScriptedModel(lambda prompt: "yes" * 5000 if "long" in prompt else "yes")
    async with one_session(model, tmp_path) as (gateway, session):
        host, port = gateway.address.removeprefix("http://").split(":")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(deaf, (host, int(port)))
            asked = [{"role": "user", "content": "a long one"}]
            body = json.dumps({"model": MODEL, "messages": asked, "logprobs": True, "stream": True}).encode()
            head = f"POST {session['base_url']}/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            await loop.sock_sendall(deaf, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await until(lambda: model.asked and not model.running)
            assert (await gateway.chat(session, ASK)).status_code == 200
            assert (await gateway.chat(await gateway.open(), ASK)).status_code == 200


async def test_sessions_at_once_keep_apart(tmp_path: Path) -> None:
    model = ScriptedModel(lambda prompt: "n" + prompt.split("number ")[1].split("<")[0])
    async with served_gateway(model, tmp_path) as gateway:

        async def one(number: int) -> str:
            session = await gateway.open()
            history: list[Any] = [{"role": "user", "content": f"number {number}"}]
            for _ in range(3):
                history += [await turn(gateway, session, history), {"role": "user", "content": "go on"}]
            shown = await gateway.shown(session)
            assert shown["samples"] == [[0, 1, 2, 3, 4, 5]]
            return str(history[1]["content"])

        said = await asyncio.gather(*map(one, range(40)))
    assert said == [f"n{number}" for number in range(40)]


async def test_a_thought_that_the_prompt_has_begun_is_reasoning_and_no_answer(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer._whole.chat_template += "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}"
    cases = [("hm", "hm", ""), ("hm</think>\n\nyes", "hm", "yes"), ("", "", "")]
    told = iter([said for said, _, _ in cases])
    async with served_gateway(ScriptedModel(lambda prompt: next(told), tokenizer), tmp_path) as gateway:
        for _, reasoning, content in cases:
            said = await turn(gateway, await gateway.open(), ASK[1:])
            assert (said.get("reasoning_content") or "", said["content"] or "") == (reasoning, content)


async def test_an_earlier_response_stands_for_its_messages_with_instructions_told_again_or_not(tmp_path: Path) -> None:
    model, brief = ScriptedModel(lambda prompt: "It is 3."), {"instructions": "Be brief."}
    async with served_gateway(model, tmp_path) as gateway:
        for again in ({}, brief):
            session = await gateway.open()
            url = f"{session['base_url']}/responses"
            first = await gateway.client.post(url, json={"model": MODEL, "input": "1+2?", **brief})
            behind = {"previous_response_id": first.json()["id"], **again}
            await gateway.client.post(url, json={"model": MODEL, "input": "Sure?", **behind})
            shown = await gateway.shown(session)
            assert (shown["branches"], len(shown["samples"])) == ({}, 1)
            text = model.tokenizer.spell(model.asked[-1])
            assert text.count("Be brief.") == text.count("It is 3.") == text.count("Sure?") == 1


async def test_a_session_that_an_earlier_version_recorded_answers_as_it_did_and_samples_nothing(tmp_path: Path) -> None:
    """Byte for byte, in every dialect; recorded before the servers shared their dialects."""
    recorded = json.loads((RECORDED / "replies.json").read_text())
    opened = json.loads((RECORDED / "session.jsonl").read_text().splitlines()[0])
    shutil.copy(RECORDED / "session.jsonl", tmp_path / f"{opened['id']}.jsonl")
    model = ScriptedModel(lambda prompt: "something else")
    async with served_gateway(model, tmp_path) as gateway:
        for asked in recorded["replies"]:
            reply = await gateway.client.post(recorded["base"] + asked["path"], json=asked["body"])
            assert (reply.status_code, reply.text) == (200, asked["reply"])
    assert model.asked == []
