"""Promises of the files of tokens: what was written is read, trajectory by trajectory; the oldest steps make room; a
file that is damaged or missing says so; half a file is never read, and goes at a resume.
"""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.errors import StoreError
from stretto.store.config import TokensConfig
from stretto.store.run_folder import RunFolder
from stretto.store.series.tokens import SampledTokens, TokenFiles, read_tokens, tokens_file
from tests.store.make import run_at

NUMBER = st.floats(width=32, allow_nan=True)
TOKEN = st.tuples(NUMBER, NUMBER, NUMBER, st.integers(0, 15))


def columns(rows: list[tuple[float, float, float, int]]) -> SampledTokens:
    trainer, ratio, advantage, outcome = zip(*rows, strict=True) if rows else ((), (), (), ())
    floats = [np.array(column, dtype=np.float32) for column in (trainer, ratio, advantage)]
    return SampledTokens(floats[0], floats[1], floats[2], np.array(outcome, dtype=np.uint8))


ONE = {"0.a.0/0": 2}, columns([(-0.5, 1.25, 1.0, 3), (-1.0, 1.0, 1.0, 1)])


@given(st.lists(st.lists(TOKEN, max_size=4), max_size=4))
def test_what_was_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[tuple[float, float, float, int]]]
) -> None:
    lengths = {f"0.a.0/{member}": len(one) for member, one in enumerate(rows)}
    folder = tmp_path_factory.mktemp("tokens")
    TokenFiles(folder, 1.0).write(7, lengths, columns([token for one in rows for token in one]))
    found = read_tokens(folder, 7, ["another/0", *lengths])
    assert list(found) == list(lengths)
    for ours, theirs in zip(found.values(), map(columns, rows), strict=True):
        for name in ("trainer_logprob", "ratio", "advantage", "outcome"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def test_the_oldest_steps_make_room(tmp_path: Path) -> None:
    TokenFiles(tmp_path, 1.0).write(1, *ONE)
    size = tokens_file(tmp_path, 1).stat().st_size
    files = TokenFiles(tmp_path, 2.5 * size / 2**30)  # of another process: a resumed run
    for step in (2, 3, 4, 3):
        files.write(step, *ONE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000003.safetensors", "step-000004.safetensors"]


def test_a_run_of_days_takes_no_memory_for_its_files(tmp_path: Path) -> None:
    for step in range(3_000):
        tokens_file(tmp_path, step).touch()
    tracemalloc.start()
    files = TokenFiles(tmp_path, 1.0)
    files.write(3_000, *ONE)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100 * 3_000, "a path has 500 bytes, and a trainer that is replaced held one for each step"


def test_a_damaged_or_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_tokens(tmp_path, 1, ["0.a.0/0"])
    TokenFiles(tmp_path, 1.0).write(1, *ONE)
    path = tokens_file(tmp_path, 1)
    whole = path.read_bytes()
    wrong_lengths = whole.replace(np.array([2], np.int64).tobytes(), np.array([9], np.int64).tobytes())
    for data in (whole[:-3], b"", b"\xff" * 100, wrong_lengths, whole.replace(b"0.a.0/0", b'0.a.0"0')):
        path.write_bytes(data)
        with pytest.raises(StoreError, match=r"step-000001\.safetensors: cannot be read"):
            read_tokens(tmp_path, 1, ["0.a.0/0"])


def test_half_a_file_goes_at_a_resume_and_a_whole_one_stays(tmp_path: Path) -> None:
    with run_at(tmp_path / "run") as (folder, _):
        TokenFiles(folder.tokens, 1.0).write(1, *ONE)
        (folder.tokens / ".step-000002.safetensors.99.part").write_bytes(b"half")
    with RunFolder.resume(tmp_path / "run") as folder:
        assert [path.name for path in folder.tokens.iterdir()] == ["step-000001.safetensors"]


def test_the_bytes_of_a_run_are_bounded() -> None:
    assert TokensConfig().most_bytes(1000) == 13_000
    assert TokensConfig(tokens=10).most_bytes(1000) == 1_300
    assert TokensConfig(tokens="none").most_bytes(1000) == 0
    assert TokensConfig(tokens_gib=0.5).most_bytes(10**12) == 2**29
