"""Promises of 2, 4 and 8 real ranks on gloo, with a model of 22M parameters: the losses of one rank, and within a tenth
the memory that is counted without machines (`counting`)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.scale.counting import step_bytes
from tests.trainer.scale.real_ranks import SEQUENCES, SETTINGS, SHAPE, SMALL, TOKENS
from tests.trainer.several_ranks import run_program


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model."""
    folder = tmp_path_factory.mktemp("real")
    torch.manual_seed(1)
    for name, shape in (("model", SHAPE), ("small", SMALL)):
        AutoModelForCausalLM.from_config(shape).save_pretrained(folder / name)
    return folder


def played(folder: Path, count: int) -> list[dict[str, Any]]:
    """What each of so many ranks saw."""
    run_program("tests.trainer.scale.real_ranks", folder, str(count), seconds=300)
    return [torch.load(folder / f"{count}-{rank}.pt") for rank in range(count)]


@pytest.fixture(scope="module")
def losses(folder: Path) -> list[float]:
    """Those of one rank."""
    found: list[float] = played(folder, 1)[0]["losses"]
    return found


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4, 8])
def test_real_ranks_have_the_losses_of_one_and_counted_memory(folder: Path, losses: list[float], count: int) -> None:
    counted = step_bytes(SHAPE, {**SETTINGS, "ranks": count}, TOKENS, micro_batches=SEQUENCES // count, gpu=False)
    for seen in played(folder, count):
        assert seen["losses"] == pytest.approx(losses, rel=1e-5, abs=1e-5)
        assert seen["peak"] == pytest.approx(counted.peak, rel=0.1)
