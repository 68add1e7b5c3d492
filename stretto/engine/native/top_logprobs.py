"""The likeliest tokens at a place of an answer, for requests that ask for them; others cost nothing.

Axes: R row, K tokens from the likeliest on, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto.core.records import Likeliest
from stretto.engine.native.sampling import Filtered, tempered


def likeliest(
    logits_RV: Tensor, counts: npt.NDArray[np.int64], temperatures: npt.NDArray[np.float32], filtered: Filtered | None
) -> list[Likeliest]:
    """The likeliest tokens of the distributions that `sampling.sample` draws from, given the same logits and settings.

    Args:
        logits_RV: float32.
        counts: [R], tokens wanted for each row.
        temperatures, filtered: as for `sample`.

    Returns:
        For each row, tokens with their log-probabilities, the likeliest first. There are fewer than wanted where the
        filters, or the vocabulary, leave fewer.
    """
    kept_RV = tempered(logits_RV, temperatures, filtered)
    logprobs_RK, tokens_RK = kept_RV.log_softmax(-1).topk(min(int(counts.max()), logits_RV.shape[1]))
    left_R = (kept_RV.gather(1, tokens_RK) > torch.finfo(kept_RV.dtype).min).sum(-1)  # the number for what filters take
    ends_R = np.minimum(counts, left_R.cpu().numpy())
    return [
        tuple(zip(tokens[:end], logprobs[:end], strict=True))
        for tokens, logprobs, end in zip(tokens_RK.tolist(), logprobs_RK.tolist(), ends_R.tolist(), strict=True)
    ]
