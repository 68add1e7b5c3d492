"""Promises: `make gpu` runs here at tiny sizes (long); what fails or takes too long is named with the reason, ends
nothing else, and leaves no process; what does not fit a budget is skipped; all parts together have 25 minutes; the
results are there after each part, as plain numbers; its runs fit one GPU of 80 GiB; vLLM's script takes what it is
given; without a GPU it says so."""

import fcntl
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import LIMITS, ROOT, Worker, main, measured
from benchmarks.gpu_parts import RECIPE, REHEARSED, TESTED, Asked, Size, beside_vllm, outlined
from benchmarks.gpu_sides import LEARN
from stretto.core.machine import Gpu
from stretto.launch.preflight.devices import assumed_gpus, notes_of, seats_of
from stretto.launch.recipe.recipe import load_recipe
from stretto_app.extensions.preflight import paper
from stretto_app.extensions.preflight.paper import outline

FOUND = {"decode": "rows", "training": "rows", "memory": "peak_of_estimate", "kernels": "reading", "vllm": "stretto"}
FOUND |= {
    "drawing": "filtered",
    "publication": "versions_right",
    "ranks": "2",
    "beside": "training",
    "learn": "accuracy",
}
FOUND |= {"continuous": "rows", "compiled": "rows"}


@pytest.mark.long
def test_every_part_runs_on_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_REHEARSAL", tmp_path / "found.json")
    monkeypatch.setattr(gpu, "LIMITS", dict.fromkeys(LIMITS, (600, 1)))
    assert main(["--rehearse", "--budget", str(600 * len(LIMITS))]) == 0
    results = json.loads((tmp_path / "found.json").read_text())["results"]
    assert list(results) == list(LIMITS)
    assert "passed" in results["tests"]["told"]
    assert all(results[part][key] for part, key in FOUND.items())
    assert results["run"]["generated_per_second"] > 0
    assert {"training", "decode"} < set(results["profile"])


class Done:
    """A process that has an answer for each part, or takes longer than its limit."""

    limits: ClassVar[list[float]] = []
    answers: ClassVar[dict[str, dict[str, object]]] = {"decode": {"failed": "CUDA error"}}

    def __init__(self, rehearse: bool, vllm: str) -> None:
        self.closed = False
        MADE.append(self)

    def part(self, name: str, limit: float) -> dict[str, object]:
        assert not self.closed
        self.limits.append(limit)
        return dict(self.answers.get(name, {"rows": [1]}))

    def close(self) -> None:
        self.closed = True


MADE: list[Done] = []


def test_what_fails_or_takes_too_long_is_named_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that has failed ends its process: an error of CUDA spoils all that follows in it."""
    written = list[list[str]]()
    MADE.clear()
    monkeypatch.setattr(gpu, "Worker", Done)
    monkeypatch.setattr(gpu, "_write", lambda results, rehearse: written.append(list(results)))
    assert main(["--rehearse", "--budget", "100", "--parts", "kernels", "training", "decode"]) == 1
    assert written == [["decode"], ["decode", "training"], ["decode", "training", "kernels"]]
    assert max(Done.limits) <= 100 < LIMITS["decode"][0], "no part has more than is left of all"
    assert [one.closed for one in MADE] == [True, True]
    assert re.search(r"decode .* CUDA error\n(.*\n)*training .* well", capsys.readouterr().out)
    monkeypatch.undo()
    ((name, found),) = measured(["kernels"], True, "", 0.01)
    assert (name, found["failed"]) == ("kernels", "not done after 0.01 s")


def test_what_does_not_fit_a_budget_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "Worker", Done)
    found = dict(measured(["training", "run", "drawing"], False, "", LIMITS["run"][1] - 1.0))
    assert found["run"]["skipped"].startswith(f"takes about {LIMITS['run'][1]} s, and ")
    assert [("skipped" in part, "rows" in part) for part in found.values()] == [
        (False, True),
        (True, False),
        (False, True),
    ]


def test_other_parts_keep_their_results_of_the_same_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    assert gpu._kept() == {}
    before = {"machine": {"accelerators": []}, "results": {"decode": {"rows": [1]}}}
    (tmp_path / "gpu.json").write_text(json.dumps(before))
    assert gpu._kept() == {"decode": {"rows": [1]}}
    (tmp_path / "gpu.json").write_text(json.dumps(before | {"machine": {"accelerators": ["H100"]}}))
    assert gpu._kept() == {}


def test_every_test_that_differs_on_a_gpu_is_in_the_first_part() -> None:
    marks = 'reason="needs a GPU"', 'torch.device("cuda" if torch.cuda.is_available()'
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if path.name != "test_gpu.py" and any(mark in path.read_text() for mark in marks)
    }
    assert found <= set(TESTED)


def test_all_parts_fit_into_25_minutes() -> None:
    assert set(LIMITS) == set(gpu.PARTS)
    assert sum(most for most, _ in LIMITS.values()) <= gpu.BUDGET == 25 * 60
    assert all(typical <= most for most, typical in LIMITS.values())


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_reason_of_a_part_that_fails_is_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(asked: Asked) -> dict[str, object]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setitem(gpu.PARTS, "kernels", broken)
    monkeypatch.setitem(gpu.PARTS, "run", lambda asked: {"weights": Gpu("0", memory=5)})
    monkeypatch.setattr("sys.stdin", io.StringIO("kernels\nrun\n"))
    assert main(["--rehearse", "--serve", str(tmp_path)]) == 0
    told = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("kernels", "run")}
    assert told["kernels"] == {"failed": "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"}
    assert told["run"]["weights"]["memory"] == 5, "a record is plain numbers"


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


def test_what_a_part_has_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a session of its own, as roles are: it holds a lock until it ends."""
    lock = tmp_path / "lock"
    begin = subprocess.Popen
    command = [sys.executable, "-c", STARTS, HOLDS, str(lock)]
    monkeypatch.setattr("subprocess.Popen", lambda _, **given: begin(command, **given))
    worker = Worker(True, "")
    monkeypatch.undo()
    assert worker.part("decode", 200) == {"failed": "ended with exit code 3"}
    worker.close()
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


@pytest.mark.parametrize("size", [Size(), REHEARSED], ids=["whole", "rehearsed"])
def test_the_runs_fit_a_gpu(size: Size, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank and engine share one of 80 GiB, by the estimate."""
    monkeypatch.setattr(paper, "try_reward", lambda config, questions, completions: [])
    model = outlined(size.shape, tmp_path / "model")
    learn = [*size.learn, "task.demonstrations=64", "task.prompts=256"]  # the estimate is that of all 64,000
    for recipe in (load_recipe(RECIPE, [f"model.path={model}", *size.run]), load_recipe(LEARN, learn)):
        seats = seats_of(outline(recipe), assumed_gpus("1x80"))
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
