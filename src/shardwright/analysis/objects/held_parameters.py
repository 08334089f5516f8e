"""Finds lists of parameters that no forward reads, and puts objects in the parameters' place that refuse to be read.

A model may keep some of its parameters in a plain list beside its modules, as those that a penalty is computed from.
Where ranks have parts of these parameters, code that reads the list would compute with parts. A recorded forward shows
whether the forward reads it. If it does not, the list of a rank's model holds an :class:`UnreadParameter` for each
parameter: the layout is allowed, and code outside of the forward that reads one gets an error instead of a part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torch import nn

from shardwright.analysis.objects.copying import copied
from shardwright.analysis.objects.reached import unregistered_attributes
from shardwright.errors import LayoutError

AttributeOf = tuple[str, str]
"""The path of a module, and the name of one of its attributes."""

CONTAINERS = (list, tuple, dict, OrderedDict, set)

_COMPUTING = ("add", "sub", "mul", "truediv", "pow", "matmul", "radd", "rsub", "rmul", "rtruediv", "rpow", "neg", "abs")
_ASKING = ("getitem", "setitem", "len", "iter", "bool", "float", "int", "lt", "le", "gt", "ge")
"""Beside those that compute, Python's operators by which code could read a parameter."""


class UnreadParameter:
    """Stands in a list for a parameter of which a rank has a part only, or none. Whatever reads it gets a LayoutError.

    ``name`` is the parameter's name in the model, and ``attribute`` the one whose list this object is in. With each
    error, the attribute is added to ``read``, so that the read is known even if the code catches the error.

    >>> held = UnreadParameter("layer.weight", ("", "decayed"), set())
    >>> held.square()
    Traceback (most recent call last):
    ...
    shardwright.errors.LayoutError: code reads the parameter 'layer.weight' in a list, and ranks have parts of it
      given:   the attribute 'decayed' of the model
      allowed: parameters that code reads from the module that owns them
      fix:     read it as module.weight where it is used, or choose a layout that leaves it whole, such as dp2
    """

    __slots__ = ("_attribute", "_name", "_read")

    def __init__(self, name: str, attribute: AttributeOf, read: set[AttributeOf]) -> None:
        self._name, self._attribute, self._read = name, attribute, read

    def __deepcopy__(self, memo: dict[int, Any]) -> UnreadParameter:
        return self  # with the set of attributes that have been read

    def __repr__(self) -> str:
        return f"<the parameter '{self._name}', which no forward reads here>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols of Python and of other libraries, which ask every object
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:
        waiting: list[Any] = [*args, *(kwargs or {}).values()]
        while waiting:
            value = waiting.pop(0)
            if isinstance(value, cls):
                value._refuse()
            waiting += value if isinstance(value, list | tuple) else ()
        raise AssertionError("torch calls this for an argument only")

    def _refuse(self, *_: Any) -> NoReturn:
        self._read.add(self._attribute)
        path, name = self._attribute
        raise LayoutError(
            f"code reads the parameter '{self._name}' in a list, and ranks have parts of it",
            given=f"the attribute '{name}' of {f'{path!r}' if path else 'the model'}",
            allowed="parameters that code reads from the module that owns them",
            fix=f"read it as module.{self._name.rpartition('.')[2]} where it is used, or choose a layout that leaves "
            "it whole, such as dp2",
        )


for _operator in (*_COMPUTING, *_ASKING):
    setattr(UnreadParameter, f"__{_operator}__", UnreadParameter._refuse)


def parameter_lists(model: nn.Module) -> tuple[AttributeOf, ...]:
    """Returns the plain attributes of modules whose lists, tuples, dicts or sets hold parameters of the model.

    The list in which a recurrent layer of torch keeps its weights is left out: the layer reads it in its forward.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2))
    >>> model.decayed = [(name, parameter) for name, parameter in model.named_parameters()]
    >>> parameter_lists(model)
    (('', 'decayed'),)
    """
    ids = {id(parameter) for parameter in model.parameters()}
    return tuple(
        (path, name)
        for path, module in model.named_modules()
        for name, value in unregistered_attributes(module)
        if type(value) in CONTAINERS and not (isinstance(module, nn.RNNBase) and name == "_flat_weights")
        if any(id(entry) in ids for entry in _entries(value))
    )


def unread_lists(
    model: nn.Module, fails: Callable[[nn.Module], object], lists: Sequence[AttributeOf]
) -> tuple[AttributeOf, ...]:
    """Returns those of the attributes ``lists`` in which a forward of the model reads no parameter.

    ``fails(model)`` runs a forward of a model, and returns whether its code has raised an error. It is called with
    copies of ``model``. The result is empty if the forward fails for another reason than that it reads a parameter.

    >>> import torch
    >>> class Net(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = nn.Linear(2, 2)
    ...         self.decayed, self.used = [self.layer.weight], {"bias": self.layer.bias}
    ...     def forward(self, x):
    ...         return self.layer(x) + self.used["bias"]
    >>> def fails(model):
    ...     try:
    ...         model(torch.zeros(1, 2))
    ...     except LayoutError:
    ...         return True
    >>> unread_lists(Net(), fails, parameter_lists(Net()))
    (('', 'decayed'),)
    """
    left = tuple(lists)
    while left:
        copy = copied(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
        read = put_unread(copy, left)
        failed = fails(copy)
        if not read:
            return () if failed else left
        left = tuple(attribute for attribute in left if attribute not in read)
    return ()


def put_unread(model: nn.Module, lists: Sequence[AttributeOf]) -> set[AttributeOf]:
    """Replaces the parameters that the given attributes of a model hold by objects that refuse to be read.

    Lists, dicts and sets are changed in place, and tuples replaced. Returns a set, at first empty, to which each
    attribute is added once code reads one of its parameters.
    """
    read = set[AttributeOf]()
    names = {id(parameter): name for name, parameter in model.named_parameters()} if lists else {}
    for attribute in lists:
        path, name = attribute
        own = vars(model.get_submodule(path))
        own[name] = _replaced(own[name], {key: UnreadParameter(text, attribute, read) for key, text in names.items()})
    return read


def _replaced(value: Any, by_id: Mapping[int, UnreadParameter]) -> Any:
    """Returns ``value`` with objects in place of the parameters with these ids, in the containers that it holds too."""
    if id(value) in by_id:
        return by_id[id(value)]
    if type(value) not in CONTAINERS:
        return value
    if isinstance(value, dict):
        for key, entry in list(value.items()):
            value[key] = _replaced(entry, by_id)
        return value
    entries = [_replaced(entry, by_id) for entry in value]
    if isinstance(value, tuple):
        return tuple(entries)
    value.clear()
    (value.update if isinstance(value, set) else value.extend)(entries)
    return value


def _entries(value: Any) -> Iterator[Any]:
    """Yields what the nested lists, tuples, dicts and sets of ``value`` hold."""
    waiting = [value]
    while waiting:
        entry = waiting.pop()
        if type(entry) in CONTAINERS:
            waiting += entry.values() if isinstance(entry, dict) else entry
        else:
            yield entry
