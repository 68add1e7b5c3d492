"""AdamW over a module's parameters (`Optimizer`) with its moments on their device or in host memory, Muon, a model
that returns log-probabilities (`Policy`), and optimizer and model combined (`Learner`). RL, supervised fine-tuning and
DPO train a `Learner`.

Moments in host memory visit the GPU for each step::

    host memory, page-locked        GPU
    moments of some parameters ───► AdamW's step on them and their gradients
                               ◄─── moments

The results equal those of moments on the GPU, since AdamW treats each parameter separately. A step transfers 16 bytes
for each weight of the rank. It holds at most `_THROUGH` bytes of moments on the GPU at a time, or the moments of one
larger parameter.

torch's Muon computes in bfloat16, which is emulated on processors without such instructions and then takes half of a
small model's step. Here all matrices of one shape are multiplied together, in their own dtype.

Axes: M matrix of one shape, R rows, C columns, R <= C.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from transformers import PreTrainedModel

from stretto.core.errors import TrainingDiverged
from stretto.core.records import Sampling
from stretto.model.attention_support import check_attention
from stretto.model.hf.layers import checkpoint_activations
from stretto.model.kernels import TRAINING, use_onednn
from stretto.model.packed.layer import fuse_layers
from stretto.model.packed.logprobs import PackedTokens, TokenLogprobs, check_policy, token_logprobs
from stretto.trainer.config import OptimizerConfig
from stretto.trainer.ranks import ALONE, Ranks, by_mesh, on_meta_device, own, zeros_on_host

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names of AdamW's moments
_THROUGH = 1 << 28


def _step(group: dict[str, Any], parameters: Sequence[Tensor], states: Sequence[dict[str, Tensor]]) -> None:
    """Take AdamW's step for `parameters` of one group. Moments in host memory are moved to the device for it, and back.
    `states`: AdamW's state of each."""
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
    """Divide the parameters, in order, into parts whose moments take at most 256 MiB. A larger parameter is a part of
    its own."""
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


_FIRST, _THIRD, _FIFTH = 3.4445, -4.7750, 2.0315  # coefficients of the polynomial that moves singular values to 1
_TIMES = 5  # iterations
_TINY = 1e-7
_MOMENTUM = 0.95


class Muon:
    """Muon over matrices, with Nesterov momentum and without weight decay."""

    def __init__(self, matrices: Iterable[Tensor], *, on_host: bool = False) -> None:
        """Start with momenta of zero. `matrices`: parameters [R, C], which no rank divides. `on_host`: keep the momenta
        in host memory."""
        zeros = zeros_on_host if on_host else torch.zeros_like
        self._matrices = [(matrix, zeros(matrix)) for matrix in matrices]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update every matrix that has a gradient by its orthogonalised Nesterov momentum, and set its gradient to
        None, so that an optimizer that runs afterwards skips the matrix."""
        of_shape: defaultdict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for matrix, held in self._matrices:
            if matrix.grad is not None:
                momentum = to_device(held, matrix.device).lerp_(matrix.grad, 1 - _MOMENTUM)
                to_host(momentum, held)
                rows, columns = matrix.shape
                of_shape[rows, columns].append((matrix, matrix.grad.lerp(momentum, _MOMENTUM)))
        for (rows, columns), found in of_shape.items():
            moves = torch.stack([move for _, move in found])
            steps = orthogonal(moves.mT).mT if rows > columns else orthogonal(moves)
            for (matrix, _), step in zip(found, steps, strict=True):
                matrix.grad = None
                matrix.add_(step, alpha=-learning_rate * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrices_MRC: Tensor) -> Tensor:
    """Orthogonalize matrices [M, R, C], R <= C, by Newton-Schulz iterations: the results have the same singular
    vectors, and singular values near 1."""
    found: Tensor = matrices_MRC / (matrices_MRC.norm(dim=(-2, -1), keepdim=True) + _TINY)
    for _ in range(_TIMES):
        square = found @ found.mT
        change = torch.baddbmm(square, square, square, beta=_THIRD, alpha=_FIFTH)
        found = torch.baddbmm(found, change, found, beta=_FIRST)
    return found


#: Sampling settings of the model's unchanged distribution; `max_tokens` has no effect on log-probabilities.
UNCHANGED = Sampling(max_tokens=1)


@dataclass(frozen=True)
class OptimizerStep:
    """Result of an optimizer step. `grad_norm`: the global gradient norm before clipping. `taken`: whether the norm was
    finite; otherwise the step was skipped."""

    grad_norm: float
    taken: bool


@dataclass(frozen=True)
class AdamNumbers:
    """Hyperparameters of one AdamW step except for the learning rate. `max_grad_norm` infinity: no clipping."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float  # of matrices; vectors have none
    max_grad_norm: float

    @classmethod
    def of(cls, config: OptimizerConfig) -> Self:
        """The hyperparameters of a recipe."""
        return cls((config.beta1, config.beta2), config.eps, config.weight_decay, config.max_grad_norm)


