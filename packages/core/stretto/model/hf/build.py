"""Build a new small policy with random weights and a character tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from stretto.core.errors import Problem, RecipeError
from stretto.core.machine import available_memory
from stretto.model.hf.config import EOS, PAD, BuildConfig
from stretto.model.hf.folder import check_replaceable, quiet_transformers, whole_folder


def build_policy(config: BuildConfig, path: Path | str, seed: int) -> None:
    """Write a new, randomly initialised policy and its tokenizer as a Hugging Face folder at `path`, replacing an older
    model there. Equal configs and seeds give equal bytes. Raises ModelFolderError if `path` is no folder, or holds
    files that are no part of a model; RecipeError if the memory has no room for the policy."""
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
    with torch.device("meta"):
        size = sum(4 * one.numel() for one in AutoModelForCausalLM.from_config(architecture).parameters())
    if size > (available := available_memory()):
        found = f"a model of {size / 2**30:,.2f} GiB in float32, and {available / 2**30:,.2f} GiB are available"
        raise RecipeError([Problem("model.build", found, "build a smaller one, or give model.path")])
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(architecture, dtype=torch.float32)
    check_replaceable(Path(path))
    with whole_folder(Path(path)) as folder, quiet_transformers():
        model.save_pretrained(folder)
        character_tokenizer(vocabulary, config.context_length).save_pretrained(folder)


def character_tokenizer(vocabulary: dict[str, int], context_length: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character, for at most `context_length` tokens. It has no unknown token:
    encoding a character outside of the vocabulary raises an error."""
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
