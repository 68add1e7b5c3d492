"""Trajectories of a run made by an environment of verifiers: a service that asks the run for sessions.

    python verifiers_service.py questions TASKSET FILE.jsonl      once: writes the questions of the run
    python verifiers_service.py serve ADDRESS TASKSET HARNESS     during the run, until it has ended

TASKSET and HARNESS are verifiers' names. The recipe has `[task]` with this file, `[workflow]` with kind "agent" and no
command, and `[gateway]` with the port of ADDRESS. The harness runs in this process, or where its runtime says. Each
rollout is a session, with the reward of its trace. It needs `verifiers` 0.4 and nothing of stretto.
"""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
from verifiers.v1.agent import Agent
from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

AT_ONCE = 16
MOST = 10_000  # most tasks of a set, which may be infinite
PATIENCE = 300.0  # seconds without a run before the service gives up


def tasks_of(taskset: str) -> list[Any]:
    """Load the tasks of a set. The index of a task in the list is the `idx` of its question."""
    return list(islice(load_taskset(taskset_config_type(taskset)(id=taskset)), MOST))


def write_questions(taskset: str, file: Path) -> None:
    """Write one question for each task to `file`. The gold answer is a placeholder, because the reward comes from
    verifiers."""
    rows = ({"prompt": str(task.data.prompt), "answer": "-", "idx": idx} for idx, task in enumerate(tasks_of(taskset)))
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


async def rollout(http: httpx.AsyncClient, session: dict[str, Any], task: Any, harness: str) -> None:
    """Make one trajectory of the run: let the harness solve the task in the session, then report its reward and end
    it."""
    config = AgentConfig(
        harness={"id": harness},
        model=session["model"],
        client=EvalClientConfig(base_url=session["base_url"]),
        runtime=SubprocessConfig(),
    )
    trace = await Agent(config).run(task)
    place, failed = f"/sessions/{session['id']}", "" if trace.ok else f"{trace.errors}"
    if not failed:
        await http.post(f"{place}/reward", json={"reward": trace.reward})
    await http.post(f"{place}/end", json={"failed": failed})


async def serve(http: httpx.AsyncClient, tasks: list[Any], harness: str) -> None:
    """Make one rollout after the other, until the run cannot be reached for a while."""
    missed, served = 0.0, False
    while missed < (3.0 if served else PATIENCE):
        try:
            reply = await http.post("/sessions", json={})
            if reply.status_code != 200:  # no trajectory waits
                missed = 0.0
                await asyncio.sleep(0.2)
                continue
            session, served, missed = reply.json(), True, 0.0
            await rollout(http, session, tasks[session["task"]["fields"]["idx"]], harness)
        except httpx.TransportError:
            missed += 0.5
            await asyncio.sleep(0.5)


async def main(address: str, taskset: str, harness: str) -> None:
    """Serve a run at `address` with several rollouts at the same time."""
    tasks = tasks_of(taskset)
    async with httpx.AsyncClient(base_url=address, timeout=600, trust_env=False) as http:
        await asyncio.gather(*(serve(http, tasks, harness) for _ in range(AT_ONCE)))


if __name__ == "__main__":
    if sys.argv[1] == "questions":
        write_questions(sys.argv[2], Path(sys.argv[3]))
    else:
        asyncio.run(main(*sys.argv[2:]))
