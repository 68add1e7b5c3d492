"""`stretto.Engine`: a policy in this process, to try out its completions."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from stretto.core.errors import RefusedRequest, StrettoError
from stretto.core.records import GenerateRequest, Record, Sampling, derive_seed

if TYPE_CHECKING:
    from stretto.engine.native.engine import NativeEngine
    from stretto.model.hf.tokenizer import Tokenizer

#: A text, or token ids: a list, a tuple, or an array of numpy or torch.
Asked = Any
_PROMPT = "a prompt is a text, or a list of token ids; `chat` takes messages"
_CHAT = 'a conversation is a list of messages such as {"role": "user", "content": "3+4="}'


class TextCompletion(Record, frozen=True):
    """Completion of a prompt. `text` has no special tokens; `logprobs` are of the distribution sampled from.

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
        """Load a model folder; `settings` are those of a recipe's section ``[engine]``, such as ``slots``.

        Raises:
            ModelFolderError: the folder cannot be loaded.
            RecipeError: a setting is invalid.
        """
        from stretto.engine.config import EngineConfig
        from stretto.engine.native.engine import NativeEngine
        from stretto.launch.preflight.engines import check_embedded
        from stretto.launch.recipe.recipe import validated
        from stretto.model.hf.tokenizer import load_tokenizer

        config = validated(settings, "Engine.load", EngineConfig)
        check_embedded(config)
        folder = Path(folder).expanduser()
        return cls(NativeEngine.load(folder, config), load_tokenizer(folder))

    def generate(
        self,
        prompts: Asked | Sequence[Asked],
        *,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> list[TextCompletion]:
        """One completion for each prompt, in their order.

        Args:
            prompts: one, or several; a prompt is a text, or token ids, which are taken as they are (also as an array of
                numpy or torch).
            temperature: 0 takes the likeliest token.
            top_p, top_k, min_p: as in a recipe's section ``[sampling]``.
            seed: equal seeds give equal completions; without one, each call gives other ones.
            stop: a text that ends a completion, or several.

        Raises:
            DataError: a prompt holds characters that the tokenizer does not know.
            RefusedRequest: a prompt is something else, a number is out of its range, or a prompt has no room in the
                context.
            StrettoError: the model's logits are not finite.
        """
        from stretto.engine.native.sampling import BrokenLogits

        sampling = Sampling(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
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

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        *,
        template_arguments: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> list[TextCompletion]:
        """One completion for each conversation, by the chat template of the model folder.

        Args:
            messages: one conversation, or several; each is a list of messages with ``role`` and ``content``.
            template_arguments: given to the chat template, such as ``{"enable_thinking": False}``.
            **settings: as for `generate`.

        Raises:
            ModelFolderError: the tokenizer has no chat template.
            DataError: the template refuses the messages.
            RefusedRequest: as for `generate`.
        """
        if not isinstance(messages, list | tuple):
            raise RefusedRequest("messages", f"{messages!r:.80} is of the type {type(messages).__name__}", _CHAT)
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if one else list(messages)
        for at, conversation in enumerate(conversations):
            whole = isinstance(conversation, list | tuple) and len(conversation) > 0
            if not whole or not all(isinstance(said, Mapping) for said in conversation):
                raise RefusedRequest("messages" if one else f"messages[{at}]", f"{conversation!r:.80}", _CHAT)
        given = dict(template_arguments or {})
        return self.generate([self._tokenizer.encode_chat(one, **given) for one in conversations], **settings)

    def _request(self, prompt: str | tuple[int, ...], seed: int, sampling: Sampling) -> GenerateRequest:
        tokens = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        self._requests += 1
        return GenerateRequest(id=str(self._requests), prompt_token_ids=tokens, seeds=(seed,), sampling=sampling)


def _prompts(given: Asked | Sequence[Asked]) -> list[str | tuple[int, ...]]:
    """Normalise the argument to a list of prompts; a text, or a list that begins with a token, is a single one.

    Raises:
        RefusedRequest: an item is no prompt.
    """
    plain = _plain(given)
    if isinstance(plain, str):
        return [plain]
    if not isinstance(plain, list | tuple):
        raise _no_prompt("prompts", given)
    if plain and isinstance(plain[0], Integral):
        return [_prompt("prompts", plain)]
    return [_prompt(f"prompts[{at}]", _plain(one)) for at, one in enumerate(plain)]


def _prompt(place: str, given: object) -> str | tuple[int, ...]:
    if isinstance(given, str):
        return given
    ids: list[Any] = [_plain(one) for one in given] if isinstance(given, list | tuple) else [None]
    if not all(isinstance(one, Integral) and not isinstance(one, bool) for one in ids):
        raise _no_prompt(place, given)
    return tuple(int(one) for one in ids)


def _plain(given: Any) -> Any:
    """An array of numpy or torch as lists of numbers."""
    return given.tolist() if hasattr(given, "tolist") else given


def _no_prompt(place: str, given: object) -> RefusedRequest:
    return RefusedRequest(place, f"{given!r:.80} is of the type {type(given).__name__}", _PROMPT)
