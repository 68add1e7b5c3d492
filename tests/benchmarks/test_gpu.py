"""Promises: `make gpu` runs here at tiny sizes (long); what fails or takes too long is named and ends nothing else; the
results are there after each part; without a GPU it says so.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import LIMITS, main, measured

FOUND = {"decode": "rows", "training": "rows", "memory": "peak_of_estimate", "kernels": "reading", "vllm": "stretto"}
FOUND |= {"drawing": "filtered", "publication": "versions_right", "ranks": "2"}


@pytest.mark.long
def test_every_part_runs_on_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_REHEARSAL", tmp_path / "found.json")
    monkeypatch.setattr(gpu, "LIMITS", dict.fromkeys(LIMITS, 600))
    assert main(["--rehearse"]) == 0
    results = json.loads((tmp_path / "found.json").read_text())["results"]
    assert list(results) == list(LIMITS)
    assert "passed" in results["tests"]["told"]
    assert all(results[part][key] for part, key in FOUND.items())
    assert results["run"]["generated_per_second"] > 0
    assert {"training", "decode"} < set(results["profile"])


def test_what_fails_or_takes_too_long_is_named_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[list[str]] = []
    answers: dict[str, dict[str, object]] = {"decode": {"failed": "ended with exit code 1"}, "training": {"rows": [1]}}
    monkeypatch.setattr(gpu, "measured", lambda name, *_: dict(answers[name]))
    monkeypatch.setattr(gpu, "_write", lambda results, rehearse: written.append(list(results)))
    assert main(["--rehearse", "--parts", "training", "decode"]) == 1
    assert written == [["decode"], ["decode", "training"]]
    assert re.search(r"training .* well", capsys.readouterr().out)
    assert measured("kernels", True, "", 0.01) == {"failed": "not done after 0.01 s"}


def test_all_parts_fit_into_25_minutes() -> None:
    assert set(LIMITS) == set(gpu.PARTS)
    assert sum(LIMITS.values()) <= 25 * 60


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1
