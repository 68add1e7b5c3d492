"""A workflow that fails, in one way or another."""

import asyncio
import json
import sys
import tempfile

import stretto
from stretto_workflows.built_in.tools import PythonTool

#: Leaves a process of its own behind, and a file; and never ends by itself.
PROGRAM = """
import os, time
open("left", "w").close()
if os.fork() == 0:
    os.setsid()
time.sleep(60)
"""
SANDBOXED = 10  # one of so many members runs a program


class Fails(stretto.Workflow):
    def __init__(self) -> None:
        self.python = PythonTool(seconds=0.05)

    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        if task.member % SANDBOXED == 0:
            await chat.tool("python", [PROGRAM], self.python)
        match task.member % 5:
            case 0:
                raise TimeoutError("the sandbox is lost")
            case 1:
                sys.exit(3)
            case 2:
                return float("nan")
            case 3:
                tempfile.TemporaryDirectory(ignore_cleanup_errors=True).name.index("no such thing")
        await chat.generate()
        with tempfile.TemporaryFile() as scratch:
            await asyncio.sleep(0)
            raise OSError(f"no space left for {scratch.name}")


class TwoTurns(stretto.Workflow):
    """Two turns, for the reward that the answer has for each member."""

    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        for _ in range(2):
            await chat.generate()
        return float(json.loads(task.answer)[task.member])
