"""Follows which module's forward runs while a model is recorded, and which parameters code uses.

Inside of ``torch.utils.checkpoint`` a backward would run the forward of a module again. While a model is recorded it
does not: the tensors that the module's operators save for the backward are kept, as outside of a checkpoint. So the
backward of the user's own autograd functions computes with tensors that the record has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwright.analysis.calls.checkpoint_calls import saved_by
from shardwright.analysis.traced.structure import owners

UseEvent = tuple[Literal["use", "hold", "release"], str]
"""A use of a parameter in a recorded forward: the event, and the name of the parameter or of its group.

"hold" means that code has read the parameter and may use it later, until "release".
"""


class ModuleLog:
    """Follows the calls of a model's modules while it is open as a context, and changes nothing of what they compute.

    ``uses`` lists the uses of parameters so far, in order. A call of a module uses all of the module's own parameters.
    Code that reads a parameter as an attribute uses it too. If the forward of the parameter's module is running then,
    the read also holds the parameter, and the end of that forward releases it.

    >>> with ModuleLog(nn.Sequential(nn.Linear(2, 2))) as running:
    ...     running.where(), running.uses
    (('', 0), [])
    """

    def __init__(self, model: nn.Module) -> None:
        self.uses: list[UseEvent] = []
        self.modes: dict[str, set[bool]] = {}  # by module: whether it was training when it was called
        self._model = model
        self._stack = [("", 0)]
        self._calls = Counter[str]()
        self._saving = [saved_by()]  # for each running module, the hook that packed saved tensors when it began
        self._keeping: list[AbstractContextManager[Any]] = []  # for each running module, the context that it runs in
        self._open: AbstractContextManager[None] | None = None

    def __enter__(self) -> ModuleLog:
        self._open = self._followed()
        self._open.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._open is not None, "it was entered"
        self._open.__exit__(*error)

    def where(self) -> tuple[str, int]:
        """Returns the name of the module whose forward runs, and the number of that call, from 0."""
        return self._stack[-1]

    def runs_again(self) -> bool:
        """Returns whether the running module has itself opened a checkpoint, or saved-tensor hooks, around the code."""
        return saved_by() is not self._saving[-1]

    @contextmanager
    def _followed(self) -> Iterator[None]:
        named: dict[nn.Module, dict[str, str]] = {}
        for _, module, own, name in owners(self._model):
            named.setdefault(module, {})[own] = name
        plain = {module: module._parameters for module in named}
        for module, names in named.items():
            module._parameters = _RecordedParameters(module._parameters, names, self.uses)
        handles = []
        for path, module in self._model.named_modules():

            def enter(module: nn.Module, args: Any, path: str = path) -> None:
                self._begin(path, module)

            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(self._end, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module, parameters in plain.items():
                module._parameters = parameters

    def _begin(self, path: str, module: nn.Module) -> None:
        self.modes.setdefault(path, set()).add(module.training)
        self._stack.append((path, self._calls[path]))
        self._calls[path] += 1
        keeping = saved_tensors_hooks(_itself, _itself) if self.runs_again() else nullcontext()
        self._keeping.append(keeping)
        keeping.__enter__()
        self._saving.append(saved_by())
        if isinstance(module._parameters, _RecordedParameters):
            module._parameters.enter()

    def _end(self, module: nn.Module, *_: Any) -> None:
        self._stack.pop()
        self._saving.pop()
        self._keeping.pop().__exit__(None, None, None)
        if isinstance(module._parameters, _RecordedParameters):
            module._parameters.leave()


class _RecordedParameters(dict[str, Any]):
    """A module's ``_parameters`` dict that notes which parameters code reads as attributes."""

    def __init__(self, parameters: Mapping[str, Any], names: Mapping[str, str], uses: list[UseEvent]) -> None:
        super().__init__(parameters)
        self.names, self._uses = names, uses
        self._read: list[list[str]] = []  # for each running call of the module's forward, the parameters it has read

    def __getitem__(self, name: str) -> Any:
        if name in self.names:
            self._uses.append(("use", self.names[name]))
            if self._read:
                self._uses.append(("hold", self.names[name]))
                self._read[-1].append(self.names[name])
        return super().__getitem__(name)

    def enter(self) -> None:
        """Notes that the module's forward begins."""
        self._read.append([])
        self._uses.extend(("use", name) for name in self.names.values())

    def leave(self) -> None:
        """Notes that the module's forward has ended, and releases the parameters that were read in it."""
        self._uses.extend(("release", name) for name in self._read.pop())


def _itself(tensor: Tensor) -> Tensor:
    return tensor
