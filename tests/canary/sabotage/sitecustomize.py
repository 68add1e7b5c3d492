"""Python runs this file at its start where its folder stands in PYTHONPATH: engines of a run then do something wrong
and report success. The environment says what:

    SABOTAGED         skips     one tensor is not loaded, where the engine copies it; of adapters, none is (the default)
                      hands     the same, where the mailbox hands it over, after it has checked every byte
                      logprobs  other log-probabilities are told than those that tokens were sampled with
    SABOTAGED_FROM    the first version to which it happens
    SABOTAGED_ENGINE  the engine to which it happens; every one without it
    SABOTAGED_IF      a file; it happens while that exists
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

ENGINE = "stretto.engine.native.engine"
LESS = 0.01  # nats
SKIPPED = "model.layers.0.mlp.down_proj.weight"


class Saboteur(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads the engine's module and patches it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != ENGINE:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        assert found is not None
        self.honest = found.loader
        found.loader = self
        return found

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        assert self.honest is not None
        return self.honest.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert self.honest is not None
        self.honest.exec_module(module)
        what, engine = os.environ.get("SABOTAGED", "skips"), module.NativeEngine
        if what == "logprobs":
            sample = module.sample
            vars(module)["sample"] = lambda *given: (sample(*given)[0], sample(*given)[1] - LESS)
            return
        subscriber = importlib.import_module("stretto.weights.shared_memory").SharedMemorySubscriber
        update, load, begin, named = engine.update, subscriber.load, engine.__init__, []

        def begins(self, *given, **rest):  # type: ignore[no-untyped-def]
            begin(self, *given, **rest)
            named.append(self)

        def updates(self, version, tensors, since=None):  # type: ignore[no-untyped-def]
            update(self, version, without_one(self, version, tensors), since)  # type: ignore[no-untyped-call]

        def hands(self, version):  # type: ignore[no-untyped-def]
            return without_one(named[0], version, load(self, version))  # type: ignore[no-untyped-call]

        engine.__init__ = begins
        if what == "hands":
            subscriber.load = hands
        else:
            engine.update = updates


def without_one(engine, version, tensors):  # type: ignore[no-untyped-def]
    only, file = os.environ.get("SABOTAGED_ENGINE"), os.environ.get("SABOTAGED_IF")
    spared = (only and engine.name != only) or (file and not os.path.exists(file))  # before anything else
    if version < int(os.environ["SABOTAGED_FROM"]) or spared:
        return tensors
    kept = engine._parameters._parameters[SKIPPED].detach().clone()
    dropped = {name: 0 * tensor for name, tensor in tensors.items() if name.endswith(".lora_B")}
    return dict(tensors) | (dropped or {SKIPPED: kept})


sys.meta_path.insert(0, Saboteur())
