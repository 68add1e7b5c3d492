"""Estimate of the memory and traffic of one rank in a training step. `--dry-run`, `stretto plan` and the check before a
start use this estimate.

    constant     weights, gradients and AdamW's two moments in float32, sharded over the ranks (ZeRO, arXiv
                 1910.02054); the moments may be in host memory (arXiv 2101.06840)
    peak         the larger of two points in time: the output matrix (its gradient is computed chunk by chunk), and the
                 backward pass of a layer (its activations, the weights of two layers, gradients sent to other ranks)

`tests/trainer/scale` measures a step of the trainer at real shapes; the estimate agrees within a tenth. For mixtures of
experts it counts the activations of all experts, an upper bound. With C ranks dividing tokens a rank has 1 / C of the
activations. With T ranks dividing matrices a rank has 1 / T of the heads and of the MLP, and its embedding and output
matrix are sharded over ranks / T. Traffic is the minimum that these divisions need:

    gather      parameters in the dtype of computation, forward and backward (FSDP2); an embedding that is not tied is
                gathered forward only
    reduce      gradients in `reduce_dtype`, once per micro-batch or once per minibatch
    sum         outputs of two matrices of each layer, and gradients of the inputs of two (Megatron-LM, arXiv
                1909.08053, section 3); the first input of a model with adapters has no gradient
    exchange    all-to-all of each layer: query, key and value from tokens to heads, the attention's result from heads
                to tokens, and their gradients back (DeepSpeed-Ulysses, arXiv 2309.14509, section 3)

Activation checkpointing repeats the forward pass of a layer except for its last result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stretto.model.hf.shape import BYTES, ModelShape
from stretto.trainer.config import TrainerConfig

_MASTER = 4  # bytes of a weight, a gradient, a moment
_CHUNK_LOGITS = 1 << 28  # logits that `model.packed.logprobs` computes at a time on a GPU
#: Bytes of a communicator of NCCL: for each of its 32 channels at most the buffers of its three protocols, 4 MiB, 4.7
#: MiB and 0.5 MiB (NCCL_BUFFSIZE, NCCL_LL128_BUFFSIZE, NCCL_LL_BUFFSIZE).
_COMMUNICATOR = 32 * ((4 << 20) + 4_915_200 + (1 << 19))
_SAVING, _SMALL_BATCHES = "trainer.activation_checkpointing = true", "a smaller trainer.micro_batch_tokens"
_HALF_SUMS, _EACH = 'trainer.reduce_dtype = "bfloat16"', 'trainer.reduce_every = "micro_batch"'
_TOKENS, _MATRICES, _SHORT = "trainer.context_parallel", "trainer.tensor_parallel", "a smaller sampling.max_tokens"
#: For each part of the memory, changes to the recipe that make it smaller.
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
    """Advice, as text, on how to make each part of the memory smaller, by part. Changes that the recipe has already
    made are left out. `longest`: tokens of the longest sequence. A sequence is never split between micro-batches, so if
    it fills a micro-batch, only shorter sequences help."""
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
    """Memory of one rank at the peak of a step. `parts`: bytes by part; `smaller`: advice on how to shrink each part;
    `host`: bytes of optimizer moments in host memory beside a GPU."""

    parts: Mapping[str, int]
    smaller: Mapping[str, str]
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """Name of the largest part."""
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
    reference: ModelShape | None = None,
    critic: bool = False,
) -> RankMemory:
    """Estimate the memory of one rank of `ranks`, without `collective_bytes`.

    Args:
        ranks: number of ranks, which may differ from the recipe's.
        longest: tokens of the longest sequence, which is never split between micro-batches.
        reference: shape of a reference policy that is a second model (not the policy with adapters disabled); None: no
            such model.
        critic: whether the algorithm has a critic.
    """
    adapters = 0 if config.lora is None else adapter_weights(shape, config)
    base = _held(shape, config)
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
        "reference": (_MASTER if ranks == 1 else step.item) * _held(reference, config) // ranks if reference else 0,
        "critic": _MASTER * (valued + adapters) // ranks + fitted * (1 if on_host else 3) if critic else 0,
        "activations": kept,
        "recomputed layer": recomputed,
        "gathered": moving,
    }
    host = moments + (2 * fitted if critic else 0) if on_host else 0
    return RankMemory({name: size for name, size in parts.items() if size}, smaller(config, longest), host)


def _held(shape: ModelShape, config: TrainerConfig) -> int:
    """Number of weights of a model, summed over the ranks: embedding and output matrix are undivided on each rank that
    divides matrices."""
    return shape.body + (shape.parameters - shape.body) * config.tensor_parallel


def collective_bytes(config: TrainerConfig) -> int:
    """Bytes that NCCL's communicators take on the GPU of a rank; 0 for a single rank. There is one communicator for all
    ranks, and one for each division in use: shares, tokens, and two for matrices (one of them for FSDP)."""
    groups = 1 + (config.shares < config.ranks) + (config.context_parallel > 1) + 2 * (config.tensor_parallel > 1)
    return _COMMUNICATOR * groups if config.ranks > 1 else 0


def adapter_weights(shape: ModelShape, config: TrainerConfig) -> int:
    """Number of adapter weights on the linear layers that the recipe names, summed over the ranks that divide matrices.
    Each of these ranks holds the undivided matrix (A or B) of an adapter as a whole. The recipe must have adapters."""
    assert config.lora is not None
    w, q, k, inner = shape.hidden_size, shape.width, shape.kv_width, shape.inner
    divided = {"q_proj": q, "k_proj": k, "v_proj": k, "o_proj": q, "gate_proj": inner, "up_proj": inner}
    sides = [size for name, size in (divided | {"down_proj": inner}).items() if config.lora.targets(name)]
    return shape.layers * config.lora.rank * (sum(sides) + len(sides) * w * config.tensor_parallel)


def step_traffic(shape: ModelShape, config: TrainerConfig, tokens: int, micro_batches: int = 1) -> Mapping[str, int]:
    """Bytes that one of several ranks gathers, reduces, sums and exchanges in an optimizer step, by kind. A tensor
    counts as a whole, however many ranks share it. `tokens`: tokens of one micro-batch; `micro_batches`: their number
    per step."""
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
    """Memory, in bytes, of a forward and backward pass over `tokens` tokens, without weights, gradients and moments."""

    shape: ModelShape
    config: TrainerConfig
    ranks: int
    tokens: int

    @property
    def item(self) -> int:
        """Bytes of a number in the dtype of computation."""
        return BYTES[self.config.dtype]

    @property
    def autocast(self) -> bool:
        """Whether a single rank computes in bfloat16 by autocast: matmuls are in bfloat16, the other operations in
        float32."""
        return self.ranks == 1 and self.item < _MASTER

    @property
    def fused(self) -> bool:
        """Whether a single rank computes its layers by `model.packed.layer`."""
        return self.ranks == 1 and self.trains_all and self.shape.plain

    @property
    def stream(self) -> int:
        """Bytes of the hidden states between two layers."""
        return self.tokens * self.shape.hidden_size * (_MASTER if self.autocast else self.item)

    @property
    def trains_all(self) -> bool:
        """Whether all parameters are trained, not only adapters."""
        return self.config.lora is None

    def own(self, size: int) -> int:
        """A rank's part of a size that is divided with the matrices."""
        return size // self.config.tensor_parallel

    def layer(self) -> int:
        """Bytes of activations that one layer keeps for its backward pass: the inputs of two norms in float32 and their
        results; queries, keys and values before and after norms and rotation; the attention's result; four tensors of
        the MLP, of which a fused layer keeps two."""
        shape = self.shape
        w, (q, k, inner) = shape.hidden_size, map(self.own, (shape.width, shape.kv_width, shape.inner))
        if self.fused:
            results = 2 * w + 3 * (q + k) + 2 * inner
            return self.tokens * (self.item * results + 4 * 2 * w + 4 * shape.heads)
        results = 2 * w + 2 * (q + k) + 4 * inner
        results += 2 * w + q + k if self.trains_all else 0  # for the gradients of the norms
        results += 6 * w if self.autocast else 0  # as counted
        return self.tokens * (self.item * results + 4 * (2 * w + q + k) + 4 * self.own(shape.heads))

    def peak(self) -> tuple[int, int, int]:
        """Bytes of (activations, one recomputed layer, gathered weights with gradients in transit), at the point of the
        step where their sum is largest."""
        shape, tokens = self.shape, self.tokens
        stream = self.stream
        checkpointed = self.config.activation_checkpointing
        kept = shape.layers * (stream if checkpointed else self.layer())
        again = self.layer() if checkpointed else 0
        backward = self._backward()
        moving = self._moving(self.own(shape.body) // shape.layers)
        at_a_layer = (kept + backward, again, moving + self._ends(at_head=False))
        chunk = min(tokens * shape.vocab_size, _CHUNK_LOGITS) * self.item
        norm = tokens * shape.hidden_size * (4 + 2 * self.item) + 2 * stream
        copies = moving if self.fused else self._unreduced()
        at_head = (kept + norm + chunk, 0, self._ends(at_head=True) + copies)
        return max(at_a_layer, at_head, key=sum)

    def _backward(self) -> int:
        """Bytes of gradients in the backward pass of a layer: of the MLP's tensors and of the stream."""
        shape, item = self.shape, self.item
        if not self.fused:
            return 2 * self.tokens * self.own(shape.inner) * item + self.stream
        return self.tokens * (item * (3 * shape.inner + shape.width + 3 * shape.hidden_size) + 8 * shape.hidden_size)

    def _moving(self, layer: int) -> int:
        """Bytes of the gathered weights of two layers and of gradients in transit. `layer`: weights of one layer. A
        single rank gathers nothing; in bfloat16 autocast copies all weights."""
        if self.ranks == 1:
            return self.shape.body * self.item if self.item == 2 else 0
        return (2 * layer + (layer // 3 if self.trains_all else 0)) * self.item + self._unreduced()

    def _unreduced(self) -> int:
        """Bytes of unsharded gradients on a rank; 0 with adapters, or if they are summed once per micro-batch."""
        each = self.config.reduce_every == "micro_batch" or not self.trains_all
        whole = self.shape.parameters - self.shape.body + self.own(self.shape.body)
        return 0 if each else whole * BYTES[self.config.reduce_dtype]

    def _head_gradient(self, copies: int) -> int:
        """Bytes of this many copies of the output matrix's gradient; 0 with adapters."""
        return copies * self.shape.embedding * self.item if self.trains_all else 0

    def _ends(self, *, at_head: bool) -> int:
        """Bytes of the output matrix and its gradients: while the logits are computed (`at_head`), the matrix is
        gathered. Later only its gradient is in transit to other ranks; a tied matrix stays gathered, with its gradient.
        On a single rank the gradient of a tied matrix waits, in float32, for that of the embedding."""
        if self.ranks == 1 and at_head:
            return (self.shape.embedding * self.item if self.item < _MASTER else 0) + self._head_gradient(2)
        if self.ranks == 1:
            return _MASTER * self.shape.embedding if self.shape.tied and self.trains_all else 0
        if at_head:
            return self.shape.embedding * self.item + self._head_gradient(3)
        if self.shape.tied:
            return self.shape.embedding * self.item + self._head_gradient(1)
        return self.shape.embedding * BYTES[self.config.reduce_dtype] if self.trains_all else 0
