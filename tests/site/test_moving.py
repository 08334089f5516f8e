"""The pages about moving from other libraries use names that these libraries have."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

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
