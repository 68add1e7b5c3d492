"""Cost for a conductor of journaling the tokens of completions in flight each second, by how many tokens they have.

    python -m benchmarks.journal [--dry]

`loop.engines.in_flight.InFlight` and the ledger are real. The engines are simulated: they have `PIECE` new tokens of
every completion at each poll.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Table, save
from stretto.core.records import Completion, GenerateRequest, Partials, Prompt, Sampling, Segment
from stretto.core.tasks import cancel_and_wait
from stretto.loop.engines.in_flight import InFlight
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger

GROUPS, MEMBERS, PIECE = 16, 16, 64
LENGTHS = (1024, 4096, 16384)  # each is the end of a stretch of rounds
_PROMPT = Prompt("0", (1, 2, 3), "?", "")


@dataclass
class _Engines:
    """Engines whose completions never end. `asked`: requests that were received; `new`: new tokens of them."""

    asked: list[str] = field(default_factory=list)
    new: Partials = field(default_factory=dict)

    async def generate(self, request: GenerateRequest, /, *, least: int = 0) -> AsyncIterator[Completion]:
        self.asked.append(request.id)
        for completion in await asyncio.get_running_loop().create_future():  # until it is cancelled
            yield completion

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None) -> Partials:
        return self.new


def piece(begin: int, count: int) -> Segment:
    """Segment of `count` tokens from index `begin` on."""
    return Segment.of(tuple(range(100_000 + begin, 100_000 + begin + count)), (-0.693,) * count, (7,) * count)


async def seconds_per_piece(folder: Path) -> dict[int, float]:
    """CPU seconds of the conductor for one piece of a completion, including its write to the file, by the number of
    tokens that the completion has by then: medians over the rounds in the last quarter before that number."""
    ledger, engines = Ledger(folder / "ledger.sqlite", StoreConfig()), _Engines()
    in_flight = InFlight(engines, ledger)
    requests = [GenerateRequest(f"0.{n}.0", (1, 2), tuple(range(MEMBERS)), Sampling(1 << 20)) for n in range(GROUPS)]
    for request in requests:
        ledger.issue(request.id, _PROMPT, MEMBERS, 0)

    async def ask(request: GenerateRequest) -> None:
        async for _ in in_flight.generate(request):
            pass

    tasks = [asyncio.ensure_future(ask(request)) for request in requests]
    while len(engines.asked) < GROUPS:
        await asyncio.sleep(0)
    taken = []
    for at in range(0, LENGTHS[-1], PIECE):
        engines.new = {request.id: {k: piece(at, PIECE) for k in range(MEMBERS)} for request in requests}
        start = time.process_time()
        await in_flight.keep()
        ledger.flush()
        taken.append((time.process_time() - start) / (GROUPS * MEMBERS))
    await cancel_and_wait([*tasks])
    ledger.close()
    return {end: statistics.median(taken[3 * end // 4 // PIECE : end // PIECE]) for end in LENGTHS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="nothing is saved")
    words = parser.parse_args()
    table, rows = Table("tokens so far", "µs of a core per piece", "pieces per CPU second"), []
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as folder:
        for length, seconds in asyncio.run(seconds_per_piece(Path(folder))).items():
            rows.append({"tokens": length, "cpu_us_per_piece": round(1e6 * seconds, 1)})
            table.add(length, f"{1e6 * seconds:.1f}", f"{1 / seconds:,.0f}")
    table.show()
    if not words.dry:
        save("journal", {"completions": GROUPS * MEMBERS, "piece": PIECE, "rows": rows})


if __name__ == "__main__":
    main()
