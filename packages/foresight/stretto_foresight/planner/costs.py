"""The planned run in numbers, and the costs of one layout of it, in seconds and bytes: formulas with the machine's
measured numbers.

The *roofline* (Williams, Waterman, Patterson 2009): work takes the longer of its FLOPs at the machine's FLOP rate and
its bytes at the memory bandwidth. The formulas:

    decode step     2 FLOPs per weight and row; reads the weights once, and the KV cache of every row
    prefill         2 FLOPs per weight and token; causal attention 2 L^2 per layer and unit of width (Megatron-LM,
                    arXiv 2104.04473, appendix, halved by the mask)
    training        three times a forward pass (forward and backward); activation checkpointing adds one, and so
                    does the proximal policy (AReaL, section 5.2) for its share of the tokens. A reference policy adds
                    one, and a critic one for its values and a forward and backward pass of its own
    ranks           FSDP (arXiv 2304.11277, section 4): each pass over a micro-batch gathers the parameters forward and
                    backward and scatters the gradients, overlapped with compute. Sequences are not split (AReaL,
                    algorithm 1), so all ranks wait for the one with the longest sequence of a minibatch. Tensor and
                    context parallel ranks also exchange activations (`trainer.memory:step_traffic`), not overlapped
    tensor parallel Megatron-LM (arXiv 1909.08053): two all-reduces of the activations in each layer
    memory          of a rank: `stretto.trainer.memory`; parameters are gathered in `trainer.dtype`
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from stretto.engine.config import EngineConfig
from stretto.model.hf.shape import BYTES, ModelShape
from stretto.rollout.config import RolloutConfig
from stretto.trainer.config import TrainerConfig
from stretto.trainer.memory import RankMemory, rank_memory, step_traffic
from stretto_foresight.planner.lengths import Lengths
from stretto_foresight.planner.machine import MachineProfile


@dataclass(frozen=True)
class Job:
    """A recipe as the planner sees it. `longest`: tokens of the longest prompt plus the longest completion.
    `recomputes`: the objective needs proximal log-probabilities. `converses`: the recipe has a workflow of several
    turns. `reference`: shape of the reference model that the trainer also holds; None: no such model. `refers`: whether
    the divergence from the reference policy (a model, or the policy without its adapters) is in the loss or in the
    reward; "": there is no reference policy. `critic`: whether the trainer has a critic."""

    shape: ModelShape
    lengths: Lengths
    rollout: RolloutConfig
    engine: EngineConfig
    trainer: TrainerConfig
    longest: int
    recomputes: bool = False
    converses: bool = False
    reference: ModelShape | None = None
    refers: Literal["", "loss", "reward"] = ""
    critic: bool = False
    reward_workers: int = 1

    @property
    def completions(self) -> int:
        """Number of completions in one batch."""
        return self.rollout.batch_size * self.rollout.group_size

    @property
    def proximal(self) -> float:
        """Share of a step's tokens whose proximal log-probabilities need an extra forward pass (AReaL, section 5.2): of
        all minibatches but the first, which gets them from its own forward pass. 0 if the objective needs none."""
        return (self.trainer.minibatches - 1) / self.trainer.minibatches if self.recomputes else 0.0

    @property
    def in_rounds(self) -> bool:
        """Whether groups start and end together: the engines batch in rounds (the default of native engines in a
        synchronous run), and the recipe has no workflow of several turns."""
        return not self.converses and self.engine.in_rounds(self.rollout.staleness_bounds[1] == 0)

    def with_settings(
        self, rollout: Mapping[str, object], engine: Mapping[str, object], trainer: Mapping[str, object]
    ) -> Job:
        """Return a copy of the job in which the given settings of each section, by name, are changed; the new values
        are not validated."""
        return replace(
            self,
            rollout=self.rollout.model_copy(update=dict(rollout)),
            engine=self.engine.model_copy(update=dict(engine)),
            trainer=self.trainer.model_copy(update=dict(trainer)),
        )


_RESERVED = 0.1  # share of a device's memory for the driver's context and fragmentation
NATIVE_SLOT = 4 / 3  # slots of the native engine have powers of two as lengths, so 3/4 is used on average


@dataclass(frozen=True)
class Layout:
    """Distribution of a run over devices: `engines` engines of `tensor` devices each, and `ranks` trainer ranks of one
    device each."""

    engines: int
    ranks: int
    tensor: int = 1

    @property
    def devices(self) -> int:
        return self.engines * self.tensor + self.ranks


@dataclass(frozen=True)
class Memory:
    """GiB needed on one device: by a trainer rank (`trainer`), by an engine's weights (`engine`) and by its KV `cache`.
    `available`: usable GiB of a device. `completion`: KV cache of the longest completion, the least that an engine can
    work with."""

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
        """GiB that an engine needs at least on a device: its weights, and the KV cache of its longest completion."""
        return self.engine + self.completion

    @property
    def missing(self) -> float:
        """GiB by which the trainer rank or the engine (`generation`), whichever needs more, exceeds the usable memory
        of a device; zero or negative if both fit."""
        return max(self.trainer, self.generation) - self.available


class _TrainingSeconds(NamedTuple):
    """Seconds of the parts of a training step, in order: the conductor's work before it, the forward passes for the
    proximal policy (for a critic's values, and a reference policy in the reward, too), the update, the publication."""

    conduct: float
    proximal: float
    update: float
    publish: float


def forward_flops(shape: ModelShape, lengths: Sequence[float], sampled: float) -> float:
    """Return the FLOPs of a forward pass over sequences of these lengths in tokens. Only `sampled` of the tokens go
    through the output matrix."""
    attention = 2.0 * sum(length * length for length in lengths) * shape.width * shape.layers
    return 2.0 * (shape.body * sum(lengths) + shape.embedding * sampled) + attention


@dataclass(frozen=True)
class Costs:
    """Costs of one layout of the job: the simulator's `Durations`, by the formulas of this module and the machine's
    record. `slower_generation`, `slower_training`: factors by which generation and training take longer because roles
    share cores; 1: none do."""

    job: Job
    machine: MachineProfile
    layout: Layout
    slower_generation: float = 1.0
    slower_training: float = 1.0

    def decode(self, rows: float, cached: float) -> float:
        job, machine, shape, tensor = self.job, self.machine, self.job.shape, self.layout.tensor
        weights = (shape.body + shape.embedding) / tensor
        products = 2.0 * weights * rows / machine.decode_flops
        read = weights * BYTES[job.engine.dtype] / machine.weight_bandwidth
        cache = cached * self.token_bytes / machine.cache_bandwidth
        fixed = machine.step_seconds + shape.layers * machine.layer_seconds
        each = machine.row_seconds + shape.layers * shape.hidden_size * machine.row_width_seconds
        by_rows = rows * (each + machine.serve_seconds / job.lengths.mean)  # rows / mean completions end in a step
        return self.slower_generation * (fixed + by_rows + max(products, read) + cache + self._reduced(rows))

    def prefill(self, contexts: Sequence[float]) -> float:
        machine, shape, tensor = self.machine, self.job.shape, self.layout.tensor
        tokens = sum(contexts)
        products = forward_flops(shape, contexts, len(contexts))
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

    def training(self, sequences: Sequence[int]) -> _TrainingSeconds:
        """Return the seconds of the parts of a training step on sequences of these lengths in tokens (prompt
        included)."""
        job, machine, shape, ranks = self.job, self.machine, self.job.shape, self.layout.ranks
        tokens, squares = sum(sequences), sum(length * length for length in sequences)
        forwards = 3.0 + (1.0 if job.trainer.activation_checkpointing else 0.0) + job.proximal
        minibatches = job.trainer.minibatches
        # A sequence is not split over ranks: in each minibatch, the ranks wait for the one with the longest sequence.
        longest = heapq.nlargest(minibatches, sequences)
        alone = forward_flops(shape, longest, sum(longest))
        together = job.trainer.together
        shared = forward_flops(shape, sequences, tokens) / ranks
        products = forwards * max(shared, alone / together) / machine.train_flops
        passes = minibatches * math.ceil(tokens / minibatches / (ranks / together) / job.trainer.micro_batch_tokens)
        whole = max(products, self._gathered(passes)) + self._inside(tokens * together / ranks, passes)
        beside = passes * shape.layers * machine.micro_batch_seconds
        beside += tokens / ranks * shape.layers * shape.hidden_size * machine.token_width_seconds
        beside += squares / ranks * shape.layers * shape.width * machine.pair_width_seconds
        once, fitted = whole / forwards + beside / 3, (1 - job.proximal / forwards) * whole + beside
        adam = shape.parameters / ranks * machine.parameter_seconds / 2  # a publication reads as many bytes
        own = machine.train_seconds + len(sequences) * machine.sequence_seconds / ranks
        referred = once * (job.reference or shape).parameters / shape.parameters
        proximal = job.proximal * once + job.critic * once + (referred if job.refers == "reward" else 0.0)
        update = own + (1 + job.critic) * (minibatches * adam + fitted) + (referred if job.refers == "loss" else 0.0)
        conduct = len(sequences) * machine.batch_seconds
        return _TrainingSeconds(*(self.slower_training * part for part in (conduct, proximal, update, adam)))

    def _gathered(self, passes: int) -> float:
        """Return the seconds in which a rank gathers the parameter shards of all others and reduces the gradients, in a
        step of `passes` micro-batches; 0 if the parameters are not sharded. A forward pass for the proximal policy
        gathers half as much as a forward and backward pass."""
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
        """Return the seconds in which tensor and context parallel ranks exchange activations of `tokens` tokens in
        `passes` micro-batches; 0 without such ranks. (A ring all-reduce sends twice the reduced bytes; of exchanged
        bytes, a rank keeps its own part.)"""
        trainer, again = self.job.trainer, 1 if self.job.trainer.activation_checkpointing else 0
        tensor, context, layers = trainer.tensor_parallel, trainer.context_parallel, self.job.shape.layers
        traffic, forward = step_traffic(self.job.shape, trainer, math.ceil(tokens)), self.job.proximal / (2 + again)
        summed = 2 * traffic["sum"] * (tensor - 1) / tensor
        exchanged = traffic["exchange"] * (context - 1) / context
        calls = passes * layers * ((4 + again) * (tensor > 1) + (8 + 4 * again) * (context > 1))
        sent = self._collective(trainer.together, summed + exchanged) + calls * self.machine.link_seconds
        return (1 + forward) * sent

    def _reduced(self, tokens: float) -> float:
        """Return the seconds of the two all-reduces in each layer of a tensor parallel engine, for `tokens` tokens; 0
        for an engine on one device. (A ring sends twice the reduced bytes.)"""
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

    @cached_property
    def estimate(self) -> float:
        """Optimistic estimate of the seconds of a step, in which no role waits for another: to generate a batch, with
        as many concurrent completions as fit, or to train on it, whichever is longer. A running completion has half its
        length on average, so the cache holds more of them than complete ones."""
        job, lengths, rows = self.job, self.job.lengths, self._rows
        step = self.decode(rows, rows * self._context)
        generation = job.completions * lengths.mean / self.layout.engines / rows * step
        return max(generation, self.train(self._mean_batch))

    @cached_property
    def fixed_shares(self) -> tuple[float, float]:
        """Shares of a decode step and of a training step, both as in `estimate`, that are seconds which the machine's
        record gives for any model: `step_seconds` and `train_seconds`."""
        decode, train = self.decode(self._rows, self._rows * self._context), self.train(self._mean_batch)
        fixed = self.slower_generation * self.machine.step_seconds, self.slower_training * self.machine.train_seconds
        return fixed[0] / decode, fixed[1] / train

    @property
    def _context(self) -> float:
        """Tokens of a running completion in the mean, its prompt included."""
        return self.job.lengths.prompt_tokens + self.job.lengths.mean / 2

    @property
    def _rows(self) -> float:
        """Most completions that run in an engine at a time."""
        job = self.job
        in_flight = job.rollout.in_flight_bounds[1] * job.rollout.group_size / self.layout.engines
        return max(1.0, min(job.engine.slots, in_flight, self.cache_tokens() / self._context))

    @property
    def _mean_batch(self) -> list[int]:
        """Lengths, prompt included, of the sequences of a batch whose completions all have the mean length."""
        lengths = self.job.lengths
        return [math.floor(lengths.prompt_tokens + lengths.mean)] * self.job.completions

    # ── memory ───────────────────────────────────────────────────────────────────────────────────

    def memory(self) -> Memory:
        """Return the GiB needed per device, the available ones, and those of one longest completion's cache. `trainer`:
        the estimate of `trainer.memory`. `engine`: its share of the weights. `cache`: what all slots need, but at most
        `engine.cache_gib` and what the weights leave."""
        job, shape, layout = self.job, self.job.shape, self.layout
        trainer = self.rank().total
        engine = shape.parameters * BYTES[job.engine.dtype] / layout.tensor
        available = self.machine.memory_gib * (1 - _RESERVED)
        wanted = job.engine.slots * job.longest * self.token_bytes * self._waste / 2**30
        room = max(0.0, available - engine / 2**30)
        asked = min(wanted, job.engine.cache_gib / layout.tensor)
        completion = job.longest * self.token_bytes * self._waste / 2**30
        return Memory(trainer / 2**30, engine / 2**30, min(asked, room), available, completion)

    @property
    def fits(self) -> bool:
        """Whether the devices of the layout have enough memory."""
        return self.memory().missing <= 0

    def rank(self) -> RankMemory:
        """Estimate the memory of one trainer rank, in bytes by part."""
        job = self.job
        return rank_memory(
            job.shape, job.trainer, self.layout.ranks, job.longest, reference=job.reference, critic=job.critic
        )

    def cache_tokens(self) -> float:
        """Return the capacity of one engine's KV cache in tokens."""
        return self.memory().cache * 2**30 / self.token_bytes / self._waste

    @property
    def token_bytes(self) -> float:
        """KV cache bytes per token on one device of an engine. KV heads are replicated if they are fewer than the
        engine's devices."""
        shape = self.job.shape
        return shape.cache_bytes(self.job.engine.dtype) / min(self.layout.tensor, shape.kv_heads)

    @property
    def _waste(self) -> float:
        return NATIVE_SLOT if self.job.engine.kind == "native" else 1.0
