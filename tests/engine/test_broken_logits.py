"""Promises, with a model whose weights are finite and whose sums are not when one certain token is in the prompt:

- the engine names the requests whose logits are not finite, and no answer has a new token from such a step;
- given up, they are gone, and all others end as they would have, in the slots of those that were given up too;
- a server of many clients tells the one who asked, and the answers of the others are what they are alone.
"""

import asyncio
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, PreTrainedModel

import stretto
from stretto.core.records import GenerateRequest
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.sampling import BrokenLogits
from stretto.model.hf.folder import save_policy
from stretto.model.hf.tokenizer import load_tokenizer
from tests.engine.answering import drain, engine_of, finish, request
from tests.engine.byte_policy import NAME
from tests.gateway.serve.serving import served_engine

COMPLETIONS = "/v1/completions"
BREAKING = "Z"


HUGE = {"float32": 3e38, "float16": 6e4}  # finite; times anything above 1.2 it is not


def build_fragile(byte_folder: Path, folder: Path, huge: float) -> Path:
    """`byte_folder` with weights by which the values of BREAKING alone, in the second layer, are beyond any float.

    The first number of every hidden state is 0 but for that token; the second is 1, and keeps it from being sampled.
    """
    (token,) = load_tokenizer(byte_folder).encode(BREAKING)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(byte_folder)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
        embedding[:, 0], embedding[:, 1], embedding[token, 0] = 0.0, 1.0, 50.0
        for name, weight in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight[:2] = 0.0
        weights["model.layers.1.self_attn.v_proj.weight"][:, 0] = huge
        head[token], head[token, 1] = 0.0, -1000.0
    save_policy(model, byte_folder, folder)
    return folder


@pytest.fixture(scope="module")
def folders(byte_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The fragile model of each dtype."""
    root = tmp_path_factory.mktemp("fragile")
    return {dtype: build_fragile(byte_folder, root / dtype / NAME, huge) for dtype, huge in HUGE.items()}


@pytest.fixture
def fragile_folder(folders: dict[str, Path]) -> Path:
    return folders["float32"]


def breaking(name: str, folder: Path, prompt: int = 30) -> GenerateRequest:
    """A request whose last token breaks the numbers."""
    wanted = request(name, prompt=prompt, seeds=(1, 2), stop_token_ids=())
    (token,) = load_tokenizer(folder).encode(BREAKING)
    return replace(wanted, prompt_token_ids=(*wanted.prompt_token_ids[:-1], token))


@pytest.mark.parametrize("dtype", HUGE)
def test_requests_of_logits_that_are_not_finite_are_named_and_given_up(folders: dict[str, Path], dtype: str) -> None:
    fragile_folder = folders[dtype]
    others = [request(f"r{i}", prompt=3 + 20 * i, seeds=(i, i + 9), stop_token_ids=()) for i in range(3)]
    expected = finish(engine_of(fragile_folder, dtype=dtype), *others)
    engine = engine_of(fragile_folder, dtype=dtype)
    for wanted in others:
        engine.add(wanted)
    for _ in range(7):
        engine.step()
    engine.add(breaking("b", fragile_folder))
    before = engine.health()
    for _ in range(2):  # nothing was written, and nothing is forgotten
        with pytest.raises(BrokenLogits, match="not finite") as broken:
            engine.step()
        assert broken.value.requests == {"b"}
        assert engine.health().unfinished == before.unfinished
    replaced = weakref.ref(engine._policy)
    engine.give_up({"b"})
    gc.collect()
    assert replaced() is None, "its cache would keep its memory"
    engine.check_integrity()
    ended = drain(engine)
    assert set(ended) == set(expected)
    assert all(completion.interrupted == 0 for completion in ended.values())
    if dtype == "float32":  # with fewer bits the rounding of a batch is seen
        assert {key: c.token_ids for key, c in ended.items()} == {key: c.token_ids for key, c in expected.items()}


def test_who_gets_the_slot_of_a_broken_answer_does_not_see_its_numbers(folders: dict[str, Path]) -> None:
    """In float16 all rows of a bucket are read as far as its longest: hidden numbers enter the products."""
    engine = NativeEngine.load(folders["float16"], EngineConfig(slots=2, dtype="float16"))
    engine.add(breaking("b", folders["float16"], prompt=30))
    with pytest.raises(BrokenLogits) as broken:
        engine.step()
    engine.give_up(broken.value.requests)
    long, short = request("long", prompt=50, max_tokens=3), request("short", prompt=3, max_tokens=3)
    for pair in ([long, short], [short, long]):
        assert len(finish(engine, *pair)) == 2


def test_an_engine_in_this_process_tells_of_broken_numbers_and_goes_on(folders: dict[str, Path]) -> None:
    engine = stretto.Engine.load(folders["float32"], slots=4)
    alone = engine.generate(["ab", "cd"], max_tokens=8, seed=3)
    with pytest.raises(stretto.StrettoError, match="logits are not finite: its weights are broken"):
        engine.generate(["ab", "ab" + BREAKING], max_tokens=8, seed=3)
    assert engine.generate(["ab", "cd"], max_tokens=8, seed=3) == alone


async def answer(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"model": NAME, "prompt": "ab", "seed": 3, "max_tokens": 200, **fields}
    return await client.post(COMPLETIONS, json=body)


async def test_a_request_that_breaks_the_numbers_is_told_and_takes_no_other_with_it(
    fragile_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = NativeEngine.load(fragile_folder, EngineConfig(slots=8), name="engine-0")
    async with served_engine(engine, fragile_folder) as (client, _):
        alone = (await answer(client)).json()["choices"]
        before = engine.health().generated
        waiting = asyncio.create_task(answer(client))
        while engine.health().generated < before + 20:
            await asyncio.sleep(0)
        whole = await answer(client, prompt="ab" + BREAKING, n=3)
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "unavailable")
        assert "engine-0 cannot go on: the model's logits are not finite" in whole.json()["error"]["message"]
        stream = (await answer(client, prompt="ab" + BREAKING, stream=True)).text.split("\n\n")
        assert "logits are not finite" in json.loads(stream[-2].removeprefix("data: "))["error"]["message"]
        assert not waiting.done()
        assert (await waiting).json()["choices"] == alone
        assert engine.idle
    warned = [record.name for record in caplog.records if "logits are not finite" in record.getMessage()]
    assert warned.count("stretto.engine.native.generation") == warned.count("stretto_gateway.serve.remote") == 2
