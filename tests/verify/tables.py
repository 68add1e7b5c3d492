"""Tables of cases, several in a line."""

import re
from collections.abc import Iterator
from pathlib import Path

DATA = Path(__file__).parents[1] / "data"


def cases(table: str) -> list[tuple[str, str, bool]]:
    """What is expected, what is found, and whether that is right, of each case of a table.

    What is expected stands before what is found: ✓ one that is right, ✗ one that is wrong, ☑ and ☒ the same in a box of
    LaTeX. A broken bar or a new line divides what is expected; a line that begins with a mark goes on with the last
    one. ⏎ is a line break, · a space.
    """
    return list(_cases(table))


def _cases(table: str) -> Iterator[tuple[str, str, bool]]:
    expected = ""
    for part in re.split(" ¦ |\n", table.strip()):
        first, *told = re.split(r" ?([✓✗☑☒]) ", part.replace("⏎", "\n"))
        expected = first.replace("·", " ") or expected
        for mark, found in zip(told[::2], told[1::2], strict=True):
            text = found.replace("·", " ")
            yield expected, rf"\boxed{{{text}}}" if mark in "☑☒" else text, mark in "✓☑"


def sections(name: str) -> dict[str, str]:
    """The texts of a file of tests/data, each by the name that stands before it in a line behind ``== ``."""
    _, *parts = re.split(r"^== (.*)\n", (DATA / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: text.removesuffix("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}
