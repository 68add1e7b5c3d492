"""The recipe of a run: one TOML file, whose sections are the configuration classes of the packages. All mistakes are
reported at once.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import tomli_w
from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    Tag,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from stretto.core.errors import Mistakes, Problem, RecipeError
from stretto.doors.door import Door
from stretto.doors.loading import is_own, is_there, look_in
from stretto.doors.mistakes import problems_of
from stretto.engine.config import MAKES, EngineConfig
from stretto.launch.recipe.extensions import OUTLETS, AgentConfig, ClusterConfig, GatewayConfig
from stretto.launch.recipe.file import read_toml
from stretto.launch.recipe.overrides import Overrides, as_parsed, at_override, parsed_value, put, with_named_reward
from stretto.launch.recipe.sections import EvaluationConfig, LoggingConfig, ModelConfig, SamplingConfig
from stretto.loop.config import DeadlinesConfig
from stretto.rewards.config import RewardsConfig
from stretto.rollout.arithmetic import ArithmeticTask
from stretto.rollout.config import FILTERS, PACINGS, RolloutConfig, contradictions
from stretto.rollout.tasks import DatasetTask, JsonlTask, ProgramsTask, is_local
from stretto.rollout.workflow import WorkflowConfig
from stretto.store.config import StoreConfig
from stretto.store.files import unreplaced
from stretto.trainer.config import SupervisedConfig, TrainerConfig
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.objective.corrections import CORRECTIONS
from stretto.trainer.objective.estimators import ESTIMATORS
from stretto.trainer.objective.surrogates import LOSSES
from stretto.weights.config import WeightsConfig

DOORS: tuple[Door[Any], ...] = (LOSSES, CORRECTIONS, ESTIMATORS, FILTERS, PACINGS, MAKES, OUTLETS)


def find_parts(tree: dict[str, Any], folder: Path) -> None:
    """Set the key `path` of a parsed recipe to `folder` if the module of a part that the recipe names
    (`named_in_doors`) is there or nowhere; a `path` that is given stays. Changes `tree`. `folder`: that of the recipe
    file."""
    if "path" not in tree and any(is_sought(name, folder) for name in named_in_doors(tree)):
        tree["path"] = str(folder.resolve())


def is_sought(name: object, folder: Path) -> bool:
    """Whether `name` is that of a user-defined part (``package.module:name``) whose module or top package `folder` has,
    or nothing has: a near name may be there. False for the name of a built-in part, and for an object that is no
    text."""
    if not (isinstance(name, str) and is_own(name)):
        return False
    module = name.partition(":")[0].partition(".")[0]
    known = module in sys.modules or not module.isidentifier()  # a loaded one, as `__main__`, may have no spec
    return _has(folder, module) or not (known or _has(Path.cwd(), module) or is_there(module))


def _has(folder: Path, module: str) -> bool:
    path = folder / module
    return os.path.isdir(path) or os.path.isfile(f"{path}.py")  # unlike those of `Path`, false for any text


def named_in_doors(tree: Mapping[str, Any]) -> Iterator[object]:
    """Yield the value of each key at which a parsed recipe may name a user-defined part, such as ``algorithm.loss``.

    For a section it is its `kind`; for a list, each item; for an absent key, None. Values are not validated.
    """
    for door in DOORS:
        found: Any = tree
        for key in door.key.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        for one in found if isinstance(found, list | tuple) else [found]:
            yield one.get("kind") if isinstance(one, dict) else one


def named_in_section(section: Mapping[str, Any]) -> Iterator[object]:
    """Yield the names of parts in a parsed section ``[rewards]`` or ``[workflow]``: the `function` of the section and
    of each item of `functions` (None if it has none), and each text in `settings` of the form ``module:name``."""
    listed, settings = section.get("functions"), section.get("settings")
    for part in (section, *(listed if isinstance(listed, list | tuple) else ())):
        yield part.get("function") if isinstance(part, Mapping) else None
    for value in settings.values() if isinstance(settings, Mapping) else ():
        for text in value if isinstance(value, list | tuple) else (value,):
            if isinstance(text, str) and _PART.fullmatch(text):
                yield text


_PART = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_PATHS = (
    "model.path",
    "task.file",
    "task.held_out_file",
    "rewards.path",
    "workflow.path",
    "algorithm.reference.path",
    "preferences.file",
    "preferences.reference",
    "cluster.tls",
    "path",
)

Kind = TypeVar("Kind", bound=BaseModel)


def _kind_of_workflow(section: Any) -> str:
    return section.get("kind", "function") if isinstance(section, dict) else getattr(section, "kind", "function")


_BY_KIND = Discriminator(_kind_of_workflow)


class Recipe(BaseModel, extra="forbid", frozen=True):
    """A validated recipe: all settings of a run.

    Example::

        recipe = stretto.Recipe(
            model=sections.ModelConfig(build=sections.BuildConfig(alphabet="0123456789+-=", context_length=64)),
            task=sections.ArithmeticTask(kind="arithmetic", operands_max=4),
            sampling=sections.SamplingConfig(max_tokens=32),
            rollout=sections.RolloutConfig(batch_size=4, group_size=4),
            trainer=sections.TrainerConfig(steps=100, learning_rate=1e-3),
        )

    Raises:
        RecipeError: lists one problem for each wrong key.
    """

    seed: int = Field(1, ge=0, lt=2**63, description="seed of all random draws")
    path: str | None = Field(
        None,
        description="folder in which modules that the recipe names (package.module:name, "
        "docs/how_to/doors/index.md) are searched first, before the folder that stretto is started from; left out: "
        "the recipe's folder, if such a module is there",
    )
    model: ModelConfig
    task: Annotated[ArithmeticTask | DatasetTask | JsonlTask | ProgramsTask, Field(discriminator="kind")]
    warm_start: SupervisedConfig | None = Field(None, description="supervised training before the first version")
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    rewards: Annotated[RewardsConfig, BeforeValidator(with_named_reward)] = RewardsConfig()
    workflow: Annotated[
        Annotated[Annotated[WorkflowConfig, Tag("function")] | Annotated[AgentConfig, Tag("agent")], _BY_KIND] | None,
        BeforeValidator(with_named_reward),
    ] = Field(None, description="what happens between a prompt and its verdict; left out: a single turn")
    gateway: GatewayConfig = GatewayConfig()
    trainer: TrainerConfig = TrainerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    store: StoreConfig = StoreConfig()
    logging: LoggingConfig = LoggingConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    weights: WeightsConfig = WeightsConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="wrap")
    @classmethod
    def _mistakes_are_problems(cls, tree: Any, build: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Raise mistakes as RecipeError, also for a recipe made in code. The validation context, if given, is the name
        of the recipe file."""
        if isinstance(tree, Mapping) and isinstance(path := tree.get("path"), str):
            look_in(path)  # before user-defined parts are loaded
        try:
            return build(tree)
        except ValidationError as error:
            raise RecipeError(problems_of(info.context or cls.__name__, error.errors(), cls)) from None

    @property
    def local_engines(self) -> int:
        """Number of engines that the run starts on its own machine; 0 if other machines start all engines."""
        return self.engine.count if self.cluster.placer == "local" else 0

    @property
    def has_machines(self) -> bool:
        """Whether other machines take part in the run, or may join it."""
        config = self.cluster
        asked = config.placer != "local" or config.listen or config.tls is not None
        return bool(asked or self.trainer.remote_ranks)

    @property
    def has_reference_model(self) -> bool:
        """Whether the trainer holds a second model as the reference. It needs none with adapters and no
        `reference.path`: the reference then is the model with its adapters disabled."""
        reference = self.algorithm.reference
        return reference is not None and not (self.trainer.lora is not None and reference.path is None)

    @property
    def in_rounds(self) -> bool:
        """Whether groups begin and end together in rounds, so that a run can be repeated bit for bit
        (`loop.engines.rounds`). Always false with a workflow (decision 27)."""
        return self.workflow is None and self.engine.in_rounds(self.rollout.staleness_bounds[1] == 0)

    @model_validator(mode="after")
    def _rounds_know_no_clock(self) -> Self:
        if self.in_rounds and self.rollout.max_in_flight == "auto":
            raise ValueError(
                'rollout.max_in_flight = "auto" follows what the engines tell every second, and a run in rounds '
                "(a synchronous one, or engine.batching) can be repeated bit for bit; give a number"
            )
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        completions = self.rollout.batch_size * self.rollout.group_size
        if self.trainer.minibatches > completions:
            raise ValueError(
                f"trainer.minibatches = {self.trainer.minibatches} is more than the {completions} completions of a "
                "batch (rollout.batch_size * rollout.group_size); use fewer minibatches or a larger batch"
            )
        if self.trainer.shares > 1 and (needed := self.trainer.shares * self.trainer.minibatches) > completions:
            raise ValueError(
                f"trainer.ranks = {self.trainer.ranks} and trainer.minibatches = {self.trainer.minibatches} need "
                f"{needed} completions in a batch, or some ranks would be idle; "
                f"rollout.batch_size * rollout.group_size is {completions}; use fewer of both, or a larger batch"
            )
        for sentence in contradictions(self.rollout, "rollout."):
            raise ValueError(sentence)
        kind = self.algorithm.advantages.kind
        if self.rollout.group_size == 1 and self.algorithm.advantages.compares:
            raise ValueError(
                f'rollout.group_size = 1 and algorithm.advantages = "{kind}" would make every advantage zero; '
                'use a larger group or advantages = "batch"'
            )
        if self.in_rounds and self.rollout.pacing not in ("auto", "rounds"):
            raise ValueError(
                "rollout.pacing is given, and groups start and end together in a run in rounds (a synchronous one, or "
                'engine.batching), so that it can be repeated bit for bit; use pacing = "auto", or '
                'engine.batching = "shared"'
            )
        if self.workflow is not None and self.engine.batching == "rounds":
            raise ValueError(
                'engine.batching = "rounds" and [workflow] do not go together: turns of a conversation begin when '
                'those before them have ended, and not in rounds; use batching = "shared"'
            )
        if self.algorithm.shaping.overlong_buffer > self.sampling.max_tokens:
            raise ValueError(
                f"algorithm.shaping.overlong_buffer = {self.algorithm.shaping.overlong_buffer} is more than "
                f"sampling.max_tokens = {self.sampling.max_tokens}, of which it is the last part; "
                "use a shorter buffer or longer completions"
            )
        critic = self.algorithm.critic
        if self.rollout.truncated == "filter" and critic is not None and critic.truncated == "bootstrap":
            raise ValueError(
                'rollout.truncated = "filter" leaves no truncated completion, so that '
                'algorithm.advantages.critic.truncated = "bootstrap" would do nothing; choose one of them '
                '(rollout.truncated = "train", or critic.truncated = "end")'
            )
        return self


