"""Rollouts of verifiers at once, each in a session of its own of the gateway at GATEWAY; prints their rewards."""

import asyncio
import json
import os

import httpx
from verifiers.v1.agent import Agent
from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.taskset import TasksetConfig
from verifiers.v1.runtimes import SubprocessConfig
from verifiers_sums import Sums, SumTask

ROLLOUTS = 8


async def rollout(http: httpx.AsyncClient, task: SumTask) -> float:
    """Of one task; its reward, which the session is told too."""
    session = (await http.post("/sessions", json={"task": {"idx": task.data.idx}})).json()
    config = AgentConfig(
        harness={"id": "verifiers_sums"},
        model=os.environ["MODEL"],
        client=EvalClientConfig(base_url=session["base_url"]),
        runtime=SubprocessConfig(),
    )
    trace = await Agent(config).run(task)
    assert trace.ok, trace.errors
    reward = trace.reward
    await http.post(f"/sessions/{session['id']}/reward", json={"reward": reward})
    await http.post(f"/sessions/{session['id']}/end")
    return reward


async def main() -> None:
    async with httpx.AsyncClient(base_url=os.environ["GATEWAY"]) as http:
        tasks = list(Sums(TasksetConfig(id="verifiers_sums")).load())[:ROLLOUTS]
        print(json.dumps(await asyncio.gather(*(rollout(http, task) for task in tasks))))


asyncio.run(main())
