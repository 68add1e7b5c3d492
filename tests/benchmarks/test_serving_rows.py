"""Promises of `benchmarks.serving`: rates are of the wall clock, times of what clients saw; the table of
docs/how_to/gateway.md is the committed result."""

import json
from pathlib import Path

from benchmarks.report import RESULTS
from benchmarks.serving import Answered, markdown, row

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
