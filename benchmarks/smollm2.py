"""Does a real pretrained model learn? Runs recipes/smollm2.toml, with five evaluations before and five after it.

    python -m benchmarks.smollm2 [section.key=value ...]

Each evaluation samples the held-out questions with its own seed. The CPU seconds of all processes of the run are
measured too, because on a machine with other work its seconds say little.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.report import Table, save
from benchmarks.runs import train

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
RECIPE = RECIPES / "smollm2.toml"
SEEDS = (1, 2, 3, 4, 5)
SAMPLES = 4  # completions of each question in an evaluation


def main(overrides: Sequence[str]) -> None:
    made = subprocess.run([sys.executable, str(RECIPES / "smollm2.py")], check=True, stdout=subprocess.PIPE, text=True)
    model = made.stdout.split()[-1]
    table = Table("policy", "seed", "accuracy", "from", "to")
    before = [_evaluated(model, seed, overrides, table) for seed in SEEDS]
    with tempfile.TemporaryDirectory(prefix="stretto-smollm2-") as folder:
        began, worked = time.monotonic(), _processor_seconds()
        run = train([f"model.path={model}", *overrides], RECIPE, Path(folder) / "run")
        seconds, worked = time.monotonic() - began, _processor_seconds() - worked
        policy = f"{folder}/run/policy/v{run.inspection.version:06d}"
        after = [_evaluated(policy, seed, overrides, table) for seed in SEEDS]
    highest, lowest = max(one["ci95"][1] for one in before), min(one["ci95"][0] for one in after)
    print(f"accuracy {_mean(before):.1%} → {_mean(after):.1%}; at most {highest:.1%}, then at least {lowest:.1%}")
    save(
        "smollm2",
        {
            "recipe": RECIPE.name,
            "overrides": list(overrides),
            "before": before,
            "after": after,
            "accuracy_before": _mean(before),
            "accuracy_after": _mean(after),
            "highest_before": highest,
            "lowest_after": lowest,
            "steps": run.inspection.steps,
            "run_seconds": round(seconds, 1),
            "rl_seconds": round(run.inspection.rl_seconds, 1),
            "processor_seconds": round(worked, 1),
            "load_average": [round(load, 2) for load in os.getloadavg()],
            "trained_tokens": run.inspection.tokens.trained,
            "generated_tokens": run.inspection.tokens.generated,
            "on_the_way": [{"step": one.step, "accuracy": one.accuracy} for one in run.evaluations],
        },
    )


def _evaluated(model: str, seed: int, overrides: Sequence[str], table: Table) -> dict[str, Any]:
    """Evaluate a policy once with `stretto eval`."""
    settings = [*overrides, f"evaluation.seed={seed}", f"evaluation.samples={SAMPLES}"]
    command = [sys.executable, "-m", "stretto_app.cli.main", "eval", model, "--task", str(RECIPE), "--json", *settings]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    low, high = found["ci95"]
    table.add(Path(model).name, seed, f"{found['avg']:.3f}", f"{low:.3f}", f"{high:.3f}")
    table.show_last()
    return {"seed": seed, **{name: found[name] for name in ("avg", "ci95", "questions", "samples", "truncated")}}


def _mean(evaluations: Sequence[dict[str, Any]]) -> float:
    return round(mean(float(one["avg"]) for one in evaluations), 4)


def _processor_seconds() -> float:
    """CPU seconds of all ended child processes, and of their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main(sys.argv[1:])
