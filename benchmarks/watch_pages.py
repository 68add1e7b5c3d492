"""Cost of a page of `stretto watch` in a browser to a running run, and how smoothly the timeline moves.

    python -m benchmarks.watch_pages live [--pairs 40] [--seconds 6]       a live run with and without it, in turns
    python -m benchmarks.watch_pages frames [--spans 1000000]              zoom and pan over a long timeline

**live**: one run of recipes/arithmetic.toml, which keeps both cores busy, with `stretto watch` and a headless Chromium
that shows the run's curves. Server and browser are stopped (SIGSTOP) and continued (SIGCONT) in turn, so that both
halves of a pair come from one run, seconds apart. The order alternates from pair to pair, and the first seconds after
each change do not count. The rate is that of trained tokens, by the ends of the updates; CPU seconds are those of all
threads.

**frames**: each frame gets an event like those of a wheel or a pointer, and the intervals between calls of
requestAnimationFrame are measured. `--rate` slows the browser by a factor, which is Chromium's way to imitate a weaker
machine.

On a machine with other work, `echo -20 > /proc/self/autogroup` in a separate shell (`setsid`) gives all of this
priority.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
from playwright.sync_api import Page, sync_playwright

from benchmarks.report import Table, save
from benchmarks.runs import RECIPE
from benchmarks.watch import PATIENCE_SECONDS, make_run, server, until
from stretto.store.run_folder import RunFolder
from stretto.store.series.metrics import read_metrics
from stretto_report.reading.series import read_spans

_TICK = os.sysconf("SC_CLK_TCK")
_SETTLING_SECONDS = 1.5  # behind a change
_BEGUN_STEPS = 50  # the first steps are not those of a run that goes on
_REST_FRAMES = 20  # behind each part of a script: new tiles come after 120 ms without an event
#: In the page: zoom in, move, zoom out; an event between every two of `frames` frames of each. Gives the milliseconds
#: between frames, and how often the canvas was drawn.
_SCRIPT = """
([frames, rest, seed]) => new Promise((done) => {
  const canvas = document.querySelector('[data-testid=timeline]')
  const box = canvas.getBoundingClientRect()
  const middle = 110 + (box.width - 110) * (0.3 + 0.1 * seed)
  const event = (Kind, type, x, more) => canvas.dispatchEvent(new Kind(type, {
    clientX: box.left + x, clientY: box.top + 40, bubbles: true, cancelable: true, ...more }))
  canvas.setPointerCapture = () => {}
  let drawn = 0
  const clear = CanvasRenderingContext2D.prototype.clearRect
  CanvasRenderingContext2D.prototype.clearRect = function (...box) {
    drawn++
    return clear.call(this, ...box)
  }
  const times = []
  const { port1, port2 } = new MessageChannel() // an event of a hand comes between two frames, not in one
  port1.onmessage = ({ data: [part, within] }) => {
    if (part % 2 === 0) return event(WheelEvent, 'wheel', middle, { deltaY: (10 + 12 * seed) * (part === 0 ? -1 : 1) })
    if (within === 0) event(PointerEvent, 'pointerdown', middle)
    event(PointerEvent, 'pointermove', middle + 250 * Math.sin((within + 1) / 15))
    if (within === frames - 1) event(PointerEvent, 'pointerup', middle)
  }
  const step = (now) => {
    const at = times.push(now) - 1
    const [part, within] = [Math.floor(at / (frames + rest)), at % (frames + rest)]
    if (part === 3) {
      CanvasRenderingContext2D.prototype.clearRect = clear
      return done([times.slice(1).map((time, index) => time - times[index]), drawn])
    }
    if (within < frames) port2.postMessage([part, within])
    requestAnimationFrame(step)
  }
  requestAnimationFrame(step)
})
"""


# ── processes ───────────────────────────────────────────────────────────────────────────────────────


def children() -> dict[int, list[int]]:
    """Child processes of each process."""
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            found.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return found


def tree(*roots: int) -> list[int]:
    """These processes and all their descendants."""
    by, found = children(), [*roots]
    for process in found:
        found += by.get(process, [])
    return found


def processor_seconds(processes: Iterable[int]) -> float:
    """CPU seconds of these processes so far, and of their children that have ended."""
    total = 0
    for process in processes:
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15]))
    return total / _TICK


def prefer(processes: Iterable[int]) -> None:
    """Give the sessions of these processes the priority of our own session: roles and the browser have their own
    sessions."""
    own = Path("/proc/self/autogroup").read_text().split()[-1]
    for process in processes if own != "0" else ():
        Path(f"/proc/{process}/autogroup").write_text(own)


def send(number: int, processes: Iterable[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


@contextmanager
def browser_page(address: str) -> Iterator[tuple[Page, int]]:
    """Open an address in a headless Chromium; yields the page and the root process of the browser."""
    before = children().get(os.getpid(), [])
    with sync_playwright() as playwright:
        (driver,) = set(children()[os.getpid()]).difference(before)
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1280, "height": 900})
        page.goto(address)
        page.get_by_test_id("run-row").first.wait_for()
        prefer(tree(driver))
        yield page, driver
        chromium.close()


# ── a live run ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Window:
    """CPU seconds used in a stretch of time; `begin` and `end` are on the monotonic clock."""

    watched: bool
    begin: float
    end: float
    run: float
    server: float
    browser: float


@contextmanager
def live_run(folder: Path, words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A run that goes on until the block ends."""
    command = [sys.executable, "-m", "stretto_app.cli.main", "train", str(RECIPE), "--run-dir", str(folder), *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            metrics = RunFolder(folder).metrics
            until("the run to train", lambda: metrics.exists() and len(read_metrics(metrics)[0]) > _BEGUN_STEPS, 600)
            prefer(tree(process.pid))
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_SECONDS)


