"""Extract the program from a completion.

Models show drafts and explanations beside their program. The program is the last finished code block, or the last one
that defines the required functions. A completion without any block is taken as a program as a whole, for models that
were told to write nothing else.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from stretto_verify.thoughts import said

_FENCE = re.compile(
    r"^(?P<margin>[ \t]*(?P<bullet>(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)?)"
    r"(?P<ticks>`{3,}+|~{3,}+)[ \t]*+(?P<label>[\w+.#-]*+)[^\n`]*+$",
    re.MULTILINE,
)
_PYTHON = frozenset({"python", "python3", "py", "py3", "python2", "pypy3"})
_MOST_CLOSING = 8  # most fences that are tried as the end of a block


def extract_program(
    completion: str, preamble: str = "", entry_point: str = "", called: frozenset[str] = frozenset()
) -> str | None:
    """Extract the program of a completion, without its thoughts; `None` if there is none.

    That is the last closed code block marked as Python; the last unmarked one if none is marked; the whole text if it
    has no fence. A block that defines all `called` functions is preferred to later ones, which may only show their use.
    If the program does not define the function `entry_point`, it continues the `preamble` (the function's head, in the
    prompts of HumanEval), which is put before it.

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
    """Whether the program defines a function, class or variable of that name, or imports one, at top level or in a
    class. False if the program is no valid Python."""
    return _defined(_statements(program) or [], name)


def _statements(text: str) -> list[ast.stmt] | None:
    """Statements of a program; None if it is no valid Python."""
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def helpers(preamble: str, entry_point: str) -> str:
    """Code of a preamble without the function `entry_point`, whose body may be missing: imports (but not from
    ``__future__``) and other functions. Empty if the preamble is no valid Python.

    >>> helpers("import math\\n\\ndef half(n): return n / 2\\n\\ndef f(n):", "f")
    'import math\\ndef half(n):\\n    return n / 2'
    """
    for text in (preamble, f"{preamble} pass"):  # a head with a docstring is complete, one without needs a body
        try:
            body = ast.parse(text).body
            return "\n".join(ast.unparse(given) for given in body if not _is_left_out(given, entry_point))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return ""


def _is_left_out(statement: ast.stmt, entry_point: str) -> bool:
    """Whether to drop a statement of the preamble: the required function, which only the completion may define, and
    ``from __future__`` imports, which must come first in a file."""
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
    """Finished blocks marked as Python (or unmarked ones if none is marked), and whether the text has any fence."""
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
        # A string of the program may contain a fence: take the first end that leaves valid Python, else the first.
        valid = (found for found in closing if is_python and _statements(found[1]) is not None)
        end, block = next(valid, closing[0])
        at = end + 1
        if is_python:
            labelled.append(block)
        elif not opening["label"]:
            unlabelled.append(block)
    return labelled or unlabelled, bool(fences)


def _closing(fences: Sequence[re.Match[str]], start: int, ticks: str) -> Iterator[int]:
    """Indices of the fences from `start` on that may close a block opened with `ticks`: at least as many, without a
    label or bullet."""
    for number in range(start, len(fences)):
        fence = fences[number]
        if fence["ticks"].startswith(ticks) and not fence["label"] and not fence["bullet"]:
            yield number


def _without_margin(block: str, width: int) -> str:
    """A block without the indentation, up to `width` characters, of the list item that contains it."""
    return re.sub(rf"^[ \t]{{1,{width}}}", "", block, flags=re.MULTILINE) if width else block
