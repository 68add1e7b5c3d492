"""Prompts of the built-in workflows, with names in braces for what is put in."""

from __future__ import annotations

import re


def filled(words: str, **parts: str) -> str:
    """Put each part in place of its name in braces. Braces within a part stay: a question may hold ``{answer}`` itself.

    >>> filled("Q: {prompt} A: {answer}", prompt="Write {answer}.", answer="7")
    'Q: Write {answer}. A: 7'
    """
    names = "|".join(map(re.escape, parts))
    return re.sub(rf"\{{({names})\}}", lambda found: parts[found[1]], words)
