"""Builds frozen config dataclasses from settings: values or text are parsed by the fields' type hints, and checked."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from shardwright.errors import PlanError, fix_for

Config = TypeVar("Config")

_LONGEST = 80

_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def check_sizes(config: object, least: int, *names: str) -> None:
    """Raises PlanError unless every named field of ``config`` is ``least`` or more.

    >>> from types import SimpleNamespace
    >>> check_sizes(SimpleNamespace(width=0), 1, "width")
    Traceback (most recent call last):
    shardwright.errors.PlanError: 'width' is too small
      given:   0
      allowed: 1 or more
      fix:     set width=1 or more
    """
    for name in names:
        value = getattr(config, name)
        if value < least:
            raise PlanError(
                f"'{name}' is too small", given=value, allowed=f"{least} or more", fix=f"set {name}={least} or more"
            )


def check_fraction(name: str, value: float, example: float = 0.1) -> None:
    """Raises PlanError unless ``value`` is a fraction from 0 to below 1; the fix is to set it to ``example``.

    >>> check_fraction("dropout", 1.5)
    Traceback (most recent call last):
    shardwright.errors.PlanError: 'dropout' is no fraction below 1
      given:   1.5
      allowed: 0 to below 1
      fix:     set dropout=0.1
    """
    if not 0 <= value < 1:
        raise PlanError(
            f"'{name}' is no fraction below 1", given=value, allowed="0 to below 1", fix=f"set {name}={example}"
        )


def parse_value(name: str, value: object, hint: Any) -> Any:
    """Returns ``value``, which may be text, converted to the type ``hint``.

    Types are bool, int, float, str, None, ``Literal``, tuples of one type, and unions of these. For any other ``hint``,
    text is read as a Python literal or, if it is none, stays text, and other values are returned as they are. ``name``
    is the name of the setting, for the error.

    Raises: PlanError: the value does not have that type, or is an integer of more than 64 bits.

    >>> parse_value("widths", "32,64,10", tuple[int, ...]), parse_value("tied", "no", bool)
    ((32, 64, 10), False)
    >>> parse_value("num_layers", "four", int)
    Traceback (most recent call last):
    shardwright.errors.PlanError: 'num_layers' does not have the right type
      given:   'four'
      allowed: a whole number of up to 64 bits
      fix:     write num_layers=1
    """
    text = value.strip() if isinstance(value, str) else None
    try:
        if hint is bool and isinstance(value, str | bool):
            return _BOOLS[text.lower()] if text is not None else value
        if hint in (int, float) and not isinstance(value, bool) and isinstance(value, str | int | hint):
            number = hint(value)
            if hint is int and not -(2**63) <= number < 2**64:
                raise ValueError(name)
            return number
        if hint is str and text is not None:
            return text
        if get_origin(hint) is Literal and value in get_args(hint):
            return value
        if get_origin(hint) is tuple and isinstance(value, str | tuple | list):
            items = [item for item in text.strip("()[]").split(",") if item.strip()] if text is not None else value
            return tuple(parse_value(name, item, get_args(hint)[0]) for item in items)
        if get_origin(hint) in (Union, UnionType):
            return _parse_first(name, value, get_args(hint))
        if hint is type(None) and (value is None or text in ("none", "None")):
            return None
    except (KeyError, ValueError, OverflowError):
        pass
    else:
        kinds = (bool, int, float, str, type(None))
        if hint not in kinds and get_origin(hint) not in (Literal, tuple, Union, UnionType):
            return _parse_literal(value)  # no rule for this hint
    allowed, example = _describe(hint)
    fix = f"write {name}={example}"
    if get_origin(hint) is Literal:
        fix = fix_for(text or "", map(str, get_args(hint)), before=f"write {name}=")
    raise PlanError(f"'{name}' does not have the right type", given=_shown(value), allowed=allowed, fix=fix)


def _parse_first(name: str, value: object, hints: tuple[Any, ...]) -> Any:
    """Returns the value as the first of ``hints`` that accepts it; ``str`` is tried last, since it accepts any text."""
    for hint in sorted(hints, key=lambda hint: hint is str):
        try:
            return parse_value(name, value, hint)
        except PlanError:
            continue
    raise ValueError(name)


def _shown(value: object) -> str:
    """Returns a value as text, shortened."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4300 digits
        text = f"a {type(value).__name__} too long to be written"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _parse_literal(value: object) -> Any:
    """Returns the value of a Python literal, or any other text unchanged."""
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError):
        return value


def _describe(hint: Any) -> tuple[str, str]:
    """Returns the values that a type hint allows, in words, and one example."""
    if get_origin(hint) is Literal:
        return ", ".join(map(str, get_args(hint))), str(get_args(hint)[0])
    if get_origin(hint) is tuple:
        return "whole numbers with commas between", "32,64,10"
    described = {
        bool: ("true or false", "true"),
        int: ("a whole number of up to 64 bits", "1"),
        float: ("a number", "0.1"),
    }
    return described.get(hint, (str(getattr(hint, "__name__", hint)), "..."))


def read_config(config: type[Config], settings: Mapping[str, object]) -> Config:
    """Returns a config built from settings, whose values may be text; all other fields have their defaults.

    Raises: PlanError: a key that the config does not have, or a value of the wrong type or out of range.

    >>> from shardwright.models.mlp import MLPConfig
    >>> read_config(MLPConfig, {"widths": "8,16,4", "dropout": 0.1})
    MLPConfig(widths=(8, 16, 4), activation='gelu', dropout=0.1)
    >>> read_config(MLPConfig, {"width": "8"})
    Traceback (most recent call last):
    shardwright.errors.PlanError: MLPConfig has no setting 'width'
      given:   width=8
      allowed: widths, activation, dropout
      fix:     write widths
    """
    names = [field.name for field in fields(config)]  # type: ignore[arg-type]
    hints = get_type_hints(config)
    check_known(config.__name__, settings, names)
    return config(**{key: parse_value(key, value, hints[key]) for key, value in settings.items()})


def check_known(owner: str, settings: Mapping[str, object], names: list[str]) -> None:
    """Raises PlanError unless all keys of ``settings`` are among ``names``; the error suggests for each the nearest.

    >>> check_known("GPTConfig", {"width": 64}, ["width", "num_layers"])
    >>> check_known("GPTConfig", {"widht": 64, "num_layer": 2, "width": 8}, ["width", "num_layers"])
    Traceback (most recent call last):
    shardwright.errors.PlanError: GPTConfig has no setting 'widht' and none 'num_layer'
      given:   widht=64, num_layer=2
      allowed: width, num_layers
      fix:     write width; write num_layers
    """
    unknown = {key: value for key, value in settings.items() if key not in names}
    if unknown:
        no_name = "leave out {}, or write one of those allowed" if names else "leave out {}"
        named = " and none ".join(f"'{key}'" for key in unknown)
        raise PlanError(
            f"{owner} has no setting {named}",
            given=", ".join(f"{key}={value}" for key, value in unknown.items()),
            allowed=", ".join(names) or "nothing",
            fix="; ".join(fix_for(key, names, no_name.format(key)) for key in unknown),
        )
