"""Process of a native engine: ``python -m stretto.engine.role SPEC``. Loads the model and the newest published version,
then serves HTTP."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import msgspec
import torch

from stretto.core.errors import RoleError, StrettoError
from stretto.engine.config import EngineConfig
from stretto.engine.http.server import serve
from stretto.engine.native.engine import NativeEngine
from stretto.engine.wire import ENGINE_KEY, EngineSpec
from stretto.model.decode.policy import CACHED_ATTENTION
from stretto.model.device import memory_named, take_share
from stretto.model.hf.folder import load_policy
from stretto.model.hf.grammar import Grammars
from stretto.model.hf.tokenizer import load_tokenizer
from stretto.model.kernels import choose, use_onednn
from stretto.processes.channel import run_role
from stretto.processes.heartbeat import begin_role
from stretto.weights.shared_memory import SharedMemorySubscriber
from stretto_kernels.gpu.attention import FILE


def main(arguments: list[str]) -> int:
    """Run the engine until the conductor (the run's main process) ends it; returns the exit code (`channel.run_role`).
    `arguments`: one `EngineSpec` as JSON. An error's message becomes the last line of the process's log."""
    spec = msgspec.json.decode(arguments[0], type=EngineSpec)
    begin_role()
    torch.set_num_threads(spec.threads)
    return run_role(lambda: _serve(spec), lambda failed: print(f"{spec.name}: {failed.problem}", file=sys.stderr))


def _serve(spec: EngineSpec) -> None:
    take_share(spec.share)
    with memory_named(spec.name, spec.gpus, 0, "while it loaded its model"):
        engine, subscriber = _loaded(spec)
    with memory_named(spec.name, spec.gpus, 0, "while it generated"):
        serve(engine, subscriber, spec.address, os.environ.pop(ENGINE_KEY, ""), spec.tls)


def _loaded(spec: EngineSpec) -> tuple[NativeEngine, SharedMemorySubscriber]:
    """Load the model, tune its kernels, and load the newest published version if there is one; wait for the first if
    the spec says so. Returns the engine, and the reader of published versions."""
    config = EngineConfig.model_validate_json(spec.config)
    model = load_policy(Path(spec.model), attention=CACHED_ATTENTION, dtype=config.dtype, device=config.device)
    record = Path(spec.kernels) if spec.kernels else None
    use_onednn(model, chooser=partial(choose, record=record))
    tokenizer = partial(load_tokenizer, spec.model)
    grammars = partial(Grammars, tokenizer)
    engine = NativeEngine(model, config, name=spec.name, detokenizer=tokenizer, grammars=grammars)
    engine.tune(record.with_name(FILE) if record is not None else None)
    subscriber = SharedMemorySubscriber(spec.mailbox, Path(spec.mailbox_folder))
    if spec.publication_seconds > 0:
        subscriber.await_first(spec.name, spec.publication_seconds)
    version = subscriber.newest()
    if version is not None:
        try:
            with memory_named(spec.name, spec.gpus, 0, f"while it loaded version {version}"):
                engine.update(version, subscriber.load(version))
        except StrettoError:
            raise
        except Exception as error:  # the conductor tells one line of it
            found = " ".join(f"{type(error).__name__}: {error}".split())
            raise RoleError(f"has not loaded version {version}: {found}") from error
    return engine, subscriber


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
