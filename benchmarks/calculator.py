"""Does an agent learn to use its tool? Runs recipes/calculator_agent.toml with an unchanged program of openai-agents
that talks to the gateway.

    python -m benchmarks.calculator

The model is built first. After the run, the agent answers random questions once with the tool and once without.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.peers.environment import Environment
from benchmarks.report import Table, save
from stretto_report.audit.check import check_run
from stretto_report.reading.inspection import inspect_run

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "agents"
STRETTO = (sys.executable, "-m", "stretto_app.cli.main")
SECONDS = 900.0  # for each of the programs


@dataclass(frozen=True)
class Learnt:
    """Result of one run: held-out accuracies before and after it, and the agent's accuracies with and without the
    tool."""

    initial_accuracy: float
    final_accuracy: float
    with_tool: float
    without_tool: float
    steps: int
    rl_seconds: float
    seconds: float  # of the whole, the making of the model included
    laws_kept: bool
    load_average: float


def learn(agents: Path, folder: Path) -> Learnt:
    """Build the model, train it, and measure it, all in `folder`. `agents`: Python interpreter with openai-agents.

    Raises:
        RuntimeError: a program failed; the message has the end of its output.
    """
    began, port = time.monotonic(), _free_port()
    made, run = folder / "calculator", folder / "run"
    _called(sys.executable, EXAMPLES / "calculator_model.py", made)
    own = (f"model.path={made / 'policy'}", f"task.file={made / 'questions.jsonl'}", f"gateway.port={port}")
    with _beside(agents, EXAMPLES / "calculator.py", "serve", f"http://127.0.0.1:{port}"):
        _called(*STRETTO, "train", ROOT / "recipes" / "calculator_agent.toml", "--run-dir", run, *own)
    found, newest = inspect_run(run), max((run / "policy").glob("v*"))
    with_tool, without = _measured(agents, newest, folder / "sessions")
    assert found.initial_accuracy is not None
    assert found.final_accuracy is not None
    return Learnt(
        initial_accuracy=found.initial_accuracy,
        final_accuracy=found.final_accuracy,
        with_tool=with_tool,
        without_tool=without,
        steps=found.steps,
        rl_seconds=round(found.rl_seconds, 1),
        seconds=round(time.monotonic() - began, 1),
        laws_kept=check_run(run).kept,
        load_average=round(os.getloadavg()[2], 1),
    )


def _measured(agents: Path, model: Path, folder: Path) -> tuple[float, float]:
    """Accuracy of the agent with the tool, and without."""
    port = _free_port()
    with _beside(*STRETTO, "gateway", model, "--port", str(port), "--folder", folder):
        _wait_for(port)
        told = _called(agents, EXAMPLES / "calculator.py", "measure", f"http://127.0.0.1:{port}")
    with_tool, without = (int(one) / int(all_) for one, all_ in re.findall(r"(\d+) of (\d+) right", told))
    return with_tool, without


def _wait_for(port: int) -> None:
    ready = time.monotonic() + 60
    while time.monotonic() < ready:
        with socket.socket() as asked:
            if asked.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError("the gateway did not start")


def _surroundings() -> Mapping[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _called(*words: str | Path) -> str:
    """Run a program, which must succeed; return its output."""
    told = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env=_surroundings(),
    )
    if told.returncode:
        raise RuntimeError((told.stdout + told.stderr)[-3000:])
    return told.stdout


@contextmanager
def _beside(*words: str | Path) -> Iterator[None]:
    """Run a program during the block (context manager)."""
    process = subprocess.Popen([str(word) for word in words], env=_surroundings())
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="stretto-calculator-") as folder:
        learnt = learn(Environment("agents").ensure(), Path(folder))
    table = Table("what", "accuracy")
    table.add("held out, before", f"{learnt.initial_accuracy:.3f}")
    table.add("held out, after", f"{learnt.final_accuracy:.3f}")
    table.add("questions of its own, with the tool", f"{learnt.with_tool:.3f}")
    table.add("questions of its own, without it", f"{learnt.without_tool:.3f}")
    table.show()
    save("calculator", asdict(learnt))


if __name__ == "__main__":
    main()
