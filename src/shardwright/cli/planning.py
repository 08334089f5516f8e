"""The command ``shardwright plan``: predicts what layouts cost on a cluster, before devices are rented."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from torch import nn

from shardwright.analysis.objects.marked_inputs import first_repeated
from shardwright.cli import options as opt
from shardwright.cli.options import emit, report_errors, warn, with_shared
from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Layout

if TYPE_CHECKING:
    from shardwright.cost.cluster import Cluster
    from shardwright.planner.batches import BatchPlans
    from shardwright.planner.explain import PriceDifference
    from shardwright.planner.plan_results import Plans
    from shardwright.train.config import TrainConfig


_QUIET_S = 3.0
"""The seconds after which a search begins to print the layouts that it has priced."""


def model_and_batch(config: TrainConfig) -> tuple[nn.Module, nn.Module, tuple[Any, Any]]:
    """Returns the config's model and loss, without values, and a global batch (inputs, targets): one sample repeated.

    Raises: PlanError: the model is a user's own, and the shape of its batches is unknown; and as
        :func:`~shardwright.train.opening.opened_example`.
    """
    from shardwright.train.opening import opened_example

    model, loss, batch = opened_example(replace(config, layout="single", batch=min(2, config.batch)))
    if batch is None:
        raise PlanError(
            "a step of this model cannot be priced: the shape of its batches is unknown",
            given=f"--model {config.model}",
            allowed="a model of your own with the data that it trains on, or mlp, attention, convnet and gpt",
            fix="give --data package.module:factory, as to train, or call shardwright.plan_layouts(model, cluster, "
            "batch, ...) with a batch of your own",
        )
    return model, loss, first_repeated(batch, config.batch)


@report_errors
@with_shared(
    "layout", "model", "set_", "role", "data", "batch", "seq", "config",
    layout=Annotated[str | None, typer.Option(help="One layout to price, such as 'dp2 tp2'.", show_default="a search")],
    batch=Annotated[str | None, typer.Option(
        help="Samples in a step, over all ranks; auto:MIN-MAX finds the batch of the most tokens a second.",
        show_default="8",
    )],
)  # fmt: skip
def plan(
    shared: opt.Shared,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="NAME:NODESxRANKS, such as a100-80gb:128x8, or a TOML file.", show_default="a100-80gb, with --layout"
        ),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Say where the predictions of a run's steps were off.")
    ] = None,
    fix: Annotated[str, typer.Option(help="Parts of a line that must hold, such as 'tp8 dp/zero1'.")] = "",
    without: Annotated[str, typer.Option(help="Axes and options to leave out, such as zb-v,offload.")] = "",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, such as 512,1024: the best for each.")] = "",
    anchor: Annotated[
        list[str] | None, typer.Option(help="LINE=SECONDS of a run on this cluster, which corrects prices; repeat.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="The most layouts to list.")] = 10,
    most_priced: Annotated[int, typer.Option(min=1, help="The most layouts to rehearse and price.")] = 4,
    memory_limit: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="The share of a device's memory that a layout may take.")
    ] = 0.92,
    explain: Annotated[
        list[str] | None, typer.Option(help="A layout of which to say why it is not the best; repeat for more.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the priced layouts to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with all of it to this file.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Rehearse all anew; read and keep nothing of plans of the same model.")
    ] = False,
    as_json: Annotated[bool, opt.JSON] = False,
) -> None:
    """Predicts what layouts cost on a cluster, and which is best: seconds part by part, memory by stage, traffic.

    With --layout it prices that one alone; a layout in the --config file is laid beside the best one that a search
    finds. A model of your own is read on a sample of the --data that it trains on. The exit code is 2 if none fits the
    device's memory.
    """
    from shardwright.cli.run_config import config_of, with_file
    from shardwright.cost.cluster import Cluster
    from shardwright.planner.anchors import anchors_in
    from shardwright.planner.plans import plan_layouts
    from shardwright.planner.records_file import default_folder
    from shardwright.planner.ways_out import ways_beside

    sizes, numbers = batches_in(shared.get("batch", "")), ranks_in(ranks)
    if sizes:
        shared = {**shared, "batch": sizes[0]}
    _check_beside(
        len(sizes) > 1, numbers, replays=replay is not None, anchors=bool(anchor), draws=bool(explain or png or html),
        layouts="layout" in shared,
    )  # fmt: skip
    if replay is not None:
        from shardwright.cli.replaying import check_no_others, replayed

        of_search = {"--fix": fix, "--without": without, "--ranks": ranks, "--anchor": anchor, "--explain": explain}
        check_no_others([name for name, value in {**of_search, "--png": png, "--html": html}.items() if value])
        emit(*replayed(replay, shared, cluster), as_json=as_json)
        return
    cluster = _here() if cluster == "here" else cluster or "a100-80gb"
    config = config_of(shared)
    _check_data(shared, config)
    layout = Layout.parse(config.layout) if "layout" in shared else None
    in_file = [] if "layout" in shared or config.layout == "single" else [config.layout]
    # before a search, which takes seconds
    layouts = [Layout.parse(line) for line in (*in_file, *(explain or []))]
    sized = layout or (layouts[0] if in_file and not numbers else None)
    on = Cluster.parse(cluster, sized.num_ranks if sized else numbers[0] if numbers else None)
    if "seq" not in with_file(shared, "seq"):
        config = with_longest(config)
    model, loss, batch = model_and_batch(config)
    price = partial(
        plan_layouts, model, loss=loss, memory_limit=memory_limit, roles=config.roles,
        anchors=anchors_in(anchor or []), keep_in=None if fresh else default_folder(),
    )  # fmt: skip
    words = without.replace(",", " ").split()
    search = partial(price, layout=layout, fix=fix, top=top, without=words, most_priced=most_priced)
    with _says_what_it_does():
        outcome = _searched(
            search, on, [Cluster.parse(cluster, number).with_ranks(number) for number in numbers], sizes, batch
        )
        first = outcome.plans[0]
        price = partial(price, cluster=on, batch=outcome.batch)
        if layout is not None and not first.fits(first.best):
            outcome.plans[0] = first = replace(first, ways_out=ways_beside(layout, partial(price, most_priced=1)))
    entries, texts = outcome.to_dict(), outcome.texts()
    compared: list[PriceDifference] = []
    for line in (*(in_file if not numbers else ()), *(explain or [])):
        text, row = _explained(line, first, price, compared)
        texts.append(f"the layout in {shared.get('config')}: " * (line in in_file) + text)
        entries.setdefault("explained", []).append(row)
    emit(entries, "\n\n".join(texts), as_json=as_json)  # before files are written, which may fail
    _draw(first, compared, png, html, title=f"Plan for {config.model}")
    if not any(plans.fits(plans.best) for plans in outcome.plans):
        raise typer.Exit(opt.BAD_INPUT)


def _check_data(shared: opt.Shared, config: TrainConfig) -> None:
    """Raises PlanError if ``--data`` is given for a built-in model."""
    if "data" in shared and ":" not in config.model:
        raise PlanError(
            "a plan of a built-in model reads no data",
            given=f"--data {shared['data']}",
            allowed="--data beside a --model of your own, or beside --replay",
            fix="leave out --data",
        )


@dataclass
class _FoundPlans:
    """The plans that were found on each of several clusters, or for each of several batches.

    ``refused`` are the errors of clusters without a layout, by their number of ranks. ``batch`` is the global batch
    that was planned, the best of ``batches`` if these are given.
    """

    plans: list[Plans]
    batch: tuple[Any, Any]
    batches: BatchPlans | None = None
    by_ranks: bool = False
    refused: dict[int, LayoutError] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plans as ``--json`` prints them."""
        entries: dict[str, Any] = self.plans[0].to_dict()
        if self.by_ranks:
            entries = {"by_ranks": [plans.to_dict() for plans in self.plans]}
        if self.refused:
            entries["refused"] = {str(number): str(failure) for number, failure in self.refused.items()}
        if self.batches is not None:
            entries |= {"batch": self.batches.best, "by_batch": self.batches.rows()}
        return entries

    def texts(self) -> list[str]:
        """Returns the paragraphs that the command prints."""
        paragraphs = [] if self.batches is None else [self.batches.text()]
        paragraphs += [f"{plans.cluster}: " * self.by_ranks + plans.text() for plans in self.plans]
        return paragraphs + [f"{number} ranks: {failure}" for number, failure in self.refused.items()]


