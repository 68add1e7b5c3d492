"""stretto: asynchronous reinforcement learning for language models.

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
    from stretto.rollout.controller import Ticket
    from stretto.store.series.metrics import EvaluationLine, StepMetrics
    from stretto.verbs.completion import TextCompletion
    from stretto.verbs.datum import Datum, Forward
    from stretto.verbs.engine import LocalEngine as Engine
    from stretto.verbs.ledger import FolderLedger as Ledger
    from stretto.verbs.models import PolicyWeights as Weights
    from stretto.verbs.models import SharedModel
    from stretto.verbs.scheduler import GroupScheduler as Scheduler
    from stretto.verbs.small_model import build_model
    from stretto.verbs.trainer import LocalTrainer as Trainer
    from stretto.worlds.workflows.conversation import Conversation, Workflow
    from stretto.worlds.workflows.task import Reward, TurnReply, WorkflowTask

__version__ = "0.1.0"

__all__ = [
    "Conversation",
    "DataError",
    "Datum",
    "Engine",
    "Evaluation",
    "EvaluationLine",
    "Forward",
    "Ledger",
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
    "Scheduler",
    "SharedModel",
    "StepMetrics",
    "StoreError",
    "StrettoError",
    "TextCompletion",
    "Ticket",
    "Trainer",
    "TurnReply",
    "UserError",
    "Weights",
    "Workflow",
    "WorkflowError",
    "WorkflowTask",
    "build_model",
    "evaluate",
    "open_run",
    "sections",
    "train",
]

_ERRORS = "stretto.core.errors"
_CONVERSATION, _TASK = "stretto.worlds.workflows.conversation", "stretto.worlds.workflows.task"
#: Module of each public name, and its name there if it differs. It is imported at first use: `import stretto` is quick.
_ORIGINS = {
    "Conversation": _CONVERSATION,
    "DataError": _ERRORS,
    "Datum": "stretto.verbs.datum",
    "Engine": "stretto.verbs.engine:LocalEngine",
    "Evaluation": "stretto.loop.records.evaluation",
    "EvaluationLine": "stretto.store.series.metrics",
    "Forward": "stretto.verbs.datum",
    "Ledger": "stretto.verbs.ledger:FolderLedger",
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
    "Scheduler": "stretto.verbs.scheduler:GroupScheduler",
    "SharedModel": "stretto.verbs.models",
    "StepMetrics": "stretto.store.series.metrics",
    "StoreError": _ERRORS,
    "StrettoError": _ERRORS,
    "TextCompletion": "stretto.verbs.completion",
    "Ticket": "stretto.rollout.controller",
    "Trainer": "stretto.verbs.trainer:LocalTrainer",
    "TurnReply": _TASK,
    "UserError": _ERRORS,
    "Weights": "stretto.verbs.models:PolicyWeights",
    "Workflow": _CONVERSATION,
    "WorkflowError": _ERRORS,
    "WorkflowTask": _TASK,
    "build_model": "stretto.verbs.small_model",
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
