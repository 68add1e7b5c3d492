"""Shaped rewards, from which advantages are computed; metrics and filters use the raw reward.

shaped = clip((reward + overlong(length) + bias) * scale, -clip, clip)
"""

from __future__ import annotations

import math

from pydantic import BaseModel, Field

from stretto.core.states import LARGEST_REWARD, bounded_reward


class Shaping(BaseModel, extra="forbid", frozen=True, ser_json_inf_nan="constants"):
    """`[algorithm.shaping]` of a recipe; the defaults leave rewards unchanged."""

    scale: float = Field(1.0, gt=0, le=LARGEST_REWARD, description="multiplies the reward")
    bias: float = Field(
        0.0, ge=-LARGEST_REWARD, le=LARGEST_REWARD, description="added to the reward before it is scaled"
    )
    clip: float = Field(math.inf, gt=0, description="largest shaped reward, in either direction")
    overlong_buffer: int = Field(0, ge=0, description="last tokens of sampling.max_tokens with a penalty; 0: none")
    overlong_penalty: float = Field(1.0, ge=0, le=LARGEST_REWARD, description="penalty of the longest completion")


def overlong(length: int, longest: int, buffer: int, penalty: float) -> float:
    """The penalty for the length of a completion: 0 up to `longest - buffer` tokens, then falling linearly to -penalty
    at `longest`.

    DAPO, arXiv 2503.14476, equation 13 (its L_max and L_cache are `longest` and `buffer`).

    >>> [overlong(length, longest=10, buffer=4, penalty=1.0) for length in (6, 7, 10)]
    [0.0, -0.25, -1.0]
    """
    over = min(length - (longest - buffer), buffer)
    return -penalty * over / buffer if over > 0 else 0.0


def shaped(reward: float, length: int, longest: int, shaping: Shaping) -> float:
    """The shaped reward of a completion of `length` tokens. `longest`: ``sampling.max_tokens``. Rewards beyond ±1e6,
    possible only in old run folders, are clipped first."""
    added = overlong(length, longest, shaping.overlong_buffer, shaping.overlong_penalty)
    return min(max((bounded_reward(reward) + added + shaping.bias) * shaping.scale, -shaping.clip), shaping.clip)
