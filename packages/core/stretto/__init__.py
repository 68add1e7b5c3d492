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
    from stretto import sections
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
    from stretto.run import Run, open_run, train
    from stretto.store.series.metrics import EvaluationLine, StepMetrics
    from stretto_app.extensions.evaluation import evaluate
    from stretto_verbs.completion import TextCompletion
    from stretto_verbs.datum import Datum, Forward
    from stretto_verbs.engine import LocalEngine as Engine
    from stretto_verbs.ledger import FolderLedger as Ledger
    from stretto_verbs.models import PolicyWeights as Weights
    from stretto_verbs.models import SharedModel
    from stretto_verbs.scheduler import GroupScheduler as Scheduler
    from stretto_verbs.small_model import build_model
    from stretto_verbs.trainer import LocalTrainer as Trainer
    from stretto_workflows.conversation import Conversation, Workflow
    from stretto_workflows.task import Reward, TurnReply, WorkflowTask

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
_CONVERSATION, _TASK = "stretto_workflows.conversation", "stretto_workflows.task"
#: Module of each public name, and its name there if it differs. It is imported at first use: `import stretto` is quick.
_ORIGINS = {
    "Conversation": _CONVERSATION,
    "DataError": _ERRORS,
    "Datum": "stretto_verbs.datum",
    "Engine": "stretto_verbs.engine:LocalEngine",
    "Evaluation": "stretto.loop.records.evaluation",
    "EvaluationLine": "stretto.store.series.metrics",
    "Forward": "stretto_verbs.datum",
    "Ledger": "stretto_verbs.ledger:FolderLedger",
    "ModelFolderError": _ERRORS,
    "Recipe": "stretto.launch.recipe.recipe",
    "RecipeError": _ERRORS,
    "RefusedRequest": _ERRORS,
    "Reward": _TASK,
    "RewardFunctionError": _ERRORS,
    "RoleDied": _ERRORS,
    "RoleError": _ERRORS,
    "Run": "stretto.run",
    "RunFolderError": _ERRORS,
    "Scheduler": "stretto_verbs.scheduler:GroupScheduler",
    "SharedModel": "stretto_verbs.models",
    "StepMetrics": "stretto.store.series.metrics",
    "StoreError": _ERRORS,
    "StrettoError": _ERRORS,
    "TextCompletion": "stretto_verbs.completion",
    "Ticket": "stretto.rollout.controller",
    "Trainer": "stretto_verbs.trainer:LocalTrainer",
    "TurnReply": _TASK,
    "UserError": _ERRORS,
    "Weights": "stretto_verbs.models:PolicyWeights",
    "Workflow": _CONVERSATION,
    "WorkflowError": _ERRORS,
    "WorkflowTask": _TASK,
    "build_model": "stretto_verbs.small_model",
    "evaluate": "stretto_app.extensions.evaluation",
    "open_run": "stretto.run",
    "sections": "stretto.sections:",
    "train": "stretto.run",
}


def __getattr__(name: str) -> object:
    if name not in _ORIGINS:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    module, colon, inner = _ORIGINS[name].partition(":")
    package = module.partition(".")[0]
    for needed in (package, "stretto_kernels", "stretto_verify"):
        of = needed.removesuffix("_app").replace("_", "-")
        if not find_spec(needed):
            lacks = "is part of" if needed == package else "needs"
            raise ImportError(f"stretto.{name} {lacks} {of}; install it: pip install stretto")
        if (version := getattr(import_module(needed), "__version__", "none")) != __version__:
            told = f"{of} is version {version}, and stretto-core is version {__version__}"
            raise ImportError(f"stretto.{name}: {told}; all packages of stretto need one version")
    found = import_module(module)
    return getattr(found, inner or name) if inner or not colon else found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
