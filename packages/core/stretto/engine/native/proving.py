"""Computations by which an engine proves its weights: scores of a text, and of its own sampled tokens.

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

_SPARE_TOKENS = 1024  # room in the prover's cache
_LEAST = float(torch.finfo(torch.float32).min) / 2  # tokens removed by a filter have less
Ints = npt.NDArray[np.int64]


class Prover:
    """Scores text with the engine's policy over a KV cache of its own, so completions are not touched."""

    def __init__(self, policy: DecodePolicy) -> None:
        self._policy = DecodePolicy(policy.model, _SPARE_TOKENS * policy.layout.bytes_per_token)

    def text(self, token_ids: Sequence[int]) -> tuple[tuple[float, ...], int]:
        """Log-probabilities of all tokens but the first of a text of at least three tokens, and the number of last
        tokens that were decoded one at a time over the KV cache."""
        text = np.asarray(token_ids, np.int64)
        decoded = min(DECODED, len(text) - 2)
        logits_LV = self._policy.forward_of_text(text[:-1], decoded)
        return tuple(_logprobs(logits_LV, text[1:]).tolist()), decoded

    def texts(self, texts: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
        """Log-probabilities of all tokens but the first of each text, at temperature 1 without filters; empty for a
        text of one token."""
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
        """Recompute, without a KV cache, the log-probabilities of about `wanted` tokens that `version` sampled in
        `rows`. Returns (reported, recomputed) pairs. `most`: largest number of tokens fed to the model. Rows with a
        grammar are left out."""
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
        # Rounding may move a filter's edge; a token that it removes this time has no log-probability.
        return tuple(pair for pair in zip(told.tolist(), again.tolist(), strict=True) if pair[1] > _LEAST)


def _chosen(completions: Completions, rows: Sequence[int], version: int, wanted: int, most: int) -> list[int]:
    """The shortest rows that together have `wanted` tokens sampled by `version`; fewer if their texts would exceed
    `most` tokens. Rows with a grammar are left out."""
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
