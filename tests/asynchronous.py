"""Tests that are coroutines: `pytest_pyfunc_call` is a hook for the conftest.py of a folder, `run_by` a decorator."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

_SECONDS = 60.0

Test = Callable[..., Awaitable[None]]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine in an event loop of its own; other functions are left to pytest."""
    if not inspect.iscoroutinefunction(test := pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def main() -> None:
        async with asyncio.timeout(_SECONDS):
            await test(**given)

    asyncio.run(main())
    return True


def run_by(run: Callable[..., object]) -> Callable[[Test], Callable[..., None]]:
    """A decorator for tests whose first parameter is no fixture. `run(work, *fixtures)` calls `work` with it; its
    further parameters are names of fixtures, as those of the test are."""
    needed = [*inspect.signature(run).parameters.values()][1:]

    def decorated(test: Test) -> Callable[..., None]:
        fixtures = [*inspect.signature(test).parameters.values()][1:]

        @functools.wraps(test)
        def wrapped(**given: Any) -> None:
            own = {parameter.name: given[parameter.name] for parameter in fixtures}
            run(lambda first: test(first, **own), *(given[parameter.name] for parameter in needed))

        every = {parameter.name: parameter for parameter in [*needed, *fixtures]}
        vars(wrapped)["__signature__"] = inspect.Signature([*every.values()])
        return wrapped

    return decorated
