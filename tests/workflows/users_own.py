"""Workflows of a user: what they do right, and all that they can do wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import stretto
from stretto.processes.tree import children


class Asks(stretto.Workflow):
    """As many turns as it is told, each with a call that counts itself in a file. While the file `hold` is there, a
    held-out question waits behind its first turn."""

    def __init__(self, turns: int = 3, count: str = "", repeatable: bool = False, hold: str = "") -> None:
        self.turns, self.count, self.repeatable, self.hold = turns, count, repeatable, hold

    def noted(self, text: str) -> str:
        if self.count:
            with Path(self.count).open("a") as file:
                file.write(text + "\n")
        return str(len(text))

    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> stretto.Reward:
        right = 0.0
        for turn in range(self.turns):
            reply = await chat.generate()
            name = f"{task.id}/{task.member}/{turn}"
            told = await chat.tool("noted", {"text": name}, self.noted, repeatable=self.repeatable)
            right += reply.text.endswith(task.answer)
            chat.say(f"+{told}=")
            while self.hold and task.id.startswith("h") and Path(self.hold).exists():
                await asyncio.sleep(0.01)
        return stretto.Reward(right, by_turn=[float(turn) for turn in range(self.turns)], named={"right": right})


class Raises(stretto.Workflow):
    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        await chat.generate()
        raise KeyError("no such thing")


class Quotes(stretto.Workflow):
    """Quotes half a letter, as a model may have written it into the arguments of a call."""

    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        raise ValueError("no tool " + json.loads(r'"\ud83d"'))


class Cramped(stretto.Workflow):
    """Its process may open no more files than one trajectory needs."""

    def __init__(self) -> None:
        taken = set(map(int, os.listdir("/proc/self/fd")))
        most = [number for number in range(4096) if number not in taken][4]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        await chat.generate()
        return 1.0


class Tires(stretto.Workflow):
    """Stops to wait for a thread, which goes on for some seconds."""

    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        await chat.generate()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(time.sleep, 5), 0.01)
        return 1.0


class Catches(stretto.Workflow):
    """Makes a zero of what it cannot have judged."""

    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        reply = await chat.generate()
        try:
            return await chat.score(reply.text)
        except stretto.RefusedRequest:
            return 0.0


class Exits(stretto.Workflow):
    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        sys.exit(3)


class Dies(stretto.Workflow):
    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        await chat.generate()
        os._exit(3)


class Mixed(stretto.Workflow):
    """Some members end their process, while the others are at work."""

    def __init__(self, culprits: list[int]) -> None:
        self.culprits = culprits

    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        await chat.generate()
        if task.member in self.culprits:
            os._exit(3)
        await asyncio.sleep(0.05)
        return 1.0


class Hangs(stretto.Workflow):
    """The first member hangs in Python; the others wait a moment."""

    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        while task.member == 0:
            time.sleep(0.01)
        await asyncio.sleep(0.01)
        await chat.generate()
        return 1.0


class Waits(stretto.Workflow):
    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        await asyncio.Event().wait()
        return 1.0


class Floods(stretto.Workflow):
    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        await asyncio.gather(*(chat.generate() for _ in range(1000)))
        return 1.0


class Endless(stretto.Workflow):
    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        while True:
            await chat.generate()
            chat.say("+1=")


class Returns(stretto.Workflow):
    def __init__(self, what: str) -> None:
        self.what = what

    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        if self.what != "no turn":
            await chat.generate()
        if self.what == "long name":
            return stretto.Reward(1.0, named={"x" * (64 << 20): 1.0})  # type: ignore[return-value]
        found = {
            "nothing": None,
            "text": "1.0",
            "nan": float("nan"),
            "no turn": 1.0,
            "foreign turn": stretto.Reward(1.0, by_turn={7: 1.0}),
            "turn from behind": stretto.Reward(1.0, by_turn={-1: 1.0}),
            "beyond": 1e7,
            "turn beyond": stretto.Reward(1.0, by_turn=[1e300]),
            "part beyond": stretto.Reward(1.0, named={"form": -1e300}),
            "too many": stretto.Reward(1.0, by_turn=[1.0, 1.0]),
            "half a letter": stretto.Reward(1.0, named={"\ud83d": 1.0}),
            "far turn": stretto.Reward(1.0, by_turn={1 << 64: 1.0}),
        }
        return found[self.what]  # type: ignore[return-value]  # that is what is tried


class Mistakes(stretto.Workflow):
    """What a user gets wrong in a call."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    async def run(self, task: stretto.WorkflowTask, chat: Any) -> stretto.Reward:
        wrong: Any = {
            "text": lambda: chat.generate("3+4="),
            "number": lambda: chat.generate([3]),
            "no role": lambda: chat.generate([{"content": "3+4="}]),
            "calls": lambda: chat.generate([{"role": "user", "content": "3", "tool_calls": [7]}]),
            "tokens": lambda: chat.generate(token_ids=["3"]),
            "limit": lambda: chat.generate(max_tokens=0),
            "letter": lambda: chat.generate([{"role": "user", "content": "x"}]),
            "score": lambda: chat.score(7),
            "object": lambda: chat.generate([{"role": "user", "content": object()}]),
            "turn": lambda: chat.generate(),
            "answer": lambda: chat.tool("long", [], lambda: "x" * (64 << 20)),
            "asked": lambda: chat.tool("long", ["x" * (64 << 20)], len),
            "forged": lambda: chat._orders.turn(chat.messages, 1, 7, token_ids=(), tools=(), sampling={}, cause=""),
            "long message": lambda: chat.generate([{"role": "user", "content": "x" * (64 << 20)}]),
        }
        await wrong[self.kind]()
        return stretto.Reward(1.0, by_turn={"first": 1.0})  # type: ignore[dict-item]  # that is what is tried


