"""Memory and traffic of one rank in a training step: the one estimate of `--dry-run`, `stretto plan` and the check
before a start.

    stays        weights, gradients and AdamW's two moments in float32, shared out to the ranks (ZeRO, arXiv
                 1910.02054), the moments perhaps in the machine's memory (arXiv 2101.06840)
    peaks        the larger of two moments: the output matrix (its gradient forms chunk by chunk), and the backward pass
                 of a layer (its activations, the weights of two layers, gradients on their way to the other ranks)

`tests/trainer/scale` counts a step of the trainer at real shapes; the estimate agrees within a tenth. Of mixtures it
counts the activations of all experts, an upper bound. Ranks that divide tokens (C) have 1 / C of the activations; those
that divide matrices (T) have 1 / T of the heads and of the MLP, and share embedding and output matrix with ranks / T.
Traffic is the least that these divisions need:

    gather      parameters in the dtype that is computed in, forward and backward (FSDP2); an embedding of its own goes
                backward without
    reduce      gradients in `reduce_dtype`, once a micro-batch or once a minibatch
    sum         results of two matrices of each layer, and gradients of the inputs of two (Megatron-LM, arXiv
                1909.08053, section 3); the first input of a model with adapters has none
    exchange    query, key and value of each layer for heads, the attention's result for tokens, and back (DeepSpeed-
                Ulysses, arXiv 2309.14509, section 3)

Activation checkpointing repeats what goes forward in a layer, but for its last result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stretto.model.hf.shape import BYTES, ModelShape
from stretto.trainer.config import TrainerConfig

_MASTER = 4  # bytes of a weight, a gradient, a moment
_CHUNK_LOGITS = 1 << 28  # as `model.packed.logprobs` computes at a time on a GPU
_BLOCK_LOGITS = 1 << 26  # and in float32, `model.kernels.fused_logprobs`
#: Bytes of a communicator of NCCL: for each of its 32 channels at most the buffers of its three protocols, 4 MiB, 4.7
#: MiB and 0.5 MiB (NCCL_BUFFSIZE, NCCL_LL128_BUFFSIZE, NCCL_LL_BUFFSIZE).
_COMMUNICATOR = 32 * ((4 << 20) + 4_915_200 + (1 << 19))
_SAVING, _SMALL_BATCHES = "trainer.activation_checkpointing = true", "a smaller trainer.micro_batch_tokens"
_HALF_SUMS, _EACH = 'trainer.reduce_dtype = "bfloat16"', 'trainer.reduce_every = "micro_batch"'
_TOKENS, _MATRICES, _SHORT = "trainer.context_parallel", "trainer.tensor_parallel", "a smaller sampling.max_tokens"
#: Keys that make a part smaller.
_SMALLER: Mapping[str, tuple[str, ...]] = {
    "weights": ("trainer.ranks",),
    "gradients": ("trainer.ranks", "trainer.lora"),
    "moments": ('trainer.optimizer_states = "host"', "trainer.ranks", "trainer.lora"),
    "reference": ("trainer.ranks", "trainer.lora, whose reference is the policy without adapters"),
    "critic": ("trainer.ranks", "advantages without a critic"),
    "activations": (_SAVING, _SMALL_BATCHES, _SHORT, _TOKENS),
    "recomputed layer": (_SMALL_BATCHES, _SHORT, _TOKENS),
    "gathered": (_HALF_SUMS, _EACH, _MATRICES),
    "collectives": ("NCCL_MAX_NCHANNELS or NCCL_BUFFSIZE in the environment",),
}


def smaller(config: TrainerConfig, longest: int) -> Mapping[str, str]:
    """What makes each part smaller, without what the recipe has done already. A sequence is never divided, so that
    batches no larger than the longest one need shorter ones."""
    whole = longest >= config.micro_batch_tokens
    done = {
        _SAVING: config.activation_checkpointing,
        _SMALL_BATCHES: whole,
        _SHORT: not whole,
        _HALF_SUMS: config.reduce_dtype == "bfloat16",
        _EACH: config.reduce_every == "micro_batch",
    }
    return {part: ", or ".join(key for key in keys if not done.get(key)) for part, keys in _SMALLER.items()}


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at the peak of a step, by part. `smaller`: what would shrink each. `host`: those of moments in
    the machine's memory beside a GPU."""

    parts: Mapping[str, int]
    smaller: Mapping[str, str]
    host: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """The largest part."""
        return max(self.parts, key=lambda name: self.parts[name])

    def __str__(self) -> str:
        size = self.parts[self.largest] / 2**30
        beside = f", and {self.host / 2**30:.1f} of moments in the machine's memory" if self.host else ""
        return (
            f"{self.total / 2**30:.1f} GiB, most of it {self.largest} ({size:.1f}): {self.smaller[self.largest]} "
            f"shrinks it{beside}"
        )


