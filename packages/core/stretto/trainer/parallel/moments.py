"""AdamW's moments: on the parameters' device, or in host memory (`optimizer_states = "host"`).

    host memory, page-locked        GPU
    moments of some parameters ───► AdamW's step on them and their gradients
                               ◄─── moments

The results equal AdamW's, which treats each parameter separately. A step transfers 16 bytes for each weight of the
rank. It holds at most `_THROUGH` bytes of moments on the GPU at a time, or the moments of one larger parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import AdamW, adamw

from stretto.model.hf.filling import own
from stretto.trainer.parallel.ranks import Ranks

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names of AdamW's moments
_THROUGH = 1 << 28


def state_of(optimizer: AdamW, parameter: Tensor, ranks: Ranks, *, on_host: bool) -> dict[str, Tensor]:
    """AdamW's state of a parameter: its moments and "step". Created as zeros if the parameter has none. `on_host`: the
    moments are in host memory."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state |= {name: ranks.zeros_on_host(parameter) if on_host else torch.zeros_like(parameter) for name in MOMENTS}
    return state


@torch.no_grad()
def step_from_host(optimizer: AdamW, ranks: Ranks) -> None:
    """Take an AdamW step with moments in host memory, which are current in host memory when it returns."""
    for group in optimizer.param_groups:
        for some in _parts([parameter for parameter in group["params"] if parameter.grad is not None]):
            _step(group, some, [state_of(optimizer, parameter, ranks, on_host=True) for parameter in some])
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()  # the moments may be read now


def _step(group: dict[str, Any], parameters: Sequence[Tensor], states: Sequence[dict[str, Tensor]]) -> None:
    device = parameters[0].device
    held = {name: [own(state[name]) for state in states] for name in MOMENTS}
    moments = {name: [to_device(moment, device) for moment in each] for name, each in held.items()}
    (first, second), (beta1, beta2) = (moments[name] for name in MOMENTS), group["betas"]
    adamw(
        [own(parameter) for parameter in parameters],
        [own(parameter.grad) for parameter in parameters if parameter.grad is not None],
        first,
        second,
        max_exp_avg_sqs=[],
        state_steps=[state["step"] for state in states],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for name, each in held.items():
        for moment, new in zip(each, moments[name], strict=True):
            to_host(new, moment)


def _parts(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Divide the parameters, in order, into parts whose moments take at most `_THROUGH` bytes. A larger parameter is a
    part of its own."""
    part, size = list[Tensor](), 0
    for parameter in parameters:
        both = len(MOMENTS) * own(parameter).nbytes
        if part and size + both > _THROUGH:
            yield part
            part, size = [], 0
        part.append(parameter)
        size += both
    if part:
        yield part


def to_device(held: Tensor, device: torch.device) -> Tensor:
    """A copy of `held` on the device; `held` itself if it is on the device already."""
    return held.to(device, non_blocking=True)


def to_host(moment: Tensor, held: Tensor) -> None:
    """Copy `moment`, the result of `to_device`, back into `held`; do nothing if they are the same tensor."""
    if moment is not held:
        held.copy_(moment, non_blocking=True)
