"""Faults for the engines of a run, which report success all the same, or fail. `tests.launch.poverty.sabotaged` plants
one in the process of a command before it begins; the roles are forked from that process, and have it too."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from stretto.core.canary import Challenge, Loaded
from stretto.engine.config import EngineConfig
from stretto.engine.native import engine as native
from stretto.engine.native.engine import NativeEngine
from stretto.engine.native.generation import Generation
from stretto.engine.native.parameters import Parameters
from stretto.weights.shared_memory import SharedMemorySubscriber

LESS = 0.01  # nats
SKIPPED = "model.layers.0.mlp.down_proj.weight"


@dataclass(frozen=True)
class Sabotage:
    """From version `first` on; of one `engine`, or of all; while a file exists (`during`), or always.

    ``skips``: one tensor is not loaded, where the engine copies it; of adapters, none is. ``hands``: the same, where
    the mailbox hands it over, after it has checked every byte. ``logprobs``: other log-probabilities are told than
    those that tokens were sampled with. ``late``: once a version is proven, the weights of the one before are put back.
    ``after``: then one tensor is scaled. ``keeps``: KV entries of earlier versions are kept, unlike asked for.
    ``load``, ``prove``, ``add``: this call raises, and removes the file `during`.
    """

    what: str
    first: int
    engine: str = ""
    during: str = ""

    def begin(self) -> None:
        if self.what == "logprobs":
            sample = vars(native)["sample"]
            vars(native)["sample"] = lambda *given: (sample(*given)[0], sample(*given)[1] - LESS)
            return
        patched = cast(Any, NativeEngine)
        if self.what in ("prove", "add"):
            call = getattr(patched, self.what)

            def fails(engine: NativeEngine, *given: Any, **rest: Any) -> Any:
                return self._fail(engine, engine.version) or call(engine, *given, **rest)

            setattr(patched, self.what, fails)
            return
        if self.what in ("late", "after"):
            self._begin_late()
            return
        update, load, begin, named = NativeEngine.update, SharedMemorySubscriber.load, NativeEngine.__init__, []

        def begins(engine: NativeEngine, model: Any, config: EngineConfig, **rest: Any) -> None:
            config = config.model_copy(update={"on_update": "keep"}) if self.what == "keeps" else config
            begin(engine, model, config, **rest)
            named.append(engine)

        def updates(engine: NativeEngine, version: int, tensors: Any, since: float | None = None) -> None:
            if self.what == "load":
                cast(Any, engine._parameters).load = lambda tensors: (
                    self._fail(engine, version) or Parameters.load(engine._parameters, tensors)
                )
            else:
                tensors = self._without_one(engine, version, tensors)
            update(engine, version, tensors, since)

        def hands(subscriber: SharedMemorySubscriber, version: int) -> Any:
            return self._without_one(named[0], version, load(subscriber, version))

        patched.__init__ = begins
        if self.what == "keeps":
            return
        if self.what == "hands":
            cast(Any, SharedMemorySubscriber).load = hands
        else:
            patched.update = updates

    def _begin_late(self) -> None:
        update, prove, before = Generation.update, NativeEngine.update, dict[str, Tensor]()

        def remembers(engine: NativeEngine, *given: Any, **rest: Any) -> None:
            before.update({name: one.detach().clone() for name, one in engine._parameters._parameters.items()})
            prove(engine, *given, **rest)

        async def changes(generation: Generation, version: int, challenge: Challenge | None = None) -> Loaded:
            loaded, held = await update(generation, version, challenge), generation.engine._parameters._parameters
            if version >= self.first:
                with torch.no_grad():
                    for name, one in held.items() if self.what == "late" else [(SKIPPED, held[SKIPPED])]:
                        one.copy_(before[name] if self.what == "late" else 1.5 * one)
            return loaded

        cast(Any, NativeEngine).update, cast(Any, Generation).update = remembers, changes

    def _spares(self, engine: NativeEngine, version: int) -> bool:
        spared = (self.engine and engine.name != self.engine) or (self.during and not Path(self.during).exists())
        return version < self.first or bool(spared)

    def _fail(self, engine: NativeEngine, version: int) -> bool:
        """Whether it has failed and not raised: never."""
        if not self._spares(engine, version):
            if self.during:
                Path(self.during).unlink()
            raise MemoryError("no room\nfor it")
        return False

    def _without_one(self, engine: NativeEngine, version: int, tensors: Any) -> Any:
        if self._spares(engine, version):
            return tensors
        kept = engine._parameters._parameters[SKIPPED].detach().clone()
        dropped = {name: 0 * tensor for name, tensor in tensors.items() if name.endswith(".lora_B")}
        return dict(tensors) | (dropped or {SKIPPED: kept})
