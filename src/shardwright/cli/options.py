"""Command-line options that several commands share, and the printing of results and errors."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer
import typer.core

from shardwright.comm.limits import Ranks
from shardwright.command_signals import INTERRUPTED
from shardwright.errors import CheckpointError, CommunicationError, LayoutError, PlanError, RankFailedError, explain
from shardwright.formatting import json_text, printable

F = TypeVar("F", bound=Callable[..., Any])

BAD_INPUT, FAILURE = 2, 1

Shared = Mapping[str, Any]
"""The shared options that were given on the command line: values by option name."""

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
        typer.Option(
            help="stdlib, synthetic, a text file, a CIFAR-10 binary folder, or package.module:factory, a function "
            "that returns the dataset of the split 'train' or 'eval'.",
            show_default="stdlib",
        ),
    ],
    "batch": Annotated[_whole, typer.Option(help="Samples in a step, over all ranks.", show_default="8")],
    "seq": Annotated[_whole, typer.Option(help="Tokens in a sample.", show_default="128")],
    "seed": Annotated[_whole, typer.Option(help="Fixes initial values, data order and dropout.", show_default="0")],
    "config": Annotated[Path | None, typer.Option(help="A TOML file of these options; flags win over it.")],
}
"""The options that several commands have, by name; :func:`with_shared` adds them to a command."""


class OptionChecker(typer.core.TyperGroup):
    """The group of ``shardwright`` commands, whose error for unknown options names all of them, not only the first."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that the words of the command line name."""
        words = [*ctx._protected_args, *ctx.args]
        try:
            return super().invoke(ctx)
        except Exception as failure:
            if _is_unknown_option(failure):
                _name_all(failure, words)
            raise


def _is_unknown_option(failure: Exception) -> bool:
    """Returns whether an exception is the ``NoSuchOption`` of click, or of the click that typer comes with."""
    return type(failure).__name__ == "NoSuchOption"


def _name_all(failure: Any, words: list[str]) -> None:
    """Adds to the error of an unknown option those of all other unknown options among ``words``, the command line."""
    errors, context = [failure], failure.ctx
    while at := [i for i, word in enumerate(words) if word.partition("=")[0] == errors[-1].option_name]:
        del words[at[0]]
        try:
            context.command.make_parser(context).parse_args([*words])
            break
        except Exception as another:  # the next unknown option, or another error, such as a missing value
            if not _is_unknown_option(another):
                break
            errors.append(another)
    failure.message = "\n".join(error.format_message() for error in errors)
    failure.possibilities = None


def examples(*lines: str) -> str:
    """Returns the paragraph of examples at the end of a command's ``--help``, one a line.

    >>> examples("shardwright doctor").splitlines()[1:]
    ['Examples:', '  shardwright doctor']
    """
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


RUN_FOLDER = typer.Argument(metavar="RUN", help="The --out folder of a run.", show_default="runs/train")
FROM = typer.Option("--from", metavar="RUN", help="The same folder, as an option.")


def run_folder(place: Path | None, named: Path | None) -> Path:
    """Returns the run folder that a command is given, as an argument or by ``--from``; ``runs/train`` without either.

    Raises: PlanError: both are given and differ.

    >>> run_folder(None, Path("runs/first")), run_folder(None, None)
    (PosixPath('runs/first'), PosixPath('runs/train'))
    """
    if place is not None and named is not None and place != named:
        raise PlanError(
            "a command is about one run",
            given=f"{place}, and --from {named}",
            allowed="one folder",
            fix=f"--from {named}",
        )
    return place or named or Path("runs/train")


CONFIG_OF_RUN = Annotated[
    Path | None,
    typer.Option(help="A TOML file whose layout, model, data and batch are read; flags win over it."),
]
"""The option ``config`` of commands about a trained run, whose other options stand in its folder."""
AVERAGES = typer.Option("--averages", help="The averages (EMA) of the checkpoint in place of its parameters.")
JSON = typer.Option("--json", help="Print one JSON object on standard output, and nothing else there.")
RANKS = typer.Option(help="Where ranks run: threads of this process, or processes.")


def parse_pairs(flag: str, key: str, value: str, pairs: list[str] | None) -> dict[str, str]:
    """Returns the pairs of a repeated flag, such as ``--set key=value``, as a dict.

    ``flag``, ``key`` and ``value`` are the flag and the names of its two parts, for errors.

    Of pairs with the same key, the last one counts.

    Raises: PlanError: one of ``pairs`` is not of the form key=value.

    >>> parse_pairs("--role", "PATTERN", "ROLE", ["layers.*.up=column", "head=copied"])
    {'layers.*.up': 'column', 'head': 'copied'}
    """
    values = {}
    for pair in pairs or []:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise PlanError(
                f"{flag} takes {key}={value}",
                given=pair,
                allowed=f"{key}={value}",
                fix=f"write {flag} {name or key}={value.upper()}",
            )
        values[name] = text
    return values


