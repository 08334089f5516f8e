"""Runs whose state is saved and loaded, and the state that tests compare: unsharded tensors joined from all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.checkpoint.loading import load
from shardwright.checkpoint.saving import save
from shardwright.comm.launch import launch
from shardwright.layout import Layout
from shardwright.models import CrossEntropy, GPTConfig
from shardwright.models.gpt import GPT
from shardwright.parallelize import parallelize
from shardwright.parallelize.planning import make_plan
from shardwright.plan.plan import Job
from shardwright.sharding.box import read
from shardwright.sharding.tensor_layout import TensorLayout

SMALL = {"num_layers": 2, "num_heads": 3, "num_kv_heads": 1, "width": 12, "hidden": 7, "vocabulary": 19}


def gpt(**changes: Any) -> nn.Module:
    """Three heads that share one of keys and values, dropout, an uneven feed-forward width; on the meta device."""
    with torch.device("meta"):
        return GPT(GPTConfig(style="llama", max_tokens=8, dropout=0.1, **{**SMALL, **changes})).double()


def batch(step: int, num_samples: int = 5) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(19, (num_samples, 7), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def start(world, line: str, model: nn.Module | None = None, kind: Any = torch.optim.AdamW, lr: float = 1e-2):
    layout = Layout.parse(line)
    model = gpt() if model is None else model
    run = parallelize(model, layout, world, loss=CrossEntropy(), seed=3)
    return run, run.optimizer(kind, lr=lr)


def go(run, optimizer, until: int) -> list[float]:
    """Steps until so many are done; their losses."""
    losses = []
    while run.num_steps < until:
        losses.append(run.step(next(run.shard([batch(run.num_steps)]))).item())
        optimizer.step()
    return losses


@dataclass
class Held:
    """What one rank has: losses, tensors by global name, what is no tensor of a parameter's shape."""

    losses: list[float]
    tensors: dict[str, Tensor]
    scalars: dict[str, dict[str, Any]]
    num_steps: int
    seed: int


def held(run, optimizer, losses: list[float]) -> Held:
    tensors = {name: p.detach().clone() for name, p in run.parameters.items()}
    scalars: dict[str, dict[str, Any]] = {}
    for name, parameter in run.parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value.shape == parameter.shape and value.dim():
                tensors[f"optimizer/{name}/{key}"] = value.clone()
            else:
                scalars.setdefault(name, {})[key] = (value.item(), value.dtype)
    return Held(losses, tensors, scalars, run.num_steps, run.rng.seed)


def _save(world, line, folder, steps, more):
    run, optimizer = start(world, line)
    before = go(run, optimizer, steps)
    save(folder, run, optimizer, extra={"note": [1, "two"]})
    now = held(run, optimizer, before)
    now.losses += go(run, optimizer, steps + more)
    return now


def saved(line: str, folder, *, steps: int = 3, more: int = 0) -> list[Held]:
    """Some steps, a save, and some more: the state when it was saved, and all losses."""
    return launch(_save, Layout.parse(line), line, folder, steps, more, ranks="threads")


def _load(world, line, folder, more):
    run, optimizer = start(world, line, lr=77.0)  # the rate comes from the checkpoint
    assert load(folder, run, optimizer) == {"note": [1, "two"]}
    now = held(run, optimizer, [])
    now.losses += go(run, optimizer, run.num_steps + more)
    return now


def loaded(line: str, folder, *, more: int = 0) -> list[Held]:
    """A new run filled from a checkpoint: its state, and the losses of the steps after."""
    return launch(_load, Layout.parse(line), line, folder, more, ranks="threads")


def whole(line: str, ranks: list[Held], job: Job | None = None) -> dict[str, Tensor]:
    """Every tensor, joined from the ranks; ranks that hold the same element must agree to the last bit.

    Without ``job`` the model is that of :func:`gpt`.
    """
    layout = Layout.parse(line)
    plan, _ = make_plan(Job(gpt(), CrossEntropy()) if job is None else job, layout)
    found: dict[str, Tensor] = {}
    for rank, each in enumerate(ranks):
        coord = plan.mesh.coord(rank)
        for name, local in each.tensors.items():
            owner = name.removeprefix("optimizer/").rpartition("/")[0] if name.startswith("optimizer/") else name
            rest = plan.state[owner]
            tensor_layout: TensorLayout = rest.parameter if owner == name else rest.optimizer
            into = found.setdefault(name, torch.full(tensor_layout.shape, float("nan"), dtype=local.dtype))
            for piece in tensor_layout.pieces(coord):
                values, there = read(local, piece, piece.whole), into[piece.whole.slices]
                known = ~there.isnan()
                assert torch.equal(there[known], values[known]), f"two ranks hold another {name}"
                there.copy_(values)
    return found
