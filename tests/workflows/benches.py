"""A pool of workflow processes with some trajectories, and a model that says digits."""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.core.errors import Problem, RewardFunctionError
from stretto.core.forest import TurnRequest
from stretto.core.records import NOTHING, Outcome, Prompt, Sampling, Segment, StopReason, Trajectory, Verdict
from stretto.processes.spawn import FRESH, Spawner
from stretto.rollout.single_turn import Score
from stretto.rollout.workflow import WorkflowConfig
from stretto_workflows.exchange import Exchange, Services
from stretto_workflows.pool import WorkflowPool
from stretto_workflows.rendering import PlainRendering
from stretto_workflows.session import MemoryRecord, Session
from stretto_workflows.task import WorkflowTask
from stretto_workflows.wire import TurnOrder
from tests.launch.warm import session_server

ALPHABET = "0123456789+-="
PROMPT = Prompt("17", tuple(ALPHABET.index(one) for one in "3+4="), "3+4=", "7")
OWN = "tests.workflows.users_own"


def encode(text: str) -> tuple[int, ...]:
    return tuple(ALPHABET.index(one) for one in text)


def decode(tokens: Any) -> str:
    return "".join(ALPHABET[token] for token in tokens)


@dataclass
class Model:
    """Says two digits that follow from the seed; `until` holds a turn back, `asked` counts."""

    asked: list[TurnRequest] = field(default_factory=list)
    on_turn: Callable[[TurnRequest], Coroutine[Any, Any, None]] | None = None

    def sampler(self, record: MemoryRecord) -> Callable[[TurnRequest], Coroutine[Any, Any, Segment]]:
        async def sample(request: TurnRequest) -> Segment:
            self.asked.append(request)
            await asyncio.sleep(0)
            if self.on_turn is not None:
                await self.on_turn(request)
            digits = hashlib.sha256(str(request.seed).encode()).digest()[:2]
            said = Segment.of(tuple(digit % 10 for digit in digits), (-0.5, -0.5), (0, 0), stop_reason=StopReason.STOP)
            record.journal(request.node, said)
            return said

        return sample


async def score(prompt: str, completions: Any, answer: str) -> list[Verdict]:
    return [verdict(float(text == answer)) for text in completions]


async def unusable(prompt: str, completions: Any, answer: str) -> list[Verdict]:
    raise RewardFunctionError([Problem("rewards.function", "returned None", "a number")])


def verdict(value: float) -> Verdict:
    return Verdict(Outcome.RIGHT if value > 0.5 else Outcome.WRONG, value)


def lives(pid: str) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def asks(text: str, **sampling: Any) -> TurnOrder:
    return TurnOrder(0, 0, (), 0, NOTHING, encode(text), (), sampling, "")


@dataclass
class Bench:
    """A pool with some trajectories."""

    config: WorkflowConfig
    log: Path
    model: Model = field(default_factory=Model)
    score: Score = score
    members: int = 2
    mark: str = ""
    records: dict[int, MemoryRecord] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    pool: WorkflowPool | None = None

    def exchange(self, member: int) -> Exchange:
        record = self.records.setdefault(member, MemoryRecord())
        sampler, id = self.model.sampler(record), f"0.17.0/{member}"
        session = Session(id, PROMPT.token_ids, member, sampler, record, record.segments, record.calls)
        task = WorkflowTask("17", PROMPT.text, PROMPT.answer, ({"role": "user", "content": "3+4="},), member=member)
        return Exchange(session, PROMPT, task, self.services)

    @property
    def services(self) -> Services:
        sampling = Sampling(max_tokens=4)
        return Services(self.score, decode, PlainRendering(encode), None, sampling, 40, verdict, self.config)

    async def _run(self) -> list[Trajectory]:
        spawner: Spawner = FRESH if self.mark else session_server()  # a mark is that of a new process
        async with WorkflowPool(
            self.config, self.log, say=self.said.append, spawner=spawner, run=self.mark
        ) as self.pool:
            runs = (self.pool.run(self.exchange(member)) for member in range(self.members))
            return await asyncio.gather(*runs)

    def run(self) -> list[Trajectory]:
        return asyncio.run(self._run())


#: Makes a bench of a workflow of the tests or a built-in one, with settings; `members`: its trajectories.
MakeBench = Callable[..., Bench]
