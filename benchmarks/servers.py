"""Whole runs of recipes/arithmetic.toml whose engine is a real vLLM or SGLang server.

    python -m benchmarks.servers learns --kinds vllm --kills 10    does it learn although its server is killed?
    python -m benchmarks.servers dtypes                            the effect of bfloat16 on log-probabilities

*learns*: the server's main process and its workers are killed in turns, each time while it samples. After the run the
checker checks its laws, and transformers recomputes the log-probability of every exported token under its version.
*dtypes*: `behavior_logprob_error` of the native engine, vLLM and SGLang, in float32 and bfloat16.

The head dimension is 32, since vLLM's CPU attention does not support 16. `benchmarks/peers/environment.py` builds the
environments of the servers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.peers.environment import Environment
from benchmarks.report import Table, save
from benchmarks.runs import RECIPE, train
from stretto.processes.tree import children, descendants
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import read_metrics
from stretto_report.audit.check import check_run
from stretto_report.reading.inspection import inspect_run

HEADS = ("model.build.head_dim=32",)
TOLERANCE = 1e-4  # nats
ROWS = 64  # completions that are scored together
GUARD, TRACKER = "stretto_servers.guard", "resource_tracker"
COMMAND = (sys.executable, "-m", "stretto_app.cli.main")
_LOOK_SECONDS = 0.25
_PATIENCE_SECONDS = 900.0  # between two steps: a server that starts on a busy machine


# ── learning, with kills ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Kill:
    """One kill: its victim, the step after which it came, and the seconds until the next step."""

    killed: str
    step: int
    seconds: float


class Killer:
    """Kills the server of a running run."""

    def __init__(self, run_dir: Path, process: subprocess.Popen[bytes]) -> None:
        self._run_dir, self._process = run_dir, process
        self.loads: list[float] = []

    def play(self, kills: int, steps: int) -> list[Kill]:
        """Kill the server's main process and one of its workers in turns, evenly over the run; then wait for its
        end."""
        found = []
        for number in range(kills):
            self._await_step((number + 1) * steps // (kills + 1))
            killed, pid = victim(self._process.pid, worker=number % 2 == 1)
            done, since = self._steps(), time.monotonic()
            os.kill(pid, signal.SIGKILL)
            self._await_restarts(number + 1)
            self._await_step(self._steps() + 1)
            found.append(Kill(killed, done, round(time.monotonic() - since, 1)))
            print(f"  {found[-1]}", flush=True)
        while self._process.poll() is None:
            self._look()
        return found

    def _await_step(self, step: int) -> None:
        since, before = time.monotonic(), self._steps()
        while (done := self._steps()) < step:
            if done > before:
                since, before = time.monotonic(), done
            if self._process.poll() is not None or time.monotonic() - since > _PATIENCE_SECONDS:
                raise RuntimeError(f"step {step} has not come")
            self._look()

    def _await_restarts(self, count: int) -> None:
        log, since = self._run_dir / "log.txt", time.monotonic()
        while log.read_text().count("a new one is started") < count:
            if time.monotonic() - since > _PATIENCE_SECONDS:
                raise RuntimeError("the killed server was not noticed")
            self._look()

    def _look(self) -> None:
        self.loads.append(os.getloadavg()[0])
        time.sleep(_LOOK_SECONDS)

    def _steps(self) -> int:
        with suppress(FileNotFoundError):
            return (self._run_dir / "metrics.jsonl").read_bytes().count(b'"kind":"step"')
        return 0


def victim(run: int, *, worker: bool) -> tuple[str, int]:
    """The main process of the run's server, or the first worker that it started."""
    (guard,) = (pid for pid in descendants(run) if GUARD in command_line(pid))
    (main,) = children(guard)
    if not worker:
        return "main process", main
    return "worker", min(pid for pid in descendants(main) if TRACKER not in command_line(pid))


def command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def learns(kind: str, kills: int, steps: int, settings: Sequence[str], folder: Path) -> dict[str, Any]:
    """Do one run, from an untrained model to its final accuracy, and check its records."""
    run_dir = folder / kind
    words = [*HEADS, f"engine.kind={kind}", f"engine.python={Environment(kind).ensure()}", f"trainer.steps={steps}"]
    words += ["trainer.keep_versions=all", "deadlines.engine_restarts=100", *settings]
    began = time.monotonic()
    with (folder / f"{kind}.out").open("wb") as out:
        command = [*COMMAND, "train", str(RECIPE), *words, "--run-dir", str(run_dir)]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        killer = Killer(run_dir, process)
        try:
            hit = killer.play(kills, steps)
        finally:
            process.terminate()
            process.wait(120)
    if process.returncode:
        raise RuntimeError((folder / f"{kind}.out").read_text()[-2000:])
    seconds = time.monotonic() - began
    inspection, findings = inspect_run(run_dir), check_run(run_dir)
    _, evaluations = read_metrics(RunFolder.open(run_dir).metrics)
    return {
        "kind": kind,
        "settings": words[len(HEADS) + 2 :],
        "initial_accuracy": inspection.initial_accuracy,
        "final_accuracy": inspection.final_accuracy,
        "on_the_way": [(line.version, line.accuracy) for line in evaluations],
        "steps": inspection.steps,
        "seconds": round(seconds, 1),
        "rl_seconds": round(inspection.rl_seconds, 1),
        "generated": inspection.tokens.generated,
        "generated_per_second": round(inspection.tokens.generated / inspection.rl_seconds, 1),
        "interrupted": inspection.interrupted,
        "busy": inspection.busy,
        "kills": hit,
        "laws_broken": [law for law, broken in findings.breaches.items() if broken],
        "balance": findings.balance,
        "staleness_max": inspection.staleness.max,
        "rescored": rescored(run_dir, exported_rows(run_dir)),
        "load_average": {
            "mean": round(statistics.mean(killer.loads), 1),
            "largest": round(max(killer.loads), 1),
        },
    }


