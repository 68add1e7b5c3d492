"""Promises: no text of a run, whatever it holds and wherever it stands, is markup, steers the terminal, or hinders its
tables: not its reason, its names, its folder, its sentences, nor a breach.
"""

import io
import shutil
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from rich.text import Text

from stretto.store.ending import ENDING, Ending
from stretto.store.inspection import Inspection
from stretto.store.ledger.ledger import put_fact
from stretto_report.audit.check import Findings, print_balance, print_findings
from stretto_report.dashboard.prediction import PredictedRun, Term
from stretto_report.dashboard.terminal.summary import comparison_lines, print_inspection, summary_table
from stretto_report.reading.inspection import inspect_run

DATA = Path(__file__).parents[1] / "data"
HOSTILE = ["[/x]", "[red]", "[bold]b[/bold]", "[link=http://x]y", ":smile:", "a\x1b[2Jb\u202ec", "\\[", "[", "[/"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with tarfile.open(DATA / "before_packages" / "run.tar.xz") as archive:
        archive.extractall(folder := tmp_path_factory.mktemp("before"), filter="data")
    return folder / "run"


def hostile(value: Any, text: str) -> Any:
    """The value with `text` in each text of its records, and at the end of each key; the names of fields stay."""
    match value:
        case str():
            return text
        case msgspec.Struct():
            fields = {name: hostile(getattr(value, name), text) for name in value.__struct_fields__}
            return msgspec.structs.replace(value, **fields)
        case dict():
            return {f"{key}{text}" if isinstance(key, str) else key: hostile(one, text) for key, one in value.items()}
        case list() | tuple():
            return tuple(hostile(one, text) for one in value)
    return value


def printed(*shown: Any) -> str:
    console = Console(file=io.StringIO(), width=2_000, force_terminal=False)
    for one in shown:
        console.print(one)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def is_shown(text: str, out: str) -> None:
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert text.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e") in out


@pytest.mark.parametrize("text", HOSTILE)
def test_each_text_of_the_summary_is_shown_as_it_is(run: Path, text: str) -> None:
    found: Inspection = hostile(inspect_run(run), text)
    assert found.engines[0].reason == text
    table = summary_table(found, text)
    assert all(isinstance(cell, Text) or cell == "" for column in table.columns for cell in column.cells)
    assert printed(table).count("\\x1b" if "\x1b" in text else text) > 10
    is_shown(text, printed(table))


@pytest.mark.parametrize("text", HOSTILE)
def test_the_prediction_beside_a_run_is_shown_as_it_is(text: str) -> None:
    found = PredictedRun(text, "", {text: Term(1.0, 2.0, 0.5, 0.1)}, text, other_machine=text)
    is_shown(text, printed(*comparison_lines(found)))


@pytest.mark.parametrize("text", [text for text in HOSTILE if "/" not in text] + ["x[", "lr=[0.1]"])
def test_a_run_ends_for_any_reason_in_a_folder_of_any_name(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    folder = Path(shutil.copytree(run, tmp_path / text))
    put_fact(folder / "ledger.sqlite", ENDING, Ending("failed", f"KeyError: '{text}'"))
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("COLUMNS", "2000")
        print_inspection(folder)
        is_shown(text, capsys.readouterr().out)
        print_balance(folder)
    is_shown(text, capsys.readouterr().out.replace("\n", ""))  # a title is as wide as its table


def test_a_breach_and_a_note_steer_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_findings(Findings({"a law": ("a\x1b[2J",)}, {}, ("b\x07",)))
    assert capsys.readouterr().out == "BROKEN  a law (1)\n        a\\x1b[2J\nnote    b\\x07\n"
