"""The questions of a run, read before it.

- Those whose gold answer the reward cannot read are left out, with count, lines and reasons; if none is left, nothing
  starts; one that takes too long is an error, and never left out on one machine and kept on another; a reward without a
  reader of gold answers leaves out nothing. What the machine lacks is told as that, not as the reward's mistake.
- Rows that are held out and trained on, that contradict each other, or that are there twice, are told of, each kind
  with its count and its first place; nothing is said of questions that were made on the spot. Gold answers with digits
  of other scripts are told, with count, first place and code point.
- A prompt says which thought its tokens leave open at their end, whether the chat template or the question has begun
  it; one that speaks of thoughts, or whose template has ended them, leaves none open. Many that cannot be encoded are
  refused in seconds, however large the vocabulary.
- Each question has an id of its own, by which an evaluation asks it and a workflow gets its row: sources of one name do
  not share ids; the ids of every other question are those that its source gives. A workflow gets the fields and
  messages of the question that was drawn, also where rows share prompt and gold answer."""

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from stretto.core.errors import DataError, RoleDied
from stretto.core.records import Prompt
from stretto.launch.preflight.checks import check_reward_function
from stretto.launch.preflight.plan import Plan, make_plan
from stretto.launch.preflight.questions import encode_prompts, sift
from stretto.launch.recipe.recipe import validate
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto.rewards.config import RewardsConfig
from stretto.rollout.questions import Question, Questions, with_own_ids
from stretto_app.extensions.preflight.notes import repeated, strange_digits
from stretto_workflows.task import task_of
from tests.gateway.serving import tokenizer_of

pytestmark = pytest.mark.usefixtures("untried")
MATH = RewardsConfig(function="math")


def questions(*golds: str) -> list[Question]:
    return [Question(id=str(at), text="?", answer=gold, place=f"rows.jsonl:{at}") for at, gold in enumerate(golds, 1)]


def test_questions_whose_gold_answer_cannot_be_read_are_left_out_and_told() -> None:
    training = questions("42", r"\frac{1}{", "$(1, 2]$", "$9^{9^{9^{9}}}$", "no solution")
    sifted = sift(MATH, Questions(training, questions("7")))
    assert [question.id for question in sifted.questions.training] == ["1", "3", "5"]
    assert [problem.place for problem in sifted.unreadable] == ["rows.jsonl:2", "rows.jsonl:4"]
    count, first, second = sifted.warnings
    assert count.startswith("2 questions are left out")
    assert first.startswith("rows.jsonl:2: ")
    assert "too large" in second or "tower" in second


