"""Promises: `make gpu` runs here at tiny sizes (long); what fails or takes too long is named with the reason, ends
nothing else, and leaves no process; all parts together have 25 minutes; the results are there after each part; its run
fits one GPU of 80 GiB; vLLM's script takes what it is given; without a GPU it says so."""

import fcntl
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import LIMITS, ROOT, ended, main, measured
from benchmarks.gpu_parts import RECIPE, REHEARSED, TESTED, Asked, Size, beside_vllm, outlined
from stretto.launch.preflight import paper
from stretto.launch.preflight.devices import assumed_gpus, notes_of, seats_of
from stretto.launch.preflight.paper import outline
from stretto.launch.recipe.recipe import load_recipe

FOUND = {"decode": "rows", "training": "rows", "memory": "peak_of_estimate", "kernels": "reading", "vllm": "stretto"}
FOUND |= {"drawing": "filtered", "publication": "versions_right", "ranks": "2"}


@pytest.mark.long
def test_every_part_runs_on_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_REHEARSAL", tmp_path / "found.json")
    monkeypatch.setattr(gpu, "LIMITS", dict.fromkeys(LIMITS, 600))
    monkeypatch.setattr(gpu, "BUDGET", 600.0 * len(LIMITS))
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
    written, limits = list[list[str]](), list[float]()
    answers: dict[str, dict[str, object]] = {"decode": {"failed": "ended with exit code 1"}, "training": {"rows": [1]}}

    def found(name: str, rehearse: bool, vllm: str, limit: float) -> dict[str, object]:
        limits.append(limit)
        return dict(answers[name])

    monkeypatch.setattr(gpu, "measured", found)
    monkeypatch.setattr(gpu, "BUDGET", 100.0)
    monkeypatch.setattr(gpu, "_write", lambda results, rehearse: written.append(list(results)))
    assert main(["--rehearse", "--parts", "training", "decode"]) == 1
    assert written == [["decode"], ["decode", "training"]]
    assert max(limits) <= 100 < min(LIMITS[name] for name in answers), "no part has more than is left of all"
    assert re.search(r"training .* well", capsys.readouterr().out)
    assert measured("kernels", True, "", 0.01) == {"failed": "not done after 0.01 s"}


def test_every_test_that_differs_on_a_gpu_is_in_the_first_part() -> None:
    marks = 'reason="needs a GPU"', 'torch.device("cuda" if torch.cuda.is_available()'
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if path.name != "test_gpu.py" and any(mark in path.read_text() for mark in marks)
    }
    assert found == set(TESTED)


def test_all_parts_fit_into_25_minutes() -> None:
    assert set(LIMITS) == set(gpu.PARTS)
    assert sum(LIMITS.values()) <= gpu.BUDGET == 25 * 60


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_reason_of_a_part_that_fails_is_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(asked: Asked) -> dict[str, object]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setitem(gpu.PARTS, "kernels", broken)
    found = tmp_path / "found.json"
    assert main(["--rehearse", "--one", f"kernels:{found}"]) == 1
    assert json.loads(found.read_text()) == {
        "failed": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    }


STARTS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
sys.exit(3)
"""
HOLDS = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


def test_what_a_part_has_started_ends_with_it(tmp_path: Path) -> None:
    """In a session of its own, as roles are: it holds a lock until it ends."""
    lock = tmp_path / "lock"
    assert ended([sys.executable, "-c", STARTS, HOLDS, str(lock)], os.environ, 200) == 3
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


@pytest.mark.parametrize("size", [Size(), REHEARSED], ids=["whole", "rehearsed"])
def test_the_run_fits_a_gpu(size: Size, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank and engine share one of 80 GiB, by the estimate."""
    monkeypatch.setattr(paper, "try_reward", lambda config, questions: [])
    model = outlined(size.shape, tmp_path / "model")
    plan = outline(load_recipe(RECIPE, [f"model.path={model}", *size.run]))
    seats = seats_of(plan, assumed_gpus("1x80"))
    assert [seat.need.role for seat in seats] == ["rank 0", "engine-0"]
    (shared,) = notes_of(seats)
    assert shared.startswith("GPU 0 is shared: "), "and none says that it may not fit"


VLLM = """
from types import SimpleNamespace as Given

SamplingParams = Given

class LLM(Given):
    def generate(self, prompts, sampling, use_tqdm):
        assert self.dtype == "bfloat16" and not self.enforce_eager
        return [Given(outputs=[Given(token_ids=[0] * sampling.max_tokens)]) for _ in prompts]
"""


def test_vllms_script_takes_what_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for vLLM, which answers as many tokens as are asked for."""
    (tmp_path / "vllm.py").write_text(VLLM)
    (tmp_path / "vllm-9.dist-info").mkdir()
    (tmp_path / "vllm-9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = beside_vllm(Asked(REHEARSED, torch.device("cpu"), tmp_path, sys.executable), 4)["vllm"]
    assert found["version"] == "9"
    assert [(row["sequences"], row["tokens"]) for row in found["rows"]] == [(n, 4 * n) for n in REHEARSED.sequences]
