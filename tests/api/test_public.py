"""The public surface.

- It is the list here; each of its names is documented, with an example that runs.
- `import stretto` loads nothing: no torch, and no other module of stretto."""

import inspect
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import stretto
from tests.api.conftest import ROOT, example, example_in

KINDS = {
    "function": "train evaluate open_run build_model",
    "class": "Recipe Run StepMetrics EvaluationLine Evaluation Engine TextCompletion Trainer Datum Forward Weights "
    "SharedModel Scheduler Ticket Ledger Workflow WorkflowTask Conversation TurnReply Reward",
    "module": "sections",
    "error": "StrettoError UserError RecipeError DataError ModelFolderError RewardFunctionError RunFolderError "
    "WorkflowError RefusedRequest RoleError RoleDied StoreError",
}
PUBLIC = {name: kind for kind, names in KINDS.items() for name in names.split()}


def kind(value: object) -> str:
    if inspect.ismodule(value):
        return "module"
    if not inspect.isclass(value):
        return "function"
    return "error" if issubclass(value, Exception) else "class"


def test_the_public_surface_is_this_list() -> None:
    assert sorted(stretto.__all__) == sorted(PUBLIC)
    assert {name: kind(getattr(stretto, name)) for name in stretto.__all__} == PUBLIC
    assert set(PUBLIC) <= set(dir(stretto))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        stretto.trian  # noqa: B018


def test_importing_stretto_loads_none_of_its_rooms() -> None:
    program = "import sys, stretto; print([name for name in sys.modules if name.startswith(('stretto.', 'torch'))])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "train"])
def test_every_public_object_is_documented_with_an_example_that_runs(
    name: str, inside: Path, first_run: stretto.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example of `train` has made `first_run`. A class that has none does not pass by that of its base."""
    capsys.readouterr()
    code = example(getattr(stretto, name))
    exec(compile(code, f"<example of {name}>", "exec"), {"stretto": stretto, "sections": stretto.sections})
    assert bool(capsys.readouterr().out) == ("print(" in code)


def without_example(documented: Mapping[str, object]) -> list[str]:
    return [name for name, value in documented.items() if not example_in(value)]


class Planted(stretto.RecipeError):
    pass


def test_a_name_without_an_example_is_found() -> None:
    def described() -> None:
        """Without an example, only with the word: Example."""

    def shown() -> None:
        """With one.

        Example::

            print(1)
        """

    planted = {"inherited": Planted, "described": described, "bare": lambda: None, "shown": shown}
    assert without_example(planted) == ["inherited", "described", "bare"]
