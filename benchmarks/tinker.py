"""The server of Tinker's interface: small calls per second, its overhead over the same loop in Python, and several
clients.

    python -m benchmarks.tinker                  a model of 3.4M parameters, adapters of rank 8
    python -m benchmarks.tinker --steps 10

*Small calls* are forward passes of one sequence of 16 tokens, each fetched before the next is sent, and heartbeats,
which compute nothing. *Overhead*: a forward_backward of 16 sequences of 128 tokens and a step, sent as the SDK sends
them (both, then both results), beside the same calls of the learner in this process; in seconds, and in CPU seconds,
which other work on the machine disturbs less. *Clients*: the same steps by 1 and by 8 clients at once. Server and
clients are threads of one process, so the clients' work counts against the server.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.report import save
from benchmarks.shapes import SHAPES, make
from stretto_tinker.compute.base import LocalBackend
from stretto_tinker.compute.files import Shape
from stretto_tinker.wire.bodies import Adam, Lora
from stretto_tinker.wire.datums import Datum
from tests.tinker.speaking import Client, Data, backend_of, serving, told

SEQUENCES, TOKENS, SMALL = 16, 128, 16
CLIENTS = 8


def data_of(vocabulary: int, sequences: int, tokens: int) -> Data:
    """Random sequences."""
    random = np.random.default_rng(0)
    rows = random.integers(0, vocabulary, (sequences, 2, tokens))
    return [(row[0].tolist(), {"target_tokens": row[1].tolist()}) for row in rows]


def small_calls(client: Client, id: str, data: Data, calls: int) -> dict[str, float]:
    """Calls per second, made one after the other."""
    found = {}
    began = time.perf_counter()
    for seq in range(1, calls + 1):
        client.output(client.forward_backward(id, seq, data, forward_only=True))
    found["forward"] = calls / (time.perf_counter() - began)
    began = time.perf_counter()
    for _ in range(calls):
        told(client.post("session_heartbeat", {"session_id": client.session}))
    found["heartbeat"] = calls / (time.perf_counter() - began)
    return found


Step = tuple[float, float]


def now() -> Step:
    """Current seconds, and CPU seconds of this process."""
    return time.perf_counter(), time.process_time()


def since(began: Step) -> Step:
    """Seconds and CPU seconds that have passed."""
    wall, cpu = now()
    return wall - began[0], cpu - began[1]


def steps(client: Client, number: int, data: Data, count: int) -> list[Step]:
    """Seconds and CPU seconds of each step of a new model."""
    id, seconds = client.create(number, rank=8), []
    for step in range(count):
        began = now()
        both = client.forward_backward(id, 2 * step + 1, data), client.step(id, 2 * step + 2)
        client.output(both[0])
        client.result(both[1])
        seconds.append(since(began))
    return seconds


def plain_steps(backend: LocalBackend, data: Data, count: int) -> list[Step]:
    """Seconds and CPU seconds of each step when the learner is called directly."""
    learner, seconds = backend.create(Shape(Lora(8), 7)), []
    datums = [Datum(np.asarray(tokens), {"target_tokens": np.asarray(more["target_tokens"])}) for tokens, more in data]
    for _ in range(count):
        began = now()
        list(learner.forward_backward(datums, "cross_entropy", {}, backward=True))
        learner.optim_step(Adam(learning_rate=1e-2))
        seconds.append(since(began))
    return seconds


def measured(model: Path, folder: Path, count: int, calls: int) -> dict[str, Any]:
    """Do all measurements."""
    backend = backend_of(model)
    data = data_of(backend.vocabulary, SEQUENCES, TOKENS)
    plain_steps(backend, data, 2)
    with serving(backend, folder) as (address, _):
        client = Client(address)
        found: dict[str, Any] = {
            "calls": small_calls(client, client.create(99), data_of(backend.vocabulary, 1, SMALL), calls)
        }
        served, plain = list[Step](), list[Step]()
        for turn in range(3):  # in turns, so that what runs beside them disturbs both alike
            served += steps(client, turn, data, count)
            plain += plain_steps(backend, data, count)
        for at, unit in enumerate(("seconds", "CPU seconds")):
            ours, theirs = (median(step[at] for step in all_steps) for all_steps in (served, plain))
            found[f"{unit} of a step"] = {"served": ours, "in Python": theirs, "overhead": ours / theirs - 1}
        clients = [Client(address, f"tml-{number}") for number in range(CLIENTS)]
        began = time.perf_counter()
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(lambda one: steps(one, 0, data, count), clients))
        together = CLIENTS * count / (time.perf_counter() - began)
        began = time.perf_counter()
        steps(Client(address, "tml-alone"), 0, data, count)
        alone = count / (time.perf_counter() - began)
        found |= {"steps a second": {"1 client": alone, f"{CLIENTS} clients": together}}
        learner = backend.create(Shape(Lora(8), 7))
        began = time.perf_counter()
        learner.save(Path(tempfile.mkdtemp(dir=folder)))
        found["snapshot"] = time.perf_counter() - began
    return found


def main() -> None:
    """Measure, print, and save the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="3.4M")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--calls", type=int, default=100)
    words = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        model = make(words.model, Path(folder) / "model")
        found = measured(model, Path(folder) / "state", words.steps, words.calls)
    print(json.dumps(found, indent=2))
    print(save("tinker", {"model": words.model, "sequences": SEQUENCES, "tokens": TOKENS, "load": load, **found}))


if __name__ == "__main__":
    main()
