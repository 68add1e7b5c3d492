"""Promises of what the benchmarks write:

- a table lines its columns up and refuses rows that do not fit it;
- a result names the machine and the library versions, and is whole or absent;
- what was measured on one processor outlives a measurement on another;
- a rate is of as many tokens as were asked for, or there is none; those of a server are of the wall clock, times of
  what clients saw, and docs/how_to/gateway.md has the committed result."""

import json
from pathlib import Path

import msgspec
import pytest

from benchmarks import report
from benchmarks.generators import Prompts, timed
from benchmarks.report import RESULTS, Table, save
from benchmarks.serving import Answered, markdown, row
from stretto.store.run_folder import machine


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
    assert (content["benchmark"], content["results"]) == ("speed", {"rate": 3})
    assert content["machine"]["cores"] >= 1
    assert "python" in content["versions"]


def test_the_results_of_two_processors_stand_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "benchmarks" / "results")
    here = machine()
    for processor, rate in (("AMD EPYC", 1), ("Intel(R) Xeon(R) Processor", 2), ("AMD EPYC", 3)):
        there = msgspec.structs.replace(here, processor=processor)
        monkeypatch.setattr(report, "machine", lambda there=there: there)
        save("speed", {"rate": rate})
    kept = {path.name: json.loads(path.read_text()) for path in report.RESULTS.iterdir()}
    assert {name: (one["machine"]["processor"], one["results"]["rate"]) for name, one in kept.items()} == {
        "speed.json": ("AMD EPYC", 3),
        "speed.intel-xeon-processor.json": ("Intel(R) Xeon(R) Processor", 2),
    }


def test_a_pass_that_ends_early_is_no_rate() -> None:
    lengths = iter([12, 3])

    def generate(asked: Prompts, tokens: int) -> int:
        return next(lengths)

    with pytest.raises(ValueError, match="3 tokens instead of 2 times 6"):
        timed(generate, [(1,), (2,)], 6, passes=2)


def test_of_some_passes_the_fastest_counts() -> None:
    row = timed(lambda asked, tokens: len(asked) * tokens, [(1,), (2,)], 6, passes=3)
    assert (row["sequences"], row["tokens"], len(row["passes"])) == (2, 12, 3)
    assert row["seconds"] == min(row["passes"])


PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "gateway.md"


def test_a_row_by_hand() -> None:
    answered = [Answered(tokens=11, first=0.02, rest=0.1), Answered(tokens=21, first=0.04, rest=0.4)]
    measured = row(2, [*answered, Answered(tokens=1, first=0.03, rest=0.0)], 2.0, 66.0)
    assert measured == {
        "streams": 2,
        "requests_per_second": 1.5,
        "tokens_per_second": 16.5,  # 33 tokens in two seconds
        "engine_alone": 66.0,
        "fraction": 0.25,
        "first_token_ms_p50": 30.0,
        "first_token_ms_p99": 39.8,  # 99 % of the way from the first to the last of 20, 30 and 40
        "per_token_ms_p50": 15.0,  # 10 and 20; an answer of one token has no time between tokens
        "per_token_ms_p99": 19.9,
    }


def test_the_page_has_the_committed_rows() -> None:
    result = json.loads((RESULTS / "serving.json").read_text())["results"]
    page = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in markdown(result["rows"]) if line not in page] == []
