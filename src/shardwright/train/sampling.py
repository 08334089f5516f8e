"""Samples from a trained model under any layout: continues a text or token ids, or classifies pictures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.comm.launch import launch
from shardwright.comm.limits import Ranks
from shardwright.comm.world import World
from shardwright.errors import PlanError
from shardwright.initial_values import without_values
from shardwright.layout import Layout
from shardwright.models.gpt import GPTConfig
from shardwright.parallelize import parallelize
from shardwright.parallelize.run import Run
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
    averages: bool = False, tokenizer: Path | None = None, ranks: Ranks,
) -> str:  # fmt: skip
    """Returns generated text, or predicted classes of pictures, from the newest checkpoint of ``run``.

    ``config`` is the config of that run, and ``layout`` the layout to sample under, whose ranks are threads or
    processes as ``ranks`` says. With ``averages``, the parameters are the averages in the checkpoint. For a language
    model the result is ``prompt`` and ``num`` more bytes, drawn at ``temperature`` with ``seed``; at temperature 0 the
    likeliest byte is taken. For pictures the result has a line for each of the first ``num`` of the eval split: the
    predicted class and, if that is wrong, the true class. Its last line counts the right predictions.

    A model of transformers generates ``num`` tokens by its own ``generate``, or fewer if it ends the text. The prompt
    and the result are token ids with spaces between, or text with ``tokenizer``, a folder with a tokenizer of
    transformers. No file is fetched from elsewhere.

    Raises: PlanError: an argument is out of range, the prompt is empty or not of the model's tokens, the tokenizer
        cannot be read or is of no use, or the model neither generates nor has classes as targets;
        LayoutError: the layout does not fit the model or the ranks; CheckpointError: ``run`` has no checkpoint that
        fits; RankFailedError: a rank failed in another way.
    """
    check_finite("temperature", temperature)
    if not 0 <= num <= MOST_SAMPLES:
        raise PlanError("'num' is out of range", given=num, allowed=f"0 to {MOST_SAMPLES}", fix="set num=200")
    check_seed(seed)
    if not prompt:
        raise PlanError("the prompt is empty", given="no text", allowed="at least one character", fix="--prompt 'def '")
    words = None if tokenizer is None else _tokenizer_of(tokenizer)
    model_prompt: str | list[int] = prompt if words is None else words.encode(prompt)
    output = launch(_rank, layout, config, run, layout, model_prompt, num, temperature, seed, averages, ranks=ranks)[0]
    if isinstance(output, str):
        return output
    return " ".join(map(str, output)) if words is None else str(words.decode(output))


def _tokenizer_of(folder: Path) -> Any:
    """Returns the tokenizer of transformers in a folder; only files there are read."""
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as failure:  # transformers may be missing, and reads files of many kinds, each with its own errors
        raise PlanError(
            "the tokenizer cannot be read",
            given=f"--tokenizer {folder}: {type(failure).__name__}: {str(failure).partition(chr(10))[0]}",
            allowed="a folder with a tokenizer that transformers has saved, and the package transformers",
            fix="name the folder that the weights came from; or leave --tokenizer out, and write token ids in --prompt",
        ) from None


def _tokens_of(prompt: str | list[int], model: nn.Module) -> list[int]:
    """Returns the token ids of a prompt of a model of transformers; a token that would end the text is left out.

    An encoder's input keeps it.

    Raises: PlanError: the prompt has none, or words that are no integers, or an id outside of the model's vocabulary.
    """
    config = getattr(model, "config", None)
    size, ends = getattr(config, "vocab_size", None), getattr(config, "eos_token_id", None)
    allowed = "token ids with spaces between" + (f", from 0 to {size - 1}" if size else "")
    try:
        tokens = [int(word) for word in prompt.split()] if isinstance(prompt, str) else prompt
    except ValueError:
        tokens = []
    if not tokens or min(tokens) < 0 or (size and max(tokens) >= size):
        raise PlanError(
            "the prompt is not of tokens of this model",
            given=repr(prompt),
            allowed=f"{allowed}; or text, with --tokenizer FOLDER",
            fix='write --prompt "1 15 27", or --tokenizer with the folder that the weights came from',
        )
    by_tokenizer, is_decoder = not isinstance(prompt, str), not getattr(config, "is_encoder_decoder", False)
    is_ended = tokens[-1] in (ends if isinstance(ends, list) else [ends])
    return tokens[:-1] if by_tokenizer and is_decoder and is_ended and len(tokens) > 1 else tokens


def _generated(run: Run, prompt: str | list[int], num: int, temperature: float, seed: int) -> list[int]:
    """Returns the token ids that the model's own ``generate`` makes of a prompt: it and what follows.

    Of an encoder-decoder they are what the decoder writes.
    """
    tokens, draws = _tokens_of(prompt, run.model), temperature >= LEAST_TEMPERATURE
    if num == 0:
        return tokens
    ids = torch.tensor([tokens])
    drawn = {"do_sample": True, "temperature": temperature} if draws else {"do_sample": False}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    token_ids: list[int] = run.generate(inputs, seed=seed, max_new_tokens=num, **drawn)[0].tolist()
    return token_ids


def _rank(
    world: World, config: TrainConfig, run_folder: Path, layout: Layout, prompt: str | list[int], num: int,
    temperature: float, seed: int, averages: bool,
) -> str | list[int]:  # fmt: skip
    """Runs on each rank: loads the checkpoint, then generates text byte by byte, or tokens, or classifies pictures."""
    with without_values():
        plain, loss, model_config = config.build()
    example, data = config.example(model_config), None
    if model_config is None:  # a user's own model is read on its data, which say how its samples become pairs
        training_job = opened(config)
        plain, loss, example = training_job.model, training_job.loss, inputs_of(training_job.data, config.batch)
        data = other_split(config, training_job, "eval")
    run = parallelize(
        plain, layout, world, loss=loss, seed=config.seed, roles=config.roles,
        example=example,
    )  # fmt: skip
    load_weights(run, run_folder / CHECKPOINTS, averages=averages)
    if model_config is None and getattr(plain, "generation_config", None) is not None:
        return _generated(run, prompt, num, temperature, seed)
    if not isinstance(prompt, str):
        raise PlanError(
            "a tokenizer is of no use to this model",
            given=f"--tokenizer for {config.model}",
            allowed="models of transformers, which generate",
            fix="leave --tokenizer out",
        )
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
            allowed="the built-in gpt and models of transformers, which continue a text, and models that classify",
            fix="write shardwright predict, which shows outputs beside targets, or export the weights",
        )
    classes = scores_of(run.predict(inputs)).argmax(-1).cpu()
    lines = [
        f"{i}: {c}{'' if c == t else f' (is {t})'}"
        for i, (c, t) in enumerate(zip(classes.tolist(), targets.tolist(), strict=True))
    ]
    right = int((classes == targets.cpu()).sum())
    return "\n".join([*lines, f"{right} of {len(lines)} right"])
