"""Loading of a workflow by name."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping

import msgspec

from stretto.core.errors import Problem, RecipeError, WorkflowError, nearest
from stretto.doors.loading import load
from stretto.rollout.workflow import PLACE, WorkflowReady
from stretto_workflows.conversation import Workflow

_CONTRACT = "a workflow is a class with 'async def run(self, task, chat)', derived from stretto.Workflow"
_ROOM = "stretto_workflows.built_in"

#: Built-in workflows: class by name.
BUILT_IN = {
    "best_of_n": f"{_ROOM}.best_of_n:BestOfN",
    "environment": f"{_ROOM}.environment:EnvironmentPlay",
    "multi_turn": f"{_ROOM}.multi_turn:MultiTurn",
    "self_play": f"{_ROOM}.self_play:SelfPlay",
    "tools": f"{_ROOM}.tools:Tools",
    "user_simulator": f"{_ROOM}.user_simulator:UserSimulator",
}


def load_workflow(name: str, settings: str = "{}") -> Workflow:
    """Load the workflow `name`, a built-in or ``package.module:Class`` from the import path, and make an object of it.
    `settings`: arguments of its class, as a JSON object.

    Raises:
        WorkflowError: the name is unknown, the module cannot be imported, the class is not a workflow, or it does not
            accept the settings.
    """
    try:
        found = load(name, PLACE, "workflow", BUILT_IN)
    except RecipeError as error:
        raise WorkflowError(error.problems) from error
    if not (isinstance(found, type) and issubclass(found, Workflow)):
        raise _refused(f"{name!r} is {type(found).__name__ if not isinstance(found, type) else found}", _CONTRACT)
    if not inspect.iscoroutinefunction(found.run):
        raise _refused(f"{name!r} has no asynchronous method 'run'", _CONTRACT)
    return _made(name, found, json.loads(settings))


def needs_of(workflow: Workflow) -> WorkflowReady:
    """Read the requirements of a workflow on the model: `words` and `needs_chat_template`, as `Workflow` has them, and
    whether its class takes settings.

    Raises:
        WorkflowError: they are not texts, or reading them raises.
    """
    try:
        found = {"needs_chat_template": workflow.needs_chat_template, "words": tuple(workflow.words())}
        return msgspec.convert({**found, "settings": bool(inspect.signature(type(workflow)).parameters)}, WorkflowReady)
    # The class is the user's: whatever it raises, SystemExit included, belongs into the message.
    except (Exception, SystemExit) as error:
        raise _refused(
            f"'words' or 'needs_chat_template': {type(error).__name__}: {error}", "they are texts"
        ) from error


def _made(name: str, kind: type[Workflow], settings: dict[str, object]) -> Workflow:
    try:
        if problems := list(_misfits(name, inspect.signature(kind).parameters, settings)):
            raise WorkflowError(problems)
        return kind(**settings)
    except WorkflowError:
        raise
    # The class is the user's: whatever it raises, SystemExit included, belongs into the message.
    except (Exception, SystemExit) as error:
        found = f"{name!r} cannot be made: {type(error).__name__}: {error}"
        raise WorkflowError([Problem("workflow.settings", found, "they are the arguments of its class")]) from error


def _misfits(
    name: str, parameters: Mapping[str, inspect.Parameter], settings: Mapping[str, object]
) -> Iterator[Problem]:
    """Yield a problem for each setting that the class of the workflow `name` does not have, and for each that it needs
    and was not given. `parameters`: those of its constructor."""
    named = {key: one for key, one in parameters.items() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for key in settings:
        if key not in named and not takes_all:
            remedy = nearest(key, named) or "it has none"
            yield Problem(f"workflow.settings.{key}", f"{name!r} has no such setting", remedy)
    for key, one in named.items():
        if one.default is one.empty and key not in settings:
            yield Problem(f"workflow.settings.{key}", "missing", f"{name!r} needs it")


def _refused(found: str, remedy: str) -> WorkflowError:
    return WorkflowError([Problem(PLACE, found, remedy)])
