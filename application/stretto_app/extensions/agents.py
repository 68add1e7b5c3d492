"""Gateway of a run with agents, in the conductor's process."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Any

import msgspec

from stretto.core.forest import Tokens
from stretto.core.records import Prompt, Verdict
from stretto.launch.preflight.checks import longest_prompt_allowed
from stretto.launch.preflight.plan import Plan
from stretto.launch.recipe.extensions import AgentConfig
from stretto.launch.recipe.recipe import Recipe
from stretto.model.hf.tokenizer import Tokenizer
from stretto.processes.http.asgi import HostNames, is_loopback
from stretto.processes.http.reach import bind
from stretto.rollout.single_turn import Score
from stretto.store.run_folder import RunFolder
from stretto_gateway.agents.groups import AgentGroups, AgentServices, WaitingSessions
from stretto_gateway.app import serving_beside
from stretto_gateway.checks import KEY, check_agent, check_key, check_reach
from stretto_gateway.model import ServedModel
from stretto_gateway.requests import SamplingRule
from stretto_gateway.sessions.app import GatewayApp
from stretto_gateway.sessions.sessions import SessionTable
from stretto_workflows.session import Session
from stretto_workflows.task import task_of


class RunGateway:
    """Gateway of a run whose trajectories come from agents. It has the methods by which a run starts and ends its
    workflow."""

    def __init__(self, plan: Plan, config: AgentConfig, folder: RunFolder | None, say: Callable[[str], None]) -> None:
        """Prepare the gateway; `start` opens it. `folder`: the run folder, in which the gateway's address is written;
        None for an evaluation without a run. `say` gets sentences for the log."""
        self._plan, self._config, self._folder, self._say = plan, config, folder, say
        self._host, self._groups = WaitingSessions(), list[AgentGroups]()
        self._room, self._table = asyncio.Semaphore(config.parallel), SessionTable()
        context = longest_prompt_allowed(plan.recipe, plan.base) + plan.sampling.max_tokens
        rule = SamplingRule(plan.sampling, context, chosen=())
        self._model = ServedModel(config.model, plan.tokenizer, rule, plan.recipe.gateway)
        self._open, self._address = contextlib.AsyncExitStack(), ""

    async def start(self) -> None:
        """Start the HTTP server, and write its address into the run folder, if the run has one, and into its log.

        Raises:
            RecipeError: the address cannot be bound, or is reachable from the network without a key.
        """
        config, key = self._plan.recipe.gateway, os.environ.get(KEY, "")
        bound = bind(config.host, config.port, ("gateway.host", "gateway.port"))
        check_reach(bound, key or None, "gateway.host")
        names = HostNames(config.host, loopback=True) if is_loopback(bound) else None
        app = GatewayApp(self._table, self._host, self._model, operator_key=key, names=names)
        self._address = await self._open.enter_async_context(serving_beside(app, bound))
        if self._folder is not None:
            self._folder.write(self._folder.gateway.name, self._address)
        self._say(f"agents find the policy at {self._address}")

    async def close(self) -> None:
        """Stop the HTTP server, and remove its address from the run folder."""
        if self._folder is not None:
            self._folder.gateway.unlink(missing_ok=True)
        await self._open.aclose()

    @property
    def pids(self) -> None:
        """Process ids of its own: None, because it works in the conductor's process."""

    @property
    def ended(self) -> int:
        """Number of trajectories that have ended. Its growth is a sign of progress."""
        return sum(groups.ended for groups in self._groups)

    def groups(
        self, open_session: Callable[[str, Tokens, int], Session], score: Score, verdict: Callable[[float], Verdict]
    ) -> AgentGroups:
        """Create the maker of groups for the run, or for an evaluation; call it after `start`. `open_session` opens the
        session of a trajectory, by its id, the token ids of its prompt, and its seed. `score` judges a completion, and
        `verdict` turns an agent's own reward into a verdict."""
        details = self._plan.details

        def task(prompt: Prompt, member: int, seed: int) -> dict[str, Any]:
            made: dict[str, Any] = msgspec.to_builtins(task_of(details, prompt, member, seed))
            del made["group_seed"]  # agents do not get it
            return made

        services = AgentServices(
            table=self._table,
            model=self._model,
            address=self._address,
            room=self._room,
            score=score,
            verdict=verdict,
            decode=self._plan.tokenizer.decode,
            task=task,
            arguments=details.arguments,
        )
        groups = AgentGroups(self._config, services, open_session, self._host)
        self._groups.append(groups)
        return groups


def check_agents(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Check the agent of `[workflow]`, which must be an `AgentConfig`, and the address of `[gateway]`.

    Raises:
        RecipeError: the address cannot be bound, or is reachable from the network without a key; or the key is one that
            no client can send.
        WorkflowError: the agent's program or function cannot be started.
        ModelFolderError: the tokenizer has no chat template.
    """
    assert isinstance(recipe.workflow, AgentConfig), "the caller has looked"
    check_agent(recipe.workflow, tokenizer, tokenizer.place)
    config, key = recipe.gateway, os.environ.get(KEY) or None
    check_key(key, KEY)
    with bind(config.host, config.port, ("gateway.host", "gateway.port")) as bound:
        check_reach(bound, key, "gateway.host")
