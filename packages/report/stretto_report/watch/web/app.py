"""HTTP application of the dashboard: routes, and the daemon threads that read run folders, which do not delay the end
of the process.

    /api/runs    /api/runs/ID    /api/runs/ID/series    .../trajectories    .../trajectories/GROUP/MEMBER
    .../groups/GROUP    .../timeline    .../health    .../events    /api/diff    /api/recipes    / and /assets/...
    POST /api/runs/ID/replay    POST /api/replay/stop    /api/replay

One thread compares runs, the other reads everything else, so no locks are needed. Slow reads are split into pieces,
with requests served in between.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from stretto.core.errors import UNREADABLE, RefusedRequest, RunFolderError, StoreError
from stretto.processes.http.asgi import read_body
from stretto_report.watch.runs.catalog import Catalog
from stretto_report.watch.runs.comparing import Comparison, compare, recipe_differences
from stretto_report.watch.runs.run import WatchedRun
from stretto_report.watch.web import pages
from stretto_report.watch.web.events import Event, Follower, stream
from stretto_report.watch.web.guard import refusal
from stretto_report.watch.web.replay import Busy, NotAllowed, ReplayOrder, Replays

Result = TypeVar("Result")

_Work = tuple[Future[Any], Callable[[], Any]]


class ReadingThread(Executor):
    """Executor with one daemon thread, named `name`, for work that only reads, or writes in transactions. A
    `ThreadPoolExecutor` would join its thread at the end of the process, and so delay Ctrl-C for as long as a
    comparison takes."""

    def __init__(self, name: str) -> None:
        self._waiting: SimpleQueue[_Work | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, do: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """Queue a call of `do` with the further arguments; return the future of its result. It runs after the calls
        submitted before."""
        future: Future[Result] = Future()
        self._waiting.put((future, lambda: do(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Cancel the queued calls, and end the thread after the running call, which is not waited for. Both arguments
        are ignored."""
        try:
            while True:
                if (work := self._waiting.get_nowait()) is not None:
                    work[0].cancel()
        except Empty:
            self._waiting.put(None)

    def _work(self) -> None:
        while (work := self._waiting.get()) is not None:
            future, do = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(do())
            except BaseException as error:  # raised to the caller that waits for the result
                future.set_exception(error)


STATIC = Path(__file__).parent.parent / "static"
_PIECE_SECONDS = 0.02  # of background reading between two requests
_READ_SECONDS = 0.1  # of reading before a request is answered with what was read so far
_JSON = "application/json"


class _NotThere(RefusedRequest):
    """Error 404: the requested run, page or record does not exist."""


_STATUS = {_NotThere: 404, Busy: 429, NotAllowed: 403}
_LARGEST_ORDER = 1 << 16
_ORDER_SECONDS = 10.0
_ORDER = msgspec.json.Decoder(ReplayOrder)


