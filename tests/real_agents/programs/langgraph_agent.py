"""An agent of langgraph: whole | stream; of OPENAI_BASE_URL, OPENAI_API_KEY and MODEL."""

import os
import sys

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = ChatOpenAI(model=os.environ["MODEL"], streaming=sys.argv[1:] == ["stream"])
agent = create_react_agent(model, [add], prompt="Be brief.")
print(agent.invoke({"messages": [("user", "1+2?")]})["messages"][-1].content)
