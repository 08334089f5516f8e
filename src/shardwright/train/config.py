"""The options of a training run (``TrainConfig``), read from flags, from a TOML file or from an earlier run."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import cos, isfinite, pi
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
from torch import nn

from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.models import MODELS, build_with_loss, configure, describable
from shardwright.models.given_loss import loss_for
from shardwright.models.settings import check_fraction, check_known, check_sizes, parse_value
from shardwright.parallelize.auto import num_shares
from shardwright.parallelize.checks import check_model
from shardwright.parallelize.rank_check import CHECK_EVERY
from shardwright.text_files import read_text
from shardwright.train.loggers import logger_names

MOST_TOML_BYTES = 2**14
"""The size in bytes up to which a TOML file of options is read."""

LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 0.1, 1e6
MOST_ELEMENTS = 2**28
"""The most tokens (samples times length) in a global batch."""

TABLES = {
    "settings": ("the model's settings", "num_layers = 2"),
    "roles": ("roles by patterns of layers' names", "'blocks.*.up' = 'column'"),
}
"""The options that are tables: a description of each one's content, and an example line."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of a training run; every field is an option of ``shardwright train`` and a key of its TOML file.

    ``shardwright train --help`` explains each option; ``settings`` and ``roles`` are ``--set`` and ``--role`` there.
    ``steps`` sets the length of the learning-rate schedule; ``stop_at`` > 0 ends the run earlier, to be resumed. State
    offloaded to disk is stored in ``offload_folder``, by default the system's temporary folder. A run starts from the
    values in ``weights``, a file or folder, unless it is resumed; names there begin with ``weights_prefix``, and with
    ``averages`` they are the averages in a checkpoint. ``ema`` > 0 is the decay of averages that the run itself keeps.
    ``eval_batches`` > 0 evaluates so many batches only. ``layout`` is stored as the canonical text of the layout line.
    ``cluster`` is the cluster by which steps are predicted, as in ``shardwright plan``; "" for the one that is found
    here (:func:`~shardwright.planner.predicted.cluster_here`).

    Raises: LayoutError: ``layout`` is not a layout line; PlanError: another option is out of range.

    >>> TrainConfig(steps=10, lr=1e-3).learning_rate(0) == 1e-3 / 10  # the first of ten warm-up steps
    True
    """

    layout: str = "single"
    model: str = "gpt"
    settings: Mapping[str, Any] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    data: str = "stdlib"
    batch: int = 8
    seq: int = 128
    steps: int = 100
    stop_at: int = 0
    seed: int = 0
    lr: float = 1e-3
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: int = 10
    weight_decay: float = 0.1
    clip: float = 1.0
    save_every: int = 0
    save_async: bool = False
    keep: int = 3
    eval_every: int = 0
    eval_batches: int = 0
    ema: float = 0.0
    check_every: int = CHECK_EVERY
    measured_costs: bool = False
    cluster: str = ""
    tensorboard: bool = False
    deterministic: bool = False
    debug: bool = False
    bind_cores: bool = False
    timeout_s: float = 600.0
    grace_s: float = 30.0
    offload_folder: str = ""
    weights: str = ""
    weights_prefix: str = ""
    averages: bool = False
    logger: str = ""
    profile: int = 0

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "clip", "ema", "timeout_s", "grace_s"):
            check_finite(name, getattr(self, name))
        check_sizes(self, 1, "batch", "seq", "steps")
        check_seed(self.seed)
        counts = "stop_at", "warmup", "save_every", "keep", "eval_every", "eval_batches", "check_every", "profile"
        check_sizes(self, 0, *counts, "clip", "lr", "weight_decay")
        check_fraction("weight_decay", self.weight_decay)
        check_fraction("ema", self.ema, 0.999)
        if self.averages and not self.weights:
            raise PlanError(
                "averages are read in place of the parameters of a checkpoint",
                given="averages without weights",
                allowed="both, or neither; a run's own averages are kept by ema",
                fix="add --weights RUN, or leave out --averages",
            )
        if not LEAST_TIMEOUT_S <= self.timeout_s <= MOST_TIMEOUT_S:
            raise PlanError(
                "'timeout_s' is out of range",
                given=self.timeout_s,
                allowed=f"{LEAST_TIMEOUT_S} to {MOST_TIMEOUT_S:.0f} seconds",
                fix="set timeout_s=600",
            )
        if self.batch * self.seq > MOST_ELEMENTS:
            raise PlanError(
                "the batch is too large",
                given=f"batch={self.batch}, seq={self.seq}",
                allowed=f"up to {MOST_ELEMENTS} tokens in a step",
                fix="set a smaller batch or seq",
            )
        if not 0 < self.grace_s <= MOST_TIMEOUT_S:
            allowed, fix = f"above 0, up to {MOST_TIMEOUT_S:.0f} seconds", "set grace_s=30"
            raise PlanError("'grace_s' is out of range", given=self.grace_s, allowed=allowed, fix=fix)
        if self.schedule not in ("cosine", "linear", "constant"):
            raise PlanError("no such schedule", given=self.schedule, allowed="cosine, linear, constant", fix="cosine")
        layout = Layout.parse(self.layout)
        object.__setattr__(self, "layout", str(layout))
        check_batch(self.batch, layout)

    @property
    def last_step(self) -> int:
        """The number of steps after which this run ends: ``steps``, or ``stop_at`` if that is set and smaller."""
        return min(self.stop_at or self.steps, self.steps)

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of the step with number ``step``, counted from 0.

        It rises linearly to ``lr`` over the first ``warmup`` steps. Then it decays to a tenth of ``lr`` at ``steps``,
        along the curve that ``schedule`` names, or stays at ``lr`` if that is "constant".
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        done = min((step - self.warmup) / max(self.steps - self.warmup, 1), 1.0)
        share = (1 + cos(pi * done)) / 2 if self.schedule == "cosine" else 1 - done
        return self.lr * (0.1 + 0.9 * share)

    @property
    def loggers(self) -> list[str]:
        """The names of the loggers that get the metrics of each step, TensorBoard's among them if it is asked for."""
        names = logger_names(self.logger)
        return names + ["tensorboard"] * (self.tensorboard and "tensorboard" not in names)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in one microbatch of one model replica, by which planning estimates activation sizes."""
        return max(1, self.batch * self.seq // num_shares(Layout.parse(self.layout)))

    def build(self) -> tuple[nn.Module, nn.Module, Any]:
        """Returns the plain model, its loss function and its config.

        For a user's own model factory (``package.module:factory``) the config is None, and the loss is the one that the
        factory returns beside the model, or else cross entropy. :func:`~shardwright.train.opening.opened` reads the
        data too: these may have labels, from which the model computes its loss itself.

        Raises: PlanError: there is no such model, its settings are wrong, or the factory fails.
        """
        model, loss, model_config = self.build_given()
        return model, loss_for(loss, model), model_config

    def build_given(self) -> tuple[nn.Module, Any, Any]:
        """Returns the plain model, its loss and its config, as :meth:`build`; no loss (None) if a factory has none."""
        model, loss = build_with_loss(self.model, self.settings)
        check_model(model)
        return model, loss, None if ":" in self.model else configure(self.model, self.settings)

    def example(self, model_config: Any) -> Any:
        """Returns random inputs of a global batch, the same in each call; None if ``model_config`` is None.

        That is so for a user's own model factory, whose inputs are unknown.

        Raises: PlanError: the batch is too large for torch.
        """
        batch = self.example_batch(model_config)
        return None if batch is None else batch[0]

    def example_batch(self, model_config: Any) -> tuple[Any, Any] | None:
        """Returns a random global batch (inputs, targets), the same in each call; None if ``model_config`` is None.

        That is so for a user's own model factory, whose batches are unknown.

        Raises: PlanError: the batch is too large for torch.
        """
        if model_config is None:
            return None
        draw = torch.Generator().manual_seed(0)
        with describable(f"a batch of {self.batch} samples"):
            return MODELS[self.model].example_batch(model_config, self.batch, self.seq, draw)

    def to_dict(self) -> dict[str, Any]:
        """Returns the options of the run as plain data for JSON."""
        return {**asdict(self), **{name: dict(getattr(self, name)) for name in TABLES}}


def check_batch(batch: int, layout: Layout) -> None:
    """Raises PlanError if the batch has fewer samples than the layout has microbatches.

    >>> check_batch(2, Layout.parse("pp2 mb8"))
    Traceback (most recent call last):
    shardwright.errors.PlanError: the batch is smaller than the microbatches that it is cut into
      given:   batch=2 under pp2 mb8: 6 microbatches would hold nothing
      allowed: 1 to 2 microbatches, or a batch of 8 samples or more
      fix:     write mb2, or --batch 8
    """
    num = layout.num_microbatches
    if batch < num:
        raise PlanError(
            "the batch is smaller than the microbatches that it is cut into",
            given=f"batch={batch} under {layout}: {num - batch} microbatches would hold nothing",
            allowed=f"1 to {batch} microbatches, or a batch of {num} samples or more",
            fix=f"write mb{batch}, or --batch {num}",
        )


def check_seed(seed: int) -> None:
    """Raises PlanError unless the seed is one that ``torch.Generator.manual_seed`` accepts.

    >>> check_seed(2**64)
    Traceback (most recent call last):
    shardwright.errors.PlanError: the seed is out of range
      given:   18446744073709551616
      allowed: -2**63 to 2**64 - 1
      fix:     set seed=0
    """
    if not -(2**63) <= seed < 2**64:
        raise PlanError("the seed is out of range", given=seed, allowed="-2**63 to 2**64 - 1", fix="set seed=0")


def check_finite(name: str, value: float) -> None:
    """Raises PlanError if ``value`` is infinite or not a number."""
    if not isfinite(value):
        raise PlanError(
            f"'{name}' is not a finite number", given=value, allowed="a finite number", fix=f"leave {name} out"
        )


def read_options(values: Mapping[str, Any], *, given_in: str) -> dict[str, Any]:
    """Returns options converted to the field types of :class:`TrainConfig`, from values that may be text.

    ``given_in`` names the source, such as a file, in errors. The tables ``settings`` and ``roles`` become dicts, whose
    values are not converted.

    Raises: PlanError: an unknown key, or a value of the wrong type.

    >>> read_options({"steps": "20"}, given_in="flags")
    {'steps': 20}
    """
    hints = get_type_hints(TrainConfig)
    names = [f.name for f in fields(TrainConfig)]
    check_known(given_in, values, names)
    for key, value in values.items():
        if key in TABLES and not isinstance(value, Mapping):
            raise PlanError(
                f"'{key}' of {given_in} is not a table",
                given=value,
                allowed=f"a table [{key}] with {TABLES[key][0]}",
                fix=f"write [{key}] on a line of its own, and below it lines such as {TABLES[key][1]}",
            )
    return {key: dict(value) if key in TABLES else parse_value(key, value, hints[key]) for key, value in values.items()}


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the training options in a TOML file, by name, converted to the field types of :class:`TrainConfig`.

    The tables ``[settings]`` and ``[roles]`` become dicts, whose values are not converted.

    Raises: PlanError: the file cannot be read or is not TOML, has an unknown key, or a value of the wrong type.
    """
    try:
        table = tomllib.loads(read_text(path, MOST_TOML_BYTES, "utf-8-sig"))
    except OSError as failure:
        raise PlanError(
            f"cannot read '{path}'", given=str(failure), allowed="a TOML file", fix="check the path"
        ) from failure
    except (ValueError, RecursionError) as failure:  # wrong TOML, wrong UTF-8, or a number with thousands of digits
        raise PlanError(
            f"'{path}' is not TOML", given=str(failure), allowed="key = value lines", fix="correct that line"
        ) from failure
    try:
        return read_options(table, given_in=str(path))
    except RecursionError as failure:
        raise PlanError(
            f"'{path}' is nested too deeply", given=failure, allowed="one table in another", fix="correct that line"
        ) from failure
