"""``load_weights``: fills a run with weights from files of other programs, under any layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shardwright.parallelize.filling import LoadedWeights, Names, fill
from shardwright.parallelize.run import Run, check_run
from shardwright.weights.adapters import names_beside_adapter
from shardwright.weights.stores import open_store


def load_weights(
    run: Run, source: str | Path, *, names: Names = None, strict: bool = True, averages: bool = False
) -> LoadedWeights:
    """Fills the parameters and persistent buffers of ``run`` from files, by the names of the plain model.

    Every rank calls it, under any layout. ``source`` is a safetensors file; a folder of safetensors files, with an
    index where there are several, such as a model of transformers; a ``.pt`` or ``.bin`` file of plain tensors; a
    folder of ``torch.distributed.checkpoint``; or a checkpoint of this library. Each rank reads only the parts of
    tensors that it stores, 16 MiB at a time. If its part of a tensor is many short pieces of rows, or a file has a
    tensor transposed, it reads more, at most the whole tensor.

    ``names`` turns names of the plain model into those of the source: a prefix such as "model.", a mapping from plain
    names (names that it lacks stay), or a function. None as a name leaves that tensor as it is. With ``strict``, every
    tensor of the model must be in the source, and every tensor of the source in the model; with a prefix, only tensors
    of the source whose names begin with it count. Without ``strict``, tensors that are in both are loaded. A tied
    tensor may be under any of its names. A model wrapped by peft is filled from the weights of its base model, and its
    adapter stays as it is; or, without ``names``, from the folder of its adapter alone. With ``averages``, ``source``
    is a checkpoint of this library, and parameters are filled with the averages of ``run.average`` in it.
    Floating-point values are rounded to the dtype in which the run stores the tensor, which is that of master weights
    under ``bf16`` and ``fp16``. State of an optimizer, the step number and the seed stay as they are.

    Returns the names that were loaded, those that were missing and those that the model does not have.

    Traffic: gathers of names and shapes, and of error texts, as text; one all-reduce of two numbers.
    Raises: CheckpointError, on every rank: the source cannot be read, would run code, has other names, shapes or kinds
        of dtype than the model, is not the same on every rank, or has no averages (nothing is changed then); or a file
        could not be read to its end (some values are overwritten then).

    >>> import tempfile, torch, shardwright as sw
    >>> plain = torch.nn.Linear(4, 2)
    >>> file = Path(tempfile.mkdtemp(), "linear.pt")
    >>> torch.save({"model": {"weight": torch.ones(2, 4), "bias": torch.zeros(2)}, "epoch": 3}, file)
    >>> def work(world):
    ...     run = sw.parallelize(plain, "dp2/zero3", world)
    ...     found = load_weights(run, file, names="model.")
    ...     return found.loaded, run.state_dict()["weight"].sum().item()
    >>> sw.launch(work, 2, ranks="threads")[1]
    (('weight', 'bias'), 8.0)
    """
    check_run(run, "sw.load_weights(run, source)")
    path = Path(source)
    find_names = partial(names_beside_adapter, run.model)
    loaded = fill(
        run, lambda: open_store(path, averages=averages), f"'{path}'", names, strict=strict, find_names=find_names
    )
    run.weights_read.append(path)
    return loaded