def _searched(
    wanted: Callable[..., Plans], cluster: Cluster, clusters: Sequence[Cluster], sizes: Sequence[int],
    batch: tuple[Any, Any],
) -> _FoundPlans:  # fmt: skip
    """Searches on ``cluster`` for each size of a batch if there are several, or on each of ``clusters`` if given.

    Raises: LayoutError: no cluster has a layout.
    """
    from shardwright.planner.batches import plan_batches

    if len(sizes) > 1:
        batches = plan_batches(sizes, lambda size: wanted(cluster=cluster, batch=first_repeated(batch, size)))
        return _FoundPlans([batches.plans[batches.best]], first_repeated(batch, batches.best), batches)
    outcome = _FoundPlans([], batch, by_ranks=bool(clusters))
    for candidate in clusters or [cluster]:
        try:
            outcome.plans.append(wanted(cluster=candidate, batch=batch))
        except LayoutError as failure:
            if not clusters or (not outcome.plans and candidate is clusters[-1]):
                raise
            outcome.refused[candidate.num_ranks] = failure  # the other numbers of ranks have their layouts
    return outcome


def with_longest(config: TrainConfig) -> TrainConfig:
    """Returns ``config`` with samples as long as its built-in model takes, and prints that; unchanged without a limit.

    >>> from shardwright.train.config import TrainConfig
    >>> with_longest(TrainConfig(settings={"max_tokens": 2048})).seq
    2048
    """
    from shardwright.models import configure

    settings = None if ":" in config.model else configure(config.model, config.settings)
    tokens = getattr(settings, "max_tokens", None)
    if tokens in (None, config.seq):
        return config
    warn(f"samples of {tokens:,} tokens, the model's max_tokens; --seq gives another length")
    return replace(config, seq=tokens)


