"""The options of a built-in model, read off the signature of the function that builds it."""

import inspect
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Kind:
    """What the text of an option may say."""

    words: str  # completes the sentence "batch=0 is not ..."
    read: Callable[[str], Any]  # raises ValueError for a text that is not of this kind
    choices: tuple[str, ...] = ()  # every text there is, where they can be listed

    def __str__(self) -> str:
        return self.words


class Option(NamedTuple):
    """One option of a built-in model."""

    type: Kind
    default: Any  # None where the meaning says what stands in for it
    meaning: str

    @property
    def text(self) -> str:
        """The default as a target gives it."""
        return "-".join(map(str, self.default)) if isinstance(self.default, tuple) else str(self.default)


def options_of(function: Callable[..., object]) -> Mapping[str, Option]:
    """Read the keyword-only parameters of a function as options, in the order in which they are written."""
    hints = get_type_hints(function, include_extras=True)
    return {
        name: Option(_kind(hints[name]), parameter.default, _meaning(hints[name]))
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _kind(hint: Any) -> Kind:
    """Find the kind in an annotation: written in it, or the choices of a Literal."""
    if get_origin(hint) is Literal:
        return _choice(get_args(hint))
    if get_origin(hint) is Annotated:
        declared = [extra for extra in hint.__metadata__ if isinstance(extra, Kind)]
        return declared[0] if declared else _kind(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return next(_kind(member) for member in get_args(hint) if member is not type(None))
    raise TypeError(f"an option annotated {hint} has no kind")


def _meaning(hint: Any) -> str:
    """Find the sentence in an annotation."""
    return next(extra for extra in hint.__metadata__ if isinstance(extra, str))


def _choice(values: tuple[Any, ...]) -> Kind:
    """Make the kind whose texts are exactly these values."""
    by_text = {str(value): value for value in values}

    def read(text: str) -> Any:
        if text not in by_text:
            raise ValueError(text)
        return by_text[text]

    return Kind("one of " + ", ".join(by_text), read, tuple(by_text))


def _read_count(text: str) -> int:
    """Read a whole number of at least 1."""
    if (count := int(text)) < 1:
        raise ValueError(text)
    return count


def _read_rate(text: str) -> float:
    """Read a finite number above 0."""
    if not 0.0 < (rate := float(text)) < math.inf:
        raise ValueError(text)
    return rate


def _read_probability(text: str) -> float:
    """Read a number of at least 0 and below 1."""
    if not 0.0 <= (probability := float(text)) < 1.0:
        raise ValueError(text)
    return probability


def _read_stages(text: str) -> tuple[int, ...]:
    """Read four counts joined by dashes."""
    if len(stages := tuple(_read_count(count) for count in text.split("-"))) != 4:
        raise ValueError(text)
    return stages


Count = Annotated[int, Kind("a whole number of at least 1", _read_count)]
Rate = Annotated[float, Kind("a number above 0", _read_rate)]
Probability = Annotated[float, Kind("a number of at least 0 and below 1", _read_probability)]
Stages = Annotated[tuple[int, ...], Kind("four whole numbers such as 3-4-6-3", _read_stages)]
