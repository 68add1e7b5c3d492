"""The runs that the browser looks at: a synchronous one of six steps, one of hostile words, two that part at their
second step, and one that a program goes on writing:

    python -m tests.real_browser.recorded FOLDER        a line on standard input is a step
"""

import shutil
import sys
from pathlib import Path

from stretto.core.events import Span
from stretto.core.records import Segment, StopReason
from stretto.store.run_folder import RunFolder
from stretto.store.series.lines import SpanLog
from stretto.store.series.metrics import MetricsLog
from tests.store.make import ledger_at
from tests.watch.runs import completion, prompt, step_line, train, write_run

RECORDED = Path(__file__).parent.parent / "data" / "synchronous_run"
RECIPE = '[trainer]\nsteps = 3\nlearning_rate = {rate}\n[task]\nkind = "arithmetic"\n'
ENDED = "2026-11-22 03:08:40  starts at version 0\n2026-11-22 03:08:45  ends with exit code 0\n"


def write_runs(folder: Path) -> None:
    """Five run folders, the last of them damaged."""
    shutil.copytree(RECORDED, folder / "recorded")
    write_run(folder / "hostile")
    write_parting(folder / "one", 0.001, 0.5)
    write_parting(folder / "other", 0.002, 1.0)
    shutil.copytree(RECORDED, folder / "damaged")
    (folder / "damaged" / "ledger.sqlite").write_bytes(b"no ledger" * 100)


def write_parting(path: Path, rate: float, reward: float) -> None:
    """A run of two steps whose second step has this reward."""
    with RunFolder.create(path) as folder:
        folder.write("recipe.toml", RECIPE.format(rate=rate))
        folder.write("log.txt", ENDED)
        with ledger_at(folder.ledger) as ledger:
            first = completion("0.a.0", 0, 1.0, (0, 0, 0))
            train(ledger, 1, "a", (first, completion("0.a.0", 1, 0.0, (0, 0), "x", StopReason.LENGTH)))
            train(ledger, 2, "b", (completion("0.b.0", 0, reward, (0, 1) if reward == 1.0 else (1, 1)),))
        metrics, spans = MetricsLog(folder.metrics), SpanLog(folder.spans)
        for step in (1, 2):
            metrics.append(step_line(step, entropy=rate))
        spans.append((Span(role="trainer", name="update", start=1.0, end=2.0, version=0),))


def write_living(path: Path) -> None:
    """A run that is begun, and goes on by a step for every line that is read."""
    with RunFolder.create(path) as folder:
        folder.write("recipe.toml", RECIPE.format(rate=0.001))
        folder.write("log.txt", "2026-11-22 03:08:40  starts at version 0\n")
        with ledger_at(folder.ledger) as ledger:
            metrics, spans = MetricsLog(folder.metrics), SpanLog(folder.spans)
            for step, _ in enumerate(sys.stdin, 1):
                train(ledger, step, f"p{step}", (completion(f"0.p{step}.0", 0, 1.0, (step - 1,) * 3),))
                metrics.append(step_line(step, entropy=1.0))
                spans.append(
                    (Span(role="trainer", name="update", start=float(step), end=step + 0.5, version=step - 1),)
                )
                if step == 1:
                    ledger.issue("9.x.0", prompt("x", "1+2="), 1, 0)
                    ledger.journal("9.x.0/0", Segment.of((3, 4), (-0.5, -1.0), (0, 0)))
                    ledger.flush()
                print(step, flush=True)


if __name__ == "__main__":
    write_living(Path(sys.argv[1]))