def _here() -> str:
    """Returns the name of the cluster file that ``calibrate`` has written here; raises PlanError if there is none."""
    from shardwright.planner.predicted import HERE

    if Path(HERE).exists():
        return HERE
    raise PlanError(
        "this machine has not been measured",
        given=f"--cluster here, and no file {HERE} in {Path.cwd()}",
        allowed=f"a file {HERE}, the name of an accelerator, or a TOML file",
        fix=f"run shardwright calibrate, which writes {HERE}",
    )


class _SearchLog(logging.Handler):
    """A log handler that prints the layouts a search has priced on standard error, once it has taken a few seconds."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._start_s = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        """Prints the message of a record."""
        if (seconds := time.monotonic() - self._start_s) > _QUIET_S:
            warn(f"{record.getMessage()} ({seconds:.0f} s)")


@contextmanager
def _says_what_it_does() -> Iterator[None]:
    """Returns a context in which a search prints the layouts that it has priced."""
    log, handler = logging.getLogger("shardwright.planner"), _SearchLog()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _draw(
    plans: Plans, compared: Sequence[PriceDifference], png: Path | None, html: Path | None, *, title: str
) -> None:
    if png:
        from shardwright.report.plan_picture import draw_plans

        with _named(png):
            draw_plans(plans, png)
    if html:
        from shardwright.report.plan_page import write_plan_page

        with _named(html):
            write_plan_page(html, plans, compared, title=title)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Returns a context that adds the path to an OSError of its block that names no file, as that of a full disk."""
    try:
        yield
    except OSError as failure:
        if failure.filename is None:
            failure.filename = str(path)
        raise