def test_those_of_a_further_set_are_told_with_its_name(policy: Path, tmp_path: Path) -> None:
    for name, golds in {"rows": ("3", "4"), "more": ("5", "none")}.items():
        rows = [json.dumps({"prompt": f"{at}+1=", "answer": gold}) for at, gold in enumerate(golds)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    more = tmp_path / "more.jsonl"
    tree: dict[str, Any] = {
        "model": {"path": str(policy)},
        "task": {"kind": "jsonl", "file": str(tmp_path / "rows.jsonl"), "held_out": 1},
        "trainer": {},
        "sampling": {"max_tokens": 4},
        "rewards": {"function": "last_number"},
        "evaluation": {"sets": [{"name": "more", "source": {"data": str(more)}}]},
    }
    plan = make_plan(validate(tree, "recipe.toml"))
    assert [prompt.text for _, prompts in plan.sets for prompt in prompts] == ["0+1="]
    count, first = [note for note in plan.notes if note.startswith("evaluation set more: ")]
    assert count.startswith("evaluation set more: 1 question is left out")
    assert f"{more}:2" in first


def test_however_many_gold_answers_there_are_the_patience_of_a_run_is_not_their_deadline() -> None:
    training = questions(*map(str, range(150)), r"\frac{1}{")  # three portions of one worker, or one of two
    sifted = sift(MATH.model_copy(update={"patience": 1e-6}), Questions(training, questions("7")))
    assert [problem.place for problem in sifted.unreadable] == ["rows.jsonl:151"]


def test_a_run_without_a_readable_gold_answer_is_refused() -> None:
    with pytest.raises(DataError, match="no gold answer of the questions for training can be read"):
        sift(MATH, Questions(questions(r"\frac{1}{", "{{"), questions("7")))
    with pytest.raises(DataError, match="no gold answer that is held out can be read"):
        sift(MATH, Questions(questions("7"), questions(r"\frac{1}{")))


def test_other_rewards_leave_out_nothing() -> None:
    asked = Questions(questions(r"\frac{1}{"), questions("7"))
    assert sift(RewardsConfig(function="final_answer"), asked).questions is asked


def test_a_gold_answer_that_takes_too_long_is_an_error_that_names_its_row() -> None:
    slow = r"$\int_0^{1} e^{e^{e^{x}}} dx$"
    with pytest.raises(DataError, match=r"rows.jsonl:2: reading it: timeout after 0\.02 s; shorten or remove"):
        sift(MATH, Questions([*questions("42", slow)][1:], questions("7")), reading_seconds=0.02)


@pytest.mark.parametrize(
    "read",
    [
        lambda: sift(MATH, Questions(questions("7"), questions("7"))),
        lambda: check_reward_function(RewardsConfig(function="tests.launch.rewards_for_tests:length")),
    ],
)
def test_a_machine_without_descriptors_is_no_mistake_in_the_reward(
    read: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.rewards.service.pool._ROOM_SECONDS", 0.1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = set(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, ([number for number in range(soft) if number not in taken][5], hard))
    try:
        with pytest.raises(RoleDied, match="rewards-0 cannot be started: Too many open files"):
            read()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def row(line: int, text: str, answer: str = "1", messages: tuple[dict[str, str], ...] = ()) -> Question:
    return Question(id=str(line), text=text, answer=answer, messages=messages, place=f"train.jsonl:{line}")


def test_rows_that_differ_are_no_matter() -> None:
    assert repeated(Questions([row(1, "a"), row(2, "b")], [row(3, "c")])) == []


def test_a_held_out_row_that_is_trained_on_is_named() -> None:
    (told,) = repeated(Questions([row(1, "a"), row(2, "b")], [row(7, "b"), row(8, "a"), row(9, "c")]))
    assert told == (
        "held-out questions that are also trained on, which biases the held-out accuracy: 2; "
        "the first is train.jsonl:7, as in train.jsonl:2"
    )


def test_a_file_that_is_both_is_meant_to_be() -> None:
    rows = [row(1, "a"), row(2, "b")]
    assert repeated(Questions(rows, rows)) == []


def test_rows_that_contradict_each_other_and_rows_that_are_there_twice_are_told_apart() -> None:
    contrary, same = repeated(Questions([row(1, "a"), row(2, "a", "2"), row(3, "a"), row(4, "b"), row(5, "a")], []))
    assert contrary.startswith(
        "questions that an earlier row has with another answer: 1; the first is train.jsonl:2, as"
    )
    assert same.startswith("questions that an earlier row has with the same answer: 2; the first is train.jsonl:3, as")


def test_held_out_rows_are_compared_with_each_other_and_their_answers_with_those_trained_on() -> None:
    held_out = [row(7, "b"), row(8, "b"), row(9, "c", "2"), row(10, "d"), row(11, "d", "3")]
    leaked, contrary, same = repeated(Questions([row(1, "a"), row(2, "c")], held_out))
    assert leaked.endswith("accuracy: 1; the first is train.jsonl:9, as in train.jsonl:2")
    assert contrary.endswith("with another answer: 2; the first is train.jsonl:9, as in train.jsonl:2")
    assert same.endswith("with the same answer: 1; the first is train.jsonl:8, as in train.jsonl:7")


def test_chats_are_the_same_only_if_every_message_is() -> None:
    one, other = ({"role": "user", "content": "a"},), ({"role": "system", "content": "a"},)
    assert repeated(Questions([row(1, "a", messages=one), row(2, "a", messages=other)], [])) == []
    assert len(repeated(Questions([row(1, "a", messages=one), row(2, "a", messages=one)], []))) == 1


def test_what_is_made_on_the_spot_may_repeat() -> None:
    made = Question(id="0", text="1+1=", answer="2")
    assert repeated(Questions([made, made], [made])) == []


def asked(*golds: str) -> Questions:
    return Questions([Question(str(n), "?", gold, place=f"a.jsonl:{n}") for n, gold in enumerate(golds)], [])


def test_digits_of_full_width_are_named_with_the_first_place() -> None:
    (told,) = strange_digits(asked("12", "１２", "٣"))
    assert told.endswith("2; the first is a.jsonl:1: '１' (U+FF11)")


def test_powers_and_plain_digits_are_no_matter() -> None:
    assert strange_digits(asked("x²", "½", "12")) == []


CHAT = ({"role": "user", "content": "Think between <think> and </think>. How many?"},)


def tokenizer(opening: str) -> Tokenizer:
    found = tokenizer_of("qwen2_5")
    found._whole.chat_template += "{% if add_generation_prompt %}{{ '" + opening + "' }}{% endif %}"
    return found


@pytest.mark.parametrize(
    ("opening", "opens"),
    [
        ("", ""),
        ("<think>\\n", "<think>"),
        ("<think>\\n\\n</think>\\n\\n", ""),
        ("◁think▷", "◁think▷"),
        ("[THINK]", "[THINK]"),
    ],
)
def test_the_template_may_begin_a_thought(opening: str, opens: str) -> None:
    [prompt] = encode_prompts([Question("1", "How many?", "7", messages=CHAT)], tokenizer(opening), 1000)
    assert prompt.opens == opens


@pytest.mark.parametrize(("text", "opens"), [("Q: 3+4\nA: <think>\n", "<think>"), ("Write <think> first. 3+4", "")])
def test_the_question_may_begin_a_thought(text: str, opens: str) -> None:
    plain = tokenizer_of("qwen2_5")
    plain._whole.chat_template = None
    [prompt] = encode_prompts([Question("1", text, "7")], plain, 1000)
    assert prompt.opens == opens


PLAY = {"function": "environment", "settings": {"make": "tests.workflows.guessing:Guessing"}}


def rows_of(path: Path, *rows: tuple[str, str, int]) -> str:
    path.parent.mkdir(exist_ok=True)
    told = [{"prompt": prompt, "answer": answer, "tries": tries} for prompt, answer, tries in rows]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in told))
    return str(path)


