"""What others rely on: public names and parameters, the layout line, the command and its JSON, checkpoints."""

from __future__ import annotations

import dataclasses
import inspect
import json

import pytest
import torch
import typer
from typer.testing import CliRunner

import shardwright
from shardwright.axes import KEYS, WORDS, layout_axes
from shardwright.checkpoint import manifest
from shardwright.cli.main import app
from shardwright.layout import COMPILERS, OWN
from shardwright.strategies import STRATEGIES
from shardwright.train.config import TrainConfig

NAMES = [
    *("Accelerator", "Axis", "CrossEntropy", "Layout", "MeanLoss", "MeanSquaredError", "Mesh", "ModelLoss", "Run"),
    *("Verdict", "World"),
    *("global_tensor", "launch", "layer_alone", "load", "load_weights", "packed", "parallelize", "per_sample"),
    "plan_layouts",
    *("run_on_threads", "samples_in", "save", "save_weights"),
    *("time_layers", "verify", "whole", "without_values"),
]

PARAMETERS = {
    "Accelerator": "layout world mixed_precision= gradient_accumulation_steps= seed=",
    "MeanLoss": "function ignore_index",
    "ModelLoss": "labels shifted= ignore_index= over=",
    "CrossEntropy": "ignore_index label_smoothing",
    "Layout": "factors num_microbatches precision recompute own_statistics compile",
    "Layout.from_dict": "mapping",
    "Layout.parse": "line",
    "Mesh": "**sizes",
    "launch": "work ranks_or_layout *args ranks= **options",
    "layer_alone": "layer layout world num_tokens= seed=",
    "load": "path run optimizer",
    "load_weights": "run source names= strict= averages=",
    "packed": "tensor counts",
    "parallelize": "model layout world loss= seed= num_tokens= strategies= roles= example= seconds= stop_at_nan= "
    "offload_folder= check_every=",
    "per_sample": "values",
    "plan_layouts": "model cluster batch loss= layout= fix= without= top= most_priced= anchors= tokens= memory_limit= "
    "roles= keep_in= look_further=",
    "run_on_threads": "mesh work device=",
    "samples_in": "tensor dim",
    "save": "folder run optimizer extra= keep= wait=",
    "save_weights": "source to format= names= dtype= config= model= max_file_bytes= averages= force= check_only=",
    "time_layers": "model inputs repeats",
    "verify": "model layout batches loss= dtype= seed= ranks= strategies= alter= launcher= roles= seconds= targets=",
    "whole": "tensor",
    "without_values": "",
}
"""The parameters of functions: ``name=`` is given by name alone, and ``*`` stands for several."""

METHODS = {
    "accumulate": "batches",
    "average": "optimizer decay from_initial=",
    "busy_seconds": "",
    "changed": "",
    "clip_grad_norm_": "max_norm",
    "evaluate": "batch",
    "evaluate_all": "batches",
    "explain": "path",
    "generate": "inputs seed= **options",
    "global_parameters": "placement sbp",
    "kept": "",
    "load_global_parameters": "tensors",
    "load_state_dict": "state full= strict= from_rank=",
    "observed": "events",
    "optimizer": "kind parameters **options",
    "part": "inputs targets num_global",
    "pieces": "batch num_microbatches",
    "predict": "inputs",
    "profile": "path",
    "receiving": "",
    "rehearse_with": "batch values first_step=",
    "shard": "batches targets",
    "share": "num_samples",
    "state_dict": "full=",
    "step": "batch update",
    "timeline": "batch",
    "stop_requested": "",
    "summing": "",
    "wait_saves": "",
}
"""The methods of a run with their parameters."""

ATTRIBUTES = {
    "averages",
    "weights_read",
    "axes",
    "coord",
    "loss",
    "model",
    "num_steps",
    "offload",
    "parameters",
    "plan",
    "rng",
    "world",
} | {*("draws", "loss_buffers", "loss_scale", "num_skipped")}

