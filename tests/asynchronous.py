"""A decorator for tests that are coroutines, and whose first parameter is no fixture."""

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

Test = Callable[..., Awaitable[None]]


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
