"""The source of completions of `stretto.Engine`: the native engine in this process, or engines in processes of their
own, native ones or servers of vLLM and SGLang. Both have the same methods.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from stretto.core.canary import TensorDigest, differing
from stretto.core.errors import DataError, EngineLost, Problem, RecipeError, RefusedRequest, StrettoError
from stretto.core.records import Completion, GenerateRequest, Partials, Sampling
from stretto.core.tasks import cancel_and_wait
from stretto.doors.loading import from_package
from stretto.engine.config import MAKES, EngineConfig, capabilities_of
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.generation import Feed, Generation
from stretto.engine.native.parameters import Parameters
from stretto.engine.wire import EngineSpec
from stretto.loop.config import DeadlinesConfig
from stretto.loop.engines.in_flight import Engines, InFlight
from stretto.loop.engines.pool import EnginePool
from stretto.model.hf.folder import inspect_model_folder, load_policy
from stretto.model.hf.skeleton import skeleton
from stretto.store import lock
from stretto.weights.folder import remove
from stretto.weights.mailbox import LORA_A
from stretto.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber, digest_of_tensor
from stretto_verbs.background import background, told_if_slow
from stretto_verbs.models import PolicyWeights, SharedModel, merged


class SourceHere:
    """Runs the native engine in the thread of `background`. All methods but `close` must be called in that thread."""

    def __init__(self, engine: NativeEngine, *, fixed: bool = False) -> None:
        """Start a task in the background thread that takes the engine's steps. `fixed`: its weights are also those of
        other engines and trainers, so that `update` refuses all others."""
        self._fixed = fixed
        self._running: Generation | None = Generation(engine)
        self._steps = background().start(_steps(self._running))

    @property
    def _generation(self) -> Generation:
        """What runs the engine. Raises the error with which it has ended, or EngineLost if it was closed."""
        if self._running is None or self._steps.done():
            if not self._steps.cancelled():
                self._steps.result()
            raise EngineLost("engine", "is closed; load another one")
        return self._running

    @property
    def engines(self) -> Engines:
        """This source as the `Engines` of a run: a call of `generate` takes one request, which may have prefixes."""
        return _OneAtATime(self)

    async def version(self) -> int:
        """Version of the weights that sample the next token."""
        return self._generation.engine.version

    def check_sampling(self, sampling: Sampling) -> None:
        """Do nothing: the log-probabilities of a native engine follow all settings."""

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Sample the completions of all requests, which begin in the same step; returns them in the order in which they
        end.

        Raises:
            RefusedRequest: a request is invalid; then none is sampled.
            EngineLost: the engine is closed, or the logits of a request are not finite.
        """
        return [completion async for completion in self.stream(requests)]

    async def stream(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[Completion]:
        """Sample the completions of all requests, which begin in the same step; yields each as it ends. Raises the
        errors of `generate`."""
        generation = self._generation
        await generation.prepare(requests)
        missing, feed = sum(len(request.seeds) for request in requests), Feed(generation.engine.name)
        generation.submit_to(feed, requests, every_token=False)
        try:
            while missing:
                _, ended, refused = await generation.next(feed)
                for completion in ended:
                    missing -= 1
                    yield completion
                for _, error in refused:
                    raise error
        finally:
            generation.end(feed)

    def partials(self, known: Mapping[str, Sequence[int]]) -> Partials:
        """Return the new tokens of unfinished completions, by request id and member. `known`: number of tokens already
        known of each member, by request id; others, and completions without new tokens, are left out."""
        return self._generation.partials(known)

    async def score(self, texts: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Compute the log-probabilities of all tokens but the first of each text (token ids). Raises RefusedRequest for
        a text that is empty, longer than the context or has tokens outside the vocabulary, and EngineLost if the engine
        is closed."""
        return await self._generation.score(texts)

    async def update(self, weights: PolicyWeights) -> None:
        """Load new weights; completions that are being sampled continue with them.

        Raises:
            DataError: the weights of this engine never change.
            RefusedRequest: the weights are older than those in use.
            TornPublication: the weights belong to another model.
            EngineLost: the engine is closed.
        """
        generation = self._generation
        if self._fixed:  # a copy into them would change the base of every trainer and engine of the shared model
            told, remedy = "this engine samples by the weights of a shared model", "load it with the trainer's lora"
            raise DataError([Problem("update", f"{told}, which never change", remedy)])
        generation.load(weights.version, weights.tensors)

    def close(self) -> Future[None]:
        """Begin to end the engine; returns a future of its end, when model and cache are freed. May be called in any
        thread, also by the garbage collector."""
        self._steps.cancel()
        return background().start(self._let_go())

    async def _let_go(self) -> None:
        self._running = None


async def _steps(generation: Generation) -> None:
    with suppress(asyncio.CancelledError):  # its traceback would hold the engine for as long as the task is known
        await generation.run()


class _OneAtATime:
    """Adapter from `SourceHere` to the engines of a run (satisfies `loop.engines.in_flight.Engines`)."""

    def __init__(self, source: SourceHere) -> None:
        self._source = source

    def generate(self, request: GenerateRequest, /, *, least: int = 0) -> AsyncIterator[Completion]:
        return self._source.stream([request])

    async def partials(self, known: Mapping[str, Sequence[int]], patience: float | None) -> Partials:
        return self._source.partials(known)


_GRACE_SECONDS = 1.0
_FILTERS = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}  # each with its value for none


def _digests_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorDigest]:
    return {name: digest_of_tensor(one) for name, one in tensors.items()}


class SourceApart:
    """One or several engines in processes of their own, with the methods of `SourceHere`. An engine that dies is
    replaced, and its completions start again from their first token."""

    def __init__(self, model: Path, config: EngineConfig, deadlines: DeadlinesConfig) -> None:
        """Start the engines; returns when all are ready. After an error all are ended; logs stay. `model`: model
        folder.

        Raises:
            ModelFolderError: the folder has no valid config.
            RoleError: an engine did not start; the message names its log.
        """
        # Servers of other makes load only whole policies: the base weights are kept, to add adapters to them. So are
        # those of a native engine once adapters follow a whole policy: one that replaces it loads the newest version
        # alone, beside the weights of the model folder.
        self._base = dict[str, Tensor]() if config.kind == "native" else _parameters(model)
        self._shapes = Parameters(skeleton(model))
        self._folder, self._held = lock.temporary_folder()  # when the model is known to be one
        self._name = self._folder.name.removeprefix("stretto-")
        self._publisher = SharedMemoryPublisher(self._name, self._folder)
        specs = [self._spec(model.resolve(), config, number, deadlines) for number in range(config.count)]
        self._pool = EnginePool(specs, self._folder, deadlines, config.role, config.load_interval, kind=config.kind)
        self._in_flight = InFlight(self._pool, journal=None)
        self._kind = config.kind
        self._is_whole = False  # the newest publication is a whole policy, to which adapters would be added
        self._tasks: list[asyncio.Future[Any]] = []
        self._changing = asyncio.Lock()
        self._digests = dict[str, TensorDigest]()  # of the weights of the last `update`; empty before the first
        self._model, self._closed = model, False
        try:
            with told_if_slow(f"Engine.load, {config.count} of kind {config.kind!r}", self._folder):
                background().call(self._start())
        except BaseException:
            background().call(self._stop(keep_logs=True))
            raise

    def _spec(self, model: Path, config: EngineConfig, number: int, deadlines: DeadlinesConfig) -> EngineSpec:
        return EngineSpec(
            name=f"engine-{number}",
            address=f"unix:{self._folder}/engine-{number}.sock",
            model=str(model),
            mailbox=self._name,
            mailbox_folder=str(self._folder),
            config=config.model_dump_json(),
            threads=config.threads,
            publication_seconds=0.0 if config.kind == "native" else deadlines.start,
            server=config.addresses[number] if number < len(config.addresses) else None,
            scratch=str(self._folder / f"engine-{number}"),
            token_seconds=deadlines.answer / 2,
            load_seconds=deadlines.load,
            start_seconds=deadlines.start,
        )

    async def _start(self) -> None:
        """Start the engines and the tasks that replace and update them; returns when all are ready."""
        if self._base:
            await asyncio.to_thread(self._publisher.publish, 0, self._base.items())
        await self._pool.start(0)
        loops: list[Coroutine[Any, Any, Any]] = [self._pool.supervise(), self._pool.keep_loaded()]
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    @property
    def engines(self) -> Engines:
        return self._pool

    async def version(self) -> int:
        return self._pool.published

    def check_sampling(self, sampling: Sampling) -> None:
        """Raise RefusedRequest for a filter that the log-probabilities of this make of engine do not follow: they would
        be those of another policy than the one that sampled."""
        if self._kind == "native" or not sampling.filtered or (make := capabilities_of(self._kind)).filtered_logprobs:
            return
        for name, off in _FILTERS.items():
            if (value := getattr(sampling, name)) != off:
                found = f"{value:g}, and the log-probabilities of {make.name} do not follow it"
                raise RefusedRequest(name, found, f"{off:g}, or another kind of engine")

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        self._check_open()
        return [one for found in await asyncio.gather(*map(self._generated, requests)) for one in found]

    async def _generated(self, request: GenerateRequest) -> list[Completion]:
        """Sample the completions of one request, in the order of its members."""
        try:
            return [completion async for completion in self._in_flight.generate(request)]
        finally:
            self._in_flight.forget(request.id)

    async def score(self, texts: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        self._check_open()
        return await self._pool.score(texts)

    async def update(self, weights: PolicyWeights) -> None:
        """Publish new weights, and wait until all engines have loaded them. Weights that are in use are not loaded
        again.

        Raises:
            RefusedRequest: the weights are older than those in use, or other ones of the same version.
            TornPublication: the weights belong to another model.
            EngineLost: the engine is closed.
        """
        self._check_open()
        async with self._changing:
            if weights.version < (used := self._pool.published):
                raise RefusedRequest("version", str(weights.version), f"at least {used}, the version in use")
            adapters = any(name.endswith(LORA_A) for name in weights.tensors)
            if adapters and self._is_whole:
                self._base = await asyncio.to_thread(self._published, used)
                self._is_whole = False
            tensors = merged(self._base, weights.tensors) if self._base else weights.tensors
            self._shapes.check(weights.version, tensors)  # refusing engines would be replaced for ever
            if weights.version == used:  # an engine does not load a version again
                if not await asyncio.to_thread(self._are_in_use, tensors):
                    told, allowed = f"{used}, which is in use with other weights", f"a version above {used}"
                    raise RefusedRequest("version", told, allowed)
            else:
                publish = self._publisher.publish
                self._digests = await asyncio.to_thread(publish, weights.version, tensors.items())
                self._pool.publish(weights.version)
                self._is_whole = not adapters
            await self._pool.reach(weights.version)

    def _published(self, version: int) -> dict[str, Tensor]:
        """Copy the weights that were published last, as `version`."""
        found = SharedMemorySubscriber(self._name, self._folder).load(version)
        return {name: tensor.clone() for name, tensor in found.items()}

    def _are_in_use(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether weights of the version in use are those that were published last, or, before the first `update`,
        those of the model folder."""
        known = self._digests
        if not known:
            base = self._base or _parameters(self._model)
            known, tensors = _digests_of(base), merged(base, tensors)
        found = _digests_of(tensors)
        return not (known.keys() ^ found.keys() or differing(known, found))

    def close(self) -> Future[None] | None:
        """Begin to end the processes; returns a future of their end, None if it was called before. May be called in any
        thread."""
        if self._closed:
            return None
        self._closed = True
        return background().start(self._stop())

    async def _stop(self, *, keep_logs: bool = False) -> None:
        """End the processes, and remove published weights and the folder of sockets and logs; with `keep_logs` the
        folder stays, without its lock."""
        await cancel_and_wait(self._tasks)
        try:
            await self._pool.stop(_GRACE_SECONDS)
        finally:
            remove(self._name, self._folder)
            lock.let_go(self._folder, self._held, kept=keep_logs)

    def _check_open(self) -> None:
        """Raise EngineLost if this source was closed, or the error with which an engine could not be replaced."""
        if self._closed:
            raise EngineLost("engine", "is closed; load another one")
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error if isinstance(error, StrettoError) else StrettoError(str(error)) from error


def _parameters(folder: Path) -> dict[str, Tensor]:
    """Load the parameters of a model folder, by name."""
    return {name: parameter.detach() for name, parameter in load_policy(folder).named_parameters()}


def check_place(config: EngineConfig, model: str | Path | SharedModel, *, apart: bool, lora: bool) -> None:
    """Check that settings of `Engine.load` can be combined, and that the package and the interpreter of the engine's
    kind are there. `apart`: the engine has a process of its own; `lora`: adapters are asked for. Raises RecipeError,
    which has each mistake; for a server of another make also if it does not compute the model."""
    found, shared = list[Problem](), isinstance(model, SharedModel)
    if shared and apart:
        told = "a model in the memory of this process"
        found.append(Problem("Engine.load: model", told, "give its folder, or leave `apart`, `count` and `kind` out"))
    if isinstance(model, SharedModel):
        for name, own in (("dtype", model.dtype), ("device", model.device)):
            if name in config.model_fields_set and (given := getattr(config, name)) not in ("auto", own):
                told = f"{given!r}, and the shared model is {'in' if name == 'dtype' else 'on'} {own}"
                found.append(Problem(f"Engine.load: {name}", told, "leave it out, or give the folder"))
    if lora and not shared:
        remedy = "leave it out: the engine takes adapters of any rank"
        found.append(Problem("Engine.load: lora", "is for a shared model", remedy))
    of_servers = [name for name in ("python", "arguments", "addresses") if getattr(config, name)]
    if config.kind == "native":
        told, remedy = "is given, and the engine is stretto's own", 'give kind="vllm" or "sglang" with it'
        found += [Problem(f"Engine.load: {name}", told, remedy) for name in of_servers]
    elif find_spec("stretto_servers") is None:
        told, remedy = f"{config.kind!r} is part of a package that is not installed", "pip install stretto-servers"
        found.append(Problem("Engine.load: kind", told, remedy))
    elif config.python is None and not config.addresses and (make := capabilities_of(config.kind)).packages:
        remedy = f"name the interpreter of an environment that has {make.needed}, or give addresses"
        found.append(Problem("Engine.load: python", f'missing, and kind is "{config.kind}"', remedy))
    elif config.python is not None and not os.access(config.python, os.X_OK):
        found.append(Problem("Engine.load: python", f"{config.python!r} is no program", "give the path of a Python"))
    if found:
        raise RecipeError(found)
    if config.kind != "native" and not isinstance(model, SharedModel):
        check_engine = from_package("stretto_servers.keys:check_engine", MAKES.key)
        check_engine(config, inspect_model_folder(Path(model).expanduser()))
