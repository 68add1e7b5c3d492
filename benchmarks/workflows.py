"""Does a policy learn in a conversation? Runs recipes/retry.toml and shows its held-out accuracy during training.

    python -m benchmarks.workflows [RUN_DIR]

If no folder of an ended run is given, a run is trained first. `first` is the accuracy of the first of two tries.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import Table, save
from benchmarks.runs import train
from stretto_report.audit.check import check_run
from stretto_report.reading.inspection import inspect_run

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "retry.toml"


def main(folder: Path) -> None:
    found, evaluations = inspect_run(folder), _evaluations(folder)
    table = Table("step", "seconds", "accuracy", "from", "to", "first try", "tries")
    for one in evaluations:
        low, high = one["ci95"]
        cells = (one["step"], f"{one['rl_seconds']:.0f}", f"{one['accuracy']:.3f}", f"{low:.3f}", f"{high:.3f}")
        table.add(*cells, f"{one['rewards']['first']:.3f}", f"{one['rewards']['tries']:.2f}")
    table.show()
    save(
        "workflows",
        {
            "recipe": RECIPE.name,
            "steps": found.steps,
            "rl_seconds": round(found.rl_seconds, 1),
            "trained_tokens": found.tokens.trained,
            "generated_tokens": found.tokens.generated,
            "interrupted": found.interrupted,
            "laws_kept": check_run(folder).kept,
            "evaluations": evaluations,
        },
    )


def _evaluations(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "rl_seconds", "accuracy", "ci95", "prompts", "rewards")
    return [{name: line[name] for name in names} for line in lines if line["kind"] == "evaluation"]


if __name__ == "__main__":
    if sys.argv[1:]:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory(prefix="stretto-workflows-") as made:
            train([], RECIPE, Path(made) / "run")
            main(Path(made) / "run")
