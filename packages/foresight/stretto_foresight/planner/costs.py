"""Costs of one layout of a run, in seconds and bytes: formulas with the machine's measured numbers.

The *roofline* (Williams, Waterman, Patterson 2009): a piece of work takes the longer of its products at the rate of
products and its bytes at the rate of memory. The formulas:

    decode step     2 products per weight and row; weights once, keys and values of every row
    prefill         2 per weight and token; causal attention 2 L^2 per layer and unit of width (Megatron-LM,
                    arXiv 2104.04473, appendix, halved by the mask)
    training        three times a forward pass (forward and backward); activation checkpointing adds one; so does the
                    proximal policy (AReaL, section 5.2) for its share
    ranks           FSDP (arXiv 2304.11277, section 4): each pass over a micro-batch gathers the parameters forward and
                    backward and scatters the gradients, while products go on; the longest sequence of a minibatch is
                    one rank's (AReaL, algorithm 1, packs whole sequences), and all wait for it. Those that divide
                    matrices or tokens sum and exchange activations (`trainer.memory:step_traffic`), while products wait
    tensor parallel Megatron-LM (arXiv 1909.08053): two all-reduces of the activations in each layer
    memory          of a rank: `stretto.trainer.memory`; parameters are gathered in `trainer.dtype`
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stretto.model.hf.shape import BYTES
from stretto.trainer.memory import RankMemory, rank_memory, step_traffic
from stretto_foresight.planner.job import Job
from stretto_foresight.planner.machine import MachineProfile

_RESERVED = 0.1  # of a device's memory: the context of the driver, fragments
NATIVE_SLOT = 4 / 3  # slots of the native engine have powers of two as their lengths; the mean of their fill is 3/4


@dataclass(frozen=True)
class Layout:
    """Distribution of a run over devices: `tensor` devices make one engine."""

    engines: int
    ranks: int
    tensor: int = 1

    @property
    def devices(self) -> int:
        return self.engines * self.tensor + self.ranks


@dataclass(frozen=True)
class Memory:
    """GiB needed on one device of each side (generation, training), and GiB of a device; the KV cache gets the rest.
    `completion`: the part of the KV cache that an engine needs at least, for its longest completion."""

    trainer: float
    engine: float
    cache: float
    available: float
    completion: float

    @property
    def most(self) -> float:
        return max(self.trainer, self.engine + self.cache)

    @property
    def generation(self) -> float:
        """GiB that an engine needs at least."""
        return self.engine + self.completion

    @property
    def missing(self) -> float:
        """GiB by which the fuller side exceeds a device; zero or negative if it fits."""
        return max(self.trainer, self.generation) - self.available


class TrainingSeconds(NamedTuple):
    """Parts of a training step: the conductor's work before it, the proximal policy, the update, the publication."""

    conduct: float
    proximal: float
    update: float
    publish: float