def load_recipe(path: Path, overrides: Overrides = ()) -> Recipe:
    """Read a recipe file, apply overrides, and validate it. Paths become absolute. Raises RecipeError if the file
    cannot be read or parsed, or has wrong keys; names every wrong key."""
    return validate(parse_recipe(path, overrides), str(path), overrides)


def parse_recipe(path: Path, overrides: Overrides = ()) -> dict[str, Any]:
    """Read a recipe file as nested dicts, with overrides applied and paths absolute, without validation. A `path` that
    is left out (of the recipe, ``[rewards]`` or ``[workflow]``) becomes the folder of the recipe file if a module named
    there is in it or nowhere, or a file of the command is in it. Raises RecipeError if the file cannot be read or
    parsed, an override is malformed, or a path cannot exist."""
    tree = read_toml(path)
    _resolve_paths(tree, path.parent, f"{path}: ")
    override(tree, overrides)
    for section in ("rewards", "workflow"):
        _find_module(tree.get(section), path.parent)
    find_parts(tree, path.parent)
    return tree


def _find_module(section: Any, folder: Path) -> None:
    """Set `path` of a ``[rewards]`` or ``[workflow]`` section to the recipe's folder, if no `path` is given and a
    module that it names is there or nowhere, or a file of its command is there. Changes `section`."""
    if not isinstance(section, dict) or "path" in section:
        return
    command = section.get("command")
    words = [word for word in command if isinstance(word, str)] if isinstance(command, list) else []
    if any(os.path.isfile(folder / word) and not os.path.isabs(word) for word in words):
        section["path"] = str(folder.resolve())
    if any(is_sought(name, folder) for name in named_in_section(section)):
        section["path"] = str(folder.resolve())


