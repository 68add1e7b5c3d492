"""Promises: the engines of a run take one tile, whichever measures first; the fastest of the table that can be run; and
each tile reads what the first one reads.
"""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from stretto_kernels import choices
from stretto_kernels.gpu import tables
from stretto_kernels.gpu.attention import TABLE, Tile, chosen, read_rows
from stretto_kernels.gpu.tables import cut, read_seconds, slots_of
from stretto_kernels.rule import Rule
from tests.tolerances import assert_close

pytest.importorskip("triton")


def slow(tile: Tile) -> float:
    raise AssertionError("it is on record")


def test_the_fastest_that_can_be_run_is_taken_by_all(tmp_path: Path) -> None:
    record, last = tmp_path / "tiles.json", TABLE[-1]

    def seconds(tile: Tile) -> float:
        if tile == TABLE[1]:
            raise RuntimeError("out of resource: shared memory")
        return 0.5 if tile == last else 1.0

    assert chosen("a card", seconds, record) == last
    assert chosen("a card", slow, record) == last
    assert chosen("another", lambda tile: 1.0 if tile == TABLE[0] else 0.99, record) == TABLE[0], "hardly faster"
    assert chosen("a card", slow, record) == last, "others stay"
    assert chosen("a card", slow, None) == TABLE[0]
    record.write_text("damaged")
    assert chosen("a card", lambda tile: float(tile != TABLE[0]), record) == TABLE[0]


def test_who_waits_long_for_the_first_engine_of_a_run_takes_its_tile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, measuring = tmp_path / "tiles.json", threading.Event()

    def seconds(tile: Tile) -> float:
        measuring.set()
        time.sleep(0.1)
        return float(tile != TABLE[-1])

    monkeypatch.setattr(choices, "_LOCK_SECONDS", 0.1)
    first = threading.Thread(target=chosen, args=("a card", seconds, record))
    first.start()
    measuring.wait(10)
    assert chosen("a card", slow, record) == TABLE[-1]
    first.join()


def test_a_file_that_cannot_be_written_leaves_the_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert chosen("a card", slow, tmp_path / "file" / "tiles.json") == TABLE[0]


def test_each_tile_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each size: the interpreter has neither warps nor stages."""
    monkeypatch.setattr(tables, "_TRIES", 1)
    cache, query = torch.randn(2, 2, 2, 40, 16), torch.randn(2, 4, 16)
    chunks = cut(np.zeros(2, np.int64), np.array([40, 9]), 6, 8)
    slots, items, bounds = map(torch.from_numpy, (slots_of(cache[0], cache[1], 2), chunks.items, chunks.bounds))
    expected = read_rows(query, slots, items, bounds, Rule(), 2)
    for tile in {tile.size: tile for tile in (*TABLE, Tile(1024))}.values():
        assert_close(read_rows(query, slots, items, bounds, Rule(), 2, tile), expected, 40, size=10.0)
    assert read_seconds(torch.empty(2, 16), 4, TABLE[0], rows=1, tokens=8) > 0