def planned(policy: Path, task: dict[str, Any], **sections: Any) -> Plan:
    tree = {"model": {"path": str(policy)}, "task": task, "trainer": {}, "sampling": {"max_tokens": 4}, **sections}
    return make_plan(validate(tree, "recipe.toml"))


def tries(plan: Plan, prompts: tuple[Prompt, ...]) -> list[int]:
    return [task_of(plan.details, prompt, 0, 1).fields["tries"] for prompt in prompts]


def test_held_out_sources_of_one_name_share_no_id(policy: Path, tmp_path: Path) -> None:
    train = rows_of(tmp_path / "train.jsonl", ("1+1=", "2", 0), ("1+2=", "3", 0))
    one = rows_of(tmp_path / "a" / "sums.jsonl", ("2+1=", "3", 0), ("2+2=", "4", 0))
    other = rows_of(tmp_path / "b" / "sums.jsonl", ("3+1=", "4", 0), ("3+2=", "5", 0))
    task = {"kind": "dataset", "sources": [{"data": train}], "held_out_sources": [{"data": one}, {"data": other}]}
    plan = planned(policy, task, evaluation={"sets": [{"name": "again", "source": {"data": one}}]})
    asked = [(prompt.id, prompt.text) for prompt in plan.held_out]
    assert asked == [("sums:1", "2+1="), ("sums:1~2", "3+1="), ("sums:2", "2+2="), ("sums:2~2", "3+2=")]
    assert [prompt.id for prompt in plan.training] == ["train:1", "train:2"]
    assert [prompt.id for _, prompts in plan.sets for prompt in prompts] == ["sums:1", "sums:2"]  # asked apart