def override(tree: dict[str, Any], overrides: Overrides, folder: Path | None = None) -> None:
    """Apply overrides to a parsed recipe; changes `tree`. Paths are relative to `folder` (None: the working directory).
    Raises RecipeError if an override is malformed, or a path cannot exist."""
    if isinstance(overrides, Mapping):
        told = [put(tree, key, as_parsed(value), f"override {key!r}") for key, value in overrides.items()]
    else:
        told = [_override(tree, text) for text in overrides]
    problems = [problem for problem in told if problem is not None]
    if problems:
        raise RecipeError(problems)
    _resolve_paths(tree, folder or Path.cwd(), "override ")


def validate(tree: Mapping[str, Any], place: str, overrides: Overrides = ()) -> Recipe:
    """Validate parsed TOML and return the recipe.

    Args:
        place: name of the recipe's file, or of where it is from, for messages.
        overrides: those already applied to `tree`; a message names the override that caused the problem.

    Raises:
        RecipeError: has one problem for each wrong key.
    """
    return validated(tree, place, Recipe, overrides)


def validated(tree: Mapping[str, Any], place: str, kind: type[Kind], overrides: Overrides = ()) -> Kind:
    """Validate parsed TOML as an object of the class `kind`, and return it. `place`: the file, and `overrides`: those
    already applied to `tree`, both for messages. Raises RecipeError, which has one problem for each wrong key."""
    try:
        return kind.model_validate(tree, strict=True, context=place)
    except ValidationError as error:
        problems: Iterable[Problem] = problems_of(place, error.errors(), kind)
    except RecipeError as error:
        problems = error.problems
    raise RecipeError(at_override(problem, place, overrides) for problem in problems)


