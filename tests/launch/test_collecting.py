"""Promise: while a run goes on garbage is collected seldom, and still is; afterwards as before, but for what was frozen
before, which stays so."""

import gc
import weakref

from stretto.launch.train import collected_seldom


class Cycle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.own = self


def test_a_cycle_is_collected_when_a_million_containers_have_come() -> None:
    before = gc.get_threshold()
    with collected_seldom():
        gone = weakref.ref(Cycle())
        few = [[0] for _ in range(10_000)]
        assert gone() is not None
        many = [[0] for _ in range(1_000_000)]
        assert gone() is None
    assert gc.get_threshold() == before
    assert len(few) + len(many) == 1_010_000


def test_what_was_frozen_before_stays_so_and_nothing_else() -> None:
    """What the tests had when they were collected is (tests/conftest.py)."""
    assert gc.get_freeze_count() > 0
    with collected_seldom():
        pass
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        with collected_seldom():
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()
