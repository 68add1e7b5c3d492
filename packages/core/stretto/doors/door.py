"""Doors: the extension points of a recipe, such as the loss or the filter. Each door is a recipe key whose value names
a *part*, built-in or user-defined.

A part is a function or a class. Its settings (*numbers*) are its keyword-only parameters, with bounds and
descriptions::

    def clipped(policy_logprobs, tokens, *, clip: Annotated[float, Field(gt=0, description="...")] = 0.2): ...

The numbers become keys of a section of the recipe: ``loss = {kind = "my_losses:clipped", clip = 0.3}``. A built-in part
is defined in the same way, and also has a row in the table of its door:
``"cispo": "stretto.trainer.objective.surrogates:cispo"``.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial, wraps
from types import MappingProxyType, SimpleNamespace
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    create_model,
)
from pydantic.errors import PydanticUserError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails, PydanticCustomError, SchemaValidator, core_schema

from stretto.core.errors import Problem, RecipeError, StrettoError
from stretto.core.states import misfit
from stretto.doors.loading import is_own, load, where_raised, why_not_called

Part = Callable[..., Any]
_create_model: Callable[..., Any] = create_model
Declared = TypeVar("Declared", bound=Part)

_FACTS = "stretto_facts"
_TYPES = "a parameter by name is a number, a text, true or false, or a list of these, each with its type"
#: Converts a list of TOML to a tuple, since configs are immutable; other values stay, for pydantic to refuse.
AS_TUPLE = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
#: Texts: a list in TOML, a tuple in Python.
Texts = Annotated[tuple[str, ...], AS_TUPLE]
#: JSON schema of the name of a user-defined part.
OWN_NAME: Mapping[str, str] = MappingProxyType({"type": "string", "format": "package.module:name"})


def declare(**facts: object) -> Callable[[Declared], Declared]:
    """Return a decorator that attaches facts to a part, as ``@declare(anchors=("behavior",))``, and returns the part.
    `fact` reads them. Each door documents the facts that it reads."""

    def mark(part: Declared) -> Declared:
        setattr(part, _FACTS, {**getattr(part, _FACTS, {}), **facts})
        return part

    return mark


def fact(part: Part, name: str, default: Any) -> Any:
    """Return the value of the fact `name` that was declared on a part, or the default."""
    return getattr(part, _FACTS, {}).get(name, default)


class Section(BaseModel, extra="forbid", frozen=True, ser_json_inf_nan="constants"):
    """Base class of recipe sections that name a part: `kind` is the part's name, its settings are further fields. For
    each part, the door makes a subclass from the part's signature, and sets `part`, `place` (the recipe key) and
    `returns` (`Door.returns`)."""

    kind: str
    part: ClassVar[Part]
    place: ClassVar[str]
    returns: ClassVar[type[tuple[Any, ...]] | None] = None

    @classmethod
    def fields_of(cls, part: Part) -> dict[str, Any]:
        """Return the fields of a part's section beside `kind`: (type, default) by name, for pydantic's `create_model`.
        These are its numbers (`numbers_of`); a subclass may add fields. Raises ValueError, which says why, if a field
        cannot be written in a recipe."""
        return cls.numbers_of(part)

    @classmethod
    def numbers_of(cls, part: Part) -> dict[str, Any]:
        """Return the keyword-only parameters of a part as fields: (type, default) by name; a default of ``...`` means
        that the recipe must give a value. Raises ValueError, with the reason, if one cannot be written in a recipe."""
        parameters = _by_name(part)
        used = {*cls.model_fields, *cls.__class_vars__, *dir(cls)}
        if taken := [name for name in parameters if name in used or name.startswith("_")]:
            raise ValueError(f"the parameter {taken[0]!r} has a name that a section uses itself; choose another")
        return {name: _field(part, parameter) for name, parameter in parameters.items()}

    def bound(self, part: Part) -> Part:
        """Return `part` with the settings in this section bound as keyword arguments. A user-defined part is also
        `guarded`: its exceptions, and a result of another type, become a RecipeError."""
        numbers = {name: getattr(self, name) for name in _by_name(part)}
        returns = self.returns if part is self.part else None
        return partial(guarded(self.place, self.kind, part, returns) if is_own(self.kind) else part, **numbers)


Kind = TypeVar("Kind", bound=Section)


def _by_name(part: Part) -> dict[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(part).parameters
    except ValueError:  # written in C, without a signature
        return {}
    return {name: one for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}


def _field(part: Part, parameter: inspect.Parameter) -> tuple[Any, Any]:
    name, default = parameter.name, ... if parameter.default is parameter.empty else parameter.default
    kind = parameter.annotation
    if isinstance(kind, str):
        holder = SimpleNamespace(__annotations__={name: kind})
        try:
            kind = typing.get_type_hints(holder, _names_around(part), include_extras=True)[name]
        except Exception as error:  # evaluating an annotation may raise anything
            raise ValueError(f"the type of {name!r} cannot be read: {error}; {_TYPES}") from error
    if kind is parameter.empty:
        if default in (None, ...):
            raise ValueError(f"the parameter {name!r} has no type; {_TYPES}")
        kind = type(default)
    plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(plain) is tuple or plain is tuple:
        kind = Annotated[kind, AS_TUPLE]
    return kind, default


def _names_around(part: Part) -> dict[str, Any]:
    inner = inspect.unwrap(part)
    module = sys.modules.get(getattr(inner, "__module__", None) or "")
    found: dict[str, Any] = getattr(inner, "__globals__", None) or (vars(module) if module is not None else {})
    return found


def guarded(place: str, name: str, part: Part, returns: type[tuple[Any, ...]] | None = None) -> Part:
    """Return a function that calls a user-defined part. An exception of the part becomes a RecipeError at `place` (a
    recipe key) that names the part and the line; a StrettoError passes unchanged. A result that is no `returns` (a
    named tuple; None: any is allowed) becomes one too."""

    @wraps(part, updated=())
    def call(*arguments: Any, **numbers: Any) -> Any:
        try:
            found = part(*arguments, **numbers)
        except StrettoError:
            raise
        # The part is user-defined: anything it raises, SystemExit included, becomes the message.
        except (Exception, SystemExit) as error:
            raise RecipeError([raised(place, name, error)]) from error
        if returns is not None and not isinstance(found, returns):
            needed = f"and not {returns.__name__}({', '.join(getattr(returns, '_fields', ()))})"
            raise RecipeError([Problem(place, f"{name!r} returned {misfit(found, needed)}")])
        return found

    return call


def raised(place: str, name: str, error: BaseException) -> Problem:
    """Make the problem that reports an exception of a user-defined part, with the line that raised it. `place`: recipe
    key; `name`: the part's, as "module:name"."""
    module = sys.modules.get(name.partition(":")[0])
    where = where_raised(error, getattr(module, "__file__", None) or "")
    return Problem(place, f"{name!r} raised {type(error).__name__}: {error}", f"in {where}" if where else "")


