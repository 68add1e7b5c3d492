"""Promises, over real sockets: a stream delivers each piece when its token is there; a request that comes during an
update of the weights is served after it; who leaves frees the rows; a thousand connections are all served; a server
that stops finishes what is open and refuses the rest with 503; an engine that fails is told to the client; a
signal ends the command.
"""

import asyncio
import copy
import json
import math
import resource
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from stretto.core.errors import EngineLost, RefusedRequest
from stretto.core.records import Completion, GenerateRequest, Sampling
from stretto.engine.http.client import HttpEngine
from stretto.engine.wire import Refusal
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.processes.http.asgi import LARGEST_BODY
from stretto_gateway.serve.app import ServeApp
from stretto_gateway.serve.remote import RemoteEngine
from tests.asynchronous import until
from tests.engine.byte_policy import CONTEXT, NAME, generated
from tests.engine.serving import Mailbox
from tests.gateway.serve.serving import (
    CHAT,
    COMPLETIONS,
    Serving,
    asked,
    engine_of,
    serve_process,
    served_engine,
    served_model,
)

TOKEN_BYTES = 2 * 2 * 1 * 16 * 4  # keys and values, layers, heads, width, float32


async def events(client: httpx.AsyncClient, body: dict[str, Any], path: str = COMPLETIONS) -> AsyncIterator[Any]:
    async with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


