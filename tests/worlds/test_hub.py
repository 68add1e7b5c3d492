"""A dataset of the hub is asked for by its name: subset, split and revision are chosen there, streaming reads its first
rows alone, what is in the cache needs no network, and a name that is wrong is one message, without a network at once.
The hub is one of this machine, over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tests.worlds.hub import COMMIT, hub

CARD = """---
configs:
- {config_name: main, data_files: [{split: train, path: main/train.parquet}, {split: test, path: main/test.parquet}]}
- {config_name: socratic, data_files: [{split: train, path: socratic/train.parquet}]}
---
"""
SUMS = {"data": "openai/gsm8k", "mapping": "gsm8k", "subset": "main", "held_out": 1}
READ = """
import json, sys
from stretto.core.errors import DataError
from stretto.worlds.sources.task import DatasetTask
told = []
for source in json.loads(sys.argv[1]):
    try:
        found = DatasetTask.model_validate({"kind": "dataset", "sources": [source]}).questions(seed=1)
        told.append([[one.text, one.answer, one.place] for one in (*found.training, *found.held_out)])
    except DataError as error:
        told.append(str(error))
print(json.dumps(told))
"""


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    """A hub with rows of the shape of GSM8K, three to train on in each subset and two to test."""
    folder = tmp_path / "hub" / "openai" / "gsm8k"
    for name, rows in (("main/train", 3), ("main/test", 2), ("socratic/train", 3)):
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        worked = [{"question": f"{name}: {n}+{n}?", "answer": f"so\n#### {2 * n}"} for n in range(rows)]
        Dataset.from_list(worked).to_parquet(path)
    (folder / "README.md").write_text(CARD)
    return tmp_path / "hub"


def read(sources: Sequence[dict[str, Any]], home: Path, **settings: str) -> list[Any]:
    """Where and how the hub is, the libraries learn when they are imported: so in a process of its own."""
    surroundings = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", **settings}
    command = [sys.executable, "-c", READ, json.dumps(sources)]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Retry" not in done.stderr
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows(name: str, count: int) -> list[list[str]]:
    return [[f"{name}: {n}+{n}?", str(2 * n), f"openai/gsm8k: row {n + 1}"] for n in range(count)]


def test_a_dataset_is_found_by_its_name_and_afterwards_in_the_cache(gsm8k: Path, tmp_path: Path) -> None:
    asked = [
        SUMS,
        {**SUMS, "subset": "socratic", "revision": COMMIT},
        {**SUMS, "split": "test"},
        {**SUMS, "streaming": True, "rows": 2},
        {**SUMS, "split": "tset"},
        {**SUMS, "subset": "mian"},
        {**SUMS, "data": "openai/gsm9k"},
    ]
    with hub(gsm8k) as address:
        found = read(asked, tmp_path / "cache", HF_ENDPOINT=address)
    assert found[:4] == [rows("main/train", 3), rows("socratic/train", 3), rows("main/test", 2), rows("main/train", 2)]
    for told, words in zip(found[4:], (["tset", "train", "test"], ["mian", "main"], ["gsm9k"]), strict=True):
        assert told.startswith(("openai/gsm8k: cannot be read: ", "openai/gsm9k: cannot be read: "))
        assert [word for word in words if word not in told] == []
    kept, told = read([SUMS, {**SUMS, "data": "openai/gsm9k"}], tmp_path / "cache", HF_ENDPOINT=address)
    assert kept == rows("main/train", 3)
    assert told.startswith(f"openai/gsm9k: the hub at {address} cannot be reached (Connection refused), and")
    assert told.endswith(
        'a file of this machine: data = "rows.jsonl", allowed: .jsonl, .json, .csv, .tsv, .parquet, .arrow'
    )