@dataclass(frozen=True, eq=False)
class Door(Generic[Kind]):
    """An extension point. It annotates the type of a recipe key, as ``loss: Annotated[LossSection, LOSSES]``, and
    validates the key's value. `key`: its full name in the recipe. `what`: name of the kind of part, for messages, as
    "loss". `arguments`: names of a part's positional arguments. `built_in`: ``package.module:name`` of the built-in
    parts, by name.

    The annotated type says what the key holds. ``Annotated[LossSection, LOSSES]``: a section. ``Annotated[str,
    MAKES]``: a name only; such parts have no numbers. ``Annotated[str | Section, FILTERS]``: a name, or a section if
    the part has numbers. `section`: base class of the parts' sections. `words`: further values that name no part, as
    "auto". `several`: the key may hold a list of parts. `returns`: named tuple that a part returns; None: not checked.
    """

    key: str
    what: str
    arguments: tuple[str, ...]
    built_in: Mapping[str, str]
    section: type[Kind]
    words: tuple[str, ...] = ()
    several: bool = False
    returns: type[tuple[Any, ...]] | None = None

    def __call__(self, kind: str, **numbers: object) -> Kind:
        """Make the section of the part called `kind` with these settings, as ``LOSSES("ppo", clip_low=0.1)``. Raises
        RecipeError if the part cannot be loaded, and pydantic's ValidationError for wrong settings."""
        return self.model(kind)(kind=kind, **numbers)

    def load(self, name: str) -> Part:
        """Load the part called `name`: a built-in name, or "module:name" of a user-defined part. Raises RecipeError if
        the name is unknown, or the part cannot be imported, or cannot be called with the door's `arguments`."""
        found = load(name, self.key, self.what, self.built_in)
        further = tuple(_by_name(found)) if callable(found) else ()
        if why := why_not_called(found, name, self.arguments, further):
            raise RecipeError([Problem(self.key, why, f"it is called with ({', '.join(self.arguments)})")])
        part: Part = found  # type: ignore[assignment]  # callable, as checked above
        return part

    def model(self, kind: str) -> type[Kind]:
        """Return the section class of the part called `kind`. Raises RecipeError if the part cannot be loaded, or one
        of its keyword-only parameters cannot be written in a recipe."""
        part = self.load(kind)
        try:
            return _model(self, kind, part)
        except ValueError as error:
            raise RecipeError([Problem(self.key, f"{kind!r}: {error}")]) from error

    @property
    def models(self) -> list[type[Kind]]:
        """Section classes of all built-in parts."""
        return [self.model(kind) for kind in self.built_in]

    def bound(self, value: str | Section) -> Part:
        """Return the part that a key's value (a name or a section) names, with its settings bound as keyword arguments.
        Raises RecipeError if the part cannot be loaded, also for a value of `words`, which names no part."""
        section = value if isinstance(value, Section) else self(value)
        return section.bound(section.part)

    # Hooks that pydantic calls for the type of a key.

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        sections = isinstance(source, type) and issubclass(source, Section)
        union = Annotated[Union[tuple(self.models)], Field(discriminator="kind")] if sections else None  # noqa: UP007
        inner = handler.generate_schema(union if sections else Literal[*self.words, *self.built_in])
        check = partial(self._checked, sections=sections, names=source is str)
        anything = core_schema.simple_ser_schema("any")
        return core_schema.no_info_wrap_validator_function(check, inner, serialization=anything)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        found = handler(schema)
        choices = found.pop("oneOf", None) or [{"enum": found.pop("enum"), "type": found.pop("type")}]
        found.pop("discriminator", None)  # it would not admit user-defined names
        return found | {"anyOf": [*choices, dict(OWN_NAME)]}

    def _checked(self, value: Any, built_in: Callable[[Any], Any], *, sections: bool, names: bool) -> Any:
        if not (self.several and isinstance(value, list | tuple)):
            return self._one(value, built_in, sections=sections, names=names)
        found: list[Any] = []
        wrong: list[InitErrorDetails] = []
        for at, one in enumerate(value):
            try:
                found.append(self._one(one, built_in, sections=sections, names=names))
            except ValidationError as error:
                wrong += [_at(at, details) for details in error.errors()]
            except ValueError as error:
                told = PydanticCustomError("value_error", "{error}", {"error": error})
                wrong.append(InitErrorDetails(type=told, loc=(at,), input=one))
        if wrong:
            raise ValidationError.from_exception_data(self.what, wrong)
        return tuple(found)

    def _one(self, value: Any, built_in: Callable[[Any], Any], *, sections: bool, names: bool) -> Any:
        if sections and isinstance(value, str):
            value = {"kind": value}  # a name alone is the section with its defaults
        kind: Any = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", value)
        if not is_own(kind) or (names and not isinstance(value, str)):
            return built_in(value)
        if isinstance(value, Section):
            return value
        try:
            if names:
                self.load(kind)
            model = self.section if names else self.model(kind)
        except RecipeError as error:
            (problem,) = error.problems
            raise ValueError(f"{problem.found}; {problem.remedy}" if problem.remedy else problem.found) from None
        if isinstance(value, str) and not sections and len(model.model_fields) == 1:
            return kind
        value = {"kind": kind} if isinstance(value, str) else value
        return _labelled(model).validate_python(value, strict=True)