@dataclass(frozen=True)
class Costs:
    """`Durations` of a simulated run, from the machine's record. `slower`: factor on generation and training for roles
    that share cores."""

    job: Job
    machine: MachineProfile
    layout: Layout
    slower_generation: float = 1.0
    slower_training: float = 1.0

    def decode(self, rows: int, cached: float) -> float:
        job, machine, shape, tensor = self.job, self.machine, self.job.shape, self.layout.tensor
        weights = (shape.body + shape.embedding) / tensor
        products = 2.0 * weights * rows / machine.decode_flops
        read = weights * BYTES[job.engine.dtype] / machine.weight_bandwidth
        cache = cached * self.token_bytes / machine.cache_bandwidth
        fixed = machine.step_seconds + shape.layers * machine.layer_seconds
        each = machine.row_seconds + shape.layers * shape.hidden_size * machine.row_width_seconds
        by_rows = rows * (each + machine.serve_seconds / job.lengths.mean)  # rows / mean of them end in a step
        return self.slower_generation * (fixed + by_rows + max(products, read) + cache + self._reduced(rows))

    def prefill(self, contexts: Sequence[float]) -> float:
        machine, shape, tensor = self.machine, self.job.shape, self.layout.tensor
        tokens = sum(contexts)
        products = self._forward(tokens, len(contexts), sum(context * context for context in contexts))
        passes = math.ceil(tokens / self.job.engine.max_prefill_tokens)
        fixed = passes * (machine.prefill_seconds + shape.layers * machine.layer_seconds)
        own = tokens * machine.prefill_token_seconds
        return self.slower_generation * (
            fixed + own + products / tensor / machine.prefill_flops + self._reduced(tokens)
        )

    def transfer(self) -> float:
        machine = self.machine
        return machine.transfer_seconds + machine.transfer_parameter_seconds * self.job.shape.parameters

    def load(self) -> float:
        machine, parameters = self.machine, self.job.shape.parameters / self.layout.tensor
        return self.slower_generation * (machine.load_seconds + machine.load_parameter_seconds * parameters)

    def judge(self) -> float:
        return self.machine.judge_seconds

    def train(self, sequences: Sequence[int]) -> float:
        return sum(self.training(sequences))

    def training(self, sequences: Sequence[int]) -> TrainingSeconds:
        """Parts of a training step."""
        job, machine, shape, ranks = self.job, self.machine, self.job.shape, self.layout.ranks
        tokens, squares = sum(sequences), sum(length * length for length in sequences)
        forwards = 3.0 + (1.0 if job.trainer.activation_checkpointing else 0.0) + job.proximal
        minibatches = job.trainer.minibatches
        # A sequence is not shared out: of each minibatch one rank has the longest, and the others wait for it.
        longest = heapq.nlargest(minibatches, sequences)
        alone = self._forward(sum(longest), sum(longest), sum(length * length for length in longest))
        together = job.trainer.together
        shared = self._forward(tokens, tokens, squares) / ranks
        products = forwards * max(shared, alone / together) / machine.train_flops
        passes = minibatches * math.ceil(tokens / minibatches / (ranks / together) / job.trainer.micro_batch_tokens)
        whole = max(products, self._gathered(passes)) + self._inside(tokens * together / ranks, passes)
        beside = passes * shape.layers * machine.micro_batch_seconds
        beside += tokens / ranks * shape.layers * shape.hidden_size * machine.token_width_seconds
        beside += squares / ranks * shape.layers * shape.width * machine.pair_width_seconds
        proximal = job.proximal * (whole / forwards + beside / 3)
        adam = shape.parameters / ranks * machine.parameter_seconds / 2  # a publication reads as much
        own = machine.train_seconds + len(sequences) * machine.sequence_seconds / ranks
        update = own + minibatches * adam + (1 - job.proximal / forwards) * whole + beside
        conduct = len(sequences) * machine.batch_seconds
        return TrainingSeconds(*(self.slower_training * part for part in (conduct, proximal, update, adam)))

    def _forward(self, tokens: float, sampled: float, squares: float) -> float:
        """Operations of a forward pass; only `sampled` tokens go through the output matrix."""
        shape = self.job.shape
        attention = 2.0 * squares * shape.width * shape.layers
        return 2.0 * (shape.body * tokens + shape.embedding * sampled) + attention

    def _gathered(self, passes: int) -> float:
        """Seconds for each rank to gather the parts of all others, and to reduce its part of the gradients. A forward
        pass alone gathers half as much."""
        job, ranks = self.job, self.layout.ranks
        sharing = ranks // job.trainer.tensor_parallel
        if sharing <= 1:
            return 0.0
        traffic, forward = step_traffic(job.shape, job.trainer, 0), job.proximal / 2
        reduced = passes if job.trainer.reduce_every == "micro_batch" else job.trainer.minibatches
        size = passes * (1 + forward) * traffic["gather"] + reduced * traffic["reduce"]
        calls = (passes * (2 + job.proximal) + reduced) * job.shape.layers
        return self._collective(ranks, size * (sharing - 1) / sharing) + calls * self.machine.link_seconds

    def _inside(self, tokens: float, passes: int) -> float:
        """Seconds that ranks which divide matrices (T) or tokens (C) send each other activations, of `tokens` tokens in
        so many passes. A ring sends twice what it sums; of what is exchanged a rank keeps its own."""
        trainer, again = self.job.trainer, 1 if self.job.trainer.activation_checkpointing else 0
        tensor, context, layers = trainer.tensor_parallel, trainer.context_parallel, self.job.shape.layers
        traffic, forward = step_traffic(self.job.shape, trainer, math.ceil(tokens)), self.job.proximal / (2 + again)
        summed = 2 * traffic["sum"] * (tensor - 1) / tensor
        exchanged = traffic["exchange"] * (context - 1) / context
        calls = passes * layers * ((4 + again) * (tensor > 1) + (8 + 4 * again) * (context > 1))
        sent = self._collective(trainer.together, summed + exchanged) + calls * self.machine.link_seconds
        return (1 + forward) * sent

    def _reduced(self, tokens: float) -> float:
        """Seconds of two all-reduces in each layer; a ring sends twice the reduced bytes."""
        tensor, shape = self.layout.tensor, self.job.shape
        if tensor == 1:
            return 0.0
        size = 2 * tokens * shape.hidden_size * BYTES[self.job.engine.dtype] * (tensor - 1) / tensor
        return 2 * shape.layers * (self._collective(tensor, size) + self.machine.link_seconds)

    def _collective(self, devices: int, size: float) -> float:
        machine = self.machine
        within = devices <= machine.node_devices or not machine.network_bandwidth
        bandwidth = machine.link_bandwidth if within else machine.network_bandwidth
        return size / bandwidth if bandwidth else 0.0

    # ── memory ───────────────────────────────────────────────────────────────────────────────────

    def memory(self) -> Memory:
        """Memory per device. A rank needs what `trainer.memory` estimates; an engine its part of the weights, and a KV
        cache in the rest, up to its slots and to `engine.cache_gib`."""
        job, shape, layout = self.job, self.job.shape, self.layout
        trainer = self.rank().total
        engine = shape.parameters * BYTES[job.engine.dtype] / layout.tensor
        available = self.machine.memory_gib * (1 - _RESERVED)
        wanted = job.engine.slots * job.longest * self.token_bytes / 2**30
        room = max(0.0, available - engine / 2**30)
        asked = min(wanted, job.engine.cache_gib / layout.tensor)
        completion = job.longest * self.token_bytes * self._waste / 2**30
        return Memory(trainer / 2**30, engine / 2**30, min(asked, room), available, completion)

    def rank(self) -> RankMemory:
        """Memory of one rank."""
        job = self.job
        return rank_memory(
            job.shape, job.trainer, self.layout.ranks, job.longest, reference=job.reference, critic=job.critic
        )

    def cache_tokens(self) -> float:
        """Capacity in tokens of one engine's KV cache."""
        return self.memory().cache * 2**30 / self.token_bytes / self._waste

    @property
    def token_bytes(self) -> float:
        """KV cache bytes per token on one device of an engine; heads are replicated if there are fewer than devices."""
        shape = self.job.shape
        return shape.cache_bytes(self.job.engine.dtype) / min(self.layout.tensor, shape.kv_heads)

    @property
    def _waste(self) -> float:
        return NATIVE_SLOT if self.job.engine.kind == "native" else 1.0
