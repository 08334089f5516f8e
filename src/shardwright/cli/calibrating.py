"""The command ``shardwright calibrate``: measures this machine, and writes a cluster file that ``plan`` takes."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated

import psutil
import typer

from shardwright import devices
from shardwright.cli import options as opt
from shardwright.cli.options import emit, report_errors, with_shared
from shardwright.comm.limits import check_can_start
from shardwright.errors import PlanError
from shardwright.layout import Layout


@report_errors
@with_shared("layout", "model", "set_", "data", "batch", "seq", "config")
def calibrate(
    shared: opt.Shared,
    out: Annotated[Path, typer.Option(help="The TOML file to write, which plan --cluster takes.")] = Path(
        "cluster.toml"
    ),
    num_ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks in data parallel, without --layout; all devices by default.")
    ] = None,
    base: Annotated[
        str, typer.Option(help="The profile of the accelerator, where its own name is like no profile's.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Save it even if what was measured spreads too far.")] = False,
    ranks: Annotated[str, opt.RANKS] = "processes",
    as_json: Annotated[bool, opt.JSON] = False,
) -> None:
    """Measures this machine in 90 seconds: products, memory, operators, a block of the model, messages over each axis.

    It writes a cluster file for plan --cluster. Other programs on the machine disturb it: what spreads by more than
    20 % is not saved, with exit code 2.
    """
    from shardwright.cli.run_config import config_of, is_first_rank
    from shardwright.planner.calibrate import calibrate as measure
    from shardwright.train.opening import opened_example

    backend = opt.ranks_of(ranks)
    if out.suffix != ".toml":
        raise PlanError(
            "a cluster file is TOML", given=out, allowed="a name that ends in .toml", fix=f"--out {out}.toml"
        )
    check_file(out)
    if num_ranks is not None and "layout" in shared:
        raise PlanError(
            "the layout says how many ranks there are", given=f"--num-ranks {num_ranks} beside --layout",
            allowed="one of them", fix="leave out --num-ranks",
        )  # fmt: skip
    if "layout" not in shared:
        number = num_ranks or devices.count() or min(4, psutil.cpu_count() or 1)
        shared = {**shared, "layout": f"dp{number}" if number > 1 else "single"}
    config = config_of(shared)
    layout = Layout.parse(config.layout)
    check_can_start(layout.num_ranks, backend)
    _, _, batch = opened_example(config)
    if batch is None:
        raise PlanError(
            "a block of this model cannot be run: the shape of its batches is unknown",
            given=f"--model {config.model}",
            allowed="a model of your own with the data that it trains on, or mlp, attention, convnet and gpt",
            fix="give --data package.module:factory, as to train, or call shardwright.planner.calibrate.calibrate("
            "build, batch, layout) with a batch of your own",
        )
    cluster = measure(config.build, batch, layout, ranks=backend, base=base)
    if not is_first_rank():
        return
    if not force:
        cluster.check_spread()
    check_file(out)  # again: the measuring takes a while
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        partial.write_text(cluster.text(), encoding="utf-8")
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    value = {"file": str(out), "spread": dict(cluster.spread), "cluster": dict(cluster.table)}
    emit(value, f"{cluster.summary()}\nwritten to {out}: shardwright plan --cluster {out}", as_json=as_json)


def check_file(path: Path) -> None:
    """Raises PlanError unless a file can be written at ``path``: a new one or in place of a regular one.

    Its folder is made if it is missing.

    >>> check_file(Path("/dev/null"))
    Traceback (most recent call last):
    shardwright.errors.PlanError: cannot write '/dev/null'
      given:   a device or a pipe
      allowed: a new file, or a regular one, in a folder that can be written
      fix:     give another --out
    """
    why = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            mode = stat.S_IFREG
        if not stat.S_ISREG(mode):
            why = {stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link"}.get(stat.S_IFMT(mode), "a device or a pipe")
        elif not os.access(path.parent, os.W_OK):
            why = "a folder that cannot be written"
    except (OSError, ValueError) as failure:
        why = str(failure)
    if why:
        raise PlanError(
            f"cannot write '{path}'",
            given=why,
            allowed="a new file, or a regular one, in a folder that can be written",
            fix="give another --out",
        )
