"""The export of a run as JSON lines, parquet and CSV.

Promises: the three hold the same rows, in the columns that docs/reference/metrics.md lists; `datasets` and polars
read the parquet file; what a model said is whole in all of them (10 MB, quotation marks, ends of lines), and never a
formula of a spreadsheet; memory does not grow with the run; a file is whole or absent, and one that was there stays
when an export fails; what is no file stays what it is, and a link stays a link.
"""

import csv
import io
import json
import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import RunFolderError, StoreError, UserError
from stretto.core.records import Outcome, Segment, State, Trajectory, Verdict
from stretto_report.reading import formats
from stretto_report.reading.export import ExportedTrajectory, export_run
from stretto_report.reading.formats import FORMATS, cell
from tests.store.make import Make, run_at

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
LARGE = "ab\n" * (10 * 2**20 // 3)
TEXTS = ('=HYPERLINK("http://x")', 'nul \x00 and "quotes",\r\nand \u2028 \u202e', "'apostrophe", "", LARGE)


def said(member: int, text: str, group: str = "0.1.0", tokens: Sequence[int] = (4, 9), parent: int = -1) -> Trajectory:
    """A trajectory of two turns with a tool's reply between them, and the parts of its reward."""
    length = len(tokens)
    first = Segment.of(tuple(tokens), (-0.1,) * length, (0,) * length, engines=(("engine-0", length),))
    tool, second = Segment.of((7, 7, 3)), Segment.of((8,), (-1e-300,), (1,), parent=parent, cause="branch", reward=0.25)
    verdict = Verdict(outcome=Outcome.RIGHT, reward=0.75, rewards={"math": 1.0, "short": 0.5})
    return Trajectory(f"{group}/{member}", (first, tool, second), verdict, text, "a-session")


def record(folder: Path, *texts: str, tokens: Sequence[int] = (4, 9), parent: int = -1) -> Path:
    """A run that has said `texts`, and one completion more that failed."""
    members, make = len(texts) + 1, Make()
    trajectories = [said(at, text, tokens=tokens, parent=parent) for at, text in enumerate(texts)]
    with run_at(folder) as (run, ledger):
        ledger.issue("0.1.0", make.prompt, members, 0)
        ledger.settle(f"0.1.0/{members - 1}", State.FAILED, "=cmd()")
        ledger.buffer(make.group("0.1.0", *trajectories))
        run.write("questions.jsonl", '{"id":"17","prompt":"@SUM(1)","answer":"-11","row":"rows.jsonl:17"}\n')
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("said") / "run", *TEXTS)


@pytest.fixture(scope="module")
def rows(run: Path) -> list[dict[str, Any]]:
    """Those of the JSON lines."""
    export_run(run, run.parent / "rows.jsonl")
    return [json.loads(line) for line in (run.parent / "rows.jsonl").read_text().split("\n")[:-1]]


def as_in_json(row: dict[str, Any]) -> dict[str, Any]:
    """A row of parquet: rewards by name, and what a segment does not have is left out."""
    segments = [
        {name: value for name, value in segment.items() if value is not None and value != ""}
        for segment in row["segments"]
    ]
    return row | {"segments": segments, "rewards": {one["name"]: one["value"] for one in row["rewards"]}}


def test_json_lines_hold_every_text_as_it_was_said(rows: list[dict[str, Any]]) -> None:
    assert [row["text"] for row in rows[:-1]] == list(TEXTS)
    assert (rows[-1]["state"], rows[-1]["reason"], rows[-1]["verdict"]) == ("failed", "=cmd()", None)


