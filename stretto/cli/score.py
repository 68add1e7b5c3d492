"""``stretto score``: judge the answers of a file as a run would, one command per reward."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

score = typer.Typer(name="score", help="Judge the answers of a file as a run would.", no_args_is_help=True)

AnswerFile = Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="One JSON object a line.")]
Workers = Annotated[int, typer.Option(min=1, max=256, help="Processes that judge.")]


@score.command("math")
def score_math(
    file: AnswerFile,
    workers: Workers = 2,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds one answer may take.")] = 1.0,
) -> None:
    """Judge final answers of mathematics: lines with `gold` and `answer` come back with `verdict` and `seconds`."""
    from stretto.rewards.config import RewardsConfig
    from stretto.rewards.math_file import print_scored

    print_scored(file, RewardsConfig(function="math", workers=workers, timeout=timeout))
