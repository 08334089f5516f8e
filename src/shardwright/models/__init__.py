"""The built-in models, which are plain torch modules for one device, and ``build``, which makes one by name."""

from __future__ import annotations

import importlib
import inspect
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from shardwright.errors import LayoutError, NoValuesError, PlanError, fix_for
from shardwright.models.attention import Attention, AttentionConfig, Rotary
from shardwright.models.convnet import ConvNetConfig, build_convnet
from shardwright.models.gpt import GPT, GPTConfig, generate
from shardwright.models.losses import CrossEntropy, MeanSquaredError
from shardwright.models.mlp import MLPConfig, build_mlp
from shardwright.models.settings import check_known, parse_value, read_config

__all__ = ["GPT", "Attention", "CrossEntropy", "MeanSquaredError", "Rotary", "build_convnet", "build_mlp", "generate"]
__all__ += ["AttentionConfig", "ConvNetConfig", "GPTConfig", "MLPConfig", "read_config"]
__all__ += ["MODELS", "ModelEntry", "build", "configure", "describable", "entry_of", "find", "load_named"]

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelEntry:
    """A built-in model: its config, factory, loss and random example data.

    ``example_batch(config, batch, seq, generator)`` returns random (inputs, targets) of ``batch`` samples; models of
    sequences use ``seq`` tokens a sample.

    >>> entry = MODELS["gpt"]
    >>> tokens, targets = entry.example_batch(entry.config(), 2, 5, torch.Generator().manual_seed(0))
    >>> tokens.shape, bool((tokens[:, 1:] == targets[:, :-1]).all())
    (torch.Size([2, 5]), True)
    """

    config: type[Any]
    factory: Callable[[Any], nn.Module]
    loss: Callable[[], nn.Module]
    example_batch: Callable[[Any, int, int, torch.Generator], tuple[Tensor, Tensor]]


