"""An agent of pydantic-ai: whole | stream; of OPENAI_BASE_URL, OPENAI_API_KEY and MODEL."""

import asyncio
import os
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

agent = Agent(OpenAIChatModel(os.environ["MODEL"], provider=OpenAIProvider()), instructions="Be brief.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main(form: str) -> None:
    if form == "stream":
        async with agent.run_stream("1+2?") as streamed:
            print(await streamed.get_output())
    else:
        print((await agent.run("1+2?")).output)


asyncio.run(main(*sys.argv[1:]))
