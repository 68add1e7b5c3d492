"""A taskset of verifiers, and a harness that needs no process of its own: it calls its tool itself."""

import json
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult

__all__ = ["InProcess", "Sums"]
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add two numbers.", "parameters": {"type": "object"}},
}


class SumData(vf.TaskData):
    """Its question is the prompt."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Right if the last reply has the answer."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class Sums(vf.Taskset[SumTask]):
    """``1+2?``, ``2+3?`` ..."""

    def load(self) -> Iterator[SumTask]:
        for idx in range(1, 9):
            yield SumTask(SumData(idx=idx, prompt=f"{idx}+{idx + 1}?", answer=str(2 * idx + 1)))


class InProcess(Harness[HarnessConfig]):
    """Asks until there is no call of the tool any more. `plain` asks once, without the tool."""

    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        _, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "user", "content": prompt}]
        tools: dict[str, Any] = {} if "plain" in self.config.env else {"tools": [TOOL]}
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            while True:
                reply = await client.chat.completions.create(model=ctx.model, messages=messages, **tools)
                said = reply.choices[0].message
                messages.append(said.model_dump(exclude_none=True))
                for call in said.tool_calls or []:
                    total = sum(json.loads(call.function.arguments).values())
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
                if not said.tool_calls:
                    return ProgramResult(exit_code=0, stdout="", stderr="")