def _override(tree: dict[str, Any], override: str) -> Problem | None:
    """Apply one override of the form section.key=value; changes `tree`. Returns a problem if it is malformed or names
    no section, else None."""
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        return Problem(
            f"override {override!r}", "not of the form section.key=value", "e.g. trainer.steps=100, without spaces"
        )
    return put(tree, key.strip(), parsed_value(text.strip()), f"override {override!r}")


def _resolve_paths(tree: dict[str, Any], folder: Path, where: str) -> None:
    """Make all paths in a parsed recipe absolute, in place; they are relative to `folder`. Raises RecipeError, with
    `where` in front of each key, for paths that cannot exist."""
    mistakes = Mistakes(RecipeError)
    for place in _PATHS:
        *sections, key = place.split(".")
        part: Any = tree
        for section in sections:
            part = part.get(section) if isinstance(part, dict) else None
        with mistakes:
            if isinstance(part, dict) and isinstance(part.get(key), str):
                part[key] = str(_absolute(part[key], folder, f"{where}{place}"))
    for source in _sources(tree):
        with mistakes:
            if isinstance(data := source.get("data"), str) and ("$" in data or is_local(data, folder)):
                source["data"] = str(_absolute(data, folder, f"{where}data"))
    mistakes.done()


def _sources(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """List the tables of the task's sources, training and held-out, and of the sources of further sets of questions.
    Changing one changes `tree`."""
    found: list[Any] = []
    for section, key in (("task", "sources"), ("task", "held_out_sources"), ("evaluation", "sets")):
        part = tree.get(section)
        listed = part.get(key) if isinstance(part, dict) else None
        found += listed if isinstance(listed, list) else []
    inner = [one.get("source", one) for one in found if isinstance(one, dict)]
    return [source for source in inner if isinstance(source, dict)]


def _absolute(text: str, folder: Path, place: str) -> Path:
    """Return the absolute path of `text`, which is relative to `folder`. Raises RecipeError with the recipe key `place`
    if no such path can exist, or it has a variable that no shell has replaced."""
    try:
        path = (folder / Path(text).expanduser()).resolve()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, with a NUL, the home of an unknown user
        raise RecipeError(
            [Problem(place, f"{text!r}"[:80], f"is no path: {getattr(error, 'strerror', error)}")]
        ) from None
    if "$" in text and (remedy := unreplaced(text, path)):
        raise RecipeError([Problem(place, f"{text!r}"[:80], remedy)])
    return path


def to_toml(recipe: BaseModel) -> str:
    """Return the recipe as TOML: every key with its value, except for None. Parsing the text gives an equal recipe."""
    return tomli_w.dumps(recipe.model_dump(mode="python", exclude_none=True))


def differences(old: Recipe, new: Recipe, ignored: Sequence[str] = ()) -> list[tuple[str, str]]:
    """List (dotted key, text with both values) for each key whose value differs between two recipes. `ignored`: dotted
    keys and sections that are left out."""
    before, after = _flat(old.model_dump(mode="python")), _flat(new.model_dump(mode="python"))
    return [
        (key, f"was {before.get(key)!r} and is {after.get(key)!r}")
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not any(f"{key}.".startswith(f"{name}.") for name in ignored)
    ]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dicts by dotted key, each key with `prefix` before it."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
