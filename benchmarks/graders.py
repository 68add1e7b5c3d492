"""Verdicts on the cases of other graders' test suites.

    python -m benchmarks.graders CASES.jsonl

Each line has `gold`, `completion`, `expected`, `source` (repository:file::test) and `half`: the rules were written with
the half "seen" at hand; "unseen" was judged when they were finished. `disputed` says why stretto does not share a
suite's expectation: the counts are given with and without such cases. The cases belong to their authors and are not in
this repository; the result has their digest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.report import Table, save
from stretto_verify.math.reward import math
from stretto_verify.verdicts import Undecided

HALVES = ("seen", "unseen")
KINDS = ("as expected", "false accept", "false reject", "undecided")


def kind(case: dict[str, Any]) -> str:
    """Classify the verdict on one case."""
    try:
        right = bool(math("", case["completion"], case["gold"]))
    except Undecided:
        return "undecided"
    if right == case["expected"]:
        return "as expected"
    return "false accept" if right else "false reject"


def measure(path: Path) -> dict[str, Any]:
    """All cases of a file: counts by half, by suite, and by the reason of a dispute."""
    text = path.read_bytes()
    cases = [json.loads(line) for line in text.splitlines()]
    found = [(case, kind(case)) for case in cases]
    rows = []
    for half in HALVES:
        for disputed in (True, False):
            of_half = [pair for pair in found if pair[0]["half"] == half and (disputed or not pair[0].get("disputed"))]
            told = Counter(name for _, name in of_half)
            right = sum(case["expected"] for case, _ in of_half)
            rows.append(
                {"half": half, "with disputed": disputed, "cases": len(of_half), "right ones": right}
                | {name: told[name] for name in KINDS}
            )
    suites = Counter((case["source"].split(":")[0], case["half"]) for case in cases)
    return {
        "digest": hashlib.sha256(text).hexdigest(),
        "rows": rows,
        "suites": {name: [suites[name, half] for half in HALVES] for name in sorted({name for name, _ in suites})},
        "disputed": dict(Counter(case["disputed"] for case in cases if case.get("disputed"))),
    }


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    names = list(results["rows"][0])
    table = Table(*names)
    for row in results["rows"]:
        table.add(*[row[name] for name in names])
    table.show()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--name", default="graders", help="of the result")
    words = parser.parse_args()
    results = measure(words.cases)
    show(results)
    save(words.name, results)


if __name__ == "__main__":
    main()
