"""The same Llama through transformers' own tensor parallelism, and through torch.distributed.pipelining."""

import os
import tempfile

import torch
import torch.distributed as dist
from benchmarks.pipeline_step.peers import cross_entropy
from torch import nn


def transformers_tp(model, batch):
    """A step under ``tp_plan="auto"``: the model's own plan, which its loader turns into DTensors."""
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "RANK": str(dist.get_rank()), "LOCAL_RANK": "0"}
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        model.save_pretrained(folder[0])
    dist.barrier()
    own = type(model).from_pretrained(folder[0], distributed_config=DistributedConfig(tp_plan="auto")).train()
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4, foreach=False)  # DTensors and plain tensors

    def step():
        optimizer.zero_grad()
        loss = cross_entropy(own(batch[0]).logits, batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


class Part(nn.Module):
    """One of ``count`` chunks of a Llama: as many layers as every other, embedding in the first, head in the last."""

    def __init__(self, model, index, count):
        super().__init__()
        inner = model.model
        each = len(inner.layers) // count
        self.layers, self.positions = inner.layers[index * each : (index + 1) * each], inner.rotary_emb
        self.token = inner.embed_tokens if index == 0 else None
        self.norm, self.head = (inner.norm, model.lm_head) if index == count - 1 else (None, None)

    def forward(self, x):
        x = x if self.token is None else self.token(x)
        positions = self.positions(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=positions)
        return x if self.head is None else self.head(self.norm(x))


def torch_pipeline(model, batch, num_microbatches, adamw):
    """A step of torch's own 1F1B; the loss is scaled instead of the gradients, which saves torch a pass over these."""
    from torch.distributed import pipelining

    rank, count = dist.get_rank(), dist.get_world_size()
    part = Part(model, rank, count)
    stage = pipelining.PipelineStage(part, rank, count, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(
        stage, num_microbatches, loss_fn=lambda y, targets: cross_entropy(y, targets) / num_microbatches,
        scale_grads=False,
    )  # fmt: skip
    optimizer = adamw(part.parameters())

    def step():
        optimizer.zero_grad()
        losses = []
        inputs = (batch[0],) if rank == 0 else ()
        schedule.step(*inputs, **({"target": batch[1], "losses": losses} if rank == count - 1 else {}))
        optimizer.step()
        return sum(loss.item() for loss in losses) if losses else None

    return step
