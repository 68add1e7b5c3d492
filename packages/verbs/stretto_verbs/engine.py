"""`stretto.Engine`: sampling completions from a policy, whose weights may be updated meanwhile."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

from msgspec.structs import replace

from stretto.core.errors import DataError, Problem, RecipeError, RefusedRequest, nearest
from stretto.core.records import Completion, GenerateRequest, Sampling, derive_seed
from stretto.doors.mistakes import shown
from stretto.engine.config import EngineConfig
from stretto.engine.native.engine import NativeEngine
from stretto.loop.config import DeadlinesConfig
from stretto.model.decode.policy import CACHED_ATTENTION
from stretto.model.hf.grammar import Grammars
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto.rollout.controller import Ticket
from stretto.trainer.config import LoraConfig
from stretto_verbs.arguments import (
    COUNT,
    LIST,
    MOST_TOKENS,
    NUMBER,
    SEEDS,
    WHOLE,
    ArgumentKind,
    Asked,
    check,
    checked,
    instance,
    plain,
    prompt_of,
    prompts_of,
)
from stretto_verbs.background import await_end, background
from stretto_verbs.completion import TextCompletion, mark_of
from stretto_verbs.ledger import TURN, FolderLedger, TicketsInFlight, turn_seeds
from stretto_verbs.models import MODEL, Lora, PolicyWeights, SharedModel, check_base, lora_of
from stretto_verbs.source import SourceApart, SourceHere, check_place

_END_SECONDS = 7.0
_LEDGER = instance(FolderLedger, "a stretto.Ledger").or_none
_WEIGHTS = instance(PolicyWeights, "what `weights` of a stretto.Trainer returns")
_SETTINGS: Mapping[str, ArgumentKind] = {
    "max_tokens": WHOLE,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": WHOLE,
    "min_p": NUMBER,
    "stop": ArgumentKind("a text, or a list of texts", lambda one: isinstance(one, str) or _are(one, str)),
    "stop_token_ids": ArgumentKind("a list of token ids", lambda one: _are(one, Integral)),
    "grammar": instance(str, "a text"),
    "top_logprobs": WHOLE,
}
_CHAT = 'a conversation is a list of messages such as {"role": "user", "content": "3+4="}'

#: The sampler behind an engine: the native engine in this process, or engines in processes of their own.
CompletionSource = SourceHere | SourceApart


class SamplingSettings(TypedDict, total=False):
    """Keyword arguments of `Engine.sample`, which describes them; all are optional."""

    max_tokens: int  # default 256
    temperature: float  # default 1; 0 always takes the most likely token
    top_p: float
    top_k: int
    min_p: float
    stop: str | Sequence[str]  # texts that end a completion
    stop_token_ids: Sequence[int]  # tokens that end a completion; default: the model's end-of-sequence tokens
    grammar: str
    top_logprobs: int  # number of most likely tokens to return at each position


class LocalEngine:
    """Samples completions from the policy of a Hugging Face folder, in this process or in processes of its own.

    Example::

        engine = stretto.Engine.load("model")
        for completion in engine.generate(["3+4=", "9-2="], max_tokens=8, temperature=0.7, seed=1):
            print(completion.text, sum(completion.logprobs))
        later = engine.submit("3+4=", n=4, max_tokens=8)  # goes on while this program does something else
        print(len(later.result()), engine.version)

    A ticket of `Scheduler.admit` may be given in place of a prompt; its seeds are used. If the engine has the
    scheduler's ledger, sampled tokens are recorded while a ticket is sampled, and sampling continues after them once a
    killed program has been started again. The same holds for the turns of a conversation, sampled with the argument
    `turn`.
    """

    def __new__(cls, *given: Any, **named: Any) -> Self:
        if given and MODEL.fits(given[0]):
            raise RecipeError([Problem("Engine", shown(given[0]), "write stretto.Engine.load(...)")])
        return super().__new__(cls)

    def __init__(
        self, source: CompletionSource, tokenizer: Tokenizer, folder: Path, ledger: FolderLedger | None = None
    ) -> None:
        self._source, self.tokenizer = source, tokenizer
        self._base: Path | None = folder  # of the weights that adapters are added to
        self._mark = mark_of(tokenizer)
        self._requests, self._seed = 0, turn_seeds()
        self._tickets = None if ledger is None else TicketsInFlight(source.engines, ledger)
        keeping = None if self._tickets is None else background().start(self._tickets.keep())
        self._end = weakref.finalize(self, _end, source, keeping)

    @classmethod
    def load(
        cls,
        model: str | Path | SharedModel,
        *,
        lora: Lora = None,
        apart: bool = False,
        ledger: FolderLedger | None = None,
        deadlines: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Self:
        """Load an engine.

        Args:
            model: a model folder, or a `stretto.SharedModel`: one model in memory that several engines share.
            lora: for a shared model: the rank of the adapters that `update` will bring, or their settings.
            ledger: of the scheduler whose tickets are sampled; None: none. After a kill, sampling of a ticket continues
                after its recorded tokens; the tokens of the last one or two seconds are lost, and all top
                log-probabilities.
            apart: run the engine in a process of its own. Several engines (`count`) and servers of other makes
                (`kind="vllm"`, `python=...`; docs/how_to/servers.md) always run so.
            deadlines: keys of a recipe's section ``[deadlines]``, for engines in processes of their own.
            **settings: keys of a recipe's section ``[engine]``, such as ``slots``.

        Raises:
            DataError: an argument has the wrong type.
            ModelFolderError: the folder cannot be loaded.
            RecipeError: a setting is invalid, cannot be combined with another, or needs a package that is not
                installed.
            RoleError: an engine in a process of its own did not start.
        """
        check("Engine.load", model=(model, MODEL), ledger=(ledger, _LEDGER))
        config = checked(settings, "Engine.load", EngineConfig)
        waits = checked(deadlines or {}, "Engine.load: deadlines", DeadlinesConfig)
        apart = apart or config.count > 1 or config.kind != "native"
        adapters = lora_of(lora, "Engine.load: lora")
        check_place(config, model, apart=apart, lora=adapters is not None)
        if isinstance(model, SharedModel):
            source = SourceHere(_beside(model, adapters, config), fixed=adapters is None)
            return cls(source, model.tokenizer, model.folder, ledger)
        folder = Path(model).expanduser()
        tokenizer = load_tokenizer(folder)
        if apart:
            return cls(SourceApart(folder, config, waits), tokenizer, folder, ledger)
        return cls(SourceHere(NativeEngine.load(folder, config)), tokenizer, folder, ledger)

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token; 0: the weights of the model folder."""
        return background().call(self._source.version())

    def update(self, weights: PolicyWeights) -> int:
        """Load new weights, and wait until every engine has them; returns their version. Completions that are being
        sampled continue with the new weights from their next token on.

        Raises:
            DataError: `weights` is not from a trainer, from one of another tokenizer, or adapters to another model; or
                this engine has a shared model without adapters.
            RefusedRequest: the weights are older than those in use, or (for engines apart) other ones of their version.
            TornPublication: the weights belong to another model.
            EngineLost: the engine is closed.
        """
        check("update", weights=(weights, _WEIGHTS))
        if weights.tokenizer and weights.tokenizer != self._mark:
            remedy = "load engine and trainer from the same model folder"
            raise DataError([Problem("update", "these weights are of a model with another tokenizer", remedy)])
        base = check_base(weights, self._base)
        background().call(self._source.update(weights))
        self._base = base
        return weights.version

    def sample(
        self,
        prompt: Asked | Ticket,
        n: int = 1,
        *,
        seed: int | None = None,
        seeds: Sequence[int] | None = None,
        turn: tuple[Ticket, int] | None = None,
        **sampling: Unpack[SamplingSettings],
    ) -> list[TextCompletion]:
        """Sample `n` completions of one prompt; waits until all have ended.

        Args:
            prompt: a text, token ids, or a ticket of a scheduler.
            n: number of completions.
            seed: makes the completions reproducible; None: a random seed.
            seeds: one seed for each completion, in place of `n` and `seed`.
            turn: a ticket and the index of one of its trajectories, if this is a turn of that trajectory: `prompt` is
                then the whole conversation before the turn, from the ticket's prompt on, and the seed is the ticket's.
                Sampling the same turn a second time gives another completion.
            **sampling: `max_tokens` (256), `temperature` (1; 0 always takes the most likely token), `top_p`, `top_k`,
                `min_p`, `stop` (texts that end a completion), `stop_token_ids` (default: the model's end-of-sequence
                tokens), `grammar` (not for training), `top_logprobs` (number of most likely tokens to return at each
                position; not with `turn`).

        Raises:
            DataError: the prompt has characters that the tokenizer does not know, an argument has the wrong type, or a
                setting does not exist.
            RefusedRequest: the prompt is neither text nor token ids, a number is out of range, the prompt does not fit
                into the context, or arguments cannot be combined.
            EngineLost: the engine is closed, or its last update failed halfway.
            StrettoError: the model's logits are not finite.
        """
        return background().call(self._sampled(self._asked(prompt, n, seed, seeds, turn, sampling), turn))

    def submit(
        self,
        prompt: Asked | Ticket,
        n: int = 1,
        *,
        seed: int | None = None,
        seeds: Sequence[int] | None = None,
        turn: tuple[Ticket, int] | None = None,
        **sampling: Unpack[SamplingSettings],
    ) -> Future[list[TextCompletion]]:
        """Start sampling as `sample` does, without waiting; returns a future of the completions. Invalid arguments
        raise at once, all other errors by the future. In a coroutine, wait for it with ``await
        asyncio.wrap_future(engine.submit(...))``."""
        return background().start(self._sampled(self._asked(prompt, n, seed, seeds, turn, sampling), turn))

    async def _sampled(self, request: GenerateRequest, turn: tuple[Ticket, int] | None) -> list[TextCompletion]:
        """Sample the completions of a request in the order of its seeds; journaled, or read from the journal, if the
        ledger has their ticket. `turn`: one completion, a turn of that trajectory, with its seed."""
        if self._tickets is not None and turn is not None and turn[0].group_id in self._tickets:
            return self._texts([request], [await self._tickets.turn(*turn, request)])
        if self._tickets is not None and request.id in self._tickets:
            return self._texts([request], await self._tickets.generate(request))
        if turn is None:
            return self._texts([request], await self._source.generate([request]))
        with self._seed(*turn, request.prompt_token_ids) as seed:
            return self._texts([request], await self._source.generate([replace(request, seeds=(seed,))]))

    def _asked(
        self,
        prompt: Any,
        n: int,
        seed: int | None,
        seeds: Sequence[int] | None,
        turn: tuple[Ticket, int] | None,
        sampling: SamplingSettings,
    ) -> GenerateRequest:
        """Check the arguments of `sample`; returns the request. RefusedRequest for seeds beside a ticket or a turn, or
        given twice. With a ledger, the request of a ticket has the ticket's group id."""
        check("sample", n=(n, COUNT), seed=(seed, WHOLE.or_none), seeds=(seeds, SEEDS.or_none))
        check("sample", turn=(turn, TURN.or_none))
        if sampling.get("grammar") and (turn is not None or isinstance(prompt, Ticket)):
            remedy = "leave it out: the trainer does not know which tokens it allowed"
            raise RefusedRequest("grammar", "beside a ticket", remedy)
        alone = n == 1 and seed is None
        if turn is not None:
            if seeds is not None or not alone or isinstance(prompt, Ticket) or "top_logprobs" in sampling:
                told, remedy = "beside a ticket, n, seed, seeds or top_logprobs", "leave these out: it brings its seed"
                raise RefusedRequest("turn", told, remedy)
            tokens = self._tokens(prompt_of("prompt", prompt))
            ticket, member = turn
            return self._request(tokens, [ticket.seeds[member]], sampling)
        if not isinstance(prompt, Ticket):
            if seeds is not None and not alone:
                raise RefusedRequest("seeds", "beside n or seed", "leave these out: seeds are one for each completion")
            return self._request(prompt_of("prompt", prompt), _seeds(n, seed, seeds), sampling)
        if seeds is not None or not alone:
            raise RefusedRequest("prompt", "a ticket, beside n, seed or seeds", "leave these out: it brings its seeds")
        request = self._request(prompt.prompt.token_ids, prompt.seeds, sampling)
        return request if self._tickets is None else replace(request, id=prompt.group_id)

    def generate(
        self,
        prompts: Asked | Sequence[Asked],
        *,
        max_tokens: int = MOST_TOKENS,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> list[TextCompletion]:
        """Sample one completion for each prompt; returns them in the order of the prompts.

        Args:
            prompts: one prompt, or a list; a prompt is a text, or token ids (a list, or an array of numpy or torch).
            temperature: 0 always takes the most likely token.
            top_p: sample only from the most likely tokens that together have this probability; 1: from all.
            top_k: number of most likely tokens that are kept; 0: all.
            min_p: least probability of a token, as a fraction of the most likely token's.
            seed: makes the completions reproducible; None: a random seed.
            stop: a text that ends a completion, or a list of texts.

        Raises:
            DataError: a prompt has characters that the tokenizer does not know, or an argument has the wrong type.
            RefusedRequest: a prompt is neither text nor token ids, a number is out of range, or a prompt does not fit
                into the context.
            EngineLost: the engine is closed, or its last update failed halfway.
            StrettoError: the model's logits are not finite.
        """
        sampling = SamplingSettings(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, stop=stop
        )
        check("generate", seed=(seed, WHOLE.or_none))
        asked = prompts_of(prompts)
        seeds = _seeds(len(asked), seed, None)
        requests = [self._request(prompt, (own,), sampling) for prompt, own in zip(asked, seeds, strict=True)]
        return self._texts(requests, background().call(self._source.generate(requests)) if requests else [])

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        *,
        template_arguments: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> list[TextCompletion]:
        """Sample the next message of each conversation, rendered by the chat template of the model folder. Returns one
        completion for each, in their order.

        Args:
            messages: one conversation, or a list; a conversation is a list of messages with ``role`` and ``content``.
            template_arguments: arguments of the chat template, such as ``{"enable_thinking": False}``; None: none.
            **settings: as for `generate`.

        Raises:
            ModelFolderError: the tokenizer has no chat template.
            DataError: the template refuses the messages, or as for `generate`.
            RefusedRequest: `messages` is not as described, or as for `generate`.
            EngineLost, StrettoError: as for `generate`.
        """
        if not isinstance(messages, list | tuple):
            raise RefusedRequest("messages", f"{shown(messages)} is of the type {type(messages).__name__}", _CHAT)
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if one else list(messages)
        for at, conversation in enumerate(conversations):
            whole = isinstance(conversation, list | tuple) and len(conversation) > 0
            if not whole or not all(isinstance(said, Mapping) for said in conversation):
                raise RefusedRequest("messages" if one else f"messages[{at}]", shown(conversation), _CHAT)
        given = dict(template_arguments or {})
        return self.generate([self.tokenizer.encode_chat(one, **given) for one in conversations], **settings)

    def score(self, texts: Asked | Sequence[Asked]) -> list[tuple[float, ...]]:
        """Compute the log-probability of every token but the first of each text, under the current weights at
        temperature 1. Returns one tuple for each text; it is empty for a text of one token.

        Args:
            texts: one text, or a list; each is a text or token ids, as for `generate`.

        Raises:
            RefusedRequest: a text is empty or longer than the context, has a token id outside of the vocabulary, or is
                neither text nor token ids.
            DataError, EngineLost: as for `generate`.
        """
        tokens = [self._tokens(text) for text in prompts_of(texts)]
        return background().call(self._source.score(tokens))

    def close(self) -> None:
        """Abort all completions, end the engine's processes, waiting for this up to 7 s (longer: a warning is logged),
        and free the memory of an engine in this process. Later calls raise EngineLost; a second `close` does nothing.
        Raises DeadlineExceeded or OSError if a process cannot be ended, or its folder not be removed."""
        ending = self._end()
        if ending is not None and not background().here:
            await_end(ending, "an engine", _END_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tokens(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _request(
        self, prompt: str | tuple[int, ...], seeds: Sequence[int], settings: SamplingSettings
    ) -> GenerateRequest:
        """Check the settings, and return the request for one completion per seed, under a new id. Raises DataError if a
        setting does not exist or has the wrong type, or the tokenizer does not know a character; RefusedRequest for
        filters that the engine's log-probabilities do not follow."""
        _check_settings(settings)
        given: dict[str, Any] = {"max_tokens": MOST_TOKENS, "stop_token_ids": self.tokenizer.eos_token_ids, **settings}
        given = {name: plain(value) for name, value in given.items()}
        stop, likeliest = given.pop("stop", ()), given.pop("top_logprobs", 0)
        given["stop_token_ids"] = tuple(map(plain, given["stop_token_ids"]))
        sampling = Sampling(stop=(stop,) if isinstance(stop, str) else tuple(stop), **given)
        self._source.check_sampling(sampling)
        self._requests += 1
        name, tokens = str(self._requests), self._tokens(prompt)
        return GenerateRequest(name, tokens, tuple(seeds), sampling, top_logprobs=likeliest)

    def _texts(self, requests: Sequence[GenerateRequest], found: Sequence[Completion]) -> list[TextCompletion]:
        """Convert completions, in the order of the requests and of their seeds."""
        places = {request.id: at for at, request in enumerate(requests)}
        ordered = sorted(found, key=lambda one: (places[one.request], one.member))
        return [self._text(one, bool(requests[places[one.request]].sampling.grammar)) for one in ordered]

    def _text(self, found: Completion, constrained: bool) -> TextCompletion:
        return TextCompletion(
            text=self.tokenizer.decode(found.token_ids),
            token_ids=found.token_ids,
            logprobs=found.behavior_logprobs,
            stop_reason=found.stop_reason,
            versions=found.versions,
            interrupted=found.interrupted,
            top_logprobs=found.top_logprobs,
            tokenizer=self._mark,
            constrained=constrained,
        )


def _are(given: object, kind: type) -> bool:
    return isinstance(given, Sequence) and LIST.fits(given) and all(isinstance(one, kind) for one in given)


def _end(source: CompletionSource, keeping: Future[None] | None) -> Future[None] | None:
    """Begin to end an engine and `keeping`, its journal; returns a future of the end, None if it has ended. Does not
    wait, since the garbage collector may call this in any thread."""
    if keeping is not None:
        keeping.cancel()
    return source.close()


def _beside(model: SharedModel, lora: LoraConfig | None, config: EngineConfig) -> NativeEngine:
    """Create a native engine on the weights of a shared model, with adapters of its own (None: none). Their scale is 1
    (alpha = rank), since a trainer publishes B already scaled."""
    own = None if lora is None else lora.model_copy(update={"alpha": lora.rank})
    view, tokenizer = model.view(own, CACHED_ATTENTION), model.tokenizer
    return NativeEngine(view, config, detokenizer=lambda: tokenizer, grammars=partial(Grammars, lambda: tokenizer))


def _check_settings(settings: SamplingSettings) -> None:
    """Raise DataError if a sampling setting does not exist, or has the wrong type; names each of them."""
    if unknown := [name for name in settings if name not in _SETTINGS]:
        raise DataError([Problem(f"sample: {name}", "unknown key", nearest(name, _SETTINGS)) for name in unknown])
    check("sample", **{name: (value, _SETTINGS[name]) for name, value in settings.items()})


def _seeds(n: int, seed: int | None, seeds: Sequence[int] | None) -> tuple[int, ...]:
    """Return one seed for each completion: `seeds`, or `n` seeds derived from `seed` (None: a random one)."""
    if seeds is not None:
        return tuple(map(plain, seeds))
    first = secrets.randbits(63) if seed is None else seed
    return tuple(derive_seed(first, at) for at in range(n))
