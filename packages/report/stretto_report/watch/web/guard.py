"""Access control of `stretto watch`: secrets, origins, and security headers.

A page of another site can make the user's browser send requests to this server. Such a request lacks token and cookie
(SameSite=Strict), names the other site in ``Origin`` and ``Sec-Fetch-Site`` and, with DNS rebinding, has a foreign
``Host``. Each of these is enough to refuse it.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from urllib.parse import parse_qs, urlsplit

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stretto.core.errors import RefusedRequest
from stretto.processes.http.asgi import HostNames, header, read_body, reply, unless_gone
from stretto.processes.http.server import admit, give_way

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)
_LOGIN = b"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>stretto watch</title></head>
<body><main><h1>stretto watch</h1>
<form method="post" action="/login"><p><label>Token or password
<input type="password" name="token" autocomplete="current-password" required autofocus></label>
<button>Open</button></p></form>
<p>The address that stretto watch printed has the token.</p></main></body></html>
"""
PASSWORD = "STRETTO_WATCH_PASSWORD"  #: environment variable with the password
_LARGEST_FORM = 4_096
_WRONG_SECONDS = 0.5  # delay for each wrong token or password; delays do not overlap
_FORM_HEADERS = ((b"referrer-policy", b"same-origin"),)  # with no-referrer, a browser hides the Origin of its form
_MOST_FIELDS = 8
_FORM_SECONDS = 10.0
_OPEN = re.compile(r"/assets/[\w./-]+|/favicon\.(?:ico|svg)")
_POSTED = re.compile(r"/api/runs/\w+/replay|/api/replay/stop", re.ASCII)


def refusal(status: int, where: str, found: str, allowed: str) -> bytes:
    """Return the JSON body of an error reply. `where`: field of the request; `found`: what is wrong with it; `allowed`:
    what to send instead."""
    message = f"{where}: {found}; {allowed}"
    error = {"where": where, "found": found, "allowed": allowed, "message": message, "status": status}
    return msgspec.json.encode({"error": error})


