"""Cost of going on: CPU seconds of all processes of a run, from its restart to the next training step.

    python -m benchmarks.restarts --name before            5 resumes, 3 restarts of each role: about 5 minutes
    python -m benchmarks.restarts --name after --resumes 9

All processes of a run of tests/launch/recipes/tiny.toml are killed (SIGKILL) and the run is resumed, repeatedly. Each
resume is measured by the CPU seconds of all its processes (the conductor, the fork server, and the processes forked
from it) between the start of the command and its next step. Then each role is killed in turn, and the CPU seconds of
the replacing processes are counted until the second step after the kill. A role has one replacing process; but when the
fork server is killed, the kernel ends the processes forked from it too, and they start again in interpreters of their
own. Workflow worker, outlet and weights server belong to a second run, of two turns, which machines can join, with a
page for Prometheus. A third run has its engine, and a rank of its trainer, on machines that have joined: the agent with
the engine is killed and another one joins (counted from its start to the second step after its engine has joined), and
the process of the rank is killed (counted with that of the trainer, which is replaced with it). The model costs almost
nothing, so the numbers are stretto's own. CPU seconds grow much less with the load of the machine than seconds do, but
a little (other work evicts caches), so medians are reported. New results replace those of the same name only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.cluster import JOINED
from benchmarks.report import Table, earlier, save
from stretto.core.machine import cache_folder
from stretto_cluster.ranks.messages import RANK_ROLE
from stretto_report.audit.check import check_run
from stretto_servers.server import port_of, reserve_port
from tests.launch.running import (
    MODULES,
    TINY,
    Command,
    Laboratory,
    said,
    steps_done,
    wait_for_step,
    wait_until,
    with_no_fuss,
)

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
_ELSEWHERE = ("cluster.listen=127.0.0.1:0", "cluster.placer=given", "trainer.ranks=2", "trainer.remote_ranks=1")
ELSEWHERE_ROLES = ("agent", "rank")
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


def replaced(command: Command, run_dir: Path, module: str, heir: str = "", *others: Command) -> dict[str, Any]:
    """Kill the process of a role, and measure the cost of the processes that replace it, until the second step
    afterwards. `heir`: another role that replaces it; `others`: agents that have joined the command's run."""

    def processes(module: str = "") -> set[int]:
        return {pid for one in (command, *others) for pid in one.processes(module)}

    old, start = processes(), time.monotonic()
    (pid,) = processes(module)
    with_no_fuss(pid)
    wait_until(lambda: not old.issuperset(processes(heir or module)), f"another {module}", command)
    wait_for_step(command, steps_done(run_dir) + 2, _PATIENCE)
    cost = {"cpu": sum(map(cpu_seconds, processes() - old)), "seconds": time.monotonic() - start}
    wait_for_step(command, steps_done(run_dir) + _STEPS, _PATIENCE)
    return cost


def joined(laboratory: Laboratory, command: Command, run_dir: Path, stack: ExitStack) -> tuple[Command, dict[str, Any]]:
    """Start an agent with an engine, and measure its cost until the second step after its engine has joined."""
    known, start = said(run_dir).count(JOINED), time.monotonic()
    agent = stack.enter_context(laboratory.start("engine", "--join", run_dir))
    wait_until(lambda: said(run_dir).count(JOINED) > known, "an engine", command, _PATIENCE)
    wait_for_step(command, steps_done(run_dir) + 2, _PATIENCE)
    return agent, {"cpu": sum(by_role(agent).values()), "seconds": time.monotonic() - start}


def each_replaced_elsewhere(laboratory: Laboratory, run_dir: Path, times: int) -> dict[str, list[dict[str, Any]]]:
    """Start a run whose engine and second rank are on machines that have joined; kill the agent of the engine, and the
    process of the rank, `times` times each."""
    costs: dict[str, list[dict[str, Any]]] = {role: [] for role in ELSEWHERE_ROLES}
    with ExitStack() as stack:
        command = stack.enter_context(laboratory.train(run_dir, *SETTINGS, *_ELSEWHERE, recipe=TINY))
        wait_until((run_dir / "join.json").exists, "the gate", command)
        ranks = stack.enter_context(laboratory.start("rank", "--join", run_dir))
        agent, _ = joined(laboratory, command, run_dir, stack)
        for _ in range(times):
            agent.kill_all()
            agent, cost = joined(laboratory, command, run_dir, stack)
            costs["agent"].append(cost)
            wait_for_step(command, steps_done(run_dir) + _STEPS, _PATIENCE)
            costs["rank"].append(replaced(command, run_dir, RANK_ROLE, MODULES["trainer"], ranks))
        for one in (command, agent, ranks):
            one.kill_all()
    return costs


def each_replaced(
    laboratory: Laboratory, run_dir: Path, settings: Sequence[str], roles: Sequence[str], times: int
) -> dict[str, list[dict[str, Any]]]:
    """Start a run, kill each role in turn, `times` times, and end the run."""
    with laboratory.train(run_dir, *settings, recipe=TINY) as command:
        wait_for_step(command, _STEPS, _PATIENCE)
        count = {role: 1 if role == LAST else times for role in roles}
        heir = {LAST: MODULES["trainer"]}
        costs = {
            role: [replaced(command, run_dir, MODULES[role], heir.get(role, "")) for _ in range(count[role])]
            for role in roles
        }
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
        elsewhere = Path(root) / "elsewhere"
        roles |= each_replaced_elsewhere(laboratory, elsewhere, times)
        whole = [resumed(laboratory, run_dir) for _ in range(resumes)]
        kept = all(check_run(one).kept for one in (run_dir, beside, elsewhere))
    parts = {name: [cost["by_role"].get(name, 0.0) for cost in whole] for name in ("conductor", *MODULES)}
    return {
        "resume": summary(whole),
        "parts": {name: round(statistics.median(found), 2) for name, found in parts.items() if max(found)},
        "roles": {role: summary(costs) for role, costs in roles.items()},
        "steps": _STEPS * (resumes + len((*ROLES, *BESIDE_ROLES, *ELSEWHERE_ROLES)) * times),
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
    results = {**earlier("restarts"), words.name: measured(words.resumes, words.times)}
    show(results)
    save("restarts", results)


if __name__ == "__main__":
    main()
