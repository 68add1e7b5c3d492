"""Cost of making a synchronous run repeatable bit for bit, with recipes/arithmetic.toml at max_staleness = 0.

    python -m benchmarks.rounds [--steps 60] [--repeats 3]

    one group at a time     rounds of one group (rollout.max_in_flight = 1)
    rounds                  all groups of a batch begin and end together (what synchronous runs do)
    shared                  groups are computed with whatever others there are: not repeatable

The three ways run one after the other, repeatedly; the best run of each counts.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.report import Table, save
from benchmarks.runs import train

WAYS = {
    "one group at a time": ("engine.batching=rounds", "rollout.max_in_flight=1"),
    "rounds": ("engine.batching=rounds",),
    "shared": ("engine.batching=shared",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    words = parser.parse_args()
    common = ("rollout.max_staleness=0", f"trainer.steps={words.steps}", "evaluation.prompts=32")
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(words.repeats):
        for way, settings in WAYS.items():
            run = train([*common, *settings])
            seconds, tokens = run.inspection.rl_seconds, run.inspection.tokens.generated
            found[way].append({"rl_seconds": round(seconds, 2), "generated_per_second": round(tokens / seconds)})
    best = {way: min(runs, key=lambda run: run["rl_seconds"]) for way, runs in found.items()}
    table = Table("way", "seconds", "tokens/s", "times as fast as one group at a time")
    for way, fastest in best.items():
        ratio = best["one group at a time"]["rl_seconds"] / fastest["rl_seconds"]
        table.add(way, fastest["rl_seconds"], fastest["generated_per_second"], f"{ratio:.2f}")
    table.show()
    save("rounds", {"steps": words.steps, "best": best, "runs": found})


if __name__ == "__main__":
    main()
