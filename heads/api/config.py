"""Configuration classes: frozen dataclasses whose types say which values are allowed.

`@config("decode")` over a `@dataclass(frozen=True)` makes pydantic check every construction, from
YAML (`build`) as well as from Python: sets are `Literal`, ranges are the types below. A value that
does not fit raises one `UserError` with the dotted path, the given value, the allowed ones and the
nearest name. Conditions that concern several fields stay in `__post_init__`.

Nothing is converted silently, with four exceptions that YAML needs: a list becomes the declared
tuple, a mapping the declared dataclass, a whole number a float or a text, a text a path.

Every type has limits, even if a class declares none: a float is finite and at most `LARGEST`, a
whole number has at most 64 bits, and a text or path holds no character that files or tokenizers
refuse.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BeforeValidator,
    ConfigDict,
    Strict,
    ValidationError,
    create_model,
)
from pydantic.dataclasses import dataclass as checked_dataclass

from heads.api.errors import UserError, suggest

T = TypeVar("T")
Item = TypeVar("Item")

# Bounded types

MOST = 1_000_000_000
"""Largest number of things or units, for types without another limit."""
LEAST = 1e-9
"""Smallest number above 0 for types that are divisors: results stay within float32."""


def zero_or_usable(value: float) -> float:
    """Return a number that is 0 or usable as a divisor; raises `ValueError`."""
    if 0 < value < LEAST:
        raise ValueError(f"a number above 0 must be at least {LEAST:g} here; given: {value}.")
    return value


PositiveInt = Annotated[int, Ge(1), Le(MOST)]
NonNegativeInt = Annotated[int, Ge(0), Le(MOST)]
Seed = Annotated[int, Ge(0), Lt(2**32)]
LongSeed = Annotated[int, Ge(0), Lt(2**62)]
LARGEST_DEPTH = 1024
Depth = Annotated[int, Ge(1), Le(LARGEST_DEPTH)]
DepthFromTwo = Annotated[int, Ge(2), Le(LARGEST_DEPTH)]
Layers = Annotated[int, Ge(0), Le(1024)]
OptionalLayer = Annotated[int, Ge(-1), Le(1024)]
Rows = Annotated[int, Ge(1), Le(65_536)]
RowsFromTwo = Annotated[int, Ge(2), Le(65_536)]
Rank = Annotated[int, Ge(0), Le(65_535)]
Repeats = Annotated[int, Ge(1), Le(10_000)]
Tokens = Annotated[int, Ge(1), Le(2**24)]
TokensFromTwo = Annotated[int, Ge(2), Le(2**24)]
TokenId = Annotated[int, Ge(0), Le(2**24)]
OptionalToken = Annotated[int, Ge(-1), Le(2**24)]
Size = Annotated[int, Ge(0), Le(2**24)]
TokenTotal = Annotated[int, Ge(0), Le(10**15)]
PositiveFloat = Annotated[float, Ge(LEAST), Le(MOST)]
NonNegativeFloat = Annotated[float, Ge(0), Le(MOST), AfterValidator(zero_or_usable)]
UnitInterval = Annotated[float, Ge(0), Le(1)]
Fraction = Annotated[float, Gt(0), Le(1)]
OpenFraction = Annotated[float, Gt(0), Lt(1)]
Weight = Annotated[float, Ge(0), Le(1_000_000)]
PositiveWeight = Annotated[float, Ge(LEAST), Le(1_000_000)]
Temperature = Annotated[float, Ge(0), Le(1000), AfterValidator(zero_or_usable)]
Warmth = Annotated[float, Ge(0.001), Le(1000)]
Epsilon = Annotated[float, Ge(1e-15), Le(1)]
Seconds = Annotated[float, Ge(0), Le(MOST)]
Timeout = Annotated[float, Gt(0), Le(MOST)]
Rate = Annotated[float, Gt(0), Le(100)]
Count = Annotated[int, Ge(0), Le(1_000_000)]
Port = Annotated[int, Ge(0), Le(65_535)]
NonEmpty = Annotated[tuple[Item, ...], MinLen(1)]
BOUNDED = (
    "PositiveInt",
    "NonNegativeInt",
    "Seed",
    "LongSeed",
    "Depth",
    "DepthFromTwo",
    "Layers",
    "OptionalLayer",
    "Rows",
    "RowsFromTwo",
    "Rank",
    "Repeats",
    "Tokens",
    "TokensFromTwo",
    "TokenId",
    "OptionalToken",
    "Size",
    "TokenTotal",
    "PositiveFloat",
    "NonNegativeFloat",
    "UnitInterval",
    "Fraction",
    "OpenFraction",
    "Weight",
    "PositiveWeight",
    "Temperature",
    "Warmth",
    "Epsilon",
    "Seconds",
    "Timeout",
    "Rate",
    "Count",
    "Port",
)
"""Names of the types above that have limits: `Seed` of every generator (NumPy takes 32 bits),
`LongSeed` of answers, `Depth` of a draft, layers or heads, `Layers` likewise where 0 is allowed,
`OptionalLayer` and `OptionalToken` where -1 is none, `Rows` computed together, `Rank` of a node
among its siblings, `Repeats` of a measurement, `Tokens` of a text, `Size` of a tensor's axis (0: a
default), `TokenTotal` of a run, `Weight` of a loss, `Temperature` (0: greedy), `Warmth` of
what always samples, `Epsilon` that keeps a divisor above 0, `Seconds` and `Timeout` to wait, `Rate`
of learning, `Count` of requests or connections, `Port` of a server."""
INT64 = (-(2**63), 2**63 - 1)
"""Limits of every whole number: the range of tensors and clocks."""

LARGEST = 1e12
"""Limit of every number: its square, and sums of a million of these, are within float32."""

LONGEST = 200
"""Characters of a given value that a message shows."""
UNSET = "???"
"""Hydra's mark for a value that the user must give."""

WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    types.NoneType: "null",
}
SETTINGS = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())


def config(path: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator that checks every construction of a frozen dataclass.

    path: the place of the class in the configuration (`decode`, `loop.round`), for error messages.
    """

    def decorate(cls: type[T]) -> type[T]:
        """Return the checked twin of `cls`, whose constructor raises `UserError`."""
        hints = get_type_hints(cls, include_extras=True)
        for field in dataclasses.fields(cast(Any, cls)):
            field.type = strict(hints[field.name])
        made: Any = cls
        # A base is checked already: pydantic would change `cls` itself.
        if hasattr(cls, "__pydantic_validator__"):
            names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
            made = type(cls.__name__, (cls,), names)
        made = checked_dataclass(made, frozen=True, config=SETTINGS)
        validating = made.__init__

        @functools.wraps(validating)
        def construct(self: Any, *arguments: Any, **values: Any) -> None:
            try:
                validating(self, *arguments, **values)
            except ValidationError as error:
                raise explain(error, made, path) from None

        made.__init__ = construct
        return cast(type[T], made)

    return decorate


def build(cls: type[T], values: Any, path: str) -> T:
    """Build a configuration class, or any dataclass, from plain values.

    Raises `UserError` for unknown keys, wrong types, values out of range and missing ones; `path`
    is the dotted path of `values` in its messages.
    """
    try:
        missing = find_unset(values)
    except RecursionError:
        raise UserError(f"{path}: the values are nested too deeply to be settings.") from None
    if missing is not None:
        where, hint = locate(cls, missing, path)
        raise UserError(f"{where} is missing. Give it as {where}=... ({expected(hint)}).")
    try:
        validator = vars(cls).get("__pydantic_validator__")  # a base's would not know its fields
        if validator is not None:
            return cast(T, validator.validate_python(values))
        twin = unchecked_twin(cast(Any, cls)).model_validate(values)
        return cls(**{name: getattr(twin, name) for name in twin.model_fields_set})
    except ValidationError as error:
        raise explain(error, cls, path) from None
    except UserError as error:
        raise with_path(error, path) from error


@functools.cache
def unchecked_twin(cls: type) -> Any:
    """A pydantic model with the fields of a plain dataclass."""
    hints = get_type_hints(cls, include_extras=True)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(cast(Any, cls)):
        required = field.default is dataclasses.MISSING
        required = required and field.default_factory is dataclasses.MISSING
        fields[field.name] = (strict(hints[field.name]), ... if required else None)
    return create_model(cls.__name__, __config__=SETTINGS, **fields)


def strict(hint: Any) -> Any:
    """The type hint with numbers, texts and switches that pydantic does not convert."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is str:
        return Annotated[str, BeforeValidator(number_as_text), Strict(), AfterValidator(writable)]
    if hint is Path:
        return Annotated[Path, BeforeValidator(writable)]
    if hint is int:
        return Annotated[int, Strict(), Ge(INT64[0]), Le(INT64[1])]
    if hint is float:
        return Annotated[float, Strict(), AllowInfNan(False), Ge(-LARGEST), Le(LARGEST)]
    if hint is bool:
        return Annotated[bool, Strict()]
    if origin is Annotated:
        inner, *marks = arguments
        return Annotated[(strict(inner), *marks)]
    if origin in (Union, types.UnionType):
        return Union[tuple(strict(option) for option in arguments)]  # noqa: UP007
    if origin in (tuple, list, dict, Mapping):
        return origin[tuple(item if item is Ellipsis else strict(item) for item in arguments)]
    return hint


def number_as_text(value: Any) -> Any:
    """A whole number as the text that it was written as: `run.name=2024`."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def writable(value: Any) -> Any:
    """Return a text that files, terminals and tokenizers accept; raises `ValueError` for half a
    character (a lone surrogate) and for the character NUL, which ends every path."""
    if isinstance(value, (str, Path)):
        text = str(value)
        if "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
            raise ValueError(f"{shown(text)} holds a character that no text may: remove it.")
    return value


def find_unset(values: Any) -> tuple[Any, ...] | None:
    """The place of the first value that the user still has to give."""
    if isinstance(values, Mapping):
        items: Any = values.items()
    elif isinstance(values, (list, tuple)):
        items = enumerate(values)
    else:
        return () if isinstance(values, str) and values == UNSET else None
    for key, value in items:
        found = find_unset(value)
        if found is not None:
            return (key, *found)
    return None


def require_one_of(key: str, value: str, allowed: Iterable[str]) -> None:
    """Raise `UserError` unless `value` is a name of a registry, which no type can list."""
    names = list(allowed)
    if value not in names:
        raise UserError(f"{key} '{value}' is unknown.{suggest(value, names)}")


# Errors


def explain(error: ValidationError, cls: type, path: str) -> UserError:
    """The first problem that pydantic found, in Headstart's wording."""
    first = error.errors(include_url=False)[0]
    kind, place, value = first["type"], first["loc"], first["input"]
    where, hint = locate(cls, place, path)
    if kind == "value_error":
        return with_path(first["ctx"]["error"], where)
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        owner = locate(cls, place[:-1], path)[1]
        names = [field.name for field in dataclasses.fields(bare(owner))]
        return UserError(f"{where}: there is no such key.{suggest(str(place[-1]), names)}")
    if kind in ("missing", "missing_argument") and isinstance(place[-1], str):
        return UserError(f"{where} is missing and has no default. Give it as {where}=...")
    if kind == "missing":  # of a list of fixed length
        where, hint = locate(cls, place[:-1], path)
    if kind == "literal_error":
        allowed = [str(option) for option in get_args(bare(hint))]
        meant = suggest(value if isinstance(value, str) else "", allowed)
        return UserError(f"{where} {shown(value)} is unknown.{meant}")
    if kind == "too_short":
        return UserError(f"{where} is empty. Give at least one value.")
    if kind.startswith(("greater_than", "less_than")):
        general = set(first["ctx"].values()) & {*INT64, -LARGEST, LARGEST}
        low, high = INT64 if general & set(INT64) else (-LARGEST, LARGEST)
        range_ = f"lie in [{low}, {high}]" if general else limits(hint)
        return UserError(f"{where} must {range_}; given: {shown(value)}.")
    if kind == "finite_number":
        return UserError(f"{where} must be a finite number; given: {value}.")
    return UserError(f"{where}: expected {expected(hint)}, given {describe(value)}.")


def with_path(error: Exception, path: str) -> UserError:
    """The refusal of a class itself, with its path unless the message begins with one."""
    message = str(error)
    named = message.startswith(f"{path.split('.')[0]}.")
    return UserError(message if named or not path else f"{path}: {message}")


def locate(cls: Any, place: tuple[Any, ...], path: str) -> tuple[str, Any]:
    """Dotted path and type hint of a place in a configuration class."""
    hint = cls
    for part in place:
        inner = bare(hint)
        arguments = get_args(inner)
        if dataclasses.is_dataclass(inner):
            if isinstance(part, int):  # a positional argument
                part = dataclasses.fields(inner)[part].name
            hint = get_type_hints(inner, include_extras=True).get(part)
            path = f"{path}.{part}"
        elif get_origin(inner) in (tuple, list) and isinstance(part, int):
            hint = arguments[part if part < len(arguments) and Ellipsis not in arguments else 0]
            path = f"{path}[{part}]"
        elif get_origin(inner) in (dict, Mapping) and part != "[key]":
            hint, path = arguments[1], f"{path}.{part}"
        else:
            break  # pydantic's place continues with the member of a union that it tried
    return path, hint


def bare(hint: Any) -> Any:
    """The type hint without annotations, and without `None` if one other type is left."""
    if get_origin(hint) is Annotated:
        return bare(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        options = [option for option in get_args(hint) if option is not types.NoneType]
        return bare(options[0]) if len(options) == 1 else hint
    return hint


def limits(hint: Any) -> str:
    """The range of a bounded type in words, to follow "must"."""
    if get_origin(hint) is not Annotated:
        return limits(next(item for item in get_args(hint) if get_origin(item) is Annotated))
    marks = get_args(hint)[1:]
    ge, gt, le, lt = (
        next((getattr(mark, name) for mark in marks if hasattr(mark, name)), None)
        for name in ("ge", "gt", "le", "lt")
    )
    if ge is not None and le is not None:
        return f"lie in [{ge}, {le}]"
    if gt is not None and lt is not None:
        return f"lie between {gt} and {lt}"
    if ge is not None and lt is not None:
        return f"lie in [{ge}, {lt})"
    if ge == 0 and lt is None:
        return "not be negative"
    parts = {"be at least": ge, "be above": gt, "at most": le, "below": lt}
    return " and ".join(f"{word} {bound}" for word, bound in parts.items() if bound is not None)


def expected(hint: Any) -> str:
    """A type hint in words, for error messages and help."""
    hint = bare(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(expected(option) for option in arguments)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin in (tuple, list):
        return f"a list [..] of {expected(arguments[0])}"
    if origin in (dict, Mapping):
        return f"keys with {expected(arguments[1])} each"
    if dataclasses.is_dataclass(hint):
        return f"keys of {cast(Any, hint).__name__}"
    return WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def shown(value: object) -> str:
    """A given value on one line of a message, cut if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python does not print numbers of over 4300 digits
        return "a value that is too long to show"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"


def describe(value: Any) -> str:
    """A given value in words: the value and its type."""
    if value is None:
        return "null"
    names = {
        bool: "a switch",
        int: "a whole number",
        float: "a number",
        str: "text",
        list: "a list",
        tuple: "a list",
        dict: "keys",
    }
    return f"{shown(value)} ({names.get(type(value), type(value).__name__)})"
