"""An agent of openai-agents with a calculator, as a service: it asks a run for questions and answers them.

    python examples/agents/calculator.py serve http://127.0.0.1:8790       works for a run until that has ended
    python examples/agents/calculator.py measure http://127.0.0.1:8790     asks own questions, with the tool and without

It needs `openai-agents` and nothing of stretto: the gateway is an address to it. `recipes/calculator_agent.toml` is the
run; `stretto gateway MODEL --port 8790` serves a model without one.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
from typing import Any

import httpx
from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from agents.exceptions import AgentsException
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from openai import APIError, AsyncOpenAI, ConflictError

INSTRUCTIONS = "Answer with the number alone."
AT_ONCE = 32
TURNS = 3  # of one conversation
TEMPERATURE = 0.7  # a run samples by its recipe, which has the same
QUESTIONS = 256  # that are measured
PATIENCE = 300.0  # seconds without a run before the service gives up


@function_tool
def calculator(expression: str) -> str:
    """Multiply, such as 12*37.

    Args:
        expression: two numbers and a star between them
    """
    found = re.fullmatch(r"\s*(\d{1,9})\s*\*\s*(\d{1,9})\s*", expression)
    return str(int(found[1]) * int(found[2])) if found else "not understood"


async def answer(session: dict[str, Any], model: str, question: str, tools: list[Any]) -> str:
    """What the agent says in the end; nothing if it does not come to an end, or calls what is not there."""
    async with AsyncOpenAI(base_url=session["base_url"], api_key=session["api_key"]) as client:
        chat = OpenAIChatCompletionsModel(model=model, openai_client=client)
        settings = ModelSettings(temperature=TEMPERATURE)
        agent = Agent(name="calculator", instructions=INSTRUCTIONS, model=chat, model_settings=settings, tools=tools)
        try:
            return str((await Runner.run(agent, question, max_turns=TURNS)).final_output)
        except (AgentsException, ConflictError):  # a conflict: the run has ended the session meanwhile
            return ""


async def serve(http: httpx.AsyncClient) -> None:
    """One question after the other, until the run has been gone for a while."""
    missed, served = 0.0, False
    while missed < (3.0 if served else PATIENCE):
        try:
            reply = await http.post("/sessions", json={})
        except httpx.TransportError:
            missed += 0.5
            await asyncio.sleep(0.5)
            continue
        missed = 0.0
        if reply.status_code != 200:  # no trajectory waits
            await asyncio.sleep(0.2)
            continue
        session, served = reply.json(), True
        try:
            await answer(session, session["model"], session["task"]["prompt"], [calculator])
            await http.post(f"/sessions/{session['id']}/end")
        except (APIError, httpx.TransportError) as problem:  # the run knows of no end, and counts a failure
            print(f"session {session['id']}: {problem}", file=sys.stderr)


async def measure(http: httpx.AsyncClient) -> None:
    """Print the accuracy on questions of its own, with the tool and without."""
    chance, room = random.Random(3), asyncio.Semaphore(AT_ONCE)
    pairs = [(chance.randrange(100, 1000), chance.randrange(100, 1000)) for _ in range(QUESTIONS)]

    async def right(one: int, other: int, tools: list[Any]) -> bool:
        async with room:
            session = (await http.post("/sessions", json={"task": {"one": one, "other": other}})).json()
            said = await answer(session, session["model"], f"What is {one}*{other}?", tools)
            await http.post(f"/sessions/{session['id']}/end")
            return said.strip() == str(one * other)

    for name, tools in (("with", [calculator]), ("without", [])):
        found = await asyncio.gather(*(right(*pair, tools) for pair in pairs))
        print(f"{name} the calculator: {sum(found)} of {len(found)} right")


async def main(what: str, address: str) -> None:
    """`what` is serve or measure."""
    set_tracing_disabled(True)
    async with httpx.AsyncClient(base_url=address, timeout=600, trust_env=False) as http:
        if what == "serve":
            await asyncio.gather(*(serve(http) for _ in range(AT_ONCE)))
        else:
            await measure(http)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