async def text_of(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    return "".join([c["text"] async for event in events(client, body) for c in event["choices"]])


def assert_error(response: httpx.Response, status: int, param: str | None = None) -> None:
    error = response.json()["error"]
    assert response.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert "Traceback" not in response.text
    assert ".py" not in response.text


async def test_a_stream_delivers_each_piece_when_its_token_is_there(byte_folder: Path) -> None:
    engine = engine_of(byte_folder)
    async with served_engine(engine, byte_folder) as (client, _):
        seen, text = [], ""
        async for event in events(client, asked()):
            text += event["choices"][0]["text"]
            seen.append(engine.health().generated)
        assert len(seen) > 50
        assert seen[len(seen) // 2] < 150  # of 200: the middle came long before the end
        whole = (await client.post(COMPLETIONS, json=asked())).json()["choices"][0]
        assert (text, event["choices"][0]["finish_reason"]) == (whole["text"], whole["finish_reason"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/inference/v1/generate"])
async def test_a_stream_that_waits_for_a_slot_says_that_it_lives(
    byte_folder: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A proxy cuts a connection on which nothing has come for a minute, and the client would begin again at the end of
    the queue. The engine samples nothing until the stream has said three times that it lives."""
    monkeypatch.setattr("stretto_gateway.app._KEEP_ALIVE_SECONDS", 0.05)
    engine = engine_of(byte_folder)
    body = {
        COMPLETIONS: asked(max_tokens=3),
        CHAT: {"model": NAME, "messages": [{"role": "user", "content": "ab"}], "max_tokens": 3},
    }.get(path, {"token_ids": [97, 98], "sampling_params": {"max_tokens": 3}})
    async with served_engine(engine, byte_folder) as (client, _):
        step, alive = engine.step, ""
        engine.step = list  # type: ignore[method-assign]
        async with client.stream("POST", path, json=body | {"stream": True}) as response:
            async for line in response.aiter_lines():
                alive += f"{line}\n"
                if alive.count(": keep-alive") == 3:
                    engine.step = step  # type: ignore[method-assign]
        before, _, events = alive.rpartition(": keep-alive")
        assert "finish_reason" not in before.replace('"finish_reason":null', "")
        assert '"finish_reason":"' in events


async def test_stop_texts_end_answers_wherever_they_are_cut(byte_folder: Path) -> None:
    tokenizer = load_tokenizer(byte_folder)
    engine = engine_of(byte_folder)
    async with served_engine(engine, byte_folder) as (client, _):
        plain = (await client.post(COMPLETIONS, json=asked(logprobs=0))).json()["choices"][0]
        text, offsets = plain["text"], plain["logprobs"]["text_offset"]
        for begin, length in ((20, 1), (31, 3), (40, 7)):
            # U+FFFD stands for bytes that are no character, which a stop text cannot ask for.
            start = next(k for k in range(begin, len(text)) if "\ufffd" not in text[k : k + length])
            stop = text[start : start + length]
            at = text.index(stop)
            body = asked(stop=[stop, "never written"])
            whole = (await client.post(COMPLETIONS, json=body)).json()
            assert whole["choices"][0]["text"] == text[:at] == await text_of(client, body)
            assert whole["choices"][0]["finish_reason"] == "stop"
            # The tokens that complete the stop text are sampled, and counted; those after them are not.
            sampled = sum(offset < at + length for offset in offsets)
            assert abs(whole["usage"]["completion_tokens"] - sampled) <= 3  # a character has up to four tokens
        assert tokenizer.decode(tokenizer.encode(text, special_tokens=False)) == text


async def test_requests_during_an_update_are_served_and_later_ones_by_the_new_weights(byte_folder: Path) -> None:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(byte_folder)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.02)
    engine, mailbox = engine_of(byte_folder), Mailbox({})
    async with served_engine(engine, byte_folder, mailbox) as (client, _):
        old = (await client.post(COMPLETIONS, json=asked(seed=0))).json()
        before = asyncio.create_task(client.post(COMPLETIONS, json=asked()))
        await until(lambda: engine.health().running != 0, 0)
        mailbox.publications[1] = dict(other.named_parameters())
        update = asyncio.create_task(client.post("/update_weights", content=msgspec.msgpack.encode({"version": 1})))
        during = [asyncio.create_task(client.post(COMPLETIONS, json=asked(seed=k))) for k in range(4)]
        assert (await update).status_code == 200
        replies = await asyncio.gather(before, *during)
        assert [reply.status_code for reply in replies] == [200] * 5
        assert engine.health().interrupted >= 1
        new = [(await client.post(COMPLETIONS, json=asked(seed=0))).json()["choices"] for _ in range(2)]
        assert new[0] == new[1] != old["choices"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_rows(byte_folder: Path, stream: bool) -> None:
    engine = engine_of(byte_folder, slots=2)
    async with served_engine(engine, byte_folder) as (client, _):
        leaver = asyncio.create_task(client.post(COMPLETIONS, json=asked(n=6, max_tokens=250, stream=stream)))
        await until(lambda: engine.health().running >= 2, 0)
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)
        async with asyncio.timeout(20):
            await until(lambda: not (engine.health().running or engine.health().waiting), 0)
        engine.check_integrity()
        assert (await client.post(COMPLETIONS, json=asked(max_tokens=5))).status_code == 200


async def test_a_thousand_connections_at_once_are_all_served(byte_folder: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # both ends of every connection are in this process

    async def one(host: str, port: int, body: bytes, gate: asyncio.Event) -> bytes:
        reader, writer = await asyncio.open_connection(host, port)
        await gate.wait()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        reply = await reader.read()
        writer.close()
        return reply

    engine = engine_of(byte_folder, slots=64)
    async with served_engine(engine, byte_folder) as (client, _):
        gate = asyncio.Event()
        bodies = [json.dumps(asked(max_tokens=3, stream=bool(number % 2))).encode() for number in range(1000)]
        host, port = client.base_url.host, int(client.base_url.port or 0)
        waiting = [asyncio.create_task(one(host, port, body, gate)) for body in bodies]
        await asyncio.sleep(0.5)
        gate.set()
        replies = await asyncio.gather(*waiting)
        assert {reply.split(b"\r\n")[0] for reply in replies} == {b"HTTP/1.1 200 OK"}
        assert len({json.loads(reply.split(b"\r\n\r\n")[1])["choices"][0]["text"] for reply in replies[::2]}) == 1
        assert all(reply.count(b"data: [DONE]") == 1 for reply in replies[1::2])


async def test_a_server_that_stops_finishes_what_is_open_and_begins_nothing(byte_folder: Path) -> None:
    engine = engine_of(byte_folder)
    async with served_engine(engine, byte_folder, patience=20.0) as (client, server):
        stream = asyncio.create_task(text_of(client, asked(max_tokens=200)))
        lost = HttpEngine("engine-0", f"{client.base_url.host}:{client.base_url.port}")
        await asyncio.gather(lost.health(), client.get("/health"))  # connections from before the end
        await until(lambda: engine.health().generated >= 5, 0)
        server.handle_exit(15, None)
        refused = await client.post(COMPLETIONS, json=asked())
        assert_error(refused, 503)
        assert refused.headers["retry-after"] == "1"
        health = await client.get("/health")
        assert (health.status_code, health.headers["retry-after"]) == (503, "1")
        request = GenerateRequest(id="a", prompt_token_ids=(5,), seeds=(1,), sampling=Sampling(max_tokens=2))
        told = await client.post("/generate", content=msgspec.msgpack.encode([request]))
        assert (told.status_code, told.headers["retry-after"]) == (503, "1")
        assert msgspec.msgpack.decode(told.content, type=Refusal).error == "EngineLost"
        with pytest.raises(EngineLost, match="engine-0 is stopping"):
            await anext(lost.generate(request))
        await lost.close()
        assert len(await stream) > 20
        assert engine.health().generated == 200


async def test_patience_ends_and_a_second_signal_ends_it_at_once(byte_folder: Path) -> None:
    engine = engine_of(byte_folder, slots=1)
    async with served_engine(engine, byte_folder, patience=60.0) as (client, server):
        whole = asyncio.create_task(client.post(COMPLETIONS, json=asked(n=100, max_tokens=250)))
        stream = asyncio.create_task(collected(client, asked(n=100, max_tokens=250)))
        await until(lambda: engine.health().generated >= 5, 0)
        server.handle_exit(15, None)
        server.handle_exit(15, None)
        assert_error(await whole, 503)
        assert (await stream)[-1]["error"]["type"] == "server_error"


async def collected(client: httpx.AsyncClient, body: dict[str, Any]) -> list[Any]:
    return [event async for event in events(client, body)]


async def test_an_engine_that_fails_is_told_to_its_clients(byte_folder: Path) -> None:
    engine = engine_of(byte_folder, slots=2)

    def failing() -> list[Completion]:
        raise EngineLost("engine-0", "fails")

    async with served_engine(engine, byte_folder) as (client, _):
        whole = asyncio.create_task(client.post(COMPLETIONS, json=asked(n=8)))
        stream = asyncio.create_task(collected(client, asked(n=8)))
        await until(lambda: engine.health().waiting >= 10, 0)
        engine.step = failing  # type: ignore[method-assign]
        assert_error(await whole, 503)
        assert "engine-0 ended before the completion did" in (await stream)[-1]["error"]["message"]
        for number in [*engine._scheduler.members]:
            engine.abort(engine._scheduler.members[number].request.id)


async def test_the_token_interface_is_on_the_same_server(byte_folder: Path, serving: Serving) -> None:
    request = GenerateRequest(
        id="a", prompt_token_ids=(5, 12), seeds=(1, 2, 3), sampling=Sampling(max_tokens=20, stop_token_ids=(2,))
    )
    client = HttpEngine("engine-0", serving.url.removeprefix("http://"))
    completions = sorted([c async for c in client.generate(request)], key=lambda completion: completion.member)
    assert completions == generated(engine_of(byte_folder), request)
    assert (await client.health()).version == 0
    assert await client.partials({"a": [0, 0, 0]}) == {}  # it has ended
    hot = msgspec.structs.replace(request, sampling=Sampling(max_tokens=2, temperature=math.nan))
    with pytest.raises(RefusedRequest, match="temperature"):
        await anext(client.generate(hot))
    await client.close()


def test_what_is_asked_for_by_get(serving: Serving) -> None:
    def get(path: str) -> httpx.Response:
        return httpx.get(serving.url + path, trust_env=False)

    assert [model["id"] for model in get("/v1/models").json()["data"]] == [NAME]
    assert get(f"/v1/models/{NAME}").json()["max_model_len"] == CONTEXT
    assert_error(get("/v1/models/other"), 404, "model")
    assert (get("/health").json()["status"], get("/health").status_code) == ("ok", 200)
    assert_error(get("/nowhere"), 404)
    assert_error(get(COMPLETIONS), 405)
    assert_error(httpx.delete(serving.url + "/metrics", trust_env=False), 405)


TOKEN_PATHS = ["/generate", "/abort", "/partials", "/spans", "/update_weights"]


async def test_without_its_key_a_server_serves_its_health_alone(byte_folder: Path) -> None:
    async with served_engine(engine_of(byte_folder), byte_folder, api_key="s3cret") as (client, _):
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/health", headers={"accept": "application/msgpack"})).status_code == 200
        for key in ("", "Bearer", "Bearer s3cre", "Bearer s3crets", "Basic s3cret", "s3cret", "Bearer \xe9"):
            given = [(b"authorization", key.encode("latin-1"))] if key else []
            refused = await client.post(COMPLETIONS, json=asked(), headers=given)
            assert_error(refused, 401)
            assert refused.json()["error"]["code"] == "invalid_api_key"
        for path in [*TOKEN_PATHS, "/v1/models", "/metrics", "/openapi.json", "/nowhere"]:
            assert (await client.get(path)).status_code == 401
            assert (await client.post(path)).status_code == 401
        client.headers["authorization"] = "Bearer s3cret"
        assert len(await text_of(client, asked(max_tokens=5))) > 0
        assert (await client.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("key", ["", "s3cret"])
def test_a_server_that_other_machines_reach_has_a_key_or_warns(
    byte_folder: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRETTO_API_KEY", key)
    with serve_process(byte_folder, "--host", "0.0.0.0") as running:
        assert len([line for line in running.said if line.startswith("warning: ")]) == (not key)
        models = httpx.get(running.url + "/v1/models", trust_env=False, verify=False)
        assert models.status_code == (401 if key else 200)


async def test_metrics_count_what_was_served(byte_folder: Path) -> None:
    async with served_engine(engine_of(byte_folder), byte_folder) as (client, _):
        await client.post(COMPLETIONS, json=asked(max_tokens=7, prompt=[[5, 6, 7], [8]]))
        await text_of(client, asked(max_tokens=5))
        await client.post(COMPLETIONS, json={})
        response = await client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = [line for line in response.text.splitlines() if not line.startswith("#")]
        values = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
        assert values["stretto_engine_up"] == 1
        assert values["stretto_prompt_tokens_total"] == 6
        assert values["stretto_completion_tokens_total"] == 19 == values["stretto_engine_generated_total"]
        assert values[f'stretto_http_requests_total{{path="{COMPLETIONS}",status="200"}}'] == 2
        assert values[f'stretto_http_requests_total{{path="{COMPLETIONS}",status="400"}}'] == 1
        assert values["stretto_first_token_seconds_count"] == 1
        assert values["stretto_last_token_seconds_count"] == 2
        assert len(response.text.splitlines()) == len({*response.text.splitlines()})


async def test_metrics_without_an_engine_are_those_of_the_server(byte_folder: Path, tmp_path: Path) -> None:
    remote = RemoteEngine("engine-0", f"unix:{tmp_path}/none.sock")  # it is being replaced
    app = ServeApp(remote, served_model(load_tokenizer(byte_folder)), remote.pass_on)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        response = await client.get("/metrics")
    lines = response.text.splitlines()
    assert (response.status_code, "stretto_engine_up 0" in lines) == (200, True)
    assert "stretto_completion_tokens_total 0" in lines


async def test_a_client_that_goes_with_several_requests_on_one_connection_ends_the_one_in_progress(
    byte_folder: Path,
) -> None:
    engine, body = engine_of(byte_folder, slots=1), json.dumps(asked(n=128, stream=True)).encode()
    one = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    async with served_engine(engine, byte_folder) as (client, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(2 * one)
        await reader.readuntil(b"data: ")
        writer.transport.abort()
        async with asyncio.timeout(5):
            await until(lambda: engine.idle, 0.01)
        assert engine.health().generated < 10_000, "of 25,600, or twice as many"


def test_a_body_over_the_limit_is_refused_with_413(serving: Serving) -> None:
    body = b'{"model": "' + b"x" * LARGEST_BODY + b'"}'
    assert_error(serving.post(COMPLETIONS, body), 413, "body")
    chunks = (body[at : at + (1 << 20)] for at in range(0, len(body), 1 << 20))
    assert_error(httpx.post(serving.url + CHAT, content=chunks, trust_env=False, timeout=30), 413, "body")
    told = serving.post("/generate", body)
    assert told.status_code == 413
    assert msgspec.msgpack.decode(told.content, type=Refusal).field == "body"


def test_a_signal_ends_the_command_when_open_streams_have_ended(byte_folder: Path) -> None:
    with serve_process(byte_folder, "--name", "mine", "engine.slots=1") as running:
        body = asked(model="mine", n=8, max_tokens=100, stream=True)
        with httpx.stream("POST", running.url + COMPLETIONS, json=body, timeout=30, trust_env=False) as response:
            lines = response.iter_lines()
            next(lines)
            running.process.terminate()
            told = [line for line in lines if line]
        assert told[-1] == "data: [DONE]"
        assert sum('"finish_reason":null' not in line for line in told[:-1]) == 8
        _, err = running.process.communicate(timeout=30)
        assert (running.process.returncode, err) == (0, "")


def test_what_the_cache_cannot_hold_is_no_part_of_the_context(byte_folder: Path) -> None:
    cache = 200 * TOKEN_BYTES / 2**30  # the next slot after 128 tokens is the whole context of 256
    with serve_process(byte_folder, f"engine.cache_gib={cache}") as running:
        assert httpx.get(f"{running.url}/v1/models/{NAME}", trust_env=False).json()["max_model_len"] == 128
        told = running.post(CHAT, {"model": NAME, "messages": [{"role": "user", "content": "a"}], "seed": 1}).json()
        assert told["usage"]["total_tokens"] == 128 or told["choices"][0]["finish_reason"] == "stop"
        assert running.post(COMPLETIONS, asked(max_tokens=126)).status_code == 200
        refused = running.post(COMPLETIONS, asked(max_tokens=127))
        assert_error(refused, 400, "max_tokens")
        assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_a_cache_that_holds_no_answer_ends_the_command_with_a_message(byte_folder: Path) -> None:
    told = r"engine\.cache_gib: 1e-06 is too small a KV cache for any prompt with a completion"
    with pytest.raises(AssertionError, match=told), serve_process(byte_folder, "engine.cache_gib=1e-6"):
        pass
