"""The emergency checkpoint of a run that ends by an error: its last complete step, if that state is unchanged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shardwright.checkpoint.saving import agree_on_save, kept_buffers, save_alone
from shardwright.errors import CheckpointError, CommunicationError, RankDifferenceError
from shardwright.parallelize.run import Run
from shardwright.runtime.mixed_precision import LossScale
from shardwright.tensor_bytes import bytes_of
from shardwright.train.out_folder import OtherRunError
from shardwright.train.progress import say

_LARGE = 2**16
"""The elements from which a buffer is copied only where its version says that it was written, as masks are not."""


class EmergencyCheckpoint:
    """Saves the last step that all ranks have completed when a rank fails, unless a later step has changed its state.

    A step that fails has mostly not updated the parameters, but its forward may have written buffers, such as the
    running statistics of BatchNorm: :meth:`save` compares the buffers with copies from the end of the last complete
    step. An fp16 loss scale is set back to that of this step. Every rank constructs such an object while all ranks can
    communicate, because the constructor gathers from all ranks what a later save needs. ``keep``, if not 0, is how many
    checkpoints stay in ``folder``, and ``most_s`` is how many seconds a rank waits for the parts of the others.
    """

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer, folder: Path, *, keep: int, most_s: float) -> None:
        self.run, self.optimizer, self.folder, self.keep, self.most_s = run, optimizer, folder, keep, most_s
        self._agreed = agree_on_save(run)
        self._step: int | None = None
        self._buffers: dict[str, tuple[Tensor, int, Tensor]] = {}  # the buffer, its version, and a copy of it
        self._scale: LossScale | None = None
        self._why_not = ""

    def note(self) -> None:
        """Remembers the step's number and loss scale, and copies the buffers; called after each complete step."""
        self._step, self._why_not = self.run.num_steps, ""
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

        Every rank calls it. The rank that completes the checkpoint says so on standard error; if the state has changed
        or the save fails, the ranks that failed by themselves say so. Nothing is saved if no step is complete, if a
        later step has changed the state, or if the step has a checkpoint already. After a RankDifferenceError or
        CheckpointError the state, or a save, is wrong, and after an OtherRunError the folder is another run's: nothing
        is saved then either. An error while saving is printed and not raised.
        """
        step = self._step
        if isinstance(failure, RankDifferenceError | CheckpointError | OtherRunError) or step is None:
            return
        said = ""
        try:
            if (self.folder / f"step-{step:08d}").exists():
                return
            why_not = self._why_not or ("the step that failed has changed buffers" if self._have_changed() else "")
            if why_not:
                if not isinstance(failure, CommunicationError):  # the rank that failed by itself says it
                    said = f"step {step}, the last that was complete, is not saved: {why_not}"
            else:
                if self._scale is not None:
                    vars(self.run.loss_scale).update(vars(self._scale))
                if save_alone(self.folder, self.run, self.optimizer, step, self._agreed, keep=self.keep,
                              failure=failure, most_s=self.most_s):  # fmt: skip
                    said = f"step {step}, the last that was complete, is saved"
        except Exception as why:  # the failure itself is raised, and not this one
            if not isinstance(failure, CommunicationError):
                said = f"step {step} could not be saved: {str(why) or repr(why)}"
        if said:
            say(said)

    def _copied(self, name: str, buffer: Tensor) -> tuple[Tensor, int, Tensor]:
        """Returns a buffer with its version and a copy; a large one's copy of before, if nothing has written to it."""
        before = self._buffers.get(name)
        # torch's own BatchNorm writes its statistics, which are small, without counting it
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
