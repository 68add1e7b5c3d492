"""Promises: what is to run on a GPU unseen runs here on a tiny shape, to the end; answers that are not those of
transformers are noticed; without a GPU it says so."""

from typing import Any

import pytest
import torch

from benchmarks import gpu_generation
from benchmarks.gpu_generation import Measured, exactness, main, row
from stretto.model.decode.policy import DecodePolicy

CPU = torch.device("cpu")


def test_the_check_runs_to_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0
    shown = capsys.readouterr().out
    assert "tiny: as transformers" in shown
    assert "decode tokens/s" in shown


def test_answers_that_are_not_those_of_transformers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = DecodePolicy.forward

    def wrong(*asked: Any) -> Any:
        order, logits = right(*asked)
        return order, logits.roll(1, -1)

    monkeypatch.setattr(DecodePolicy, "forward", wrong)
    assert not exactness("tiny", CPU, 2, 20, 4)["exact"]


def test_what_does_not_fit_the_memory_is_skipped_with_a_word() -> None:
    assert "GiB" in row("tiny", 1_000_000_000, 64, Measured(1, 2), CPU, 1e9)["skipped"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_generation, "measure", lambda *_: pytest.fail("something is measured"))
    assert main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1
