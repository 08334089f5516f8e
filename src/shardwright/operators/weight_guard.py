"""Refuses calls of sharded layers by code that the plan has not seen, and reads of their weights by other code.

Tensor parallelism decides from traced code how a layer is sharded. Two things would give wrong results silently:
calling the layer from elsewhere (:class:`CallGuard`), and reading its weight as an attribute (:func:`guard`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.analysis.traced.callers import AllowedCallers
from shardwright.analysis.traced.structure import GUARDED
from shardwright.comm.autograd import no_exchange_inside_transform
from shardwright.errors import PlanError
from shardwright.forward_stack import Forward, Rung, wrap


@dataclass
class ForwardFlag:
    """A flag that is set while a forward of the whole model runs."""

    active: bool = False

    def watch(self, model: nn.Module) -> None:
        """Registers hooks that set the flag while a forward of ``model`` runs."""

        def mark(active: bool, *_: Any) -> None:
            self.active = active

        model.register_forward_pre_hook(partial(mark, True))
        model.register_forward_hook(partial(mark, False), always_call=True)


@dataclass
class CallGuard:
    """Tracks which modules' forwards are running, and refuses calls of sharded layers that the plan did not see.

    ``containers`` are the paths of modules like ``nn.Sequential`` that only pass calls on. ``apart`` are the paths of
    the modules whose code a pipeline stage runs call by call, without their forwards. ``by`` is the name of the
    strategy that shards the layers.
    """

    containers: Collection[str] = ()
    apart: Collection[str] = ()
    by: str = "core"
    _paths: list[str] = field(default_factory=list)

    def follow(self, module: nn.Module, path: str) -> None:
        """Wraps the module's forward to note when it runs, so that calls of sharded layers have a known caller."""

        def around(forward: Forward) -> Forward:
            @wraps(forward)
            def run(*args: Any, **named: Any) -> Any:
                if torch.compiler.is_dynamo_compiling():  # else equal blocks would compile once per path
                    return forward(*args, **named)
                self._paths.append(path)
                try:
                    return forward(*args, **named)
                finally:
                    self._paths.pop()

            return run

        wrap(module, Rung.FOLLOWED, "notes that it runs", by=self.by, around=around)

    def restrict(self, module: nn.Module, path: str, allowed: AllowedCallers) -> None:
        """Makes calls of the sharded layer at ``path`` raise PlanError, unless ``allowed`` permits their caller.

        So do calls inside a transform such as ``torch.vmap``. Compiled code is not checked.

        >>> class Pair(nn.Sequential):
        ...     pass
        >>> pair, calls = Pair(nn.Linear(2, 4), nn.Linear(4, 2)), CallGuard()
        >>> calls.follow(pair, "pair")
        >>> calls.restrict(pair[0], "pair.0", AllowedCallers.of("pair"))
        >>> pair(torch.ones(2)).shape
        torch.Size([2])
        >>> pair[0](torch.ones(2))
        Traceback (most recent call last):
        shardwright.errors.PlanError: 'pair.0' is sharded, and is called by other code than the plan was made for
          given:   a call from outside the model's forward
          allowed: calls from the forward of 'pair'
          fix:     keep it replicated: --role pair.0=copied, or roles={"pair.0": "copied"}
        """

        def around(forward: Forward) -> Forward:
            @wraps(forward)
            def run(*args: Any, **named: Any) -> Any:
                if not torch.compiler.is_dynamo_compiling():
                    if not self._is_allowed(allowed):
                        raise _called_elsewhere(path, allowed, self._paths)
                    if torch._C._functorch.peek_interpreter_stack() is not None:
                        raise no_exchange_inside_transform(f"'{path}', which ranks share")
                return forward(*args, **named)

            return run

        callers = ", ".join(caller or "the model" for caller in sorted(allowed.callers))
        wrap(module, Rung.CALLERS, f"called by {callers} alone", by=self.by, around=around)

    def _is_allowed(self, allowed: AllowedCallers) -> bool:
        if allowed.is_caller(self._paths, self.containers):
            return True
        # ``_paths`` lacks outer callers in two cases: a backward recomputes a single module, or a pipeline stage runs a
        # module's calls one by one, without the module's forward.
        recomputes = torch._C._current_graph_task_id() != -1
        if not recomputes and allowed.owner not in self.apart:
            return False
        callers = [path for path in self._paths if path not in self.containers]
        return callers[-1] in allowed.callers if callers else recomputes or not allowed.callers.isdisjoint(self.apart)


