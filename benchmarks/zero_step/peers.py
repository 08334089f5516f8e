"""The peers: torch's fully_shard, DDP with ZeroRedundancyOptimizer, DeepSpeed. Each step returns this rank's loss."""

import io
import logging
import warnings
from contextlib import redirect_stdout

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def cross_entropy(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_step(model, optimizer, batch):
    """A step of torch's own; for the limit, of one rank that sends nothing."""

    def step():
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def ddp(model, batch, adamw):
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return plain_step(model, adamw(model.parameters()), batch)


def redundancy(model, batch, adamw):
    """DDP, each rank stepping some whole parameters: its ZeRO-1."""
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return plain_step(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4), batch)


def fsdp(model, batch, adamw, *, reshard):
    """fully_shard of every block and of the model; without ``reshard`` weights stay whole until the backward's end."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return plain_step(model, adamw(model.parameters()), batch)


def deepspeed(model, batch, adamw, *, stage):
    """DeepSpeed's engine on CPU. Raises: ImportError: there is no DeepSpeed."""
    warnings.filterwarnings("ignore")
    with redirect_stdout(io.StringIO()):
        import deepspeed as library
        from deepspeed.utils import logger

        logger.setLevel(logging.ERROR)
        library.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        engine, *_ = library.initialize(
            model=model,
            optimizer=adamw(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": len(batch[0]),
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": 0.0,  # otherwise 1.0
                "steps_per_print": 10**9,
            },
        )

    def step():
        loss = cross_entropy(engine(batch[0]), batch[1])
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step
