"""Opens what a run trains: the plain model without values, its loss, and a split of its data, which belong together.

The samples of a user's own dataset may be pairs or have named parts; which of these are targets depends on the loss.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwright.errors import PlanError
from shardwright.initial_values import without_values
from shardwright.models.given_loss import loss_for
from shardwright.models.losses import CrossEntropy
from shardwright.models.model_loss import ModelLoss
from shardwright.train.config import TrainConfig
from shardwright.train.data import Dataset, Split, first_sample_repeated, open_data
from shardwright.train.fitting import check_takes, failure_on_meta, first_samples
from shardwright.train.given_data import MapDataset


class TrainingJob(NamedTuple):
    """A model with its loss, its config (None for a user's own factory), and a split of the data that it reads."""

    model: nn.Module
    loss: nn.Module
    model_config: Any
    data: Dataset


def opened(config: TrainConfig, split: Split = "train", *, with_values: bool = False) -> TrainingJob:
    """Returns the model, the loss and the data that the options of a run name; the model without values by default.

    If a user's own factory returns a model without a loss, the loss is the one that the model computes itself, if
    samples have a part named ``labels`` and the model's forward an argument of that name; otherwise cross entropy.

    Raises: PlanError: as :meth:`TrainConfig.build` and :func:`~shardwright.train.data.open_data`; or samples have named
        parts, none of which are targets.
    """
    if with_values:
        model, loss, model_config = config.build_given()
    else:
        with without_values():
            model, loss, model_config = config.build_given()
    data = open_data(config.data, seq=config.seq, model=model_config, split=split)
    if isinstance(data, MapDataset):
        own = "labels" in data.names and _takes(model, "labels")
        loss = ModelLoss() if loss is None and own else loss
        data.pair = loss.pair if isinstance(loss, ModelLoss) else None
    return TrainingJob(model, loss_for(loss if loss is not None else CrossEntropy(), model), model_config, data)


def opened_example(config: TrainConfig) -> tuple[nn.Module, nn.Module, tuple[Any, Any] | None]:
    """Returns the model and its loss, without values, and a global batch (inputs, targets) as training reads them.

    The batch is for planning alone. That of a built-in model is random. That of a user's own model is the first sample
    of its data, repeated; it is None if no data are named and the model does not take the default ones.

    Raises: PlanError: as :func:`opened`; or the model does not take the data that are named.
    """
    if ":" not in config.model:
        with without_values():
            model, loss, model_config = config.build()
        return model, loss, config.example_batch(model_config)
    try:
        model, loss, _, data = opened(config)
        if config.data != TrainConfig.data:
            check_takes(config, model, loss, data, builds_large=False)
        elif failure_on_meta(model, loss, first_samples(config, data), guesses=True) is not None:
            return model, loss, None
    except PlanError:
        if config.data != TrainConfig.data:
            raise
        with without_values():
            return *config.build()[:2], None
    return model, loss, first_sample_repeated(data, config.batch)


def other_split(config: TrainConfig, first: TrainingJob, split: Split) -> Dataset:
    """Returns another split of the data that were opened with a model, whose samples become pairs in the same way."""
    data = open_data(config.data, seq=config.seq, model=first.model_config, split=split)
    if isinstance(data, MapDataset) and isinstance(first.data, MapDataset):
        data.pair = first.data.pair
    return data


def inputs_of(data: Dataset, batch: int) -> Any:
    """Returns inputs in the shape of a global batch of ``batch`` samples: the first sample of ``data``, repeated.

    Planning uses them.
    """
    return first_sample_repeated(data, batch)[0]


def num_tokens(data: Dataset) -> int:
    """Returns the number of tokens in a sample whose targets are one integer for each token; else 0."""
    targets = data.sample(0)[1]
    is_text = isinstance(targets, Tensor) and targets.dim() == 1 and not targets.is_floating_point()
    return len(targets) if is_text else 0


def _takes(model: nn.Module, name: str) -> bool:
    """Returns whether the model's forward has an argument of this name, or passes it on to a model that it wraps."""
    parameters = inspect.signature(model.forward).parameters
    passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return name in parameters or (passes_on and any(_takes(module, name) for module in model.children()))
