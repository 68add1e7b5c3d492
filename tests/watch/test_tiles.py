"""Promises about the tiles of a timeline: what is as wide as a pixel stands alone, and what is narrower stands with all
of its name that begin in its pixel, whatever is between them; no span is left out or counted twice."""

import math
import tempfile
from collections import defaultdict
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.core.events import Span
from stretto.store.series.lines import SpanLog
from stretto_report.watch.index.columns import Cache
from stretto_report.watch.index.timeline import Spans, lanes

EIGHTH = st.integers(0, 80).map(lambda eighths: eighths / 8)
SPANS = st.builds(
    lambda role, name, start, length: Span(role=role, name=name, start=start, end=start + length, version=0),
    role=st.sampled_from(["trainer", "engine-0", "engine-1"]),
    name=st.sampled_from(["generate", "load", "update"]),
    start=EIGHTH,
    length=st.sampled_from([0.0, 0.125, 0.25, 3.0]),
)
Tile = tuple[float, float, int, float, str]


def merged(spans: list[Span], first: float, last: float, pixels: int) -> dict[str, list[Tile]]:
    """The tiles by role, span by span."""
    begin = min(span.start for span in spans)
    pixel = max(last - first, 1e-9) / pixels
    found = defaultdict[tuple[str, object, str], list[Span]](list)
    for number, span in enumerate(spans):
        if span.start < begin + last and span.end > begin + first:
            at: object = math.floor((span.start - begin - first) / pixel)
            alone = span.end - span.start >= pixel
            found[span.role, ("alone", number) if alone else at, span.name].append(span)
    tiles = defaultdict[str, list[Tile]](list)
    for (role, _, name), of in found.items():
        start, end = min(span.start for span in of) - begin, max(span.end for span in of) - begin
        tiles[role].append((start, end, len(of), sum(span.end - span.start for span in of), name))
    return tiles


@given(st.lists(SPANS, min_size=1, max_size=12), st.integers(10, 40), st.sampled_from([0.0, 0.25]))
@settings(max_examples=60, deadline=None)
def test_tiles_are_the_spans_merged_by_pixel_and_name(spans: list[Span], pixels: int, share: float) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "spans.jsonl")
        SpanLog(path).append(spans)
        held = Spans(path, Cache(Path(scratch, "cache.sqlite")))
        held.advance()
        first, last = share * held.end, (1 - share) * held.end
        found, count = lanes(held, {}, first, last, pixels)
    expected = merged(spans, first, last, pixels)
    assert count == sum(number for tiles in expected.values() for _, _, number, _, _ in tiles)
    for lane in found:
        tiles = lane.tiles
        shown = list(zip(tiles.start, tiles.end, tiles.count, tiles.busy, tiles.name, strict=True))
        assert sorted(shown) == sorted(expected[lane.role])
        assert tiles.start == sorted(tiles.start)
