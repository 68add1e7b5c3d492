"""Section ``[task]`` with ``kind = "dataset"``: questions from one or more sources, mixed by their weights."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from stretto.core.jsonl import Mistakes
from stretto.doors.door import AS_TUPLE
from stretto.worlds.data.task import Question, Questions
from stretto.worlds.sources.gym_source import GymSource
from stretto.worlds.sources.rows_source import RowsSource


def _with_kind(value: Any) -> Any:
    return {"kind": "rows", **value} if isinstance(value, dict) else value


Source = Annotated[Annotated[RowsSource | GymSource, Field(discriminator="kind")], BeforeValidator(_with_kind)]
Sources = Annotated[tuple[Source, ...], AS_TUPLE]


class Curriculum(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Skips prompts in the next epoch that were too easy or too hard in this one, by their measured share of right
    completions. If all would be skipped, none is."""

    easy: float = Field(1.0, gt=0, le=1, description="skip prompts with at least this share of right completions")
    hard: float = Field(0.0, ge=0, lt=1, description="skip prompts with at most this share of right completions")

    @model_validator(mode="after")
    def _some_are_between(self) -> Self:
        if self.hard >= self.easy:
            raise ValueError(f"hard = {self.hard:g} must be less than easy = {self.easy:g}, or every prompt would rest")
        return self


class DatasetTask(BaseModel, extra="forbid", frozen=True):
    """Questions from one source or several; a source is a table of `[[task.sources]]`."""

    kind: Literal["dataset"]
    sources: Sources = Field(min_length=1, description="where the training prompts come from")
    held_out_sources: Sources = Field(
        (), description="sources used for evaluation only, in addition to the rows that `held_out` keeps"
    )
    max_prompt_tokens: int | None = Field(None, ge=1, description="most tokens of a prompt")
    long_prompts: Literal["refuse", "drop", "truncate"] = Field(
        "refuse",
        description="what happens to longer prompts; refuse: the run does not start; drop: they are left out "
        "and counted; truncate: they lose their first tokens",
    )
    curriculum: Curriculum | None = Field(None, description="skip prompts for an epoch by their success rate")

    @model_validator(mode="after")
    def _sources_fit(self) -> Self:
        names = Counter(source.title for source in self.sources)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"two sources are called {twice[0]!r}; give each a name of its own")
        without = [source.title for source in self.sources if source.weight is None]
        if without and len(without) < len(self.sources):
            raise ValueError(f"source {without[0]!r} has no weight and others have one; give each a weight, or none")
        if not self.held_out_sources and not any(source.held_out for source in self.sources):
            raise ValueError("no question is held out; give a source held_out, or give held_out_sources")
        return self

    def questions(self, seed: int) -> Questions:
        """Read the questions of all sources, in order; the prompt stream mixes and shuffles them.

        Raises:
            DataError: lists the mistakes of all sources.
        """
        training: list[Question] = []
        held_out: list[list[Question]] = []
        notes: list[str] = []
        mistakes = Mistakes()
        sources = (*self.sources, *self.held_out_sources)
        read: dict[int, tuple[list[Question], list[Question], list[str]]] = {}
        for place, source in enumerate(sources):
            if (first := sources.index(source)) == place:  # a source that is listed twice is read once
                with mistakes:
                    read[place] = source.questions(seed)
                    notes += read[place][2]
            if first not in read:
                continue
            asked, kept, _ = read[first]
            if place < len(self.sources):
                training += asked
            else:
                kept = [*asked, *kept]
            held_out.append(kept)
        mistakes.done()
        weights = {source.title: source.weight for source in self.sources if source.weight is not None}
        return Questions(
            training,
            [row for rows in zip_longest(*held_out) for row in rows if row is not None],  # one of each source in turn
            lambda: [row for row in training if row.demonstration is not None],
            weights=weights,
            notes=tuple(notes),
        )
