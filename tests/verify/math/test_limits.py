"""The limit on a comparison's time.

Promises: it ends a comparison whatever a library on the way catches or drops, sends nothing behind it, hides no error
of others, and counts no collection of the process's garbage.
"""

import contextlib
import gc
import sys
import time

import pytest

from stretto_verify.math.limits import TooLong, limited_time


def test_the_limit_on_time_ends_what_catches_every_exception() -> None:
    """A library may catch Exception, and may be in a call that swallows what is raised in it."""

    def swallowing() -> None:
        end = time.monotonic() + 20.0
        while time.monotonic() < end:
            with contextlib.suppress(Exception):
                sum(range(1000))

    with pytest.raises(TooLong), limited_time(0.05):
        swallowing()
    with limited_time(0.05):
        pass
    assert sum(range(10**6)) == 499_999_500_000  # no signal comes behind it


def test_the_limit_on_time_that_ends_in_a_callback_of_the_interpreter_ends_the_comparison_next() -> None:
    """Python drops an exception there and reports it; the report would fail this test, and dirty a worker's log."""

    class Slow:
        def __del__(self) -> None:
            while True:
                pass

    def comparison() -> None:
        Slow()
        for _ in range(10**9):
            pass

    with pytest.raises(TooLong), limited_time(0.05):
        comparison()


def test_what_others_drop_in_a_callback_is_still_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __del__(self) -> None:
            raise ValueError("dropped")

    reported: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: reported.append(dropped.exc_value))
    hook = sys.unraisablehook
    with limited_time():
        Broken()
    assert [str(error) for error in reported] == ["dropped"]
    assert sys.unraisablehook is hook


def test_no_garbage_is_collected_meanwhile_and_again_afterwards() -> None:
    with limited_time():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(TooLong), limited_time():
        raise TooLong
    assert gc.isenabled()
