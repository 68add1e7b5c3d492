"""stretto: language models learn to reason by reinforcement learning that never waits.

Example::

    run = stretto.train("recipe.toml", trainer={"steps": 100})
    for step in run:
        print(step.step, step.accuracy)
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.api import sections
    from stretto.api.generation import LocalEngine as Engine
    from stretto.api.generation import TextCompletion
    from stretto.api.run import Run, open_run
    from stretto.api.training import evaluate, train
    from stretto.core.errors import (
        DataError,
        ModelFolderError,
        RecipeError,
        RefusedRequest,
        RewardFunctionError,
        RoleDied,
        RoleError,
        RunFolderError,
        StoreError,
        StrettoError,
        UserError,
        WorkflowError,
    )
    from stretto.launch.recipe.recipe import Recipe
    from stretto.loop.records.evaluation import Evaluation
    from stretto.store.series.metrics import EvaluationLine, StepMetrics
    from stretto.worlds.workflows.conversation import Conversation, Workflow
    from stretto.worlds.workflows.task import Reward, TurnReply, WorkflowTask

__version__ = "0.1.0"

__all__ = [
    "Conversation",
    "DataError",
    "Engine",
    "Evaluation",
    "EvaluationLine",
    "ModelFolderError",
    "Recipe",
    "RecipeError",
    "RefusedRequest",
    "Reward",
    "RewardFunctionError",
    "RoleDied",
    "RoleError",
    "Run",
    "RunFolderError",
    "StepMetrics",
    "StoreError",
    "StrettoError",
    "TextCompletion",
    "TurnReply",
    "UserError",
    "Workflow",
    "WorkflowError",
    "WorkflowTask",
    "evaluate",
    "open_run",
    "sections",
    "train",
]

_ERRORS = "stretto.core.errors"
_CONVERSATION, _TASK = "stretto.worlds.workflows.conversation", "stretto.worlds.workflows.task"
#: Where each public name is from; it is loaded when it is first asked for, so that `import stretto` is quick.
_ORIGINS = {
    "Conversation": _CONVERSATION,
    "DataError": _ERRORS,
    "Engine": "stretto.api.generation:LocalEngine",
    "Evaluation": "stretto.loop.records.evaluation",
    "EvaluationLine": "stretto.store.series.metrics",
    "ModelFolderError": _ERRORS,
    "Recipe": "stretto.launch.recipe.recipe",
    "RecipeError": _ERRORS,
    "RefusedRequest": _ERRORS,
    "Reward": _TASK,
    "RewardFunctionError": _ERRORS,
    "RoleDied": _ERRORS,
    "RoleError": _ERRORS,
    "Run": "stretto.api.run",
    "RunFolderError": _ERRORS,
    "StepMetrics": "stretto.store.series.metrics",
    "StoreError": _ERRORS,
    "StrettoError": _ERRORS,
    "TextCompletion": "stretto.api.generation",
    "TurnReply": _TASK,
    "UserError": _ERRORS,
    "Workflow": _CONVERSATION,
    "WorkflowError": _ERRORS,
    "WorkflowTask": _TASK,
    "evaluate": "stretto.api.training",
    "open_run": "stretto.api.run",
    "sections": "stretto.api.sections:",
    "train": "stretto.api.training",
}


def __getattr__(name: str) -> object:
    if name not in _ORIGINS:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    module, colon, inner = _ORIGINS[name].partition(":")
    if module.startswith("stretto_app.") and not find_spec("stretto_app"):
        raise ImportError(f"stretto.{name} is part of the application; install it: pip install stretto")
    found = import_module(module)
    return getattr(found, inner or name) if inner or not colon else found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
