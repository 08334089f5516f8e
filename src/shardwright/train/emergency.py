"""The emergency checkpoint of a run that ends by an error: its last complete step, if that state is unchanged."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.saving import kept_buffers, save_alone, survivors_of
from shardwright.checkpoint.survivors import SurvivorState
from shardwright.errors import CheckpointError, CommunicationError, RankDifferenceError
from shardwright.parallelize.run import Run
from shardwright.runtime.mixed_precision import LossScale
from shardwright.tensor_bytes import bytes_of
from shardwright.train.out_folder import CHECKPOINTS, LOCK, OtherRunError
from shardwright.train.progress import add_missing_row, say
from shardwright.train.run_file import RUN_FILE

_LARGE = 2**16
"""The number of elements from which a buffer, such as a mask, is copied again only if its version has changed."""

_MOST_S = 5.0
"""The most seconds to wait for other ranks' parts if a rank is gone, since its launcher then soon ends all ranks."""


class EmergencyCheckpoint:
    """Saves the last step that the ranks have completed when one fails, unless a later step has changed its state.

    A step that fails has mostly not updated the parameters, but its forward may have written buffers, such as the
    running statistics of BatchNorm: :meth:`save` compares the buffers with copies from the end of the last complete
    step. An fp16 loss scale is set back to that of this step. Every rank constructs such an object while all ranks can
    communicate, because the constructor gathers from all ranks what a later save needs. Checkpoints are in the folder
    "checkpoints" of ``out``, the run's folder, which has its ``run.json`` by then; each rank remembers that file, to
    write it anew if the folder is removed. ``keep``, if not 0, is how many stay there, and ``most_s`` is how many
    seconds a rank waits for the parts of the others.
    """

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer, out: Path, *, keep: int, most_s: float) -> None:
        self.run, self.optimizer, self.out, self.keep, self.most_s = run, optimizer, out, keep, most_s
        self._survivors = survivors_of(run, optimizer)
        self._step: int | None = None
        self._row: dict[str, Any] = {}
        self._buffers: dict[str, tuple[Tensor, int, Tensor]] = {}  # the buffer, its version, and a copy of it
        self._scale: LossScale | None = None
        self._why_not = ""
        self._run_file = b""
        with suppress(OSError):  # a resumed run goes on without it
            self._run_file = (out / RUN_FILE).read_bytes()
        self.know_folder()

    def know_folder(self) -> None:
        """Remembers which file locks the run's folder, to tell the folder from one that another run makes later.

        Called after each save, because before a save the folder is made again if it was removed.
        """
        self._lock = self._lock_now()

    def note(self, row: dict[str, Any]) -> None:
        """Remembers the step's number and loss scale, and copies the buffers; called after each complete step.

        ``row`` has the step's metrics as far as one rank knows them: all but the memory of the others.
        """
        self._step, self._why_not, self._row = self.run.num_steps, "", row
        kept = kept_buffers(self.run.model)
        self._buffers = {name: self._copied(name, buffer) for name, buffer in kept.items()}
        self._scale = replace(self.run.loss_scale) if self.run.loss_scale is not None else None

    def refuse(self, why: str) -> None:
        """Forbids saving until the next :meth:`note`; called before a step changes parameters.

        ``why`` is the reason that :meth:`save` prints if the run ends before the step is complete.
        """
        self._why_not = why

    def save(self, failure: BaseException) -> None:
        """Saves the last complete step when ``failure``, an exception, ends this rank's part of the run.

        Every rank that still runs calls it, and these ranks save what they hold between them. Other ranks, such as one
        that was killed, are not needed if they held nothing alone. One rank says on standard error what was saved, or
        why nothing was. Nothing is saved, or said, if no step is complete or if the step has a checkpoint already.
        Nothing is saved either after a RankDifferenceError or CheckpointError, because the state, or a save, is wrong,
        and after an OtherRunError, because the folder is another run's. If the folder was removed, it is made again
        with its ``run.json``, since no run is resumed without that file. The step's row of metrics is written too, if
        the first rank has not written it. An error while saving is printed and not raised.
        """
        now, is_gone = self._lock_now(), not (self.out / RUN_FILE).exists()
        if isinstance(failure, OtherRunError) or (now is not None and now != self._lock):
            self.run.world.transport.abandon(failure)
            return
        lost = isinstance(failure, CommunicationError)
        with self.run.world.transport.saving():
            said, wrote = save_alone(
                self.out / CHECKPOINTS, self.run, self.optimizer, self._survivors, self._state(failure),
                keep=self.keep, failure=failure, most_s=min(self.most_s, _MOST_S) if lost else self.most_s,
                settle=self._settle,
            )  # fmt: skip
        if said and is_gone and (self.out / RUN_FILE).exists():
            said += f"; '{self.out}' was removed, and is written anew without its metrics"
        elif wrote:
            with suppress(OSError):  # the checkpoint, which is saved, matters more than this row
                add_missing_row(self.out, self._row)
        if said:
            say(said)

    def _state(self, failure: BaseException) -> SurvivorState:
        """Returns what this rank can give to the checkpoint."""
        forbids = isinstance(failure, RankDifferenceError | CheckpointError)
        why_not = self._why_not
        if self._step is not None and not why_not and not forbids and self._have_changed():
            why_not = "the step that failed has changed buffers"
        return SurvivorState(step=self._step, why_not=why_not, forbids=forbids)

    def _settle(self) -> None:
        """Sets the fp16 loss scale back to that of the last complete step, and writes ``run.json`` if it is gone."""
        if self._scale is not None:
            vars(self.run.loss_scale).update(vars(self._scale))

        path, rank = self.out / RUN_FILE, self.run.world.rank
        partial = path.with_name(f".{path.name}-{rank}")
        with suppress(OSError):  # the checkpoint, which is written next, matters more than this file
            if self._run_file and not path.exists():
                partial.write_bytes(self._run_file)
                partial.replace(path)

    def _lock_now(self) -> tuple[int, int] | None:
        """Returns the device and number of the file that locks the run's folder; None if it is gone."""
        try:
            status = (self.out / LOCK).stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _copied(self, name: str, buffer: Tensor) -> tuple[Tensor, int, Tensor]:
        """Returns a buffer, its version and a copy: the earlier copy for a large buffer that was not written since."""
        before = self._buffers.get(name)
        # small buffers are always copied: torch's own BatchNorm writes its statistics without a change of their version
        is_large = buffer.numel() >= _LARGE
        if is_large and before is not None and before[0] is buffer and before[1] == buffer._version:
            return before
        return buffer, buffer._version, buffer.detach().clone()

    def _have_changed(self) -> bool:
        now = kept_buffers(self.run.model)
        # compared as bytes: a buffer may hold NaN
        return now.keys() != self._buffers.keys() or any(
            not torch.equal(bytes_of(now[name]), bytes_of(copy)) for name, (*_, copy) in self._buffers.items()
        )
