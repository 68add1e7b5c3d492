"""Faults for the engines of a run, which report success all the same. `tests.launch.poverty.sabotaged` plants one in
the process of a command before it begins; the roles are forked from that process, and have it too."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from stretto.engine.native import engine as native
from stretto.engine.native.engine import NativeEngine
from stretto.weights.shared_memory import SharedMemorySubscriber

LESS = 0.01  # nats
SKIPPED = "model.layers.0.mlp.down_proj.weight"


@dataclass(frozen=True)
class Sabotage:
    """From version `first` on; of one `engine`, or of all; while a file exists (`during`), or always.

    ``skips``: one tensor is not loaded, where the engine copies it; of adapters, none is. ``hands``: the same, where
    the mailbox hands it over, after it has checked every byte. ``logprobs``: other log-probabilities are told than
    those that tokens were sampled with.
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
        update, load, begin, named = NativeEngine.update, SharedMemorySubscriber.load, NativeEngine.__init__, []

        def begins(engine: NativeEngine, *given: Any, **rest: Any) -> None:
            begin(engine, *given, **rest)
            named.append(engine)

        def updates(engine: NativeEngine, version: int, tensors: Any, since: float | None = None) -> None:
            update(engine, version, self._without_one(engine, version, tensors), since)

        def hands(subscriber: SharedMemorySubscriber, version: int) -> Any:
            return self._without_one(named[0], version, load(subscriber, version))

        patched = cast(Any, NativeEngine)
        patched.__init__ = begins
        if self.what == "hands":
            cast(Any, SharedMemorySubscriber).load = hands
        else:
            patched.update = updates

    def _without_one(self, engine: NativeEngine, version: int, tensors: Any) -> Any:
        spared = (self.engine and engine.name != self.engine) or (self.during and not Path(self.during).exists())
        if version < self.first or spared:
            return tensors
        kept = engine._parameters._parameters[SKIPPED].detach().clone()
        dropped = {name: 0 * tensor for name, tensor in tensors.items() if name.endswith(".lora_B")}
        return dict(tensors) | (dropped or {SKIPPED: kept})
