"""stretto: language models learn to reason by reinforcement learning that never waits.

Example::

    run = stretto.train("recipe.toml", trainer={"steps": 100})
    for step in run:
        print(step.step, step.accuracy)
"""

from importlib import import_module
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
    )
    from stretto.launch.recipe.recipe import Recipe
    from stretto.loop.records.evaluation import Evaluation
    from stretto.store.series.metrics import EvaluationLine, StepMetrics

__version__ = "0.1.0"

__all__ = [
    "DataError",
    "Engine",
    "Evaluation",
    "EvaluationLine",
    "ModelFolderError",
    "Recipe",
    "RecipeError",
    "RefusedRequest",
    "RewardFunctionError",
    "RoleDied",
    "RoleError",
    "Run",
    "RunFolderError",
    "StepMetrics",
    "StoreError",
    "StrettoError",
    "TextCompletion",
    "UserError",
    "evaluate",
    "open_run",
    "sections",
    "train",
]

_ERRORS = "stretto.core.errors"
#: Where each public name is from; it is loaded when it is first asked for, so that `import stretto` is quick.
_ORIGINS = {
    "DataError": _ERRORS,
    "Engine": "stretto.api.generation:LocalEngine",
    "Evaluation": "stretto.loop.records.evaluation",
    "EvaluationLine": "stretto.store.series.metrics",
    "ModelFolderError": _ERRORS,
    "Recipe": "stretto.launch.recipe.recipe",
    "RecipeError": _ERRORS,
    "RefusedRequest": _ERRORS,
    "RewardFunctionError": _ERRORS,
    "RoleDied": _ERRORS,
    "RoleError": _ERRORS,
    "Run": "stretto.api.run",
    "RunFolderError": _ERRORS,
    "StepMetrics": "stretto.store.series.metrics",
    "StoreError": _ERRORS,
    "StrettoError": _ERRORS,
    "TextCompletion": "stretto.api.generation",
    "UserError": _ERRORS,
    "evaluate": "stretto.api.training",
    "open_run": "stretto.api.run",
    "sections": "stretto.api.sections:",
    "train": "stretto.api.training",
}


def __getattr__(name: str) -> object:
    if name not in _ORIGINS:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    module, colon, inner = _ORIGINS[name].partition(":")
    found = import_module(module)
    return getattr(found, inner or name) if inner or not colon else found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
