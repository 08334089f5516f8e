"""Records one forward of a model on the meta device, and the backward of the user's own autograd functions in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwright.analysis.objects.code_caches import code_caches_put_back
from shardwright.analysis.objects.marked_inputs import SampleRows, SampleValues, marks_in, packed_in, sample_tensors
from shardwright.analysis.objects.own_attributes import own_attributes
from shardwright.analysis.on_meta.hidden_outputs import unseen_outputs
from shardwright.analysis.on_meta.module_calls import call_model
from shardwright.analysis.recorded.module_log import ModuleLog
from shardwright.analysis.recorded.own_functions import record_own_functions
from shardwright.analysis.recorded.recording import Recorded, Recording, TensorUse
from shardwright.models.model_loss import loss_in


def record_forward(
    model: nn.Module, inputs: Any, within: Callable[[Recorded], AbstractContextManager[Any]] = nullcontext
) -> Recording:
    """Runs one forward of a model and returns a record of its operators; model and inputs are on the meta device.

    The forward runs inside the context that ``within`` returns for the recorder. A yes-or-no condition on values of
    inputs or parameters counts as false, and a mask that depends on such values is true everywhere. If the code then
    raises, or if there was such a condition, the forward runs again with the conditions true. Of two records the one
    that uses more parameters is returned, with the other as its ``other_branch``. If the user's own autograd functions
    lead to the outputs, a backward runs too, which adds gradients to the parameters.

    Raises: ValueReadError: the code reads a number that depends on a parameter or an input. NotImplementedError: the
        forward takes a gradient itself. If the code raises in both runs, the second exception is raised.

    >>> recording = record_forward(nn.Linear(3, 4, device="meta"), torch.empty(2, 3, device="meta"))
    >>> [call.name for call in recording.calls], recording.calls[0].results[0].shape
    (['linear'], (2, 4))
    """
    trained = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        recording, num_guessed = _record(model, inputs, within, guess=False)
    except Exception:  # the user's code may raise anything; for example, one of its checks has failed
        _put_back(trained)
        return _record(model, inputs, within, guess=True)[0]
    if num_guessed:
        _put_back(trained)
        with suppress(Exception):  # as above
            other, _ = _record(model, inputs, within, guess=True)
            if len(other.parameters_used) > len(recording.parameters_used):
                recording, other = other, recording
            recording.other_branch = other
    return recording


def _put_back(trained: Mapping[nn.Parameter, bool]) -> None:
    """Freezes, or has trained, the parameters that were so before a forward that changes it."""
    for parameter, requires_grad in trained.items():
        parameter.requires_grad_(requires_grad)


def _record(
    model: nn.Module, inputs: Any, within: Callable[[Recorded], Any], *, guess: bool
) -> tuple[Recording, int]:  # fmt: skip
    with code_caches_put_back(model) as taken, ModuleLog(model) as running:
        recorded = Recorded(running.where, guess=guess, runs_again=running.runs_again)
        recording = recorded.recording
        for name, parameter in model.named_parameters():
            recording.parameters[name] = recorded.use(parameter.detach(), "parameter", name)
        for name, buffer in model.named_buffers():
            recording.buffers[name] = recorded.use(buffer.detach(), "buffer", name)
        recording.inputs = [recorded.use(tensor, "input") for tensor in sample_tensors(inputs)]
        for uses, marks in ((recording.marked_inputs, marks_in(inputs)), (recording.packed_inputs, packed_in(inputs))):
            uses += [recorded.use(tensor, "input") for mark in marks for tensor in tree_leaves(mark)
                     if isinstance(tensor, Tensor)]  # fmt: skip
        _note_samples(packed_in(inputs), recorded)
        with torch.enable_grad(), within(recorded), recorded:
            outputs = call_model(model, inputs)
        modes = {path: module.training for path, module in model.named_modules()}
        recording.in_other_modes = [path for path, mode in modes.items() if running.modes.get(path, {mode}) != {mode}]
        for path, module in model.named_modules():
            for name, value in own_attributes(module).items():
                held = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and recorded.is_computed(leaf)]
                if held:
                    recording.set_attributes[path, name] = [recorded.use(tensor) for tensor in held]
        replaced = {name: recorded.use(buffer, "constant") for name, buffer in model.named_buffers()}
        recording.new_buffers = {name: use for name, use in replaced.items() if recording.buffers.get(name) is not use}
        recorded.note_in_digest("outputs", outputs)
        tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        recording.outputs = [recorded.use(tensor) for tensor in tensors]
        own_loss = loss_in(outputs)
        recording.loss = recorded.use(own_loss) if own_loss is not None else None
        recording.hidden_in = next((hidden_tensor.holder for hidden_tensor in unseen_outputs(outputs)), None)
        recording.num_numbers, recording.num_masks = recorded.num_numbers, recorded.num_masks
        recording.reads_values = recorded.num_reads > 0
        recording.guess = guess if recorded.num_guessed else None
        recording.uses = list(running.uses)
        record_own_functions(tensors, recorded)
    recording.kept_outside = tuple(dict.fromkeys(name for name, tensor in taken if recorded.is_computed(tensor)))
    return recording, recorded.num_guessed


def _note_samples(marks: Sequence[SampleRows | SampleValues], recorded: Recorded) -> None:
    """Notes the sample of each row of packed tensors and of each entry of lists, and the number of samples."""
    recording = recorded.recording
    for mark in marks:
        if isinstance(mark, SampleRows):
            rows = tuple(number for number, count in enumerate(mark.counts) for _ in range(count))
            recording.rows_of_samples[recorded.use(mark.tensor)] = rows
        for number, entry in enumerate(mark.entries if isinstance(mark, SampleValues) else ()):
            uses = (recorded.use(leaf) for leaf in tree_leaves(entry) if isinstance(leaf, Tensor))
            recording.rows_of_samples.update((use, (number,)) for use in uses)
    if marks and not any(use.shape for use in recording.inputs):
        recording.inputs.append(TensorUse((marks[0].num_samples,), torch.int64, "input"))
