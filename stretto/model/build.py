"""A small policy from nothing: random weights and a tokenizer of single characters."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

import torch
from pydantic import BaseModel, Field, model_validator
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from stretto.model.folder import quiet_transformers, whole_folder

PAD, EOS = "<pad>", "<eos>"


class BuildConfig(BaseModel, extra="forbid", frozen=True):
    """The shape of a new model and the characters that it reads and writes."""

    family: Literal["qwen3", "qwen2", "llama"] = Field("qwen3", description="architecture, as transformers names it")
    hidden_size: int = Field(64, ge=8, le=16_384, description="width of the residual stream")
    layers: int = Field(3, ge=1, le=256, description="decoder layers")
    heads: int = Field(2, ge=1, le=256, description="query heads")
    kv_heads: int = Field(2, ge=1, le=256, description="key/value heads; divides heads")
    head_dim: int = Field(32, ge=2, le=512, multiple_of=2, description="width of a head")
    intermediate_size: int = Field(192, ge=8, le=65_536, description="width of the MLP")
    context_length: int = Field(512, ge=8, le=1_048_576, description="tokens of prompt and answer together at most")
    alphabet: str = Field("0123456789+-*/=;#?() ", min_length=1, description="one token per character")
    tie_embeddings: bool = Field(True, description="use the embedding as the output matrix")
    rope_theta: float = Field(10_000.0, gt=1, allow_inf_nan=False, description="base of the rotary embedding")
    initializer_range: float = Field(0.02, gt=0, le=1, description="standard deviation of the random weights")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}")
        twice = sorted({character for character in self.alphabet if self.alphabet.count(character) > 1})
        if twice:
            raise ValueError(f"alphabet holds {' '.join(map(repr, twice))} more than once")
        return self

    @property
    def vocabulary(self) -> dict[str, int]:
        """Token to id: padding 0, end 1, then the alphabet in its own order."""
        return {token: at for at, token in enumerate((PAD, EOS, *self.alphabet))}


def build_policy(config: BuildConfig, path: Path | str, seed: int) -> None:
    """Write a new policy and its tokenizer as a Hugging Face folder; equal bytes of weights for equal seeds."""
    vocabulary = config.vocabulary
    architecture = AutoConfig.for_model(
        config.family,
        vocab_size=len(vocabulary),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.context_length,
        tie_word_embeddings=config.tie_embeddings,
        rope_theta=config.rope_theta,
        initializer_range=config.initializer_range,
        bos_token_id=None,
        eos_token_id=vocabulary[EOS],
        pad_token_id=vocabulary[PAD],
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(architecture, dtype=torch.float32)
    with whole_folder(Path(path)) as folder, quiet_transformers():
        model.save_pretrained(folder)
        character_tokenizer(vocabulary, config.context_length).save_pretrained(folder)


def character_tokenizer(vocabulary: dict[str, int], context_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character. It has no token for the unknown: other characters are an error."""
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=context_length,
    )
