"""Promises: what is to run on a GPU unseen runs here on a tiny shape, to the end; its shapes are the real ones."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_training import ALGORITHM, build, measure, peak_rate
from stretto.core.records import Sampling
from stretto.trainer.config import TrainerConfig
from stretto.trainer.update import Trainer


@pytest.mark.parametrize(("sequences", "dtype"), [(1, "float32"), (4, "bfloat16")])
def test_a_step_is_measured(sequences: int, dtype: str) -> None:
    cpu = torch.device("cpu")
    config = TrainerConfig.model_validate({"minibatches": 1, "dtype": dtype, "device": "cpu"})
    trainer = Trainer(build("tiny", cpu), config, ALGORITHM, Sampling(max_tokens=128))
    row = measure(trainer, tokens=128, sequences=sequences, steps=2, warm=1)
    assert (row["tokens"], row["sequences"], len(row["seconds"])) == (128, sequences, 2)
    assert min(row["tokens_per_second"], row["tflops"] + 1e-3, row["peak_gib"]) > 0
    assert trainer.version == 3


@pytest.mark.parametrize(("shape", "billions"), [("0.6B", 0.596), ("1.5B", 1.544)])
def test_the_shapes_are_the_real_ones(shape: str, billions: float) -> None:
    model = build(shape, torch.device("meta"))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, abs=1e-3)


def test_without_a_data_sheet_the_peak_is_measured() -> None:
    rate, whose = peak_rate(torch.device("cpu"), "float32")
    assert rate > 1e9
    assert whose == "the fastest square product here"
