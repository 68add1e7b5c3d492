"""What an engine computes to prove its weights: a text under a new version, its own tokens again under the one before.

Axes: L token of a text, N sampled token that is computed again, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stretto.core.canary import DECODED
from stretto.engine.native.completions import Completions
from stretto.engine.native.sampling import tempered
from stretto.model.decode.policy import DecodePolicy

_SPARE_TOKENS = 1024  # that the cache keeps room for
_LEAST = float(torch.finfo(torch.float32).min) / 2  # a token that a filter has taken has less
Ints = npt.NDArray[np.int64]


class Prover:
    """The policy of an engine once more, with a KV cache of its own: no completion is touched."""

    def __init__(self, policy: DecodePolicy) -> None:
        self._policy = DecodePolicy(policy.model, _SPARE_TOKENS * policy.layout.bytes_per_token)

    def text(self, token_ids: Sequence[int]) -> tuple[tuple[float, ...], int]:
        """The log-probabilities of all tokens but the first of a text of three and more, and how many of the last ones
        were computed one at a time over the cache."""
        text = np.asarray(token_ids, np.int64)
        decoded = min(DECODED, len(text) - 2)
        logits_LV = self._policy.forward_of_text(text[:-1], decoded)
        return tuple(_logprobs(logits_LV, text[1:]).tolist()), decoded

    def texts(self, texts: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """The log-probabilities of all tokens but the first of each text, under the model's own distribution."""
        found = list[tuple[float, ...]]()
        for text in texts:
            if len(text) < 2:
                found.append(())
                continue
            tokens = np.asarray(text, np.int64)
            logits_LV = self._policy.forward_of_texts([tokens[:-1]])
            found.append(tuple(_logprobs(logits_LV, tokens[1:]).tolist()))
        return found

    def sampled(
        self, completions: Completions, rows: Sequence[int], version: int, wanted: int, most: int
    ) -> tuple[tuple[float, float], ...]:
        """The log-probabilities of about `wanted` tokens of rows that the version has sampled, as they are told, and
        computed again, without the cache that they were sampled with; at most `most` tokens are fed for that. Rows with
        a grammar are left out."""
        chosen = _chosen(completions, rows, version, wanted, most)
        if not chosen:
            return ()
        texts = [completions.context(row) for row in chosen]
        starts = np.cumsum([0, *map(len, texts)])
        places = [completions.sampled_with(row, version) for row in chosen]
        tokens, told = (np.concatenate(column) for column in zip(*map(completions.told, chosen, places), strict=True))
        logits_LV = self._policy.forward_of_texts(texts)
        before = np.concatenate([start + place - 1 for start, place in zip(starts, places, strict=False)])
        logits_NV = logits_LV[torch.from_numpy(before).to(logits_LV.device)]
        rows_N = np.repeat(chosen, list(map(len, places)))
        settings = completions.sampling
        logits_NV = tempered(logits_NV, settings.temperatures[rows_N], settings.filtered(rows_N))
        again = _logprobs(logits_NV, tokens)
        # Where a filter's edge falls is a matter of rounding: what it takes this time has no log-probability.
        return tuple(pair for pair in zip(told.tolist(), again.tolist(), strict=True) if pair[1] > _LEAST)


def _chosen(completions: Completions, rows: Sequence[int], version: int, wanted: int, most: int) -> list[int]:
    """The shortest rows, until they have enough tokens."""
    chosen, found = list[int](), 0
    for row in sorted(rows, key=lambda row: completions.lengths[row]):
        most -= int(completions.lengths[row])
        if found >= wanted or most < 0:
            break
        if row not in completions.matchers and (count := len(completions.sampled_with(row, version))):
            chosen.append(row)
            found += count
    return chosen


def _logprobs(logits_NV: Tensor, tokens_N: Ints) -> Tensor:
    return logits_NV.log_softmax(-1).gather(1, torch.from_numpy(tokens_N[:, None]).to(logits_NV.device))[:, 0]
