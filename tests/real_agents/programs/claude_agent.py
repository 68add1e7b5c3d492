"""An agent of claude-agent-sdk with a tool of its own; of ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and MODEL."""

import asyncio
import os
from typing import Any

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, create_sdk_mcp_server, query, tool


@tool("add", "Add two numbers.", {"a": int, "b": int})
async def add(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": str(arguments["a"] + arguments["b"])}]}


async def main() -> None:
    options = ClaudeAgentOptions(
        model=os.environ["MODEL"],
        max_turns=4,
        system_prompt="Be brief.",
        tools=[],
        setting_sources=[],
        mcp_servers={"sums": create_sdk_mcp_server("sums", tools=[add])},
        allowed_tools=["mcp__sums__add"],
        env={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1", "ENABLE_TOOL_SEARCH": "false"},
    )
    async for message in query(prompt="1+2?", options=options):
        if isinstance(message, ResultMessage):
            print(message.result)


asyncio.run(main())
