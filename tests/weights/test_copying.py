"""Promises: a copy beside the device's work is of the version, whatever is queued after it, if the optimizer holds
back; work that changes no parameter does not wait for it; it is read only when it is whole; and it begins after what
was queued before. Shown with streams of threads in place of the device's: work is done later, in the order of its
stream.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

from stretto.weights.mailbox import Copies, as_text, copied_beside, texts
from stretto.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber

DEVICE = torch.device("cpu")
SLOW = 0.03  # seconds of each copy


class DeviceEvent:
    """What `torch.cuda.Event` does."""

    def __init__(self) -> None:
        self._there = threading.Event()

    def record(self, stream: "DeviceStream") -> None:
        stream.submit(self._there.set)

    def synchronize(self) -> None:
        assert self._there.wait(10)


class DeviceStream:
    """What `torch.cuda.Stream` does, in a thread."""

    def __init__(self, device: torch.device = DEVICE) -> None:
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def submit(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def wait_event(self, event: DeviceEvent) -> None:
        self.submit(event.synchronize)

    def wait_stream(self, other: "DeviceStream") -> None:
        (event := DeviceEvent()).record(other)
        self.wait_event(event)


class Device:
    """The part of `torch.cuda` that copies need."""

    Stream, Event = DeviceStream, DeviceEvent

    def __init__(self) -> None:
        self.compute = self._current = DeviceStream()

    def current_stream(self, device: torch.device) -> DeviceStream:
        return self._current

    @contextmanager
    def stream(self, stream: DeviceStream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def room(self, like: Tensor) -> Tensor:
        room = torch.full(like.shape, -1, dtype=like.dtype).as_subclass(Pinned)
        room.device_of_copies = self
        return room


class Pinned(Tensor):
    """Host memory to which a device copies when the turn of the copy comes, and slowly."""

    device_of_copies: Device

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        plain = self.as_subclass(Tensor)

        def work() -> None:
            time.sleep(SLOW)
            plain.copy_(source)

        self.device_of_copies.current_stream(DEVICE).submit(work)
        return self


@pytest.fixture
def device() -> Device:
    return Device()


def parameters() -> dict[str, Tensor]:
    return {"a": torch.arange(4.0), "b": torch.ones(3, 2), "c": torch.tensor(7)}


def copies_of(device: Device, held: dict[str, Tensor], form: torch.dtype | None = None) -> Copies:
    forms = {name: form or one.dtype for name, one in held.items()}
    return copied_beside(held.items(), forms, DEVICE, device, device.room)


def values(copies: Copies) -> dict[str, Any]:
    copies.wait()
    return {name: one.as_subclass(Tensor).tolist() for name, one in copies.tensors.items()}


@pytest.mark.parametrize("holds", [True, False])
def test_a_copy_is_of_the_version_if_the_optimizer_holds_back(device: Device, holds: bool) -> None:
    held, expected = parameters(), {name: one.tolist() for name, one in parameters().items()}
    copies = copies_of(device, held)
    began = DeviceEvent()
    began.record(device.compute)  # forward and backward of the next step
    began.synchronize()
    assert copies.tensors["b"].as_subclass(Tensor).tolist() == [[-1, -1]] * 3, "not copied yet"
    if holds:
        copies.hold()
    device.compute.submit(lambda: [one.add_(1) for one in held.values()])
    assert (values(copies) == expected) is holds
    (done := DeviceEvent()).record(device.compute)
    done.synchronize()
    assert held["a"].tolist() == [1, 2, 3, 4]


def test_a_copy_begins_after_what_was_queued_before(device: Device) -> None:
    held = parameters()

    def update() -> None:
        time.sleep(2 * SLOW)
        held["b"].mul_(5)

    device.compute.submit(update)
    assert values(copies_of(device, held))["b"] == [[5, 5]] * 3


def test_each_tensor_is_taken_when_its_turn_comes_and_rounded_on_the_device(device: Device) -> None:
    streams: list[DeviceStream] = []

    def whole() -> Iterator[tuple[str, Tensor]]:
        for name in ("a", "b"):
            streams.append(device.current_stream(DEVICE))
            yield name, torch.tensor([1 + 2**-9])

    copies = copied_beside(whole(), dict.fromkeys("ab", torch.bfloat16), DEVICE, device, device.room)
    assert device.compute not in streams, "gathered beside the work of the compute stream"
    assert values(copies) == {"a": [1.0], "b": [1.0]}
    told = {name: as_text(one.as_subclass(Tensor)) for name, one in copies.sums.items()}
    assert told == texts({name: torch.ones(1, dtype=torch.bfloat16) for name in "ab"}), "of what is published"
    assert {one.dtype for one in copies.tensors.values()} == {torch.bfloat16}


def test_a_version_exists_once_it_is_written_and_is_that_of_its_copy(tmp_path: Path) -> None:
    publisher, subscriber = SharedMemoryPublisher("run", tmp_path), SharedMemorySubscriber("run", tmp_path)
    held, gathered = {"a": torch.arange(4.0), "b": torch.ones(3, 2).t()}, list[str]()

    def gather(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        gathered.append(name)
        return tensor * 2

    publication = publisher.copy(3, held.items(), gather)
    assert (gathered, publication.size, publication.copied) == (["a", "b"], 40, 40)
    held["a"].zero_()
    publication.hold()
    assert subscriber.newest() is None
    assert list(tmp_path.iterdir()) == []
    digests = publication.write()
    assert subscriber.newest() == 3
    loaded = subscriber.load(3)
    assert loaded["a"].tolist() == [0, 2, 4, 6]
    assert loaded["b"].shape == (2, 3)
    other = SharedMemoryPublisher("other", tmp_path)
    assert other.publish(3, [("a", torch.arange(4.0) * 2), ("b", torch.ones(2, 3) * 2)]) == digests


def test_a_copy_is_rounded_and_released_as_it_is_written(tmp_path: Path) -> None:
    publisher = SharedMemoryPublisher("run", tmp_path, torch.bfloat16)
    publication = publisher.copy(0, {"w": torch.tensor([1 + 2**-9, 3.0]), "n": torch.tensor([1 << 40])}.items())
    assert publication.copied == publication.size == 12
    publication.write()
    loaded = SharedMemorySubscriber("run", tmp_path).load(0)
    assert (loaded["w"].tolist(), loaded["n"].tolist()) == ([1.0, 3.0], [1 << 40])
    with pytest.raises(KeyError):
        publication.write()
    assert not list(tmp_path.glob("*.partial"))
    with pytest.raises(ValueError, match="versions start at 0"):
        publisher.copy(-1, [])
