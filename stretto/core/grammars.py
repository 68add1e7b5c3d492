"""Grammars as text: rules of Lark in the dialect of llguidance, in which JSON schemas, regular expressions and words
stand side by side. `start` is the whole completion; its end of sequence is no part of the rules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stretto.core.errors import RefusedRequest

MOST_GRAMMAR = 32_768  #: characters; what is compiled of more could hold an engine for seconds

#: JSON as most models write it, with one way to write each value: a model cannot go on with spaces for ever.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def json_rule(schema: Mapping[str, Any] | None) -> str:
    """The right side of a rule: JSON that follows a schema; any object without one.

    >>> json_rule({"type": "null"})[:29]
    '%json {"type": "null", "x-gui'

    Raises:
        RefusedRequest: the schema is nested too deeply to be written.
    """
    told = {"type": "object"} if schema is None else schema
    try:
        return f"%json {json.dumps({**told, 'x-guidance': _WRITTEN})}"
    except RecursionError:
        raise RefusedRequest("sampling.grammar", "a schema nested too deeply", "fewer levels") from None


def json_grammar(schema: Mapping[str, Any] | None) -> str:
    """The grammar of a completion that is JSON; see `json_rule`."""
    return f"start: {json_rule(schema)}"
