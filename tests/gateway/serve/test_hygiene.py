"""Promises: what one client does wrong is its own affair, whether it says it wrongly, leaves in the middle of a
sentence, speaks another protocol or does not listen; a fault of the server's is told without its insides; text is whole
characters in any script; the page of metrics is one that Prometheus reads.
"""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from stretto.core.engine import EngineHealth
from stretto.core.errors import EngineLost, RefusedRequest
from stretto.core.records import GenerateRequest, Sampling
from stretto.engine.backend import Stream
from stretto.engine.native.generation import MOST_WAITING, Generation
from stretto.model.hf.tokenizer import load_tokenizer
from stretto_gateway.serve.app import ServeApp
from stretto_gateway.serve.remote import RemoteEngine
from tests.asynchronous import until
from tests.engine.byte_policy import NAME
from tests.gateway.serve.serving import CHAT, COMPLETIONS, Serving, asked, engine_of, served_engine, served_model

MISTAKES: list[tuple[str, Any]] = [
    *[(COMPLETIONS, b"{"), (COMPLETIONS, {}), (COMPLETIONS, {"model": NAME, "prompt": [-1]})],
    *[(COMPLETIONS, {"model": NAME, "prompt": [10**6]}), (COMPLETIONS, {"model": NAME, "prompt": [1.5]})],
    (COMPLETIONS, {"model": NAME, "prompt": "a", "max_tokens": 0}),
    (COMPLETIONS, {"model": NAME, "prompt": ["a", "a" * 300], "n": 2}),
    (COMPLETIONS, b'{"model": "bytes", "prompt": "a", "temperature": NaN}'),
    *[(COMPLETIONS, {"model": NAME, "prompt": "a", "stop": ["x"] * 100_000}), (CHAT, {"model": NAME, "messages": []})],
    *[(CHAT, {"model": "other", "messages": [{"role": "user", "content": "a"}]}), ("/nowhere", {})],
]


async def test_the_mistakes_of_others_do_not_change_an_answer(byte_folder: Path) -> None:
    engine = engine_of(byte_folder)
    async with served_engine(engine, byte_folder) as (client, _):
        alone = (await client.post(COMPLETIONS, json=asked())).json()["choices"]
        waiting = asyncio.create_task(client.post(COMPLETIONS, json=asked()))
        await until(lambda: engine.health().running, 0)
        for path, body in MISTAKES:
            content = {"content": body} if isinstance(body, bytes) else {"json": body}
            response = await client.post(path, **content)
            assert response.status_code in (400, 404)
            assert response.json()["error"]["message"]
        assert not waiting.done()
        assert (await waiting).json()["choices"] == alone
        assert engine.health().wasted == 0


