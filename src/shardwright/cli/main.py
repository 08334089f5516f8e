"""The commands of ``shardwright``: each reads its options, calls one function of the library and prints the result."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

# Only modules that `import shardwright` loads anyway stand here. A command imports train and report when it runs,
# because they load rich and psutil, which --help and checkpoint do not need.
import shardwright
from shardwright import command_start
from shardwright.checkpoint.manifest import find, read, steps_in
from shardwright.cli import options as opt
from shardwright.cli.calibrating import calibrate
from shardwright.cli.launching import EXTRA, launch
from shardwright.cli.options import emit, report_errors, warn, with_shared
from shardwright.cli.planning import plan
from shardwright.cli.predicting import evaluate, predict
from shardwright.cli.reporting import PAGE, report, run_in
from shardwright.cli.starting import init
from shardwright.cli.weights import export, opened_with_weights
from shardwright.comm.limits import check_can_start
from shardwright.comm.started_world import started_by
from shardwright.command_signals import INTERRUPTED
from shardwright.errors import CheckpointError, PlanError, explain
from shardwright.formatting import format_bytes, format_count
from shardwright.layout import Layout
from shardwright.nodes import Nodes
from shardwright.parallelize.planning import job_for
from shardwright.verify import verify as compare

app = typer.Typer(
    name="shardwright",
    cls=opt.OptionChecker,
    help=shardwright.__doc__,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
checkpoints = typer.Typer(help="Inspects and exports checkpoints.", no_args_is_help=True)
app.add_typer(checkpoints, name="checkpoint")

Json = Annotated[bool, opt.JSON]

MANY_THREADS = 256
"""The most ranks as threads for which ``verify`` prints no warning; 256 took 49 CPU seconds, and 1,024 took 120."""


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    started_by()  # so that all commands read torch's names of ranks
    if version:
        emit({}, f"shardwright {shardwright.__version__}", as_json=False)
        raise typer.Exit


@app.command(
    epilog=opt.examples(
        'shardwright train --layout "dp2 tp2" --steps 300 --out runs/first',
        "shardwright train --layout tp4 --steps 600 --resume --out runs/first",
        "shardwright train --config run.toml --logger tensorboard",
        'shardwright train --model my_model:build --data my_model:data --layout "pp2 mb4"',
    )
)
@report_errors
@with_shared("layout", "model", "set_", "role", "measured_costs", "data", "batch", "seq", "seed", "config")
def train(
    shared: opt.Shared,
    steps: Annotated[int | None, typer.Option(help="Total number of steps.", show_default="100")] = None,
    stop_at: Annotated[int | None, typer.Option(help="End after this step, to resume later; 0: run all steps.")] = None,
    lr: Annotated[float | None, typer.Option(help="Highest learning rate.", show_default="0.001")] = None,
    schedule: Annotated[str | None, typer.Option(help="cosine, linear or constant.", show_default="cosine")] = None,
    warmup: Annotated[int | None, typer.Option(help="Warm-up steps until the highest rate.", show_default="10")] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help="AdamW's weight decay, norms and biases too.", show_default="0.1")
    ] = None,
    clip: Annotated[float | None, typer.Option(help="Largest gradient norm; 0 for none.", show_default="1")] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints; 0: at the end.")] = None,
    save_async: Annotated[
        bool | None,
        typer.Option("--save-async/--no-save-async", help="Write checkpoints beside training.", show_default=False),
    ] = None,
    keep: Annotated[int | None, typer.Option(help="Checkpoints to keep; 0 for all.", show_default="3")] = None,
    eval_every: Annotated[
        int | None, typer.Option(help="Steps between evaluations of the held-out data; 0: none.", show_default="0")
    ] = None,
    eval_batches: Annotated[
        int | None, typer.Option(help="Evaluate this many batches only, the first ones; 0: all.", show_default="0")
    ] = None,
    ema: Annotated[
        float | None,
        typer.Option(help="Average the parameters with this decay, as 0.999, and evaluate these averages; 0: do not."),
    ] = None,
    check_every: Annotated[int | None, typer.Option(help="Steps between comparisons of ranks; 0: none.")] = None,
    tensorboard: Annotated[bool | None, typer.Option("--tensorboard", help="Write TensorBoard events too.")] = None,
    logger: Annotated[
        str | None,
        typer.Option(help="tensorboard, wandb, mlflow, or package.module:function of a row; commas between several."),
    ] = None,
    profile: Annotated[
        int | None, typer.Option(help="Profile so many steps, after three, into trace.json in --out.", show_default="0")
    ] = None,
    deterministic: Annotated[bool | None, typer.Option("--deterministic", help="Repeatable kernels only.")] = None,
    debug: Annotated[bool | None, typer.Option("--debug", help="Check that ranks make the same calls.")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Seconds a collective may wait.", show_default="600")] = None,
    grace_s: Annotated[
        float | None, typer.Option(help="Seconds ranks have to save after a stop signal.", show_default="30")
    ] = None,
    bind_cores: Annotated[bool | None, typer.Option("--bind-cores", help="Give each process cores of its own.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(help="The cluster to predict steps for, as in plan.", show_default="here.toml if there is one"),
    ] = None,
    offload_folder: Annotated[
        str | None, typer.Option(help="Where /offload:disk keeps its files.", show_default="the temporary folder")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder of the run.")] = Path("runs/train"),
    weights: Annotated[
        str | None,
        typer.Option(help="Start from these weights: a file or folder of safetensors, torch or this library."),
    ] = None,
    weights_prefix: Annotated[
        str | None, typer.Option(help="What names in --weights have before those of the model, such as 'model.'.")
    ] = None,
    averages: Annotated[
        bool | None, typer.Option("--averages", help="Of --weights, a run, take the averages (EMA).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint in --out.")] = False,
    changed_data: Annotated[
        bool,
        typer.Option("--changed-data", help="Resume even if files of --data have changed since the run was started."),
    ] = False,
    ranks: Annotated[str, opt.RANKS] = "processes",
    as_json: Json = False,
) -> None:
    """Trains a model under a layout: progress, metrics, checkpoints and a report page.

    A step whose loss or gradients are not finite ends the run with exit code 1, and is not saved.
    """
    from shardwright.cli.run_config import config_of, is_first_rank
    from shardwright.train.loop import train as run_training
    from shardwright.train.out_folder import CHECKPOINTS

    backend = opt.ranks_of(ranks)
    config = config_of(
        shared, resumed=out if resume else None, steps=steps, stop_at=stop_at, lr=lr, schedule=schedule,
        warmup=warmup, weight_decay=weight_decay, clip=clip, save_every=save_every, save_async=save_async, keep=keep,
        eval_every=eval_every, eval_batches=eval_batches, ema=ema, averages=averages, check_every=check_every,
        tensorboard=tensorboard, logger=logger, profile=profile, deterministic=deterministic, debug=debug,
        timeout_s=timeout_s, bind_cores=bind_cores, offload_folder=offload_folder, grace_s=grace_s, weights=weights,
        weights_prefix=weights_prefix, cluster=cluster, fits=out,
    )  # fmt: skip
    try:
        with opt.stops_once():
            summary = run_training(config, out, resume=resume, ranks=backend, changed_data=changed_data)
    except KeyboardInterrupt as stop:
        saved = steps_in(out / CHECKPOINTS)
        why = f"{stop}\n" if str(stop) else ""
        if is_first_rank():
            done = f"; {saved[-1]} is complete, continue with --resume" if saved else " before the first checkpoint"
            warn(f"{why}stopped{done}")
        raise typer.Exit(INTERRUPTED) from None
    if is_first_rank():
        _print_summary(summary, out, config, as_json=as_json)


def _print_summary(summary: dict[str, Any], out: Path, config: Any, *, as_json: bool) -> None:
    """Writes the report page of a run, prints its summary, and exits with an error code if the run ended early."""
    try:
        summary["report"] = str(_report(out, config))
    except (OSError, CheckpointError, PlanError) as failure:  # the checkpoint is safe, a page is not worth an error
        summary["report"] = f"not written: {failure}"
    emit(summary, _summary_text(summary, out), as_json=as_json)
    if summary["diverged"] is not None:
        after = f"--resume continues from {summary['checkpoint']}" if summary["checkpoint"] else "start anew"
        wrong = explain(
            f"the run ended at step {summary['diverged']}, which was not saved",
            given="a loss or gradients that are not finite",
            allowed="finite values: AdamW does not recover from others",
            fix=f"{after}, with a lower --lr or --clip, or a longer --warmup",
        )
        warn(f"error: {wrong}")
        raise typer.Exit(opt.FAILURE)
    if summary["stopped"]:
        warn(f"stopped at step {summary['steps']}; continue with --resume")
        raise typer.Exit(INTERRUPTED)


def _summary_text(summary: dict[str, Any], out: Path) -> str:
    """Returns the text that ``train`` prints at its end."""
    loss = "no steps" if summary["first_loss"] is None else f"{summary['first_loss']:.4f} -> {summary['last_loss']:.4f}"
    speed = ""
    if summary["step_ms_median"] is not None:
        unit = "samples" if summary["tokens_per_s_median"] is None else "tokens"
        speed = f"\n  step        {summary['step_ms_median']:.0f} ms median, "
        speed += f"{format_count(summary[f'{unit}_per_s_median'])} {unit}/s"
    trained = ""
    if summary["trained_parameters"] != summary["parameters"]:
        trained = f", {format_count(summary['trained_parameters'])} of them trained"
    return (
        f"trained {summary['layout']} on {summary['world_size']} ranks: {summary['steps']} steps, "
        f"{format_count(summary['parameters'])} parameters{trained}\n  loss        {loss}{speed}\n"
        f"  memory      {format_bytes(max(summary['peak_memory_bytes']))} peak per rank\n"
        f"  checkpoint  {summary['checkpoint']}\n  report      {summary['report']}\n"
        f"  metrics     {out / 'metrics.jsonl'}"
        + (f"\n  trace       {summary['trace']} (open it at ui.perfetto.dev)" if summary["trace"] else "")
    )


def _report(out: Path, config: Any) -> Path:
    """Writes the report page of a run, and its pictures, and returns the path of the page."""
    from shardwright.report.pictures import draw_layout, draw_loss
    from shardwright.report.run_page import write_run_page

    run = run_in(out, model=config.model, data=config.data)
    draw_loss(run.rows, out / "loss.png")
    if run.last.description is not None:
        draw_layout(run.last.description, out / "layout.png")
    return write_run_page(out / PAGE, run)


@app.command(
    epilog=opt.examples(
        'shardwright verify --layout "dp2 tp4"',
        'shardwright verify --layout "pp2/zb-v mb4" --ranks processes',
        'shardwright verify --model my_model:build --data my_model:data --layout "dp2/zero3"',
    )
)
@report_errors
@with_shared("layout", "model", "set_", "role", "measured_costs", "data", "batch", "seq", "seed", "config")
def verify(
    shared: opt.Shared,
    steps: Annotated[int, typer.Option(help="Steps to compare.")] = 2,
    dtype: Annotated[
        str | None, typer.Option(help="float64 or float32.", show_default="float64, if the model runs in it")
    ] = None,
    ranks: Annotated[str, opt.RANKS] = "threads",
    weights: Annotated[str, typer.Option(help="Compare with these weights, as train takes them.")] = "",
    weights_prefix: Annotated[str, typer.Option(help="What names in --weights begin with, such as 'model.'.")] = "",
    averages: Annotated[bool, typer.Option("--averages", help="Of --weights, a run, take the averages (EMA).")] = False,
    as_json: Json = False,
) -> None:
    """Compares a layout with one device: the loss, every gradient, the parameters after some steps.

    The exit code is 1 if they are not equal.
    """
    from shardwright.cli.run_config import config_of, is_first_rank
    from shardwright.train.data import SampleOrder, global_batch
    from shardwright.train.fitting import check_room, check_takes
    from shardwright.train.measuring import layer_seconds

    backend = opt.ranks_of(ranks)
    if dtype not in (None, "float64", "float32"):
        raise PlanError(
            "verify compares in float64 or float32", given=dtype, allowed="float64, float32", fix="--dtype float64"
        )
    from_weights: dict[str, Any] = {"weights": weights, "weights_prefix": weights_prefix, "averages": averages}
    config = config_of(shared, {"seq": 64}, steps=steps, **from_weights)
    opt.check_one_process(config)
    num_ranks = Layout.parse(config.layout).num_ranks
    check_can_start(num_ranks, backend)
    if backend == "threads" and num_ranks > MANY_THREADS:
        text = f"{num_ranks:,} ranks take turns as threads of one process, which takes minutes; Ctrl-C ends it"
        typer.echo(f"{text}. The same factors with few ranks, such as dp8 in place of dp4096, take seconds.", err=True)
    plain, loss, model_config, samples = opened_with_weights(config)
    dropped = False
    for module in plain.modules():
        if isinstance(module, torch.nn.Dropout) and module.p == 0:
            module.p, dropped = 0.1, True  # so that the comparison covers dropout masks, which must not depend on ranks
    check_room(plain, Layout.parse(config.layout))
    if model_config is None:
        check_takes(config, plain, loss, samples)
    order = SampleOrder(len(samples), config.batch, config.seed)
    batches = [global_batch(samples, order.batch(step)) for step in range(config.steps)]
    verdict = compare(
        plain, config.layout, batches, loss=loss, dtype=None if dtype is None else getattr(torch, dtype),
        seed=config.seed, ranks=backend, roles=config.roles, seconds=layer_seconds(config),
    )  # fmt: skip
    note = ", with dropout 0.1" if dropped else ""
    if is_first_rank() or not verdict.equal:
        emit(verdict.to_dict(), f"{config.layout}{note}: {verdict}", as_json=as_json)
    if not verdict.equal:
        raise typer.Exit(opt.FAILURE)


@app.command(
    epilog=opt.examples(
        'shardwright show --layout "dp2 tp2" --memory',
        'shardwright show --layout "pp4/zb-v mb8" --timeline pipeline.html',
        'shardwright show --layout "dp2 tp2" --explain blocks.0.mlp.up',
    )
)
@report_errors
@with_shared("layout", "model", "set_", "role", "measured_costs", "data", "batch", "seq", "config")
def show(
    shared: opt.Shared,
    png: Annotated[Path | None, typer.Option(help="Draw the layout into this file as well.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Draw a pipeline's timeline: .png, .html to hover over, .json for Perfetto.")
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Predict, by kind, what ranks hold at a step's peak.")
    ] = False,
    memory_png: Annotated[
        Path | None, typer.Option(help="Draw what a rank holds during the step into this file; implies --memory.")
    ] = None,
    measured: Annotated[
        bool, typer.Option("--measured", help="Run some steps, and show measured beside predicted.")
    ] = False,
    explain: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Say of one module what it holds, runs and sends; (loss) for the loss."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Cut stages, choose pp/auto and tp/auto, and time a pipeline for this cluster.")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(help="Nodes x ranks on each, such as 2x4: show which axes cross between nodes.")
    ] = None,
    ranks: Annotated[str, opt.RANKS] = "processes",
    as_json: Json = False,
) -> None:
    """Shows a layout: what each rank holds and sends, how each layer is parallelized and why, a pipeline's schedule.

    A model of your own is read on a sample of the --data that it trains on. With more than 4,096 ranks the command
    lists one of each set of identical ranks, and the size of the set.
    """
    from shardwright.cli.rehearsal import explanation_of, ledger_of, timelines_of
    from shardwright.cli.run_config import config_of
    from shardwright.report.description import describe
    from shardwright.report.pictures import draw_layout
    from shardwright.report.show import show_text
    from shardwright.train.measuring import layer_seconds
    from shardwright.train.opening import opened_example

    backend = opt.ranks_of(ranks)
    config = config_of(shared)
    opt.check_one_process(config)
    plain, loss, batch = opened_example(config)
    if batch is None:
        warn(
            f"warning: no batch of '{config.model}' is known, so only what shows in its modules is cut: give --data "
            "package.module:factory, as to train"
        )
    inputs = None if batch is None else batch[0]
    layout = Layout.parse(config.layout)
    job = job_for(plain, loss, layout, inputs, config.num_tokens, config.roles)._replace(seconds=layer_seconds(config))
    timed = "timed layers" if job.seconds else ""
    if cluster is not None:
        from shardwright.planner.predicted import by_price

        job = by_price(job, layout, cluster)
    on_nodes = Nodes.of_environment(os.environ, layout.num_ranks) if nodes is None else Nodes.parse(nodes)
    description = describe(job, layout, inputs=inputs, nodes=on_nodes, seconds_from=timed)
    width, with_memory = shutil.get_terminal_size((100, 40)).columns, memory or memory_png is not None
    is_drawn = timeline is not None or (measured and ("timeline" in description or not with_memory))
    arguments = description, config, job, backend, timeline, width
    seen, timelines = timelines_of(*arguments, measured=measured) if is_drawn else ({}, "")
    if png is not None:
        draw_layout(description, png)
    text = "" if as_json else show_text(description, width)
    if with_memory:
        if not as_json:  # a large model's step is rehearsed for minutes
            emit({}, text, as_json=False)
            text = ""
        accounts, ledger = ledger_of(config, job, batch, backend, memory_png, width, measured=measured)
        description, text = {**description, "memory": accounts}, text + ledger
    description, text = {**description, **seen}, text + timelines
    if explain is not None:
        module, text = explanation_of(job, layout, inputs, explain)
        description = {**description, "explain": module}
    emit(description, text, as_json=as_json)


@app.command(
    epilog=opt.examples(
        'shardwright sample runs/first --prompt "def "',
        "shardwright sample runs/first --layout tp2 --temperature 0",
        'shardwright sample runs/tuned --model mine:build --data mine:data --tokenizer pretrained --prompt "Once"',
    )
)
@report_errors
@with_shared("layout", "model", "data", "seed", "config", config=opt.CONFIG_OF_RUN)
def sample(
    shared: opt.Shared,
    run: Annotated[Path | None, opt.RUN_FOLDER] = None,
    from_: Annotated[Path | None, opt.FROM] = None,
    prompt: Annotated[
        str,
        typer.Option(
            help="The text to continue; without a tokenizer, token ids of a model of transformers, as '1 15 27'."
        ),
    ] = "def ",
    tokenizer: Annotated[
        Path | None, typer.Option(help="A folder with a tokenizer, for a model of transformers.")
    ] = None,
    num: Annotated[int, typer.Option(help="Bytes or tokens to write, or samples to classify.")] = 200,
    temperature: Annotated[float, typer.Option(help="Of sampling; 0 takes the most likely token.")] = 0.8,
    averages: Annotated[bool, opt.AVERAGES] = False,
    ranks: Annotated[str, opt.RANKS] = "threads",
    as_json: Json = False,
) -> None:
    """Generates text with a trained model, or classifies pictures, under any layout.

    A model of transformers, which --model names, generates with its own settings. The first rank prints the prompt and
    what follows it: token ids, or text with --tokenizer.
    """
    from shardwright.cli.run_config import with_file
    from shardwright.train.config import TrainConfig
    from shardwright.train.run_file import read_run
    from shardwright.train.sampling import sample as draw

    shared = with_file(shared, "layout", "model", "data", "seed")
    run, layout = opt.run_folder(run, from_), Layout.parse(shared.get("layout", "single"))
    trained = TrainConfig(**read_run(run, model=shared.get("model"), data=shared.get("data")))
    text = draw(
        trained, run, layout, prompt=prompt, num=num, temperature=temperature, seed=shared.get("seed", 0),
        averages=averages, tokenizer=tokenizer, ranks=opt.ranks_of(ranks),
    )  # fmt: skip
    emit({"text": text, "layout": str(layout)}, text, as_json=as_json)


@app.command(
    epilog=opt.examples(
        "shardwright doctor",
        "shardwright doctor --json",
    )
)
@report_errors
def doctor(as_json: Json = False) -> None:
    """Shows this machine's hardware, and measures how fast it computes and communicates."""
    from shardwright.report.machine import machine_text, measure_machine

    machine = measure_machine(lambda what: warn(f"{what} ..."))
    emit(machine, machine_text(machine), as_json=as_json)