def test_a_further_set_that_is_also_trained_on_is_a_warning(policy: Path, tmp_path: Path) -> None:
    rows = [(f"{n}+1=", str(n + 1), 0) for n in range(4)]
    file = rows_of(tmp_path / "rows.jsonl", *rows)
    leaked = rows_of(tmp_path / "set.jsonl", rows[1], ("5+5=", "10", 0))
    task = {"kind": "jsonl", "file": file, "held_out": 1}
    sets = [{"name": "leaked", "source": {"data": leaked}}, {"name": "own", "source": {"data": file}}]
    [told] = [note for note in planned(policy, task, evaluation={"sets": sets}).notes if "evaluation.sets" in note]
    assert told.endswith(f"also trained on, which biases their accuracy: 1; the first is {leaked}:1, as in {file}:2")


def test_a_workflow_gets_the_row_that_was_drawn(policy: Path, tmp_path: Path) -> None:
    rows = [("1+1=", "2", level) for level in range(6)]
    task = {"kind": "jsonl", "file": rows_of(tmp_path / "rows.jsonl", *rows), "held_out": 2}
    plan = planned(policy, task, workflow=PLAY)
    assert (tries(plan, plan.training), tries(plan, plan.held_out)) == ([0, 1, 2, 3], [4, 5])


def test_rows_of_one_number_in_two_files_stay_apart(policy: Path, tmp_path: Path) -> None:
    training = rows_of(tmp_path / "rows.jsonl", ("1+1=", "2", 1), ("1+2=", "3", 2), ("1+3=", "4", 3))
    held_out = rows_of(tmp_path / "others.jsonl", ("1+1=", "2", 4), ("2+2=", "4", 5), ("1+3=", "4", 3))
    task = {"kind": "jsonl", "file": training, "held_out_file": held_out}
    plan = planned(policy, task, workflow=PLAY)
    assert (tries(plan, plan.training), tries(plan, plan.held_out)) == ([1, 2, 3], [4, 5, 3])
    assert [prompt.id for prompt in plan.training] == ["1", "2", "3"]
    assert [prompt.id for prompt in plan.held_out] == ["1~2", "2", "3"]  # only the first could be mistaken
    assert [prompt.id for prompt in planned(policy, task).held_out] == [
        "1",
        "2",
        "3",
    ]  # no workflow, nothing to mistake


def test_a_workflow_gets_the_template_arguments_of_each_question(policy: Path, tmp_path: Path) -> None:
    data = rows_of(tmp_path / "rows.jsonl", ("1+1=", "2", 0), ("1+2=", "3", 0), ("1+3=", "4", 0))
    task, again = ({"data": data, "template_arguments": {"sign": sign}} for sign in "-+")
    sets = [{"name": "again", "source": again}]
    sources = {"kind": "dataset", "sources": [task | {"held_out": 1}]}
    plan = planned(policy, sources, workflow=PLAY, evaluation={"sets": sets})
    asked = [*plan.training, *plan.held_out, *(prompt for _, prompts in plan.sets for prompt in prompts)]
    given = [plan.details.template_arguments[one.id, one.text, one.answer] for one in asked]
    assert "".join(str(one["sign"]) for one in given) == "---+++"


def test_a_new_id_is_never_one_that_a_question_has() -> None:
    rows = [Question(id, f"{at}=", "1") for at, id in enumerate(["a", "a~2", "a", "a", "b"])]
    [found] = with_own_ids([rows], apart=True)
    assert [one.id for one in found] == ["a", "a~2", "a~3", "a~4", "b"]
    [late] = with_own_ids([[rows[0], rows[2], rows[1]]], apart=True)
    assert [one.id for one in late] == ["a", "a~2", "a~2~2"]


def test_many_questions_with_unknown_characters_are_refused_in_seconds(tmp_path: Path) -> None:
    vocabulary = {"?": 0} | {f"a{number}": number for number in range(1, 50_000)}
    backend = Backend(models.WordLevel(vocabulary, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    questions = [Question(str(number), chr(0x4E00 + number), "7") for number in range(100)]
    began = time.monotonic()
    with pytest.raises(DataError, match=r"nor can question 1, .* and 96 more; not in the vocabulary: '一'"):
        encode_prompts(questions, load_tokenizer(tmp_path), 1000)
    assert time.monotonic() - began < 8
