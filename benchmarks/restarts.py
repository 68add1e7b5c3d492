"""Cost of going on: CPU seconds of all processes of a run, from its restart to the next training step.

    python -m benchmarks.restarts --name before            5 resumes, 3 restarts of each role: about 5 minutes
    python -m benchmarks.restarts --name after --resumes 9

All processes of a run of tests/launch/recipes/tiny.toml are killed (SIGKILL) and the run is resumed, repeatedly. Each
resume is measured by the CPU seconds of all its processes (the conductor, the fork server, and the processes forked
from it) between the start of the command and its next step. Then each role is killed in turn, and the CPU seconds of
the replacing processes are counted until the second step after the kill. A role has one replacing process; but when the
fork server is killed, the kernel ends the processes forked from it too, and they start again in interpreters of their
own. Workflow worker, outlet and weights server belong to a second run, of two turns, which machines can join, with a
page for Prometheus. The model costs almost nothing, so the numbers are stretto's own. CPU seconds grow much less with
the load of the machine than seconds do, but a little (other work evicts caches), so medians are reported. New results
replace those of the same name only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import RESULTS, Table, save
from stretto.core.machine import cache_folder
from stretto_report.audit.check import check_run
from stretto_servers.server import port_of, reserve_port
from tests.launch.running import MODULES, TINY, Command, Laboratory, steps_done, wait_for_step, wait_until, with_no_fuss

SETTINGS = (
    "trainer.steps=1000000",
    "trainer.learning_rate=1e-9",
    "trainer.checkpoint_every=20",
    "trainer.keep_versions=1",
    "deadlines.trainer_restarts=1000",
    "deadlines.engine_restarts=1000",
)
LAST = "fork server"  # a command has one, and no other once it is killed
ROLES = ("trainer", "engine", "rewards", LAST)
_BESIDE = (
    'workflow.function="multi_turn"',
    "workflow.settings.tries=2",
    'workflow.settings.feedback="{prompt}"',
    "cluster.listen=127.0.0.1:0",
)
BESIDE_ROLES = ("workflow", "outlet", "weights server")
_STEPS = 30  # between two kills
_PATIENCE = 900.0  # seconds, of a machine that other work has
_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and of its ended children; 0 if the process is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS


def by_role(command: Command) -> dict[str, float]:
    """CPU seconds so far of the processes of a command, by role; the command itself is the conductor."""
    found: defaultdict[str, float] = defaultdict(float)
    for pid, role in command.roles().items():
        found[role] += cpu_seconds(pid)
    return dict(found)


def resumed(laboratory: Laboratory, run_dir: Path) -> dict[str, Any]:
    """Resume, train a step and measure it, train some more, and kill everything."""
    before, start = steps_done(run_dir), time.monotonic()
    with laboratory.train(run_dir, *SETTINGS, "--resume", recipe=TINY) as command:
        wait_for_step(command, before + 1, _PATIENCE)
        cpu, seconds = by_role(command), time.monotonic() - start
        wait_for_step(command, before + _STEPS, _PATIENCE)
        for pid in command.processes():
            with_no_fuss(pid)
        wait_until(lambda: not command.processes(), "the end of all roles")
    return {"cpu": sum(cpu.values()), "by_role": cpu, "seconds": seconds}


def replaced(command: Command, run_dir: Path, role: str) -> dict[str, Any]:
    """Kill a role, and measure the cost of the processes that replace it, until the second step afterwards."""
    old, start = set(command.processes()), time.monotonic()
    with_no_fuss(command.role(role))
    heir = MODULES["trainer" if role == LAST else role]
    wait_until(lambda: not old.issuperset(command.processes(heir)), f"another {role}", command)
    wait_for_step(command, steps_done(run_dir) + 2, _PATIENCE)
    cpu = sum(cpu_seconds(pid) for pid in command.processes() if pid not in old)
    cost = {"cpu": cpu, "seconds": time.monotonic() - start}
    wait_for_step(command, steps_done(run_dir) + _STEPS, _PATIENCE)
    return cost


def each_replaced(
    laboratory: Laboratory, run_dir: Path, settings: Sequence[str], roles: Sequence[str], times: int
) -> dict[str, list[dict[str, Any]]]:
    """Start a run, kill each role in turn, `times` times, and end the run."""
    with laboratory.train(run_dir, *settings, recipe=TINY) as command:
        wait_for_step(command, _STEPS, _PATIENCE)
        count = {role: 1 if role == LAST else times for role in roles}
        costs = {role: [replaced(command, run_dir, role) for _ in range(count[role])] for role in roles}
        for pid in command.processes():
            with_no_fuss(pid)
        wait_until(lambda: not command.processes(), "the end of all roles")
    return costs


def summary(costs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians and maxima."""
    cpu, seconds = ([cost[kind] for cost in costs] for kind in ("cpu", "seconds"))
    return {
        "times": len(costs),
        "cpu": round(statistics.median(cpu), 2),
        "most_cpu": round(max(cpu), 2),
        "seconds": round(statistics.median(seconds), 2),
    }


def measured(resumes: int, times: int) -> dict[str, Any]:
    """Do all measurements."""
    with tempfile.TemporaryDirectory(prefix="stretto-benchmark-") as root:
        run_dir, laboratory = Path(root) / "run", Laboratory(Path(root), cache_folder())
        roles = each_replaced(laboratory, run_dir, SETTINGS, ROLES, times)
        beside = Path(root) / "beside"
        with reserve_port() as reserved:
            port = f"logging.prometheus_port={port_of(reserved)}"
            roles |= each_replaced(laboratory, beside, (*SETTINGS, *_BESIDE, port), BESIDE_ROLES, times)
        whole = [resumed(laboratory, run_dir) for _ in range(resumes)]
        kept = check_run(run_dir).kept and check_run(beside).kept
    parts = {name: [cost["by_role"].get(name, 0.0) for cost in whole] for name in ("conductor", *MODULES)}
    return {
        "resume": summary(whole),
        "parts": {name: round(statistics.median(found), 2) for name, found in parts.items() if max(found)},
        "roles": {role: summary(costs) for role, costs in roles.items()},
        "steps": _STEPS * (resumes + len((*ROLES, *BESIDE_ROLES)) * times),
        "load": round(os.getloadavg()[0], 1),
        "laws_kept": kept,
    }


def show(results: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table("measured", "what", "times", "CPU s, median", "most", "s, median")
    for name, found in results.items():
        rows = {"resume": found["resume"], **found["roles"]}
        for what, row in rows.items():
            table.add(name, what, row["times"], row["cpu"], row["most_cpu"], row["seconds"])
        for part, cpu in found["parts"].items():
            table.add(name, f"resume: {part}", found["resume"]["times"], cpu, "", "")
    table.show()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="now", help="under which the result is kept beside others")
    parser.add_argument("--resumes", type=int, default=5)
    parser.add_argument("--times", type=int, default=3, help="that each role is killed")
    words = parser.parse_args()
    path = RESULTS / "restarts.json"
    before = msgspec.json.decode(path.read_bytes())["results"] if path.exists() else {}
    results = {**before, words.name: measured(words.resumes, words.times)}
    show(results)
    save("restarts", results)


if __name__ == "__main__":
    main()