# ── every token, by its version's weights ────────────────────────────────────────────────────────


def exported_rows(run_dir: Path) -> list[dict[str, Any]]:
    """All rows that `stretto export` writes for a run."""
    exported = run_dir.with_name(f"{run_dir.name}.jsonl")
    subprocess.run([*COMMAND, "export", str(run_dir), str(exported)], check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in exported.read_text().splitlines()]


def rescored(run_dir: Path, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare the log-probability of every token with the one that transformers computes in float64 from the weights of
    its version.

    Any error is therefore the server's. Returns the numbers of tokens and of completions with several versions, the
    largest error in nats, and the number of tokens beyond the tolerance.
    """
    by_version = defaultdict[int, list[dict[str, Any]]](list)
    for row in rows:
        for version in set(row["versions"]):
            by_version[version].append(row)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(RunFolder(run_dir).policy(0), dtype=torch.float64).eval()
    tokens = beyond = 0
    largest = 0.0
    for version, found in sorted(by_version.items()):
        missing = model.load_state_dict(
            load_file(RunFolder(run_dir).policy(version) / "model.safetensors"), strict=False
        )
        assert not missing.unexpected_keys
        assert set(missing.missing_keys) <= {"lm_head.weight"}, "but for the head that is the embedding"
        found.sort(key=lambda row: len(row["prompt_token_ids"]) + len(row["token_ids"]))
        for first in range(0, len(found), ROWS):
            errors = _errors(model, version, found[first : first + ROWS])
            tokens += len(errors)
            beyond += int((errors > TOLERANCE).sum())
            largest = max(largest, float(errors.max()))
    assert tokens == sum(len(row["token_ids"]) for row in rows)
    several = sum(len(set(row["versions"])) > 1 for row in rows)
    return {
        "tokens": tokens,
        "versions": len(by_version),
        "completions": len(rows),
        "completions_of_several_versions": several,
        "largest_error": largest,
        "beyond_tolerance": beyond,
        "tolerance": TOLERANCE,
    }


def _errors(model: Any, version: int, rows: Sequence[dict[str, Any]]) -> torch.Tensor:
    """Errors of all tokens of a version. Rows are padded at their end, which does not affect the tokens before."""
    whole = [torch.tensor(row["prompt_token_ids"] + row["token_ids"]) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)
    with torch.no_grad():
        logprobs = model(ids).logits.log_softmax(-1)
    expected, logged = [], []
    for place, row in enumerate(rows):
        first = len(row["prompt_token_ids"]) - 1
        for at, (token, stamp) in enumerate(zip(row["token_ids"], row["versions"], strict=True)):
            if stamp == version:
                expected.append(logprobs[place, first + at, token])
                logged.append(row["behavior_logprobs"][at])
    return (torch.stack(expected) - torch.tensor(logged, dtype=torch.float64)).abs()


# ── number formats ───────────────────────────────────────────────────────────────────────────────


def dtypes(steps: int, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Difference between the log-probabilities of the engine and of the trainer, which computes in float32."""
    table, rows = Table("engine", "dtype", "error mean", "error largest", "tokens masked"), []
    for kind in kinds:
        python = [] if kind == "native" else [f"engine.python={Environment(kind).ensure()}"]
        for dtype in ("float32", "bfloat16"):
            engine = [f"engine.kind={kind}", *python, f"engine.dtype={dtype}"]
            run = train([*HEADS, "warm_start.threads=1", *engine, f"trainer.steps={steps}", "evaluation.prompts=16"])
            told = [step.trainer for step in run.steps]
            row = {
                "kind": kind,
                "dtype": dtype,
                "error_mean": statistics.mean(_known(told, "behavior_logprob_error")),
                "error_largest": max(_known(told, "behavior_logprob_error_max")),
                "capped": statistics.mean(_known(told, "capped_fraction")),
                "steps": len(run.steps),
                "load_average": round(os.getloadavg()[0], 1),
            }
            rows.append(row)
            table.add(kind, dtype, f"{row['error_mean']:.2g}", f"{row['error_largest']:.2g}", f"{row['capped']:.2%}")
            table.show_last()
    return rows


def _known(told: Sequence[Mapping[str, float | None]], name: str) -> list[float]:
    return [value for step in told if (value := step.get(name)) is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("learns", "dtypes"))
    parser.add_argument("--kinds", nargs="+", default=["vllm", "sglang"])
    parser.add_argument("--kills", type=int, default=10, help="of the server, evenly over the run")
    parser.add_argument("--steps", type=int, help="training steps (default: 1500; dtypes: 60)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a setting of the run")
    parser.add_argument("--keep", type=Path, help="folder of the runs (default: a temporary one)")
    words = parser.parse_args()
    if words.part == "dtypes":
        save("servers-dtypes", dtypes(words.steps or 60, ["native", *words.kinds]))
        return
    for kind in words.kinds:
        with tempfile.TemporaryDirectory(prefix="st-") as temporary:
            folder = words.keep or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            found = learns(kind, words.kills, words.steps or 1500, words.set, folder)
        print(json.dumps({key: value for key, value in found.items() if key != "on_the_way"}, default=str, indent=1))
        save(f"servers-learn-{kind}", found)


if __name__ == "__main__":
    main()
