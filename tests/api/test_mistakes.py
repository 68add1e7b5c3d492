"""Mistakes in code are refused before any process starts.

- A reward that its worker could not import is refused with the remedy, wherever it is given.
- An argument of another kind is refused with what may be given, `on_step` and `run_dir` too.
- A section that is made alone raises pydantic's ValidationError; within a recipe it is a RecipeError."""

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pydantic
import pytest

import stretto
from stretto import sections
from tests.api.conftest import tiny_recipe
from tests.api.workshop_rewards import length, made

REMEDY = "write it into a file beside the recipe or the notebook, import it from there, and give that"


def in_a_notebook() -> Callable[..., float]:
    """As a cell defines it: in a module `__main__` that has no file."""
    cell = types.ModuleType("__main__")
    exec("def judge(prompt, completion, answer):\n    return 1.0", vars(cell))
    return cell.judge  # type: ignore[no-any-return]


REWARDS: dict[str, tuple[Callable[..., float], str]] = {
    "a lambda": (lambda prompt, completion, answer: 1.0, "a lambda has no name by which its worker could import it"),
    "a closure": (made(), "'made.<locals>.inner' is defined inside of a function"),
    "a partial": (functools.partial(length, answer=""), "has no name by which its worker could import it"),
    "a notebook's": (in_a_notebook(), "'judge' is defined in no file, so that its worker cannot import it"),
}

CALLS: dict[str, Callable[[Any], object]] = {
    "train, reward": lambda reward: stretto.train("recipe.toml", reward=reward),
    "train, a recipe": lambda reward: stretto.train(tiny_recipe(), reward=reward),
    "train, rewards": lambda reward: stretto.train("recipe.toml", rewards={"function": reward}),
    "Recipe": lambda reward: stretto.Recipe(**tiny_recipe().model_dump() | {"rewards": reward}),
    "evaluate": lambda reward: stretto.evaluate("model", "recipe.toml", reward=reward),
    "evaluate, rewards": lambda reward: stretto.evaluate("model", tiny_recipe(), rewards={"function": reward}),
}


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No interpreter can be started: what would start one fails in another way than by a refusal."""
    monkeypatch.setattr(sys, "executable", "/nonexistent")


@pytest.mark.usefixtures("inside", "no_process")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", REWARDS)
def test_a_reward_that_no_worker_could_import_is_refused_with_the_remedy(
    kind: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward, found = REWARDS[kind]
    if kind == "a notebook's":
        cell = types.ModuleType("__main__")
        cell.judge = reward  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "__main__", cell)
    with pytest.raises(stretto.RecipeError) as refused:
        CALLS[call](reward)
    (problem,) = refused.value.problems
    assert problem.place.removesuffix(" with override rewards.function").endswith(": rewards")
    assert found in str(problem)
    assert str(problem).endswith(REMEDY)


@pytest.mark.usefixtures("inside", "no_process")
def test_a_reward_that_can_be_imported_is_not_refused() -> None:
    with pytest.raises(FileNotFoundError, match="/nonexistent"):
        stretto.train("recipe.toml", reward=length)


def test_a_section_alone_is_pydantics_and_in_a_recipe_the_recipe_s() -> None:
    with pytest.raises(pydantic.ValidationError, match="step\n"):
        sections.TrainerConfig(step=5)  # type: ignore[call-arg]
    assert sections.__doc__ is not None
    assert "pydantic's ``ValidationError``" in sections.__doc__
    tree = tiny_recipe().model_dump()
    with pytest.raises(stretto.RecipeError) as refused:
        stretto.Recipe(**tree | {"trainer": {"step": 5, "steps": 3}, "rollout": {"group_size": 0}})
    places = {problem.place: str(problem) for problem in refused.value.problems}
    assert places.keys() == {"Recipe: trainer.step", "Recipe: rollout.group_size"}
    assert "did you mean 'steps'" in places["Recipe: trainer.step"]


def on_nothing(step: object) -> None:
    raise AssertionError("no run has started")


#: Calls with the words that their refusal has; nothing is started for any of them.
MISUSES: dict[str, tuple[Callable[[], object], list[str]]] = {
    "train(None)": (lambda: stretto.train(None), ["recipe: None", "NoneType", "a TOML file, a"]),  # type: ignore[arg-type]
    "train(3)": (lambda: stretto.train(3), ["recipe: 3", "int"]),  # type: ignore[arg-type]
    "train({})": (lambda: stretto.train({}), ["recipe: model", "recipe: task"]),
    "train(dict)": (lambda: stretto.train({"trainer": {"step": 3}}), ["did you mean 'steps'"]),
    "reward=3": (lambda: stretto.train("recipe.toml", reward=3), ["reward: 3", "a function, the name of a built-in"]),  # type: ignore[arg-type]
    "reward=[]": (lambda: stretto.train("recipe.toml", reward=[]), ["reward: []", "or a list of them"]),
    "reward=[3]": (lambda: stretto.train("recipe.toml", reward=[length, 3]), ["reward: ", "or a list of them"]),  # type: ignore[list-item]
    "on_step=3": (lambda: stretto.train("recipe.toml", on_step=3), ["on_step: 3", "a function that is"]),  # type: ignore[arg-type]
    "run_dir=3": (lambda: stretto.train("recipe.toml", run_dir=3), ["run_dir: 3", "the path of a folder"]),  # type: ignore[arg-type]
    "evaluate(None)": (lambda: stretto.evaluate(None, "recipe.toml"), ["model: None", "the path of a model folder"]),  # type: ignore[arg-type]
    "evaluate(m, None)": (lambda: stretto.evaluate("model", None), ["recipe: None"]),  # type: ignore[arg-type]
    "evaluate(m, {})": (lambda: stretto.evaluate("model", {"task": {"kind": "arithmetic"}}), ["recipe: model"]),
}  # fmt: skip


@pytest.mark.usefixtures("inside", "no_process")
@pytest.mark.parametrize("call", MISUSES)
def test_an_argument_that_is_none_is_refused_before_anything_starts(call: str) -> None:
    misuse, words = MISUSES[call]
    with pytest.raises(stretto.RecipeError) as refused:
        misuse()
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.usefixtures("inside", "no_process")
@pytest.mark.parametrize(
    "reward", [[length], (length, "final_answer"), "final_answer"], ids=["a list", "a tuple", "a name"]
)
def test_a_dict_is_a_recipe_and_a_list_of_rewards_their_sum(reward: Any) -> None:
    tree = tiny_recipe().model_dump(exclude_none=True) | {"rewards": {}}
    with pytest.raises(FileNotFoundError, match="/nonexistent"):  # all is well but for the interpreter
        stretto.train(tree, reward=reward, on_step=on_nothing)
    with pytest.raises(FileNotFoundError, match="/nonexistent"):
        stretto.evaluate("model", tree, reward=reward)
