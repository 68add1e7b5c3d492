"""An agent of openai-agents with a calculator, as a service: it gets questions from a run and answers them.

    python examples/agents/calculator.py serve http://127.0.0.1:8790       serves a run until the run has ended
    python examples/agents/calculator.py measure http://127.0.0.1:8790     measures accuracy with the tool and without

It needs `openai-agents` and nothing of stretto: it knows only the gateway's address. `recipes/calculator_agent.toml` is
the run; `stretto gateway MODEL --port 8790` serves a model without a run.
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
TURNS = 3  # most turns of a conversation
TEMPERATURE = 0.7  # same as in the recipe; in a run the recipe's counts
QUESTIONS = 256  # of a measurement
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
    """Let the agent answer a question in a session. Return its final output; "" if it reaches no end, or calls an
    unknown tool."""
    async with AsyncOpenAI(base_url=session["base_url"], api_key=session["api_key"]) as client:
        chat = OpenAIChatCompletionsModel(model=model, openai_client=client)
        settings = ModelSettings(temperature=TEMPERATURE)
        agent = Agent(name="calculator", instructions=INSTRUCTIONS, model=chat, model_settings=settings, tools=tools)
        try:
            return str((await Runner.run(agent, question, max_turns=TURNS)).final_output)
        except (AgentsException, ConflictError):  # conflict: the run has ended the session meanwhile
            return ""


async def serve(http: httpx.AsyncClient) -> None:
    """Answer one question of the run after the other, until the run cannot be reached for a while."""
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
        except (APIError, httpx.TransportError) as problem:  # the session is not ended, so the run counts a failure
            print(f"session {session['id']}: {problem}", file=sys.stderr)


async def measure(http: httpx.AsyncClient) -> None:
    """Print the accuracy on random questions, with the tool and without."""
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
    """Serve a run, or measure, by `what` ("serve" or "measure"), at the gateway's address."""
    set_tracing_disabled(True)
    async with httpx.AsyncClient(base_url=address, timeout=600, trust_env=False) as http:
        if what == "serve":
            await asyncio.gather(*(serve(http) for _ in range(AT_ONCE)))
        else:
            await measure(http)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
