"""Promises about docs/explanation/algorithm.md: its tables are the code.

- every line of a recipe in them loads, and composes the function that stands beside it;
- every choice that a recipe has, and every function that makes an objective, has its row;
- every row has an equation, a source and a use."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import pytest

from stretto.doors.door import Door
from stretto.rollout.config import RolloutConfig
from stretto.rollout.filters import filters
from stretto.trainer.objective import advantages, aggregation, returns
from stretto.trainer.objective.advantages import Shaping, overlong, shaped
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.objective.corrections import CORRECTIONS
from stretto.trainer.objective.decoupled_ppo import interpolated
from stretto.trainer.objective.estimators import ESTIMATORS, EstimatorSection, RewardedCompletion
from stretto.trainer.objective.losses import evaluate, objective
from stretto.trainer.objective.surrogates import LOSSES
from stretto.trainer.objective.token_estimators import advantages_of
from stretto.trainer.trainer import Trainer
from tests.test_docs import names_in

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "explanation" / "algorithm.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Row:
    """A row of a table with the columns recipe, equation, source, function, when."""

    chapter: str
    recipe: dict[str, Any]
    equation: str
    source: str
    file: str
    function: str
    when: str


def rows() -> Iterator[Row]:
    for chapter in PAGE.split("\n## ")[1:]:
        title = chapter.partition("\n")[0]
        for line in chapter.splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            if len(cells) != 5 or cells[0] in ("recipe", "---"):
                continue
            lines = re.findall(r"`([^`]+)`", cells[0])
            file, _, function = cells[3].strip("`").partition(":")
            yield Row(title, tomllib.loads("\n".join(lines)), cells[1], cells[2], file, function, cells[4])


ROWS = list(rows())


def called(function: object) -> str:
    """The name of a function behind `partial`."""
    inner: object = getattr(function, "func", function)
    assert callable(inner)
    return str(getattr(inner, "__name__", inner))


def composed(row: Row) -> str:
    """The function that the row's lines compose."""
    if row.chapter == "Filters":
        (chosen,) = filters(RolloutConfig.model_validate(row.recipe, strict=True))
        return called(chosen.args[1])  # type: ignore[attr-defined]  # the name of a filter goes around it
    config = AlgorithmConfig.model_validate(row.recipe, strict=True)
    match row.chapter:
        case "Losses":
            return called(objective(config).surrogate)
        case "Anchors":
            return called(interpolated if config.loss.anchor == "interpolated" else Trainer)
        case "Off-policy corrections":
            return called(objective(config).correction)
        case "Aggregation":
            return config.aggregation
        case "Advantages":
            return estimating(row, config.advantages)
        case "Rewards":
            (shaping,) = shapings(config.shaping)
            return shaping
        case "Added terms" if config.reference is not None:
            return called(config.divergence(config.reference.into))
        case "Added terms" if objective(config).entropy_bonus:
            return called(evaluate)
    raise AssertionError(f"no way to tell what the lines of chapter {row.chapter} compose")


def estimating(row: Row, estimator: EstimatorSection) -> str:
    """The function of the row, if it ran; the estimator itself, where it needs none."""
    ran: set[str] = set()

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.endswith(("objective/advantages.py", "objective/returns.py")):
            ran.add(frame.f_code.co_name)

    sys.setprofile(look)
    try:
        advantages_of(estimator, answers(row))
    finally:
        sys.setprofile(None)
    return row.function if row.function in ran else " ".join(ran) or estimator.kind


def shapings(shaping: Shaping) -> list[str]:
    """The equations of the chapter that say what `shaped` says of a reward of 1 for 90 of 100 tokens."""
    said = {
        "shaped": min((1.0 + shaping.bias) * shaping.scale, shaping.clip),
        "overlong": 1.0 + overlong(90, 100, shaping.overlong_buffer, shaping.overlong_penalty),
    }
    return [name for name, value in said.items() if value == pytest.approx(shaped(1.0, 90, 100, shaping))]


def test_there_is_a_table_for_every_part() -> None:
    expected = ["Losses", "Anchors", "Off-policy corrections", "Aggregation", "Advantages", "Rewards"]
    assert list(dict.fromkeys(row.chapter for row in ROWS)) == [*expected, "Added terms", "Filters"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.chapter}, {row.function}")
def test_the_lines_compose_the_function_that_stands_beside_them(row: Row) -> None:
    assert composed(row) == row.function
    assert row.function in names_in(ROOT / "packages" / "core" / "stretto" / row.file)
    assert row.equation
    assert re.search(r"arXiv \d{4}\.\d{5}|20\d\d|1992", row.source), "a source with a number or a year"
    assert row.when


def flat(groups: list[list[float]]) -> list[float]:
    return [score for group in groups for score in group]