class Dashboard:
    """Handlers of one server of `stretto watch`, which `app` makes into an ASGI application, and the threads that they
    use, which `close` ends."""

    def __init__(self, catalog: Catalog, replays: Replays | None = None) -> None:
        """Start two threads: one reads runs for pages, one compares runs. `catalog`: the runs that are served.
        `replays`: starts replays that a page asks for; None: they are forbidden."""
        self._catalog, self._replays = catalog, replays or Replays(None)
        self._reader = ReadingThread("watch-reader")
        self._comparer = ReadingThread("watch-comparer")  # a comparison of long runs takes minutes
        self._comparison: Future[Comparison] | None = None
        self._reading: dict[str, asyncio.Task[None]] = {}

    def app(self) -> Starlette:
        """Make the Starlette application with all routes. Its end calls `close`."""
        of_run: Mapping[str, Callable[[WatchedRun, Mapping[str, str]], Any]] = {
            "": pages.run_page,
            "/series": pages.series_page,
            "/trajectories": pages.table_page,
            "/trajectories/{trajectory:path}": pages.trajectory_page,
            "/groups/{group:path}": pages.group_page,
            "/timeline": pages.timeline_page,
            "/health": pages.health_page,
            "/logs": pages.logs_page,
        }
        routes: list[Route | Mount] = [
            Route("/api/runs", self._answer(self._runs)),
            *(Route(f"/api/runs/{{run}}{path}", self._answer(self._page(page))) for path, page in of_run.items()),
            Route("/api/runs/{run}/events", self._events),
            Route("/api/runs/{run}/replay", self._answer(self._replay), methods=["POST"]),
            Route("/api/replay/stop", self._answer(self._stop_replay), methods=["POST"]),
            Route("/api/replay", self._answer(self._replaying)),
            Route("/api/diff", self._answer(self._diff)),
            Route("/api/recipes", self._answer(self._recipes)),
            Route("/api/{rest:path}", self._answer(_nothing)),
            Route("/", _index),
            Mount("/", StaticFiles(directory=STATIC, check_dir=False, follow_symlink=False)),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self.close()

    def close(self) -> None:
        """End the reading of runs, and the two threads that read and compare. Queued calls are cancelled; a running
        call is not waited for. May be called again."""
        for task in self._reading.values():
            task.cancel()
        for worker in (self._reader, self._comparer):
            worker.shutdown()

    async def read(self, do: Callable[[], Result]) -> Result:
        """Run a function in the reading thread, after the calls queued before; return its result or raise its error."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, do)

    def _answer(self, do: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return Response(msgspec.json.encode(await do(request)), media_type=_JSON)
            except RefusedRequest as error:
                return _refused(_STATUS.get(type(error), 400), error.field, error.found, error.allowed)
            except (StoreError, RunFolderError) as error:
                return _refused(422, "run", str(error), "its other pages may be readable")
            except Exception:  # a bug, or absurd numbers in a damaged run: log it and serve on
                traceback.print_exc(file=sys.stderr)
                return _refused(500, "server", "an internal error; its terminal has the traceback", "other pages work")

        return answer

    # Replies of the routes.

    async def _runs(self, request: Request) -> Any:
        return await self.read(lambda: pages.list_page(self._catalog))

    def _page(self, page: Callable[[WatchedRun, Mapping[str, str]], Any]) -> Callable[[Request], Awaitable[Any]]:
        async def answer(request: Request) -> Any:
            id = request.path_params["run"]
            reading = (task := self._reading.get(id)) is not None and not task.done()
            asked = {**request.query_params, **{f"/{name}": value for name, value in request.path_params.items()}}

            def read() -> tuple[WatchedRun, Any, bool]:
                run = self._run(id)
                self._catalog.opened(run)
                more = not reading and run.advance(_READ_SECONDS)
                answer = page(run, asked)
                self._catalog.give_up()
                return run, answer, more

            run, found, more = await self.read(read)
            if more:
                self._read_on(run)
            if found is None:
                name = asked.get("/trajectory") or asked.get("/group") or ""
                raise _NotThere(page.__name__.removesuffix("_page"), f"{name[:80]!r} is not there", "see the table")
            return found

        return answer

    def _run(self, id: str) -> WatchedRun:
        """Return the run with this id. Raises _NotThere if there is none. Must run in the reading thread, like all that
        uses the catalog."""
        run = self._catalog.find(id)
        if run is None:
            raise _NotThere("run", f"{id[:80]!r} is not there", "see /api/runs")
        return run

    def _read_on(self, run: WatchedRun) -> None:
        """Start a task that reads the rest of a run, piece by piece, between requests; do nothing if one runs
        already."""
        task = self._reading.get(run.id)
        if task is None or task.done():
            self._reading[run.id] = asyncio.create_task(self._read_all(run))

    async def _read_all(self, run: WatchedRun) -> None:
        def read() -> bool:
            more = run.is_open and run.advance(_PIECE_SECONDS)
            self._catalog.give_up()
            return more

        while await self.read(read):
            await asyncio.sleep(0)

    async def _diff(self, request: Request) -> Any:
        ids = [request.query_params.get(name, "") for name in ("a", "b")]
        a, b = await self.read(lambda: [self._run(id) for id in ids])
        if self._comparison is not None and not self._comparison.done():
            raise Busy("diff", "two other runs are being compared", "ask again when that has ended")
        self._comparison = self._comparer.submit(compare, a, b)
        return await asyncio.wrap_future(self._comparison)

    async def _replaying(self, request: Request) -> Any:
        return {"allowed": self._replays.allowed, "newest": self._replays.state()}

    async def _replay(self, request: Request) -> Any:
        self._replays.require_allowed()
        try:
            async with asyncio.timeout(_ORDER_SECONDS):
                body = await read_body(request.scope, request.receive, _LARGEST_ORDER)
            order = _ORDER.decode(body or b"")
        except (TimeoutError, *UNREADABLE) as error:
            allowed = 'such as: {"from": 2, "set": ["algorithm.loss=gspo"], "minutes": 60}'
            raise RefusedRequest("body", str(error) or "did not come", allowed) from None
        run = await self.read(lambda: self._run(request.path_params["run"]))
        return await self._replays.begin(run, order)

    async def _stop_replay(self, request: Request) -> Any:
        return self._replays.stop()

    async def _recipes(self, request: Request) -> Any:
        ids = [id for id in request.query_params.get("runs", "").split(",") if id]
        if not 2 <= len(ids) <= pages.MOST_COMPARED:
            raise RefusedRequest("runs", f"{len(ids)} runs", f"give 2 to {pages.MOST_COMPARED}: runs=ID,ID")
        keys = await self.read(lambda: recipe_differences([self._run(id) for id in ids]))
        return {"runs": ids, "keys": keys}

    async def _events(self, request: Request) -> Response:
        last = request.headers.get("last-event-id")

        def follow() -> Follower | None:
            if (run := self._catalog.find(request.path_params["run"])) is None:
                return None
            self._catalog.opened(run)
            return Follower(run, last)

        if (follower := await self.read(follow)) is None:
            return _refused(404, "run", "is not there", "see /api/runs")

        def news() -> list[Event]:
            found = follower.news()
            self._catalog.give_up()
            return found

        return StreamingResponse(
            stream(lambda: self.read(news), request.is_disconnected),
            media_type="text/event-stream",
            headers={"x-accel-buffering": "no"},
        )


def _refused(status: int, where: str, found: str, allowed: str) -> Response:
    return Response(refusal(status, where, found, allowed), status, media_type=_JSON)


async def _nothing(request: Request) -> Any:
    raise _NotThere("path", f"{request.url.path[:80]!r} is not served", "see docs/how_to/report.md")


async def _index(request: Request) -> Response:
    page = STATIC / "index.html"
    if page.is_file():
        return FileResponse(page)
    return _refused(404, "page", "the front end is not built", "run: make web")
