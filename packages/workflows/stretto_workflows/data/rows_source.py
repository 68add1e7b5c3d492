"""Rows of a dataset as a source of questions: the dataset, and the columns with prompt and gold answer, or a Jinja
template that writes the prompt from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stretto.core.errors import DataError, Problem, nearest, several
from stretto.core.records import derive_seed
from stretto.rollout.questions import Question
from stretto.rollout.tasks import RowsSource
from stretto_workflows.data.jsonl import mistake, read_each
from stretto_workflows.data.mappings import MAPPINGS, mapped
from stretto_workflows.data.readers import rows_of
from stretto_workflows.data.rows import Columns, question


def compiled(source: str) -> Callable[[Mapping[str, Any], str], str]:
    """Compile a Jinja template to a function ``render(row, place)``, which returns the prompt. It raises a DataError at
    `place` if the row lacks a name that the template uses, or the template fails on it.

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
    except RecursionError:
        raise ValueError("the template is broken: its expressions are nested too deeply") from None

    def render(row: Mapping[str, Any], place: str) -> str:
        try:
            return template.render(row)
        except UndefinedError as error:
            name = str(error).split("'")[1] if "'" in str(error) else ""
            raise mistake(place, f"the template uses a name that the row lacks ({error})", nearest(name, row)) from None
        # A template is a user's program, which calls methods of the row's values.
        except (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise mistake(place, f"the template cannot be rendered: {type(error).__name__}: {error}") from None

    return render


def questions(source: RowsSource) -> tuple[list[Question], list[Question], list[str]]:
    """Read the questions; returns those for training, the last `held_out` ones, and notes for the user: how many
    repeated rows were left out. They are left out if `duplicates` says so, or by default if the mapping's dataset
    repeats its rows.

    Raises:
        DataError: the dataset cannot be read, has invalid rows, or no more rows than `held_out`.
    """
    render = compiled(source.template) if source.template is not None else None
    columns = Columns.of(source, render=render, source=source.title)
    distinct = source.mapping is not None and MAPPINGS[source.mapping].distinct
    seen: set[int] | None = set() if source.duplicates == "drop" or (source.duplicates is None and distinct) else None
    found = read_each(
        source.data, _numbered(source), lambda row, place: _read(row, place, source.mapping, columns, seen)
    )
    kept, notes = [one for one in found if one is not None], list[str]()
    if len(kept) < len(found):
        notes.append(f"{source.title}: {len(found) - len(kept):,} of {len(found):,} rows repeat another, left out")
    if source.held_out and len(kept) <= source.held_out:
        told = f"{several(len(kept), 'row')}, and held_out = {source.held_out} of them are for evaluation"
        raise DataError([Problem(source.data, told, "give more rows, or a smaller held_out")])
    end = len(kept) - source.held_out
    return kept[:end], kept[end:], notes


def _numbered(source: RowsSource) -> Iterator[tuple[str, tuple[int, Any]]]:
    """The first `source.rows` rows (None: all) as (place, (number from 1, function without arguments that parses the
    row)); the place is for messages, such as "rows.jsonl:7"."""
    numbered = ((where, (number, row)) for number, (where, row) in enumerate(rows_of(source), start=1))
    return islice(numbered, source.rows)


def _read(
    row: tuple[int, Any], place: str, mapping: str | None, columns: Columns, seen: set[int] | None
) -> Question | None:
    """Convert a row (its number, and the function that parses it) to a question; None if it repeats an earlier one.
    `mapping`: name of the mapping that is applied first; None: none. `seen`: digests of the earlier prompts with their
    gold answers, to which this one's is added; None to keep repeated rows."""
    number, read = row
    values: Mapping[str, Any] = read()
    found = question(mapped(mapping, values, place) if mapping is not None else values, number, place, columns)
    if seen is None:
        return found
    digest = derive_seed(found.text, found.answer)
    if digest in seen:
        return None
    seen.add(digest)
    return found