class Forks(stretto.Workflow):
    """Leaves processes behind that hold on to everything it has, in sessions of their own, and notes them."""

    def __init__(self, notes: str) -> None:
        self.notes = Path(notes)

    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        if (child := os.fork()) == 0:
            os.setsid()
            time.sleep(60)
            os._exit(0)
        other = os.posix_spawnp("sleep", ["sleep", "60"], os.environ, setsid=True)
        with self.notes.open("a") as file:
            file.write(f"{child} {other} ")
        await chat.generate()
        return 1.0


class Orphans(stretto.Workflow):
    """Its tools leave children behind that end soon; rewarded with how many of them its process has to wait for."""

    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        for _ in range(3):
            subprocess.run(["sh", "-c", "(sleep 0.05 &)"], check=True)
        await asyncio.sleep(0.5)
        await chat.generate()
        return float(len(children(os.getpid())))


class Talks(stretto.Workflow):
    """Two roles, a branch, parallel turns and messages of its own."""

    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        other = chat.new([{"role": "user", "content": "1+1="}])
        await asyncio.gather(chat.generate(), chat.copy().generate(), other.generate())
        other.say("+2=")
        await other.generate()
        rewritten = [*chat.messages[:-1], {"role": "assistant", "content": "0"}, {"role": "user", "content": "+3="}]
        await chat.generate(rewritten, cause="history_rewritten")
        return float(await chat.score("2"))


class Offers(stretto.Workflow):
    """Speaks before its first turn, offers a tool with two of its turns, and has another role."""

    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        tools = [{"name": "add", "description": "Adds two numbers."}]
        for offered in ([], tools, [], tools):
            chat.say("Go on.")
            await chat.generate(tools=offered)
        await chat.new([{"role": "user", "content": "1+1="}]).generate()
        return 1.0


class Counts(stretto.Workflow):
    """Rewards the digits of each turn: something that a model without any knowledge learns in seconds."""

    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> stretto.Reward:
        shares = []
        for _ in range(2):
            reply = await chat.generate()
            shares.append(sum(letter.isdecimal() for letter in reply.text) / max(1, len(reply.text)))
            chat.say("=")
        return stretto.Reward(sum(shares) / 2, by_turn=shares)


class Hurries(stretto.Workflow):
    """Stops to wait for its first turn after some seconds, and not before the file `begun` is there, and asks for
    another one. Meanwhile it takes no message."""

    def __init__(self, seconds: float = 0.0, begun: str = "/") -> None:
        self.seconds, self.begun = seconds, Path(begun)

    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> stretto.Reward:
        first = asyncio.ensure_future(chat.generate())
        await asyncio.sleep(0)
        time.sleep(self.seconds)
        while not self.begun.exists():
            time.sleep(0.01)
        first.cancel()
        await asyncio.wait([first])  # as `asyncio.wait_for` does: the order is taken back before the next one is given
        await chat.new([{"role": "user", "content": "5+6="}]).generate()
        return stretto.Reward(1.0, by_turn=[0.25])


class Hesitates(stretto.Workflow):
    """Orders a call that must not be made twice, and takes the order back before it can be made."""

    def __init__(self, paid: str) -> None:
        self.paid = Path(paid)

    async def run(self, task: stretto.WorkflowTask, chat: stretto.Conversation) -> float:
        call = asyncio.ensure_future(chat.tool("pay", [], self.paid.touch))
        await asyncio.sleep(0)
        call.cancel()
        await chat.generate()
        return 1.0
