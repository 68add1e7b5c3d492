"""Dimensions of a decoder-only transformer, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import AutoConfig

from stretto.core.records import Record
from stretto.model.hf.folder import quiet_transformers
from stretto.model.hf.inspection import ModelFolder

BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_PLAIN = ("llama", "mistral", "qwen2", "qwen3")


class ModelShape(Record, frozen=True):
    """Dimensions of a decoder-only transformer. `parameters` counts tied embeddings once. `plain`: its layers have
    Llama's shape (`model.packed.layer`).

    Example: Qwen2.5-7B is ``ModelShape(7_615_616_512, 28, 3584, 28, 4, 128, 152_064, tied=False)``.
    """

    parameters: int
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    plain: bool = False

    @property
    def embedding(self) -> int:
        """Number of weights of the embedding; the output matrix has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def body(self) -> int:
        """Number of weights without embedding and output matrix."""
        return self.parameters - self.embedding * (1 if self.tied else 2)

    @property
    def width(self) -> int:
        """Width of all attention heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together; values have the same width."""
        return self.kv_heads * self.head_dim

    @property
    def inner(self) -> int:
        """Inner width of a layer's MLP, estimated from the number of weights (three matrices per MLP); for a mixture of
        experts, the sum over all experts."""
        attention = 2 * self.hidden_size * (self.width + self.kv_width)
        return max(0, round((self.body / self.layers - attention) / (3 * self.hidden_size)))

    def cache_bytes(self, dtype: str) -> int:
        """Bytes of the KV cache for one token, in all layers."""
        return 2 * self.layers * self.kv_width * BYTES[dtype]


def shape_of_model(facts: ModelFolder) -> ModelShape:
    """Return the dimensions of the model in an inspected folder, which must still have its config.json."""
    with quiet_transformers():
        text = AutoConfig.from_pretrained(facts.path, local_files_only=True).get_text_config()
    return ModelShape(
        parameters=facts.parameters,
        layers=facts.layers,
        hidden_size=facts.hidden_size,
        heads=int(text.num_attention_heads),
        kv_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        vocab_size=facts.vocab_size,
        tied=bool(text.tie_word_embeddings),
        plain=text.model_type in _PLAIN,
    )
