"""``stretto score``: judge the completions of a file as a run would, one command per reward."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

score = typer.Typer(name="score", help="Judge the completions of a file as a run would.", no_args_is_help=True)

AnswerFile = Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="One JSON object a line.")]
LevelName = Literal["A", "B", "C", "D"]
Workers = Annotated[int, typer.Option(min=1, max=256, help="Processes that judge.")]


@score.command("math")
def score_math(
    file: AnswerFile,
    workers: Workers = 2,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds one completion may take.")] = 1.0,
) -> None:
    """Judge final answers of mathematics: lines with `gold` and `completion` come back with `verdict` and `seconds`."""
    from stretto.rewards.config import RewardsConfig
    from stretto.rewards.files.math import print_scored

    print_scored(file, RewardsConfig(function="math", workers=workers, timeout=timeout))


@score.command("code")
def score_code(
    file: AnswerFile,
    workers: Workers = 2,
    seconds: Annotated[float, typer.Option(min=0.01, help="Seconds one test may take.")] = 2.0,
    completion_seconds: Annotated[float, typer.Option(min=0.01, help="Seconds all its tests may take.")] = 10.0,
    memory: Annotated[int, typer.Option(min=64, help="MiB of memory that a program may use.")] = 512,
    warm: Annotated[bool, typer.Option("--warm/--cold", help="Fork programs, or start a sandbox for each.")] = True,
    lowest_level: Annotated[LevelName, typer.Option(help="Refuse sandboxes that are weaker than this.")] = "D",
    unsafe: Annotated[bool, typer.Option("--unsafe", help="Allow level E: no protection at all.")] = False,
) -> None:
    """Run programs against tests: lines with `completion` and `tests` come back with `verdict`, `passed`, `seconds` and
    `level`."""
    from stretto.rewards.files.code import print_scored
    from stretto.sandbox.config import SandboxConfig

    config = SandboxConfig(
        seconds=min(seconds, completion_seconds),
        completion_seconds=completion_seconds,
        memory_mib=memory,
        warm=warm,
        lowest_level=lowest_level,
        unsafe=unsafe,
    )
    print_scored(file, config, workers)
