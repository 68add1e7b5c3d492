"""Promises: spans are handed out once; those that nobody asks for do not pile up, and the newest are kept."""

from __future__ import annotations

from stretto.engine.busy_spans import MOST_SPANS, BusySpans


def test_of_spans_that_nobody_asks_for_the_newest_are_kept() -> None:
    stretches = BusySpans("engine-0")
    for version in range(MOST_SPANS + 50):
        stretches.add("generate", float(version), version + 0.5, version)
    kept = [span.version for span in stretches.drain()]
    assert kept == list(range(50, MOST_SPANS + 50))
    assert stretches.drain() == []
