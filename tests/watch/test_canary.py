"""Promises: the pages have the distance of each engine from the trainer, as a series by step and as proofs by version,
and the largest of all engines; a run without proofs has no such series.
"""

from __future__ import annotations

import math
from pathlib import Path

import httpx
import msgspec
import pytest

from stretto_report.watch.index.cache import Cache
from stretto_report.watch.index.steps import Steps
from tests.watch.runs import step_line


def test_the_canary_is_a_series_of_each_engine_and_of_the_worst(client: httpx.Client, first: str) -> None:
    names = client.get(first).json()["series"]
    assert [name for name in names if "canary" in name] == ["canary", "canary.engine-0", "canary.engine-1"]
    found = client.get(f"{first}/series", params={"names": "canary,canary.engine-0"}).json()["series"]
    assert found["canary"]["mean"] == [0.05, 0.05]
    assert found["canary.engine-0"]["mean"] == [0.04, 0.04]


def test_health_has_the_proofs_of_the_engines_by_version(client: httpx.Client, first: str) -> None:
    proofs = client.get(f"{first}/health").json()["canary"]
    assert [(one["which"], one["engine"], one["version"], one["proven"]) for one in proofs] == [
        ("newest", "engine-0", 2, True),
        ("newest", "engine-1", 1, True),
        ("worst", "engine-1", 0, False),
    ]
    assert [(one["distance"], one["tolerance"]) for one in proofs] == [(4e-8, 1e-6), (5e-8, 1e-6), (0.25, 1e-6)]


def test_a_run_without_proofs_has_no_such_series(tmp_path: Path) -> None:
    line = msgspec.structs.replace(step_line(1), canary={})
    (tmp_path / "metrics.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
    steps = Steps(tmp_path / "metrics.jsonl", Cache(tmp_path / "cache"))
    steps.advance()
    assert "canary" not in steps.names
    with pytest.raises(KeyError):
        steps.column("canary")


def test_an_engine_that_joins_later_has_no_distance_before(tmp_path: Path) -> None:
    lines = [msgspec.structs.replace(step_line(step), canary=found) for step, found in enumerate(SHARES, 1)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    steps = Steps(tmp_path / "metrics.jsonl", Cache(tmp_path / "cache"))
    steps.advance()
    assert steps.column("canary").tolist() == pytest.approx([0.25, 0.5, 0.75])
    assert steps.column("canary.engine-1").tolist() == pytest.approx([math.nan, 0.5, 0.75], nan_ok=True)


SHARES = ({"engine-0": 0.25}, {"engine-0": 0.25, "engine-1": 0.5}, {"engine-1": 0.75})
