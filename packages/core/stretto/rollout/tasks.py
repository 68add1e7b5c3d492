"""Section ``[task]`` of a recipe with data of one's own: JSONL files, datasets mixed by their weights, small programs.

These classes are settings; the package `stretto_workflows.data` reads or makes the questions.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from stretto.core.errors import nearest
from stretto.doors.door import AS_TUPLE
from stretto.doors.loading import from_package
from stretto.rollout.questions import Question, Questions

FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
#: Names in `stretto_workflows.data.mappings`.
MAPPINGS = ("gsm8k", "math", "deepscaler", "dapo", "aime", "deepcoder", "livecodebench", "humaneval")

_DATA = "stretto_workflows.data"
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
_INSTRUCTION = "Write the final answer between <answer> and </answer>."

PromptField = Annotated[str, Field(description="key of the question: a text, or chat messages")]
AnswerField = Annotated[str, Field(description="key of the gold answer")]
DemonstrationField = Annotated[str, Field(description="key of the demonstration for the warm start; rows may lack it")]
IdField = Annotated[str | None, Field(description="key of a unique name of the row")]
SystemPrompt = Annotated[
    str | None, Field(description="system message of every chat; turns prompts that are texts into chats")
]
ChatTemplate = Annotated[
    Literal["none", "auto"],
    Field(
        description="how prompts that are texts become token ids; auto: with the tokenizer's chat template, if "
        "it has one"
    ),
]
TemplateArguments = dict[str, bool | int | float | str]
Weight = Annotated[
    float | None,
    Field(
        gt=0,
        allow_inf_nan=False,
        description="share of an epoch's prompts that come from this source, relative to the other weights",
    ),
]
Parameter = bool | int | float | str | list[bool | int | float | str]


def kind_of(data: str) -> str:
    """File suffix that decides how the file `data` is read, without ``.gz``: ``.jsonl`` for ``rows.jsonl.gz``."""
    path = Path(data)
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def is_local(data: str, folder: Path) -> bool:
    """Whether `data` is a local file or folder (it exists in `folder`, looks like a path, has a suffix of `FILES`, or
    has a suffix of letters and no slash), not a name of the Hugging Face hub.

    >>> [is_local(name, Path("/nowhere")) for name in ("rows.csv", "rows.xlsx", "openai/gsm8k", "wikitext-2.0")]
    [True, True, False, False]
    """
    if kind_of(data) in FILES or data.startswith(("/", "./", "../", "~")) or (folder / data).exists():
        return True
    return "/" not in data and kind_of(data)[1:].isalpha()


class JsonlTask(BaseModel, extra="forbid", frozen=True):
    """Questions and gold answers from a file."""

    kind: Literal["jsonl"]
    file: str = Field(description="JSONL file, relative to the recipe's folder")
    prompt_field: PromptField = "prompt"
    answer_field: AnswerField = "answer"
    demonstration_field: DemonstrationField = "demonstration"
    id_field: IdField = None
    held_out: int = Field(64, ge=1, description="number of last rows that are kept for evaluation")
    held_out_file: str | None = Field(None, description="file of the evaluation questions, in place of the last rows")

    chat_template: ChatTemplate = "none"
    system_prompt: SystemPrompt = None
    template_arguments: TemplateArguments = Field(
        {}, description='arguments of the chat template, such as "{ enable_thinking = false }"'
    )

    def questions(self, seed: int) -> Questions:
        """Read all rows, in file order. Held out are those of `held_out_file`, or without one the last `held_out` rows.
        `seed` is not used, since the prompt stream shuffles.

        Raises:
            DataError: a file cannot be read or has invalid rows, or all rows would be held out.
            RecipeError: the package stretto-workflows, which reads the files, is not installed.
        """
        found: Questions = from_package(f"{_DATA}.dataset:questions", "task.kind")(self)
        return found


class ProgramsTask(BaseModel, extra="forbid", frozen=True):
    """Small programs, in which each number of steps is equally likely."""

    kind: Literal["programs"]
    steps_min: int = Field(2, ge=1, le=16, description="steps of the shortest programs")
    steps_max: int = Field(4, ge=1, le=16, description="steps of the longest programs")
    tests: int = Field(6, ge=1, le=64, description="number of tests of a completion")
    mistake_rate: float = Field(0.3, ge=0, lt=1, description="probability that a step of a demonstration is wrong")
    prompts: int = Field(20_000, ge=1, description="training questions")
    held_out: int = Field(512, ge=1, description="questions for evaluation, never trained on")
    demonstrations: int = Field(64_000, ge=0, description="worked examples for the warm start")

    @model_validator(mode="after")
    def _smallest_is_not_above_largest(self) -> Self:
        if self.steps_min > self.steps_max:
            raise ValueError(f"steps_min = {self.steps_min} is above steps_max = {self.steps_max}")
        return self

    def questions(self, seed: int) -> Questions:
        """Generate all questions. Only training questions and demonstrations depend on the seed.

        Raises:
            DataError: there are fewer than `held_out` distinct held-out questions.
            RecipeError: the package stretto-workflows, which makes them, is not installed.
        """
        found: Questions = from_package(f"{_DATA}.programs:questions", "task.kind")(self, seed)
        return found


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
    prompt_field: PromptField = "prompt"
    answer_field: AnswerField = "answer"
    demonstration_field: DemonstrationField = "demonstration"
    id_field: IdField = None
    duplicates: Literal["keep", "drop"] | None = Field(
        None,
        description="what happens to a row that repeats the prompt and gold answer of an earlier one; left "
        "out: the mapping decides",
    )
    template: str | None = Field(None, description="Jinja template that writes the prompt from the row's columns")
    system_prompt: SystemPrompt = None
    chat_template: ChatTemplate = "none"
    template_arguments: TemplateArguments = Field({}, description="given to the chat template")
    weight: Weight = None
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
            from_package(f"{_DATA}.rows_source:compiled", "task.sources.template")(self.template)
        return self

    def questions(self, seed: int) -> tuple[list[Question], list[Question], list[str]]:
        """Read the questions; returns those for training, the held-out ones, and notes for the user (repeated rows that
        were left out, say). `seed` is not used.

        Raises:
            DataError: the dataset cannot be read, has bad rows (names each), or no more rows than `held_out`.
            RecipeError: the package that reads them is not installed.
        """
        found: tuple[list[Question], list[Question], list[str]]
        found = from_package(f"{_DATA}.rows_source:questions", "task.sources")(self)
        return found


class GymSource(BaseModel, extra="forbid", frozen=True):
    """Questions of one task of reasoning-gym."""

    kind: Literal["reasoning_gym"]
    name: str = Field("", description="name of the source; left out: the task's")
    task: str = Field(description="name of the task, such as chain_sum")
    size: int = Field(1000, ge=1, description="questions to train on")
    held_out: int = Field(64, ge=0, description="questions for evaluation, the same for all seeds of a run")
    parameters: dict[str, Parameter] = Field({}, description="parameters of the task, as reasoning-gym names them")
    level: int | None = Field(None, ge=0, description="level of the task's curriculum, for all of its attributes")
    system_prompt: str | None = Field(_INSTRUCTION, description="first message of every chat")
    chat_template: Literal["none", "auto"] = Field(
        "auto", description="auto: use the tokenizer's chat template, if it has one"
    )
    weight: Weight = None

    @property
    def title(self) -> str:
        """Name of the source: the one given in the recipe, else that of the task."""
        return self.name or self.task

    def questions(self, seed: int) -> tuple[list[Question], list[Question], list[str]]:
        """Generate questions; returns those for training, the held-out ones, and notes for the user. The two lists are
        disjoint: a drawn training question that is also held out is left out, and counted in a note.

        Raises:
            DataError: the package reasoning-gym is missing, or has no such task, parameter or level.
            RecipeError: the package stretto-workflows, which makes them, is not installed.
        """
        found: tuple[list[Question], list[Question], list[str]]
        found = from_package(f"{_DATA}.gym_source:questions", "task.sources")(self, seed)
        return found


def _with_kind(value: Any) -> Any:
    return {"kind": "rows", **value} if isinstance(value, dict) else value


Source = Annotated[Annotated[RowsSource | GymSource, Field(discriminator="kind")], BeforeValidator(_with_kind)]
Sources = Annotated[tuple[Source, ...], AS_TUPLE]


class _Curriculum(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
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
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="most tokens of a prompt, without tools of a workflow"
    )
    long_prompts: Literal["refuse", "drop", "truncate"] = Field(
        "refuse",
        description="what happens to longer prompts; refuse: the run does not start; drop: they are left out "
        "and counted; truncate: they lose their first tokens",
    )
    curriculum: _Curriculum | None = Field(None, description="skip prompts for an epoch by their success rate")

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
        """Read the questions of all sources, in order; the prompt stream mixes and shuffles them. `seed`: the run's,
        for sources that generate questions.

        Raises:
            DataError: lists the mistakes of all sources.
            RecipeError: the package that reads them is not installed.
        """
        found: Questions = from_package(f"{_DATA}.dataset:mixed", "task.kind")(self, seed)
        return found
