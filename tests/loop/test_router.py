"""Least-loaded routing: the engine with the fewest completions in flight gets the next group, one that is down none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stretto.loop.engines.router import Router


def test_nobody_up_means_nobody_gets_it() -> None:
    router = Router([])
    assert router.start(8) is None
    router.join("engine-0")
    assert router.start(8) == "engine-0"
    router.leave("engine-0")
    assert router.start(8) is None
    assert router.up == frozenset()


def test_an_engine_that_comes_back_still_owes_what_it_had() -> None:
    router = Router(["engine-0", "engine-1"])
    assert router.start(8) == "engine-0"
    router.leave("engine-0")
    router.join("engine-0")
    assert router.start(4) == "engine-1"
    router.finish("engine-0", 8)
    assert router.start(8) == "engine-0"


@given(sizes=st.lists(st.integers(1, 16), min_size=1, max_size=50), engines=st.integers(1, 4))
def test_loads_never_differ_by_more_than_one_group(sizes: list[int], engines: int) -> None:
    router = Router([f"engine-{number}" for number in range(engines)])
    loads = dict.fromkeys(sorted(router.up), 0)
    for size in sizes:
        name = router.start(size)
        assert name is not None
        loads[name] += size
        assert max(loads.values()) - min(loads.values()) <= max(sizes)
