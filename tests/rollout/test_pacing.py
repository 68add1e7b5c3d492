"""Promises about admission policies: one that opens only where it may keeps equation 3; whatever one says, no more
groups are in flight than allowed; one that opens against equation 3 breaks it; what one raises names it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.core.admission import admits
from stretto.core.errors import RecipeError
from stretto.rollout.config import RolloutConfig
from stretto.rollout.controller import Controller
from stretto.rollout.pacing import Pacing, pacing_of
from stretto.rollout.prompts import PromptStream
from stretto_foresight.simulator.accounts import Accounts
from tests.rollout.test_controller import PROMPTS, answers

MOST = 5
CONFIG = RolloutConfig(batch_size=2, group_size=2, max_in_flight=MOST, max_staleness=1, beyond_bound="mask")
WISHES = st.lists(st.booleans(), min_size=1, max_size=60)


class Wishful:
    """Says what it is told to, over and over."""

    def __init__(self, wishes: list[bool], *, obeys: bool) -> None:
        self._wishes, self._asked, self._obeys = wishes, 0, obeys

    def opens(self, may_start: bool, in_flight: int) -> bool:
        self._asked += 1
        return self._wishes[self._asked % len(self._wishes)] and (may_start or not self._obeys)


def admissions(policy: Wishful) -> Iterator[tuple[Controller, bool]]:
    """A run in which every second group is finished late: the controller at each admission, and whether equation 3 let
    the group in."""
    control = Controller(CONFIG, PromptStream(PROMPTS, seed=3), Accounts(), seed=3, pacing=policy.opens)
    for turn in range(60):
        may = admits(control.counted, control.live, CONFIG.batch_size, control.max_staleness)
        if (ticket := control.admit()) is not None:
            yield control, may
        if turn % 2 and control.tickets:
            done = control.tickets[-1 if turn % 3 else 0]
            control.finish(done, answers(done, [1.0, 0.0]))
        if ticket is None and (batch := control.take()) is not None:
            control.publish(batch.step)
            control.load(batch.step)


@given(WISHES)
def test_a_policy_that_only_delays_keeps_equation_3(wishes: list[bool]) -> None:
    for control, may in admissions(Wishful(wishes, obeys=True)):
        assert may
        assert control.in_flight <= MOST


@given(WISHES)
def test_no_policy_has_more_groups_in_flight_than_allowed(wishes: list[bool]) -> None:
    assert all(control.in_flight <= MOST for control, _ in admissions(Wishful(wishes, obeys=False)))


def test_a_policy_can_break_equation_3() -> None:
    assert not all(may for _, may in admissions(Wishful([True], obeys=False)))


def test_auto_is_the_policy_of_the_engines() -> None:
    def opened(opens: Pacing) -> list[bool]:
        return [opens(may_start, in_flight) for may_start, in_flight in ((True, 0), (False, 1), (True, 1), (True, 0))]

    assert opened(pacing_of(CONFIG, in_rounds=False)) == [True, False, True, True]
    assert opened(pacing_of(CONFIG, in_rounds=True)) == [True, False, False, True]
    assert opened(pacing_of(RolloutConfig(pacing="rounds"), in_rounds=False)) == [True, False, False, True]


def test_what_a_policy_raises_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hasty.py").write_text(
        "class Hasty:\n    def opens(self, may_start, in_flight):\n        return 1 / 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    opens = pacing_of(RolloutConfig(pacing="hasty:Hasty"), in_rounds=False)
    with pytest.raises(RecipeError, match=r"rollout.pacing: 'hasty:Hasty' raised ZeroDivisionError.*hasty.py:3"):
        opens(True, 0)