def window(seconds: float, watched: bool, run: int, watching: int, browser: int) -> Window:
    """Let server and browser work (`watched`) or stop them, for `seconds`, and measure what all processes use
    meanwhile. `run`, `watching`, `browser`: pids of the roots of their process trees."""
    send(signal.SIGCONT if watched else signal.SIGSTOP, tree(watching, browser))
    time.sleep(_SETTLING_SECONDS)
    groups = (tree(run), tree(watching), tree(browser))
    begin, before = time.monotonic(), [processor_seconds(group) for group in groups]
    time.sleep(seconds)
    end, after = time.monotonic(), [processor_seconds(group) for group in groups]
    return Window(watched, begin, end, *(b - a for a, b in zip(before, after, strict=True)))


def live(pairs: int, seconds: float, place: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="stretto-watch-") as scratch:
        runs, cache = Path(scratch, "runs"), Path(scratch, "cache")
        folder, windows = runs / "live", list[Window]()
        with (
            live_run(folder, ["trainer.steps=100000", "evaluation.every=100000"]) as run,
            server(runs, cache) as (client, watching),
            browser_page(f"{client.base_url}?token=T") as (page, browser),
        ):
            row = page.get_by_test_id("run-row").first.get_attribute("data-run")
            page.goto(f"{client.base_url}#/runs/{row}/{place}")
            page.locator("main h2").first.wait_for()
            try:
                for pair in range(pairs):
                    for watched in (pair % 2 == 0, pair % 2 != 0):
                        windows.append(window(seconds, watched, run.pid, watching, browser))
            finally:
                send(signal.SIGCONT, tree(watching, browser))
        return compared(windows, *trained(folder)) | {"place": place, "window_seconds": seconds}


