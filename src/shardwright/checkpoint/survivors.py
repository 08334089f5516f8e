"""After a failure, the ranks that are left agree through files on a checkpoint that they can write without the others.

No collective includes a rank that is gone, so each rank that fails, or loses another rank, writes what it could give
into a folder beside the checkpoints, called the meeting::

    .tmp-failed-<token>/
        0.json  2.json  3.json      states: the last complete step of each rank that came, or why it gives nothing
        decision/decision.json      the step that is saved and the ranks that write it, or why nothing is saved
        left/0  left/2              ranks that need the folder no more; the last removes it

A rank waits until each other rank has come or its process is seen to be gone, and for two seconds at most. The first
rank to be done decides, by a rename that only one can win, and the others follow. Of the steps whose state the ranks
that came hold whole between them, the decision takes the latest.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardwright.comm.agreement import gather_json
from shardwright.comm.rank_life import life_of, this_process
from shardwright.formatting import numbered
from shardwright.parallelize.run import Run
from shardwright.sharding.box import Piece
from shardwright.sharding.tensor_layout import TensorLayout

JOIN_S = 2.0
"""The seconds for which a rank that has failed waits for ranks that still run to join the meeting (see the module)."""

NOTES = "notes"
"""The folder, in a save's temporary folder, of the files (notes) by which ranks tell that their parts are complete."""

MOST_NAMED = 5
"""The most tensors that a text names of the tensors that no remaining rank holds."""

_LOOK_S = 0.01


def new_token() -> str:
    """Returns a random text of eight characters, to be a part of the name of a save's temporary folder."""
    return uuid.uuid4().hex[:8]


@dataclass(frozen=True, kw_only=True)
class SurvivorState:
    """What a rank can give to a checkpoint after a failure.

    ``step`` is the last step that it has completed, None if none; ``why_not`` is the reason if it cannot give the state
    of that step, else ""; and ``forbids`` says that nothing may be saved by any rank, because the state is wrong.
    """

    step: int | None
    why_not: str = ""
    forbids: bool = False


@dataclass(frozen=True, kw_only=True)
class SavedDecision:
    """What the ranks that came to a meeting do: ``ranks`` write the checkpoint of ``step``, or nothing is saved.

    If nothing is saved, ``ranks`` is empty and ``why_not`` is the reason, or "" if there is nothing to tell: no step is
    complete, or the state is wrong, which is an error by itself. ``all_came`` is whether no rank may come later.
    """

    step: int | None = None
    ranks: tuple[int, ...] = ()
    why_not: str = ""
    all_came: bool = False


