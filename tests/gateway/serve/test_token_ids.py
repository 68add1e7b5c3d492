"""Promises of vLLM's token interface: the tokens, log-probabilities and versions are those of the engine, whole or
streamed, across an update in mid-completion; the client for a server of vLLM reads them; what the engine cannot do is
refused by the name of the field.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM

from stretto.core.records import Completion, GenerateRequest, Sampling
from stretto_gateway.dialects.token_ids import TokenIdsDialect, spans
from stretto_servers.http import JsonServer
from stretto_servers.make import Continuation
from stretto_servers.vllm import VllmServer
from tests.engine.answering import weights
from tests.engine.byte_policy import NAME, generated
from tests.gateway.serve.serving import engine_of, served_engine

PATH = TokenIdsDialect.path
PROMPT = (5, 12, 8)
TOKENS = 40


def body(**sampling: Any) -> dict[str, Any]:
    return {
        "model": NAME,
        "token_ids": list(PROMPT),
        "sampling_params": {"max_tokens": TOKENS, "seed": 7, "logprobs": 1, "ignore_eos": True, **sampling},
    }


def expected(folder: Path, **sampling: Any) -> Completion:
    wanted = Sampling(max_tokens=TOKENS, **sampling)
    request = GenerateRequest(id="a", prompt_token_ids=PROMPT, seeds=(7,), sampling=wanted)
    return generated(engine_of(folder), request)[0]


def told(choices: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
    content = [token for choice in choices for token in choice["logprobs"]["content"]]
    assert [token["token"] for token in content] == [f"token_id:{token['token_id']}" for token in content]
    assert [token["token_id"] for token in content] == [id for choice in choices for id in choice["token_ids"]]
    return [token["token_id"] for token in content], [token["logprob"] for token in content]


async def test_a_whole_reply_has_the_engines_tokens(byte_folder: Path) -> None:
    completion = expected(byte_folder)
    async with served_engine(engine_of(byte_folder), byte_folder) as (client, _):
        reply = (await client.post(PATH, json=body())).json()
    (choice,) = reply["choices"]
    tokens, logprobs = told([choice])
    assert tuple(tokens) == completion.token_ids
    assert logprobs == pytest.approx(completion.behavior_logprobs)
    assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": TOKENS}]
    assert (choice["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", TOKENS)


async def test_a_stream_brings_tokens_as_they_come_and_their_versions_at_the_end(byte_folder: Path) -> None:
    engine = engine_of(byte_folder)
    model = AutoModelForCausalLM.from_pretrained(byte_folder)
    shaken = {name: parameter + 0.1 for name, parameter in weights(model).items()}
    choices, step = list[dict[str, Any]](), engine.step

    def stepped() -> list[Completion]:
        if engine.health().generated == 3:
            engine.update(1, shaken)
        return step()

    engine.step = stepped  # type: ignore[method-assign]
    async with (
        served_engine(engine, byte_folder) as (client, _),
        client.stream("POST", PATH, json=body() | {"stream": True}) as reply,
    ):
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                choices += json.loads(line.removeprefix("data: "))["choices"]
    tokens, _ = told(choices)
    assert len(tokens) == TOKENS
    assert {choice["finish_reason"] for choice in choices[:-1]} == {None}
    first, second = choices[-1]["weight_versions"]
    assert (first["version"], first["start"], second["version"], second["end"]) == ("0", 0, "1", TOKENS)
    assert first["end"] == second["start"] == 3


async def test_the_client_for_a_server_of_vllm_reads_it(byte_folder: Path) -> None:
    completion = expected(byte_folder, top_p=0.9)
    async with served_engine(engine_of(byte_folder), byte_folder) as (client, _):
        address = str(client.base_url).removeprefix("http://").rstrip("/")
        server = VllmServer(JsonServer("engine-0", address, seconds=20, token_seconds=20), 20)
        sampling = Sampling(max_tokens=TOKENS, top_p=0.9)
        wanted = Continuation("a", PROMPT, sampling, max_tokens=TOKENS, seed=7, top_logprobs=2)
        deltas = [delta async for delta in server.stream(wanted)]
        await server.close()
    assert tuple(token for delta in deltas for token in delta.token_ids) == completion.token_ids
    assert [value for delta in deltas for value in delta.logprobs] == pytest.approx(completion.behavior_logprobs)
    assert {len(likeliest) for delta in deltas for likeliest in delta.top_logprobs} == {2}
    assert (deltas[-1].ended, deltas[-1].spans) == ("length", (("0", 0, TOKENS),))


async def test_a_stop_token_ends_a_completion_and_is_told(byte_folder: Path) -> None:
    third = expected(byte_folder).token_ids[2]
    async with served_engine(engine_of(byte_folder), byte_folder) as (client, _):
        reply = (await client.post(PATH, json=body(stop_token_ids=[third]))).json()
    (choice,) = reply["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"][-1]) == ("stop", third, third)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": []}, "token_ids"),
    ({"model": "other"}, "model"),
    ({"sampling_params": {"n": 2}}, "sampling_params.n"),
    ({"sampling_params": {"presence_penalty": 0.5}}, "sampling_params.presence_penalty"),
    ({"sampling_params": {"best_of": 2}}, "sampling_params.best_of"),
    ({"token_ids": [10**6]}, "token_ids"),
    ({"sampling_params": {"stop_token_ids": [10**6]}}, "sampling_params.stop_token_ids"),
]


async def test_what_it_cannot_do_is_refused_by_name(byte_folder: Path) -> None:
    async with served_engine(engine_of(byte_folder), byte_folder) as (client, _):
        for changed, field in MISTAKES:
            reply: httpx.Response = await client.post(PATH, json=body() | changed)
            assert (reply.status_code in (400, 404), reply.json()["error"]["param"]) == (True, field)


def test_spans_join_tokens_of_one_version() -> None:
    assert [(span["version"], span["start"], span["end"]) for span in spans([3, 3, 5])] == [("3", 0, 2), ("5", 2, 3)]
    assert spans([]) == []
