"""Two real decoders, of the kinds that models have, with few tokens."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


class Decoder:
    """A tokenizer's backend as `model.hf.tokenizer.Tokenizer` uses it; counts the tokens that it decodes."""

    def __init__(self, backend: Tokenizer, end: str) -> None:
        self._backend = backend
        self.special_token_ids = frozenset({backend.get_vocab(with_added_tokens=True)[end]})
        self.longest = 0

    def decode(self, ids: Sequence[int], /) -> str:
        self.longest = max(self.longest, len(ids))
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def text_of(self, token: int, /) -> str | None:
        return self.decode((token,)) if isinstance(self._backend.decoder, decoders.ByteLevel) else None


def byte_level() -> tuple[Decoder, list[str]]:
    """Like Qwen and Llama 3: a token is any bytes, also a part of a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = [space.pre_tokenize_str(text)[0][0] for text in ("ab", "ba", " a", "aa", "€a", "\n\n")]
    euro = space.pre_tokenize_str("€")[0][0]
    words += [euro, euro[:2], euro[1:], "a" + euro[:1], euro[2:] + euro[:2]]
    names = [*alphabet, *dict.fromkeys(words)]
    names = [*dict.fromkeys(names)]
    backend = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return Decoder(backend, "</s>"), names


def byte_fallback() -> tuple[Decoder, list[str]]:
    """Like Llama 2 and Gemma: words with a mark for their space, and bytes for what has no token."""
    names = ["<unk>", "▁", "▁a", "a", "b", "▁b", "ab", "▁▁", "€", "<0xE2>", "<0x82>", "<0xAC>", "<0x61>", "<0xFF>"]
    names += ["\n"]
    backend = Tokenizer(models.BPE({name: at for at, name in enumerate(names)}, [], unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return Decoder(backend, "</s>"), names


KINDS = {"byte level": byte_level(), "byte fallback": byte_fallback()}
