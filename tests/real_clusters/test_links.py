"""Whole runs whose only engine is behind a link that loses, delays, repeats and throttles packets, resets connections,
or is cut for a while: no law is broken, no completion fails, the balance adds up, and nothing is left over."""

import pytest

from benchmarks.links import TRIALS, crossed
from tests.cluster.link import available
from tests.launch.running import Laboratory

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not available(), reason="this machine, or this user, has no TUN devices"),
]


@pytest.mark.parametrize("name", TRIALS)
def test_a_run_over_this_link_keeps_every_promise(laboratory: Laboratory, name: str) -> None:
    found, conditions = crossed(laboratory, name), TRIALS[name].conditions
    assert found.story.problems == []
    assert (found.counts.lost > 0) >= (conditions.loss > 0)
    assert (found.counts.resets > 0) == (conditions.resets > 0)
    assert (found.joined > 1) >= (TRIALS[name].cut > TRIALS[name].lease)
