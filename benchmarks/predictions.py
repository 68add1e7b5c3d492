"""Predictions of the planner compared with runs, blind: all predictions are written before the first run starts.

    python -m benchmarks.predictions calibrate      measures this machine: benchmarks/data/machine.json; two minutes
    python -m benchmarks.predictions predict        predicts every setting: benchmarks/data/predictions.json
    python -m benchmarks.predictions run            runs every setting, and compares: benchmarks/results/
    python -m benchmarks.predictions all            all three; after an interruption it does what is missing

A run that is already in the results beside the current prediction is not repeated. A machine that is busy with other
work is refused, because the predictions are for an idle one; `--loaded` allows it.

The recipe is `recipes/arithmetic.toml` with a short warm start, and the learning rate is so small that lengths do not
change. The lengths of a policy's completions come from a short synchronous run of it (`PROBES`), made before the
predictions; no other number is taken from a run. The load is the machine's average over the minute before each run. It
includes the earlier runs; whatever exceeds them is other work, which no prediction knows of.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import RESULTS, Table, save
from benchmarks.runs import RECIPE, Run, train
from stretto_app.extensions.commands.calibrate import calibrate_machine
from stretto_app.extensions.commands.machine_choice import PlanChoice
from stretto_app.extensions.commands.plan import plan_recipe
from stretto_foresight.planner.machine import machine_of
from stretto_report.dashboard.prediction import predicted_beside_measured, run_digest

_QUIET = 0.5  # load average of a machine that works for nobody else
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
IN_TURN = ("rollout.max_staleness=0", "rollout.max_in_flight=8")
#: The policies whose lengths are measured, each by the settings that have it.
PROBES: Mapping[str, tuple[str, ...]] = {
    "short completions": ("short completions",),
    "long chains": ("long chains",),
    "wider": ("wider", "wider, synchronous", "wider, max_staleness 4"),
    "as the recipe": (),  # all others
}


def words(name: str) -> list[str]:
    """Overrides of the recipe for a setting."""
    return [*BASE, *SETTINGS[name]]


def probe_of(name: str) -> str:
    """Policy whose completion lengths a setting uses."""
    return next((probe for probe, settings in PROBES.items() if name in settings), "as the recipe")


def predict() -> None:
    """Write predictions of all settings."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="stretto-lengths-") as folder:
        for name in PROBES:
            train([*words(name), *IN_TURN], keep=Path(folder) / name)
            print(f"measured the lengths of {name!r}")
        for name in SETTINGS:
            choice = PlanChoice(str(MACHINE), lengths=str(Path(folder) / probe_of(name)))
            layout = plan_recipe(RECIPE, words(name), choice, lambda text: None).layouts[0]
            found[name] = {key: value for key, value in msgspec.to_builtins(layout).items() if key != "timeline"}
            print(f"{name}: {layout.step_seconds:.4f} s")
    PREDICTED.write_text(json.dumps(found, indent=1) + "\n")


def measured(run: Run) -> dict[str, Any]:
    """Results of a run, under the names that predictions use."""
    inspection = run.inspection
    return {
        "step_seconds": run.steps[-1].rl_seconds / len(run.steps),
        "busy": dict(inspection.busy),
        "staleness_mean": inspection.staleness.mean,
        "length_mean": statistics.fmean(step.length_mean for step in run.steps),
    }


def compared(predicted: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Errors of a prediction: for the step time relative to the measured one, for busy shares and staleness as
    differences."""
    roles = sorted(predicted["busy"].keys() & found["busy"].keys())
    return {
        "step": predicted["step_seconds"] / found["step_seconds"] - 1,
        "busy": max(abs(predicted["busy"][role] - found["busy"][role]) for role in roles),
        "staleness": predicted["staleness"]["mean"] - found["staleness_mean"],
    }


def known_rows(predictions: Mapping[str, Any], results: Path = RESULTS / "predictions.json") -> dict[str, Any]:
    """Rows on file whose runs were compared with exactly these predictions."""
    rows = json.loads(results.read_text())["results"]["rows"] if results.is_file() else {}
    return {name: row for name, row in rows.items() if row["predicted"] == predictions.get(name)}


def run_all(names: Sequence[str]) -> None:
    """Run the missing settings, and compare."""
    predictions = json.loads(PREDICTED.read_text())
    rows = known_rows(predictions)
    busy, by = ("engine busy", "trainer busy"), ("busy off by", "staleness off by")
    table = Table("setting", "load", "predicted s", "measured s", "ratio", *busy, *by, "most off")
    for name in names:
        if name not in rows:
            rows[name] = _row(name, predictions[name])
        row = rows[name]
        seconds = [row[side]["step_seconds"] for side in ("predicted", "measured")]
        shares = [
            " / ".join(f"{row[side]['busy'][role]:.2f}" for side in ("predicted", "measured"))
            for role in ("engine-0", "trainer")
        ]
        off = (f"{row['errors']['busy']:.2f}", f"{row['errors']['staleness']:+.2f}", row["compared"]["most_off"])
        table.add(
            name, f"{row['load']:.1f}", *map("{:.4f}".format, seconds), f"{seconds[0] / seconds[1]:.3f}", *shares, *off
        )
        table.show_last()
        save("predictions", {"machine": json.loads(MACHINE.read_text()), "summary": summary(rows), "rows": rows})
    for key, value in summary(rows).items():
        print(f"{key}: {value:.3g}")


def _row(name: str, prediction: Mapping[str, Any]) -> dict[str, Any]:
    """Run a setting and compare it with its prediction, also term by term."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="stretto-prediction-") as folder:
        run, file = Path(folder) / "run", Path(folder) / "prediction.json"
        found = measured(train(words(name), keep=run))
        saved = {"machine": machine_of(str(MACHINE)).name, "recipe": run_digest(run), "layouts": [prediction]}
        file.write_text(json.dumps(saved))
        beside = msgspec.to_builtins(predicted_beside_measured(run, file))
    errors = compared(prediction, found)
    return {"load": load, "predicted": prediction, "measured": found, "errors": errors, "compared": beside}


def refuse_load(load: float, loaded: bool) -> None:
    """Raise SystemExit if other work keeps more than half a core of the machine busy (`load`, in cores), unless that is
    allowed (`loaded`)."""
    if load > _QUIET and not loaded:
        raise SystemExit(
            f"the machine works for others (load {load:.1f}): wait until it is below {_QUIET}, or --loaded"
        )


def summary(rows: Mapping[str, Any]) -> dict[str, float]:
    """Medians and maxima of the errors over all settings."""
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
    parser.add_argument("part", choices=("calibrate", "predict", "run", "all"))
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--loaded", action="store_true", help="measure on a machine that works for others")
    asked = parser.parse_args()
    there = len(known_rows(json.loads(PREDICTED.read_text()))) if PREDICTED.is_file() else 0
    goes_on = asked.part == "all" and 0 < there < len(SETTINGS)
    if asked.part != "predict":
        refuse_load(os.getloadavg()[0], asked.loaded)
    if asked.part in ("calibrate", "all") and not goes_on:
        calibrate_machine(MACHINE, print)
    if asked.part in ("predict", "all") and not goes_on:
        predict()
    if asked.part in ("run", "all"):
        run_all(asked.settings)


if __name__ == "__main__":
    main()
