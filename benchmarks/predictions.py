"""Predictions of the planner beside runs, blind: every prediction is written before the first run is started.

    python -m benchmarks.predictions calibrate      this machine, into benchmarks/data/machine.json; two minutes
    python -m benchmarks.predictions predict        every setting, into benchmarks/data/predictions.json
    python -m benchmarks.predictions run            every setting, and the comparison into benchmarks/results/

The recipe is `recipes/arithmetic.toml` with a short warm start; its demonstrations are as long as its questions ask,
and the learning rate is so small that lengths stay as they are. The load is the machine's average of the last minute
before each run: what else works there slows a run down, and no prediction knows of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import Table, save
from benchmarks.runs import RECIPE, Run, train
from stretto.launch.commands.calibrate import calibrate_machine
from stretto.launch.commands.plan import PlanChoice, plan_recipe

DATA = Path(__file__).resolve().parent / "data"
MACHINE, PREDICTED = DATA / "machine.json", DATA / "predictions.json"
BASE = (
    "trainer.steps=150",
    "trainer.learning_rate=1e-9",
    "trainer.checkpoint_every=1000",
    "warm_start.steps=500",
    "task.demonstration_decay=0.7",
    "task.demonstrations=4000",
    "task.prompts=4000",
    "evaluation.every=1000",
    "evaluation.prompts=16",
)
WIDER = (
    "model.build.hidden_size=128",
    "model.build.layers=3",
    "model.build.heads=4",
    "model.build.head_dim=32",
    "model.build.intermediate_size=384",
    "trainer.steps=80",
)
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "as the recipe": (),
    "synchronous": ("rollout.max_staleness=0", "rollout.max_in_flight=8"),
    "max_staleness 1": ("rollout.max_staleness=1",),
    "max_staleness 4": ("rollout.max_staleness=4", "rollout.max_in_flight=24"),
    "max_staleness 8": ("rollout.max_staleness=8", "rollout.max_in_flight=48", "engine.slots=384"),
    "two engines": ("engine.count=2", "rollout.max_in_flight=24"),
    "the cache is kept": ("engine.on_update=keep",),
    "load_interval 0.25": ("engine.load_interval=0.25", "rollout.max_staleness=4"),
    "batches of 16 groups": ("rollout.batch_size=16", "rollout.max_in_flight=24", "trainer.steps=80"),
    "groups of 16": ("rollout.group_size=16", "rollout.batch_size=4", "rollout.max_in_flight=6"),
    "short completions": ("sampling.max_tokens=16",),
    "long chains": ("task.operands_min=8", "trainer.steps=80"),
    "two minibatches": ("trainer.minibatches=2",),
    "wider": WIDER,
    "wider, synchronous": (*WIDER, "rollout.max_staleness=0", "rollout.max_in_flight=8"),
    "wider, max_staleness 4": (*WIDER, "rollout.max_staleness=4", "rollout.max_in_flight=24"),
}


def words(name: str) -> list[str]:
    """The overrides of a setting."""
    return [*BASE, *SETTINGS[name]]


def predict() -> None:
    """Write the predictions of all settings."""
    choice = PlanChoice(str(MACHINE))
    found = {}
    for name in SETTINGS:
        layout = plan_recipe(RECIPE, words(name), choice, lambda text: None).layouts[0]
        found[name] = msgspec.to_builtins(layout)
        print(f"{name}: {layout.step_seconds:.4f} s")
    PREDICTED.write_text(json.dumps(found, indent=1) + "\n")


def measured(run: Run) -> dict[str, Any]:
    """What a run came to, under the names of a prediction."""
    inspection = run.inspection
    return {
        "step_seconds": run.steps[-1].rl_seconds / len(run.steps),
        "busy": dict(inspection.busy),
        "staleness_mean": inspection.staleness.mean,
        "length_mean": statistics.fmean(step.length_mean for step in run.steps),
    }


def compared(predicted: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """The errors: of the step time as a share of what was measured, of busy shares and staleness as differences."""
    roles = sorted(predicted["busy"].keys() & found["busy"].keys())
    return {
        "step": predicted["step_seconds"] / found["step_seconds"] - 1,
        "busy": max(abs(predicted["busy"][role] - found["busy"][role]) for role in roles),
        "staleness": predicted["staleness"]["mean"] - found["staleness_mean"],
    }


def run_all(names: Sequence[str]) -> None:
    """Run the settings and compare."""
    predictions = json.loads(PREDICTED.read_text())
    rows: dict[str, Any] = {}
    table = Table("setting", "load", "predicted s", "measured s", "error", "busy off by", "staleness off by")
    for name in names:
        load = os.getloadavg()[0]
        found = measured(train(words(name)))
        errors = compared(predictions[name], found)
        rows[name] = {"load": load, "predicted": predictions[name], "measured": found, "errors": errors}
        times = (f"{predictions[name]['step_seconds']:.4f}", f"{found['step_seconds']:.4f}", f"{errors['step']:+.1%}")
        table.add(name, f"{load:.1f}", *times, f"{errors['busy']:.2f}", f"{errors['staleness']:+.2f}")
        table.show_last()
        save("predictions", {"machine": json.loads(MACHINE.read_text()), "summary": summary(rows), "rows": rows})


def summary(rows: Mapping[str, Any]) -> dict[str, float]:
    """The middle and the worst of all settings."""
    errors = [row["errors"] for row in rows.values()]
    steps = [abs(one["step"]) for one in errors]
    return {
        "settings": len(errors),
        "step_median": statistics.median(steps),
        "step_worst": max(steps),
        "busy_median": statistics.median(one["busy"] for one in errors),
        "busy_worst": max(one["busy"] for one in errors),
        "staleness_median": statistics.median(abs(one["staleness"]) for one in errors),
        "staleness_worst": max(abs(one["staleness"]) for one in errors),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("calibrate", "predict", "run"))
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    asked = parser.parse_args()
    if asked.part == "calibrate":
        calibrate_machine(MACHINE, print)
    elif asked.part == "predict":
        predict()
    else:
        run_all(asked.settings)


if __name__ == "__main__":
    main()
