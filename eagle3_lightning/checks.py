"""The ranges that numeric options must lie in, and the ConfigError for one that does not."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from eagle3_lightning.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Numbers between two bounds, which belong to it unless `open_least` or `open_most` says otherwise. NaN never does.

    Attributes:
        least: lower bound.
        most: upper bound.
        open_least: the lower bound itself is refused.
        open_most: the upper bound itself is refused.
    """

    least: float
    most: float = math.inf
    open_least: bool = False
    open_most: bool = False

    def __contains__(self, value: float) -> bool:
        above = self.least < value if self.open_least else self.least <= value
        return above and (value < self.most if self.open_most else value <= self.most)

    def __str__(self) -> str:
        if self.most == math.inf:
            return f"be more than {self.least}" if self.open_least else f"be at least {self.least}"
        return f"lie in {'(' if self.open_least else '['}{self.least}, {self.most}{')' if self.open_most else ']'}"


COUNT = Range(1)
NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, open_least=True)
SHARE = Range(0, 1)
POSITIVE_SHARE = Range(0, 1, open_least=True)
SHARE_BELOW_ONE = Range(0, 1, open_most=True)


def check_number(option: str, value: Any, allowed: Range, default: Any = None) -> None:
    """Refuse a number, or a pair with a number, outside a range; None is an option that was not given.

    Args:
        option: the option as the user writes it.
        value: the number, a sequence of them, or None.
        allowed: where it must lie.
        default: named in the message unless it is None.

    Raises:
        ConfigError: it lies elsewhere.
    """
    if value is None:
        return
    several = isinstance(value, tuple | list)
    if any(number not in allowed for number in (value if several else (value,))):
        hint = "" if default is None else f" for the default, {default}"
        raise ConfigError(
            option, value, f"{'each' if several else 'it'} must {allowed}", f"Correct it, or leave it out{hint}."
        )


def check_numbers(group: str, options: Any, **allowed: Range) -> None:
    """Check fields of a dataclass of options: numbers lie where they must, and only what may be null is.

    Args:
        group: what the user writes before the fields' names, for example `data.engine`.
        options: the dataclass.
        **allowed: field name -> where its number must lie.

    Raises:
        ConfigError: a number lies elsewhere, or null was given where it means nothing (which jsonargparse lets pass).
    """
    refuse_null(group, options)
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    for name, where in allowed.items():
        check_number(f"{group}.{name}", getattr(options, name), where, defaults[name])


def refuse_null(group: str, options: Any) -> None:
    """Refuse null for fields of a dataclass whose type has no None.

    Raises:
        ConfigError: null was given.
    """
    hints = get_type_hints(type(options))
    for field in dataclasses.fields(options):
        if getattr(options, field.name) is None and type(None) not in get_args(hints[field.name]):
            raise ConfigError(
                f"{group}.{field.name}",
                None,
                "null is not a value of this option",
                "Give one, or leave the option out.",
            )
