"""The same GPT through torch.distributed.pipelining and DeepSpeed's PipelineModule, cut by hand at its layers.

The tied ends lie on different stages: with torch's pipelining their gradients are summed after the step, by hand, as it
leaves that to its user; DeepSpeed has tied layers of its own.
"""

import io
import itertools
import logging
import warnings
from contextlib import redirect_stdout
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


class Part(nn.Module):
    """One of ``count`` chunks of a GPT: as many layers as every other, the embeddings with the first, the head last."""

    def __init__(self, model, index, count):
        super().__init__()
        each = len(model.blocks) // count
        self.is_first, self.is_last = index == 0, index == count - 1
        self.blocks = nn.ModuleList(model.blocks[index * each : (index + 1) * each])
        if self.is_first:
            self.token, self.position, self.positions = model.token, model.position, model.positions
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x):
        if self.is_first:
            x = self.token(x) + self.position(self.positions(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def cross_entropy(logits, targets):
    """The mean loss of a microbatch."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def torch_pipeline(model, batch, num_microbatches, kind, chunks_of, adamw):
    """A step of torch's own pipelining; ``chunks_of`` are those of each of the two ranks.

    The loss is scaled instead of the gradients, which saves torch a pass over these.
    """
    from torch.distributed import pipelining

    rank, count = dist.get_rank(), sum(map(len, chunks_of))
    stages = [
        pipelining.PipelineStage(Part(model, index, count), index, count, torch.device("cpu"))
        for index in chunks_of[rank]
    ]
    holds_first, holds_last = 0 in chunks_of[rank], count - 1 in chunks_of[rank]
    schedule = getattr(pipelining, kind)(
        stages if len(chunks_of[rank]) > 1 else stages[0],
        num_microbatches,
        loss_fn=lambda logits, targets: cross_entropy(logits, targets) / num_microbatches,
        scale_grads=False,
    )
    optimizer = adamw({id(p): p for stage in stages for p in stage.submod.parameters()}.values())
    ends_apart = holds_first != holds_last  # each rank holds one of them, or one rank both

    def step():
        optimizer.zero_grad()
        losses = []
        inputs = (batch[0],) if holds_first else ()
        schedule.step(*inputs, **({"target": batch[1], "losses": losses} if holds_last else {}))
        if ends_apart:
            dist.all_reduce(model.token.weight.grad)
        optimizer.step()
        return sum(loss.item() for loss in losses) if holds_last else None

    return step


class AddPositions(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.position, self.positions = model.position, model.positions

    def forward(self, x):
        return x + self.position(self.positions(x))  # of x alone its number of tokens counts


def deepspeed_pipeline(model, batch, num_microbatches, adamw):
    """A step of DeepSpeed's PipelineModule on CPU. Raises: ImportError: there is no DeepSpeed."""
    warnings.filterwarnings("ignore")
    with redirect_stdout(io.StringIO()):  # it tells its partition
        import deepspeed
        from deepspeed.pipe import PipelineModule, TiedLayerSpec
        from deepspeed.utils import logger

        logger.setLevel(logging.ERROR)
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        weight = model.token.weight.detach()
        token = partial(TiedLayerSpec, "token", nn.Embedding, *weight.shape, _weight=weight)
        layers = [token(), AddPositions(model), *model.blocks, model.norm, token(forward_fn=_head)]
        module = PipelineModule(layers, num_stages=2, loss_fn=cross_entropy, partition_method="type:Block")
        size = len(batch[0])
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=adamw([p for p in module.parameters() if p.requires_grad]),
            config={
                "train_batch_size": size,
                "train_micro_batch_size_per_gpu": size // num_microbatches,
                "gradient_clipping": 0.0,  # otherwise 1.0
                "steps_per_print": 10**9,
            },
        )
    microbatches = zip(*(each.chunk(num_microbatches) for each in batch), strict=True)
    endless = itertools.cycle(list(microbatches))
    return lambda: engine.train_batch(endless).item()


def _head(token, x):
    return functional.linear(x, token.weight)