class Guard:
    """ASGI middleware that checks each request before the application `inner` gets it, refuses it or serves the login,
    and adds security headers to replies. `token`: the token or password; `port`: of the server, for the name of its
    cookie; `names`: host names by which the server may be addressed. Connections that are not HTTP are ignored."""

    def __init__(self, inner: ASGIApp, token: str, port: int, names: HostNames) -> None:
        self._inner, self._token, self._names = inner, token.encode(), names
        self._cookie = f"stretto-watch-{port}"
        self._wrong = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = scope["path"].startswith("/assets/") and message["status"] == 200
                caching = b"public, max-age=31536000, immutable" if kept else b"no-store"
                own = [*message.get("headers", ())]
                further = [header for header in _HEADERS if all(header[0] != name for name, _ in own)]
                message["headers"] = [*own, *further, (b"cache-control", caching)]
            await send(message)

        if scope["type"] != "http":
            return
        if (refused := self._why_refused(scope)) is not None:
            await _refuse(guarded, 403, *refused)
        elif scope["path"] == "/login":
            await self._login(scope, receive, guarded)
        elif scope["method"] == "POST" and _POSTED.fullmatch(scope["path"]):
            await self._posted(scope, receive, guarded)
        elif scope["method"] not in ("GET", "HEAD"):
            await _refuse(guarded, 405, "method", f"{scope['method'][:20]} is not served", "GET")
        elif _OPEN.fullmatch(scope["path"]) and ".." not in scope["path"]:
            await self._inner(scope, receive, guarded)
        elif any(fits := self._shown(scope)):
            admit(scope)
            await self._inner(scope, receive, guarded)
        elif scope["path"] == "/":
            await self._page(scope, receive, guarded, wrong=bool(fits))
        else:
            await self._pause(bool(fits), scope, receive)
            await _refuse(guarded, 401, "token", "missing or wrong", "send it as: Authorization: Bearer TOKEN")

    async def _posted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a POST on to the application if it comes from a page of this server, or from a program with the token;
        else refuse it. A page of another site can send neither this content type nor this server's Origin together with
        the cookie."""
        content = (header(scope, b"content-type") or b"").decode("latin-1").partition(";")[0].strip().lower()
        if not any(fits := self._shown(scope)):
            await self._pause(bool(fits), scope, receive)
            await _refuse(send, 401, "token", "missing or wrong", "send it as: Authorization: Bearer TOKEN")
        elif content != "application/json":
            await _refuse(send, 415, "content-type", f"{content[:40]!r}", "application/json")
        elif header(scope, b"authorization") is None and header(scope, b"origin") is None:
            await _refuse(send, 403, "origin", "missing beside a cookie", "open the dashboard itself")
        else:
            admit(scope)
            await self._inner(scope, receive, send)

    def _why_refused(self, scope: Scope) -> tuple[str, str, str] | None:
        host = (header(scope, b"host") or b"").decode("latin-1")
        if not self._names.has(host):
            return "host", f"{host[:80]!r} is no name of this server", "use the address that stretto watch printed"
        origin = header(scope, b"origin")
        if origin is not None and _authority(origin.decode("latin-1")) != host:
            return "origin", "another site asks", "open the dashboard itself"
        site = header(scope, b"sec-fetch-site")
        page = scope["path"] == "/" and header(scope, b"sec-fetch-mode") == b"navigate"
        if site not in (None, b"same-origin", b"none") and not page:
            return "sec-fetch-site", "another site asks", "open the dashboard itself"
        return None

    def _shown(self, scope: Scope) -> list[bool]:
        """Return, for each secret in a request's headers (bearer token, cookie), whether it is right; empty if there is
        none."""
        fits = []
        bearer = (header(scope, b"authorization") or b"").split(b" ", 1)
        if len(bearer) == 2 and bearer[0].lower() == b"bearer":
            fits.append(self._fits(bearer[1].strip()))
        # Not by http.cookies, which drops all cookies behind one that it cannot read; all ports of a host share theirs.
        cookies = [cookie.strip().partition(b"=") for cookie in (header(scope, b"cookie") or b"").split(b";")]
        if own := [value for name, _, value in cookies if name == self._cookie.encode()]:
            # One alone, as an attacker could compute one for each guessed password.
            fits.append(hmac.compare_digest(own[-1], self._cookie_value.encode()))
        return fits

    async def _pause(self, wrong: bool, scope: Scope, receive: Receive) -> None:
        """Wait half a second after a secret that is `wrong`; else do nothing. Concurrent wrong requests wait one after
        another, no longer than until their clients disconnect, and give way to other callers."""

        async def delay() -> None:
            async with self._wrong:
                await asyncio.sleep(_WRONG_SECONDS)

        if wrong:
            give_way(scope)
            await unless_gone(receive, delay())

    def _fits(self, given: bytes) -> bool:
        return hmac.compare_digest(given, self._token)

    @property
    def _cookie_value(self) -> str:
        """Value of the cookie: derived from the password or token, which it does not reveal."""
        return hmac.new(self._token, self._cookie.encode(), "sha256").hexdigest()

    async def _page(self, scope: Scope, receive: Receive, send: Send, *, wrong: bool) -> None:
        """Serve the page to a browser without a right cookie if its address has the token, and set the cookie;
        otherwise reply 401 with the login form. `wrong`: the headers had a wrong secret, so that this reply is delayed.
        (The page removes the token from the address.) A redirect would lose the cookie after a link from another
        site."""
        given = _token_of(scope["query_string"])
        if not self._fits(given):
            await self._pause(wrong or bool(given), scope, receive)
            await reply(send, 401, "text/html; charset=utf-8", _LOGIN, _FORM_HEADERS)
            return

        async def welcoming(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), self._set_cookie()]
            await send(message)

        admit(scope)
        await self._inner(scope, receive, welcoming)

    async def _login(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            await _refuse(send, 405, "method", f"{scope['method'][:20]} is not served", "POST")
            return
        try:
            async with asyncio.timeout(_FORM_SECONDS):
                body = await read_body(scope, receive, _LARGEST_FORM)
        except (TimeoutError, ValueError, RefusedRequest):
            body = None
        if not self._fits(_token_of(body or b"")):
            await self._pause(True, scope, receive)
            await reply(send, 401, "text/html; charset=utf-8", _LOGIN, _FORM_HEADERS)
            return
        await reply(send, 303, "text/plain", b"", [(b"location", b"/"), self._set_cookie()])

    def _set_cookie(self) -> tuple[bytes, bytes]:
        return b"set-cookie", f"{self._cookie}={self._cookie_value}; Path=/; HttpOnly; SameSite=Strict".encode()


def _authority(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _token_of(fields: bytes) -> bytes:
    try:
        return parse_qs(fields.decode(), max_num_fields=_MOST_FIELDS).get("token", [""])[-1].encode()
    except ValueError:
        return b""


async def _refuse(send: Send, status: int, where: str, found: str, allowed: str) -> None:
    await reply(send, status, "application/json", refusal(status, where, found, allowed))
