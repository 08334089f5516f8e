"""What the verbs share: how options are read, and how results and errors leave."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

import typer

from shardwright.errors import (
    CheckpointError,
    CommunicationError,
    LayoutError,
    PlanError,
    RankFailedError,
    explain,
)
from shardwright.units import json_text

F = TypeVar("F", bound=Callable[..., Any])

BAD_INPUT, FAILURE, INTERRUPTED = 2, 1, 130

LAYOUT = typer.Option(help="One line of layout, such as 'dp2 tp2'.", show_default="single")
MODEL = typer.Option(help="mlp, attention, convnet, gpt, or package.module:factory.", show_default="gpt")
SET = typer.Option("--set", help="key=value for the model's config; repeat for more.")
DATA = typer.Option(help="stdlib, synthetic, a text file, or a CIFAR-10 binary folder.", show_default="stdlib")
BATCH = typer.Option(help="Samples in a step, over all ranks.", show_default="8")
SEQ = typer.Option(help="Tokens in a sample.", show_default="128")
SEED = typer.Option(help="Fixes initial values, data order and dropout.", show_default="0")
CONFIG = typer.Option(help="A TOML file of these options; flags win over it.")
JSON = typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")
RANKS = typer.Option(help="Where ranks run: threads of this process, or processes.")


def settings_of(pairs: list[str] | None) -> dict[str, str]:
    """The settings that ``--set key=value`` gives."""
    found = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise PlanError(
                explain(
                    "--set takes key=value", given=pair, allowed="key=value", fix=f"write --set {key or 'key'}=VALUE"
                )
            )
        found[key] = value
    return found


def check_ranks(ranks: str) -> None:
    """Raises PlanError for a place where ranks cannot run."""
    if ranks not in ("threads", "processes"):
        raise PlanError(
            explain(
                "ranks run as threads or processes", given=ranks, allowed="threads, processes", fix="--ranks threads"
            )
        )


def given(**options: Any) -> dict[str, Any]:
    """The options that were given: flags left out are None."""
    return {key: value for key, value in options.items() if value is not None}


def emit(value: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Prints a result: for a program or for a person."""
    print(json_text(value) if as_json else text)  # noqa: T201


def say(text: str) -> None:
    """Prints to a person, beside the result."""
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
