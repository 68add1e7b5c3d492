"""Files of the data that are not there come together, each with its key in the recipe and the nearest name there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stretto.core.errors import DataError
from stretto.launch.preflight.paths import check_data_files, data_files
from stretto.launch.recipe.recipe import validate


def refusal(task: dict[str, Any], **sections: Any) -> list[str]:
    tree = {"model": {"path": "/a"}, "task": task, "trainer": {}, **sections}
    with pytest.raises(DataError) as refused:
        check_data_files(data_files(validate(tree, "recipe.toml")))
    return str(refused.value).splitlines()


def test_the_files_of_a_task(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.touch()
    assert refusal({"kind": "jsonl", "file": f"{tmp_path}/row.jsonl", "held_out_file": f"{path}x"}) == [
        f"task.file: {tmp_path}/row.jsonl: no such file; did you mean 'rows.jsonl'?",
        f"task.held_out_file: {path}x: no such file; did you mean 'rows.jsonl'?",
    ]


def test_the_files_of_sources_and_of_further_evaluations_but_no_names_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    kept = {"data": f"{tmp_path}/rows.jsonl", "held_out": 1}
    sources = [kept, {"data": f"{tmp_path}/no.csv"}, {"data": "owner/name"}, {"kind": "reasoning_gym", "task": "acre"}]
    gone = tmp_path / "gone"
    sets = [{"name": "far", "source": {"data": f"{gone}/far.csv"}}]
    assert refusal({"kind": "dataset", "sources": sources}, evaluation={"sets": sets}) == [
        f"task.sources.1.data: {tmp_path}/no.csv: no such file; the folder {tmp_path} has rows.jsonl",
        f"evaluation.sets.0.source.data: {gone}/far.csv: no such file; there is no folder {gone}",
    ]
