"""An agent of smolagents; of OPENAI_BASE_URL, OPENAI_API_KEY and MODEL."""

import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


model = OpenAIServerModel(model_id=os.environ["MODEL"])
agent = ToolCallingAgent(tools=[add], model=model, max_steps=3, verbosity_level=0)
print(agent.run("1+2?"))
