"""Raises errors for uses of torch's optimizers and clipping that would train nothing, or lose or distort gradients.

A plain model keeps its old values while its run trains a copy. Reading the plain model then, by ``state_dict()``,
``eval()`` or a call, gives a warning.

torch calls the hooks of this file before and after each step of every optimizer, including those not made by
``Run.optimizer``. Where torch has no such hook, one of its functions is replaced by a function that checks first:

- the function with which ``clip_grad_norm_`` scales gradients (also ``clip_grads_with_norm_``), the one that computes
  the norm, and the check that both conversions between parameters and a vector call;
- ``Module.state_dict`` and ``Module.eval``, once a run of this process has trained;
- the start of a backward: its error for a loss of ``Run.step`` then says what to write;
- ``Optimizer.load_state_dict``, so that the run watches the optimizer before it loads.

Calls are watched for the plain model alone, by a :class:`_ReadGuard`. A step guard is called only in the thread that
made its run, since ranks may be threads.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial, wraps
from math import isfinite
from types import FunctionType, MethodType
from typing import Any, NoReturn
from weakref import ReferenceType, WeakSet, ref
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad, convert_parameters
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwright.analysis.objects.reached import reached, unregistered_attributes
from shardwright.comm.trained_copies import ON_RETURN, note_trained
from shardwright.errors import PlanError, explain
from shardwright.parallelize.optimizer_check import check_made_by_hand
from shardwright.parallelize.optimizer_groups import check_groups
from shardwright.parallelize.update_log import UpdateLog
from shardwright.plan.plan import Plan

MOST_UNCHANGED = 20
"""The number of steps without any update after which a run warns, in the next step that ``check_every`` selects."""

_OF_THREAD = threading.local()


class StepGuard:
    """Watches a run's steps and every optimizer step and gradient clipping of torch, and raises an error for misuse.

    ``parameters`` are the tensors that the run's optimizer updates. ``models`` have tensors that a user may confuse
    with these and that no step of the run reads: the first is the run's model, where a strategy stores parameters in
    another form, and the second, if it is known, the plain model. ``watch()`` returns a function, or None if the run no
    longer exists. That function is called once for each optimizer over the run's parameters, before the optimizer first
    steps or loads state. If ranks ``are_compared``, the learning rates of every update are recorded for the comparison.
    ``num_waiting`` counts the steps whose gradients no optimizer has used yet, and ``num_updates`` the steps of
    optimizers that update the run's parameters.
    """

    def __init__(
        self, plan: Plan, parameters: Mapping[str, nn.Parameter], models: Sequence[nn.Module],
        watch: Callable[[], Callable[[torch.optim.Optimizer], None] | None], *, are_compared: bool,
    ) -> None:  # fmt: skip
        self.plan, self.parameters, self.are_compared = plan, parameters, are_compared
        self.num_waiting = self.num_updates = self._num_calls = 0
        self.last_loss: tuple[Tensor | None, int] = None, 0  # the last step's loss, and the number of updates before it
        self._past_samples = 0  # a digest of all steps, so that a difference between two comparisons is found too
        self.updates, self.updates_of_all = UpdateLog(), UpdateLog()
        # the last change seen: number of steps before it, number of updates, and the parameters' digests
        self._values: tuple[int, int, dict[str, str]] | None = None
        self._accepted: WeakSet[torch.optim.Optimizer] = WeakSet()  # optimizers whose groups are checked
        self._watch, self._watched = watch, WeakSet[torch.optim.Optimizer]()
        self._of_all: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._own = {id(parameter) for parameter in parameters.values()}
        others: list[Tensor] = [p for model in models for p in model.parameters()]
        # an optimizer that the model holds was copied with it, and has tensors with which the model no longer computes
        others += [tensor for optimizer in _held_optimizers(models[0]) for tensor in _tensors_of(optimizer)]
        self._of_run = {id(p): ref(p) for p in models[0].parameters() if id(p) not in self._own}
        self._plain = [(ref(model), _version_of(model)) for model in models[1:]]
        self._others: dict[int, ReferenceType[Tensor]] = {id(p): ref(p) for p in others if id(p) not in self._own}
        # gradients from before the run, as from a backward in which the user tried the model
        every = ((key, other()) for key, other in self._others.items())
        self._gradients_before = {
            key: (ref(p.grad), p.grad._version) for key, p in every if p is not None and p.grad is not None
        }
        self._cut = next((name for name, state in plan.state.items() if state.gradient.axes), "")
        self._part = next((name for name, state in plan.state.items() if state.parameter.axes), "")
        _look_before_backward()
        if not hasattr(_OF_THREAD, "guards"):
            _OF_THREAD.guards = WeakSet()
        _OF_THREAD.guards.add(self)

    def accept(self, optimizer: torch.optim.Optimizer, *, of_all: bool = False) -> None:
        """Marks an optimizer's parameter groups as checked, so that :meth:`before_update` does not check them again.

        ``of_all`` says that every rank has made this optimizer with the same groups, pipeline stages included.
        """
        self._accepted.add(optimizer)
        self.before_use(optimizer)
        if of_all:
            self._of_all.add(optimizer)

    def before_use(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the run watch an optimizer from now on if it is over the run's parameters, however it was made."""
        watch = self._watch()
        if watch is not None and optimizer not in self._watched and self._updates(optimizer):
            self._watched.add(optimizer)
            watch(optimizer)

    def _updates(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(id(tensor) in self._own for tensor in _tensors_of(optimizer))

    def before_step(self) -> None:
        """Counts a step, and sets ``num_waiting`` to 0 if all gradients were cleared; called before each step."""
        self._num_calls += 1
        if all(parameter.grad is None for parameter in self.parameters.values()):
            self.num_waiting = 0

    def is_plain(self, tensor: Tensor) -> bool:
        """Returns whether no step of the run reads a tensor, for example because it is one of the plain model's.

        A tensor that shares memory with such a one counts too.
        """
        others = [
            other for reference in self._others.values() if (other := reference()) is not None and not other.is_meta
        ]
        return any(other is tensor or (other.numel() and other.data_ptr() == tensor.data_ptr()) for other in others)

    @property
    def has_stepped(self) -> bool:
        """Whether the run has taken a step."""
        return self._num_calls > 0

    def after_step(self) -> None:
        """Adds 1 to ``num_waiting`` if the step has left gradients for an optimizer; called after each step."""
        self.num_waiting += any(parameter.grad is not None for parameter in self.parameters.values())

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises PlanError if a step of ``optimizer``, which is about to run, would be wrong for this run.

        That is so if, after a step of the run, the optimizer has tensors that the run does not read, such as the plain
        model's, and no other code has given these gradients; if the optimizer cannot update shards alone, or its
        parameter groups were chosen by the dims of flattened shards; or if it would use the gradients of only the last
        of several steps.
        """
        kind, tensors = type(optimizer).__name__, _tensors_of(optimizer)
        line = f"optimizer = run.optimizer(torch.optim.{kind}, lr=...)"
        if self.num_waiting and self._holds_others(tensors):
            raise PlanError(
                f"{kind}.step() would train nothing: it has tensors that no step of the run reads",
                given=f"parameters of the plain model, or of run.model, under {self.plan.layout}",
                allowed="the tensors of run.parameters, which hold what this rank stores",
                fix=f"write {line}, or torch.optim.{kind}(run.parameters.values(), lr=...)",
            )
        if optimizer not in self._accepted and self._updates(optimizer):
            check_groups(optimizer, self.parameters, self.plan)
            check_made_by_hand(optimizer, self.plan)
            self.accept(optimizer)
        if self.num_waiting > 1 and self._updates(optimizer):
            raise PlanError(
                f"{kind}.step() would lose the gradients of {self.num_waiting - 1} of {self.num_waiting} steps",
                given=f"{self.num_waiting} calls of run.step since the last {kind}.step(); each starts from zero",
                allowed="one step for each update; accumulate adds up the gradients of several batches",
                fix="write run.accumulate([first, second]) in place of run.step(first), run.step(second), or mb2 in "
                "the layout; optimizer.zero_grad() before a step drops gradients on purpose",
            )

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Counts a step of ``optimizer`` if it updates the run's parameters; called after the step.

        ``num_waiting`` becomes 0 then, also if all parameters that ``optimizer`` updates are on other stages. If ranks
        are compared, the step and its learning rates are recorded for the comparison.
        """
        updates = self._updates(optimizer)
        if updates or optimizer in self._accepted:
            self.num_waiting = 0
        if updates:
            self.num_updates += 1
            if self.num_updates == 1:
                for plain, version in self._plain:
                    _has_trained(plain, version)
            if self.are_compared:
                self.updates.add(optimizer)
        if self.are_compared and optimizer in self._of_all:  # also where this stage trains nothing
            self.updates_of_all.add(optimizer)

    def count_samples(self, num_samples: int | None) -> str:
        """Adds a step's number of samples to a digest of all steps' numbers so far; returns the digest as text."""
        self._past_samples = crc32(f"{num_samples} ".encode(), self._past_samples)
        return f"numbers of digest {self._past_samples:08x}"

    def warn_if_unchanged(self, values: Mapping[str, str]) -> None:
        """Warns if in 20 steps or more no parameter of the run has changed, and no optimizer of them has stepped.

        A user's own update code that writes to the plain model's tensors instead of the run's has this effect.
        ``values`` are digests of the parameters that this rank trains, by name, before a step. Without any, nothing is
        checked.
        """
        if not values:
            return
        # steps are counted in calls, since accumulate takes several steps in one call, before one update
        since, num_updates, before = self._values or (self._num_calls, 0, {})
        if before != values or num_updates != self.num_updates:
            self._values = self._num_calls, self.num_updates, dict(values)
        elif (num_calls := self._num_calls - since) >= MOST_UNCHANGED:
            self._values = None
            warnings.warn(
                explain(
                    f"no parameter has changed in {num_calls} steps",
                    given=f"gradients that no optimizer has used, under {self.plan.layout}",
                    allowed="updates of the tensors of run.parameters, which hold what this rank stores",
                    fix="update run.parameters.values() in place of model.parameters(), or use run.optimizer; a run "
                    "that is to update nothing takes check_every=0",
                ),
                stacklevel=2,
            )

    def warns_of_loss(self, number: int, *, may_wait: bool) -> bool:
        """Warns before step ``number``, and returns True, if the update before it was from a loss that is not finite.

        A loss on an accelerator is read only with ``may_wait``, which says that the host may wait for its value.
        """
        loss, num_updates = self.last_loss
        if (
            loss is None
            or loss.is_meta
            or num_updates == self.num_updates
            or not (may_wait or loss.device.type == "cpu")
        ):
            return False
        if isfinite(value := loss.item()):
            return False
        warnings.warn(
            explain(
                f"a loss is not finite, and training goes on from it, in step {number}",
                given=f"a loss of {value} in the step before, under {self.plan.layout}",
                allowed="finite losses: of any other, the parameters are not finite afterwards, as in plain torch",
                fix="write sw.parallelize(..., stop_at_nan=True), which raises in such a step and names a parameter",
            ),
            stacklevel=5,
        )
        return True

    def before_clipping(self, tensors: Iterable[Tensor]) -> None:
        """Raises PlanError if torch is about to clip ``tensors`` by another norm than that of the whole model.

        That is so if gradients are sharded, so that each rank would take the norm of its own shards, and for tensors
        that no step of the run reads.
        """
        tensors = list(tensors)
        partly = bool(self._cut) and any(id(tensor) in self._own for tensor in tensors)
        if partly:
            self._refuse_clipping(f"a rank's part of the gradients under {self.plan.layout}, as of '{self._cut}'")
        if self.num_waiting and self._holds_others(tensors):
            self._refuse_clipping(f"tensors without gradients under {self.plan.layout}, which are not run.parameters")

    def before_conversion(self, tensor: Tensor) -> None:
        """Raises PlanError if torch is about to join or set parameters as a vector, and ``tensor`` is a part or a copy.

        That is so if ranks hold parts of the run's parameters, so that the vector would be that of one rank's part, and
        for a parameter of the run's model of which the optimizer updates another copy.
        """
        other = self._of_run.get(id(tensor))
        is_copy = other is not None and other() is tensor
        if is_copy or (self._part and id(tensor) in self._own):
            raise PlanError(
                "parameters_to_vector and vector_to_parameters would convert a part of the model, or copies of it",
                given=f"a rank's part of the parameters under {self.plan.layout}, as of '{self._part}'"
                if self._part
                else f"parameters of run.model under {self.plan.layout}, which are no run.parameters",
                allowed="whole tensors by name: run.state_dict(), and run.load_state_dict(state)",
                fix="write torch.cat([t.reshape(-1) for t in run.state_dict().values()]) for the vector",
            )

    def before_norm(self, gradients: Iterable[Tensor]) -> None:
        """Raises PlanError if torch is about to take the norm of ``gradients`` that are only one rank's part."""
        own = {id(p.grad) for p in self.parameters.values() if p.grad is not None} if self._cut else set()
        if any(id(tensor) in own for tensor in gradients):
            self._refuse_clipping(f"a rank's part of the gradients under {self.plan.layout}, as of '{self._cut}'")

    def _refuse_clipping(self, clipped: str) -> NoReturn:
        raise PlanError(
            "clipping by torch would scale each rank's gradients by another number",
            given=clipped,
            allowed="the norm over the whole model, which the run takes over all ranks",
            fix="write run.clip_grad_norm_(max_norm)",
        )

    def _is_from_before(self, tensor: Tensor) -> bool:
        """Returns whether a tensor's gradient is what it had before the run: neither replaced nor written to."""
        before, version = self._gradients_before.get(id(tensor), (lambda: None, 0))
        return tensor.grad is before() and tensor.grad is not None and tensor.grad._version == version

    def _holds_others(self, tensors: Iterable[Tensor]) -> bool:
        """Returns whether some of these tensors are the plain model's, or others that no step of the run reads.

        Returns False if other code trains them: if a tensor that is not the run's has a new gradient.
        """
        has_other = False
        with torch._C.DisableTorchFunctionSubclass():  # reading the gradient of a sharded parameter would raise
            for tensor in tensors:
                if id(tensor) in self._own:
                    continue
                if tensor.grad is not None and not self._is_from_before(tensor):
                    return False  # other code trains this tensor
                other = self._others.get(id(tensor))
                has_other = has_other or (other is not None and other() is tensor)
        return has_other


def _held_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Returns the optimizers that a model holds in attributes, and in lists, dicts and objects there.

    Functions are not searched: those that a run puts around its modules lead to the whole plan.
    """
    seen: dict[int, Any] = {id(module): module for module in model.modules()}
    values = (value for module in model.modules() for _, value in unregistered_attributes(module))
    held = (part for value in values for _, part in reached(value, seen, but=(FunctionType, MethodType, partial)))
    return [part for part in held if isinstance(part, torch.optim.Optimizer)]


def _tensors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _guards() -> list[StepGuard]:
    return list(getattr(_OF_THREAD, "guards", ()))


def _before_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for guard in _guards():
        guard.before_update(optimizer)


def _after_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for guard in _guards():
        guard.after_update(optimizer)


_LOAD = torch.optim.Optimizer.load_state_dict


@wraps(_LOAD)
def _load_with_look(self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    for guard in _guards():
        guard.before_use(self)
    _LOAD(self, state_dict)


_UNTRAINED: dict[int, tuple[ReferenceType[nn.Module], tuple[tuple[int, int], ...], bool]] = {}
"""Plain models whose runs have taken an update, by id, each with the versions of its parameters when the run was made.

The third entry says whether ranks that are processes have trained copies of the model. Ranks that are threads share
the dict.
"""


def _version_of(model: nn.Module) -> tuple[tuple[int, int], ...]:
    """Returns numbers that change when a parameter of the model is replaced or written to."""
    return tuple((id(p), 0 if p.is_inference() else p._version) for p in model.parameters())


def _has_trained(
    plain: ReferenceType[nn.Module], version: tuple[tuple[int, int], ...], *, elsewhere: bool = False
) -> None:
    """Remembers that a run has updated its parameters, so that the plain model from which it was made has old values.

    ``elsewhere`` says that the ranks of the run are processes, which have trained a copy of the model.
    """
    if (model := plain()) is None:
        return
    note_trained(model)
    if nn.Module.eval is _EVAL:  # this is the first model of this process
        _look_before_reading()
    key = id(model)
    _UNTRAINED[key] = ref(model, lambda _: _UNTRAINED.pop(key, None)), version, elsewhere
    if not isinstance(model._compiled_call_impl, _ReadGuard):
        vars(model)[_CALL] = _ReadGuard(model)


def _warn_of_old_values(model: nn.Module, call: str, fix: str, stacklevel: int = 3) -> None:
    """Warns, once for each model, if its run has trained and the model still has its old values."""
    plain, version, elsewhere = _UNTRAINED.get(id(model), (None, (), False))
    if plain is None or plain() is not model or _UNTRAINED.pop(id(model), None) is None:  # another rank has warned
        return
    if version == _version_of(model):
        warnings.warn(
            explain(
                f"{call} is of the plain model, which still has the values of before training",
                given="a model of the process that called sw.launch: ranks that are processes trained copies of it"
                if elsewhere
                else "a model that sw.parallelize was given: a run trains a copy of it",
                allowed="the run, or the plain model after model.load_state_dict(run.state_dict())",
                fix="return run.state_dict() from the function that ranks run, and write "
                "model.load_state_dict(sw.launch(...)[0]); or call it there: run.evaluate(batch), run.predict(inputs)"
                if elsewhere
                else fix,
            ),
            stacklevel=stacklevel,
        )


_CALL = "_compiled_call_impl"
"""The attribute that torch calls in place of a module's forward with its hooks, where ``module.compile()`` set it.

torch leaves it out of copies and pickles of the module.
"""


class _ReadGuard:
    """Warns at the first call of a plain model whose run has trained, and removes itself; other modules are not slower.

    It replaces the plain model's attribute for compiled calls, and puts back the value that ``model.compile()`` has set
    there.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._before = ref(model), vars(model).get(_CALL)

    def __call__(self, *args: Any, **named: Any) -> Any:
        model = self._model()
        assert model is not None, "it is called by the model"
        vars(model)[_CALL] = self._before
        line = "write run.evaluate(batch) or run.predict(inputs), on every rank"
        _warn_of_old_values(model, "a call", line, stacklevel=4)
        return model(*args, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(self._before, memo)


_READ, _EVAL = nn.Module.state_dict, nn.Module.eval


def _look_before_reading() -> None:
    @wraps(_READ)
    def state_dict(self: nn.Module, *args: Any, **named: Any) -> Any:
        if _UNTRAINED:
            _warn_of_old_values(
                self, "state_dict()", "write run.state_dict(), on every rank, or sw.save_weights(run, file)"
            )
        return _READ(self, *args, **named)

    @wraps(_EVAL)
    def eval_with_look(self: nn.Module) -> nn.Module:
        if _UNTRAINED:
            _warn_of_old_values(self, "eval()", "write run.evaluate(batch) or run.predict(inputs), on every rank")
        return _EVAL(self)

    nn.Module.state_dict = state_dict  # type: ignore[method-assign]
    nn.Module.eval = eval_with_look  # type: ignore[method-assign,assignment]


_ENGINE = "_engine_run_backward"
"""The function of ``torch.autograd`` by which each backward and ``autograd.grad`` starts the engine."""

_RUN_BACKWARD = getattr(torch.autograd, _ENGINE)


def _look_before_backward() -> None:
    if getattr(torch.autograd, _ENGINE) is not _RUN_BACKWARD:
        return

    @wraps(_RUN_BACKWARD)
    def run_with_look(outputs: Any, *args: Any, **named: Any) -> Any:
        try:
            return _RUN_BACKWARD(outputs, *args, **named)
        except RuntimeError as failure:
            tensors = [outputs] if isinstance(outputs, Tensor) else outputs
            if any(tensor.requires_grad for tensor in tensors) or not any(guard.has_stepped for guard in _guards()):
                raise
            raise PlanError(
                "a loss of run.step has no backward left: the step has run forward and backward",
                given="backward of a tensor that requires no gradient, such as loss = run.step(batch)",
                allowed="run.step(batch), or run.accumulate(batches) to add up gradients, and then optimizer.step()",
                fix="leave out loss.backward(); what scales or adds to the loss belongs into loss= of sw.parallelize",
            ) from failure

    setattr(torch.autograd, _ENGINE, run_with_look)


def _look_before_clipping() -> None:
    scale = clip_grad._clip_grads_with_norm_

    @wraps(scale)
    def scale_with_look(parameters: Any, *args: Any, **named: Any) -> None:
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for guard in _guards():
            guard.before_clipping(tensors)
        scale(tensors, *args, **named)

    clip_grad._clip_grads_with_norm_ = scale_with_look
    # the public name of the same function, for clipping in two parts: get_total_norm, then clip_grads_with_norm_
    clip_grad.clip_grads_with_norm_ = scale_with_look  # type: ignore[attr-defined]
    nn.utils.clip_grads_with_norm_ = scale_with_look
    norm, check_device = clip_grad._get_total_norm, convert_parameters._check_param_device

    @wraps(norm)
    def norm_with_look(tensors: Any, *args: Any, **named: Any) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        for guard in _guards():
            guard.before_norm(tensors)
        return norm(tensors, *args, **named)

    @wraps(check_device)
    def check_with_look(parameter: Tensor, before: int | None) -> int:
        for guard in _guards():
            guard.before_conversion(parameter)
        return check_device(parameter, before)

    clip_grad._get_total_norm = norm_with_look
    clip_grad.get_total_norm = norm_with_look  # type: ignore[attr-defined]
    nn.utils.get_total_norm = norm_with_look
    # both functions between parameters and a vector call it for each parameter
    convert_parameters._check_param_device = check_with_look  # type: ignore[assignment]


ON_RETURN.append(lambda model: _has_trained(ref(model), _version_of(model), elsewhere=True))
torch.optim.Optimizer.load_state_dict = _load_with_look  # type: ignore[method-assign]  # torch has hooks of one optimizer only
register_optimizer_step_pre_hook(_before_update)
register_optimizer_step_post_hook(_after_update)
_look_before_clipping()
