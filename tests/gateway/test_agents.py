"""Agents of a run: each is started in a session of its own; its reward comes over HTTP or from the run's rewards; what
goes wrong is a failure with its reason, never a zero; one that is started again is answered from the record."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from stretto.core.errors import EngineLost, UserError
from stretto.core.events import RecordedCall
from stretto.core.forest import Tokens
from stretto.core.records import Outcome, Prompt, Trajectory, Verdict
from stretto.launch.recipe.extensions import AgentConfig
from stretto_gateway.agents import groups
from stretto_gateway.agents.environment import environment_of
from stretto_gateway.agents.groups import AgentGroups, AgentServices, WaitingSessions
from stretto_gateway.app import serving_beside
from stretto_gateway.sessions.app import GatewayApp
from stretto_gateway.sessions.sessions import SessionTable
from stretto_workflows.session import MemoryRecord, Session
from tests.asynchronous import until
from tests.gateway.serving import MODEL, ScriptedModel, model_of, tokenizer_of

HERE = Path(__file__).parent
PROMPT = Prompt("17", (), "3+8=", "11")
#: Commands of a shell: a turn, a reward of 0.25, and the end of the session.
ENDS = (
    'body=\'{"model": "\'$OPENAI_MODEL\'", "messages": [{"role": "user", "content": "hi"}]}\'; '
    'curl -sf -H "Authorization: Bearer $OPENAI_API_KEY" -d "$body" $OPENAI_BASE_URL/chat/completions && '
    "curl -sf -d '{\"reward\": 0.25}' $STRETTO_SESSION/reward && curl -sf -X POST $STRETTO_SESSION/end"
)


@dataclass
class Service:
    """Asks for sessions, and goes on with the last one that it has got."""

    client: httpx.AsyncClient
    member: asyncio.Task[Trajectory]
    session: dict[str, Any] = field(default_factory=dict)

    async def open(self) -> None:
        while (opened := await self.client.post("/sessions", json={})).status_code != 200:
            await asyncio.sleep(0.01)
        self.session = opened.json()

    async def ask(self, text: str = "3+8=", **headers: str) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
        return await self.client.post(f"{self.session['base_url']}/chat/completions", json=body, headers=headers)

    async def tell(self, what: str, **told: Any) -> httpx.Response:
        """A ``reward``, or the ``end``."""
        return await self.client.post(f"/sessions/{self.session['id']}/{what}", json=told)

    async def end(self, reward: float) -> None:
        await self.tell("reward", reward=reward)
        await self.tell("end")


@dataclass
class Run:
    """The part of a run that agents need, with a record that outlives it."""

    model: ScriptedModel
    seen: Path
    arguments: Mapping[str, object] = field(default_factory=dict)
    earlier: int = 0
    records: dict[str, MemoryRecord] = field(default_factory=dict)

    def open_session(self, id: str, prompt: Tokens, seed: int) -> Session:
        record = self.records.setdefault(id, MemoryRecord())
        known, calls = record.segments, list(record.calls)
        return Session(id, prompt, seed, self.model.sampler(id, record), record, known, calls, self.earlier)

    async def score(self, prompt: str, completions: Sequence[str], answer: str) -> Sequence[Verdict]:
        assert (prompt, answer) == ("3+8=", "11")
        return [Verdict(Outcome.RIGHT, float(len(text)), "scored by the run") for text in completions]

    @asynccontextmanager
    async def groups(self, function: str = "", **settings: Any) -> AsyncIterator[AgentGroups]:
        """Agents that are functions of `agents_own`, or as `settings` say."""
        chosen: dict[str, Any] = {"kind": "agent", "model": MODEL, "path": str(HERE), "deadline": 30.0}
        if function:
            chosen["function"] = f"agents_own:{function}"
        config = AgentConfig.model_validate(chosen | settings)
        table, host, served = SessionTable(), WaitingSessions(), model_of(self.model.tokenizer)
        bound = socket.create_server(("127.0.0.1", 0))
        async with serving_beside(GatewayApp(table, host, served), bound) as address:
            services = AgentServices(
                table=table,
                model=served,
                address=address,
                room=asyncio.Semaphore(config.parallel),
                score=self.score,
                verdict=lambda reward: Verdict(Outcome.RIGHT, reward),
                decode=self.model.tokenizer.decode,
                task=lambda prompt, member, seed: {"prompt": prompt.text, "member": member, "seen": str(self.seen)},
                arguments=lambda prompt: self.arguments,
            )
            yield AgentGroups(config, services, self.open_session, host)

    @asynccontextmanager
    async def service(self) -> AsyncIterator[Service]:
        """A service beside a trajectory that waits for one."""
        async with self.groups() as groups, httpx.AsyncClient(base_url=groups.services.address, verify=False) as client:
            service = Service(client, asyncio.create_task(groups.member("0.17.0/3", PROMPT, 3, 5)))
            await service.open()
            yield service

    async def one(self, function: str = "", **settings: Any) -> Trajectory:
        async with self.groups(function, **settings) as groups:
            return await groups.member("0.17.0/3", PROMPT, 3, 5)


def run_of(tmp_path: Path) -> Run:
    return Run(ScriptedModel(lambda prompt: "four" if "shorter" in prompt else "a longer answer"), tmp_path / "seen")


async def test_a_function_makes_a_trajectory_and_returns_its_reward(tmp_path: Path) -> None:
    trajectory = await run_of(tmp_path).one("two_turns")
    assert trajectory.verdict == Verdict(Outcome.RIGHT, 4.0)
    assert [segment.sampled for segment in trajectory.segments] == [False, True, False, True]
    assert trajectory.session
    assert trajectory.text.count("four") == 1


async def test_every_prompt_of_an_agent_has_the_template_arguments_of_its_question(tmp_path: Path) -> None:
    model = ScriptedModel(lambda prompt: "four", tokenizer_of("qwen3"))
    await Run(model, tmp_path / "seen", {"enable_thinking": False}).one("two_turns")
    told = [model.tokenizer.spell(prompt).endswith("<think>\n\n</think>\n\n") for prompt in model.asked]
    assert told == [True, True]


async def test_a_turn_that_an_earlier_version_began_without_template_arguments_goes_on(tmp_path: Path) -> None:
    model = ScriptedModel(lambda prompt: "four", tokenizer_of("qwen3"))
    run = Run(model, tmp_path / "seen")
    await run.one("two_turns")
    [record] = run.records.values()
    turns = [at for at, call in enumerate(record.calls) if len(call.asked) == 64]
    record.calls[turns[1] :] = [RecordedCall(turns[1], record.calls[turns[1]].asked)]
    del record.pieces[-1]  # it had no tokens yet
    run.arguments, run.earlier = {"enable_thinking": False}, 4
    trajectory = await run.one("two_turns")
    assert (model.asked[2], len(trajectory.segments)) == (model.asked[1], 4)


async def test_any_program_finds_its_session_in_its_environment(tmp_path: Path) -> None:
    """Its session has ended before its program, which may linger for a moment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "_LINGER_SECONDS", 0.2)
        trajectory = await run_of(tmp_path).one(command=["sh", "-c", f"{ENDS} && sleep 60"])
    assert trajectory.verdict.reward == 0.25


