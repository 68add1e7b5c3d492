"""`[trainer]` of a recipe: the optimizer and the run's steps. The objective is `[algorithm]`
(`trainer.objective.algorithm`).

Defaults are the paper's (AReaL, appendix B.1, table 3) where the paper has a number.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

from stretto.doors.door import Texts

PositiveInt = Annotated[int, Field(ge=1)]


class OptimizerConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Settings of AdamW, of its learning-rate schedule, and of how the model is computed and saved."""

    learning_rate: float = Field(2e-5, gt=0, le=1, description="peak learning rate")
    warmup_steps: int = Field(0, ge=0, description="steps over which the learning rate rises linearly from 0")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="learning-rate schedule after the warm-up"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam's beta1, decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="Adam's beta2, decay of the second moment")
    eps: float = Field(
        1e-5,
        ge=1e-20,
        description="Adam's epsilon; below 1e-20 it would vanish in float32, where squares of small gradients are 0",
    )
    weight_decay: float = Field(0.05, ge=0, description="decoupled weight decay of matrices (none for vectors)")
    max_grad_norm: float = Field(1.0, gt=0, description="gradient clipping: largest global norm")
    micro_batch_tokens: PositiveInt = Field(
        4096, description="most tokens in one forward pass (Algorithm 1's capacity)"
    )
    min_micro_batches: PositiveInt = Field(1, description="least number of micro-batches (Algorithm 1's k_min)")
    max_bad_steps: PositiveInt = Field(5, description="consecutive NaN or infinite gradients that end the run")
    activation_checkpointing: bool = Field(
        False, description="activation checkpointing: recompute layers in the backward pass; less memory, slower"
    )
    threads: PositiveInt = Field(1, description="torch threads of each process")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model is trained")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of the forward pass; parameters and optimizer stay in float32"
    )
    optimizer_states: Literal["device", "host"] = Field(
        "device",
        description="where the optimizer's moments are; host: in the machine's memory beside a GPU, through which "
        "each step takes them",
    )
    save_dtype: Literal["model", "float32", "bfloat16", "float16"] = Field(
        "model",
        description="dtype of saved policies; model: as in the folder that training starts from",
    )

    @model_validator(mode="after")
    def _decay_takes_no_more_than_a_weight(self) -> Self:
        if self.weight_decay * self.learning_rate > 1:
            told = f"weight_decay = {self.weight_decay:g} times learning_rate = {self.learning_rate:g} is above 1"
            raise ValueError(f"{told}: a step would take more than the whole weight")
        return self


class LoraConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """`[trainer.lora]`: train low-rank adapters and freeze the policy."""

    rank: PositiveInt = Field(16, description="rows of A, columns of B: W + alpha / rank * B A")
    alpha: PositiveInt = Field(32, description="scale of the adapters")
    target_modules: Texts = Field(
        (), description='linear layers by the last part of their name, such as "q_proj"; none: all of them'
    )

    def targets(self, layer: str) -> bool:
        """Whether the linear layer with this name, such as "model.layers.0.self_attn.q_proj", gets an adapter."""
        return not self.target_modules or layer.rsplit(".", 1)[-1] in self.target_modules


class TrainerConfig(OptimizerConfig):
    """Steps, minibatches and ranks of RL training; policies and checkpoints to keep."""

    steps: PositiveInt = Field(100, description="training steps; each publishes one version")
    minibatches: PositiveInt = Field(4, description="sequential optimizer steps per batch")
    ranks: PositiveInt = Field(1, description="processes that train together, each with a shard of every parameter")
    tensor_parallel: PositiveInt = Field(
        1, description="tensor parallelism: this many of `ranks` divide the matrices of each layer"
    )
    context_parallel: PositiveInt = Field(
        1, description="context parallelism: this many of `ranks` divide the tokens of each forward pass"
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype in which several ranks sum their gradients"
    )
    reduce_every: Literal["micro_batch", "minibatch"] = Field(
        "micro_batch",
        description="when several ranks sum their gradients; minibatch: less traffic, whole gradients on each rank",
    )
    remote_ranks: int = Field(0, ge=0, description="how many of `ranks` run on other machines of `[cluster]`")
    lora: LoraConfig | None = Field(None, description="train LoRA adapters instead of the parameters")
    keep_versions: Literal["all"] | Annotated[int, Field(ge=1)] = Field(
        1, description="policies kept in the run folder: number of newest ones, or all"
    )
    checkpoint_every: PositiveInt = Field(50, description="steps between two checkpoints")

    @model_validator(mode="after")
    def _ranks_can_be_divided(self) -> Self:
        together = self.together
        if self.remote_ranks >= self.ranks and self.remote_ranks:
            raise ValueError(
                f"remote_ranks = {self.remote_ranks} of ranks = {self.ranks}: rank 0 runs beside the conductor, "
                f"so at most {self.ranks - 1} can run on other machines"
            )
        if self.ranks % together:
            raise ValueError(
                f"ranks = {self.ranks} is no multiple of tensor_parallel * context_parallel = {self.tensor_parallel} * "
                f"{self.context_parallel}; the nearest is ranks = {max(together, self.ranks // together * together)}"
            )
        if self.remote_ranks % together:
            below = self.remote_ranks // together * together
            raise ValueError(
                f"remote_ranks = {self.remote_ranks} is no multiple of tensor_parallel * context_parallel = "
                f"{together}: a group of ranks would lie on two machines, and send its activations over the "
                f"network; the nearest is remote_ranks = {below}"
            )
        return self

    @property
    def together(self) -> int:
        """Number of ranks that compute one share of a minibatch together, dividing its matrices or tokens."""
        return self.tensor_parallel * self.context_parallel

    @property
    def shares(self) -> int:
        """Number of shares into which a minibatch is divided, one for each `together` ranks."""
        return self.ranks // self.together

    @property
    def local_ranks(self) -> int:
        """Number of ranks on the conductor's machine. They have the lowest numbers, remote ranks the highest."""
        return self.ranks - self.remote_ranks


class CriticConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """`[algorithm.advantages.critic]`: settings of the value model; its other settings are those of the policy's
    optimizer."""

    learning_rate: float = Field(1e-4, gt=0, le=1, description="peak learning rate; schedule as the policy's")
    clip: float = Field(0.2, gt=0, description="clip range of a value around its value before the step")
    truncated: Literal["end", "bootstrap"] = Field(
        "end", description="value after a truncated completion: 0, or the critic's value of its last state"
    )


class PreferenceConfig(OptimizerConfig):
    """Settings of learning from pairs of completions (DPO)."""

    learning_rate: float = Field(1e-6, gt=0, le=1, description="peak learning rate")
    steps: PositiveInt = Field(1000, description="optimizer steps")
    batch_size: PositiveInt = Field(64, description="pairs per step")
    beta: float = Field(
        0.1, gt=0, description="DPO's beta: the strength of the KL penalty towards the reference policy"
    )


class SupervisedConfig(OptimizerConfig):
    """Settings of supervised fine-tuning on demonstrations (the warm start)."""

    learning_rate: float = Field(1e-3, gt=0, le=1, description="peak learning rate")
    steps: PositiveInt = Field(1000, description="optimizer steps")
    batch_size: PositiveInt = Field(128, description="demonstrations per step")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: Muon for the matrices of the layers, AdamW for the embeddings and all vectors"
    )
    matrix_learning_rate: float = Field(0.02, gt=0, le=1, description="Muon's peak learning rate; schedule as AdamW's")
