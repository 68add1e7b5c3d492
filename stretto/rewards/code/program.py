"""The program in a completion.

Models think aloud, show drafts and explain what they have written; the program is the last finished block of code, or
the last one that defines the function which is asked for. A completion without any block is a program itself: so write
models that were told to write nothing else.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from stretto.conversation.thoughts import said

_FENCE = re.compile(
    r"^(?P<margin>[ \t]*(?P<bullet>(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)?)"
    r"(?P<ticks>`{3,}+|~{3,}+)[ \t]*+(?P<label>[\w+.#-]*+)[^\n`]*+$",
    re.MULTILINE,
)
_PYTHON = frozenset({"python", "python3", "py", "py3", "python2", "pypy3"})
_MOST_CLOSING = 8  # fences that are tried as the end of a block


class Program(NamedTuple):
    """A program as it is run: `before` and `after` it other texts, in the same module."""

    source: str
    before: str = ""
    after: str = ""


def extract_program(
    completion: str, preamble: str = "", entry_point: str = "", called: frozenset[str] = frozenset()
) -> str | None:
    """The program of a completion; `None`: there is none.

    A block of code counts when it is closed and says that it is Python; where none says so, when it says nothing
    (beside blocks that do, that is an output or an example). Where functions are `called`, a block that defines them
    goes before those behind it, which show how they are used. With an `entry_point` it may also continue the
    `preamble` (the head of the function, in the prompts of HumanEval): where it does not define that name itself.

    >>> extract_program("First\\n```python\\nx = 1\\n```\\nor\\n```python\\nprint(2)\\n```\\nIt says\\n```\\n2\\n```")
    'print(2)\\n'
    >>> extract_program("return a + b", "def add(a, b):", "add")
    'def add(a, b):return a + b'
    """
    text = said(completion)
    blocks, fenced = _blocks(text)
    if fenced and not blocks:
        return None
    defining = [block for block in blocks if called and all(defines(block, name) for name in called)]
    program = (defining or blocks or [text])[-1]
    if not program.strip():
        return None
    if entry_point and not defines(program, entry_point):
        return preamble + program
    return program


def defines(program: str, name: str) -> bool:
    """Does the program define a function or a variable of that name, at its top or in a class?"""
    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return _defined(tree.body, name)


def helpers(preamble: str, entry_point: str) -> str:
    """What a preamble has beside the function that is asked for: imports, other functions. Empty where it is no Python.

    >>> helpers("import math\\n\\ndef half(n): return n / 2\\n\\ndef f(n):", "f")
    'import math\\ndef half(n):\\n    return n / 2'
    """
    for text in (preamble, f"{preamble} pass"):  # a docstring is a body, a head without one needs another
        try:
            body = ast.parse(text).body
            return "\n".join(ast.unparse(given) for given in body if not _is_left_out(given, entry_point))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return ""


def _is_left_out(statement: ast.stmt, entry_point: str) -> bool:
    """The function itself, since only the completion may define it, and what must stand first in its text."""
    return _defined([statement], entry_point) or (
        isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
    )


def _defined(body: Iterable[ast.stmt], name: str) -> bool:
    return any(
        name in _names(statement)
        or (isinstance(statement, ast.ClassDef) and any(name in _names(x) for x in statement.body))
        for statement in body
    )


def _names(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return [alias.asname or alias.name for alias in aliases]
    return []


def _blocks(text: str) -> tuple[list[str], bool]:
    """The finished blocks of Python, or of no language where there are none, and whether any block was begun."""
    labelled: list[str] = []
    unlabelled: list[str] = []
    fences = list(_FENCE.finditer(text))
    at = 0
    while at < len(fences):
        opening, at = fences[at], at + 1
        closing = [
            (number, _without_margin(text[opening.end() + 1 : fences[number].start()], len(opening["margin"])))
            for number in islice(_closing(fences, at, opening["ticks"]), _MOST_CLOSING)
        ]
        if not closing:
            break
        is_python = opening["label"].lower() in _PYTHON
        # A fence in a text of the program closes nothing: the first that leaves a whole program does, else the first.
        end, block = next((found for found in closing if is_python and _is_program(found[1])), closing[0])
        at = end + 1
        if is_python:
            labelled.append(block)
        elif not opening["label"]:
            unlabelled.append(block)
    return labelled or unlabelled, bool(fences)


def _closing(fences: Sequence[re.Match[str]], start: int, ticks: str) -> Iterator[int]:
    """The fences from `start` that may close a block."""
    for number in range(start, len(fences)):
        fence = fences[number]
        if fence["ticks"].startswith(ticks) and not fence["label"] and not fence["bullet"]:
            yield number


def _is_program(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _without_margin(block: str, width: int) -> str:
    """A block in an item of a list begins where the text of the item does: so much space is in front of its lines."""
    return re.sub(rf"^[ \t]{{1,{width}}}", "", block, flags=re.MULTILINE) if width else block
