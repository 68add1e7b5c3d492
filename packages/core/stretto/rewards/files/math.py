"""``stretto score math``: a file of gold answers and completions, judged line by line."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import ClassVar

import msgspec

from stretto.core.records import Outcome
from stretto.rewards.config import RewardsConfig
from stretto.rewards.files.lines import Line, read_lines
from stretto.rewards.service.scoring import scored
from stretto.rewards.service.wire import ScoreItem


class MathLine(msgspec.Struct, frozen=True):
    """Required fields of a line; others are kept. `answer` is another name of `completion`."""

    NEEDED: ClassVar[str] = "gold, completion"

    gold: str | int | float
    completion: str | msgspec.UnsetType = msgspec.UNSET
    answer: str | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if (self.completion is msgspec.UNSET) == (self.answer is msgspec.UNSET):
            both = "" if self.answer is msgspec.UNSET else ", or `answer`, but not both"
            raise ValueError(f"Object missing required field `completion`{both}")

    @property
    def text(self) -> str:
        """The completion to judge."""
        return self.answer if self.completion is msgspec.UNSET else self.completion  # type: ignore[return-value]


def print_scored(path: Path, config: RewardsConfig) -> None:
    """Judge the lines of a JSONL file with the reward workers of `config`. Prints every line, in order, with the
    further fields `verdict` and `seconds`. Reasons for undecided lines go to stderr.

    Raises:
        DataError: the file or some of its lines are malformed; nothing was judged.
    """
    asyncio.run(_print(read_lines(path, MathLine), config))


async def _print(lines: list[Line[MathLine]], config: RewardsConfig) -> None:
    items = [ScoreItem(prompt="", completion=line.fields.text, answer=str(line.fields.gold)) for line in lines]
    at, undecided = iter(lines), 0
    async for verdict, seconds in scored(config, items):
        line = next(at)
        if verdict.outcome is Outcome.UNDECIDED:
            undecided += 1
            print(f"{line.place}: undecided: {verdict.reason}", file=sys.stderr)
        row = line.row | {"verdict": verdict.outcome.value, "seconds": round(seconds, 4)}
        print(msgspec.json.encode(row).decode(), flush=True)
    if undecided:
        print(f"{undecided:,} of {len(lines):,} lines undecided", file=sys.stderr)
