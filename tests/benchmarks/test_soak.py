"""Promise: the soak hits every role, and judges what it weighed.

- Each kind of fault comes in turn, and each role is stopped once in four rounds.
- A process counts once, at the age that is compared, and by the role that it plays.
- A role whose later processes have more memory or descriptors than its first ones, by more than 2 %, is not flat.
- The newest step is that at the end of a file that is longer than what is read of it."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks.soak import KILLS, LAST, STOPS, Life, Scales, flatness, in_turn, main, newest_step


def lives(role: str, late: float, descriptors: float = 20) -> list[Life]:
    """Nine processes in ninety minutes; the last three have `late` MiB."""
    return [Life(role, 1 + 10 * n, late if n > 5 else 100.0, 10.0, descriptors if n > 5 else 20) for n in range(9)]


def test_every_fault_comes_in_turn() -> None:
    found = [in_turn(number) for number in range(7 * 4)]
    assert found[:7] == [*KILLS, STOPS[0], LAST]
    assert [found.count(fault) for fault in (*KILLS, *STOPS, LAST)] == [4] * 5 + [1] * 4 + [4]


@pytest.mark.parametrize(("late", "descriptors", "flat"), [(101.9, 20, True), (102.1, 20, False), (100.0, 21, False)])
def test_a_role_is_flat_within_two_percent(late: float, descriptors: float, flat: bool) -> None:
    assert all(one.flat for one in flatness(lives("engine", late, descriptors))) is flat


def test_a_role_with_few_processes_is_not_judged() -> None:
    assert flatness([*lives("engine", 100.0), Life("trainer", 90, 1.0, 1.0, 1)])[-1].role == "engine"


@pytest.mark.parametrize("minutes", ["0", "15", "-10", "ten"])
def test_minutes_that_no_part_ends_at_are_refused(
    minutes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["soak", "--show", f"--checked-after={minutes}"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"'{minutes}' is no multiple of ten minutes: give 10, 20, 30, …" in capsys.readouterr().err


def test_a_process_counts_once_by_its_role_and_at_the_age_that_is_compared() -> None:
    scales, roles = Scales(), {os.getpid(): "engine", os.getppid(): "fork server"}
    for minute, step in enumerate((5, 24, 25, 104, 104, 105), start=1):  # the 20th to the 99th step of their lives
        scales.look(roles, step, minute)
    assert scales.take() == []
    scales.look({}, 106, 7)
    engine, server = scales.take()
    assert (engine.role, engine.minute, server.role) == ("engine, forked", 4, "fork server")
    assert engine.resident_mib >= engine.private_mib > 1
    assert engine.descriptors > 2


def test_a_process_that_is_gone_before_that_age_does_not_count() -> None:
    scales = Scales()
    for step in (0, 10, 20):
        scales.look({os.getpid(): "engine"}, step, 1)
    scales.look({}, 30, 2)
    assert scales.take() == []


def test_the_newest_step_is_read_from_the_end_of_a_long_file(tmp_path: Path) -> None:
    assert newest_step(tmp_path) == 0
    filler = "x" * 1000
    lines = [f'{{"kind":"step","step":{n},"filler":"{filler}"}}\n' for n in range(1, 401)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(lines[:3]) + '{"kind":"step","st')
    assert newest_step(tmp_path) == 3
    file.write_text("".join(lines) + '{"kind":"evaluation","step":400}\n')
    assert newest_step(tmp_path) == 400
