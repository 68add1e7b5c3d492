"""Bytes that ranks send each other in a training step: the ideal that the trainer's collectives are held against.

    gather      parameters in the dtype that is computed in, forward and backward (FSDP2); an embedding of its own goes
                backward without
    reduce      gradients in `reduce_dtype`, once a micro-batch or once a minibatch
    sum         results of two matrices of each layer, and gradients of the inputs of two (Megatron-LM, arXiv
                1909.08053, section 3); the first input of a model with adapters has none
    exchange    query, key and value of each layer for heads, the attention's result for tokens, and back (DeepSpeed-
                Ulysses, arXiv 2309.14509, section 3)

Activation checkpointing repeats what goes forward in a layer, but for its last result. `test_scale.py` compares.
"""

from __future__ import annotations

from collections.abc import Mapping

from stretto.model.hf.shape import BYTES, ModelShape
from stretto.trainer.config import TrainerConfig
from stretto.trainer.memory import adapter_weights


def step_traffic(shape: ModelShape, config: TrainerConfig, tokens: int, micro_batches: int = 1) -> Mapping[str, int]:
    """Bytes of one optimizer step on one of several ranks, by kind. A tensor counts whole, however many ranks share it.
    `tokens`: of one micro-batch."""
    tensor, context, item = config.tensor_parallel, config.context_parallel, BYTES[config.dtype]
    adapters = 0 if config.lora is None else adapter_weights(shape, config) // tensor
    whole = shape.body // tensor + (shape.parameters - shape.body) + adapters
    forward, backward = item * whole, item * (whole - (0 if shape.tied else shape.embedding))
    reduced = BYTES[config.reduce_dtype] * (adapters or whole)
    again = 1 if config.activation_checkpointing else 0
    own, layers = -(-tokens // context) * item, shape.layers
    stream = own * shape.hidden_size
    summed = layers * (4 + again) * stream - (stream if adapters else 0) if tensor > 1 else 0
    heads = 2 * (shape.width + shape.kv_width) // tensor
    return {
        "gather": micro_batches * (forward + backward),
        "reduce": reduced * (micro_batches if config.reduce_every == "micro_batch" else 1),
        "sum": micro_batches * summed,
        "exchange": micro_batches * (layers * (2 + again) * own * heads if context > 1 else 0),
    }
