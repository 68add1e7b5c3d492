"""Requests by urllib that carry a key: they follow no redirect.

urllib would send the headers, a key among them, to whatever host the redirect names, and take that host's reply. Every
request with a key goes through `opener`; the other HTTP clients of stretto know no redirects.
"""

from __future__ import annotations

from http.client import HTTPMessage
from typing import IO
from urllib.request import BaseHandler, HTTPRedirectHandler, OpenerDirector, Request, build_opener


class _Refused(HTTPRedirectHandler):
    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        """Follow nothing; urllib then raises HTTPError, with the status and headers of the redirect."""


def opener(*handlers: BaseHandler) -> OpenerDirector:
    """Make an opener of URLs with these handlers, for which a redirect is an HTTPError."""
    return build_opener(*handlers, _Refused())
