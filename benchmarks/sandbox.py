"""Cost of running a program: in the sandbox, warm and cold, and in a plain subprocess.

    python -m benchmarks.sandbox          milliseconds per run, at every sandbox level of this machine

The program is `print(1)`. A *warm* run forks it from the guest's interpreter, a *cold* one starts a new sandbox; the
plain subprocess is ``python -I -S -B`` with pipes and no isolation. They run in turns, one run each, so that other work
on the machine affects all of them equally.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from benchmarks.report import Table, save
from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.sandbox import Sandbox, SandboxFailed
from stretto_verify.sandbox.walls import Level, ladder

PROGRAM = "print(1)"
GOALS = {"warm": 5.0, "cold": 20.0}  # milliseconds


def plain() -> None:
    """Run the program without any sandbox."""
    interpreter = getattr(sys, "_base_executable", sys.executable)
    done = subprocess.run([interpreter, "-I", "-S", "-B", "-c", PROGRAM], capture_output=True, env={}, check=True)
    assert done.stdout == b"1\n"


def sandboxed(sandbox: Sandbox) -> Callable[[], None]:
    def run() -> None:
        assert sandbox.run({"source": PROGRAM}, b"", 10.0).output == b"1\n"

    return run


def offered(stack: ExitStack) -> dict[tuple[str, str], Callable[[], None]]:
    """All sandbox levels that work on this machine, each warm and cold."""
    runs: dict[tuple[str, str], Callable[[], None]] = {("none", "plain subprocess"): plain}
    for warm in (True, False):
        for walls in ladder(warm):
            sandbox = stack.enter_context(Sandbox(walls, SandboxConfig(warm=warm)))
            how = "warm" if warm and walls.warm else "cold"
            run = sandboxed(sandbox)
            with contextlib.suppress(SandboxFailed):
                run()
                runs.setdefault((walls.level.value, how), run)
    return runs


def measure(count: int) -> dict[str, Any]:
    """Median and 95th percentile of `count` runs each, in milliseconds."""
    with ExitStack() as stack:
        runs = offered(stack)
        seconds: dict[tuple[str, str], list[float]] = {name: [] for name in runs}
        for _ in range(count):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
    rows = [
        {
            "level": level,
            "how": how,
            "median_ms": round(1e3 * statistics.median(taken), 2),
            "p95_ms": round(1e3 * sorted(taken)[int(0.95 * len(taken))], 2),
            "goal_ms": GOALS.get(how) if level == Level.A else None,
        }
        for (level, how), taken in seconds.items()
    ]
    return {"runs": count, "user": "root" if os.getuid() == 0 else "ordinary", "rows": rows}


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    table = Table("level", "how", "median ms", "p95 ms", "goal ms")
    for row in results["rows"]:
        table.add(row["level"], row["how"], row["median_ms"], row["p95_ms"], row["goal_ms"] or "")
    table.show()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="runs of each")
    results = measure(parser.parse_args().runs)
    show(results)
    save("sandbox", results)


if __name__ == "__main__":
    main()
