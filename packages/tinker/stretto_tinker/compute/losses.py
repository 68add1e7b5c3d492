"""Losses of the SDK, by the formulas in its documentation. Each is a sum over tokens.

Axes: N position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.core.errors import RefusedRequest, nearest

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]

_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_POLICY = {"target_tokens": True, "logprobs": True, "advantages": True}
_CLIPPED = {**_POLICY, "clip_low_threshold": False, "clip_high_threshold": False}


@dataclass(frozen=True)
class _Loss:
    """A loss.

    Attributes:
        takes: inputs of a datum that it reads, each with whether it is required.
        settings: default values of its settings.
        of: called with the log-probabilities of one sequence's targets, its other inputs and all settings; returns the
            sum over the sequence, a scalar.
        several: whether a position may have several targets.
    """

    takes: Mapping[str, bool]
    settings: Mapping[str, float]
    of: Callable[[Tensor, Inputs, Config], Tensor]
    several: bool = False

    def configured(self, name: str, given: Mapping[str, float | str]) -> dict[str, float]:
        """Return the request's settings `given`, with defaults added. `name`: the loss, for the error.

        Raises:
            RefusedRequest: a setting is unknown, or not a finite number.
        """
        for key, value in given.items():
            if key not in self.settings:
                known = nearest(key, self.settings) if self.settings else "none: the loss has no setting"
                raise RefusedRequest(f"loss_fn_config.{key}", f"no setting of {name}", known)
            if isinstance(value, str) or not np.isfinite(value):
                raise RefusedRequest(f"loss_fn_config.{key}", repr(value), "a finite number")
        return {**self.settings, **{key: float(value) for key, value in given.items()}}


def _cross_entropy(logprobs_N: Tensor, inputs: Inputs, config: Config) -> Tensor:
    weights_N = inputs.get("weights")
    return -(logprobs_N if weights_N is None else logprobs_N * weights_N).sum()


def _importance_sampling(logprobs_N: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -(torch.exp(logprobs_N - inputs["logprobs"]) * inputs["advantages"]).sum()


def _clipped(ratio_N: Tensor, inputs: Inputs, config: Config) -> Tensor:
    low, high = (inputs.get(name, ratio_N.new_tensor(config[name])) for name in _CLIPS)
    return torch.minimum(torch.maximum(ratio_N, low), high)


def _ppo_of(ratio_N: Tensor, inputs: Inputs, config: Config) -> Tensor:
    advantages_N = inputs["advantages"]
    return -torch.minimum(ratio_N * advantages_N, _clipped(ratio_N, inputs, config) * advantages_N).sum()


def _ppo(logprobs_N: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return _ppo_of(torch.exp(logprobs_N - inputs["logprobs"]), inputs, config)


def _cispo(logprobs_N: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio_N = torch.exp(logprobs_N.detach() - inputs["logprobs"])
    return -(_clipped(ratio_N, inputs, config) * logprobs_N * inputs["advantages"]).sum()


def _dro(logprobs_N: Tensor, inputs: Inputs, config: Config) -> Tensor:
    penalty_N = 0.5 * config["beta"] * (logprobs_N - inputs["logprobs"]) ** 2
    return -(logprobs_N * inputs["advantages"] - penalty_N).sum()


def _gspo(logprobs_N: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Summed loss of GSPO-token (arXiv 2507.18071, section 4.3): each token has its own gradient and the ratio of its
    sequence, the geometric mean over ``sequence_ratio_mask`` (1 if the mask is empty)."""
    inside_N = inputs["sequence_ratio_mask"] != 0
    gaps = (logprobs_N.detach() - inputs["logprobs"])[inside_N]
    mean = gaps.mean() if len(gaps) else logprobs_N.new_zeros(())
    return _ppo_of(torch.exp(mean + logprobs_N - logprobs_N.detach()), inputs, config)


LOSSES: dict[str, _Loss] = {
    "cross_entropy": _Loss({"target_tokens": True, "weights": False}, {}, _cross_entropy, several=True),
    "importance_sampling": _Loss(_POLICY, {}, _importance_sampling),
    "ppo": _Loss(_CLIPPED, _CLIPS, _ppo),
    "cispo": _Loss(_CLIPPED, _CLIPS, _cispo),
    "dro": _Loss(_POLICY, {"beta": 0.05}, _dro),
    "gspo": _Loss({**_CLIPPED, "sequence_ratio_mask": True}, _CLIPS, _gspo),
}
_NOT_SERVED = {
    "dpo": "it reads pairs; the cookbook's is a function, on the client's side (forward_backward_custom)",
    "stable_reinforce": "it reads what the sampler of its makers records; no formula of it is published",
    "custom": "custom losses run on the client's side (forward_backward_custom with a function)",
}


def loss_of(name: str) -> _Loss:
    """Find a loss by name.

    Raises:
        RefusedRequest: the loss is unknown or not served; says why.
    """
    if name in _NOT_SERVED:
        raise RefusedRequest("loss_fn", f"{name} is not served: {_NOT_SERVED[name]}", ", ".join(LOSSES))
    if name not in LOSSES:
        raise RefusedRequest("loss_fn", repr(name[:80]), nearest(name, LOSSES))
    return LOSSES[name]


def as_tensors(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Convert the inputs of a datum, except ``target_tokens``, to float32 tensors on a device."""
    return {
        name: torch.from_numpy(np.array(array, np.float32)).to(device)
        for name, array in inputs.items()
        if name != "target_tokens"
    }
