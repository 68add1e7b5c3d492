"""Questions from a JSONL file.

- A row that is not what it should be is named with file and line, the value and what is needed; all of them together.
- What is unusual and right is read: chats, numbers as answers, blank lines, strange ends of lines inside a text.
"""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import DataError
from stretto.rollout.tasks import JsonlTask
from stretto_workflows.data.dataset import read_rows
from stretto_workflows.data.rows import gold

GOOD = '{"prompt": "3+8=", "answer": "11"}'


def row(prompt: str, answer: str = '"11"') -> str:
    return f'{{"prompt": {prompt}, "answer": {answer}}}'


BROKEN: list[tuple[str, str, Sequence[str]]] = [
    ("broken JSON", '{"prompt": "3+8=", ', ["broken JSON", "one object a line"]),
    ("a key twice", '{"prompt": "3", "answer": "4", "answer": "5"}', ["key 'answer' appears twice"]),
    ("a key twice within", row('"3"', '"4", "x": [{"a": 1, "a": 1}]'), ["key 'a' appears twice"]),
    ("half a line", '{"prompt": "3', ["broken JSON"]),
    ("an array", '["3+8=", "11"]', ['["3+8=", "11"] in place of an object']),
    *[("a number", "17", ["17 in place of an object"]), ("null", "null", ["null in place of an object"])],
    ("an empty object", "{}", ["no field 'prompt'", "the object is empty"]),
    ("a missing prompt", '{"promt": "3+8=", "answer": "11"}', ["no field 'prompt'", "did you mean 'promt'?"]),
    ("a missing answer", '{"prompt": "3+8="}', ["no field 'answer'", "answer_field=NAME; the row has: prompt"]),
    (
        "another answer",
        '{"prompt": "3", "level": 1, "sum": "4"}',
        ["write task.answer_field=sum; the row has: level, "],
    ),
    ("a null prompt", row("null"), ["prompt: null", "a text is needed"]),
    ("an empty prompt", row('" "'), ['prompt: " "', "a text is needed"]),
    ("a number as prompt", row("3"), ["prompt: 3", "a text is needed"]),
    ("a null answer", row('"3"', "null"), ["answer: null", "a text is needed"]),
    ("an empty answer", row('"3"', '""'), ['answer: ""', "a text is needed"]),
    ("a list as answer", row('"3"', '["11"]'), ['answer: ["11"]', "a text is needed"]),
    ("a bool as answer", row('"3"', "true"), ["answer: true", "a text is needed"]),
    ("no number as answer", row('"3"', "NaN"), ["broken JSON", "NaN"]),
    ("an answer beyond floats", row('"3"', "1e999"), ["answer: Infinity", "a text is needed"]),
    *[("a number of 5000 digits", row('"3"', "1" * 5000), ["broken JSON"]), ("lists", "[" * 100_000, ["broken JSON"])],
    ("a number as demonstration", row('"3"', '"3", "demonstration": 3'), ["demonstration: 3", "a text"]),
    ("half a surrogate pair", row(r'"\ud800"'), ["prompt", "surrogate"]),
    *[
        ("a NUL", row('"3"', r'"1\u0000"'), ["answer", "NUL"]),
        ("no messages", row("[]"), ["an empty list of messages"]),
    ],
    ("a bad role", row('[{"role": "asistant", "content": "3"}]'), ['prompt[0].role: "asistant"', "mean 'assistant'?"]),
    ("a role that is a list", row('[{"role": [], "content": "3"}]'), ["prompt[0].role: []"]),
    ("no content", row('[{"role": "user"}]'), ["prompt[0]", "a message is"]),
    ("a message that is a text", row('["3+8="]'), ['prompt[0]: "3+8="', "a message is"]),
    ("an empty content", row('[{"role": "user", "content": null}]'), ["prompt[0].content: null"]),
    *[("two objects in a line", GOOD + GOOD, ["broken JSON"]), ("a last comma", GOOD[:-1] + ",}", ["broken JSON"])],
    ("single quotes", "{'prompt': '3', 'answer': '3'}", ["broken JSON"]),
    ("an object as prompt", row('{"text": "3+8="}'), ["prompt: ", "a text is needed"]),
    ("an object as answer", row('"3"', '{"value": 11}'), ['answer: {"value": 11}', "a text is needed"]),
    ("a content in parts", row('[{"role": "user", "content": [{"text": "3"}]}]'), ["[0].content: "]),
    ("a message with a name", row('[{"role": "user", "content": "3", "name": "x"}]'), ["prompt[0]", "a message is"]),
    ("a NUL in a message", row(r'[{"role": "user", "content": "3\u0000"}]'), ["[0].content", "NUL"]),
    ("a million", row(f'"{"3" * ((1 << 20) + 1)}"'), ["a text of 1,048,577 characters", "at most 1,048,576"]),
]


