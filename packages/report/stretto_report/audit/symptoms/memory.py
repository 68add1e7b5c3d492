"""Alarm about a role whose memory keeps growing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from stretto_report.audit.symptoms.evidence import Alarm, Evidence
from stretto_report.audit.symptoms.windows import WINDOW

_STEPS, _SHARE, _MIB = 16 * WINDOW, 0.1, 64.0


def memory_growing(found: Evidence) -> Iterator[Alarm]:
    """Alarm for each role whose memory has grown in each quarter of the newest steps, by a tenth and 64 MiB in all, and
    in the second half at least half as much as in the first. (Caches fill more and more slowly; a leak does not slow
    down.) The newest 160, 320, 640, … steps are tested."""
    for name in sorted(series for series in found.series if series.startswith("memory.")):
        values = found.series[name]
        known = np.flatnonzero(np.isfinite(values))[WINDOW:]
        span = _STEPS
        while span <= len(known):
            ends = len(known) - span + np.linspace(WINDOW, span, 5).astype(int)
            at = [float(values[known[end - WINDOW : end]].mean()) for end in ends]
            rises = all(before < after for before, after in pairwise(at))
            if rises and at[4] - at[0] >= max(_SHARE * at[0], _MIB) and at[4] - at[2] >= (at[2] - at[0]) / 2:
                first, last = int(found.steps[known[ends[0] - 1]]), int(found.steps[known[-1]])
                role, each = name.removeprefix("memory."), (at[4] - at[0]) / max(last - first, 1)
                message = f"it grew from {at[0]:,.0f} to {at[4]:,.0f} MiB by step {last}, {each:.2g} MiB a step"
                yield Alarm("memory_growing", f"memory of {role} growing", first, message, f"series:{name}")
                break
            span *= 2
