"""An agent of langgraph: whole | stream; its address and key are OPENAI_BASE_URL and OPENAI_API_KEY."""

import sys

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = create_react_agent(ChatOpenAI(model="tiny", streaming=sys.argv[1:] == ["stream"]), [add], prompt="Be brief.")
print(agent.invoke({"messages": [("user", "1+2?")]})["messages"][-1].content)
