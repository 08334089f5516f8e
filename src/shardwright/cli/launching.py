"""The command ``shardwright launch``: writes or submits a cluster job (Slurm, Ray, Kubernetes) that trains a layout."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from typing import Annotated, Any

import typer

from shardwright.cli.options import BAD_INPUT, emit, report_errors, warn
from shardwright.cluster import kubernetes, ray_driver
from shardwright.cluster import slurm as slurm_script
from shardwright.cluster.job import ClusterJob, seconds_of
from shardwright.errors import PlanError
from shardwright.initial_values import without_values
from shardwright.layout import Layout
from shardwright.nodes import Nodes
from shardwright.parallelize.planning import job_for

EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}
_NOT_OPTIONS = ("layout", "out", "ranks", "as_json", "resume", "changed_data")
_TAKEN = ("--layout", "--out", "--ranks")


@report_errors
def launch(
    ctx: typer.Context,
    layout: Annotated[str, typer.Argument(help="One line of layout, such as 'pp2 mb4 dp2 tp2'.")],
    slurm: Annotated[bool, typer.Option("--slurm", help="An sbatch script.")] = False,
    ray: Annotated[bool, typer.Option("--ray", help="A driver for a Ray cluster.")] = False,
    k8s: Annotated[bool, typer.Option("--k8s", help="A Kubernetes manifest.")] = False,
    nodes: Annotated[str | None, typer.Option(help="Nodes x ranks on each, such as 2x4; by default one node.")] = None,
    out: Annotated[str, typer.Option(help="The folder of the run, which all nodes share.")] = "runs/train",
    name: Annotated[str, typer.Option(help="The name of the job.")] = "shardwright",
    time: Annotated[str, typer.Option(help="Slurm: the time limit.")] = "24:00:00",
    save_before: Annotated[int, typer.Option(help="Seconds that ranks have to save before they are ended.")] = 180,
    restarts: Annotated[int, typer.Option(help="Starts after a failure, within the job.")] = 3,
    cpus: Annotated[int, typer.Option(help="Processor cores of each rank.")] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs of each rank, 0 or 1.")] = 0,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="Slurm: an option of sbatch, such as --partition=gpu.")
    ] = None,
    kind: Annotated[str, typer.Option(help="Kubernetes: jobset or pytorchjob.")] = "jobset",
    image: Annotated[str, typer.Option(help="Kubernetes: the image, which has shardwright.")] = "",
    claim: Annotated[str, typer.Option(help="Kubernetes: the volume claim of the run's folder.")] = "runs",
    mount: Annotated[str, typer.Option(help="Kubernetes: where the volume is mounted.")] = "/runs",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the file, and submit nothing.")] = False,
) -> None:
    """Writes (--dry-run) or submits a job that trains a layout on a cluster; options of train follow behind --."""
    if [slurm, ray, k8s].count(True) != 1:
        raise PlanError(
            "launch writes for one cluster",
            given=" ".join(["--slurm"] * slurm + ["--ray"] * ray + ["--k8s"] * k8s) or "none",
            allowed="--slurm, --ray or --k8s",
            fix=f"shardwright launch --slurm '{layout}'",
        )
    num_ranks = Layout.parse(layout).num_ranks
    on = Nodes.parse(nodes) if nodes is not None else Nodes(1, num_ranks)
    on.check(num_ranks)
    _check_train(ctx, layout, on)
    job = ClusterJob(
        layout=layout, nodes=on, out=out, options=tuple(ctx.args), name=name, time_s=seconds_of(time),
        save_s=save_before, restarts=restarts, cpus=cpus, gpus=gpus,
    )  # fmt: skip
    if slurm:
        _send(slurm_script.sbatch_script(job, sbatch or ()), ["sbatch"], "Slurm", dry_run=dry_run)
    elif k8s:
        if kind not in kubernetes.KINDS or not image:
            raise PlanError(
                "a manifest needs a kind and an image",
                given=f"--kind {kind}, --image {image or 'none'}",
                allowed=f"{', '.join(kubernetes.KINDS)}; an image with shardwright in it",
                fix="write --kind jobset --image registry/name:tag",
            )
        manifest = json.dumps(kubernetes.manifest_of(job, kind, image, claim, mount), indent=2) + "\n"
        _send(manifest, ["kubectl", "apply", "-f", "-"], "Kubernetes", dry_run=dry_run)
    elif dry_run:
        emit({}, ray_driver.driver_script(job).rstrip(), as_json=False)
    else:
        _run_on_ray(job)


def _check_train(ctx: typer.Context, layout: str, nodes: Nodes) -> None:
    """Checks the options for ``train`` before the job waits in a queue, and warns of axes that cross between nodes."""
    from shardwright.cli.run_config import config_of
    from shardwright.report.description import describe

    commands: Any = ctx.find_root().command
    values = commands.commands["train"].make_context("train", list(ctx.args)).params
    taken_words = [word for word in ctx.args if word.partition("=")[0] in _TAKEN]
    if taken_words:
        raise PlanError(
            "launch itself gives train some of its options",
            given=", ".join(taken_words),
            allowed="the others, behind --",
            fix="give launch the layout and --out",
        )
    flags = {key: value for key, value in values.items() if key not in _NOT_OPTIONS}
    config = config_of({"layout": layout}, **flags)
    with without_values():
        model, loss, model_config = config.build()
    inputs = config.example(model_config)
    job = job_for(model, loss, Layout.parse(layout), inputs, config.num_tokens, config.roles)
    for text in describe(job, Layout.parse(layout), inputs=inputs, nodes=nodes)["nodes"]["warnings"]:
        warn(f"warning: {text}")


def _send(text: str, command: list[str], cluster: str, *, dry_run: bool) -> None:
    """Prints the file of a job, or submits it to the cluster by ``command``."""
    if dry_run:
        emit({}, text.rstrip(), as_json=False)
        return
    if shutil.which(command[0]) is None:
        _not_there(f"{command[0]} is not on the PATH, so there is no {cluster} to submit to")
    done = subprocess.run(command, input=text, text=True, check=False)
    if done.returncode:
        _not_there(f"{command[0]} refused the job, with code {done.returncode}")


def _not_there(why: str) -> None:
    warn(f"error: {why}; --dry-run prints the file")
    raise typer.Exit(BAD_INPUT)


def _run_on_ray(job: ClusterJob) -> None:
    """Runs a job on the Ray cluster of this machine, and returns when the job has ended."""
    if importlib.util.find_spec("ray") is None:
        _not_there("Ray is not installed here (pip install ray)")
    import ray

    try:
        ray.init(address="auto", log_to_driver=True)
    except ConnectionError:
        _not_there("no Ray cluster runs here (ray start --head)")
    ray_driver.run(job)