@cache
def _model(door: Door[Kind], kind: str, part: Part) -> type[Kind]:
    """Make the class of a part's section; a second call returns the same class. `kind`: the part's name. Raises
    ValueError for a parameter whose type a recipe cannot have."""
    fields: dict[str, Any] = {"kind": (Literal[kind], kind)} | door.section.fields_of(part)
    about = inspect.cleandoc(part.__doc__ or "").partition("\n\n")[0]
    try:
        # `create_model` under another name: otherwise pydantic's mypy plugin takes the result for a class of this file.
        made = _create_model(kind, __base__=door.section, __doc__=about, **fields)
    except PydanticUserError as error:
        raise ValueError(f"{str(error).splitlines()[0]}; {_TYPES}") from error
    made.part, made.place, made.returns = staticmethod(part), door.key, door.returns  # no method of the section
    model: type[Kind] = made
    return model


@cache
def _labelled(model: type[Section]) -> SchemaValidator:
    """Make a validator of a section whose errors have the kind in their location, as pydantic's errors in a union
    have."""
    kind = model.model_fields["kind"].default
    return SchemaValidator(core_schema.tagged_union_schema({kind: model.__pydantic_core_schema__}, "kind"))


def _at(index: int, details: ErrorDetails) -> InitErrorDetails:
    """Copy the details of a validation error, with `index` in front of its location: it is in that item of a list."""
    kind: str | PydanticCustomError = details["type"]
    if kind == "value_error":
        kind = PydanticCustomError("value_error", "{error}", details["ctx"])
    location = (index, *details["loc"])
    return InitErrorDetails(type=kind, loc=location, input=details["input"], ctx=details.get("ctx", {}))