def rank_memory(
    shape: ModelShape,
    config: TrainerConfig,
    ranks: int,
    longest: int,
    *,
    reference: bool = False,
    critic: bool = False,
) -> RankMemory:
    """Memory of one rank of `ranks`.

    Args:
        longest: tokens of the longest sequence, which is never divided.
        reference: the algorithm has a second model for it (not one with the adapters disabled).
        critic: the algorithm has one.
    """
    adapters = 0 if config.lora is None else adapter_weights(shape, config)
    ends = shape.parameters - shape.body  # whole on each rank that divides matrices
    base = shape.body + ends * config.tensor_parallel
    trained = adapters or base
    weights = _MASTER * (base + adapters) // ranks
    step = _Step(shape, config, ranks, -(-max(config.micro_batch_tokens, longest) // config.context_parallel))
    kept, recomputed, moving = step.peak()
    gradients, moments = _MASTER * trained // ranks, 2 * _MASTER * trained // ranks
    valued = shape.body + shape.embedding * config.tensor_parallel  # a critic has no output matrix
    fitted = _MASTER * (adapters or valued) // ranks  # and its gradients
    on_host = config.optimizer_states == "host"
    parts = {
        "weights": weights,
        "gradients": gradients,
        "moments": 0 if on_host else moments,
        "reference": (_MASTER if ranks == 1 else step.item) * base // ranks if reference else 0,
        "critic": _MASTER * (valued + adapters) // ranks + fitted * (1 if on_host else 3) if critic else 0,
        "activations": kept,
        "recomputed layer": recomputed,
        "gathered": moving,
    }
    host = moments + (2 * fitted if critic else 0) if on_host else 0
    return RankMemory({name: size for name, size in parts.items() if size}, smaller(config, longest), host)


def collective_bytes(config: TrainerConfig) -> int:
    """Bytes that NCCL holds on the GPU of a rank: for all ranks, those of its shares, tokens and matrices, and for FSDP
    beside the last."""
    groups = 1 + (config.shares < config.ranks) + (config.context_parallel > 1) + 2 * (config.tensor_parallel > 1)
    return _COMMUNICATOR * groups if config.ranks > 1 else 0


def adapter_weights(shape: ModelShape, config: TrainerConfig) -> int:
    """Weights of adapters on the linear layers that the recipe names, on all ranks that divide matrices together. Each
    has the side of an adapter that is not divided whole."""
    assert config.lora is not None
    w, q, k, inner = shape.hidden_size, shape.width, shape.kv_width, shape.inner
    divided = {"q_proj": q, "k_proj": k, "v_proj": k, "o_proj": q, "gate_proj": inner, "up_proj": inner}
    sides = [size for name, size in (divided | {"down_proj": inner}).items() if config.lora.targets(name)]
    return shape.layers * config.lora.rank * (sum(sides) + len(sides) * w * config.tensor_parallel)


def step_traffic(shape: ModelShape, config: TrainerConfig, tokens: int, micro_batches: int = 1) -> Mapping[str, int]:
    """Bytes that one of several ranks gathers, reduces, sums and exchanges in an optimizer step. A tensor counts whole,
    however many ranks share it. `tokens`: of one micro-batch."""
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


@dataclass(frozen=True)
class _Step:
    """Bytes beside the state in a forward and backward pass of `tokens` tokens."""

    shape: ModelShape
    config: TrainerConfig
    ranks: int
    tokens: int

    @property
    def item(self) -> int:
        """Bytes of a number that is computed in."""
        return BYTES[self.config.dtype]

    @property
    def autocast(self) -> bool:
        """Whether a rank alone computes in bfloat16: what lies between its matrices stays in float32."""
        return self.ranks == 1 and self.item < _MASTER

    @property
    def stream(self) -> int:
        """Bytes of what goes from layer to layer."""
        return self.tokens * self.shape.hidden_size * (_MASTER if self.autocast else self.item)

    @property
    def trains_all(self) -> bool:
        return self.config.lora is None

    def own(self, size: int) -> int:
        """A rank's part of what is divided with the matrices."""
        return size // self.config.tensor_parallel

    def layer(self) -> int:
        """Activations that one layer keeps for its backward pass: two norms in float32, their results, queries, keys
        and values before and after their norms and rotation, the attention's result, four of the MLP's."""
        shape = self.shape
        w, (q, k, inner) = shape.hidden_size, map(self.own, (shape.width, shape.kv_width, shape.inner))
        results = 2 * w + 2 * (q + k) + 4 * inner
        results += 2 * w + q + k if self.trains_all else 0  # for the gradients of the norms
        results += 6 * w if self.autocast else 0  # as counted
        return self.tokens * (self.item * results + 4 * (2 * w + q + k) + 4 * self.own(shape.heads))

    def peak(self) -> tuple[int, int, int]:
        """Bytes of activations, of one layer that is computed again, and of gathered weights and gradients on their
        way, where their sum is largest."""
        shape, tokens = self.shape, self.tokens
        stream = self.stream
        checkpointed = self.config.activation_checkpointing
        kept = shape.layers * (stream if checkpointed else self.layer())
        again = self.layer() if checkpointed else 0
        backward = 2 * tokens * self.own(shape.inner) * self.item + stream
        moving = self._moving(self.own(shape.body) // shape.layers)
        at_a_layer = (kept + backward, again, moving + self._ends(at_head=False))
        chunk = min(tokens * shape.vocab_size, _CHUNK_LOGITS) * self.item
        norm = tokens * shape.hidden_size * (4 + 2 * self.item) + 2 * stream
        logits = max(chunk + 3 * 4 * min(tokens * shape.vocab_size, _BLOCK_LOGITS) - self._head_gradient(2), 0)
        at_head = (kept + norm + logits, 0, self._ends(at_head=True) + self._unreduced())
        return max(at_a_layer, at_head, key=sum)

    def _moving(self, layer: int) -> int:
        """Weights of two layers, and the gradients of one, in the dtype that is computed in. One rank alone has the
        weights; in bfloat16 autocast keeps a copy of all."""
        if self.ranks == 1:
            return self.shape.body * self.item if self.item == 2 else 0
        return (2 * layer + (layer // 3 if self.trains_all else 0)) * self.item + self._unreduced()

    def _unreduced(self) -> int:
        """Whole gradients on each rank, where they are summed once a minibatch."""
        each = self.config.reduce_every == "micro_batch" or not self.trains_all
        whole = self.shape.parameters - self.shape.body + self.own(self.shape.body)
        return 0 if each else whole * BYTES[self.config.reduce_dtype]

    def _head_gradient(self, copies: int) -> int:
        return copies * self.shape.embedding * self.item if self.trains_all else 0

    def _ends(self, *, at_head: bool) -> int:
        """The output matrix gathered with its gradient, at its own time; later its gradient on the way to the other
        ranks. Tied matrices stay gathered, with their gradient."""
        if self.ranks == 1:
            return self._head_gradient(2) if at_head else 0
        if at_head:
            return self.shape.embedding * self.item + self._head_gradient(3)
        if self.shape.tied:
            return self.shape.embedding * self.item + self._head_gradient(1)
        return self.shape.embedding * BYTES[self.config.reduce_dtype] if self.trains_all else 0