def test_parquet_has_the_same_rows(run: Path, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    assert export_run(run, tmp_path / "rows.parquet") == len(rows)
    table = pyarrow.parquet.read_table(tmp_path / "rows.parquet")
    assert [as_in_json(row) for row in table.to_pylist()] == rows
    assert table.schema.field("behavior_logprobs").type.value_type == "double"  # -1e-300 is none of 32 bits
    assert rows[0]["behavior_logprobs"] == [-0.1, -0.1, -1e-300]


READERS = """
import sys, datasets, polars
whole, parts = sys.argv[1], polars.scan_parquet(sys.argv[1])
rows = datasets.load_dataset("parquet", data_files=whole, cache_dir=sys.argv[2])["train"]
assert rows[0]["rewards"] == [{"name": "math", "value": 1.0}, {"name": "short", "value": 0.5}], rows[0]["rewards"]
assert rows[0]["segments"][2]["parent"] == -1 and rows[0]["given"] == [[2, 5]], rows[0]
frame = polars.read_parquet(whole)
assert frame["text"].to_list() == rows["text"][:], "texts"
assert frame.schema["token_ids"] == polars.List(polars.Int64), frame.schema
rewards = parts.filter(polars.col("state") == "buffered").select(polars.col("reward").sum()).collect()
table = polars.read_csv(sys.argv[3], infer_schema=False)
assert table["verdict"].to_list()[-1] is None and table["text"].to_list()[3] == "", "nothing is no empty text"
assert table["text"].to_list()[4] == rows["text"][4], "10 MB"
print(len(rows), len(frame), rewards.item())
"""


def test_datasets_and_polars_read_parquet_and_polars_csv(run: Path, tmp_path: Path) -> None:
    whole, cache, table = (str(tmp_path / name) for name in ("rows.parquet", "cache", "rows.csv"))
    export_run(run, whole)
    export_run(run, table)
    command = [sys.executable, "-c", READERS, whole, cache, table]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["6", "6", str(5 * 0.75)]


def test_csv_has_the_same_rows_and_no_formula(run: Path, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    export_run(run, tmp_path / "rows.csv")
    before = csv.field_size_limit(64 << 20)
    with (tmp_path / "rows.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    csv.field_size_limit(before)
    assert list(cells[0]) == list(ExportedTrajectory.__struct_fields__)
    assert not [cell for row in cells for cell in row.values() if cell[:1] in {"=", "+", "@"}]
    assert [row["text"].removeprefix("'") for row in cells[:-1]] == [text.replace("\0", "␀") for text in TEXTS]
    assert cells[0]["text"][0] == cells[2]["text"][0] == "'"
    assert (cells[0]["prompt"], cells[0]["answer"], cells[-1]["reason"]) == ("'@SUM(1)", "'-11", "'=cmd()")
    assert (cells[-1]["reward"], cells[0]["reward"], cells[0]["admitted_version"]) == ("", "0.75", "0")
    for name in ("token_ids", "given", "segments", "rewards", "behavior_logprobs"):
        assert [json.loads(row[name]) for row in cells] == [row[name] for row in rows]


def test_every_outcome_is_exported_under_the_name_that_the_docs_give_it(tmp_path: Path) -> None:
    """Nothing is exported for one that was not judged; one that no reward could judge says so."""
    make = Make()
    with run_at(tmp_path / "run") as (_, ledger):
        ledger.issue("0.1.0", make.prompt, len(Outcome) + 1, 0)
        for member, outcome in enumerate(Outcome):
            verdict = Verdict(outcome, None if outcome is Outcome.UNDECIDED else 0.5, "why")
            judged = msgspec.structs.replace(said(member, "text"), verdict=verdict)
            ledger.settle(judged.id, State.FAILED, "why", judged)
    export_run(tmp_path / "run", tmp_path / "rows.jsonl")
    found = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    verdicts = [row["verdict"] for row in found]
    assert verdicts == [*Outcome, None]
    assert [len(row["segments"]) for row in found] == [3] * len(Outcome) + [0]
    assert [row["reward"] for row in found] == [None if v in ("undecided", None) else 0.5 for v in verdicts]
    (told,) = (line for line in PAGE.splitlines() if line.startswith("| `verdict`"))
    assert re.findall("`([a-z]+)`", told)[1:] == list(Outcome)


@given(st.text())
def test_a_cell_is_undone_by_taking_one_apostrophe_away_and_is_never_a_formula(text: str) -> None:
    ((found,),) = csv.reader(io.StringIO(cell(text), newline=""))
    assert found.removeprefix("'") == text.replace("\0", "␀")
    assert re.match("[ ]*[-=+@＝＋－＠\t\r\n]", found) is None
    assert "\0" not in found


@pytest.mark.parametrize("format", FORMATS)
def test_an_export_that_fails_leaves_the_file_as_it_was(format: str, tmp_path: Path) -> None:
    run, file = record(tmp_path / "run", "one", "two"), tmp_path / "rows"
    with (run / "questions.jsonl").open("a") as questions:
        questions.write('{"id":"18","prompt":"\\ud800","answer":""}\n')  # half a character: no text
    file.write_text("as it was")
    with pytest.raises(StoreError, match=r"questions.jsonl: line 2"):
        export_run(run, file, format)
    assert file.read_text() == "as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows", "run"]


def test_what_is_no_file_is_refused_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, pipe = record(tmp_path / "run", "one"), tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.chdir(tmp_path)
    for file, found in ((pipe, "a device, a pipe or a socket"), (Path(), "a folder"), (tmp_path / "run", "a folder")):
        with pytest.raises(RunFolderError, match=rf"^{re.escape(str(file))}: is {found}; give a file"):
            export_run(run, file, "jsonl")
    assert pipe.is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "run"]


def test_a_link_stays_and_its_file_is_written(tmp_path: Path) -> None:
    run, link = record(tmp_path / "run", "one"), tmp_path / "link"
    (tmp_path / "rows").write_text("as it was")
    link.symlink_to("rows")
    assert export_run(run, link) == 2
    assert (link.readlink(), len((tmp_path / "rows").read_text().splitlines())) == (Path("rows"), 2)


def test_questions_that_cannot_be_read_are_not_a_fault_of_the_file(tmp_path: Path) -> None:
    run = record(tmp_path / "run", "one")
    (run / "questions.jsonl").unlink()
    (run / "questions.jsonl").mkdir()
    with pytest.raises(IsADirectoryError) as refused:
        export_run(run, tmp_path / "rows")
    assert refused.value.filename == str(run / "questions.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_suffix_says_the_format_and_a_format_says_more(run: Path, tmp_path: Path) -> None:
    for name, format in (("a.PARQUET", None), ("b.csv", "parquet"), ("c.jsonl", "parquet")):
        export_run(run, tmp_path / name, format)
        assert (tmp_path / name).read_bytes()[:4] == b"PAR1"
    export_run(run, tmp_path / "d")
    with (tmp_path / "d").open() as lines:
        assert json.loads(lines.readline())["id"] == "0.1.0/0"


NEAREST = {
    "a.parquett": "did you mean 'parquet'?; ",
    "a.jsnl": "did you mean 'jsonl'?; ",
    "a.tsv": "did you mean 'csv'?; ",
}
ALL = "allowed: csv, jsonl, parquet; "


@pytest.mark.parametrize(("name", "advice"), [*NEAREST.items(), ("a.xlsx", ALL), ("a.jsonl.gz", ALL)])
def test_a_suffix_of_no_format_is_refused_with_near_or_all(run: Path, tmp_path: Path, name: str, advice: str) -> None:
    with pytest.raises(RunFolderError, match=f"is no suffix of a format; {re.escape(advice)}--format writes"):
        export_run(run, tmp_path / name)
    assert not (tmp_path / name).exists()
    assert export_run(run, tmp_path / name, "jsonl") == export_run(run, tmp_path / "a.json")
    assert (tmp_path / name).read_bytes() == (tmp_path / "a.json").read_bytes()


def test_parquet_without_its_package_is_refused_with_the_remedy(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        UserError, match=r"--format parquet: needs the package 'pyarrow'.*pip install 'stretto\[data\]'"
    ):
        export_run(run, tmp_path / "rows.parquet")
    assert not list(tmp_path.iterdir())


def test_a_number_that_parquet_cannot_hold_is_named(tmp_path: Path) -> None:
    run = record(tmp_path / "run", "11", parent=1 << 63)
    assert export_run(run, tmp_path / "rows.jsonl") == 2
    with pytest.raises(StoreError, match="has no place in parquet"):
        export_run(run, tmp_path / "rows.parquet")
    assert not (tmp_path / "rows.parquet").exists()


@pytest.fixture(scope="module")
def short_and_long(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Runs of 20 and of 60 completions of 500 tokens: 5 kB each as a message."""
    folder = tmp_path_factory.mktemp("grown")
    return [record(folder / f"{n}", *["11"] * n, tokens=range(1000, 1500)) for n in (20, 60)]


@pytest.mark.parametrize("format", FORMATS)
def test_memory_does_not_grow_with_the_run(
    format: str, short_and_long: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "_GROUP_BYTES", 40_000)
    peaks = []
    for run in short_and_long:
        export_run(run, tmp_path / "rows", format)  # modules are imported
        tracemalloc.start()
        export_run(run, tmp_path / "rows", format)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_every_column_is_documented() -> None:
    columns = list(ExportedTrajectory.__struct_fields__)
    told = re.findall(r"^\| `(\w+)` \|", PAGE.partition("\n### Columns\n")[2], flags=re.MULTILINE)
    assert told[: len(columns)] == columns
