"""Promises of the planner's lengths:

- a named distribution has the mean that it is given, and the mean of what is cut off is known;
- a file of lengths, and a run, give what they hold; groups stay together where they are known;
- anything else is refused with what is allowed."""

import json
import random
from contextlib import closing
from itertools import islice
from pathlib import Path
from statistics import fmean

import pytest

from stretto.core.errors import DataError
from stretto.store.config import StoreConfig
from stretto.store.ledger.ledger import Ledger
from stretto.store.run_folder import RunFolder
from stretto_foresight.planner.lengths import MeasuredLengths, alone, check_lengths, lengths_of
from tests.store.make import Make


def drawn(words: str, groups: int = 4000, most: int = 1 << 20) -> list[int]:
    lengths, chance = lengths_of(words, 5, most), random.Random(1)
    return [length for group in islice(lengths.groups(chance, 4), groups) for length in group]


def test_a_distribution_has_the_mean_that_it_is_given() -> None:
    assert fmean(drawn("lognormal:mean=400,sigma=0.5")) == pytest.approx(400, rel=0.02)
    assert set(drawn("constant:tokens=7", groups=3)) == {7}


def test_the_mean_of_what_is_cut_off_is_known() -> None:
    known = lengths_of("lognormal:mean=400,sigma=1.0", 5, 500)
    assert known.mean == pytest.approx(fmean(drawn("lognormal:mean=400,sigma=1.0", most=500)), rel=0.02)
    assert lengths_of("constant:tokens=900", 5, 500).mean == 500


def test_the_mean_is_that_of_what_is_drawn_even_if_nearly_all_of_it_is_one_token() -> None:
    """Half of the mean of min(X, 1) would be 0.0 tokens, and a plan divides by what they cost."""
    words = "lognormal:mean=1,sigma=5"
    assert set(drawn(words, most=1)) == {1}
    assert lengths_of(words, 0, 1).mean == 1.0


@pytest.mark.parametrize("words", ["lognormal:mean=2,sigma=2", "lognormal:mean=100,sigma=5", "constant:tokens=12.4"])
def test_the_mean_is_that_of_lengths_that_are_rounded_up_to_one_token(words: str) -> None:
    """Of the first, half of X is below a quarter of a token."""
    known = lengths_of(words, 5, 512).mean
    assert known == pytest.approx(fmean(drawn(words, groups=40_000, most=512)), rel=0.04)


def test_lists_in_lists_are_no_lengths(tmp_path: Path) -> None:
    (tmp_path / "deep").write_text("[" * 100_000)
    with pytest.raises(DataError, match="holds something else than lengths"):
        lengths_of(str(tmp_path / "deep"), 5, 100)


def test_a_file_of_lengths_gives_its_lengths(tmp_path: Path) -> None:
    lines, array = tmp_path / "lengths.txt", tmp_path / "lengths.json"
    lines.write_text("3\n9\n")
    array.write_text(json.dumps([3, 9]))
    for path in (lines, array):
        assert set(drawn(str(path), groups=50)) == {3, 9}
        assert lengths_of(str(path), 5, 100).mean == 6.0


def test_groups_stay_together_where_they_are_known() -> None:
    lengths, chance = MeasuredLengths(((1, 2), (30, 40))), random.Random(1)
    assert set(islice(lengths.groups(chance, 2), 50)) == {(1, 2), (30, 40)}
    assert {max(group) < 3 for group in islice(lengths.groups(chance, 3), 50)} == {True, False}
    assert lengths.mean == 73 / 4


@pytest.mark.parametrize("lengths", [alone(range(1, 13), 5, 100), MeasuredLengths(((1, 2), (3, 4), (5, 6)))])
def test_what_was_seen_comes_once_before_any_of_it_comes_again(lengths: MeasuredLengths) -> None:
    groups = lengths.groups(random.Random(1), 2)
    for _ in range(3):
        whole = [length for group in islice(groups, sum(map(len, lengths.seen)) // 2) for length in group]
        assert sorted(whole) == sorted(length for group in lengths.seen for length in group)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("lognormal:mean=400", "lognormal has mean and sigma"),
        ("lognormal:mean=400,sigma=wide", "'sigma=wide' is no number"),
        ("lognormal:mean=0.2,sigma=1", "at least one token"),
        ("nowhere.txt", "cannot be read"),
        ("12 15 " * 60, "cannot be read: File name too long"),
        ("a\0b", "cannot be read: embedded null byte"),
        ("lognormal:mean=400,sigma=1e200", "sigma is the deviation of the logarithm, 5 at most"),
    ],
)
def test_what_says_no_lengths_is_refused(words: str, said: str) -> None:
    with pytest.raises(DataError, match=said) as refused:
        lengths_of(words, 5, 100)
    assert "lognormal:mean=M,sigma=S" in str(refused.value)


def test_numbers_in_place_of_a_file_are_refused_before_a_run_is_planned() -> None:
    with pytest.raises(DataError, match="no such file or folder"):
        check_lengths("12 15 " * 60)


@pytest.mark.parametrize(("keep", "expected"), [("all", (3, 1)), ("none", ())])
def test_a_run_gives_the_lengths_that_it_kept(tmp_path: Path, make: Make, keep: str, expected: tuple[int, ...]) -> None:
    """Cut off where completions of the plan are; a run that keeps no tokens has no lengths of 0."""
    run = tmp_path / "run"
    with RunFolder.create(run) as folder:
        group = make.group("0.1.0", make.trajectory("0.1.0", 0, (0,) * 7), make.trajectory("0.1.0", 1, (0,)))
        with closing(Ledger(folder.ledger, StoreConfig.model_validate({"keep_payloads": keep}))) as ledger:
            ledger.issue(group.id, make.prompt, 2, 0)
            ledger.buffer(group)
            ledger.commit_batch(make.batch(1, group))
            ledger.flush()
            ledger.forget(1)
    if not expected:
        with pytest.raises(DataError, match="the run has kept no tokens"):
            lengths_of(str(run), 5, 3)
    else:
        assert next(lengths_of(str(run), 5, 3).groups(random.Random(1), 2)) == expected


@pytest.fixture
def make() -> Make:
    return Make()


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    for text, said in (
        ("three", "something else than lengths"),
        ("[" * 100_000, "something else than lengths: maximum recursion depth exceeded"),
        ("[Infinity]", "Infinity is no whole number"),
        ("[7, 1.9]", "something else than lengths: 1.9 is no whole number"),
        ("[true]", "true is no whole number"),
        ('["7"]', '"7" is no whole number'),
        ("[[7]]", r"\[7\] is no whole number"),
        ("", "holds no lengths"),
        ("4 0", "the length 0"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=said):
            lengths_of(str(path), 5, 100)