class Optimizer:
    """AdamW over the trainable parameters of `trained`, sharded over the ranks. Its subclasses are policies (`Learner`)
    and critics.

    A step with a non-finite gradient is skipped and counted; `max_bad_steps` in a row end the training.
    """

    def __init__(
        self,
        trained: nn.Module,
        model: PreTrainedModel,
        config: OptimizerConfig,
        ranks: Ranks = ALONE,
        exact: Iterable[nn.Module] = (),
    ) -> None:
        """Shard the parameters over the ranks. `trained`: the module to train, which contains `model`. `exact`: parts
        of it that compute in float32. Raises RecipeError if the ranks cannot divide the model, ModelFolderError if its
        folder lacks a weight (`Ranks.shard`)."""
        ranks.shard(trained, model, exact)
        self.trained = trained
        self.config = config
        self.ranks = ranks
        self.bad_steps_in_a_row = 0
        self.adamw = _adamw(trained, config)
        self._on_host = config.optimizer_states == "host"

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.trained.parameters()).device

    def state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """AdamW's state of a parameter, not copied: the moments "exp_avg" and "exp_avg_sq", and "step", the number of
        steps taken. Created as zeros if the parameter has none."""
        state: dict[str, Tensor] = self.adamw.state[parameter]
        if not state:
            zeros = self.ranks.zeros_on_host if self._on_host else torch.zeros_like
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {name: zeros(parameter) for name in MOMENTS}
        return state

    def step(
        self,
        learning_rate: float,
        training_step: int,
        numbers: AdamNumbers | None = None,
        before: Callable[[], None] | None = None,
    ) -> OptimizerStep:
        """Clip the accumulated gradient by its global norm, update the parameters, and clear the gradient. The step is
        skipped if the norm is not finite. The norm is over all ranks, so all take the step or none.

        Args:
            learning_rate: of this step.
            training_step: number of the training step, for the error.
            numbers: hyperparameters of this step; None: those of the recipe.
            before: called after clipping, before AdamW's step, which skips parameters whose gradient it clears
                (`Muon`).

        Raises:
            TrainingDiverged: as many steps in a row were skipped as `max_bad_steps`.
        """
        parameters = [parameter for group in self.adamw.param_groups for parameter in group["params"]]
        numbers = numbers or AdamNumbers.of(self.config)
        norm = clip(parameters, numbers.max_grad_norm)
        taken = math.isfinite(norm)
        if taken:
            for group in self.adamw.param_groups:
                decay = numbers.weight_decay if group["matrices"] else 0.0
                group |= {"lr": learning_rate, "betas": numbers.betas, "eps": numbers.eps, "weight_decay": decay}
            if before is not None:
                before()
            if self._on_host:
                self._step_from_host()
            else:
                self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self.bad_steps_in_a_row = 0 if taken else self.bad_steps_in_a_row + 1
        if self.bad_steps_in_a_row >= self.config.max_bad_steps:
            raise TrainingDiverged(training_step, self.bad_steps_in_a_row)
        return OptimizerStep(norm, taken)

    @torch.no_grad()
    def _step_from_host(self) -> None:
        """Take a step with moments in host memory, which are current in host memory when it returns."""
        for group in self.adamw.param_groups:
            for some in _parts([parameter for parameter in group["params"] if parameter.grad is not None]):
                _step(group, some, [self.state_of(parameter) for parameter in some])
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the moments may be read now