def task(path: Path, **settings: object) -> JsonlTask:
    return JsonlTask.model_validate({"kind": "jsonl", "file": str(path)} | settings)


def write(folder: Path, *lines: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes("\n".join(lines).encode())
    return path


def message(path: Path, **settings: object) -> str:
    with pytest.raises(DataError) as caught:
        task(path, **settings).questions(seed=1)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(("broken", "expected"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_broken_row_is_named_with_its_line(tmp_path: Path, broken: str, expected: Sequence[str]) -> None:
    path = write(tmp_path, GOOD, "", broken, GOOD)
    told = message(path)
    assert told.startswith(f"{path}:3: ")
    assert len(told.splitlines()) == 1
    assert len(told) < 400 + len(str(path))
    assert not [part for part in expected if part not in told], told


def test_all_broken_rows_come_together_and_the_twenty_first_is_counted(tmp_path: Path) -> None:
    told = message(write(tmp_path, GOOD, *["{}"] * 3)).splitlines()
    assert [line.partition(": ")[0] for line in told] == [f"{tmp_path}/rows.jsonl:{number}" for number in (2, 3, 4)]
    (alike,) = message(write(tmp_path, *["{}"] * 25)).splitlines()
    assert alike == f"{tmp_path}/rows.jsonl:1: no field 'prompt'; the object is empty; and 24 more rows"
    told = message(write(tmp_path, *[f'{{"{number}": 1}}' for number in range(25)])).splitlines()
    assert len(told) == 21
    assert told[-1] == f"{tmp_path}/rows.jsonl: 5 more rows like these"


def test_all_mistakes_of_a_row_come_together(tmp_path: Path) -> None:
    rows = ['{"promt": "3+8=", "anser": "11"}', '{"prompt": 3, "answer": null, "demonstration": 4}']
    chat = '{"prompt": [{"role": "usr", "content": "3"}, {"role": "user", "content": 3}], "answer": "11"}'
    path = write(tmp_path, GOOD, *rows, chat)
    assert message(path).splitlines() == [
        f"{path}:2: no field 'prompt' and no field 'answer'; "
        "write task.prompt_field=promt task.answer_field=anser; did you mean 'promt'? did you mean 'anser'?",
        f"{path}:3: prompt: 3; a text is needed",
        f"{path}:3: answer: null; a text is needed",
        f"{path}:3: demonstration: 4; a text is needed",
        f"{path}:4: prompt[0].role: \"usr\"; did you mean 'user'?",
        f"{path}:4: prompt[1].content: 3; a text is needed",
    ]


def test_the_mistakes_of_both_files_come_together(tmp_path: Path) -> None:
    path, other = write(tmp_path, "{}"), tmp_path / "other.jsonl"
    other.write_text("17")
    told = message(path, held_out_file=str(other)).splitlines()
    assert [line.partition(": ")[0] for line in told] == [f"{path}:1", f"{other}:1"]


def test_a_file_that_is_not_there_comes_with_the_nearest_name_of_its_folder(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    assert message(tmp_path / "row.jsonl").endswith("row.jsonl: no such file; did you mean 'rows.jsonl'?")
    assert message(tmp_path / "zzz").endswith(f"no such file; the folder {tmp_path} has rows.jsonl")
    assert message(tmp_path / "no" / "rows.jsonl").endswith(f"no such file; there is no folder {tmp_path}/no")


def test_an_answer_may_be_as_large_as_the_tests_of_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = '{"prompt": "3", "answer": "' + "1" * (3 << 20) + '"}'
    assert len(task(write(tmp_path, large, GOOD), held_out=1).questions(seed=1).training[0].answer) == 3 << 20
    monkeypatch.setattr("stretto_workflows.data.jsonl.LARGEST_ROW", 3 << 20)
    told = message(write(tmp_path, GOOD, large))
    assert told == f"{tmp_path}/rows.jsonl:2: a row of 3,145,757 characters; at most 3,145,728 are allowed"


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    assert "no such file" in message(tmp_path / "nothing.jsonl")
    assert "cannot be read" in message(tmp_path)
    assert "no rows" in message(write(tmp_path, "", "  "))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (gzip.compress(GOOD.encode(), mtime=0), "it is compressed by gzip, and its name does not end with .gz"),
        (b"PAR1\x15\x04\x15\xa0\x01\x15\xb8", "it is a parquet file"),
        (GOOD.encode("utf-16"), "a UTF-8 text file is needed"),
        (GOOD.encode() + b"\n\xff", "rows.jsonl:2: cannot be read: the byte 0xff is no UTF-8; a UTF-8 text file is"),
        (b"\0" * 100, "broken JSON"),
        (b"[" + GOOD.encode() + b"]", "instead of one object"),
        (
            b" [\n" + GOOD.encode() + b",\n" + GOOD.encode() + b"\n]\n",
            "a JSON array instead of one object per line; e.g.",
        ),
        (b"prompt,answer\n3+8=,11\n", "broken JSON"),  # a table of another kind
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    assert expected in message(tmp_path / "rows.jsonl")


def test_a_file_with_the_name_of_a_gzip_file_is_unpacked_and_named_with_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(f"{GOOD}\n{{}}\n".encode()))
    assert message(path).startswith(f"{path}:2: no field 'prompt'")
    path.write_bytes(gzip.compress(f"{GOOD}\n{GOOD}".encode()))
    assert [question.place for question in read_rows(path, task(path))] == [f"{path}:1", f"{path}:2"]


def test_a_gzip_file_cut_off_or_with_too_much_in_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl.gz"
    whole = gzip.compress(f"{GOOD}\n".encode() * 100)
    path.write_bytes(whole[: len(whole) // 2])
    assert "cannot be unpacked" in message(path)
    path.write_bytes(whole)
    monkeypatch.setattr("stretto_workflows.data.jsonl.LARGEST_UNPACKED", 100)
    assert "more than 100 bytes after unpacking" in message(path)


def test_rows_of_one_name_are_refused_with_both_places(tmp_path: Path) -> None:
    rows = [json.dumps({"id": id, "prompt": "3+8=", "answer": "11"}) for id in ("a", 7, "a", True)]
    told = message(write(tmp_path, *rows), id_field="id").splitlines()
    assert told == [
        f'{tmp_path}/rows.jsonl:3: id: "a" is also that of {tmp_path}/rows.jsonl:1; each row needs a name of its own',
        f"{tmp_path}/rows.jsonl:4: id: true; a text or a whole number is needed",
    ]


def test_the_last_rows_are_held_out(tmp_path: Path) -> None:
    path = write(tmp_path, *(json.dumps({"prompt": f"{n}", "answer": str(n)}) for n in range(1, 6)))
    questions = task(path, held_out=2).questions(seed=1)
    assert [question.id for question in questions.training] == ["1", "2", "3"]
    assert [question.answer for question in questions.held_out] == ["4", "5"]


def test_too_few_rows_to_hold_some_out_are_refused(tmp_path: Path) -> None:
    assert "2 rows, and held_out = 2 of them" in message(write(tmp_path, GOOD, GOOD), held_out=2)


def test_a_second_file_can_be_held_out_and_is_checked_as_well(tmp_path: Path) -> None:
    path, other = write(tmp_path, GOOD), tmp_path / "other.jsonl"
    other.write_text('{"prompt": "1+1=", "answer": 2}')
    questions = task(path, held_out_file=str(other)).questions(seed=1)
    assert [question.text for question in (*questions.training, *questions.held_out)] == ["3+8=", "1+1="]
    other.write_text("{}")
    assert message(path, held_out_file=str(other)).startswith(f"{other}:1: ")


def test_a_chat_keeps_its_messages_and_reads_as_text(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Count."}, {"role": "user", "content": "3+8="}]
    (question,) = read_rows(write(tmp_path, json.dumps({"prompt": chat, "answer": 11})), task(tmp_path))
    assert (question.messages, question.text, question.answer) == (tuple(chat), "Count.\n3+8=", "11")


def test_fields_have_the_names_that_the_recipe_gives_them(tmp_path: Path) -> None:
    other = json.dumps({"question": "3+8=", "gold": 2.5, "solution": "11", "id": 3})
    names = {"prompt_field": "question", "answer_field": "gold", "demonstration_field": "solution"}
    (question,) = read_rows(write(tmp_path, other), task(tmp_path, **names))
    assert (question.text, question.answer, question.demonstration) == ("3+8=", "2.5", "11")


def test_rows_with_a_demonstration_are_shown_in_the_warm_start(tmp_path: Path) -> None:
    shown = '{"prompt": "1+1=", "answer": 2, "demonstration": "2"}'
    questions = task(write(tmp_path, GOOD, shown, shown), held_out=1).questions(seed=1)
    assert [question.id for question in questions.demonstrations] == ["2"]


def test_windows_ends_a_mark_at_the_start_and_a_last_line_without_an_end_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{GOOD}\r\n\r\n{GOOD}".encode())
    assert [question.place for question in read_rows(path, task(path))] == [f"{path}:1", f"{path}:3"]


@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1).filter(str.strip))
def test_any_text_survives(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_bytes(json.dumps({"prompt": text, "answer": text}, ensure_ascii=False).encode())
    (question,) = read_rows(path, task(path))
    assert (question.text, question.answer) == (text, text)


def test_a_whole_number_beyond_any_float_is_an_answer() -> None:
    assert gold(10**400, "rows.jsonl:1") == "1" + "0" * 400
    with pytest.raises(DataError):
        gold(float("inf"), "rows.jsonl:1")