app.command(
    context_settings=EXTRA,
    epilog=opt.examples(
        "shardwright launch 'dp16 tp4' --slurm --nodes 8x8 --dry-run > job.sh",
        "shardwright launch 'pp2 dp4 tp8' --k8s --nodes 8x8 --image registry/name:tag -- --steps 1000",
    ),
)(launch)
app.command(
    epilog=opt.examples(
        "shardwright plan --cluster a100-80gb:2x8 --batch 64",
        "shardwright plan --cluster h100-80gb:1x8 --layout 'dp8/zero3 bf16' --explain 'tp8 bf16'",
    )
)(plan)
app.command(
    epilog=opt.examples(
        "shardwright evaluate runs/first",
        "shardwright evaluate runs/first --layout 'dp2 tp2' --split train --num 1000",
    )
)(evaluate)
app.command(
    epilog=opt.examples(
        "shardwright predict runs/first --num 5",
        "shardwright predict runs/first --layout tp2 --num 1000 --to outputs.safetensors",
    )
)(predict)
app.command(epilog=opt.examples("shardwright init first", "cd first && shardwright train --config run.toml"))(init)
app.command(
    epilog=opt.examples(
        "shardwright report runs/first",
        "shardwright report --compare runs/first runs/second",
    )
)(report)
app.command(
    epilog=opt.examples(
        "shardwright calibrate --num-ranks 2 --out here.toml",
        "shardwright plan --cluster here.toml --batch 16",
    )
)(calibrate)


