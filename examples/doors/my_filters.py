"""A filter: of completions with one text, only the first of a group is trained on.

    [rollout]
    filter = { kind = "my_filters:repeated", shortest = 8 }

Several: ``filter = ["zero_variance", "my_filters:repeated"]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from stretto.core.records import Group

Shortest = Annotated[int, Field(ge=0, description="characters from which on texts are compared")]


def repeated(group: Group, *, shortest: Shortest = 8) -> Mapping[str, str]:
    """The reason for each trajectory that is refused, by its id."""
    first: dict[str, str] = {}
    reasons = {}
    for trajectory in group.trajectories:
        same = first.setdefault(trajectory.text, trajectory.id)
        if same != trajectory.id and len(trajectory.text) >= shortest:
            reasons[trajectory.id] = f"has the text of {same}"
    return reasons