REWARDS, TOKENS, EPS = [[1.0, 0.0], [4.0, 4.0, 1.0]], [[2, 1], [3, 1, 1]], 1e-6
FLAT = [(r, n) for group, counts in zip(REWARDS, TOKENS, strict=True) for r, n in zip(group, counts, strict=True)]
TERMINAL = [returns.terminal(r, n, range(n), 1.0) for r, n in FLAT]
VALUES = [[0.5, 0.0, 2.0][:n] for _, n in FLAT]


def with_critic(after: list[float]) -> list[list[float]]:
    """Of answers that end, or that go on with a value of theirs."""
    rewards = [[0.0] * (n - 1) + [r] for r, n in FLAT]
    return [returns.gae(one, values + after, 1.0, 0.95).tolist() for one, values in zip(rewards, VALUES, strict=True)]


#: What each function says about these answers, one number for each.
SAID: dict[str, list[float]] = {
    "reward": [r for r, _ in FLAT],
    "group_normalised": flat(advantages.group_normalised(REWARDS, EPS)),
    "group_centred": flat(advantages.group_centred(REWARDS)),
    "leave_one_out": flat(advantages.leave_one_out(REWARDS)),
    "lite_ppo": flat(advantages.lite_ppo(REWARDS, EPS)),
    "batch_normalised": flat(advantages.batch_normalised(REWARDS, TOKENS, EPS)),
    "reinforce_pp": [answer[0] for answer in returns.reinforce_pp(TERMINAL, EPS)],
    "reinforce_pp_baseline": flat(advantages.reinforce_pp_baseline(REWARDS, TOKENS, EPS)),
    "terminal": [answer[0] for answer in TERMINAL],
    "gae": [answer[0] for answer in returns.reinforce_pp(with_critic([]), EPS)],
    "gae, bootstrapped": [answer[0] for answer in with_critic([3.0])],
}


def bootstraps(row: Row) -> bool:
    return "truncated" in str(row.recipe)


def answers(row: Row) -> list[list[RewardedCompletion]]:
    """The answers of `FLAT`, with what a critic says of them where the row has one."""
    after = [3.0] if bootstraps(row) else []
    values = iter([one + after for one in VALUES] if row.function == "gae" else [[]] * len(FLAT))
    return [
        [RewardedCompletion(r, n, range(n), next(values)) for r, n in zip(group, counts, strict=True)]
        for group, counts in zip(REWARDS, TOKENS, strict=True)
    ]


@pytest.mark.parametrize("row", [row for row in ROWS if row.chapter == "Advantages"], ids=lambda row: row.function)
def test_an_estimator_says_what_the_function_beside_it_says(row: Row) -> None:
    got = advantages_of(AlgorithmConfig.model_validate(row.recipe).advantages, answers(row))
    said = SAID[f"{row.function}, bootstrapped" if bootstraps(row) else row.function]
    assert [answer[0] for group in got for answer in group] == pytest.approx(said)


@pytest.mark.parametrize(
    ("chapter", "key", "door"),
    [
        ("Losses", "loss", LOSSES),
        ("Off-policy corrections", "correction", CORRECTIONS),
        ("Advantages", "advantages", ESTIMATORS),
    ],
)
def test_every_kind_of_a_recipe_has_its_row(chapter: str, key: str, door: Door[Any]) -> None:
    named = [row.recipe[key] for row in ROWS if row.chapter == chapter]
    assert {one if isinstance(one, str) else one["kind"] for one in named} == set(door.built_in)


def test_every_word_of_a_recipe_has_its_row() -> None:
    assert {row.function for row in ROWS if row.chapter == "Aggregation"} == set(get_args(aggregation.Aggregation))
    assert {row.recipe["loss"]["anchor"] for row in ROWS if row.chapter == "Anchors"} == {
        "recomputed",
        "interpolated",
        "behavior",
    }


@pytest.mark.parametrize(
    "file",
    [
        "trainer/objective/surrogates.py",
        "trainer/objective/decoupled_ppo.py",
        "trainer/objective/corrections.py",
        "trainer/objective/advantages.py",
        "trainer/objective/returns.py",
        "trainer/objective/kl.py",
        "rollout/filters.py",
    ],
)
def test_every_function_is_on_the_page(file: str) -> None:
    tree = ast.parse((ROOT / "packages" / "core" / "stretto" / file).read_text(encoding="utf-8"))
    public = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    composers = {"filters", "refused", "count_reasons", "most_often", "silence"}
    assert [name for name in public if f"`{file}:{name}`" not in PAGE and name not in composers] == []


def test_the_whole_algorithms_load() -> None:
    table = PAGE.partition("## Whole algorithms")[2]
    lines = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("|")][2:]
    assert len(lines) >= 7
    for _, cell in lines:
        algorithm, _, rollout = cell.partition("`[rollout]`")
        AlgorithmConfig.model_validate(tomllib.loads("\n".join(re.findall(r"`([^`]+)`", algorithm))), strict=True)
        RolloutConfig.model_validate(tomllib.loads("\n".join(re.findall(r"`([^`]+)`", rollout))), strict=True)
