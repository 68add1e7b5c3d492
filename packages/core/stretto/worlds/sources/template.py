"""Prompts written by a Jinja template from the columns of a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stretto.core.errors import nearest
from stretto.core.jsonl import mistake


def compiled(source: str) -> Callable[[Mapping[str, Any], str], str]:
    """Compile a Jinja template to a function ``render(row, place)``, which returns the prompt. It raises a `mistake` if
    the row lacks a name that the template uses, or the template fails on it.

    >>> compiled("{{ question }}\\nAnswer:")({"question": "3+8="}, "rows.jsonl:1")
    '3+8=\\nAnswer:'

    Raises:
        ValueError: the template is broken.
    """
    try:
        template = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(
            source
        )
    except TemplateSyntaxError as error:
        raise ValueError(f"the template is broken in line {error.lineno}: {error.message}") from None

    def render(row: Mapping[str, Any], place: str) -> str:
        try:
            return template.render(row)
        except UndefinedError as error:
            name = str(error).split("'")[1] if "'" in str(error) else ""
            raise mistake(place, f"the template uses a name that the row lacks ({error})", nearest(name, row)) from None
        # A template is a user's program, which calls methods of the row's values.
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise mistake(place, f"the template cannot be rendered: {type(error).__name__}: {error}") from None

    return render