@checkpoints.command(
    epilog=opt.examples(
        "shardwright checkpoint inspect runs/first",
    )
)
@report_errors
def inspect(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or the folder of a run.")], as_json: Json = False
) -> None:
    """Shows the content of a checkpoint: step, layout, tensors, files."""
    folder = find(_inside(path))
    manifest = read(folder)
    tensors = {name: list(shape) for name, (_, shape, _) in manifest.tensors.items()}
    num_bytes = sum(size for size, _ in manifest.files.values())
    value = {
        "path": str(folder), "step": manifest.step, "layout": manifest.layout, "tensors": tensors,
        "files": list(manifest.files), "bytes": num_bytes, "optimizer": manifest.optimizer,
    }  # fmt: skip
    model = {name: shape for name, shape in tensors.items() if not name.startswith("optimizer/")}
    lines = [
        f"{folder}: step {manifest.step}, written under {manifest.layout}, "
        f"{format_bytes(num_bytes)} in {len(manifest.files)} files"
    ]
    lines += [f"  {name:40} {shape}" for name, shape in model.items()]
    lines.append(f"  and the state of {manifest.optimizer or 'no optimizer'}: {len(tensors) - len(model)} tensors")
    emit(value, "\n".join(lines), as_json=as_json)


checkpoints.command(
    epilog=opt.examples(
        "shardwright checkpoint export runs/first model.safetensors",
        "shardwright checkpoint export runs/tuned exported --format transformers --config pretrained/",
        "shardwright checkpoint export runs/tuned adapter --format transformers --model mine:build",
    )
)(export)


def _inside(path: Path) -> Path:
    """Returns the checkpoint folder of a run if ``path`` is the folder of one, else ``path``."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def main() -> None:
    """Runs the ``shardwright`` command; the entry point of the console script.

    Packages of the current folder can be imported, as with ``python -m``: ``--model my_model:build``.
    """
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.append(os.getcwd())  # last: a file here must not hide an installed package
    command_start.imported()
    try:
        app()
    finally:
        command_start.ending()
