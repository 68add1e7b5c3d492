"""One table says which state may follow which: open ones lead on, final ones do not, and every trajectory can end."""

from stretto.core.records import State
from stretto.core.states import ALLOWED, FINAL, OPEN, UNTRAINED


def test_a_state_is_either_open_or_final_and_only_open_ones_lead_on() -> None:
    assert sorted((*OPEN, *FINAL)) == sorted(State)
    assert set(FINAL) == {State.TRAINED, State.FILTERED, State.EXPIRED, State.FAILED}
    assert set(FINAL) - UNTRAINED == {State.TRAINED}


def test_a_group_is_filtered_or_fails_when_it_is_judged_and_never_once_it_is_buffered() -> None:
    assert ALLOWED[State.IN_FLIGHT] == {State.BUFFERED, State.FILTERED, State.EXPIRED, State.FAILED}
    assert ALLOWED[State.BUFFERED] == {State.TRAINED, State.EXPIRED, State.FAILED}
