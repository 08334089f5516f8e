"""What others rely on: public names, the verbs of the command and their flags, the format of a checkpoint."""

from __future__ import annotations

import dataclasses
import inspect

import typer

import shardwright
from shardwright.checkpoint import manifest
from shardwright.cli.main import app
from shardwright.train.config import TrainConfig

NAMES = [
    *("Axis", "CrossEntropy", "Layout", "MeanSquaredError", "Mesh", "Run", "Verdict", "World"),
    *("global_tensor", "launch", "layer_alone", "load", "parallelize", "plan_layouts", "run_on_threads", "save"),
    *("time_layers", "verify", "without_values"),
]

RUN = {"--layout", "--model", "--set", "--role", "--measured-costs", "--batch", "--seq", "--config", "--json"}
FLAGS = {
    "train": RUN
    | {"--data", "--steps", "--stop-at", "--seed", "--lr", "--schedule", "--warmup", "--weight-decay", "--clip"}
    | {"--save-every", "--save-async", "--keep", "--check-every"}
    | {"--eval-every", "--tensorboard", "--deterministic", "--debug", "--timeout-s"}
    | {"--bind-cores", "--grace-s"}
    | {"--offload-folder", "--out", "--resume", "--changed-data", "--ranks"},
    "verify": RUN | {"--data", "--steps", "--seed", "--dtype", "--ranks"},
    "show": RUN | {"--png", "--timeline", "--memory", "--memory-png", "--measured", "--explain", "--nodes", "--ranks"},
    "plan": {"--layout", "--model", "--set", "--role", "--batch", "--seq", "--config", "--json"}
    | {"--cluster", "--ranks", "--anchor", "--fix", "--without", "--top", "--most-priced", "--memory-limit"}
    | {"--explain", "--png", "--html"},
    "sample": {"--from", "--layout", "--model", "--prompt", "--num", "--temperature", "--seed", "--ranks", "--json"},
    "doctor": {"--json"},
    "launch": {"LAYOUT", "--slurm", "--ray", "--k8s", "--nodes", "--out", "--name", "--time", "--save-before"}
    | {"--restarts", "--cpus", "--gpus", "--sbatch", "--kind", "--image", "--claim", "--mount", "--dry-run"},
    "checkpoint inspect": {"PATH", "--json"},
    "checkpoint export": {"PATH", "TO", "--json"},
}

OPTIONS = [
    *("layout", "model", "settings", "roles", "data", "batch", "seq", "steps", "stop_at", "seed", "lr", "schedule"),
    *("warmup", "weight_decay", "clip", "save_every", "save_async", "keep", "eval_every", "eval_batches"),
    "check_every",
    *("measured_costs", "tensorboard", "deterministic", "debug", "bind_cores", "timeout_s", "grace_s"),
    "offload_folder",
]


def verbs(command, path=()):
    """Every verb and its flags, arguments in capitals."""
    for name, sub in getattr(command, "commands", {}).items():
        yield from verbs(sub, (*path, name))
    if not hasattr(command, "commands"):
        found = {p.opts[0] if p.param_type_name == "option" else p.name.upper() for p in command.params}
        yield " ".join(path), found - {"--help"}


def test_the_public_names_are_these():
    assert shardwright.__all__ == NAMES
    assert all(inspect.getdoc(getattr(shardwright, name)) for name in NAMES)


def test_the_verbs_and_flags_are_these():
    assert dict(verbs(typer.main.get_command(app))) == FLAGS


def test_the_keys_of_a_run_are_these():
    assert [field.name for field in dataclasses.fields(TrainConfig)] == OPTIONS


def test_the_format_of_a_checkpoint_is_this():
    assert (manifest.FORMAT, manifest.VERSION, manifest.MANIFEST) == ("shardwright-checkpoint", 2, "manifest.json")


def test_names_that_the_pages_give_are_where_they_were():
    from shardwright.comm import Link
    from shardwright.global_tensor import Route, plan_to_global
    from shardwright.ledger import measure_memory, predict_memory

    assert all(inspect.getdoc(each) for each in (Link, Route, plan_to_global, measure_memory, predict_memory))
    assert shardwright.Run.draws.fget is not None, "the former name of rng"
