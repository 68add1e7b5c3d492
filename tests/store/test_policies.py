"""Weights are the same where every byte of every file is; what cannot be compared is not called the same."""

from pathlib import Path

import pytest

from stretto_report.reading.policies import same_weights, why_incomparable

ONE = {"model.safetensors": b"weights"}
TWO = {"model-00001-of-00002.safetensors": b"wei", "model-00002-of-00002.safetensors": b"ghts"}


def policy(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir()
    for name, data in {**files, "config.json": folder.name.encode()}.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("files", [ONE, TWO], ids=["whole", "divided"])
def test_the_same_bytes_are_the_same_weights(tmp_path: Path, files: dict[str, bytes]) -> None:
    first, second = policy(tmp_path / "a", files), policy(tmp_path / "b", files)
    assert same_weights(first, second) is True
    last = second / max(files)
    last.write_bytes(last.read_bytes()[:-1] + b"z")  # as long, and not the same
    assert same_weights(first, second) is False


@pytest.mark.parametrize("files", [TWO, {}, None], ids=["divided otherwise", "no weights", "no policy"])
def test_what_cannot_be_compared_is_neither(tmp_path: Path, files: dict[str, bytes] | None) -> None:
    first = policy(tmp_path / "a", ONE)
    second = policy(tmp_path / "b", files) if files is not None else tmp_path / "b"
    assert same_weights(first, second) is None
    assert same_weights(second, first) is None


def test_why_two_policies_cannot_be_compared_is_said(tmp_path: Path) -> None:
    whole, divided, empty = (policy(tmp_path / name, files) for name, files in (("a", ONE), ("b", TWO), ("c", {})))
    absent = tmp_path / "d"
    assert why_incomparable(whole, absent) == f"{absent} is not there"
    assert why_incomparable(whole, empty) == f"{empty} has no weights"
    assert why_incomparable(whole, divided) == f"{whole} and {divided} are divided into files in different ways"
