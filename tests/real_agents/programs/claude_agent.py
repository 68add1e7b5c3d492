"""An agent of claude-agent-sdk, plain or with everything (all tools and instructions that it has).

Of ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and MODEL."""

import asyncio
import os
import sys
from typing import Any

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, create_sdk_mcp_server, query, tool


@tool("add", "Add two numbers.", {"a": int, "b": int})
async def add(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": str(arguments["a"] + arguments["b"])}]}


async def main(how: str) -> None:
    plain: dict[str, Any] = {"system_prompt": "Be brief.", "tools": [], "setting_sources": []}
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1"}
    options = ClaudeAgentOptions(
        model=os.environ["MODEL"],
        max_turns=6,
        mcp_servers={"sums": create_sdk_mcp_server("sums", tools=[add])},
        allowed_tools=["mcp__sums__add"],
        env=quiet | ({"ENABLE_TOOL_SEARCH": "false"} if how == "plain" else {}),
        **(plain if how == "plain" else {}),
    )
    async for message in query(prompt="1+2?", options=options):
        if isinstance(message, ResultMessage):
            print(message.result)


asyncio.run(main(*sys.argv[1:]))
