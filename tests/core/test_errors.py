"""Promises of the error tree:

- the drawing at the top of the module is the tree;
- an error that crosses a process boundary arrives as it was (it pickles);
- a user's mistakes end with exit code 2, all of them in one message; other errors with 1.
"""

import errno
import inspect
import pickle
import re

import pytest

from stretto.core import errors
from stretto.core.errors import (
    DeadlineExceeded,
    Problem,
    RecipeError,
    RefusedRequest,
    RoleDied,
    StrettoError,
    described,
    nearest,
    several,
)


def drawn() -> dict[str, str]:
    """Each class of the drawing with the class that it hangs from."""
    parents: dict[str, str] = {}
    path = ["StrettoError"]
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^    ([│ ]*)[├└]── (\w+)", line)
        if match:
            depth = 1 + len(match.group(1)) // 4
            path = [*path[:depth], match.group(2)]
            parents[path[-1]] = path[-2]
    return parents


def test_the_drawing_is_the_tree() -> None:
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, StrettoError)]
    assert drawn() == {c.__name__: c.__base__.__name__ for c in classes if c is not StrettoError and c.__base__}


@pytest.mark.parametrize(
    "error",
    [
        RecipeError([Problem("a.toml: trainer.step", "unknown key", "did you mean 'steps'?")]),
        RoleDied("engine-0", "was killed by SIGKILL", "logs/engine-0.txt"),
        DeadlineExceeded("conductor", "engine-0 to load version 7", 60),
        RefusedRequest("prompt_token_ids[3]", "99999", "below 30"),
    ],
)
def test_errors_cross_process_boundaries_unchanged(error: StrettoError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


def test_all_problems_of_a_file_are_told_at_once() -> None:
    error = RecipeError([Problem("a.toml: x", "unknown key"), Problem("a.toml: y", "-1", "at least 0")])
    assert str(error) == "a.toml: x: unknown key\na.toml: y: -1; at least 0"
    assert error.exit_code == 2


def test_the_remedy_for_an_unknown_name_is_the_nearest_one_or_all() -> None:
    assert nearest("step", ["steps", "seed"]) == "did you mean 'steps'?"
    assert nearest("zzz", ["steps", "seed"]) == "allowed: seed, steps"
    assert nearest("zzz", ["seed", "Seed"]) == "allowed: Seed, seed"


def test_a_copy_that_fails_is_told_by_its_new_file() -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "old", None, "new")
    assert described(error) == "new: No space left on device"
    assert described(OSError(errno.ENOSPC, "No space left on device", "old")) == "old: No space left on device"


def test_one_thing_is_told_in_the_singular() -> None:
    assert [several(count, "optimizer step") for count in (0, 1, 2048)] == [
        "0 optimizer steps",
        "1 optimizer step",
        "2,048 optimizer steps",
    ]
    assert [several(count, "trajectory") for count in (1, 2)] == ["1 trajectory", "2 trajectories"]
    assert [several(count, "run is", "runs are") for count in (1, 2)] == ["1 run is", "2 runs are"]
