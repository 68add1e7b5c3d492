"""Promises: what is to run on a GPU unseen runs here on a tiny shape, to the end; its shapes are the real ones."""

import argparse

import pytest
import torch

from benchmarks import gpu_training
from benchmarks.gpu_training import build, peak_rate, row
from stretto.trainer.trainer import Trainer


@pytest.mark.parametrize(("sequences", "dtype"), [(1, "float32"), (4, "bfloat16")])
def test_a_step_is_measured(sequences: int, dtype: str) -> None:
    seen = row("tiny", 128, sequences, argparse.Namespace(dtype=dtype, steps=2, warm=1), torch.device("cpu"))
    assert (seen["tokens"], seen["sequences"], len(seen["seconds"]), seen["recomputed"]) == (128, sequences, 2, False)
    assert min(seen["tokens_per_second"], seen["tflops"] + 1e-3, seen["peak_gib"]) > 0


def test_where_memory_is_too_small_activations_are_recomputed_then_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bool] = []

    def too_much(trainer: Trainer, *_: object) -> dict[str, object]:
        tried.append(trainer.learner.config.activation_checkpointing)
        if not tried[-1] or len(tried) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return {}

    monkeypatch.setattr(gpu_training, "measure", too_much)
    words, cpu = argparse.Namespace(dtype="float32", steps=1, warm=0), torch.device("cpu")
    assert row("tiny", 64, 1, words, cpu)["recomputed"]
    assert row("tiny", 64, 1, words, cpu)["failed"] == "CUDA out of memory"
    assert tried == [False, True, False, True]


@pytest.mark.parametrize(("shape", "billions"), [("0.6B", 0.596), ("1.5B", 1.544)])
def test_the_shapes_are_the_real_ones(shape: str, billions: float) -> None:
    model = build(shape, torch.device("meta"))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989)],
)
def test_the_peak_is_that_of_the_card(monkeypatch: pytest.MonkeyPatch, name: str, teraflops: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_rate(torch.device("cuda"), "bfloat16")[0] == teraflops * 1e12


def test_without_a_data_sheet_the_peak_is_measured() -> None:
    rate, whose = peak_rate(torch.device("cpu"), "float32")
    assert rate > 1e9
    assert whose == "the fastest square product here"
