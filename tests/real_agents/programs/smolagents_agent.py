"""An agent of smolagents; its address and key are OPENAI_BASE_URL and OPENAI_API_KEY."""

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


agent = ToolCallingAgent(tools=[add], model=OpenAIServerModel(model_id="tiny"), max_steps=3, verbosity_level=0)
print(agent.run("1+2?"))
