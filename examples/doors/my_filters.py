"""A filter: of completions of a group with equal texts, only the first is trained on.

    [rollout]
    filter = { kind = "my_filters:repeated", shortest = 8 }

Several: ``filter = ["zero_variance", "my_filters:repeated"]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from stretto.core.records import Group

Shortest = Annotated[int, Field(ge=0, description="shorter texts are not compared")]


def repeated(group: Group, *, shortest: Shortest = 8) -> Mapping[str, str]:
    """Return the reason for each refused trajectory, by its id."""
    first: dict[str, str] = {}
    reasons = {}
    for trajectory in group.trajectories:
        same = first.setdefault(trajectory.text, trajectory.id)
        if same != trajectory.id and len(trajectory.text) >= shortest:
            reasons[trajectory.id] = f"has the text of {same}"
    return reasons
