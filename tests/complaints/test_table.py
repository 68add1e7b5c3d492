"""Promises: docs/explanation/complaints.md has all twenty complaints with their threads, shows each by links to tests
or campaigns that exist, and is linked from the README and the site's first page; its tables of memory and disk are
the committed results, by which no role grows and no folder is above its ceiling."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.growth import disk_table, memory_table
from tests.test_docs import names_in

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "complaints.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"
ROLES = {"conductor", "engine-0", "rewards", "trainer", "workflow", "fork server", "weights server", "outlet"}
ARENAS = 2.0  # MiB: two of those from which Python takes its small objects, which is 3 % of the smallest roles
MOST_PER_1000_STEPS = 2.0  # MiB, of a line of least squares
ROWS = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", PAGE, flags=re.MULTILINE)
#: How many threads each complaint was seen in, at least, and one that says it best.
THREADS = {
    1: (8, "SkyRL#1173"), 2: (10, "Math-Verify#65"), 3: (6, "NeMo-RL#3589"), 4: (5, "verl#7495"),
    5: (6, "OpenRLHF#1322"), 6: (4, "AReaL#1290"), 7: (7, "verl#6719"), 8: (5, "Megatron-LM#4168"),
    9: (5, "SkyRL#1852"), 10: (3, "slime#2176"), 11: (3, "prime-rl#3599"), 12: (2, "tinker-cookbook#943"),
    13: (7, "simpleRL-reason#80"), 14: (5, "verl#3318"), 15: (3, "rllm#59"), 16: (2, "wandb#4482"),
    17: (5, "AReaL#1388"), 18: (4, "EasyR1#6"), 19: (3, "vime#20"), 20: (4, "verl#7910"),
}  # fmt: skip


def test_all_twenty_are_there_with_their_threads() -> None:
    assert [int(number) for number, *_ in ROWS] == sorted(THREADS)
    for number, suffered, does, _ in ROWS:
        threads, one = THREADS[int(number)]
        found = re.findall(r"\b[\w-]+#\d+", suffered)
        assert len(found) == threads, suffered
        assert one in found
        assert does.strip()


@pytest.mark.parametrize(("number", "shown"), [(number, shown) for number, *_, shown in ROWS])
def test_each_is_shown_by_links_to_what_exists(number: str, shown: str) -> None:
    links = re.findall(r"\[`([\w./-]+)`\]\(\.\./\.\./([\w./-]+)\)", shown)
    assert re.sub(r"\[`[\w./-]+`\]\(\.\./\.\./[\w./-]+\)(, )?", "", shown).strip() == "", "every place is a link"
    assert any(file.startswith("tests/") for _, file in links), f"{number} has no test"
    missing = [
        (name, file)
        for name, file in links
        if not (ROOT / file).is_file() or (file.endswith(".py") and name not in names_in(ROOT / file))
    ]
    assert missing == []


def test_the_page_is_linked_from_the_first_ones() -> None:
    assert "](docs/explanation/complaints.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](explanation/complaints.md)" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    return found


def test_the_tables_are_the_committed_results() -> None:
    assert memory_table(results("growth-memory")) in PAGE
    assert disk_table(results("growth-checkpoints")) in PAGE


def test_no_role_grows_over_the_run_of_2000_steps() -> None:
    found = results("growth-memory")
    assert found["setting"]["steps"] >= 2000
    assert (found["alarms"], found["laws_kept"]) == ([], True)
    assert set(found["roles"]) == ROLES
    for role, one in found["roles"].items():
        assert one["per_1000_steps"] <= MOST_PER_1000_STEPS, role
        assert one["end"] <= 1.02 * one["begin"] + ARENAS, role


def test_no_folder_is_ever_above_its_ceiling() -> None:
    for folder, one in results("growth-checkpoints")["folders"].items():
        assert 0 < one["most"] <= one["ceiling"], folder
        assert one["looks"] > 100
