"""Samples from a trained model under any layout: continues a text, or classifies pictures."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from shardwright.comm.launch import launch
from shardwright.comm.limits import Ranks
from shardwright.comm.world import World
from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.models.gpt import GPTConfig
from shardwright.parallelize import parallelize
from shardwright.rng import without_values
from shardwright.train.config import TrainConfig, check_finite, check_seed
from shardwright.train.data import global_batch, open_data
from shardwright.train.opening import inputs_of, opened, other_split
from shardwright.train.out_folder import CHECKPOINTS
from shardwright.train.predicting import scores_of
from shardwright.weights.loading import load_weights

LEAST_TEMPERATURE = 1e-6
"""The temperature below which the most likely token is taken, because logits divided by less may overflow."""

MOST_SAMPLES = 2**20
"""The most bytes or samples of one call, since each byte takes a forward."""


def sample(
    config: TrainConfig, run: Path, layout: Layout, *, prompt: str, num: int, temperature: float, seed: int,
    averages: bool = False, ranks: Ranks,
) -> str:  # fmt: skip
    """Returns generated text, or predicted classes of pictures, from the newest checkpoint of ``run``.

    ``config`` is the config of that run, and ``layout`` the layout to sample under, whose ranks are threads or
    processes as ``ranks`` says. With ``averages``, the parameters are the averages in the checkpoint. For a language
    model the result is ``prompt`` and ``num`` more bytes, drawn at ``temperature`` with ``seed``; at temperature 0 the
    likeliest byte is taken. For pictures the result has a line for each of the first ``num`` of the eval split: the
    predicted class and, if that is wrong, the true class. Its last line counts the right predictions.

    Raises: PlanError: an argument is out of range, the prompt is empty, or the model's targets are not classes;
        LayoutError: the layout does not fit the model or the ranks; CheckpointError: ``run`` has no checkpoint that
        fits; RankFailedError: a rank failed in another way.
    """
    check_finite("temperature", temperature)
    if not 0 <= num <= MOST_SAMPLES:
        raise PlanError("'num' is out of range", given=num, allowed=f"0 to {MOST_SAMPLES}", fix="set num=200")
    check_seed(seed)
    if not prompt:
        raise PlanError("the prompt is empty", given="no text", allowed="at least one character", fix="--prompt 'def '")
    return launch(_rank, layout, config, run, layout, prompt, num, temperature, seed, averages, ranks=ranks)[0]


def _rank(
    world: World, config: TrainConfig, run_folder: Path, layout: Layout, prompt: str, num: int, temperature: float,
    seed: int, averages: bool,
) -> str:  # fmt: skip
    """Runs on each rank: loads the checkpoint, then generates text byte by byte or classifies pictures."""
    with without_values():
        plain, loss, model_config = config.build()
    example, data = config.example(model_config), None
    if model_config is None:  # a user's own model is read on its data, which say how its samples become pairs
        found = opened(config)
        plain, loss, example = found.model, found.loss, inputs_of(found.data, config.batch)
        data = other_split(config, found, "eval")
    run = parallelize(
        plain, layout, world, loss=loss, seed=config.seed, roles=config.roles,
        example=example,
    )  # fmt: skip
    load_weights(run, run_folder / CHECKPOINTS, averages=averages)
    if isinstance(model_config, GPTConfig):
        generator = torch.Generator().manual_seed(seed)  # the same on every rank, so that all draw the same token
        tokens = torch.tensor([list(os.fsencode(prompt))])  # an argument that is no UTF-8 is taken by its bytes
        for _ in range(num):
            logits = run.predict(tokens[:, -min(config.seq, model_config.max_tokens) :])[:, -1].cpu()
            if temperature < LEAST_TEMPERATURE:
                token = logits.argmax(-1, keepdim=True)
            else:
                token = torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, token], dim=1)
        return bytes(tokens[0].clamp(max=255).tolist()).decode(errors="replace")
    if data is None:
        data = open_data(config.data, seq=config.seq, model=model_config, split="eval")
    inputs, targets = global_batch(data, range(min(num, len(data))))
    if not isinstance(targets, Tensor) or targets.dim() != 1 or targets.is_floating_point():
        raise PlanError(
            "this model cannot be sampled from",
            given=config.model,
            allowed="the built-in gpt, which continues a text, and models that classify",
            fix="write shardwright predict, which shows outputs beside targets, or export the weights",
        )
    classes = scores_of(run.predict(inputs)).argmax(-1).cpu()
    lines = [
        f"{i}: {c}{'' if c == t else f' (is {t})'}"
        for i, (c, t) in enumerate(zip(classes.tolist(), targets.tolist(), strict=True))
    ]
    right = int((classes == targets.cpu()).sum())
    return "\n".join([*lines, f"{right} of {len(lines)} right"])
