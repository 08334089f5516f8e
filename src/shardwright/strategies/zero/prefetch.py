"""Which units are whole when: gathered ahead of what computes with them, and in stage 3 dropped behind it.

::

    forward    | gather 0 | compute 0 | compute 1 | compute 2 |          ahead=1
               |          | gather 1  | gather 2  |
                                      | drop 0    | drop 1    | drop 2

    backward   | gather 2 | backward 2 | backward 1 | ...
               |          | gather 1   | gather 0   |

Where units are dropped the order is that of the forward before: ranks must run the same code, and ``made`` says whether
they did. In the backward a unit is asked for by autograd itself, when it takes out a weight that it has saved; what is
saved is not the weight but its place, so nothing holds on to the whole.

Where units stay whole, all of a chunk's are gathered in its first forward, in the order in which they stand in the
plan: a rank that asks for some of them alone, or for others first, makes the same calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwright.errors import PlanError
from shardwright.plan.schedule import Action
from shardwright.strategies.zero.flat_parameter import Flat


@dataclass(eq=False)
class Block:
    """The sequences of one unit: gathered and dropped together.

    ``stays`` says that other units' modules use it too: then it stays whole until the action ends. ``is_kept`` says
    so for this action alone, ``is_lent`` until a module is called: somebody else than its modules has read it.
    """

    name: str
    flats: tuple[Flat, ...]
    stays: bool = False
    is_whole: bool = False
    is_coming: bool = False
    is_kept: bool = False
    is_lent: bool = False

    @property
    def is_held(self) -> bool:
        """Whether it stays though others are asked for."""
        return self.stays or self.is_kept or self.is_lent

    @property
    def is_there(self) -> bool:
        """Whether it is whole, or on its way."""
        return self.is_whole or self.is_coming

    def gather(self) -> None:
        """Starts to make it whole, if it is not."""
        if not self.is_there:
            for flat in self.flats:
                flat.gather()
            self.is_coming = True

    def arrive(self) -> None:
        """Makes it whole."""
        self.gather()
        if self.is_coming:
            for flat in self.flats:
                flat.arrive()
        self.is_coming, self.is_whole = False, True

    def drop(self) -> None:
        """Lets go of it, or says that it is out of date; what is still on its way is waited for."""
        if self.is_coming:
            self.arrive()
        if self.is_whole:
            for flat in self.flats:
                flat.drop()
        self.is_whole = False


class _Saved(NamedTuple):
    """The place of a tensor that autograd has saved, in a unit's whole."""

    block: Block
    flat: Flat
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class Window:
    """The units of one rank, of which at most ``ahead + 1`` are whole or under way at once, beside those that stay.

    With ``drops`` false units stay whole once they are, until :meth:`changed` says that they are out of date, and are
    gathered in the order of ``chunks``. ``most`` is how many there were at most, ``made`` what was gathered, in order.
    ``is_running`` says that an action is.
    """

    blocks: Sequence[Block]
    ahead: int
    drops: bool
    chunks: Mapping[int, Sequence[Block]]
    most: int = 0
    made: list[str] = field(default_factory=list)
    is_running: bool = False
    _current: Block | None = None
    _path: Sequence[Block] = ()
    _place: int = 0
    _touched: list[Block] = field(default_factory=list)
    _order: dict[tuple[bool, int], tuple[Block, ...]] = field(default_factory=dict)

    @contextmanager
    def during(self, action: Action) -> Iterator[None]:
        """Runs an action: what it asks for is there when it does, and gone when it has ended."""
        forward = action.kind == "F"
        self._path, self._place, self._touched = self._order.get((forward, action.chunk), ()), 0, []
        self._current, self.is_running = None, True
        if not self.drops:
            self._path = self.chunks.get(action.chunk, ()) if forward else ()
        elif action.kind == "W":
            self._path = ()  # weights' gradients need no weights
        saves = forward and self.drops and torch.is_grad_enabled()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.save, self.take_out) if saves else nullcontext():
                yield
        finally:
            self.is_running = False
        if forward:
            self._order[True, action.chunk] = tuple(dict.fromkeys(self._touched))
            self._order[False, action.chunk] = tuple(dict.fromkeys(reversed(self._touched)))
        elif self.drops:
            while self._place < len(self._path):
                self._advance()  # each is gathered once, whether or not its backward needed it
        self.end()

    def need(self, block: Block, *, keep: bool = False, lend: bool = False) -> None:
        """Returns when the unit is whole; the next ones are on their way.

        It stays until the action ends with ``keep``, and with ``lend`` until a module is called, whose caller has
        nothing in hand any more but what modules gave.

        Raises: PlanError: it has been updated beside a backward that still needs it as it was.
        """
        if any(flat.is_updated and (flat.shows_next or not block.is_there) for flat in block.flats):
            raise PlanError(
                f"the parameters of '{block.name}' are used after their gradients were complete",
                given="an update beside the backward",
                allowed="models whose parameters get their gradients from all their uses",
                fix="call optimizer.step() after the step, in place of update=optimizer",
            )
        block.is_kept |= keep
        block.is_lent |= lend
        if block is self._current:
            return
        self._touched.append(block)
        if block.is_whole:
            self._current = block
            return
        if not self.drops:
            if block in self._path:
                self._start_until(self._path.index(block) + 1 + self.ahead)
            self._arrive(block)
            return
        try:
            place = self._path.index(block, self._place)
        except ValueError:  # the first time, or another way than the last
            self._drop_all_but((block,))
            self._arrive(block)
            return
        while self._place <= place:
            self._advance()

    def take_back(self) -> None:
        """A module is called: nobody has what was lent in hand any more."""
        for block in self.blocks:
            block.is_lent = False

    def changed(self) -> None:
        """The slices have changed: what is whole is out of date."""
        self.end()
        for block in self.blocks:
            block.drop()

    def _advance(self) -> None:
        """Goes on to the next unit of the path."""
        block = self._path[self._place]
        self._place += 1
        upcoming = self._path[self._place : self._place + self.ahead]
        self._drop_all_but((block, *upcoming))
        self._arrive(block)
        for each in upcoming:
            self._start(each)
        self._count()

    def _start_until(self, place: int) -> None:
        """Starts the units of the path before ``place``, in order."""
        for block in self._path[self._place : place]:
            self._start(block)
        self._place = max(self._place, place)

    def _start(self, block: Block) -> None:
        if not block.is_there:
            if self.drops:
                self.made.append(f"a gather of '{block.name}'")
            block.gather()

    def _arrive(self, block: Block) -> None:
        self._start(block)
        block.arrive()
        self._current = block
        self._count()

    def _drop_all_but(self, kept: Sequence[Block]) -> None:
        for block in self.blocks if self.drops else ():
            if block not in kept and not block.is_held:
                block.drop()

    def _count(self) -> None:
        there = sum(block.is_there and not block.is_held for block in self.blocks)
        assert not self.drops or there <= self.ahead + 1, f"{there} units are whole, {self.ahead + 1} were promised"
        self.most = max(self.most, there)

    def end(self) -> None:
        """An action is over, or will not go on: nothing is on its way, and what is dropped between actions is gone.

        What this rank did not ask for others may have.
        """
        if not self.drops:
            self._start_until(len(self._path))
        for block in self.blocks:
            block.is_kept = block.is_lent = False
            if self.drops:
                block.drop()
            elif block.is_coming:
                block.arrive()
        self._current, self._path, self._place, self._touched = None, (), 0, []

    # ---- what autograd saves

    def save(self, tensor: Tensor) -> Any:
        """Of a part of a unit its place; anything else as it is."""
        key = tensor.untyped_storage()._cdata  # and not the address, of which the meta device has none
        for block in self.blocks:
            if block.is_whole:
                for flat in block.flats:
                    if flat.whole is not None and flat.whole.untyped_storage()._cdata == key:
                        return _Saved(block, flat, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return tensor

    def take_out(self, saved: Any) -> Tensor:
        """What :meth:`save` was given; a unit is whole by then."""
        if not isinstance(saved, _Saved):
            found: Tensor = saved
            return found
        self.need(saved.block)
        assert saved.flat.whole is not None, "needed above"
        return saved.flat.whole.as_strided(saved.size, saved.stride, saved.offset)