class Policy(nn.Module):
    """A model with its sampling settings. All computation is in `forward`, because FSDP gathers parameters there.

    The model stays in evaluation mode, because with dropout its distribution would differ from the engines'.
    """

    def __init__(
        self, model: PreTrainedModel, config: OptimizerConfig, sampling: Sampling, ranks: Ranks = ALONE
    ) -> None:
        """Check `model`, set it to evaluation mode, and give its layers faster kernels where there are some; the model
        is changed in place. A model on the meta device keeps its kernels, and is checked by `check`, once it is filled.

        Args:
            model: loaded with packed attention.
            config: its `dtype` is that of matmuls; with several ranks FSDP chooses it.
            sampling: settings of the distribution whose log-probabilities are computed.
            ranks: the processes that share the model.

        Raises:
            ModelFolderError: `check_policy` refuses the model.
            ValueError: the temperature is 0 or less.
        """
        if sampling.temperature <= 0:
            raise ValueError(f"log-probabilities need a temperature above 0, not {sampling.temperature}")
        super().__init__()
        model.eval()
        self._checked = not on_meta_device(model)
        if self._checked:
            check_policy(model)
            use_onednn(model, TRAINING)
            if ranks.count == 1:
                fuse_layers(model)
        self.model = model
        self._sampling, self._half = sampling, config.dtype != "float32" and ranks.count == 1
        self._context = ranks.context

    @torch.no_grad()
    def check(self) -> None:
        """Check a model that was on the meta device when the policy was made; otherwise do nothing. Raises
        ModelFolderError if `check_attention` or `check_policy` refuses it."""
        if not self._checked:
            self(None)

    def forward(
        self, packed: PackedTokens | None, *, entropy: bool = False, sampling: Sampling | None = None
    ) -> TokenLogprobs | None:
        """Log-probabilities [N] of the wanted tokens under the sampling distribution, and with `entropy` the entropies
        [N]. `sampling`: overrides the policy's settings, unless None. Matmuls run in `config.dtype`, logarithms in
        float32. If `packed` is None, the model is checked instead (`check`), because FSDP gathers its parameters here,
        and None is returned.
        """
        if packed is None:
            check_attention(self.model)
            check_policy(self.model)
            return None
        with torch.autocast(self.model.device.type, dtype=torch.bfloat16, enabled=self._half):
            own = packed.divided(self._context)
            logprobs, entropies = token_logprobs(self.model, own, sampling or self._sampling, entropy=entropy)
        # Copies: FSDP's backward hooks do not fire for a view of a module's output.
        return TokenLogprobs(logprobs.clone(), None if entropies is None else entropies.clone())


class Learner(Optimizer):
    """A policy with its optimizer: call `logprobs`, then backward, then `step`.

    Example::

        (-learner.logprobs(packed).logprobs.mean()).backward()
        learner.step(learning_rate=1e-4, training_step=0)
    """

    def __init__(
        self, model: PreTrainedModel, config: OptimizerConfig, sampling: Sampling = UNCHANGED, ranks: Ranks = ALONE
    ) -> None:
        """Shard `model` over the ranks, in place; it must be loaded with packed attention. Activation checkpointing is
        applied if the config asks for it.

        Raises:
            ModelFolderError: `check_policy` refuses the model, or the folder of a model on the meta device lacks a
                weight.
            RecipeError: the ranks cannot divide the model's matrices, or its heads.
            ValueError: the temperature is 0 or less.
        """
        self._policy = Policy(model, config, sampling, ranks)
        if config.activation_checkpointing:
            checkpoint_activations(model)
        super().__init__(self._policy, model, config, ranks)
        self._policy.check()
        self.model = model

    def logprobs(
        self, packed: PackedTokens, *, entropy: bool = False, sampling: Sampling | None = None
    ) -> TokenLogprobs:
        """Log-probabilities [N] of the wanted tokens, differentiable, under the sampling distribution; with `entropy`
        also the entropies [N]. `sampling`: overrides the learner's settings, unless None."""
        return self._policy(packed, entropy=entropy, sampling=sampling)  # type: ignore[no-any-return]


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of `step`, which counts from 0 to ``steps - 1``: linear warm-up to the peak, then constant or
    decaying to 0.

    >>> config = OptimizerConfig(learning_rate=1.0, warmup_steps=2, schedule="linear")
    >>> [learning_rate(config, step, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    match config.schedule:
        case "constant":
            return config.learning_rate
        case "linear":
            return config.learning_rate * (1 - done)
        case "cosine":
            return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def _adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Create an AdamW optimizer; norms and biases (vectors) have no weight decay."""
    groups = [
        {"params": [p for p in alike if (p.dim() >= 2) is matrices], "weight_decay": decay, "matrices": matrices}
        for alike in by_mesh([p for p in model.parameters() if p.requires_grad])
        for matrices, decay in ((True, config.weight_decay), (False, 0.0))
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.eps, fused=True)


@torch.no_grad()
def clip(parameters: Sequence[Tensor], most: float) -> float:
    """Clip the gradients of `parameters` in place to a global norm of at most `most`, over all parameters and ranks;
    returns the norm before clipping. If that is not finite, the gradients must not be used. All ranks must call it."""
    groups = by_mesh(parameters)
    if len(groups) == 1:
        norm = nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])
        found = float(_whole(norm))
        if not (found + 2e-6) * 1.001 < most:  # otherwise torch would multiply every gradient by 1
            nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return found
    gradients = [[one.grad for one in group if one.grad is not None] for group in groups]
    norms = [_whole(nn.utils.get_total_norm(group)) for group in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    factor = (most / (norm + 1e-6)).clamp(max=1.0)  # as torch does
    torch._foreach_mul_([own(gradient) for group in gradients for gradient in group], factor)
    return float(norm)


def _whole(norm: Tensor) -> Tensor:
    """The norm over all ranks, of a norm that may be divided among them."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
