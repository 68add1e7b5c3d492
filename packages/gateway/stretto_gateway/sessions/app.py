"""HTTP application of the gateway.

    POST /sessions                     {"task": {...}} → {"id", "api_key", "base_url", "model", "task"}
    POST /sessions/ID/reward           {"reward": 1.0} of the trajectory; with "node": N, of one turn
    POST /sessions/ID/end              {"failed": "why"} if the agent failed
    GET  /sessions/ID                  state, nodes, samples
    POST /s/KEY/v1/chat/completions    and the paths of the other dialects; the key may be an API key instead of /s/KEY
    POST /s/KEY/v1/messages/count_tokens
    GET  /s/KEY/v1/models              the model
    GET  /health  /openapi.json

With the operator's key, if one is set, a client may open, reward, end and show all sessions. With a session's key it
may reward, end and show this session. If no operator's key is set, no key is needed for these requests.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta
from starlette.types import Scope

from stretto.core.errors import RefusedRequest
from stretto.processes.http.asgi import LOOPBACK, HostNames, has_gone, header, parse_record
from stretto.processes.http.reach import url_of
from stretto.processes.http.server import admit
from stretto_gateway.app import ChatExchange, ChatServer, Handler, sent_key, unknown_key
from stretto_gateway.dialects.chat import ChatDialect
from stretto_gateway.dialects.dialect import Dialect, TokenCount
from stretto_gateway.dialects.messages import MessagesDialect
from stretto_gateway.dialects.responses import ResponsesDialect
from stretto_gateway.model import ServedModel
from stretto_gateway.requests import NotServed
from stretto_gateway.sessions.agent_session import AgentSession, Attempt, session_ended, shown
from stretto_gateway.sessions.sessions import Host, SessionTable
from stretto_workflows.chat.messages import ChatRequest, SampledTurn

_IN_PATH = re.compile(r"/s/(?P<key>[^/]+)(?P<rest>/.*)")
_SESSION = re.compile(r"/sessions/(?P<id>[^/]+)(?P<rest>/reward|/end|)")


class _OpenBody(msgspec.Struct, frozen=True):
    """Body of POST /sessions. `task`: of the session; not used in a run, whose sessions have its own tasks."""

    task: dict[str, Any] = {}


class _RewardBody(msgspec.Struct, frozen=True):
    """Body of POST /sessions/ID/reward: of the turn with the node id `node`; None: of the trajectory."""

    reward: float
    node: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


class _EndBody(msgspec.Struct, frozen=True):
    """Body of POST /sessions/ID/end. `failed`: why the agent failed; "": it has not."""

    failed: str = ""


class GatewayApp(ChatServer):
    """ASGI application of the gateway: opens, shows, rewards and ends agents' sessions, and answers the chat requests
    of each session, which its key names."""

    title = "stretto gateway"

    def __init__(
        self,
        sessions: SessionTable,
        host: Host,
        model: ServedModel,
        *,
        operator_key: str = "",
        names: HostNames | None = LOOPBACK,
    ) -> None:
        """Serve sessions over HTTP.

        Args:
            sessions: table of the sessions, to which opened ones are added.
            host: opens sessions and records their rewards and ends.
            operator_key: key with which a client may open sessions and control all of them; "": every client may.
            names: names of this server; requests with another ``Host`` are refused. None allows every name.
        """
        super().__init__(model, [ChatDialect(), ResponsesDialect(), MessagesDialect()], names)
        self.sessions, self._host = sessions, host
        self._operator_key = operator_key.encode()
        self.refused = 0  # requests with an unknown key

    def address(self, scope: Scope) -> tuple[str, str]:
        found = _IN_PATH.fullmatch(scope["path"])
        return (found["rest"], found["key"]) if found else (scope["path"], sent_key(scope))

    def route(self, path: str) -> tuple[str, Handler] | None:
        if path == "/sessions":
            return "POST", self._open
        if found := _SESSION.fullmatch(path):
            return "POST" if found["rest"] else "GET", partial(self._control, found["id"], found["rest"])
        return super().route(path)

    def failed(self, call: ChatExchange, error: Exception) -> None:
        session = self.sessions.of_key(call.key)
        if session is not None and not session.broken:  # an error of a turn is noted by the session itself
            session.unanswered[b""] = f"the gateway failed: {type(error).__name__}: {error}"

    async def _open(self, call: ChatExchange) -> None:
        if not self._operates(call.key):
            raise self._unknown_key()
        if self._operator_key:
            admit(call.scope)
        body = parse_record(await self.body(call) or b"{}", _OpenBody)
        if await has_gone(call.receive):  # nobody would learn the session's key
            return
        session = await self._host.open(body.task)
        self.sessions.add(session)
        host, port = call.scope["server"]
        await call.show(opened(session, url_of(host, port, call.scope["scheme"])))

    async def _control(self, id: str, what: str, call: ChatExchange) -> None:
        session = self._controlled(id, call.key)
        admit(call.scope)
        if what == "/reward":
            body = parse_record(await self.body(call) or b"{}", _RewardBody)
            if session.state == "ended":
                raise session_ended(session.id)
            await self._reward(session, body.node, body.reward + 0.0)
        elif what == "/end":
            ended = parse_record(await self.body(call) or b"{}", _EndBody)
            if session.state == "open":
                await self._end(session, ended.failed)
        await call.show(shown(session) if not what else {"id": session.id, "state": session.state})

    async def _reward(self, session: AgentSession, node: int | None, reward: float) -> None:
        before = session.given
        try:
            session.give(reward, node)
            await self._host.rewarded(session)
        except BaseException:  # raised again: a reward counts only if it is recorded
            session.given = before
            raise

    async def _end(self, session: AgentSession, failed: str) -> None:
        before = {**session.unanswered}
        try:
            session.fail(failed)
            await self._host.ended(session)  # recorded before the session ends
        except BaseException:  # raised again: a failure counts only if it is recorded
            session.unanswered = before
            raise
        session.end()

    async def complete(self, dialect: Dialect, call: ChatExchange) -> None:
        session = self._of_key(call.key)
        admit(call.scope)
        request: ChatRequest = await self.parsed(dialect.parse, call)
        if request.n is not UNSET or request.options.logprobs:
            field, found = ("n", request.n) if request.n is not UNSET else ("top_logprobs", request.options.logprobs)
            raise RefusedRequest(field, str(found), "one completion, and log-probabilities of the sampled tokens alone")

        async def turn() -> Sequence[SampledTurn]:
            return [await session.answer(request, _attempt(call.scope))]

        await self.send(dialect, call, turn())

    async def count(self, count: TokenCount, call: ChatExchange) -> None:
        session = self._of_key(call.key)
        admit(call.scope)
        request = await self.parsed(count.parse, call)
        await call.reply(count.reply(await session.count(request)))

    async def models(self, call: ChatExchange) -> None:
        self._of_key(call.key)
        await super().models(call)

    def _operates(self, key: str) -> bool:
        return not self._operator_key or hmac.compare_digest(key.encode(), self._operator_key)

    def _controlled(self, id: str, key: str) -> AgentSession:
        """Session with this id, if the key (its own, or an operator's) may reward, end and show it. Without an
        operator's key in the settings every key is an operator's. Raises NotServed: 401 if it may not, 404 to an
        operator if there is no such session."""
        session = self.sessions.named(id)
        own = session is not None and hmac.compare_digest(key.encode(), session.key.encode())
        if not (own or self._operates(key)):
            raise self._unknown_key()
        if session is None:
            raise NotServed(404, f"{id[:80]!r}: no such session")
        return session

    def _of_key(self, key: str) -> AgentSession:
        """Session with this key. Raises NotServed: the session was dropped from memory after its end (409),
        or no session has the key (401)."""
        session = self.sessions.of_key(key)
        if session is not None:
            return session
        if (dropped := self.sessions.dropped(key)) is not None:
            raise session_ended(dropped)
        raise self._unknown_key()

    def _unknown_key(self) -> NotServed:
        self.refused += 1
        return unknown_key()


def opened(session: AgentSession, address: str) -> dict[str, Any]:
    """Reply to ``POST /sessions``, as JSON: `id`, `api_key`, `base_url`, `model` and `task`. `address`: address of the
    gateway, ``http://host:port``."""
    base, model = f"{address}/s/{session.key}/v1", session.model.name
    return {"id": session.id, "api_key": session.key, "base_url": base, "model": model, "task": session.about}


def _attempt(scope: Scope) -> Attempt:
    """Read the retry headers that OpenAI's and Anthropic's libraries send. The key is "" if missing; the count is None
    if missing or no number."""
    key = (header(scope, b"idempotency-key") or b"").decode("latin-1")
    count = (header(scope, b"x-stainless-retry-count") or b"").decode("latin-1")
    return Attempt(key, int(count) if count.isdecimal() and len(count) < 9 else None)