class Survivors:
    """What each rank knows of all ranks, so that after a failure those that are left can save without the others.

    All ranks create it together, while they can communicate. ``buffers`` are the names of this rank's buffers that are
    kept in checkpoints. It sends two all-gathers of short texts.
    """

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer | None, buffers: Iterable[str]) -> None:
        self.run = run
        trained = [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
        held = {id(p) for p in trained if p.requires_grad}
        names = [name for name, p in run.parameters.items() if id(p) in held]
        self.here = this_process()
        everyone = run.axes["world"].for_strategy("checkpoint")
        gathered = gather_json(everyone, [self.here, names, list(buffers), new_token()])
        self.processes = [process for process, *_ in gathered]
        self.trained = sorted({name for _, names, *_ in gathered for name in names})
        self.buffers = [names for _, _, names, _ in gathered]
        self.token: str = gathered[0][3]
        # work queued on an accelerator may wait for a rank that is gone, and then copies from it would wait too
        self.needs_all = run.world.device.type not in ("cpu", "meta")

    def writers(self, ranks: Collection[int]) -> dict[str, int]:
        """Returns the rank that writes each buffer, by name: the first of ``ranks`` that has it."""
        return {name: rank for rank in sorted(ranks, reverse=True) for name in self.buffers[rank]}

    def lost(self, ranks: Collection[int]) -> dict[str, tuple[int, ...]]:
        """Returns the tensors of a checkpoint of which ``ranks`` do not hold all, with the ranks that held the rest."""
        plan, left = self.run.plan, set(ranks)
        layouts = {name: state.parameter for name, state in plan.state.items()}
        layouts |= {f"optimizer/{name}": plan.state[name].optimizer for name in self.trained if name in plan.state}
        layouts |= plan.buffers
        holders_by_name = {
            name: tuple(sorted({rank for _, holders in layout.holders(plan.mesh, plan.mesh.axes, {})
                                if not left & {*holders} for rank in holders}))
            for name, layout in layouts.items()
        }  # fmt: skip
        every = {name for names in self.buffers for name in names} - {*plan.buffers}
        holders_by_name |= {
            name: tuple(rank for rank, names in enumerate(self.buffers) if name in names)
            for name in every - {*self.writers(ranks)}
        }
        return {name: holders for name, holders in holders_by_name.items() if holders}

    def owned(self, layout: TensorLayout, ranks: Collection[int]) -> tuple[Piece, ...]:
        """Returns the pieces (boxes) that this rank writes: the first of ``ranks`` that holds an element writes it."""
        plan, coord = self.run.plan, self.run.coord
        if len(ranks) == self.run.world.size:
            return layout.owned(coord, plan.mesh)
        left, mine = set(ranks), self.run.world.rank
        cells = layout.holders(plan.mesh, plan.mesh.axes, {})
        boxes = [box for box, holders in cells if min(left & {*holders}, default=-1) == mine]
        common = ((piece, piece.whole.intersect(box)) for piece in layout.pieces(coord) for box in boxes)
        return tuple(part for piece, box in common if box is not None for part in piece.parts(box))

    def decide(self, states: Mapping[int, SurvivorState]) -> SavedDecision:
        """Returns what to do, given the states of the ranks that came, by rank."""
        steps = {state.step for state in states.values() if state.step is not None}
        if not steps or any(state.forbids for state in states.values()):
            return SavedDecision()
        told: list[tuple[int, str]] = []
        for step in sorted(steps, reverse=True):
            ranks = tuple(rank for rank, state in sorted(states.items()) if state.step == step and not state.why_not)
            refused = next((state.why_not for _, state in sorted(states.items())
                            if state.step == step and state.why_not), "")  # fmt: skip
            lost = self.lost(ranks)
            if self.needs_all and len(ranks) < self.run.world.size:
                told.append((step, refused or "not all ranks are there, which ranks on accelerators need"))
            elif not lost:
                return SavedDecision(step=step, ranks=ranks)
            else:
                told.append((step, refused or self._alone(lost, {*range(self.run.world.size)} - {*ranks})))
        # the earliest of these steps is the last that all ranks had completed
        return SavedDecision(step=told[-1][0], why_not=told[-1][1])

    def _alone(self, lost: Mapping[str, Sequence[int]], gone: Collection[int]) -> str:
        """Returns text that names the tensors that ranks which did not come held alone."""
        holders = sorted({rank for ranks in lost.values() for rank in ranks} & {*gone})
        names = ", ".join(f"'{name}'" for name in [*lost][:MOST_NAMED])
        more = f" and {len(lost) - MOST_NAMED} more tensors" if len(lost) > MOST_NAMED else ""
        return f"{numbered(holders)} alone held {names}{more}, or parts of them"

    def all_came(self, states: Collection[int]) -> bool:
        """Returns whether each rank is among ``states`` or comes no more: it is dead, or suspended by SIGSTOP."""
        missing = (process for rank, process in enumerate(self.processes) if rank not in states)
        return all(life_of(process, self.here) != "runs" for process in missing)


@dataclass
class Meeting:
    """This rank's part in a meeting: the ``folder`` through which ranks agree after a failure (see the module)."""

    folder: Path
    survivors: Survivors
    decided_here: bool = field(default=False, init=False)
    """Whether this rank has made the decision, and so is the one to say why nothing is saved."""

    def come(self, state: SurvivorState) -> None:
        """Tells the other ranks this rank's state. Raises OSError: the folder cannot be written."""
        world = self.survivors.run.world
        mine, text = self.folder / f".{world.rank}", json.dumps(asdict(state))
        for left in reversed(range(world.size)):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                mine.write_text(text)
                mine.rename(self.folder / f"{world.rank}.json")
                return
            except (FileExistsError, FileNotFoundError):  # a rank that could not write removed the folder, once each
                if not left:
                    raise

    def agreed(self, prepare: Callable[[SavedDecision], None]) -> SavedDecision:
        """Waits for the other ranks, and returns the decision, which is the same on all ranks that came.

        A rank that decides calls ``prepare`` with the decision before the others can know it.

        Raises: OSError: the folder cannot be written, or is gone.
        """
        wait_until(lambda: self._decided() or self.survivors.all_came(self._states()), JOIN_S)
        if not self._decided():
            states = self._states()
            decision = self.survivors.decide(states)
            all_came = self.survivors.all_came(states)
            prepare(decision)
            mine = self.folder / f".decision-{self.survivors.run.world.rank}"
            mine.mkdir()
            (mine / "decision.json").write_text(json.dumps({**asdict(decision), "all_came": all_came}))
            with suppress(OSError):  # another rank was first: its folder is there, and is not empty
                mine.rename(self.folder / "decision")
                self.decided_here = True
            self._end_doomed_saves()
        fields = json.loads((self.folder / "decision" / "decision.json").read_text())
        return SavedDecision(**{**fields, "ranks": tuple(fields["ranks"])})

    def is_first(self, name: str) -> bool:
        """Returns True on exactly one of the ranks that call it with this name, however many call it at once."""
        try:
            (self.folder / name).mkdir()
        except FileExistsError:
            return False
        return True

    def tells(self, *, after_s: float) -> bool:
        """Returns True on one of the ranks whose save has failed: that rank is to report the failure.

        The others get False. A rank that knows of the failure only from another rank passes a time to wait for that
        rank. If nothing can be written here, it is the first rank that is not dead.
        """
        try:
            return not wait_until((self.folder / "told").exists, after_s) and self.is_first("told")
        except OSError:
            survivors = self.survivors
            before = survivors.processes[: survivors.run.world.rank]
            return all(life_of(process, survivors.here) == "dead" for process in before)

    def leave(self, decision: SavedDecision | None) -> None:
        """Marks that this rank needs the folder no more; the last rank removes it, unless others may still come."""
        with suppress(OSError):
            if decision is None and not self._states():  # on a disk that is full
                shutil.rmtree(self.folder, ignore_errors=True)
                return
            left = self.folder / "left"
            left.mkdir(exist_ok=True)
            (left / str(self.survivors.run.world.rank)).touch()
            if decision is not None and decision.all_came and len([*left.iterdir()]) == len(self._states()):
                shutil.rmtree(self.folder, ignore_errors=True)

    def _end_doomed_saves(self) -> None:
        """Ends the saves beside training to which a dead rank has not written its part: they would never be complete.

        The threads that write them hold the lock of the folder, and would wait for that part.
        """
        survivors = self.survivors
        dead = [r for r, process in enumerate(survivors.processes) if life_of(process, survivors.here) == "dead"]
        for notes in self.folder.parent.glob(f".tmp-step-*/{NOTES}"):
            is_doomed = not all((notes / f"{rank}.json").exists() for rank in dead)
            if is_doomed and not notes.parent.name.endswith(survivors.token):
                aside = notes.with_name(f".{NOTES}-ended")
                with suppress(OSError):  # another rank was first
                    notes.rename(aside)
                shutil.rmtree(aside, ignore_errors=True)

    def _decided(self) -> bool:
        return (self.folder / "decision").is_dir()

    def _states(self) -> dict[int, SurvivorState]:
        """Returns the states of the ranks that have come so far, by rank."""
        files = (file for file in self.folder.glob("*.json") if file.stem.isdecimal())
        return {int(file.stem): SurvivorState(**json.loads(file.read_text())) for file in files}


def wait_until(condition: Callable[[], Any], timeout_s: float) -> bool:
    """Calls ``condition()`` until it is true or ``timeout_s`` seconds have passed; returns whether it is true."""
    end_s = time.monotonic() + timeout_s
    while not (outcome := condition()) and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
    return bool(outcome)