def _called_elsewhere(path: str, allowed: AllowedCallers, running: list[str]) -> PlanError:
    def spelled(name: str) -> str:
        return f"'{name}'" if name else "the model"

    callers = {allowed.owner} if allowed.owner in allowed.callers else allowed.callers
    return PlanError(
        f"'{path}' is sharded, and is called by other code than the plan was made for",
        given=f"a call from {spelled(running[-1])}" if running else "a call from outside the model's forward",
        allowed=f"calls from the forward of {', '.join(map(spelled, sorted(callers)))}",
        fix=f'keep it replicated: --role {path}=copied, or roles={{"{path}": "copied"}}',
    )


def guard(module: nn.Module, path: str, forward: ForwardFlag, readable: Collection[str] = ()) -> None:
    """Makes uses of the module's own parameters during a forward raise PlanError, except for those named ``readable``.

    This finds functional tying, ``F.linear(x, model.token.weight)``. Code may ask for the dtype and the device, as with
    ``x.to(layer.weight.dtype)`` (:class:`GhostWeight`). ``forward`` says whether a forward runs. The
    module's class is replaced by a subclass; its own forward must read its parameters through
    :func:`~shardwright.operators.linear.weight_of`.

    >>> layer, forward = nn.Linear(2, 2), ForwardFlag()
    >>> guard(layer, "head", forward)
    >>> layer.weight.shape
    torch.Size([2, 2])
    >>> forward.active = True
    >>> layer.weight.dtype, layer.weight.device
    (torch.float32, device(type='cpu'))
    >>> layer.weight * 2
    Traceback (most recent call last):
    shardwright.errors.PlanError: 'head.weight' is sharded, and is read by other code than its own layer
      given:   a call of mul with it during the forward
      allowed: calling 'head'; its dtype and device; one parameter in two layers: head.weight = token.weight
      fix:     call the layer, or assign the parameter to the layer that shares it
    """

    guarded = [name for name, parameter in module._parameters.items() if parameter is not None and name not in readable]
    vars(module)[_GUARD] = (path, forward)
    kind: Any = type(module)
    module.__class__ = _guarded_kind(kind, tuple(guarded))


class GhostWeight(Tensor):
    """The stand-in for a sharded weight that code outside of its layer reads, with dtype and device, without values."""

    _of: tuple[Tensor, str, str]

    @classmethod
    def of(cls, weight: Tensor, path: str, name: str) -> GhostWeight:
        """Returns a stand-in, without values, for ``weight``, the parameter ``name`` of the layer at ``path``."""
        made = torch.empty(0, dtype=weight.dtype, device="meta").as_subclass(cls)
        made._of = weight, path, name
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answers questions about the dtype, the device and the like, which a weight and its shards share.

        Raises: PlanError: any other function is called with the stand-in.
        """
        weight, path, name = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))._of
        if func in _SAME_OF_SHARDS:
            return func(weight)
        raise PlanError(
            f"'{path}.{name}' is sharded, and is read by other code than its own layer",
            given=f"a call of {getattr(func, '__name__', func)} with it during the forward",
            allowed=f"calling '{path}'; its dtype and device; one parameter in two layers: head.weight = token.weight",
            fix="call the layer, or assign the parameter to the layer that shares it",
        )


_PROPERTIES = (Tensor.dtype, Tensor.device, Tensor.requires_grad, Tensor.is_meta, Tensor.layout, Tensor.ndim)
# union-attr: torch's type stubs declare these properties, which C defines, as plain attributes without a getter
_SAME_OF_SHARDS = frozenset(
    (*(descriptor.__get__ for descriptor in _PROPERTIES),  # type: ignore[union-attr]
     Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.dim, Tensor.get_device,
     torch.is_floating_point, torch.is_complex)
)  # fmt: skip
"""The functions that give the same answer for a shard as for the whole weight."""

_GUARD = "_weight_guard"


@cache
def _guarded_kind(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Returns a cached subclass of ``kind`` in which reading these parameters in a forward gives a GhostWeight."""

    def reader(name: str) -> property:
        def read(self: nn.Module) -> Tensor | None:
            path, forward = vars(self)[_GUARD]
            for namespace in (self._parameters, vars(self)):
                if name in namespace:
                    weight: Tensor | None = namespace[name]
                    return GhostWeight.of(weight, path, name) if forward.active and weight is not None else weight
            raise AttributeError(name)

        def write(self: nn.Module, value: Any) -> None:  # pruning sets a tensor in place of a parameter
            vars(self)[name] = value

        return property(read, write)

    original = vars(kind).get(GUARDED, kind)
    readers = {name: reader(name) for name in names}
    return type(kind.__name__, (kind,), {**readers, GUARDED: original, "__module__": kind.__module__})
