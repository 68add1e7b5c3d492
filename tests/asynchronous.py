"""For tests that are coroutines: a wait, and a decorator for those whose first parameter is no fixture."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

Test = Callable[..., Awaitable[None]]


async def until(condition: Callable[..., object], poll: float = 0.005) -> None:
    """Look again and again until it holds; the limit of the test ends a wait that is too long."""
    while not condition():
        await asyncio.sleep(poll)


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
