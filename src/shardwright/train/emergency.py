"""The checkpoint of a run that ends by an error: its last complete step, if the state of that is untouched."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from shardwright.checkpoint.saving import agree_on_save, kept_buffers, save_alone
from shardwright.errors import CheckpointError, CommunicationError, LayoutError, PlanError
from shardwright.parallelize.run import Run


class EmergencyCheckpoint:
    """Saves the last step that all ranks have completed when one fails, unless a later step has changed its state.

    A step that fails has mostly not updated the parameters, but its forward may have written buffers, as the running
    statistics of BatchNorm: :meth:`save` compares them with copies of those at the end of the last step. Every rank
    makes one at a time at which all can communicate.
    """

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer, folder: Path, *, keep: int, most_s: float) -> None:
        self.run, self.optimizer, self.folder, self.keep, self.most_s = run, optimizer, folder, keep, most_s
        self._agreed = agree_on_save(run)
        self._step: int | None = None
        self._buffers: dict[str, Tensor] = {}

    def note(self) -> None:
        """Notes that a step is complete, and copies the buffers."""
        self._step = self.run.num_steps
        self._buffers = {name: buffer.detach().clone() for name, buffer in kept_buffers(self.run.model).items()}

    def forget(self) -> None:
        """Notes that a step is about to change parameters or the loss scale: until it is complete, nothing is saved."""
        self._step = None

    def save(self, failure: BaseException) -> None:
        """Saves the last step's state, and says so, when ``failure`` ends the run; does nothing if it has changed.

        Not for errors that every rank raises, such as ranks that differ: they say that the state or a save is wrong.
        """
        step = self._step
        if isinstance(failure, LayoutError | PlanError | CheckpointError) or step is None:
            return
        said = ""
        try:
            if self._have_changed() or (self.folder / f"step-{step:08d}").exists():
                return
            if save_alone(self.folder, self.run, self.optimizer, step, self._agreed, keep=self.keep, failure=failure,
                          most_s=self.most_s):  # fmt: skip
                said = f"step {step}, the last that was complete, is saved"
        except Exception as why:  # the failure itself is raised, and not this one
            if not isinstance(failure, CommunicationError):
                said = f"step {step} could not be saved: {str(why) or repr(why)}"
        if said:
            print(said, file=sys.stderr, flush=True)  # noqa: T201

    def _have_changed(self) -> bool:
        now = kept_buffers(self.run.model)
        # compared as bytes: a buffer may hold NaN
        return now.keys() != self._buffers.keys() or any(
            not torch.equal(_bytes(now[name]), _bytes(copy)) for name, copy in self._buffers.items()
        )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
