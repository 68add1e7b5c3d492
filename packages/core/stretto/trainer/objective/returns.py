"""Token-level returns: generalised advantage estimation, discounted rewards, REINFORCE++.

They are computed with arrays, because a batch has millions of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

#: `Column`: one number per token of a completion. `Whole`: indices of tokens.
Doubles = npt.NDArray[np.float64]
Column = Sequence[float] | npt.NDArray[Any]
Whole = Sequence[int] | npt.NDArray[Any]


def reinforce_pp(per_token: Sequence[Column], eps: float) -> Sequence[Column]:
    """REINFORCE++ (arXiv 2501.03262): the discounted returns of all loss tokens of the batch, normalised together; all
    0 if they are equal. `eps` is added to the deviation.

    `per_token`: for each completion, the return of each loss token (`terminal`). The result has the same nesting.
    Without a discount it equals `advantages.batch_normalised`.
    """
    values = np.concatenate([np.zeros(0), *per_token])
    ends = np.cumsum([len(completion) for completion in per_token])[:-1]
    if not len(values) or bool((values == values[0]).all()):
        found = np.zeros_like(values)
    else:
        centred = values - math.fsum(values.tolist()) / len(values)
        found = centred / (math.sqrt(math.fsum((centred * centred).tolist()) / len(values)) + eps)
    return np.split(found, ends) if len(per_token) else []


def gae(rewards: Column, values: Column, gamma: float, lam: float) -> Doubles:
    """Generalised advantage estimation (arXiv 1506.02438, equation 16) of one completion, token by token:

        A_t = delta_t + gamma lam A_(t+1),    delta_t = r_t + gamma V_(t+1) - V_t

    `rewards[t]` is the reward of token t, `values[t]` the value of the state before it. A truncated completion may have
    one more entry in `values`, for the state after its last token (arXiv 1712.00378, section 3); otherwise that value
    is 0.

    >>> gae([0.0, 0.0, 1.0], [0.5, 0.5, 0.5], gamma=1.0, lam=0.5).tolist()   # delta = 0, 0, 0.5
    [0.125, 0.25, 0.5]
    >>> gae([0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 2.0], gamma=1.0, lam=0.5).tolist()   # delta = 0, 0, 2.5
    [0.625, 1.25, 2.5]
    """
    tokens, every, decay = len(rewards), np.asarray(values, np.float64), gamma * lam
    before = every[:tokens]
    after = np.append(every[1:tokens], every[tokens:].sum())[:tokens]
    deltas = (np.asarray(rewards, np.float64) + gamma * after - before)[::-1]
    if decay == 1:
        return np.cumsum(deltas)[::-1]  # added in the same order as below
    return np.array(list(accumulate(deltas.tolist(), lambda later, delta: delta + decay * later)))[::-1]


def terminal(reward: float, tokens: int, places: Whole, decay: float) -> Doubles:
    """The discounted terminal reward at each token index t of `places`, in a completion of `tokens` tokens:
    decay^(tokens - 1 - t) reward.

    The result equals `gae` without a critic (all values 0) with gamma lam = decay.

    >>> terminal(8.0, tokens=3, places=range(3), decay=0.5).tolist()
    [2.0, 4.0, 8.0]
    """
    return reward * decay ** (tokens - 1 - np.asarray(places, np.float64))
