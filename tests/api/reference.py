"""docs/reference/api.md, made from the code: ``python -m tests.api.reference > docs/reference/api.md``.

Each public name of `import stretto` with its signature, its methods and the first sentence of its docstring; of the
other modules below each further name with its sentence."""

import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType

import stretto

_HEAD = """# Python

The stable interface for programs: the names of `import stretto`, and the parts from which extensions are made. The code
makes this page (`python -m tests.api.reference`); [the docstrings](docstrings.md) have signatures and members in full,
those of rewards, errors, the parts of an objective and the summary of a run included.

```python
import stretto

run = stretto.train("recipe.toml", trainer={"steps": 100})  # a file, a stretto.Recipe or a dict
for step in run:
    print(step.step, step.accuracy)
engine = stretto.Engine.load(run.folder / "policy" / "v000100")
print(engine.generate("3+4=", max_tokens=8)[0].text)
print(engine.chat([{"role": "user", "content": "3+4=?"}])[0].text)
```
"""
#: Titles with the modules that they are about.
MODULES = {
    "Records": ["stretto.core.records"],
    "The Protocol of an engine": ["stretto.core.engine"],
    "Workflows": ["stretto_workflows.task", "stretto.rollout.single_turn"],
}
_SHORT = 110


def page() -> str:
    """The whole page."""
    parts = [_HEAD, "\n## The package\n\n", *(entry(name, getattr(stretto, name)) for name in stretto.__all__)]
    for title, modules in MODULES.items():
        parts.append(f"\n## {title}\n")
        for name in modules:
            module = importlib.import_module(name)
            parts.append(f"\n`{name}`: {first_sentence(module)}\n\n")
            further = [one for one in own_names(module) if one not in stretto.__all__]
            parts += [f"- `{one}`{_said(getattr(module, one))}\n" for one in further]
    return "".join(parts)


def own_names(module: ModuleType) -> list[str]:
    """Functions and classes that the module defines itself, in the order of its lines."""
    found = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        if inspect.isclass(value) or inspect.isfunction(value)
    ]
    return sorted(found, key=lambda name: inspect.getsourcelines(getattr(module, name))[1])


def entry(name: str, value: object) -> str:
    """One name with its methods."""
    lines = [f"- `{name}{signature(value)}`{_said(value)}\n"]
    if inspect.isclass(value) and not issubclass(value, BaseException):
        lines += [f"    - `.{method}{shown}`{said}\n" for method, shown, said in _members(value)]
    return "".join(lines)


def _said(value: object) -> str:
    sentence = first_sentence(value)
    return f": {sentence}" if sentence else ""


def _members(kind: type) -> Iterator[tuple[str, str, str]]:
    for name, value in vars(kind).items():
        plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if name.startswith("_"):
            continue
        if isinstance(plain, property):
            yield name, "", _said(plain)
        elif inspect.isfunction(plain) and plain.__doc__:
            yield name, signature(plain), _said(plain)


def signature(value: object) -> str:
    """The parameters with their types; of a long list the names alone; empty for what is not called."""
    if inspect.ismodule(value) or (inspect.isclass(value) and (issubclass(value, BaseException) or _is_model(value))):
        return ""
    if not callable(value):
        return ""
    try:
        found = inspect.signature(value)
    except (ValueError, TypeError):
        return ""
    parameters = [one for one in found.parameters.values() if one.name not in ("self", "cls")]
    whole = re.sub(r"'([^']*)'", r"\1", str(found.replace(parameters=parameters)))
    if len(whole) <= _SHORT:
        return whole
    names = [{"VAR_KEYWORD": "**", "VAR_POSITIONAL": "*"}.get(one.kind.name, "") + one.name for one in parameters]
    return f"({', '.join(names)})"


def _is_model(kind: type) -> bool:
    """Configurations: their keys are those of docs/reference/recipe.md."""
    return hasattr(kind, "model_fields") or getattr(kind, "_is_protocol", False)


def first_sentence(value: object) -> str:
    """Of the docstring; empty without one."""
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", text)[0].rstrip(":").replace("``", "`")


if __name__ == "__main__":
    print(page(), end="")
