"""The studies that come with stretto; saves their results with the machine.

    python -m benchmarks.studies staleness [--out studies/staleness] [--seeds 5] [--steps N] [--jobs N]

An interrupted study continues when it is started again; its result holds the finished runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.report import save
from stretto_app.study.command import perform
from stretto_app.study.summary import table


def positive(word: str) -> int:
    """Convert a word of the command line to a whole number. Raises ValueError if it is none, or less than 1."""
    if (number := int(word)) < 1:
        raise ValueError(word)
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", help="a file, or the name of a study that comes with stretto")
    parser.add_argument("--out", type=Path)
    for count in ("--seeds", "--steps", "--jobs"):
        parser.add_argument(count, type=positive)
    words = parser.parse_args()
    result, code = perform(words.study, words.out, words.seeds, words.steps, words.jobs)
    print(f"\nfor docs/how_to/foresight.md:\n\n{table(result)}")
    if any(cell.runs for cell in result.cells):
        save(f"study-{result.study}", result)
    sys.exit(code)


if __name__ == "__main__":
    main()
