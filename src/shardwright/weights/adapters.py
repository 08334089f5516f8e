"""Adapters of peft: what a folder holds that ``PeftModel.from_pretrained`` loads, by peft's own code.

peft is used only where a model is wrapped by it, which has imported it.
"""

from __future__ import annotations

import copy
import tempfile
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright.errors import CheckpointError

ADAPTER = "adapter_model.safetensors"
"""The file of an adapter's weights in its folder."""

ADAPTER_CONFIG = "adapter_config.json"
"""The file that describes an adapter."""

_WRAPPER, _INNER = "base_model.model.", ".base_layer."


def adapter_in(model: nn.Module | None) -> str | None:
    """Returns the name of the adapter of peft that a model trains; None for a model without one.

    Raises: CheckpointError: the model has several at once.
    """
    known = getattr(model, "peft_config", None)
    if not isinstance(known, Mapping) or not known:
        return None
    active = getattr(model, "active_adapters", None) or getattr(model, "active_adapter", None)
    active = active() if callable(active) else active
    names = [active] if isinstance(active, str) else list(active or known)
    if len(names) > 1:
        raise CheckpointError(
            "a folder of peft holds one adapter",
            given=f"the adapters {', '.join(map(str, names))}, all active",
            allowed="one active adapter",
            fix=f"write model.set_adapter({names[0]!r}) before sw.parallelize",
        )
    return str(names[0])


def adapter_names(model: nn.Module, adapter: str, names: Collection[str]) -> dict[str, str]:
    """Returns the names that an adapter's tensors have in its folder, by their plain names, chosen among ``names``.

    The result is empty for an adapter whose folder holds other tensors than its parameters, such as encoded prompts.
    """
    from peft import get_peft_model_state_dict  # the model's class comes from there

    # peft chooses and renames by name alone; the tensors only say which is which
    tensors = {name: torch.empty(0, device="cpu") for name in names}
    hooks = {module: module._state_dict_pre_hooks for module in model.modules()}
    try:
        for module in hooks:  # ZeRO's hooks refuse reads of values, but here only names are read
            module._state_dict_pre_hooks = OrderedDict()
        with torch._C.DisableTorchFunctionSubclass():  # parameters that ZeRO has resharded refuse reads too
            state = get_peft_model_state_dict(
                model, state_dict=dict(tensors), adapter_name=adapter, save_embedding_layers=False
            )
    except Exception:  # any code of an adapter's kind may run: a kind that cannot be written so has no names
        return {}
    finally:
        for module, before in hooks.items():
            module._state_dict_pre_hooks = before
    places = {id(tensor): name for name, tensor in tensors.items()}
    if any(id(tensor) not in places for tensor in state.values()):
        return {}
    return {places[id(tensor)]: new if new.startswith(_WRAPPER) else _WRAPPER + new for new, tensor in state.items()}


def names_beside_adapter(
    model: nn.Module, plain: Collection[str], held: Collection[str]
) -> Mapping[str, str | None] | None:
    """Returns the names that the tensors of a model wrapped by peft have in weights without that wrapper.

    ``plain`` are the names of the model's tensors, and ``held`` those of the weights, which are either the base
    model's, without the adapter's tensors, or those of the adapter's folder alone. A tensor that such weights do not
    have is mapped to None. Returns None for a model without one adapter, and for weights whose names are those of the
    wrapped model.
    """
    adapter = adapter_in(model) if getattr(model, "peft_config", None) else None
    if adapter is None or not {*plain}.isdisjoint(held):
        return None
    own, whole = adapter_names(model, adapter, plain), f".modules_to_save.{adapter}."
    # modules_to_save are copies of layers of the base model, trained whole; peft names them only on a stage with them
    own |= {name: name.replace(whole, ".") for name in plain if whole in name}
    if all(name.startswith(_WRAPPER) for name in held):
        return {name: own.get(name) for name in plain}
    return {name: _base_name(name, whole) if name not in own or whole in name else None for name in plain}


def _base_name(name: str, whole: str) -> str:
    for inner in (_INNER, ".original_module.", whole):
        name = name.replace(inner, ".")
    return name.removeprefix(_WRAPPER)


def check_found(adapter: str, names: Collection[str]) -> None:
    """Raises CheckpointError if ``names``, an adapter's tensors that can be written as they are, is empty."""
    if not names:
        raise CheckpointError(
            "the adapter cannot be written as a folder of peft",
            given=f"'{adapter}', whose folder holds other tensors than its parameters",
            allowed="adapters whose parameters are written as they are, such as LoRA",
            fix="write format='safetensors', which keeps the names of the plain model",
        )


def adapter_files(model: nn.Module, adapter: str) -> dict[str, bytes]:
    """Returns the files of an adapter's folder beside its weights, by name."""
    known: Any = model.peft_config
    config = copy.copy(known[adapter])
    config.inference_mode = True  # as peft writes it
    if getattr(config, "base_model_name_or_path", "") is None:
        inner = getattr(getattr(model, "base_model", None), "model", model)
        config.base_model_name_or_path = getattr(inner, "name_or_path", None) or None
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return {ADAPTER_CONFIG: (Path(folder) / ADAPTER_CONFIG).read_bytes()}


def check_unwrapped(names: Collection[str]) -> None:
    """Raises CheckpointError if names are those of a model wrapped by peft, which ``from_pretrained`` does not know.

    >>> check_unwrapped(["base_model.model.layers.0.q_proj.base_layer.weight"])
    Traceback (most recent call last):
    shardwright.errors.CheckpointError: the weights are those of a model wrapped by peft
      given:   base_model.model.layers.0.q_proj.base_layer.weight, which transformers does not know
      ...
    """
    wrapped = next((name for name in names if name.startswith(_WRAPPER) or _INNER in name), None)
    if wrapped is not None:
        raise CheckpointError(
            "the weights are those of a model wrapped by peft",
            given=f"{wrapped}, which transformers does not know",
            allowed="the run, or model=, the plain model with its adapter, of which an adapter folder is written",
            fix="write sw.save_weights(source, to, format='transformers', model=get_peft_model(base, config)), or "
            "--model package.module:factory of that model",
        )
