r"""``OperatorNote``: a module's entry in a tensor-parallel plan; each kind of operator has a class of its own.

It says how the module is cut, what replaces its forward, and what it sends.

::

    place ----> note in the plan ----> apply      on a rank: the module's new forward
                               \-----> traffic    anywhere: its collectives, for a price or to be checked
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from shardwright.analysis.on_meta.module_calls import ModuleCall
from shardwright.plan.plan import Plan
from shardwright.plan.traffic import Traffic

if TYPE_CHECKING:
    from shardwright.strategies.tensor_parallel.apply import Applying
    from shardwright.strategies.tensor_parallel.traffic import RankTraffic


class OperatorNote(ABC):
    """The cut of one module, of the loss or of the model's output, as data, with what follows from it.

    A kind of operator is one frozen dataclass that derives from it: its fields say how the operator is cut, ``apply``
    replaces a forward accordingly, and ``traffic`` states the collectives of that forward and its backward.
    """

    guarded: ClassVar[bool] = False
    """Whether the module's parameters are cut, so that code other than its forward must not read them."""

    inner: ClassVar[tuple[str, ...]] = ()
    """The names of the layers inside the module that work on its shards, so that only the module may call them."""

    @abstractmethod
    def apply(self, rank: Applying, path: str, module: Any) -> None:
        """Replaces the forward of the module at ``path`` by one that works on the shards of this rank."""

    def traffic(self, here: RankTraffic, path: str, call: ModuleCall) -> Iterator[Traffic]:
        """Yields the collectives of one call of the module at ``path``, forward and backward; by default none."""
        return iter(())

    def called_as(self, path: str) -> str:
        """Returns the path of the module whose calls cause this traffic; by default it is ``path`` itself."""
        return path

    def fetched(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Yields the module's weights that are all-gathered before use, by name, each with the axes of the all-gather.

        Their gradients are reduce-scattered outside of autograd, so gradient sync waits for them.
        """
        return iter(())

    def num_sent(self) -> float:
        """Returns the number of elements that a rank sends in a microbatch, by which ``tp/auto`` compares modes.

        It is 0 for operators that are not compared: norms, tables, convolutions and the loss.
        """
        return 0.0


def notes_of(plan: Plan) -> Iterator[tuple[str, OperatorNote]]:
    """Yields the notes of a plan that describe operators, by path; other strategies have notes of other types."""
    return ((path, note) for path, note in plan.notes.items() if isinstance(note, OperatorNote))