def _mlp_batch(config: MLPConfig, batch: int, seq: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x_BF = torch.randn(batch, config.widths[0], generator=generator)
    return x_BF, torch.randint(config.widths[-1], (batch,), generator=generator)


def _attention_batch(
    config: AttentionConfig, batch: int, seq: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    x_2BTH = torch.randn(2, batch, seq, config.width, generator=generator)
    return x_2BTH[0], x_2BTH[1]


def _convnet_batch(config: ConvNetConfig, batch: int, seq: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x_BCYX = torch.randn(batch, config.image_channels, config.image_size, config.image_size, generator=generator)
    return x_BCYX, torch.randint(config.num_classes, (batch,), generator=generator)


def _gpt_batch(config: GPTConfig, batch: int, seq: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(config.vocabulary, (batch, seq + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


MODELS: Mapping[str, ModelEntry] = {
    "mlp": ModelEntry(config=MLPConfig, factory=build_mlp, loss=CrossEntropy, example_batch=_mlp_batch),
    "attention": ModelEntry(
        config=AttentionConfig,
        factory=lambda config: Attention(**asdict(config)),
        loss=MeanSquaredError,
        example_batch=_attention_batch,
    ),
    "convnet": ModelEntry(config=ConvNetConfig, factory=build_convnet, loss=CrossEntropy, example_batch=_convnet_batch),
    "gpt": ModelEntry(config=GPTConfig, factory=GPT, loss=CrossEntropy, example_batch=_gpt_batch),
}


def find(name: str) -> ModelEntry:
    """Returns the :class:`ModelEntry` of the built-in model called ``name``.

    Raises: PlanError: there is no such model.

    >>> find("gtp")
    Traceback (most recent call last):
    shardwright.errors.PlanError: no such model
      given:   gtp
      allowed: mlp, attention, convnet, gpt, or package.module:factory
      fix:     write gpt
    """
    if name not in MODELS:
        allowed = f"{', '.join(MODELS)}, or package.module:factory"
        raise PlanError("no such model", given=name, allowed=allowed, fix=fix_for(name, MODELS))
    return MODELS[name]


def entry_of(config: object) -> ModelEntry | None:
    """Returns the :class:`ModelEntry` of the built-in model whose config this is, or None for any other object.

    >>> entry_of(GPTConfig()) is MODELS["gpt"], entry_of("gpt") is None
    (True, True)
    """
    return next((entry for entry in MODELS.values() if isinstance(config, entry.config)), None)


def configure(name: str, settings: Mapping[str, object]) -> Any:
    """Returns the config of a built-in model from settings, whose values may be text, as on a command line.

    Raises: PlanError: no such model or setting, or a value of the wrong type or out of range.

    >>> configure("gpt", {"num_layers": "2", "width": 64}).num_layers
    2
    """
    return read_config(find(name).config, settings)


FACTORY = threading.RLock()
"""Held while a user's factory runs: ranks may be threads, and imports on first use are not made for several at once."""


def build(name: str, settings: Mapping[str, object]) -> nn.Module:
    """Returns a built-in model by name, or the model that ``package.module:factory`` makes of the settings.

    Values that are text are converted to the types of the config's fields or of the factory's parameters.

    Raises: PlanError: no such model, module, factory or setting; a value of the wrong type or out of range; sizes that
        are too large for torch; a factory that fails or returns something else. LayoutError: the factory raises it.

    >>> build("convnet", {"channels": "4,8"}).conv2.conv
    Conv2d(4, 8, kernel_size=(5, 5), stride=(1, 1))
    >>> build("torch.nn:Linear", {"in_features": "4", "out_features": 2})
    Linear(in_features=4, out_features=2, bias=True)
    """
    return build_with_loss(name, settings)[0]


def build_with_loss(name: str, settings: Mapping[str, object]) -> tuple[nn.Module, Any]:
    """Returns a model as :func:`build` does, and its loss: None if a factory returns the model without one.

    A factory may return the pair (model, loss), the loss as :func:`shardwright.parallelize` takes it.
    """
    if ":" not in name:
        config = configure(name, settings)
        with describable(f"the model {config}"):
            return find(name).factory(config), find(name).loss()
    factory = load_named(name)
    try:
        parameters = inspect.signature(factory).parameters
    except (ValueError, TypeError):  # a factory written in C may have no signature; it refuses wrong settings itself
        parameters = None
    if parameters is not None and all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        check_known(name, settings, list(parameters))
    try:
        hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    except Exception:  # the user's annotations may be text, whose evaluation can raise any error
        hints = {}  # without type hints, settings given as text are parsed as literals
    arguments = {key: parse_value(key, value, hints.get(key)) for key, value in settings.items()}
    try:
        with FACTORY:
            product = factory(**arguments)
    except NoValuesError as failure:  # a PlanError too, which alone would not name the model
        raise _failed(name, failure) from failure
    except (LayoutError, PlanError):
        raise
    except Exception as failure:  # any Python code may run here
        raise _failed(name, failure) from failure
    model, loss = product if isinstance(product, tuple) and len(product) == 2 else (product, None)
    if not isinstance(model, nn.Module):
        type_name = type(model).__name__
        allowed = "a function or class that returns a torch.nn.Module, or a pair of it and its loss"
        raise PlanError(f"'{name}' makes no model", given=type_name, allowed=allowed, fix="return the module")
    return model, loss


@contextmanager
def describable(what: str) -> Iterator[None]:
    """Returns a context that turns the errors of torch for sizes that are too large into a PlanError about ``what``.

    These are RuntimeError, TypeError, OverflowError and MemoryError, whatever has caused them.

    >>> with describable("the batch"):
    ...     _ = torch.empty(2**40, 2**40)
    Traceback (most recent call last):
    shardwright.errors.PlanError: the batch is too large for torch
      given:   RuntimeError: ...
      allowed: tensors of less than 2**63 bytes, and those with values, no more than fit in memory
      fix:     set smaller sizes
    """
    try:
        yield
    except PlanError:
        raise
    except (RuntimeError, TypeError, OverflowError, MemoryError) as failure:
        raise PlanError(
            f"{what} is too large for torch",
            given=f"{type(failure).__name__}: {failure}".splitlines()[0],
            allowed="tensors of less than 2**63 bytes, and those with values, no more than fit in memory",
            fix="set smaller sizes",
        ) from failure


def _failed(name: str, failure: Exception) -> PlanError:
    """Returns the error for a factory that raised, with the last line of the user's code that ran."""
    allowed, fix = "a factory that takes these settings and returns a model", "mend it, or change the settings"
    if isinstance(failure, ImportError):
        allowed, fix = "a factory whose imports are installed here", "install what it imports, or mend the import"
    elif torch.empty(0).is_meta:  # under ``without_values`` the usual cause is code that reads values
        allowed = "a factory that makes layers and looks at no values: they come later, and no rank ever holds them all"
        fix = "take what decides shapes from the settings, and draw values in the layers' reset_parameters()"
    frames = [f for f in traceback.extract_tb(failure.__traceback__) if not f.filename.startswith(_LIBRARIES)]
    where = f"\n           {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}" if frames else ""
    message = str(failure).strip().splitlines()[:1]
    error_text = f"{type(failure).__name__}: {''.join(message)}{where}"
    what = f"'{name}' failed to build its model" + (" without values" if torch.empty(0).is_meta else "")
    return PlanError(what, given=error_text, allowed=allowed, fix=fix)


def load_named(name: str) -> Callable[..., Any]:
    """Returns the function or class that ``package.module:factory`` names, as a command line does.

    Raises: PlanError: the module cannot be imported, or has no such function or class.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # any Python code may run here
        raise PlanError(
            f"cannot import '{module_name}'",
            given=f"{name}: {type(error).__name__}: {error}",
            allowed="package.module:factory, importable from where you are",
            fix="install the package, or set PYTHONPATH to the folder that holds it",
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        known = sorted(key for key, value in vars(module).items() if callable(value) and key[0] != "_")
        home = getattr(module, "__name__", module_name)
        own = [key for key in known if getattr(vars(module)[key], "__module__", "") == home]
        there = (
            f"write {module_name}: with one of {', '.join(own[:8])}, or define it there" if own else "define it there"
        )
        fix = fix_for(attribute, known, there, before=f"write {module_name}:")
        what, allowed = f"'{module_name}' has no factory '{attribute}'", "a function or class of that module"
        raise PlanError(what, given=name, allowed=allowed, fix=fix)
    return factory  # type: ignore[no-any-return]
