"""Users of FSDP2 come and go: two processes of torch read a DCP folder that we wrote, and write one that we read."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import torch
from torch import nn

import shardwright as sw

PROGRAM = textwrap.dedent("""
    import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from shardwright.errors import PlanError
    from shardwright.parallelize.checks import check_model
    from tests_dist.test_fsdp2 import build

    folder, rank = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = build()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    try:
        check_model(model)
    except PlanError as error:
        assert "sharded already" in str(error), error
    else:
        raise AssertionError("a model that FSDP2 has sharded is no plain one")
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=f"{folder}/ours")
    set_model_state_dict(model, state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    dcp.save({"model": get_model_state_dict(model), "step": 1}, checkpoint_id=f"{folder}/theirs")
    whole = {name: tensor.full_tensor() for name, tensor in get_model_state_dict(model).items()}
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")
    dist.destroy_process_group()
""")


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))


def _write(world, state, to):
    with sw.without_values():
        plain = build()
    run = sw.parallelize(plain, "tp2", world)
    run.load_state_dict(state)
    sw.save_weights(run, to, format="dcp")


def _read(world, line, source):
    with sw.without_values():
        plain = build()
    run = sw.parallelize(plain, line, world)
    sw.load_weights(run, source, names="model.")
    return run.state_dict()


def test_fsdp2_reads_a_dcp_folder_that_we_wrote_and_we_read_the_one_that_it_writes(tmp_path):
    torch.manual_seed(0)
    plain = build()
    sw.launch(_write, 2, plain.state_dict(), tmp_path / "ours", ranks="threads")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([p for p in sys.path if p]), "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path), str(rank)], env=environment)
        for rank in range(2)
    ]
    assert [process.wait(timeout=100) for process in started] == [0, 0]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    theirs = torch.load(tmp_path / "whole.pt", weights_only=True)
    torch.testing.assert_close(theirs, dict(plain.state_dict()))  # FSDP2 began with our values
    for line in ("dp2/zero3", "tp2"):
        for found in sw.launch(_read, 2, line, tmp_path / "theirs", ranks="threads"):
            assert found.keys() == theirs.keys()
            assert all(torch.equal(found[name], theirs[name]) for name in theirs)
