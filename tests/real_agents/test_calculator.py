"""Promise: a small model learns to use a tool through the gateway from an unchanged program of openai-agents, as
`recipes/calculator_agent.toml` says: without the tool it cannot answer, before the run it seldom uses it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from stretto.store.inspection import inspect_run

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "agents"
STRETTO = [sys.executable, "-c", "from stretto.cli.main import main; main()"]
SECONDS = 900.0


def surroundings() -> Mapping[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def called(*words: str | Path) -> str:
    """What the program says; it has to end well."""
    told = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=SECONDS, check=False, env=surroundings()
    )
    assert told.returncode == 0, (told.stdout + told.stderr)[-3000:]
    return told.stdout


@contextmanager
def beside(*words: str | Path) -> Iterator[None]:
    """A program that runs meanwhile."""
    process = subprocess.Popen([str(word) for word in words], env=surroundings())
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


def measured(agents: Path, model: Path, folder: Path) -> tuple[float, float]:
    """The accuracy of the agent with the tool, and without."""
    port = free_port()
    with beside(*STRETTO, "gateway", model, "--port", str(port), "--folder", folder):
        ready = time.monotonic() + 60
        while time.monotonic() < ready:
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        told = called(agents, EXAMPLES / "calculator.py", "measure", f"http://127.0.0.1:{port}")
    right = [int(one) / int(all_) for one, all_ in re.findall(r"(\d+) of (\d+) right", told)]
    return right[0], right[1]


@pytest.mark.timeout(SECONDS)
def test_a_small_model_learns_to_use_the_calculator(agents: Path, tmp_path: Path) -> None:
    made, run, port = tmp_path / "calculator", tmp_path / "run", free_port()
    called(sys.executable, EXAMPLES / "calculator_model.py", made)
    own = [f"model.path={made / 'policy'}", f"task.file={made / 'questions.jsonl'}", f"gateway.port={port}"]
    with beside(agents, EXAMPLES / "calculator.py", "serve", f"http://127.0.0.1:{port}"):
        called(*STRETTO, "train", ROOT / "recipes" / "calculator_agent.toml", "--run-dir", run, *own)
    found = inspect_run(run)
    assert found.initial_accuracy is not None
    assert found.initial_accuracy < 0.5
    assert found.final_accuracy is not None
    assert found.final_accuracy >= 0.9
    newest = sorted((run / "policy").glob("v*"))[-1]
    with_tool, without = measured(agents, newest, tmp_path / "sessions")
    assert with_tool >= 0.9
    assert without < 0.1
