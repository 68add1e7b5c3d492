"""Run a program as a script inside the sandbox.

This file is sent to guests, so it imports little, and of this package only `values`.
"""

from __future__ import annotations

import _thread
import builtins
import gc
import io
import marshal
import os
import sys

from stretto_verify.sandbox.values import encoded, lively, plain

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_LARGEST_STACK = 64 << 20  # bytes of a thread's stack: more could use up the memory


def perform() -> int:
    """Run the task in descriptor 3, a marshalled dictionary. Return the exit status of the program.

    `source` is the program. `before` and `after`: code that is run in its module, before and after it. `calls`: calls
    to make then, as ``{"name": ..., "args": [...]}``; None: the program is run as a script (``__main__``). With calls,
    the standard output gets one line for each, ``{"value": ...}`` or ``{"error": ...}``, and printed text goes to
    standard error. The process is changed for good: run one task in it.
    """
    with open(3, "rb") as file:
        task: dict[str, Any] = marshal.load(file)
    sys.argv = ["program.py"]
    # Scripts use these names, which the site module would define; the guest runs without it.
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    stack_size = _thread.stack_size
    _thread.stack_size = lambda size=0, /: stack_size(min(size, _LARGEST_STACK))
    calls = task.get("calls")
    if calls is None:
        return _concluded(lambda: _execute(task, "__main__"), "__main__")
    results = os.dup(1)
    os.dup2(2, 1)  # printed text must not mix with the results
    return _concluded(lambda: _call_all(_execute(task, "program"), calls, results), "program")


def _concluded(work: Callable[[], object], name: str) -> int:
    """Call `work` as an interpreter runs a script, and end in the same way: join threads, run exit functions, flush,
    clear the names of the program's module, `name` (so that open files are closed), and flush again. Return the exit
    status; no exception leaves it."""
    _reopen(name)
    status = 0
    try:
        work()
    except SystemExit as leaving:
        status = _status(leaving.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    for step in (_join, _run_exit_functions, _flush, lambda: _clear(name), _flush_all):
        try:
            step()
        except BaseException:  # of the program; as in an interpreter, only a failed flush changes the status
            status = status or (120 if step is _flush else 0)
    return status


def _join() -> None:
    if (threading := sys.modules.get("threading")) is not None:
        threading._shutdown()


def _run_exit_functions() -> None:
    if (leave := sys.modules.get("atexit")) is not None:
        leave._run_exitfuncs()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not getattr(stream, "closed", False):
            stream.flush()


def _flush_all() -> None:
    """Flush standard output and errors, and the original standard output, which a program may have replaced."""
    _flush()
    if sys.__stdout__ is not None and not sys.__stdout__.closed:
        sys.__stdout__.flush()


def _clear(name: str) -> None:
    names = vars(sys.modules[name])
    for key in sorted(names, key=lambda key: not key.startswith("_")):
        if key != "__builtins__":
            names[key] = None
    gc.collect()


def _status(code: object) -> int:
    """Exit status for the argument of ``sys.exit(code)``: 0 for None, an integer's low 8 bits; for anything else 1,
    after it is printed to standard error."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _reopen(name: str) -> None:
    """Open new standard streams, without the guest's buffers. If `name`, the program's module name, is ``__main__``,
    make /dev/stdin, /dev/stdout and /dev/stderr work, which do not exist without /proc."""
    stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    for called, stream in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
        vars(sys).update({called: stream, f"__{called}__": stream})
    if name != "__main__":
        return
    plain_open = builtins.open
    streams = {f"/dev/{name}": number for number, name in enumerate(("stdin", "stdout", "stderr"))}

    def open_(file: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(file, str | os.PathLike) and (number := streams.get(os.fspath(file))) is not None:
            file = os.dup(number)
        return plain_open(file, *arguments, **options)

    builtins.open = io.open = open_


def _execute(task: dict[str, Any], name: str) -> dict[str, Any]:
    """Run the program of a task (see `perform`) between its `before` and `after` parts, in one module called `name`;
    return the module's names. Errors of the program are raised. Each part is compiled separately, so that ``from
    __future__`` imports work in the program's first line."""
    module = type(sys)(name)
    sys.modules[name] = module
    for part, file in (("before", "before.py"), ("source", "program.py"), ("after", "after.py")):
        if text := task.get(part, ""):
            exec(compile(text, file, "exec", dont_inherit=True), module.__dict__)
        if part == "before":
            _hide_called(module.__dict__, name, task.get("calls") or [])
    return module.__dict__


def _hide_called(names: dict[str, Any], module: str, calls: list[dict[str, Any]]) -> None:
    """Make those names builtins that `module` has imported and that are called: the program can use them, and has to
    define or import itself what is called."""
    called = {call["name"] for call in calls if call["name"] in names}
    hidden = {name: names.pop(name) for name in called if getattr(names[name], "__module__", None) != module}
    if hidden:
        names["__builtins__"] = {**vars(builtins), **hidden}


def _call_all(namespace: dict[str, Any], calls: list[dict[str, Any]], results: int) -> None:
    """Make all `calls` (see `perform`) of functions in `namespace`; write a line for each to the descriptor `results`:
    ``{"value": ...}``, or ``{"error": ...}`` if it raises."""
    for call in calls:
        try:
            function = _found(namespace, call["name"])
            line = encoded({"value": plain(function(*map(lively, call["args"])))})
        except Exception as error:  # of the program; the next call may succeed
            line = encoded({"error": f"{type(error).__name__}: {error}"[:200]})
        rest = line.encode() + b"\n"
        while rest:
            rest = rest[os.write(results, rest) :]


def _found(namespace: dict[str, Any], name: str) -> Callable[..., object]:
    """Method `name` of a new instance of a class ``Solution`` if the program defines one that has it, else the function
    `name`; KeyError if there is neither."""
    if hasattr(namespace.get("Solution"), name):
        return getattr(namespace["Solution"](), name)  # type: ignore[no-any-return]
    return namespace[name]  # type: ignore[no-any-return]
