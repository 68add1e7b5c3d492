"""Does recipes/code.toml learn? A small model writes programs, which are scored by running them in the sandbox.

    python -m benchmarks.programs            two seeds, about five minutes each
    python -m benchmarks.programs --seeds 7 --steps 20

A row per seed: held-out pass rate before and after the reinforcement, its seconds (without the supervised warm start),
and the level of the sandbox. Goal: from 0.3 or more to 0.7 within ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import Table, save
from benchmarks.runs import RECIPE, train

RECIPE_OF_CODE = RECIPE.with_name("code.toml")
GOAL = {"from": 0.3, "to": 0.7, "seconds": 600.0}


def learnt(seed: int, extra: Sequence[str]) -> dict[str, Any]:
    """Run the recipe once with a seed."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="stretto-programs-") as folder:
        path = Path(folder) / "run"
        run = train([f"seed={seed}", *extra], RECIPE_OF_CODE, keep=path)
        sandbox = msgspec.json.decode((path / "rewards.json").read_bytes())
    seen = run.inspection
    return {
        "seed": seed,
        "initial_pass_rate": seen.initial_accuracy,
        "final_pass_rate": seen.final_accuracy,
        "rl_seconds": round(seen.rl_seconds, 1),
        "whole_seconds": round(time.perf_counter() - began, 1),
        "programs": seen.trajectories.trained,
        "busy": seen.busy,
        "sandbox": str(sandbox.get("sandbox", sandbox)),
    }


def measure(seeds: Sequence[int], extra: Sequence[str]) -> dict[str, Any]:
    """Run the unchanged recipe with one seed after the other."""
    rows = []
    table = Table("seed", "held-out pass rate", "RL seconds", "all seconds", "programs", "sandbox")
    for seed in seeds:
        rows.append(row := learnt(seed, extra))
        rates = f"{row['initial_pass_rate']:.3f} → {row['final_pass_rate']:.3f}"
        table.add(seed, rates, row["rl_seconds"], row["whole_seconds"], row["programs"], row["sandbox"][:32])
        table.show_last()
    return {"goal": GOAL, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, help="fewer than the recipe's: to try it; nothing is saved then")
    words = parser.parse_args()
    results = measure(
        words.seeds, [] if words.steps is None else [f"trainer.steps={words.steps}", "warm_start.steps=60"]
    )
    if words.steps is None:
        save("programs", results)


if __name__ == "__main__":
    main()
