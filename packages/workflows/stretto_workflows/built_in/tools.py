"""Tools: a calculator, bounded so that no expression takes long, Python in the sandbox, a search over a local
folder.
"""

from __future__ import annotations

import ast
import asyncio
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto_verify.sandbox.config import SandboxConfig
from stretto_verify.sandbox.probe import probe
from stretto_verify.sandbox.sandbox import Sandbox, SandboxFailed
from stretto_workflows.conversation import Conversation, Workflow
from stretto_workflows.task import Reward, WorkflowTask

_MOST_CHARACTERS, _LARGEST_POWER, _LARGEST = 500, 64, 1e30
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def calculate(expression: str) -> str:
    """Value of an arithmetic expression, as text.

    >>> calculate("(3 + 4) * 5"), calculate("7 / 2")
    ('35', '3.5')

    Raises:
        ValueError: the text is not arithmetic, is too long, or its numbers or powers are too large.
        ZeroDivisionError: the expression divides by zero.
    """
    if len(expression) > _MOST_CHARACTERS:
        raise ValueError(f"more than {_MOST_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    value = _value(tree.body)
    return str(int(value)) if float(value).is_integer() else str(value)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            found: float = number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            found = _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            one, other = _value(left), _value(right)
            if isinstance(op, ast.Pow) and abs(other) > _LARGEST_POWER:
                raise ValueError(f"a power of {other:g}; {_LARGEST_POWER} is the largest")
            try:
                found = _OPERATORS[type(op)](one, other)
            except OverflowError:  # a power of decimals beyond any float
                found = math.inf
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is no arithmetic")
    if isinstance(found, complex) or not abs(found) <= _LARGEST:
        raise ValueError("a number is too large, or not a real number")
    return found


_SHOWN = 2000  # characters of a tool's result
_WORD = re.compile(r"\w+")
_LARGEST_TEXT = 1 << 20  # bytes of a file that are searched
_MOST_FILES = 10_000


class Search:
    """Okapi BM25 search over the passages of a folder's text files (k1 = 1.5, b = 0.75; Robertson and Zaragoza, 2009).
    Called with a query, it returns the best `results` passages as one text, each with its file's name; "nothing was
    found" if none has a word of the query."""

    def __init__(self, folder: Path, results: int) -> None:
        """Read the folder's .txt and .md files, its sub-folders' too: at most 10,000, and 1 MiB of each. Passages are
        separated by blank lines. `results`: most passages of one search.

        Raises:
            ValueError: there is no text in the folder.
        """
        self._results = results
        files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".txt", ".md") and path.is_file()]
        self._passages = [
            (path.relative_to(folder), passage.strip())
            for path in files[:_MOST_FILES]
            for passage in path.read_bytes()[:_LARGEST_TEXT].decode(errors="replace").split("\n\n")
            if passage.strip()
        ]
        if not self._passages:
            raise ValueError(f"{folder}: there are no .txt or .md files with text in it")
        self._counts = [Counter(_words(text)) for _, text in self._passages]
        self._length = sum(sum(counts.values()) for counts in self._counts) / len(self._counts)
        self._with = Counter(word for counts in self._counts for word in counts)

    def __call__(self, query: str) -> str:
        scores = [(self._score(counts, _words(query)), -at) for at, counts in enumerate(self._counts)]
        best = [-at for score, at in sorted(scores, reverse=True)[: self._results] if score > 0]
        found = [f"{self._passages[at][0]}: {self._passages[at][1]}" for at in best]
        return "\n\n".join(found) or "nothing was found"

    def _score(self, counts: Counter[str], query: Sequence[str]) -> float:
        length, total = sum(counts.values()), len(self._counts)
        weight = 1.5 * (0.25 + 0.75 * length / self._length)
        rarity = {word: math.log(1 + (total - self._with[word] + 0.5) / (self._with[word] + 0.5)) for word in query}
        return sum(rarity[word] * counts[word] * 2.5 / (counts[word] + weight) for word in query if counts[word])


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]


