"""The program in an answer.

Models think aloud, show drafts and explain what they have written; the program is the last finished block of code.
An answer without any block is a program itself: so answer models that were told to write nothing else.
"""

from __future__ import annotations

import ast
import re

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+.#-]*)[^\n`]*$", re.MULTILINE)
_PYTHON = frozenset({"", "python", "python3", "py", "py3", "python2", "pypy3"})
_THOUGHTS_END = "</think>"


def extract_program(answer: str, preamble: str = "", entry_point: str = "") -> str | None:
    """The program of an answer; `None`: there is none.

    A block of code counts when it is closed and says that it is Python, or says nothing. With an `entry_point` the
    answer may also go on from the `preamble` (the head of the function, in the prompts of HumanEval): it does when it
    does not define that name itself.

    >>> extract_program("First\\n```python\\nx = 1\\n```\\nor rather\\n```\\nprint(2)\\n```\\nas asked.")
    'print(2)\\n'
    >>> extract_program("return a + b", "def add(a, b):", "add")
    'def add(a, b):return a + b'
    """
    text = answer.rpartition(_THOUGHTS_END)[2]
    blocks, fenced = _blocks(text)
    if fenced and not blocks:
        return None
    program = blocks[-1] if blocks else text
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
    places = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    return any(name in _names(statement) for body in places for statement in body)


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
    """The finished blocks of Python, and whether any block was begun."""
    found: list[str] = []
    opening: re.Match[str] | None = None
    fenced = False
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening, fenced = fence, True
        elif fence[1].startswith(opening[1]) and not fence[2]:
            if opening[2].lower() in _PYTHON:
                found.append(text[opening.end() + 1 : fence.start()])
            opening = None
    return found, fenced
