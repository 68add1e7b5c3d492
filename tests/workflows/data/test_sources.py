"""Prompts from datasets of any make.

- JSONL, CSV, parquet, an arrow folder and gzip files of them give the same questions; each row knows its place.
- The prompt is a column, a template of columns, or a ready mapping; a name that the row has not is named with its row.
- A mistake of one source is told with those of the others: file and line, or file and row.
"""

import csv
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from pydantic import ValidationError

from stretto.core.errors import DataError
from stretto.rollout.tasks import DatasetTask

ROWS: list[dict[str, Any]] = [{"q": f"{n}+{n}=", "gold": str(2 * n), "level": n} for n in range(1, 6)]


def jsonl(path: Path, rows: Sequence[object] = ROWS) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def table(path: Path, comma: str) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["q", "gold", "level"], delimiter=comma)
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def packed(path: Path) -> Path:
    path.write_bytes(gzip.compress(jsonl(path.with_name("plain.jsonl")).read_bytes()))
    return path


def parquet(path: Path) -> Path:
    datasets.Dataset.from_list(ROWS).to_parquet(path)
    return path


def saved(path: Path) -> Path:
    datasets.Dataset.from_list(ROWS).save_to_disk(path)
    return path


def saved_splits(path: Path) -> Path:
    whole = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": whole, "test": whole.select(range(1))}).save_to_disk(path)
    return path


MAKES: dict[str, tuple[str, Callable[[Path], Path], str]] = {
    "jsonl": ("rows.jsonl", jsonl, ":1"),
    "gzip": ("rows.jsonl.gz", packed, ":1"),
    "csv": ("rows.csv", lambda path: table(path, ","), ":2"),
    "tsv": ("rows.tsv", lambda path: table(path, "\t"), ":2"),
    "parquet": ("rows.parquet", parquet, ": row 1"),
    "an arrow folder": ("saved", saved, ": row 1"),
    "an arrow folder of splits": ("splits", saved_splits, ": row 1"),
}


def task(*sources: dict[str, Any], **settings: Any) -> DatasetTask:
    return DatasetTask.model_validate({"kind": "dataset", "sources": list(sources)} | settings)


def source(path: Path, **settings: Any) -> dict[str, Any]:
    return {"data": str(path), "prompt_field": "q", "answer_field": "gold", "held_out": 1} | settings


def told(*sources: dict[str, Any], **settings: Any) -> list[str]:
    with pytest.raises(DataError) as caught:
        task(*sources, **settings).questions(seed=1)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(("name", "make", "place"), MAKES.values(), ids=MAKES.keys())
def test_every_make_has_the_same_questions(tmp_path: Path, name: str, make: Callable[[Path], Path], place: str) -> None:
    path = make(tmp_path / name)
    found = task(source(path, name="sums")).questions(seed=1)
    assert [(one.id, one.text, one.answer) for one in found.training] == [
        (f"sums:{n}", f"{n}+{n}=", str(2 * n)) for n in range(1, 5)
    ]
    assert [one.text for one in found.held_out] == ["5+5="]
    assert found.training[0].place == f"{path}{place}"
    assert {one.source for one in found.training} == {"sums"}
    assert str(json.loads(found.training[0].fields)["level"]) == "1"


def test_a_source_is_called_as_its_file_and_takes_its_first_rows(tmp_path: Path) -> None:
    found = task(source(jsonl(tmp_path / "sums.jsonl"), rows=3)).questions(seed=1)
    assert [one.id for one in (*found.training, *found.held_out)] == ["sums:1", "sums:2", "sums:3"]


def test_a_split_of_a_saved_folder_is_asked_for_by_name(tmp_path: Path) -> None:
    path = saved_splits(tmp_path / "splits")
    (test,) = (
        task(source(jsonl(tmp_path / "a.jsonl")), held_out_sources=[source(path, split="test", held_out=0)])
        .questions(1)
        .held_out[1:]
    )
    assert test.text == "1+1="
    assert told(source(path, split="tset")) == [f"{path}: has no split 'tset'; allowed: test, train"]


def test_a_template_writes_the_prompt_from_the_columns(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl")
    asked = (
        task(source(path, template="Level {{ level }}: {{ q }}", system_prompt="Add.")).questions(seed=1).training[0]
    )
    assert (asked.text, asked.messages[0]) == ("Level 1: 1+1=", {"role": "system", "content": "Add."})


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ levle }}", "the template uses a name that the row lacks ('levle' is undefined); did you mean 'level'?"),
        ("{{ q / 2 }}", "the template cannot be rendered: TypeError"),
        ("{{ q.__class__.__mro__ }}", "SecurityError"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "cannot be rendered: RecursionError"),
        ("{{ '' }}", "a text is needed"),
    ],
)
def test_a_template_that_fits_no_row_is_named_with_the_row(tmp_path: Path, template: str, expected: str) -> None:
    path = jsonl(tmp_path / "rows.jsonl")
    (first, *_) = told(source(path, template=template))
    assert first.startswith(f"{path}:1")
    assert expected in first


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"template": "{{ q "}, "the template is broken in line 1"),
        ({"template": "{{ " + "(" * 3000}, "the template is broken: its expressions are nested too deeply"),
        ({"mapping": "gsm8"}, "mapping 'gsm8' is unknown; did you mean 'gsm8k'?"),
        ({"mapping": "gsm8k"}, "names the columns, and so does answer_field, prompt_field"),
        ({"streaming": True}, "streaming = true reads as many rows as `rows` says"),
        ({"held_out": 0}, "no question is held out"),
        ({"weight": 0.0}, "greater than 0"),
        ({"name": "a b"}, "pattern"),
    ],
)
def test_a_source_that_contradicts_itself_is_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        task(source(Path("rows.jsonl"), **settings))


