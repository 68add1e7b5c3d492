"""Griffe extension for `make docs`: examples in docstrings (`>>>` and their output) become blocks of code.

Markdown would read `>>>` as a quotation, and ``[1.0]`` below it as a link.
"""

from __future__ import annotations

from typing import Any

import griffe


def fenced(text: str) -> str:
    """Docstring with each example, from its first ``>>>`` to the next empty line, in a fence of its own.

    >>> fenced(">>> 1 + 1\\n2\\n\\nMore.").splitlines()
    ['```pycon', '>>> 1 + 1', '2', '```', '', 'More.']
    """
    lines: list[str] = []
    open_ = False
    for line in text.splitlines():
        if open_ and not line.strip():
            lines.append("```")
            open_ = False
        elif not open_ and line.lstrip().startswith(">>>"):
            lines.append("```pycon")
            open_ = True
        lines.append(line)
    return "\n".join([*lines, "```"] if open_ else lines)


class DoctestBlocks(griffe.Extension):
    """Fences the examples of every docstring that the site shows."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace the docstring of one object, once it is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
