"""Promises: the log-probabilities of a server, and of the embedded engine, are as far from the trainer's as those on
record (`benchmarks/results/logprob-distribution.json`), in float32 and in bfloat16; of a server, for a second family in
float32 too.

What is likeliest in a server that was started with a trained policy, as a run writes it, is so in transformers.

A part of the fixed set, scored at once and sampled over the cache: neither the mean nor a single token is more than one
bit farther than the farthest on record of the same make and type, in units of rounding."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.logprobs import DTYPES, Measuring, beyond, build, on_record
from tests.real_engines.serving import PROMPTS, Installed, RealServer, engine

MODEL, ANOTHER, TEXTS = "qwen3", "qwen2", 8


@pytest.fixture(scope="session")
def measuring(tmp_path_factory: pytest.TempPathFactory) -> Measuring:
    folder: Path = tmp_path_factory.mktemp("measured") / "policy"
    build(MODEL, folder)
    return Measuring(MODEL, folder, TEXTS)


@pytest.fixture(scope="session")
def measuring_another(tmp_path_factory: pytest.TempPathFactory) -> Measuring:
    folder: Path = tmp_path_factory.mktemp("another") / "policy"
    build(ANOTHER, folder)
    return Measuring(ANOTHER, folder, TEXTS)


@pytest.fixture(scope="session")
def server_of_another_family(installed: Installed, measuring_another: Measuring) -> Iterator[RealServer]:
    """A server of each make."""
    with closing(RealServer(installed, measuring_another.folder, dtype="float32")) as started:
        started.until_up()
        yield started


async def distances_of(server: RealServer, measuring: Measuring) -> list[str]:
    """What is farther than on record, with weights that a trainer has published."""
    model: Any = AutoModelForCausalLM.from_pretrained(measuring.folder, dtype=torch.float32)
    async with engine(server, "recompute") as (served, publish):
        publish(1, model)
        await served.update(1)
        found = await measuring.of_server(server.kind, server.dtype, served._make)
    return [line for one in found for line in beyond(one, on_record())]


async def test_a_server_is_as_near_to_the_trainer_as_on_record(either_server: RealServer, measuring: Measuring) -> None:
    assert await distances_of(either_server, measuring) == []


async def test_a_server_of_another_family_is_as_near_to_the_trainer_as_on_record(
    server_of_another_family: RealServer, measuring_another: Measuring
) -> None:
    assert await distances_of(server_of_another_family, measuring_another) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_embedded_engine_is_as_near_to_the_trainer_as_on_record(measuring: Measuring, dtype: str) -> None:
    assert [line for one in measuring.of_native(dtype) for line in beyond(one, on_record())] == []


def test_what_is_likeliest_in_a_trained_policy_is_so_in_a_server_as_in_transformers(either_server: RealServer) -> None:
    """Where the second likeliest is farther than both have been wrong by."""
    model: Any = AutoModelForCausalLM.from_pretrained(either_server.policy, dtype=torch.float32).eval()
    own = (MODEL, either_server.kind, either_server.dtype)
    rounding = max(one.quantiles[-1] for one in on_record() if (one.model, one.make, one.dtype) == own)
    clear = 0
    for prompt, tokens in zip(PROMPTS, either_server.likeliest, strict=True):
        with torch.no_grad():
            lines = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        (first, second), (likeliest, _) = (found.unbind(-1) for found in lines.topk(2))
        sure = first - second > 2 * rounding
        assert likeliest[sure].tolist() == torch.tensor(tokens)[sure].tolist()
        clear += int(sure.sum())
    assert clear > sum(map(len, either_server.likeliest)) / 4
