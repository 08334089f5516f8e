"""The pages about moving from other libraries use names that these libraries have, and that this one has."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest
import typer.main
from torch import nn

import shardwright as sw
from shardwright.cli.main import app
from shardwright.layout import Layout
from shardwright.strategies import choose

FOLDER = Path(__file__).parents[2] / "docs" / "moving"


def first_cells(page):
    """What stands in code in the first column of a page's table."""
    rows = re.findall(r"^\| (.+?) \| ", (FOLDER / f"{page}.md").read_text(), flags=re.M)
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row)]


def has(dotted):
    """Whether a module or an attribute of one has this name."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@pytest.mark.filterwarnings("ignore")  # of modules of torch that only a look imports
@pytest.mark.parametrize(("page", "least"), [("ddp", 10), ("fsdp2", 18)])
def test_names_of_torch_are_torchs(page, least):
    names = {name for code in first_cells(page) for name in re.findall(r"\btorch(?:\.\w+)+", code)}
    assert len(names) >= least
    assert not {name for name in names if not has(name)}
    assert not has("torch.distributed.no_such_name")


def test_options_of_torch_are_torchs():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    of_ddp = inspect.signature(DistributedDataParallel).parameters
    assert {"find_unused_parameters", "static_graph", "bucket_cap_mb"} <= of_ddp.keys()
    assert {"reshard_after_forward", "mesh"} <= inspect.signature(fully_shard).parameters.keys()
    assert {"param_dtype", "reduce_dtype"} <= inspect.signature(MixedPrecisionPolicy).parameters.keys()
    assert all(hasattr(DistributedDataParallel, name) for name in ("no_sync", "join", "register_comm_hook"))


@pytest.mark.filterwarnings("ignore")  # of a package that we do not choose the version of
def test_names_of_accelerate_are_its_own():
    accelerate = pytest.importorskip("accelerate", reason="make zoo-contract has it")
    methods = {name for code in first_cells("accelerate") for name in re.findall(r"\baccelerator\.(\w+)", code)}
    assert len(methods) >= 12
    assert not {name for name in methods if not hasattr(accelerate.Accelerator, name)}
    config = inspect.signature(import_module("accelerate.parallelism_config").ParallelismConfig).parameters
    assert {"dp_replicate_size", "dp_shard_size", "tp_size", "cp_size"} <= config.keys()
    assert "fsdp_version" in inspect.signature(accelerate.FullyShardedDataParallelPlugin).parameters
    assert "zero_stage" in inspect.signature(accelerate.DeepSpeedPlugin).parameters
    assert callable(accelerate.notebook_launcher)


@pytest.mark.filterwarnings("ignore")
def test_names_of_the_trainer_are_its_own():
    transformers = pytest.importorskip("transformers", reason="make zoo-contract has it")
    known = {
        name
        for kind in (transformers.TrainingArguments, transformers.Trainer, transformers.Trainer.train)
        for name in inspect.signature(kind).parameters
    } | {*dir(transformers.Trainer)}
    names = {re.match(r"\w+", code)[0] for code in first_cells("trainer")} - {"Trainer", "TrainingArguments"}
    assert len(names) >= 25
    assert not names - known


def second_cells():
    """What stands in code in the second column of the pages' tables, ours, with the name of its page."""
    for page in sorted(FOLDER.glob("*.md")):
        for row in re.findall(r"^\| .+? \| (.+) \|$", page.read_text(), flags=re.M):
            yield from ((page.stem, code) for code in re.findall(r"`([^`]+)`", row))


def asked_for(code):
    """The layout line that a cell in code asks for, with numbers and names in place of N and NAME; else None."""
    line = code.strip('"').replace("NAME", "x").replace("mbN", "mb4").replace("/ahead:N", "/ahead:2")
    line = f"dp8/zero1{line}" if line.startswith(("/offload", "/ahead")) else f"dp8{line}" if line[0] == "/" else line
    return line if re.fullmatch(r"((dp|tp|pp|mb)\d\S*|bf16|fp16|recompute:\w+)( \S+)*", line) else None


def test_our_side_of_each_table_has_names_layouts_and_commands_that_exist():
    def work(world):
        run = sw.parallelize(nn.Linear(2, 2), "single", world)
        owners, seen = {"sw": sw, "run": run, "world": world}, set()
        for page, code in second_cells():
            for owner, name in re.findall(r"\b(sw|run|world)\.(\w+)", code):
                assert hasattr(owners[owner], name), (page, code)
                seen.add(owner)
            if line := asked_for(code):
                choose(Layout.parse(line))  # options that no strategy has are refused here
                seen.add("layout")
            if code.startswith(("shardwright ", "train --")):
                verb, *words = code.removeprefix("shardwright ").split()
                command = typer.main.get_command(app).commands[verb]
                options = {option for parameter in command.params for option in parameter.opts}
                assert {word for word in words if word.startswith("--")} <= options, (page, code)
                seen.add("command")
        return seen

    assert sw.launch(work, 1, ranks="threads")[0] == {"sw", "run", "world", "layout", "command"}
