"""How fast and how well answers in mathematics are judged, compared with plain math-verify.

    python -m benchmarks.verifier

Verdicts per second: typical final answers (integers, fractions, roots, tuples, intervals, polynomials, in a sentence or
a box, a third of them wrong), all different, judged by two worker processes, which are warm. math-verify is called as
its documentation says (``verify(parse(gold), parse(answer))``), in equal workers. Runs of both alternate; the median
counts.

Accuracy: the 140 public cases of tests/data/math_cases.jsonl. Undecided answers are counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Table, save
from stretto.core.records import Outcome, Verdict
from stretto.rewards.config import RewardsConfig
from stretto.rewards.service.pool import RewardPool
from stretto.rewards.service.wire import ScoreItem

CASES = Path(__file__).resolve().parents[1] / "tests" / "data" / "math_cases.jsonl"
JUDGES = {"stretto": "math", "math-verify": "benchmarks.plain_math_verify:math_verify"}
WORKERS = 2
GOAL = 500  # verdicts per second
_GROUP = 8  # answers to one question, judged in one call
_CALLERS = 16

Form = Callable[[random.Random], str]
FORMS: Sequence[Form] = (
    lambda chance: str(chance.randrange(10**5)),
    lambda chance: f"{chance.randrange(10**6) / 100:.2f}",
    lambda chance: rf"\frac{{{chance.randrange(1, 99)}}}{{{chance.randrange(2, 99)}}}",
    lambda chance: rf"{chance.randrange(2, 99)}\sqrt{{{chance.randrange(2, 999)}}}",
    lambda chance: f"({chance.randrange(99)}, {chance.randrange(-99, 99)})",
    lambda chance: f"[{chance.randrange(-99, 0)}, {chance.randrange(99)})",
    lambda chance: rf"x^2 + {chance.randrange(2, 99)}x + {chance.randrange(2, 99)}",
    lambda chance: rf"\frac{{{chance.randrange(2, 99)}\pi}}{{{chance.randrange(2, 99)}}}",
)
FRAMES = (
    "Adding the two parts $a_1 = 3$ and $a_2$, we find \\[ a_1 + a_2 = 17. \\] So the answer is $\\boxed{%s}$.",
    "First, simplify the equation. Then substitute $x = 5$ to see that the result holds.\n\nThe answer is $%s$.",
    "<think>Perhaps it is 12? No, $\\sqrt{2}$ does not fit.</think>**Final Answer**\n\\boxed{%s}",
)


def typical(questions: int, seed: int) -> list[list[ScoreItem]]:
    """Groups of answers, one group per question; a third of the answers is wrong."""
    chance = random.Random(seed)
    groups = []
    for number in range(questions):
        form = FORMS[number % len(FORMS)]
        gold = form(chance)
        answers = [gold if chance.random() > 1 / 3 else form(chance) for _ in range(_GROUP)]
        texts = [chance.choice(FRAMES) % answer for answer in answers]
        groups.append([ScoreItem(prompt="", completion=text, answer=f"${gold}$") for text in texts])
    return groups


async def verdicts_per_second(function: str, groups: Sequence[Sequence[ScoreItem]], warm: int) -> float:
    """Verdicts per second of `WORKERS` processes that several callers use at once, as in a run; the first `warm` groups
    do not count."""
    config = RewardsConfig(function=function, workers=WORKERS, timeout=10.0, max_consecutive_undecided=10**9)
    async with RewardPool(config) as pool:
        await asyncio.gather(*[pool.score(group) for group in groups[:warm]])
        waiting = iter(groups[warm:])

        async def caller() -> None:
            for group in waiting:
                await pool.score(group)

        start = time.perf_counter()
        await asyncio.gather(*[caller() for _ in range(_CALLERS)])
        return (len(groups) - warm) * _GROUP / (time.perf_counter() - start)


async def accuracy(function: str) -> dict[str, int]:
    """Numbers of public cases that are judged rightly, wrongly or not at all."""
    cases: list[dict[str, Any]] = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    items = [ScoreItem(prompt="", completion=case["answer"], answer=case["gold"]) for case in cases]
    config = RewardsConfig(function=function, workers=WORKERS, timeout=10.0, max_consecutive_undecided=10**9)
    async with RewardPool(config) as pool:
        verdicts = await pool.score(items)
    told = Counter(_kind(case["expected"], verdict) for case, verdict in zip(cases, verdicts, strict=True))
    return {"cases": len(cases)} | {
        kind: told[kind] for kind in ("as expected", "false accept", "false reject", "undecided")
    }


def _kind(expected: bool, verdict: Verdict) -> str:
    if verdict.outcome is Outcome.UNDECIDED:
        return "undecided"
    if (verdict.outcome is Outcome.RIGHT) == expected:
        return "as expected"
    return "false reject" if expected else "false accept"


def measure(questions: int, runs: int) -> dict[str, Any]:
    """Measure both judges, in alternating runs."""
    rates: dict[str, list[float]] = {judge: [] for judge in JUDGES}
    for run in range(runs):
        for judge, function in JUDGES.items():
            groups = typical(questions + 100, seed=run)
            rates[judge].append(asyncio.run(verdicts_per_second(function, groups, warm=100)))
    rows = [
        {
            "judge": judge,
            "verdicts_per_second": round(statistics.median(found)),
            "runs": [round(rate) for rate in found],
            "accuracy": asyncio.run(accuracy(JUDGES[judge])),
        }
        for judge, found in rates.items()
    ]
    return {"goal": GOAL, "setting": {"workers": WORKERS, "questions": questions, "group": _GROUP}, "rows": rows}


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    kinds = list(results["rows"][0]["accuracy"])
    table = Table("judge", "verdicts/s", "runs", *kinds)
    for row in results["rows"]:
        runs = " ".join(f"{rate:,}" for rate in row["runs"])
        table.add(row["judge"], f"{row['verdicts_per_second']:,}", runs, *[row["accuracy"][kind] for kind in kinds])
    table.show()
    print(f"goal: {results['goal']:,} verdicts per second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=300, help="of each run, with 8 answers each")
    parser.add_argument("--runs", type=int, default=3)
    words = parser.parse_args()
    results = measure(words.questions, words.runs)
    show(results)
    save("verifier", results)


if __name__ == "__main__":
    main()
