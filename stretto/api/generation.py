"""`stretto.Engine`: a policy in this process, for a look at what it says."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from stretto.core.errors import StrettoError
from stretto.core.records import GenerateRequest, Record, Sampling, derive_seed

if TYPE_CHECKING:
    from stretto.engine.native.engine import NativeEngine
    from stretto.model.hf.tokenizer import Tokenizer


class TextCompletion(Record, frozen=True):
    """What followed a prompt; `text` is without special tokens, `logprobs` are of the distribution sampled from.

    Example::

        completion = stretto.Engine.load("model").generate("3+4=", max_tokens=8)[0]
        assert len(completion.token_ids) == len(completion.logprobs)
        print(completion.text, completion.stop_reason)
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: str  # "stop": it came to its end; "length": it was cut off


class LocalEngine:
    """The native engine with the policy of a Hugging Face folder, in this process.

    Example::

        engine = stretto.Engine.load("model")
        for completion in engine.generate(["3+4=", "9-2="], max_tokens=8, temperature=0.7, seed=1):
            print(completion.text, sum(completion.logprobs))
    """

    def __init__(self, engine: NativeEngine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._requests = 0

    @classmethod
    def load(cls, folder: str | Path, **settings: Any) -> Self:
        """An engine for a model folder; `settings` are those of a recipe's section ``[engine]``, such as ``slots``.

        Raises:
            ModelFolderError: the folder cannot be loaded.
            RecipeError: a setting is not what it should be.
        """
        from stretto.engine.config import EngineConfig
        from stretto.engine.native.engine import NativeEngine
        from stretto.launch.preflight.servers import check_embedded
        from stretto.launch.recipe.recipe import validated
        from stretto.model.hf.tokenizer import load_tokenizer

        config = validated(settings, "Engine.load", EngineConfig)
        check_embedded(config)
        folder = Path(folder).expanduser()
        return cls(NativeEngine.load(folder, config), load_tokenizer(folder))

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        max_tokens: int = 256,
        temperature: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> list[TextCompletion]:
        """One completion for each prompt, in their order.

        Args:
            prompts: one, or several; a prompt is a text, or token ids, which are taken as they are.
            temperature: 0 takes the likeliest token.
            seed: equal seeds give equal completions; without one, each call gives other ones.
            stop: a text that ends a completion, or several.

        Raises:
            DataError: a prompt holds characters that the tokenizer does not know.
            RefusedRequest: a number is out of its range, or a prompt has no room in the context.
            StrettoError: the model's logits are not finite.
        """
        from stretto.engine.native.sampling import BrokenLogits

        sampling = Sampling(
            max_tokens=max_tokens,
            temperature=temperature,
            stop_token_ids=self._tokenizer.eos_token_ids,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        )
        asked = _prompts(prompts)
        seed = secrets.randbits(63) if seed is None else seed
        found: dict[str, TextCompletion] = {}
        requests = [self._request(prompt, derive_seed(seed, at), sampling) for at, prompt in enumerate(asked)]
        try:
            for request in requests:
                self._engine.add(request)
            while len(found) < len(requests):
                for done in self._engine.step():
                    text = self._tokenizer.decode(done.token_ids)
                    found[done.request] = TextCompletion(text, done.token_ids, done.behavior_logprobs, done.stop_reason)
        except BrokenLogits as broken:
            self._engine.give_up([request.id for request in requests])
            raise StrettoError(str(broken)) from None
        finally:
            for request in requests:
                if request.id not in found:
                    self._engine.abort(request.id)
        return [found[request.id] for request in requests]

    def _request(self, prompt: str | Sequence[int], seed: int, sampling: Sampling) -> GenerateRequest:
        tokens = self._tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        self._requests += 1
        return GenerateRequest(id=str(self._requests), prompt_token_ids=tokens, seeds=(seed,), sampling=sampling)


def _prompts(given: str | Sequence[int] | Sequence[str | Sequence[int]]) -> list[str | Sequence[int]]:
    """All prompts; a text, or a list that begins with a token, is one."""
    one = isinstance(given, str) or (len(given) > 0 and isinstance(given[0], int))
    return [cast("str | Sequence[int]", given)] if one else list(cast("Sequence[str | Sequence[int]]", given))