async def spoken(client: httpx.AsyncClient, *parts: bytes) -> bytes:
    """What the server says to these bytes before it, or we, hang up."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    for part in parts:
        writer.write(part)
        await writer.drain()
    writer.write_eof()
    told = await reader.read()
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    return told


async def test_bytes_that_are_no_request_end_their_connection_and_nothing_else(byte_folder: Path) -> None:
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: ".encode()
    async with served_engine(engine_of(byte_folder), byte_folder) as (client, _):
        for parts in (
            [b"\x16\x03\x01\x02\x00\x01\x00"],  # TLS
            [b"SSH-2.0-OpenSSH_9.6\r\n"],
            [head + b"-5\r\n\r\n{}"],
            [head + b"9" * 5000 + b"\r\n\r\n{}"],
            [head + b"500\r\n\r\n", b'{"model": '],  # leaves in the middle of its body
            [b"GET /" + b"x" * 100_000],
        ):
            told = await asyncio.wait_for(spoken(client, *parts), 20)
            assert b" 500 " not in told.split(b"\r\n")[0]
            assert b"Traceback" not in told
        assert (await client.post(COMPLETIONS, json=asked(max_tokens=3))).status_code == 200


async def test_a_client_that_does_not_listen_holds_up_nobody(byte_folder: Path) -> None:
    engine = engine_of(byte_folder, slots=64)
    async with served_engine(engine, byte_folder) as (client, _):
        alone = (await client.post(COMPLETIONS, json=asked())).json()["choices"]
        body = json.dumps(asked(n=60, stream=True, logprobs=5)).encode()
        _, deaf = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        deaf.write(head.encode() + body)  # and never reads: some megabytes of events are waiting in the end
        await until(lambda: engine.health().running >= 60, 0)
        assert (await client.post(COMPLETIONS, json=asked())).json()["choices"] == alone
        deaf.close()
        async with asyncio.timeout(20):
            await until(lambda: engine.idle, 0)


async def test_a_servers_fault_is_told_without_insides(byte_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def faulty(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("secrets of the house")

    engine = RemoteEngine("engine-0", "unix:/nowhere")
    transport = httpx.ASGITransport(ServeApp(engine, served_model(load_tokenizer(byte_folder)), faulty))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        response = await client.get("/spans")
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secrets" not in response.text
    assert "secrets of the house" in capsys.readouterr().err


def test_more_answers_than_may_wait_are_told_to_come_back(byte_folder: Path) -> None:
    generation = Generation(engine_of(byte_folder))

    def wanted(name: str, answers: int) -> GenerateRequest:
        return GenerateRequest(name, (5,), tuple(range(answers)), sampling=Sampling(max_tokens=2))

    generation.submit_all([wanted("some", 4)])
    with pytest.raises(EngineLost, match="has 4 completions waiting already"):
        generation.submit_all([wanted("many", MOST_WAITING - 3)])
    generation.submit_all([wanted("as many as may", MOST_WAITING - 4)])
    with pytest.raises(EngineLost, match="has 65,536 completions waiting already"):
        generation.submit_all([wanted("one more", 1)])
    generation.close("as many as may")
    assert isinstance(generation.submit_all([wanted("one more", 1)]), Stream)
    generation.close("some")
    generation.close("one more")
    with pytest.raises(RefusedRequest, match="seeds: 65,537 seeds"):  # coming back would not help
        generation.submit_all([wanted("too many", MOST_WAITING + 1)])


def test_an_id_is_in_use_until_whoever_asked_has_the_answers(byte_folder: Path) -> None:
    engine = engine_of(byte_folder)
    generation = Generation(engine)
    wanted = GenerateRequest(id="a", prompt_token_ids=(5,), seeds=(1, 2), sampling=Sampling(max_tokens=2))
    first = generation.submit_all([wanted])
    while not engine.idle:
        for completion in engine.step():
            first.ended(completion)
    with pytest.raises(RefusedRequest, match="id: 'a'; an id that no open request uses"):
        generation.submit_all([wanted])
    with pytest.raises(RefusedRequest, match="id: 'b'"):
        generation.submit_all([replace(wanted, id="b"), replace(wanted, id="b")])
    assert generation.open_requests == 1
    assert not first.broken
    generation.close("a")
    assert isinstance(generation.submit_all([wanted]), Stream)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@settings(max_examples=12)
@given(text=TEXTS | st.sampled_from(["👩‍👩‍👧‍👦", "مرحبا", "é" * 9, "\u202e\u0000\u200d", "𝔘𝔫𝔦", "日本語\r\n"]))
def test_text_of_any_script_goes_in_and_comes_out_in_whole_characters(serving: Serving, text: str) -> None:
    """What a model writes is any bytes; a client sees characters, and U+FFFD for bytes that are none."""
    body = {"model": NAME, "messages": [{"role": "user", "content": text}], "seed": 1, "max_tokens": 24, "stop": text}
    whole = serving.post(CHAT, body).json()["choices"][0]
    events = [
        json.loads(line.removeprefix("data: "))["choices"][0]
        for line in serving.post(CHAT, body | {"stream": True}).content.decode().split("\n\n")
        if line not in ("", "data: [DONE]")
    ]
    assert "".join(event["delta"].get("content", "") for event in events) == whole["message"]["content"]
    assert text not in whole["message"]["content"]
    tokens = serving.post(COMPLETIONS, {"model": NAME, "prompt": text, "max_tokens": 1}).json()["usage"]
    assert 1 <= tokens["prompt_tokens"] <= len(text.encode())


SAMPLE = re.compile(r'(?P<name>[a-z_]+)(\{[a-z_]+="[^"\\\n]*"(,[a-z_]+="[^"\\\n]*")*\})? (?P<value>\S+)')


def test_the_metrics_are_a_page_that_prometheus_reads(serving: Serving) -> None:
    """The text format, version 0.0.4: HELP and TYPE once before the samples of a metric, numbers, a last line break."""
    serving.post(COMPLETIONS, asked(max_tokens=5))
    page = httpx.get(serving.url + "/metrics", trust_env=False).text
    assert page.endswith("\n")
    kinds: dict[str, str] = {}
    for line in page.splitlines():
        if line.startswith("# HELP "):
            _, _, name, meaning = line.split(" ", 3)
            assert name not in kinds
            assert meaning
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            kinds[name] = kind
        else:
            sample = SAMPLE.fullmatch(line)
            assert sample is not None, line
            (metric,) = [name for name in kinds if sample["name"] in (name, f"{name}_sum", f"{name}_count")]
            assert float(sample["value"]) >= 0
            assert (kinds[metric] == "counter") == metric.endswith("_total")
    told = {name.removeprefix("stretto_engine_").removesuffix("_total") for name in kinds if "_engine_" in name}
    assert told == {"up", *EngineHealth.__struct_fields__}


def test_counters_never_go_back(serving: Serving) -> None:
    def read() -> dict[str, float]:
        page = httpx.get(serving.url + "/metrics", trust_env=False).text
        samples = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples if "_total" in name}

    before = read()
    serving.post(COMPLETIONS, asked(n=4, max_tokens=9))
    serving.post(COMPLETIONS, {})
    after = read()
    assert all(after[name] >= value for name, value in before.items())
    assert after["stretto_engine_generated_total"] > before["stretto_engine_generated_total"]


def test_without_a_key_a_name_of_another_site_gets_nothing(serving: Serving) -> None:
    for path in ("/health", "/v1/models", "/spans"):
        refused = httpx.get(serving.url + path, headers={"host": "rebound.example"}, trust_env=False, timeout=30)
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "host")
