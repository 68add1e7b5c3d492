"""``stretto score``: judge the completions of a file as a run does, one command per reward."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from stretto_app.cli.group import Commands

score = typer.Typer(
    name="score", help="Judge the completions of a file as a run does.", cls=Commands, no_args_is_help=True
)

CompletionFile = Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="One JSON object a line.")]
LevelName = Literal["A", "B", "C", "D"]
Workers = Annotated[int, typer.Option(min=1, max=256, help="Reward workers.")]


@score.command("math")
def score_math(
    file: CompletionFile,
    workers: Workers = 2,
    timeout: Annotated[float, typer.Option(min=0.01, max=3600, help="Seconds for one completion.")] = 1.0,
) -> None:
    """Judge final answers in mathematics: each line has `gold` and `completion`, and is printed with `verdict`,
    `seconds` and `reason`."""
    from stretto.rewards.config import RewardsConfig
    from stretto_app.extensions.commands.score import print_scored_answers

    print_scored_answers(file, RewardsConfig(function="math", workers=workers, timeout=timeout))


@score.command("code")
def score_code(
    file: CompletionFile,
    workers: Workers = 2,
    seconds: Annotated[float, typer.Option(min=0.01, max=600, help="Seconds for one test.")] = 2.0,
    completion_seconds: Annotated[
        float, typer.Option(min=0.01, max=3600, help="Seconds for all tests of a completion.")
    ] = 10.0,
    memory: Annotated[int, typer.Option(min=64, max=1 << 20, help="MiB of memory for a program.")] = 512,
    warm: Annotated[
        bool, typer.Option("--warm/--cold", help="Fork programs in a sandbox per worker, or start a sandbox for each.")
    ] = True,
    lowest_level: Annotated[LevelName, typer.Option(help="Weakest level of sandbox to accept.")] = "D",
    unsafe: Annotated[bool, typer.Option("--unsafe", help="Accept level E, which has no protection.")] = False,
) -> None:
    """Run programs against tests: each line has `completion` and `tests`, and is printed with `verdict`, `passed`,
    `seconds` and `level`."""
    from stretto_app.extensions.commands.score import print_scored_programs
    from stretto_verify.sandbox.config import SandboxConfig

    config = SandboxConfig(
        seconds=min(seconds, completion_seconds),
        completion_seconds=completion_seconds,
        memory_mib=memory,
        warm=warm,
        lowest_level=lowest_level,
        unsafe=unsafe,
    )
    print_scored_programs(file, config, workers)