def test_sources_need_names_of_their_own_and_weights_for_all_or_none() -> None:
    one, other = source(Path("a/rows.jsonl")), source(Path("b/rows.jsonl"))
    with pytest.raises(ValidationError, match="two sources are called 'rows'"):
        task(one, other)
    with pytest.raises(ValidationError, match="source 'rows' has no weight and others have one"):
        task(one, other | {"name": "other", "weight": 2.0})


BAD: dict[str, tuple[str, bytes, str]] = {
    "no file": ("none.csv", b"", "no such file"),
    "a column too few": ("rows.csv", b"q,gold\n1+1=\n", ":2: 1 fields; the first line names 2 columns"),
    "a column too many": ("rows.csv", b"q,gold\n1+1=,2,3\n", ":2: 3 fields; the first line names 2 columns"),
    "a quote that never ends": ("rows.csv", b'q,gold\n"1+1=,2\n', ": broken CSV: unexpected end of data"),
    "columns of one name": ("rows.csv", b"q,q\n1,2\n", ":1: columns ['q', 'q']"),
    "a missing column": ("rows.csv", b"q,glod\n1+1=,2\n", ":2: no field 'gold'; write answer_field=glod"),
    "only names": ("rows.csv", b"q,gold\n", ": no rows"),
    "a table without text": ("rows.csv", b"\xff\xfe\x00", "a UTF-8 text file is needed"),
    "a truncated parquet file": ("rows.parquet", b"PAR1\x15\x04\x15\xa0\x01", ": cannot be read: "),
    "an empty parquet file": ("rows.parquet", b"", ": cannot be read: "),
    "broken JSON": ("rows.jsonl", b'{"q": \n', ":1: broken JSON"),
    "another kind of file": ("rows.xlsx", b"PK\x03\x04", "a file with the ending '.xlsx'; allowed: .jsonl"),
}


@pytest.mark.parametrize(("name", "content", "expected"), BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_named_with_its_place(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    path = tmp_path / name
    if expected != "no such file":
        path.write_bytes(content)
    (line,) = told(source(path))
    assert line.startswith(str(path))
    assert expected in line


def test_a_parquet_file_that_ends_in_the_middle_is_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path / "rows.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    (line,) = told(source(path))
    assert line.startswith(f"{path}: cannot be read: ")


def test_the_mistakes_of_all_sources_come_together(tmp_path: Path) -> None:
    one, other = jsonl(tmp_path / "one.jsonl", [{}, ROWS[0], {"q": 3}]), tmp_path / "two.csv"
    other.write_text("q,gold\n1\n")
    found = [
        line.partition(": ")[0]
        for line in told(source(one), source(other), held_out_sources=[source(tmp_path / "no.csv")])
    ]
    assert found == [f"{one}:1", f"{one}:3", f"{one}:3", f"{other}:2", f"{tmp_path}/no.csv"]


def test_rows_before_a_place_that_cannot_be_read_are_told_of_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('q,gold\n1\n2,3\n"4,"5"x\n')
    assert [line.partition(": ")[0] for line in told(source(path))] == [f"{path}:2", f"{path}:4"]


def test_a_hub_dataset_that_cannot_be_reached_is_one_message_with_the_remedy() -> None:
    (line,) = told({"data": "nobody/nothing-of-this-name", "held_out": 1})
    assert line.startswith("nobody/nothing-of-this-name: HF_HUB_OFFLINE is set, and its dataset of this name is not in")
    assert line.endswith(
        'a file of this machine: data = "rows.jsonl", allowed: .jsonl, .json, .csv, .tsv, .parquet, .arrow'
    )
    (line,) = told({"data": "a name of two words", "held_out": 1})
    assert "no such file or folder, and no name of the hub" in line


def test_rows_that_repeat_are_dropped_where_that_is_asked_for_and_counted(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [*ROWS, ROWS[1]])
    found = task(source(path, duplicates="drop")).questions(seed=1)
    assert [one.id for one in (*found.training, *found.held_out)] == [f"rows:{n}" for n in range(1, 6)]
    assert found.notes == ("rows: 1 of 6 rows repeat another, left out",)
    assert len(task(source(path)).questions(seed=1).training) == 5


def test_the_first_held_out_questions_are_of_all_sources(tmp_path: Path) -> None:
    one, other = jsonl(tmp_path / "one.jsonl"), jsonl(tmp_path / "two.jsonl")
    found = task(source(one, held_out=1), source(other, held_out=3)).questions(seed=1)
    assert [row.id for row in found.held_out] == ["one:5", "two:3", "two:4", "two:5"]


def test_held_out_sources_are_asked_whole_and_never_trained_on(tmp_path: Path) -> None:
    one, other = jsonl(tmp_path / "one.jsonl"), jsonl(tmp_path / "two.jsonl", ROWS[:2])
    found = task(source(one, held_out=0), held_out_sources=[source(other)]).questions(seed=1)
    assert [one.id for one in found.held_out] == ["two:1", "two:2"]
    assert len(found.training) == 5
    same = task(source(one, held_out=0), held_out_sources=[source(one, held_out=0)]).questions(seed=1)
    assert same.training == same.held_out


def test_a_row_of_a_demonstration_is_shown_in_the_warm_start(tmp_path: Path) -> None:
    rows: list[object] = [{"q": "1", "gold": "1", "demonstration": "one"}, *ROWS]
    found = task(source(jsonl(tmp_path / "rows.jsonl", rows))).questions(seed=1)
    assert [one.demonstration for one in found.demonstrations] == ["one"]
