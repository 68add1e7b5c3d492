"""Training of a client's model.

Axes: N position, K target of a position.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from stretto.core.errors import RefusedRequest
from stretto.core.records import Sampling
from stretto.model.packed.logprobs import pack_tokens, token_logprobs
from stretto.trainer.batch.minibatch import micro_batches
from stretto.trainer.gradients import whole_gradient
from stretto.weights.shared_memory import digest_of_tensor
from stretto_tinker.compute.files import read_gradient, read_optimizer, write_gradient, write_optimizer
from stretto_tinker.compute.losses import as_tensors, loss_of
from stretto_tinker.wire.bodies import Adam
from stretto_tinker.wire.datums import Datum
from stretto_tinker.wire.outputs import Computed, Floats

_UNCHANGED = Sampling(max_tokens=1)


Found = TypeVar("Found")
#: Work in pieces, as a generator. After each piece but the last it yields the number of tokens computed, so that the
#: caller can serve others before it continues. It returns the result.
Pieces = Generator[int, None, Found]
#: Writes the weights of a model into a folder, or reads them from it.
ModelFiles = Callable[[PreTrainedModel, Path], None]


class Learner:
    """A client's model in memory, with AdamW. Gradients accumulate until a step; passes are computed in
    micro-batches."""

    def __init__(self, model: PreTrainedModel, micro_batch_tokens: int, write: ModelFiles, read: ModelFiles) -> None:
        """Create the optimizer of a model for training. `model` has the packed attention; its parameters that require
        gradients are trained. `micro_batch_tokens`: most targets of a micro-batch; a longer sequence is one alone.
        `write`, `read`: save the model's weights to a folder, and load them."""
        self._model, self._tokens, self._write, self._read = model, micro_batch_tokens, write, read
        self._context: int = model.config.get_text_config().max_position_embeddings
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._adamw = torch.optim.AdamW(self._parameters, fused=True)

    def forward_backward(
        self, data: Sequence[Datum], loss: str, config: Mapping[str, float], *, backward: bool
    ) -> Pieces[Computed]:
        """Compute the log-probabilities of all targets and the summed loss, the metric "loss:sum" of the result. With
        `backward`, add the gradient of this sum to the accumulated gradient. After an error, or if the generator is
        closed before its end, the gradient is as before. Each piece is one micro-batch, and all but the last yield
        their number of targets.

        Args:
            data: the sequences with their targets.
            loss: name of a loss of `compute.losses`.
            config: all its settings, the defaults included.

        Raises:
            RefusedRequest: the loss is not finite, or does not exist.
        """
        logprobs: dict[int, Floats] = {}
        total, tokens = 0.0, 0
        lengths = [datum.targets.size for datum in data]
        with whole_gradient(self._model):
            for part in micro_batches(lengths, self._tokens):
                if logprobs:
                    yield tokens
                total += self._micro_batch(data, part, loss, config, logprobs, backward=backward)
                tokens = sum(lengths[at] for at in part)
            if not math.isfinite(total):
                raise RefusedRequest("data", f"the loss is {total}", "data of which it is finite")
        return Computed([logprobs[at] for at in range(len(data))], {"loss:sum": total})

    def _micro_batch(
        self,
        data: Sequence[Datum],
        part: Sequence[int],
        loss: str,
        config: Mapping[str, float],
        logprobs: dict[int, Floats],
        *,
        backward: bool,
    ) -> float:
        """Compute the sequences with the indices `part` in `data`, and add their log-probabilities to `logprobs`, by
        index, and with `backward` their gradient to that of the model; returns their summed loss."""
        chosen, device = [data[at] for at in part], self._model.device
        # The last target is appended to the inputs: target i is then the token to predict at position i + 1. Behind a
        # sequence as long as the context it would have a position that learned positions do not have.
        sequences = [[*one.tokens.tolist(), int(one.targets.flat[-1])][: self._context] for one in chosen]
        wanted = [np.repeat(np.arange(1, len(one.tokens) + 1), one.width) for one in chosen]
        packed = pack_tokens(sequences, wanted, device, targets=[one.targets.ravel() for one in chosen])
        with torch.set_grad_enabled(backward):
            found = token_logprobs(self._model, packed, _UNCHANGED).logprobs.split([one.targets.size for one in chosen])
            parts = [
                loss_of(loss).of(row.reshape(one.targets.shape), as_tensors(one.inputs, device), config)
                for one, row in zip(chosen, found, strict=True)
            ]
            value = torch.stack(parts).sum()
        if backward:
            value.backward()
        for at, one, row in zip(part, chosen, found, strict=True):
            logprobs[at] = row.detach().cpu().numpy().reshape(one.targets.shape)
        return float(value.detach())

    def optim_step(self, adam: Adam) -> Mapping[str, float]:
        """Take one step of AdamW with the accumulated gradient, and clear it. Returns metrics by name: ``grad_norm``,
        the norm before clipping.

        Raises:
            RefusedRequest: the gradient is not finite. It is cleared; weights and optimizer are unchanged.
        """
        limit = adam.grad_clip_norm if adam.grad_clip_norm > 0 else math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, limit))
        if not math.isfinite(norm):
            self.clear()
            raise RefusedRequest("optim_step", f"the gradient's norm is {norm}", "a finite one; it was cleared")
        [group] = self._adamw.param_groups
        group |= {"lr": adam.learning_rate, "betas": (adam.beta1, adam.beta2), "eps": adam.eps}
        group["weight_decay"] = adam.weight_decay
        self._adamw.step()
        self.clear()
        return {"grad_norm": norm}

    def clear(self) -> None:
        """Drop the accumulated gradient: afterwards no parameter has one."""
        self._adamw.zero_grad(set_to_none=True)

    def digest(self) -> str:
        """Checksum of the trained weights, as hexadecimal text."""
        whole = hashlib.blake2b(digest_size=16)
        for parameter in self._parameters:
            whole.update(str(digest_of_tensor(parameter.detach()).checksum).encode())
        return whole.hexdigest()

    def save(self, folder: Path, *, gradient: bool = False) -> None:
        """Write weights and optimizer state into an empty folder. Adapters are written in peft's format, a whole model
        in that of transformers. `gradient`: write the accumulated gradient too. Raises OSError if it cannot be
        written."""
        self._write(self._model, folder)
        write_optimizer(folder, self._model, self._adamw)
        if gradient:
            write_gradient(folder, self._model)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Load weights that `save` wrote, with the accumulated gradient if it was written; otherwise the present
        gradient stays. `optimizer`: load the optimizer state too; otherwise it is reset.

        Raises:
            StoreError: files are missing or damaged, or the tensors have other shapes.
        """
        self._read(self._model, folder)
        self._adamw.state.clear()
        if optimizer:
            read_optimizer(folder, self._model, self._adamw)
        read_gradient(folder, self._model)
