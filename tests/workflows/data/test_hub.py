"""A dataset of the hub is asked for by its name: subset, split and revision are chosen there, streaming reads its first
rows alone, what is in the cache needs no network, and a name that is wrong is one message, without a network at once.
The hub is one of this machine, over HTTP."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from datasets import Dataset

from tests.workflows.data.hub import COMMIT, hub

CARD = """---
configs:
- {config_name: main, data_files: [{split: train, path: main/train.parquet}, {split: test, path: main/test.parquet}]}
- {config_name: socratic, data_files: [{split: train, path: socratic/train.parquet}]}
---
"""
SUMS = {"data": "openai/gsm8k", "mapping": "gsm8k", "subset": "main", "held_out": 1}
#: Each line is read by a copy of a process that has imported the libraries, and has read nothing.
READ = """
import json, os, sys
import datasets
from stretto.core.errors import DataError
from stretto.rollout.tasks import DatasetTask
def read(source):
    try:
        found = DatasetTask.model_validate({"kind": "dataset", "sources": [source]}).questions(seed=1)
        return [[one.text, one.answer, one.place] for one in (*found.training, *found.held_out)]
    except DataError as error:
        return str(error)
while line := sys.stdin.readline():
    if (pid := os.fork()) == 0:
        print("told", json.dumps([read(source) for source in json.loads(line)]), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
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


@contextmanager
def reader(home: Path, address: str) -> Iterator[Callable[[Sequence[dict[str, Any]]], list[Any]]]:
    """Reads sources. Where the hub is, the libraries learn when they are imported: so in a process of its own."""
    surroundings = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address}
    said = home.with_suffix(".err")
    with (
        said.open("w") as err,
        subprocess.Popen(
            [sys.executable, "-c", READ], env=surroundings, stdin=PIPE, stdout=PIPE, stderr=err, text=True
        ) as process,
    ):

        def read(sources: Sequence[dict[str, Any]]) -> list[Any]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(sources) + "\n")
            process.stdin.flush()
            lines = iter(process.stdout.readline, "")
            told = next((line for line in lines if line.startswith("told ")), "")
            assert told, said.read_text()[-3000:]
            found: list[Any] = json.loads(told.removeprefix("told "))
            return found

        try:
            yield read
        finally:
            process.kill()
    assert "Retry" not in said.read_text()


def rows(name: str, count: int) -> list[list[str]]:
    return [[f"{name}: {n}+{n}?", str(2 * n), f"openai/gsm8k: row {n + 1}"] for n in range(count)]


def test_a_dataset_is_found_by_its_name_and_afterwards_in_the_cache(gsm8k: Path, tmp_path: Path) -> None:
    asked = [
        *[SUMS, {**SUMS, "subset": "socratic", "revision": COMMIT}, {**SUMS, "split": "test"}],
        *[{**SUMS, "streaming": True, "rows": 2}, {**SUMS, "split": "tset"}, {**SUMS, "subset": "mian"}],
        {**SUMS, "data": "openai/gsm9k"},
    ]
    with ExitStack() as serving, ExitStack() as reading:
        address = serving.enter_context(hub(gsm8k))
        read = reading.enter_context(reader(tmp_path / "cache", address))
        found = read(asked)
        serving.close()
        kept, told = read([SUMS, {**SUMS, "data": "openai/gsm9k"}])
    assert found[:4] == [rows("main/train", 3), rows("socratic/train", 3), rows("main/test", 2), rows("main/train", 2)]
    for text, words in zip(found[4:], (["tset", "train", "test"], ["mian", "main"], ["gsm9k"]), strict=True):
        assert text.startswith(("openai/gsm8k: cannot be read: ", "openai/gsm9k: cannot be read: "))
        assert [word for word in words if word not in text] == []
    assert kept == rows("main/train", 3)
    assert told.startswith(f"openai/gsm9k: the hub at {address} cannot be reached (Connection refused), and")
    assert told.endswith(
        'a file of this machine: data = "rows.jsonl", allowed: .jsonl, .json, .csv, .tsv, .parquet, .arrow'
    )
