"""Promises: processes of one run choose the same kernels, whatever each would measure by itself; a choice on record is
never measured again; a damaged or unwritable file stops nobody."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from stretto.model.kernels import choose
from stretto_kernels import choices
from stretto_kernels.steps import matmul
from stretto_kernels.steps.matmul import FILE, GENERATION, TRAINING, KernelChoice, Name, Shape, measure

SHAPES: list[Shape] = [(64, 96), (96, 64)]

#: Chooses by a measurement that says something else in every process, and takes long enough to meet the others.
UNSTEADY = """
import os, sys, time
from pathlib import Path
import torch
from stretto.model.kernels import choose
from stretto_kernels.steps import matmul
def unsteady(shape, dtype, kernels):
    time.sleep(0.2)
    return matmul.KernelChoice("onednn", os.getpid())
matmul.measure = unsteady
print("ready", flush=True)
sys.stdin.readline()
chosen = choose([(64, 96), (96, 64)], torch.float32, ("onednn",), Path(sys.argv[1]))
print(sorted((shape, choice.fewest) for shape, choice in chosen.items()))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / FILE


def measured(monkeypatch: pytest.MonkeyPatch, choice: KernelChoice) -> list[Shape]:
    """Let every measurement give this; returns the shapes that were measured."""
    seen: list[Shape] = []

    def measure(shape: Shape, dtype: torch.dtype, kernels: Sequence[Name]) -> KernelChoice:
        seen.append(shape)
        return choice

    monkeypatch.setattr(matmul, "measure", measure)
    return seen


@pytest.mark.long
def test_two_engines_that_start_together_choose_alike(tmp_path: Path) -> None:
    def start(number: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", UNSTEADY, str(tmp_path / "run" / FILE)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    engines = [start(number) for number in range(2)]
    for engine in engines:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
    first, second = (engine.communicate("go\n", timeout=60)[0] for engine in engines)
    assert first == second != ""
    assert len(json.loads((tmp_path / "run" / FILE).read_text())) == len(SHAPES)


def test_who_waits_long_for_the_first_engine_of_a_run_takes_its_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, measuring, seen = tmp_path / "run.json", threading.Event(), list[Shape]()
    found = dict[Shape, KernelChoice]()

    def unsteady(shape: Shape, dtype: torch.dtype, kernels: Sequence[Name]) -> KernelChoice:
        measuring.set()
        seen.append(shape)
        time.sleep(0.3)
        return KernelChoice("onednn", len(seen))

    monkeypatch.setattr(choices, "_LOCK_SECONDS", 0.1)
    monkeypatch.setattr(matmul, "measure", unsteady)
    first = threading.Thread(target=lambda: found.update(choose(SHAPES, torch.float32, GENERATION, record)))
    first.start()
    measuring.wait(10)
    second = choose(SHAPES, torch.float32, GENERATION, record)
    first.join()
    assert second == found != {}


def test_a_choice_on_record_outlives_what_the_cache_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, other = tmp_path / "run.json", tmp_path / "other.json"
    ours, theirs = KernelChoice("columns", 1, 1.5), KernelChoice("packed", 16, 1.2)
    measured(monkeypatch, ours)
    assert choose(SHAPES, torch.float32, GENERATION, record) == dict.fromkeys(SHAPES, ours)
    (tmp_path / "cache" / FILE).unlink()
    again = measured(monkeypatch, theirs)
    assert choose(SHAPES, torch.float32, GENERATION, other) == dict.fromkeys(SHAPES, theirs)
    assert choose(SHAPES, torch.float32, GENERATION, record) == dict.fromkeys(SHAPES, ours)
    assert again == SHAPES  # once for the other run, never for the first


def test_a_choice_of_an_earlier_version_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, ours, theirs = tmp_path / "run.json", KernelChoice("panels", 1, 1.5), KernelChoice("packed", 16, 1.2)
    for dtype, kernels in ((torch.bfloat16, GENERATION), (torch.float32, TRAINING)):
        measured(monkeypatch, ours)
        choose(SHAPES, dtype, kernels, record)
        for part in (" in training", r" \(family.*?\)| in pairs"):
            record.write_text(re.sub(part, "", record.read_text()))
            monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / f"of another run, {dtype}{part[:3]}"))
            seen = measured(monkeypatch, theirs)
            choose(SHAPES, dtype, kernels)  # the cache says otherwise
            assert choose(SHAPES, dtype, kernels, record) == dict.fromkeys(SHAPES, ours)
            assert seen == SHAPES


def test_a_choice_for_one_core_is_named_as_by_earlier_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, KernelChoice())
    os.sched_setaffinity(0, {min(cores := os.sched_getaffinity(0))})
    try:
        choose(SHAPES, torch.float32, GENERATION, tmp_path / "run.json")
    finally:
        os.sched_setaffinity(0, cores)
    assert all(", 1 cores, " in name for name in json.loads((tmp_path / "run.json").read_text()))


def test_a_second_run_takes_what_the_first_has_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = measured(monkeypatch, KernelChoice("onednn", 16, 1.5))
    first = choose(SHAPES, torch.float32, GENERATION, tmp_path / "one.json")
    assert choose(SHAPES, torch.float32, GENERATION, tmp_path / "two.json") == first
    assert seen == SHAPES
    choose(SHAPES, torch.bfloat16, GENERATION)
    assert seen == 2 * SHAPES  # another type is another measurement


@pytest.mark.parametrize("content", [b"", b"{", b'{"name": {"kernel": "abacus"}}', b"\xff\xfe", b"[]"])
def test_a_damaged_cache_is_measured_anew(content: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.parent.mkdir()
    cache.write_bytes(content)
    seen = measured(monkeypatch, KernelChoice())
    choose(SHAPES, torch.float32, GENERATION)
    choose(SHAPES, torch.float32, GENERATION)
    assert seen == SHAPES


def test_without_a_place_for_a_cache_kernels_are_chosen_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "file" / "below"))
    measured(monkeypatch, KernelChoice())
    assert choose(SHAPES, torch.float32, GENERATION) == dict.fromkeys(SHAPES, KernelChoice())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_measurement_offers_what_it_was_given_or_the_default(dtype: torch.dtype) -> None:
    offered: list[Name] = ["columns"] if dtype == torch.float32 else ["widened"]
    choice = measure((64, 96), dtype, offered)
    assert choice.kernel in ("linear", *offered)
    assert choice.fewest in (1, 16, 64, 256)
    assert measure((64, 96), dtype, TRAINING).fewest in (1, 64, 256, 1024, 4096)  # 1: torch's own


def test_weights_too_small_to_matter_are_recorded_unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, record = measured(monkeypatch, KernelChoice()), tmp_path / "run.json"
    assert choose([(32, 64)], torch.float32, GENERATION, record) == {}
    assert seen == []
    assert record.exists()  # without one, a replay would take the run for one that chose by an older rule