def ranks_of(given: str) -> Ranks:
    """Returns ``given``, the value of ``--ranks``; raises PlanError unless it is "threads" or "processes"."""
    if given in ("threads", "processes"):
        return cast("Ranks", given)
    raise PlanError(
        "ranks run as threads or processes", given=given, allowed="threads, processes", fix="--ranks threads"
    )


def check_one_process(config: Any) -> None:
    """Raises PlanError if ``config`` asks for measured costs and the command runs as several processes.

    Each process would time the layers itself, and so could choose other pipeline stages. The number of processes is
    read from WORLD_SIZE.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if config.measured_costs and size > 1:
        raise PlanError(
            "layers are timed in one process: several processes would each measure different times",
            given=f"--measured-costs in a world of {size} processes",
            allowed="one process, or train, whose first rank measures for all",
            fix="start it without torchrun, or leave out --measured-costs",
        )


def given(**options: Any) -> dict[str, Any]:
    """Returns the options given on the command line: those that are not None."""
    return {key: value for key, value in options.items() if value is not None}


def with_shared(*names: str, **others: Any) -> Callable[[F], F]:
    """Returns a decorator that adds the shared options ``names`` to a command.

    ``others`` has, by name, the annotations of shared options that mean something else in this command. The decorated
    command gets a dict of the shared options that were given on the command line as its first argument.
    """

    def decorate(command: F) -> F:
        own = [*inspect.signature(command, eval_str=True).parameters.values()][1:]
        kind = inspect.Parameter.KEYWORD_ONLY
        more = [
            inspect.Parameter(name, kind, default=None, annotation=others.get(name, SHARED[name])) for name in names
        ]

        @wraps(command)
        def run(**options: Any) -> Any:
            shared = given(**{name: options.pop(name, None) for name in names})
            return command(shared, **options)

        # typer reads both the signature and the annotations to build the command's options
        every = [*more, *(parameter.replace(kind=kind) for parameter in own)]
        run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
        return cast(F, run)

    return decorate


def emit(value: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Prints a command's result on standard output: ``value`` as one JSON object with ``as_json``, else ``text``.

    If the reader of standard output has gone, as ``| head -1`` does after a line, the rest is dropped: the command has
    done its work, and its exit code tells the outcome. Raises: OSError: standard output is on a full disk.
    """
    try:
        # flushed, since at Python's end a failure to write could no longer be told
        print(json_text(value) if as_json else printable(text), flush=True)  # noqa: T201  # the command's result
    except OSError as failure:
        with open(os.devnull, "w") as nowhere:  # text that is still buffered would raise the error again at exit
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        if not isinstance(failure, BrokenPipeError):
            raise


def warn(text: str) -> None:
    """Prints a message on standard error, if that is open, so that it does not mix with the result."""
    with suppress(OSError):
        print(printable(text), file=sys.stderr, flush=True)  # noqa: T201  # what the command says beside it


@contextmanager
def stops_once() -> Iterator[None]:
    """Returns a context in which the first stop signal raises KeyboardInterrupt and later ones change nothing.

    Stop signals are SIGINT, SIGTERM and SIGHUP. While ranks run, the code that has started them handles signals instead
    of this context. Once the block was interrupted, stop signals are ignored to the end of the process, so that later
    signals do not change its exit code. Outside the main thread, which alone may handle signals, it does nothing.
    """
    names = ("SIGINT", "SIGTERM", "SIGHUP") if threading.current_thread() is threading.main_thread() else ()
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    kept = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    is_stopped = False

    def stop(*_: Any) -> None:
        nonlocal is_stopped
        if not is_stopped:
            is_stopped = True
            raise KeyboardInterrupt

    for number in kept:
        signal.signal(number, stop)
    try:
        yield
    except KeyboardInterrupt:
        is_stopped = True
        raise
    finally:
        for number, handler in kept.items():  # Python's end would undo a handler, but not that a signal is ignored
            signal.signal(number, signal.SIG_IGN if is_stopped else handler)


def report_errors(command: F) -> F:
    """Decorates a command so that errors of this library become a message on standard error and an exit code.

    The code is 2 for bad input and files that cannot be used, 1 if ranks or their communication failed, and 130 after
    an interruption. Other exceptions are left as they are.
    """

    @wraps(command)
    def run(*args: Any, **named: Any) -> Any:
        try:
            return command(*args, **named)
        except (LayoutError, PlanError, CheckpointError, RankFailedError, CommunicationError) as failure:
            warn(f"error: {failure}")
            code = FAILURE if isinstance(failure, RankFailedError | CommunicationError) else BAD_INPUT
            raise typer.Exit(code) from None
        except OSError as failure:
            allowed = "paths that can be read and written, on a disk with room"
            wrong = explain("a file or folder cannot be used", given=failure, allowed=allowed, fix="give another path")
            warn(f"error: {wrong}")
            raise typer.Exit(BAD_INPUT) from None
        except KeyboardInterrupt:
            warn("stopped")
            raise typer.Exit(INTERRUPTED) from None

    return cast(F, run)