class PythonTool:
    """Runs Python programs in the sandbox, without network and without files of this machine, each for at most
    `seconds` of CPU time. Called with the source, it returns the program's output, and how it ended if it failed; if
    the sandbox fails, the reason."""

    def __init__(self, seconds: float) -> None:
        """Try the sandbox.

        Raises:
            SandboxRefused: no sandbox holds on this machine.
        """
        self._config, self._seconds = SandboxConfig(seconds=seconds, completion_seconds=max(10.0, seconds)), seconds
        self._walls, _ = probe(self._config)

    def __call__(self, code: str) -> str:
        try:
            with Sandbox(self._walls, self._config) as sandbox:
                ended = sandbox.run({"source": code}, b"", self._seconds)
        except SandboxFailed as failure:
            return f"the program could not be run: {failure}"
        return ended.output.decode(errors="replace") + ("" if ended.well else f"\n[{ended.how}]")


def _described(name: str, description: str, argument: str, meaning: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {argument: {"type": "string", "description": meaning}}}
    told = {"name": name, "description": description, "parameters": schema | {"required": [argument]}}
    return {"type": "function", "function": told}


_DESCRIBED = {
    "calculator": _described("calculator", "Evaluates an arithmetic expression.", "expression", "such as (3+4)*5"),
    "python": _described("python", "Runs a Python program and returns what it prints.", "code", "the program"),
    "search": _described("search", "Searches the documents.", "query", "words"),
}


class Tools(Workflow):
    """The model calls tools, in the format of its chat template, until a completion has no call or `turns` completions
    are sampled. The last completion is judged.

    The text of a tool's result is cut to 2,000 characters.

    Args:
        tools: any of calculator, python, search.
        folder: folder for `search` (its .txt and .md files); "": none.
        turns: most completions; the last one is judged.
        seconds: time limit of one program of `python`.
        results: most passages returned by one search.

    Raises:
        ValueError: a tool is unknown, or `search` has no folder or no text in it.
        SandboxRefused: no sandbox holds on this machine (for `python`).
    """

    needs_chat_template = "tells the model its tools by the chat template"

    def __init__(
        self,
        tools: Sequence[str] = ("calculator",),
        folder: str = "",
        turns: int = 6,
        seconds: float = 5.0,
        results: int = 3,
    ) -> None:
        if unknown := [name for name in tools if name not in _DESCRIBED]:
            raise ValueError(f"there is no tool {unknown[0]!r}; there are {', '.join(_DESCRIBED)}")
        if "search" in tools and not folder:
            raise ValueError("the tool 'search' needs a folder")
        made: dict[str, Callable[[], Callable[[str], str]]] = {
            "calculator": lambda: calculate,
            "python": lambda: PythonTool(seconds),
            "search": lambda: Search(Path(folder).expanduser(), results),
        }
        self._tools = {name: made[name]() for name in tools}
        self._turns = turns

    async def run(self, task: WorkflowTask, chat: Conversation) -> Reward:
        """Run one trajectory, in which the model calls tools until a completion has no call or the turns are used up.
        Returns the reward of the last completion; `named` has the number of "calls"."""
        described, calls = [_DESCRIBED[name] for name in self._tools], 0
        reply = await chat.generate(tools=described)
        for _ in range(self._turns - 1):
            if not reply.calls:
                break
            told = await asyncio.gather(*(self._called(chat, call["function"]) for call in reply.calls))
            calls += len(told)
            for call, text in zip(reply.calls, told, strict=True):
                chat.say(text[:_SHOWN], role="tool", tool_call_id=call["id"])
            reply = await chat.generate(tools=described)
        return Reward(await chat.score(reply.text), named={"calls": float(calls)})

    async def _called(self, chat: Conversation, function: Mapping[str, str]) -> str:
        name = function["name"]
        if name not in self._tools:
            return f"there is no tool {name!r}"
        arguments = json.loads(function["arguments"])
        return await chat.tool(name, arguments, self._tools[name], repeatable=True)  # no tool has side effects
