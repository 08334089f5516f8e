"""What the verbs share: how options are read, and how results and errors are printed."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer

from shardwright.comm.launch import Ranks
from shardwright.errors import CheckpointError, CommunicationError, LayoutError, PlanError, RankFailedError
from shardwright.formatting import json_text

F = TypeVar("F", bound=Callable[..., Any])

BAD_INPUT, FAILURE, INTERRUPTED = 2, 1, 130

Shared = Mapping[str, Any]
"""The options of several verbs that were given, by name."""

_text, _whole = str | None, int | None
SHARED: Mapping[str, Any] = {
    "layout": Annotated[_text, typer.Option(help="One line of layout, such as 'dp2 tp2'.", show_default="single")],
    "model": Annotated[
        _text, typer.Option(help="mlp, attention, convnet, gpt, or package.module:factory.", show_default="gpt")
    ],
    "set_": Annotated[
        list[str] | None, typer.Option("--set", help="key=value for the model's config; repeat for more.")
    ],
    "role": Annotated[
        list[str] | None,
        typer.Option("--role", help="PATTERN=column, row or copied for the layers whose names match; repeat for more."),
    ],
    "measured_costs": Annotated[
        bool | None,
        typer.Option("--measured-costs", help="Time the layers first, and balance a pipeline's stages by that."),
    ],
    "data": Annotated[
        _text,
        typer.Option(help="stdlib, synthetic, a text file, or a CIFAR-10 binary folder.", show_default="stdlib"),
    ],
    "batch": Annotated[_whole, typer.Option(help="Samples in a step, over all ranks.", show_default="8")],
    "seq": Annotated[_whole, typer.Option(help="Tokens in a sample.", show_default="128")],
    "seed": Annotated[_whole, typer.Option(help="Fixes initial values, data order and dropout.", show_default="0")],
    "config": Annotated[Path | None, typer.Option(help="A TOML file of these options; flags win over it.")],
}
"""The options that several verbs take."""

JSON = typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")
RANKS = typer.Option(help="Where ranks run: threads of this process, or processes.")


def settings_of(pairs: list[str] | None) -> dict[str, str]:
    """The settings that ``--set key=value`` gives."""
    return _pairs("--set", "key", "value", pairs)


def roles_of(pairs: list[str] | None) -> dict[str, str]:
    """The roles that ``--role PATTERN=ROLE`` gives.

    >>> roles_of(["layers.*.up=column", "head=copied"])
    {'layers.*.up': 'column', 'head': 'copied'}
    """
    return _pairs("--role", "PATTERN", "ROLE", pairs)


def _pairs(flag: str, key: str, value: str, pairs: list[str] | None) -> dict[str, str]:
    found = {}
    for pair in pairs or []:
        name, equals, given = pair.partition("=")
        if not equals or not name:
            raise PlanError(
                f"{flag} takes {key}={value}",
                given=pair,
                allowed=f"{key}={value}",
                fix=f"write {flag} {name or key}={value.upper()}",
            )
        found[name] = given
    return found


def ranks_of(given: str) -> Ranks:
    """Where ranks run. Raises PlanError for a place where they cannot."""
    if given in ("threads", "processes"):
        return cast("Ranks", given)
    raise PlanError(
        "ranks run as threads or processes", given=given, allowed="threads, processes", fix="--ranks threads"
    )


def check_alone(config: Any) -> None:
    """Raises PlanError where each of several processes would time the layers and cut the model elsewhere."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if config.measured_costs and size > 1:
        raise PlanError(
            "layers are timed in one process: several processes would each measure other times",
            given=f"--measured-costs in a world of {size} processes",
            allowed="one process, or train, whose first rank measures for all",
            fix="start it without torchrun, or leave out --measured-costs",
        )


def check_pipeline(drawn: object, layout: object, *, wanted: bool) -> None:
    """Raises PlanError where a timeline is wanted and there is none."""
    if wanted and not drawn:
        raise PlanError("there is no pipeline to draw", given=layout, allowed="a layout with pp", fix="write pp2 mb4")


def given(**options: Any) -> dict[str, Any]:
    """The options that were given: flags left out are None."""
    return {key: value for key, value in options.items() if value is not None}


def takes(*names: str) -> Callable[[F], F]:
    """Adds options of ``SHARED`` to a verb; its first argument maps the name of each that was given to its value."""

    def give(verb: F) -> F:
        own = [*inspect.signature(verb, eval_str=True).parameters.values()][1:]
        kind = inspect.Parameter.KEYWORD_ONLY
        more = [inspect.Parameter(name, kind, default=None, annotation=SHARED[name]) for name in names]

        @wraps(verb)
        def run(**options: Any) -> Any:
            shared = given(**{name: options.pop(name, None) for name in names})
            return verb(shared, **options)

        every = [*more, *(parameter.replace(kind=kind) for parameter in own)]
        run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
        return cast(F, run)

    return give


def emit(value: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Prints a result on standard output: ``value`` as one JSON object, or ``text``."""
    print(json_text(value) if as_json else text)  # noqa: T201


def say(text: str) -> None:
    """Prints on standard error, where it does not mix with the result."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def exits_well(verb: F) -> F:
    """Errors become a message on standard error and an exit code: 2 for bad input, 1 for a failure."""

    @wraps(verb)
    def run(*args: Any, **named: Any) -> Any:
        try:
            return verb(*args, **named)
        except (LayoutError, PlanError, CheckpointError) as failure:
            say(f"error: {failure}")
            raise typer.Exit(BAD_INPUT) from None
        except (RankFailedError, CommunicationError) as failure:
            say(f"error: {failure}")
            raise typer.Exit(FAILURE) from None
        except KeyboardInterrupt:
            say("stopped")
            raise typer.Exit(INTERRUPTED) from None

    return cast(F, run)
