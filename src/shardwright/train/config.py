"""The configuration of a training run: one frozen dataclass, read from flags, a TOML file or an earlier run."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import cos, isfinite, pi
from pathlib import Path
from typing import Any, Literal, get_type_hints

import torch
from torch import nn

from shardwright.errors import CheckpointError, PlanError
from shardwright.layout import Layout
from shardwright.models import MODELS, CrossEntropy, build, configure
from shardwright.models.settings import check_fraction, check_known, check_sizes, parse_value
from shardwright.parallelize.auto import num_shares

RUN_FILE = "run.json"

TABLES = {
    "settings": ("the model's settings", "num_layers = 2"),
    "roles": ("roles by patterns of layers' names", "'blocks.*.up' = 'column'"),
}
"""The options that are tables: what each holds, and an example line."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of a training run; every field is an option of ``shardwright train`` and a key of its TOML file.

    ``steps`` sets the length of the learning-rate schedule; ``stop_at`` > 0 ends the run earlier, to be resumed. State
    offloaded to disk is stored in ``offload_folder``, by default the system's temporary folder.

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
    keep: int = 3
    eval_every: int = 0
    eval_batches: int = 4
    measured_costs: bool = False
    tensorboard: bool = False
    deterministic: bool = False
    debug: bool = False
    bind_cores: bool = False
    timeout_s: float = 600.0
    grace_s: float = 30.0
    offload_folder: str = ""

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "clip", "timeout_s", "grace_s"):
            check_finite(name, getattr(self, name))
        check_sizes(self, 1, "batch", "seq", "steps", "eval_batches")
        check_sizes(self, 0, "stop_at", "warmup", "clip", "save_every", "keep", "eval_every", "lr", "weight_decay")
        check_fraction("weight_decay", self.weight_decay)
        for name, usual in (("timeout_s", 600), ("grace_s", 30)):
            if getattr(self, name) <= 0:
                given = getattr(self, name)
                raise PlanError(f"'{name}' is too small", given=given, allowed="above 0", fix=f"set {name}={usual}")
        if self.schedule not in ("cosine", "linear", "constant"):
            raise PlanError("no such schedule", given=self.schedule, allowed="cosine, linear, constant", fix="cosine")
        layout = Layout.parse(self.layout)
        object.__setattr__(self, "layout", str(layout))
        check_batch(self.batch, layout)

    @property
    def last_step(self) -> int:
        """The number of the last step of this run, earlier than ``steps`` if ``stop_at`` is set."""
        return min(self.stop_at or self.steps, self.steps)

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of a step: a linear warm-up, then a decay to a tenth, or a constant rate."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.lr
        done = min((step - self.warmup) / max(self.steps - self.warmup, 1), 1.0)
        share = (1 + cos(pi * done)) / 2 if self.schedule == "cosine" else 1 - done
        return self.lr * (0.1 + 0.9 * share)

    @property
    def num_tokens(self) -> int:
        """The tokens in one microbatch of one model replica, by which the sizes of activations are estimated."""
        return max(1, self.batch * self.seq // num_shares(Layout.parse(self.layout)))

    def build(self) -> tuple[nn.Module, nn.Module, Any]:
        """Returns the plain model, its loss function and its config, which is None for a user's own model factory."""
        model = build(self.model, self.settings)
        if ":" in self.model:
            return model, CrossEntropy(), None
        return model, MODELS[self.model].loss(), configure(self.model, self.settings)

    def example(self, model_config: Any) -> Any:
        """Returns random inputs of a global batch; None for a user's own model factory, whose inputs are unknown."""
        batch = self.example_batch(model_config)
        return None if batch is None else batch[0]

    def example_batch(self, model_config: Any) -> tuple[Any, Any] | None:
        """Returns a random global batch (inputs, targets); None for a user's own model factory."""
        if model_config is None:
            return None
        draw = torch.Generator().manual_seed(0)
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


def check_finite(name: str, value: float) -> None:
    """Raises PlanError if ``value`` is infinite or not a number."""
    if not isfinite(value):
        raise PlanError(
            f"'{name}' is not a finite number", given=value, allowed="a finite number", fix=f"leave {name} out"
        )


def read_options(values: Mapping[str, Any], *, given_in: str) -> dict[str, Any]:
    """Returns options converted to the types of TrainConfig. Raises PlanError: an unknown key, naming the nearest.

    >>> read_options({"steps": "20"}, given_in="flags")
    {'steps': 20}
    """
    hints = get_type_hints(TrainConfig)
    names = [f.name for f in fields(TrainConfig)]
    for key, value in values.items():
        check_known(given_in, key, value, names)
        if key in TABLES and not isinstance(value, Mapping):
            raise PlanError(
                f"'{key}' of {given_in} is not a table",
                given=value,
                allowed=f"a table [{key}] with {TABLES[key][0]}",
                fix=f"write [{key}] on a line of its own, and below it lines such as {TABLES[key][1]}",
            )
    return {key: dict(value) if key in TABLES else parse_value(key, value, hints[key]) for key, value in values.items()}


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the options in a TOML file; its tables ``[settings]`` and ``[roles]`` configure the model."""
    try:
        found = tomllib.loads(path.read_text())
    except OSError as failure:
        raise PlanError(
            f"cannot read '{path}'", given=str(failure), allowed="a TOML file", fix="check the path"
        ) from failure
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as failure:
        raise PlanError(
            f"'{path}' is not TOML", given=str(failure), allowed="key = value lines", fix="correct that line"
        ) from failure
    return read_options(found, given_in=str(path))


def read_run(out: Path) -> dict[str, Any]:
    """Returns the options that an earlier run in ``out`` was started with. Raises CheckpointError: no such run."""

    try:
        found = json.loads((out / RUN_FILE).read_text())
        options = read_options(found["options"], given_in=RUN_FILE)
        return {key: value for key, value in options.items() if key != "stop_at"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as failure:
        raise CheckpointError(
            f"there is no run at '{out}'",
            given=str(failure).splitlines()[0],
            allowed=f"the --out folder of a run, with {RUN_FILE} in it",
            fix="check the path, or start a run there without --resume",
        ) from failure


def run_name_in(out: Path) -> str | None:
    """Returns the name that ``torchrun`` gave the run in ``out``; None where there is no such run."""
    try:
        found = json.loads((out / RUN_FILE).read_text()).get("torchrun")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None
