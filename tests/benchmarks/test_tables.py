"""Promises of what the benchmarks write:

- a table lines its columns up and refuses rows that do not fit it;
- a result names the machine and the library versions, and is whole or absent.
"""

import json
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.report import Table, save


def test_columns_line_up_and_numbers_stand_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("policy", "step time")
    table.add("train", 1.0)
    table.add("wait", "12.25")
    table.show()
    assert capsys.readouterr().out == "policy  step time\ntrain         1.0\nwait        12.25\n"


def test_the_headings_come_once_when_rows_are_shown_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("a", "b")
    for number in range(2):
        table.add(number, number)
        table.show_last()
    assert capsys.readouterr().out == "a  b\n0  0\n1  1\n"


def test_a_row_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        Table("a", "b").add(1)


def test_a_result_names_its_machine_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "benchmarks" / "results")
    content = json.loads(save("speed", {"rate": 3}).read_text())
    assert content["benchmark"] == "speed"
    assert content["results"] == {"rate": 3}
    assert content["machine"]["cores"] >= 1
    assert "python" in content["versions"]
