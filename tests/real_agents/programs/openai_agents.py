"""An agent of openai-agents: chat | responses [stream | ids]; of OPENAI_BASE_URL, OPENAI_API_KEY and MODEL."""

import asyncio
import os
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main(form: str, *words: str) -> None:
    kind = OpenAIChatCompletionsModel if form == "chat" else OpenAIResponsesModel
    model = kind(model=os.environ["MODEL"], openai_client=AsyncOpenAI())
    agent = Agent(name="adder", instructions="Be brief.", model=model, tools=[add])
    if words == ("stream",):
        streamed = Runner.run_streamed(agent, "1+2?", max_turns=4)
        async for _ in streamed.stream_events():
            pass
        print(streamed.final_output)
    else:
        ids = words == ("ids",)  # in place of the messages that were told before
        print((await Runner.run(agent, "1+2?", max_turns=4, auto_previous_response_id=ids)).final_output)


set_tracing_disabled(True)
asyncio.run(main(*sys.argv[1:]))