SPELLINGS = {
    "data_parallel on dp": "bucket bucket:0 fp32-sums",
    "pipeline on pp": "1f1b auto cut cut:conv1,conv2 cut:token,blocks.1 dualpipe-v file gpipe interleaved "
    "interleaved:v2 naive scatter zb-h1 zb-h2 zb-v",
    "spatial on tp": "spatial",
    "tensor_1d on tp": "no-overlap regather seq sp",
    "tensor_2d on tp": "2d 2d:summa no-overlap regather seq",
    "tensor_2p5d on tp": "2.5d 2.5d:d1 2.5d:d2 2.5d:d3 2.5d:summa no-overlap regather seq",
    "tensor_3d on tp": "3d 3d:classic no-overlap regather seq",
    "zero on dp": "ahead ahead:0 ahead:2 offload offload:disk zero1 zero2 zero3",
}
"""The options of each strategy in a layout line: their names, and the spellings with values that the registry lists."""

LAYOUT_AXES = {
    "pp": ("pp", (), "pipeline: microbatches schedule"),
    "dp": ("dp | replica dp", (), "data: zero"),
    "cp": ("cp", (), "context: "),
    "tp": ("tp | row col | depth row col", ("auto",), "tensor: depth mode"),
}
"""The axes of a layout line: the mesh axes by numbers of sizes, options that choose others, and dictionary keys."""

RUN = {"--layout", "--model", "--set", "--role", "--measured-costs", "--batch", "--seq", "--config", "--json"}
FLAGS = {
    "train": RUN
    | {"--data", "--steps", "--stop-at", "--seed", "--lr", "--schedule", "--warmup", "--weight-decay", "--clip"}
    | {"--save-every", "--save-async", "--keep", "--check-every"}
    | {
        "--eval-every",
        "--eval-batches",
        "--ema",
        "--averages",
        "--tensorboard",
        "--logger",
        "--profile",
        "--deterministic",
        "--debug",
        "--timeout-s",
    }
    | {"--bind-cores", "--grace-s"}
    | {"--weights", "--weights-prefix", "--cluster"}
    | {"--offload-folder", "--out", "--resume", "--changed-data", "--ranks"},
    "verify": RUN
    | {"--data", "--steps", "--seed", "--dtype", "--ranks", "--weights", "--weights-prefix", "--averages"},
    "show": RUN
    | {"--png", "--timeline", "--memory", "--memory-png", "--measured", "--explain", "--nodes", "--ranks"}
    | {"--cluster", "--data"},
    "plan": {"--layout", "--model", "--set", "--role", "--data", "--batch", "--seq", "--config", "--json"}
    | {"--cluster", "--ranks", "--anchor", "--fix", "--without", "--top", "--most-priced", "--memory-limit"}
    | {"--explain", "--png", "--html", "--replay", "--fresh"},
    "report": {"RUNS", "--from", "--compare", "--model", "--data", "--out", "--json"},
    "evaluate": {"RUN", "--from", "--layout", "--model", "--data", "--batch", "--config", "--num", "--split"}
    | {"--averages", "--ranks", "--json"},
    "predict": {
        "RUN",
        "--from",
        "--layout",
        "--model",
        "--data",
        "--batch",
        "--config",
        "--num",
        "--split",
        "--to",
        "--force",
        "--averages",
        "--ranks",
        "--json",
    },
    "init": {"FOLDER", "--json"},
    "sample": {
        "RUN",
        "--from",
        "--layout",
        "--model",
        "--data",
        "--config",
        "--prompt",
        "--tokenizer",
        "--num",
        "--temperature",
        "--seed",
        "--averages",
        "--ranks",
        "--json",
    },
    "calibrate": {"--layout", "--model", "--set", "--data", "--batch", "--seq", "--config", "--json"}
    | {"--out", "--num-ranks", "--base", "--force", "--ranks"},
    "doctor": {"--json"},
    "launch": {"LAYOUT", "--slurm", "--ray", "--k8s", "--nodes", "--out", "--name", "--time", "--save-before"}
    | {"--restarts", "--cpus", "--gpus", "--sbatch", "--kind", "--image", "--claim", "--mount", "--dry-run"},
    "checkpoint inspect": {"PATH", "--json"},
    "checkpoint export": {
        "PATH",
        "TO",
        "--force",
        "--format",
        "--config",
        "--model",
        "--dtype",
        "--prefix",
        "--max-file-gb",
        "--averages",
        "--json",
    },
}

