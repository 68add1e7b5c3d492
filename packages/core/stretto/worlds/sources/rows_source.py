"""Rows of a dataset as a source of questions: the dataset, and the columns with prompt and gold answer, or a Jinja
template that writes the prompt from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BaseModel, Field, model_validator

from stretto.core.errors import DataError, Problem, nearest
from stretto.core.jsonl import mistake, read_each
from stretto.core.records import derive_seed
from stretto.worlds.data.rows import Columns, question
from stretto.worlds.data.task import Question
from stretto.worlds.sources.mappings import MAPPINGS, mapped
from stretto.worlds.sources.readers import Place, rows_of


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


_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"


class RowsSource(BaseModel, extra="forbid", frozen=True):
    """Rows of a dataset: a local file or folder, or a name of the Hugging Face hub."""

    kind: Literal["rows"] = "rows"
    name: str = Field("", pattern=f"^({_NAME})?$", description="name of the source; left out: the dataset's")
    data: str = Field(
        description="a file (.jsonl, .csv, .tsv, .parquet, .arrow; .jsonl.gz, .csv.gz), a folder of datasets' "
        "save_to_disk, or owner/name of the hub; files are relative to the recipe's folder"
    )
    subset: str | None = Field(None, description="configuration of the dataset, such as 'main'")
    split: str = Field("train", description="the split of a hub dataset or of a saved folder")
    revision: str | None = Field(
        None, description="branch, tag or commit of a hub dataset; only a commit is sure to stay the same"
    )
    rows: int | None = Field(None, ge=1, description="number of rows to read, from the first; left out: all")
    streaming: bool = Field(False, description="read a hub dataset without storing it; needs `rows`")
    mapping: str | None = Field(None, description=f"known dataset whose columns are used: {', '.join(MAPPINGS)}")
    prompt_field: str = Field("prompt", description="key of the question: a text, or chat messages")
    answer_field: str = Field("answer", description="key of the gold answer")
    demonstration_field: str = Field(
        "demonstration", description="key of the demonstration for the warm start; rows may lack it"
    )
    id_field: str | None = Field(None, description="key of a unique name of the row")
    duplicates: Literal["keep", "drop"] | None = Field(
        None,
        description="what happens to a row that repeats the prompt and gold answer of an earlier one; left "
        "out: the mapping decides",
    )
    template: str | None = Field(None, description="Jinja template that writes the prompt from the row's columns")
    system_prompt: str | None = Field(
        None, description="system message of every chat; turns prompts that are texts into chats"
    )
    chat_template: Literal["none", "auto"] = Field(
        "none",
        description="how prompts that are texts become token ids; auto: with the tokenizer's chat template, if "
        "it has one",
    )
    template_arguments: dict[str, bool | int | float | str] = Field({}, description="given to the chat template")
    weight: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="share of an epoch's prompts that come from this source, relative to the other weights",
    )
    held_out: int = Field(0, ge=0, description="number of last rows that are kept for evaluation")

    @property
    def title(self) -> str:
        """Name of the source: the one given in the recipe, else that of the dataset."""
        return self.name or Path(self.data).name.partition(".")[0]

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.mapping is not None and self.mapping not in MAPPINGS:
            raise ValueError(f"mapping {self.mapping!r} is unknown; {nearest(self.mapping, MAPPINGS)}")
        if self.mapping is not None and (named := self.model_fields_set & {"prompt_field", "answer_field"}):
            raise ValueError(f"mapping = {self.mapping!r} names the columns, and so does {', '.join(sorted(named))}")
        if self.streaming and self.rows is None:
            raise ValueError("streaming = true reads as many rows as `rows` says; give it")
        if self.template is not None:
            compiled(self.template)
        return self

    def questions(self, seed: int) -> tuple[list[Question], list[Question], list[str]]:
        """Read the questions; returns those for training, the held-out ones, and notes for the user (repeated rows that
        were left out, say). `seed` is not used.

        Raises:
            DataError: the dataset cannot be read, has bad rows (names each), or no more rows than `held_out`.
        """
        columns = Columns(
            prompt=self.prompt_field,
            answer=self.answer_field,
            demonstration=self.demonstration_field,
            id=self.id_field,
            system_prompt=self.system_prompt,
            as_chat=self.chat_template == "auto",
            template_arguments=tuple(self.template_arguments.items()),
            render=compiled(self.template) if self.template is not None else None,
            source=self.title,
        )
        distinct = self.mapping is not None and MAPPINGS[self.mapping].distinct
        seen: set[int] | None = set() if self.duplicates == "drop" or (self.duplicates is None and distinct) else None
        found = read_each(
            self.data, self._numbered(), lambda row, place: _read(row, place, self.mapping, columns, seen)
        )
        kept, notes = [one for one in found if one is not None], list[str]()
        if len(kept) < len(found):
            notes.append(f"{self.title}: {len(found) - len(kept):,} of {len(found):,} rows repeat another, left out")
        if self.held_out and len(kept) <= self.held_out:
            told = f"{len(kept)} rows, and held_out = {self.held_out} of them are for evaluation"
            raise DataError([Problem(self.data, told, "give more rows, or a smaller held_out")])
        end = len(kept) - self.held_out
        return kept[:end], kept[end:], notes

    def _numbered(self) -> Iterator[tuple[str, tuple[int, Any]]]:
        place = Place(self.data, self.subset, self.split, self.revision, self.streaming)
        numbered = ((where, (number, row)) for number, (where, row) in enumerate(rows_of(place), start=1))
        return islice(numbered, self.rows)


def _read(
    row: tuple[int, Any], place: str, mapping: str | None, columns: Columns, seen: set[int] | None
) -> Question | None:
    """Convert a numbered row, after the `mapping` (None: none), to a question; None if it repeats an earlier one.
    `seen`: digests of the earlier prompts with their gold answers, to which this one's is added; None to keep repeated
    rows."""
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