async def test_without_a_reward_of_its_own_the_run_scores_the_last_answer(tmp_path: Path) -> None:
    trajectory = await run_of(tmp_path).one("without_reward")
    assert trajectory.verdict == Verdict(Outcome.RIGHT, 15.0, "scored by the run")


@pytest.mark.parametrize(
    ("address", "base", "direct"),
    [
        ("http://0.0.0.0:8790", "http://127.0.0.1:8790", "a.b,.c,127.0.0.1,localhost,::1"),
        ("http://[::]:8790", "http://[::1]:8790", "a.b,.c,127.0.0.1,localhost,::1"),
        ("http://10.0.0.7:8790", "http://10.0.0.7:8790", "a.b,.c,127.0.0.1,localhost,::1,10.0.0.7"),
    ],
)
def test_a_program_reaches_the_gateway_and_the_users_hosts_without_proxy(address: str, base: str, direct: str) -> None:
    own = {"NO_PROXY": "a.b", "no_proxy": "a.b,.c", "STRETTO_API_KEY": "boss"}
    found = environment_of(own, address, "name", "key", MODEL, "{}")
    assert found["OPENAI_BASE_URL"] == f"{base}/s/key/v1"
    assert found["STRETTO_SESSION"] == f"{base}/sessions/name"
    assert found["NO_PROXY"] == found["no_proxy"] == direct
    assert "STRETTO_API_KEY" not in found


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"function": "raises"}, "the agent ended with exit code 1: ValueError: no such luck"),
        ({"function": "prints_its_address"}, "exit code 1: no answer at http://127.0.0.1/s/KEY/v1"),
        ({"function": "says_nothing"}, "the agent has ended without a completion"),
        ({"function": "missing"}, "has no 'missing'"),
        ({"command": ["/no/such/program"]}, "exit code 127: /no/such/program: No such file or directory"),
        ({"function": "hangs", "deadline": 1.0}, "took more than 1 s (workflow.deadline)"),
        ({"function": "two_turns", "path": "/no/such/folder"}, "could not be started: No such file or directory"),
    ],
)
def test_what_goes_wrong_is_undecided_with_its_reason(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    trajectory = asyncio.run(run_of(tmp_path).one(**settings))
    assert trajectory.verdict.outcome is Outcome.UNDECIDED
    assert reason in trajectory.verdict.reason


async def test_a_task_that_no_environment_holds_is_undecided_with_both_sizes(tmp_path: Path) -> None:
    long = Prompt("17", (), "3" * 131_072, "11")
    async with run_of(tmp_path).groups("two_turns") as groups:
        trajectory = await groups.member("0.17.0/3", long, 3, 5)
    assert trajectory.verdict.outcome is Outcome.UNDECIDED
    assert "could not be started: its task has 131,1" in trajectory.verdict.reason
    assert "environment holds 130,000" in trajectory.verdict.reason


@pytest.mark.parametrize("function", ["floods", "forks"])
def test_floods_and_forks_end_with_the_agent(tmp_path: Path, function: str) -> None:
    run = run_of(tmp_path)
    assert asyncio.run(run.one(function)).verdict.reward == 1.0
    if function == "forks":
        assert not Path(f"/proc/{int(run.seen.read_text())}").exists()


def test_a_program_that_kills_its_guard_ends_with_all_that_it_has_started(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    trajectory = asyncio.run(run.one("kills_its_guard"))
    assert trajectory.verdict == Verdict(Outcome.UNDECIDED, None, "the agent was ended by signal 9")
    for pid in run.seen.read_text().split():
        assert not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text()


async def test_a_program_is_asked_to_end_before_it_is_killed_as_a_client_of_containers_needs(tmp_path: Path) -> None:
    told = tmp_path / "container"
    program = 'trap "echo stopped > $0; exit" TERM; (trap "" TERM; sleep 60) & echo runs > $0; wait'
    async with run_of(tmp_path).groups(command=["sh", "-c", program, str(told)]) as groups:
        member = asyncio.create_task(groups.member("0.17.0/3", PROMPT, 3, 5))
        await until(lambda: told.exists() and told.read_text())
        member.cancel()
        await asyncio.gather(member, return_exceptions=True)
    assert told.read_text() == "stopped\n"


async def test_a_run_in_which_most_agents_fail_stops_with_a_message(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    async with run.groups(command=["false"], parallel=4) as groups:
        for verdict in [Verdict(Outcome.UNDECIDED, None)] * 32 + [Verdict(Outcome.WRONG, 0.0)] * 31:
            groups._failures.count(Trajectory("0.0.0/0", (), verdict, ""))
        with pytest.raises(UserError, match=r"33 of the last 64 .* exit code 1; fix the agent"):
            await groups.member("0.1.0/0", PROMPT, 0, 5)


async def test_an_agent_that_is_started_again_is_answered_from_the_record(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.model.gate = asyncio.Event()
    async with run.groups("two_turns") as groups:
        first = asyncio.create_task(groups.member("0.17.0/3", PROMPT, 3, 5))
        await until(lambda: run.model.running)
        run.model.gate.set()
        run.model.gate = asyncio.Event()  # the first turn is answered, the second one is not
        await until(lambda: len(run.model.asked) >= 2)
        first.cancel()  # the conductor is killed
        await asyncio.gather(first, return_exceptions=True)
    run.model.gate = None
    # A model that would say something else now is not asked for what is on record.
    run.model.script = lambda prompt: "otherwise"
    trajectory = await run.one("two_turns")
    assert run.seen.read_text() == "a longer answer\n" * 2
    assert trajectory.verdict.reward == len("otherwise")
    assert len(run.model.asked) == 3
    assert [segment.sampled for segment in trajectory.segments] == [False, True, False, True]


async def test_the_session_of_a_trajectory_that_is_given_up_ends_before_its_program(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    async with run.groups("hangs") as groups:
        member = asyncio.create_task(groups.member("0.17.0/3", PROMPT, 3, 5))
        await until(lambda: run.model.asked)
        [session] = groups.services.table._by_id.values()
        member.cancel()
        await until(lambda: session.state != "open", 0)
        assert not member.done()  # its program has still to be ended
        await asyncio.gather(member, return_exceptions=True)


async def test_a_service_asks_for_a_session(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    async with run.service() as service:
        assert service.session["task"]["prompt"] == "3+8="
        refused = await service.client.post("/sessions", json={})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await service.ask()).status_code == 200
        await service.end(0.5)
        trajectory = await service.member
        assert (trajectory.verdict.reward, trajectory.session) == (0.5, service.session["id"])
        assert (await service.ask()).status_code == 409


async def test_a_service_that_has_gone_before_it_is_answered_takes_no_session(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    async with run.groups() as groups:
        member = asyncio.create_task(groups.member("0.17.0/3", PROMPT, 3, 5))
        await until(lambda: groups.host.waiting, 0)
        address = urlsplit(groups.services.address)
        with socket.create_connection((address.hostname, address.port)) as gone:  # the run is busy meanwhile
            gone.sendall(b"POST /sessions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}")
        async with httpx.AsyncClient(base_url=groups.services.address, verify=False) as client:
            service = Service(client, member)
            await asyncio.sleep(0.2)
            await asyncio.wait_for(service.open(), 5)
            await service.ask()
            await service.end(0.5)
            assert (await member).verdict.reward == 0.5


async def test_a_trajectory_that_no_service_has_taken_in_time_waits_for_none(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    async with run.groups(deadline=0.05) as groups:
        trajectories = await asyncio.gather(*(groups.member(f"0.17.0/{at}", PROMPT, at, 5) for at in range(3)))
        assert {one.verdict.reason for one in trajectories} == {"the agent took more than 0.05 s (workflow.deadline)"}
        assert not groups.host.waiting


async def test_what_a_service_gives_up_fails_with_its_reason_and_not_with_its_reward(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    async with run.service() as service:
        await service.tell("reward", reward=0.5)
        assert (await service.tell("end", failed=3)).status_code == 400
        assert (await service.tell("end", failed="the bus did not come")).status_code == 200
        assert (await service.member).verdict == Verdict(
            Outcome.UNDECIDED, None, "the agent failed: the bus did not come"
        )
    # It is on record: a run that goes on does not ask again.
    assert (await run.one()).verdict.reason == "the agent failed: the bus did not come"


async def test_an_end_that_was_acknowledged_is_on_record(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    async with run.service() as service:
        await service.ask()
        await service.end(0.5)
        before = await service.member
    after = await run.one()  # the conductor was killed: no service comes, and none is needed
    assert len(run.model.asked) == 1
    assert (after.segments, after.verdict, after.text) == (before.segments, before.verdict, before.text)
    assert after.verdict.reward == 0.5


@pytest.mark.parametrize(("question", "reward"), [("3+8=", 0.5), ("and otherwise?", 15.0)])
async def test_a_reward_is_recorded_at_once_for_what_was_said(tmp_path: Path, question: str, reward: float) -> None:
    """The conductor is killed between a reward and the end. The next service asks the same, or something else, which
    the reward is not for: then the run scores it."""
    run = run_of(tmp_path)
    async with run.service() as service:
        assert (await service.ask()).status_code == 200
        for told in ({"reward": 0.5}, {"reward": 0.75, "node": 1}):
            assert (await service.tell("reward", **told)).status_code == 200
        service.member.cancel()
        await asyncio.gather(service.member, return_exceptions=True)
    async with run.service() as service:
        assert (await service.ask(question)).status_code == 200
        await service.tell("end")
        trajectory = await service.member
    assert trajectory.verdict.reward == reward
    [turn] = [segment for segment in trajectory.segments if segment.sampled]
    assert turn.reward == (0.75 if question == "3+8=" else None)
    assert len(run.model.asked) == (1 if question == "3+8=" else 2)


@pytest.mark.parametrize("key", ["one", "another", ""])
async def test_a_turn_that_an_engine_broke_off_at_first_is_answered_from_the_record(tmp_path: Path, key: str) -> None:
    """By any key: a program that is started again, or its library, draws a new one."""
    run = run_of(tmp_path)
    told = iter(["", "the recorded answer", "another answer"])

    def script(prompt: str) -> str:
        if said := next(told):
            return said
        raise EngineLost("engine-0", "was killed")

    run.model.script = script
    async with run.service() as service:
        assert (await service.ask(**{"idempotency-key": "one"})).status_code >= 500
        before = (await service.ask(**{"idempotency-key": "one"})).json()
        service.member.cancel()  # the conductor is killed
        await asyncio.gather(service.member, return_exceptions=True)
    async with run.service() as service:
        after = (await service.ask(**{"idempotency-key": key})).json()
    assert after == before


@pytest.mark.parametrize(("then", "deadline"), [("exit 3", 30.0), ("kill -9 $$", 30.0), ("sleep 60", 4.0)])
async def test_what_a_program_does_after_its_acknowledged_end_decides_nothing(
    tmp_path: Path, then: str, deadline: float
) -> None:
    """A run that was killed meanwhile would not see it."""
    run = run_of(tmp_path)
    seen, again = [await run.one(command=["sh", "-c", f"{ENDS}; {then}"], deadline=deadline) for _ in range(2)]
    assert seen.verdict == again.verdict == Verdict(Outcome.RIGHT, 0.25)


async def test_a_program_that_has_ended_well_is_not_started_again(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    before = await run.one("two_turns")
    after = await run.one("two_turns")
    assert run.seen.read_text().count("\n") == 1
    assert (after.segments, after.verdict) == (before.segments, before.verdict)


async def test_a_reward_that_follows_a_broken_turn_decides_nothing(tmp_path: Path) -> None:
    run = run_of(tmp_path)

    def breaks(prompt: str) -> str:
        raise EngineLost("engine-0", "was killed")

    run.model.script = breaks
    for _ in range(2):  # nor after a restart
        trajectory = await run.one("gives_up")
        assert trajectory.verdict.outcome is Outcome.UNDECIDED
        assert "EngineLost" in trajectory.verdict.reason
    assert run.seen.read_text() == "503\n"


async def test_who_had_a_trajectory_has_no_part_in_it_when_it_is_made_again(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    late: Service | None = None
    async with run.groups() as groups, httpx.AsyncClient(base_url=groups.services.address, verify=False) as client:
        for _ in range(2):  # as evaluations do
            run.records.clear()
            member = asyncio.create_task(groups.member("evaluation..h1/0", PROMPT, 0, 5))
            service = Service(client, member)
            await service.open()
            if late is not None:  # the first service
                await late.end(0.0)
                assert (await late.ask()).status_code == 409
            late = service
            await service.ask()
            await service.end(0.5)
            trajectory = await member
            assert trajectory.verdict.reward == 0.5
            assert sum(segment.sampled for segment in trajectory.segments) == 1


async def test_no_more_agents_run_at_once_than_the_recipe_says_of_evaluations_too(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    run.model.gate = asyncio.Event()
    async with run.groups("without_reward", parallel=2) as groups:
        evaluation = AgentGroups(groups.config, groups.services, groups.open_session, groups.host)
        of_both = [groups, evaluation, evaluation]
        members = [asyncio.create_task(one.member(f"0.1.0/{k}", PROMPT, k, k)) for k, one in enumerate(of_both)]
        await until(lambda: run.model.running >= 2)
        await asyncio.sleep(0.5)
        assert run.model.running == 2
        run.model.gate.set()
        assert all(trajectory.segments for trajectory in await asyncio.gather(*members))