OPTIONS = [
    *("layout", "model", "settings", "roles", "data", "batch", "seq", "steps", "stop_at", "seed", "lr", "schedule"),
    *("warmup", "weight_decay", "clip", "save_every", "save_async", "keep", "eval_every", "eval_batches", "ema"),
    "check_every",
    *("measured_costs", "cluster", "tensorboard", "deterministic", "debug", "bind_cores", "timeout_s", "grace_s"),
    *("offload_folder", "weights", "weights_prefix", "averages", "logger", "profile"),
]

TINY = ["--set", "num_layers=2", "--set", "width=16", "--set", "num_heads=2", "--seq", "16", "--batch", "4", "--json"]

PLAN_ROW = (
    "layout step_s step_s_expected step_s_low step_s_high tokens_per_s utilisation memory_bytes memory_rank "
    "memory_by_kind memory_by_stage offloaded_bytes host_bytes traffic_bytes traffic_by_axis exposed_s_by_axis bubble "
    "waterfall limit fits why rehearsals"
)
JSON = [
    (
        "show --layout pp2,mb2,dp2,tp2 --memory --nodes 2x4 --explain blocks.0.mlp.up",
        {
            "": "layout world_size mesh num_parameters strategies ranks nodes parameters layers shares layer_traffic "
            "schedule bubble seconds_from stages timeline memory explain",
            "strategies": "name axis source",
            "ranks": "rank coord slice num_parameters num_owned parameter_bytes gradient_bytes optimizer_bytes samples "
            "sent_bytes",
            "nodes": "num_nodes ranks_per_node axes warnings",
            "nodes.axes.dp": "crosses between_bytes",
            "parameters": "name shape cut local_shapes sync rest",
            "parameters.rest": "parameter gradient optimizer",
            "layers": "module kind role strategy why parameters",
            "shares": "factor share flops is_low whole text",
            "layer_traffic": "layer strategy sent_bytes",
            "shares.whole": "module share why",
            "stages": "stage chunks share_of_time parameter_bytes activation_bytes why_large",
            "stages.chunks": "chunk calls",
            "timeline": "bubble makespan_s spans memory",
            "memory": "rank predicted",
            "memory.predicted": "peak_bytes action at_peak",
            "memory.predicted.at_peak": "parameters gradients optimizer batch activations logits messages backward "
            "shared",
            "explain": "module class layout rank role parameters forward sends",
            "explain.role": "name strategy why",
            "explain.parameters": "name shape held computes_in cut elements_stored stored_in stored",
            "explain.forward": "rung module name by",
        },
    ),
    (
        "verify --layout dp2",
        {
            "": "equal max_relative_error worst_parameter first_difference first_error loss_error gradients_error "
            "parameters_error buffers_error tolerance parameters world_size steps allowed own_error presence shares "
            "flops left_whole only_float32"
        },
    ),
    (
        "plan --layout dp2,bf16 --cluster a100-80gb:1x2 --explain dp2 --explain dp3",
        {
            "": "cluster num_parameters batch memory_limit_bytes best layouts runner_up searched priced unpriced "
            "simulated fit rejected ways_out "
            "seconds baseline_step_s constants warnings notes explained",
            "layouts": PLAN_ROW,
            "layouts.waterfall": "matmul attention memory launch pp dp cp tp optimizer bubble other",
            "seconds": "records search",
            "constants": "name value unit meaning source bounds",
            "explained": "layout against why fits step_s memory_bytes parts",
            "explained.parts": "part best_s this_s more_s",
        },
    ),
    (
        "plan --ranks 2",
        {
            "": "by_ranks",
            "by_ranks": "cluster num_parameters batch memory_limit_bytes best layouts runner_up searched priced "
            "unpriced simulated fit rejected "
            "ways_out seconds baseline_step_s constants warnings notes",
            "by_ranks.layouts": PLAN_ROW,
            "by_ranks.rejected": "reason count nearest detail",
        },
    ),
]
"""What commands print with --json: the keys at each path, where a list stands for its entries; some keys are data."""