def _explained(
    line: str, plans: Plans, price: Callable[..., Plans], compared: list[PriceDifference]
) -> tuple[str, dict[str, Any]]:
    """Returns as text and as data why a layout is not the best, and adds the comparison to those ``compared``."""
    try:
        other = price(layout=line).best
    except (LayoutError, PlanError) as problem:
        return f"{line} cannot be: {problem}", {"layout": line, "why": str(problem), "fits": False}
    compared.append(plans.compare(other))
    return compared[-1].text(), compared[-1].to_dict()


def _check_beside(
    varies: bool, numbers: Sequence[int], *, replays: bool, anchors: bool, draws: bool, layouts: bool
) -> None:  # fmt: skip
    """Raises PlanError for options that do not fit several batch sizes (``varies``) or several ``numbers`` of ranks."""
    for is_given, what, option in (
        (replays, "a run has one batch", "--replay"),
        (bool(numbers), "one of the two varies", "--ranks"),
        (anchors, "an anchor is of one batch", "--anchor"),
    ):
        if varies and is_given:
            options = f"{option} beside --batch auto:MIN-MAX"
            raise PlanError(what, given=options, allowed="one of them", fix="write --batch with a number")
    ranks = f"--ranks {','.join(map(str, numbers))}"
    for is_given, what, option in (
        (layouts, "a layout has one number of ranks", "--layout"),
        (anchors and len(numbers) > 1, "an anchor is of one number of ranks", "--anchor"),
    ):
        if numbers and is_given:
            fix = "leave out --ranks" if layouts else f"write --ranks {numbers[0]}"
            raise PlanError(what, given=f"{option} beside {ranks}", allowed="one of them", fix=fix)
    if numbers and draws:
        raise PlanError(
            "a picture, a page and an explanation are of one number of ranks",
            given=f"{ranks} beside --explain, --png or --html",
            allowed="one of them",
            fix=f"write --cluster with {numbers[0]} ranks, and leave out --ranks",
        )


def batches_in(text: str) -> tuple[int, ...]:
    """Returns the sizes of a batch in text such as "64" or "auto:8-512": the least, its doublings and the most.

    Raises: PlanError: the text is neither a number from 1 nor such a range.

    >>> batches_in("64"), batches_in("auto:8-40"), batches_in("")
    ((64,), (8, 16, 32, 40), ())
    """
    from shardwright.planner.batches import doublings

    numbers = text.removeprefix("auto:").split("-") if text.startswith("auto:") else [text]
    if not text:
        return ()
    if len(numbers) > 2 or text.startswith("auto:") != (len(numbers) == 2) or not all(map(str.isdecimal, numbers)):
        least, most = 0, 0
    else:
        least, most = int(numbers[0]), int(numbers[-1])
    if not 0 < least <= most:
        raise PlanError(
            "no such size of a batch",
            given=f"--batch {text}",
            allowed="a number of samples from 1, or auto:MIN-MAX",
            fix="write --batch 64, or --batch auto:8-512",
        )
    return doublings(least, most) if len(numbers) == 2 else (least,)


def ranks_in(text: str) -> tuple[int, ...]:
    """Returns the numbers of ranks in text such as "512,1024".

    Raises: PlanError: the text has something else than numbers from 1 to 2**20 between commas.

    >>> ranks_in("512,1024"), ranks_in("")
    ((512, 1024), ())
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and 0 < int(word) <= 2**20 for word in words):
        raise PlanError("no such numbers of ranks", given=text, allowed="--ranks 512,1024", fix="write --ranks 8")
    return tuple(map(int, words))
