"""Rows of the results page about `stretto plan`."""

from __future__ import annotations

from typing import Any

from benchmarks.rows import Make, Row


def _predictions(results: dict[str, Any]) -> list[Row]:
    found = results["summary"]
    of = f"{found['settings']} settings, predicted before the first of them was run"

    def told(name: str, form: str) -> str:
        return f"{found[f'{name}_median']:{form}} in the median, {found[f'{name}_worst']:{form}} at worst"

    return [
        Row(f"seconds of a step, error of the prediction; {of}", told("step", ".0%"), "goal: 10%, 20% at worst"),
        Row("share of the time in which a role works, error of the worst role", told("busy", ".2f"), "goal: 0.1"),
        Row("mean staleness, error", told("staleness", ".2f"), "goal: 0.3"),
    ]


SECTION: dict[str, Make] = {"predictions": _predictions}