def trained(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """When each update of a run ended, and the number of tokens trained by then."""
    path = RunFolder.open(folder)
    ends = {span.version + 1: span.end for span in read_spans(path.spans) if span.name == "update"}
    steps = [step for step in read_metrics(path.metrics)[0] if step.step in ends]
    return np.array([ends[step.step] for step in steps]), np.cumsum([step.trained_tokens for step in steps])


def compared(windows: Sequence[Window], ends: np.ndarray, tokens: np.ndarray) -> dict[str, Any]:
    """Rates with the page over rates without it, one ratio for each pair; also CPU seconds per second of the run."""

    def rate(one: Window) -> float:
        low, high = np.interp((one.begin, one.end), ends, tokens)
        return float(high - low) / (one.end - one.begin)

    def used(one: Window) -> float:
        return one.run / (rate(one) * (one.end - one.begin))

    pairs = [sorted(windows[at : at + 2], key=lambda one: one.watched) for at in range(0, len(windows), 2)]
    watched = [one for one in windows if one.watched]
    length = sum(one.end - one.begin for one in watched)
    return {
        "pairs": len(pairs),
        "tokens_per_second_alone": round(median(rate(alone) for alone, _ in pairs), 1),
        "rate_ratio": _spread([rate(beside) / rate(alone) for alone, beside in pairs]),
        "processor_seconds_per_token_ratio": _spread([used(beside) / used(alone) for alone, beside in pairs]),
        "run_processor": round(sum(one.run for one in watched) / length, 4),
        "server_processor": round(sum(one.server for one in watched) / length, 4),
        "browser_processor": round(sum(one.browser for one in watched) / length, 4),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Median, its 95% interval by resampling, and quartiles."""
    drawn = np.random.default_rng(1).choice(values, (2000, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    lower, _, upper = quantiles(values, n=4)
    found = {"median": median(values), "low": low, "high": high, "quartile_low": lower, "quartile_high": upper}
    return {name: round(float(value), 4) for name, value in found.items()}


# ── frames ──────────────────────────────────────────────────────────────────────────────────────────


def frames(spans: int, count: int, rate: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="stretto-watch-") as scratch:
        runs, cache = Path(scratch, "runs"), Path(scratch, "cache")
        make_run(runs / "large", trajectories=8_000, steps=1_000, spans=spans)
        with server(runs, cache) as (client, _), browser_page(f"{client.base_url}?token=T") as (page, _):
            run = page.get_by_test_id("run-row").first.get_attribute("data-run")
            until("the spans to be read", lambda: client.get(f"/api/runs/{run}/timeline").json()["spans"] == spans)
            page.goto(f"{client.base_url}#/runs/{run}/timeline")
            page.get_by_test_id("timeline").wait_for()
            idle = page.evaluate(_IDLE, 120)
            page.context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": rate})
            intervals, drawn = list[float](), 0
            for seed in range(5):
                between, count_drawn = page.evaluate(_SCRIPT, [count, _REST_FRAMES, seed])
                intervals, drawn = intervals + between, drawn + count_drawn
    moving = _intervals(intervals) | {"events": 5 * 3 * count, "drawn": drawn}
    return {"spans": spans, "rate": rate, "idle": _intervals(idle), "moving": moving}


_IDLE = """
(frames) => new Promise((done) => {
  const times = []
  const step = (now) => times.push(now) <= frames
    ? requestAnimationFrame(step) : done(times.slice(1).map((time, index) => time - times[index]))
  requestAnimationFrame(step)
})
"""


def _intervals(milliseconds: Sequence[float]) -> dict[str, float]:
    found = np.quantile(milliseconds, (0.5, 0.95, 0.99, 1.0)).round(2).tolist()
    late = sum(one > 25 for one in milliseconds) / len(milliseconds)  # one that is left out takes 33 ms
    return dict(zip(("median", "p95", "p99", "longest"), found, strict=True)) | {
        "frames": len(milliseconds),
        "late": round(late, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("live", "frames"))
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each window")
    parser.add_argument("--place", default="curves", help="page of the run")
    parser.add_argument("--spans", type=int, default=1_000_000)
    parser.add_argument("--frames", type=int, default=100, help="of each of the three parts of five scripts")
    parser.add_argument("--rate", type=float, default=1.0, help="factor by which the browser is slowed")
    parser.add_argument("--dry", action="store_true", help="keep no result")
    words = parser.parse_args()
    if words.part == "live":
        found = live(words.pairs, words.seconds, words.place)
    else:
        found = frames(words.spans, words.frames, words.rate)
    table = Table("what", "measured")
    for name, value in found.items():
        table.add(name, value)
    table.show()
    if not words.dry:
        save(f"watch-{words.part}", found)


if __name__ == "__main__":
    main()