def verbs(command, path=()):
    """Every verb and its flags, arguments in capitals."""
    for name, sub in getattr(command, "commands", {}).items():
        yield from verbs(sub, (*path, name))
    if not hasattr(command, "commands"):
        found = {p.opts[0] if p.param_type_name == "option" else p.name.upper() for p in command.params}
        yield " ".join(path), found - {"--help"}


def test_the_public_names_are_these():
    assert shardwright.__all__ == NAMES
    assert [name for name in dir(shardwright) if not name.startswith("__")] == NAMES
    assert all(inspect.getdoc(getattr(shardwright, name)) for name in NAMES)


def test_the_verbs_and_flags_are_these():
    assert dict(verbs(typer.main.get_command(app))) == FLAGS


def parameters_of(function):
    """The names of a function's parameters in the notation of ``PARAMETERS``."""
    kinds = {"VAR_POSITIONAL": "*{}", "VAR_KEYWORD": "**{}", "KEYWORD_ONLY": "{}="}
    found = inspect.signature(function).parameters.values()
    return " ".join(kinds.get(each.kind.name, "{}").format(each.name) for each in found if each.name != "self")


def test_the_parameters_of_public_functions_are_these():
    functions = {name for name in NAMES if inspect.isfunction(getattr(shardwright, name))}
    assert functions <= PARAMETERS.keys()
    found = {}
    for name in PARAMETERS:
        owner, _, method = name.partition(".")
        owner = getattr(shardwright, owner)
        found[name] = parameters_of(getattr(owner, method) if method else owner)
    assert found == PARAMETERS


def test_the_public_names_of_a_run_are_these():
    def names(world):
        run = shardwright.parallelize(torch.nn.Linear(2, 2), "single", world, loss=shardwright.MeanSquaredError())
        return {name for name in dir(run) if not name.startswith("_")}

    methods = {name for name, value in inspect.getmembers(shardwright.Run, inspect.isfunction) if name[0] != "_"}
    assert {name: parameters_of(getattr(shardwright.Run, name)) for name in methods} == METHODS
    assert shardwright.launch(names, 1, ranks="threads") == [METHODS.keys() | ATTRIBUTES]


def test_the_options_of_a_layout_line_are_these():
    found = {}
    for strategy in STRATEGIES.values():
        words = set(strategy.options)
        for name, option in strategy.options.items():
            spelled = {word for each in option.written(name) for word in each.split("/")}
            words |= spelled | {f"{name}:{pin}" for pin in option.pins}
        own = {word for word in words if word.partition(":")[0] in strategy.options}  # examples name others' too
        found[f"{strategy.name} on {strategy.axis}"] = " ".join(sorted(own))
    assert found == SPELLINGS


def test_the_axes_and_words_of_a_layout_are_these():
    found = {
        name: (
            " | ".join(map(" ".join, axis.mesh_axes)),
            axis.automatic,
            f"{axis.keyword}: {' '.join(sorted(axis.keys))}",
        )
        for name, axis in layout_axes().items()
    }
    assert found == LAYOUT_AXES
    assert WORDS == ("mb", "bf", "fp", "single", "recompute", "compile")
    assert KEYS == ("parallel", "microbatches", "precision", "recompute", "compile", "size", "options")
    assert (OWN, COMPILERS) == ("own-statistics", ("inductor", "aot_eager"))


def keys_at(value, path):
    """The keys of all dictionaries at ``path``."""
    found = [value]
    for name in path.split(".") if path else ():
        found = [each[name] for each in found if name in each]
        found = [entry for each in found for entry in (each if isinstance(each, list) else [each])]
    return {key for each in found for key in each}


@pytest.mark.sampled(0)
@pytest.mark.parametrize(("words", "keys"), JSON, ids=[words for words, _ in JSON])
def test_the_keys_of_a_command_in_json_are_these(words, keys):
    found = CliRunner().invoke(app, [*(word.replace(",", " ") for word in words.split()), *TINY])
    assert found.exit_code == 0, found.output
    value = json.loads(found.stdout)
    assert {path: keys_at(value, path) for path in keys} == {path: set(names.split()) for path, names in keys.items()}


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
