"""An ``Accelerator`` in the shape of Hugging Face Accelerate's: a script of its users trains under any layout.

The loop stays as it is: ``prepare``, ``model(**batch)``, ``accelerator.backward(loss)``, ``optimizer.step()``. When the
script computes the loss, ``Run.step`` runs: forward and backward of one batch together, as pipeline stages need it.
``backward`` then only takes over the gradients of that step. Accelerate itself is not imported.

Every rank reads the same batches, which are global, as Accelerate has it with ``split_batches=True``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shardwright.checkpoint.loading import load
from shardwright.checkpoint.saving import save
from shardwright.comm.current_world import current_world
from shardwright.comm.started_world import is_started
from shardwright.comm.world import World
from shardwright.devices import backend_of, default
from shardwright.errors import PlanError
from shardwright.models.given_loss import as_loss, loss_modules
from shardwright.models.model_loss import ModelLoss
from shardwright.parallelize import parallelize
from shardwright.parallelize.run import Run
from shardwright.train.prepared_data import PreparedData, first_batch, inputs_in, same_on_every_rank


class CallersLoss(nn.Module):
    """The loss of a prepared model: the function that the script calls on the model's output, set for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.function: Callable[[Any, Any], Any] = ModelLoss()

    def forward(self, output: Any, targets: Any) -> Any:
        """Returns (sum, count) of the function that is set."""
        return self.function(output, targets)


class Accelerator:
    """Trains a script that is written for Hugging Face Accelerate under a layout.

    ``world`` is that of a rank which ``sw.launch`` has started; without it the script is a rank of ``torchrun``, or the
    only one. ``mixed_precision`` ("no", "bf16", "fp16") is added to the layout. ``gradient_accumulation_steps`` is for
    :meth:`accumulate`, which takes the mean of that many batches' gradients. Batches are global: each rank reads all of
    a batch and trains on its share, so a script needs no other batch size or learning rate for more ranks.

    A script computes its loss as ``model(**batch).loss``, which the model computes from labels, or as a loss of torch
    on the model's whole output: ``F.cross_entropy(model(x), y)`` or ``nn.CrossEntropyLoss()(model(x), y)``.

    Raises: LayoutError, PlanError: the layout does not fit the ranks, or ``mixed_precision`` is unknown.

    >>> import shardwright as sw
    >>> plain, data = nn.Linear(4, 3), [(torch.ones(4), 0), (torch.zeros(4), 1)] * 2
    >>> def script(world):
    ...     accelerator = sw.Accelerator("dp2", world=world)
    ...     optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    ...     model, optimizer, loader = accelerator.prepare(plain, optimizer, DataLoader(data, batch_size=4))
    ...     for x, y in loader:
    ...         loss = nn.functional.cross_entropy(model(x), y)
    ...         accelerator.backward(loss)
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...     return loss.item()
    >>> len(set(sw.launch(script, "dp2", ranks="threads")))
    1
    """

    def __init__(
        self, layout: str = "single", world: World | None = None, *, mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1, seed: int = 0,
    ) -> None:  # fmt: skip
        if mixed_precision not in (None, "no", "bf16", "fp16"):
            raise PlanError(
                "no such precision", given=mixed_precision, allowed="no, bf16, fp16", fix='mixed_precision="bf16"'
            )
        self.layout = layout if mixed_precision in (None, "no") else f"{layout} {mixed_precision}"
        self.world = _world() if world is None else world
        self.gradient_accumulation_steps, self.seed = gradient_accumulation_steps, seed
        self.sync_gradients = True
        self.device = self.world.device
        self.is_main_process = self.is_local_main_process = self.world.rank == 0
        self.process_index, self.num_processes = self.world.rank, self.world.size
        self.run: Run | None = None
        self._model: StepModel | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._former: torch.optim.Optimizer | None = None
        self._schedulers: list[StepSchedule] = []
        self._num_batches = 0
        self._under_way: list[PreparedData] = []
        self._sums: dict[nn.Parameter, Tensor] = {}

    def prepare(self, *objects: Any) -> Any:
        """Returns the given model, optimizer, data loaders and schedulers for this layout, in their order.

        One model and at most one optimizer, over parameters of that model and without state, are prepared; the model
        and its optimizer come in one call. Objects of other kinds are returned as they are.

        Raises: PlanError: two models, or an optimizer without its model; and as :func:`~shardwright.parallelize`.
        """
        by_place: dict[int, Any] = {}
        loader = next((argument for argument in objects if isinstance(argument, DataLoader)), None)
        for place, argument in enumerate(objects):
            if isinstance(argument, nn.Module) and not isinstance(argument, StepModel):
                by_place[place] = self._prepare_model(argument, loader)
        for place, argument in enumerate(objects):
            if isinstance(argument, torch.optim.Optimizer):
                by_place[place] = self._prepare_optimizer(argument)
            elif isinstance(argument, DataLoader):
                by_place[place] = PreparedData(same_on_every_rank(argument, self.seed), self._under_way)
            elif isinstance(argument, torch.optim.lr_scheduler.LRScheduler):
                by_place[place] = StepSchedule(self, argument)
                self._schedulers.append(by_place[place])
        prepared = tuple(by_place.get(place, argument) for place, argument in enumerate(objects))
        return prepared[0] if len(prepared) == 1 else prepared

    def _prepare_model(self, model: nn.Module, loader: Any) -> StepModel:
        if self.run is not None:
            raise PlanError(
                "an accelerator prepares one model",
                given=f"a second one, {type(model).__name__}",
                allowed="one model; an Accelerator each for several",
                fix="put the parts into one module, or make another sw.Accelerator(layout)",
            )
        example = None if loader is None else inputs_in(first_batch(loader))
        loss = CallersLoss()
        self.run = parallelize(model, self.layout, self.world, loss=loss, seed=self.seed, example=example)
        self._model = StepModel(self, model, self.run)
        return self._model

    def _prepare_optimizer(self, former: torch.optim.Optimizer) -> torch.optim.Optimizer:
        if self._model is None or self.run is None:
            raise PlanError(
                "an optimizer is prepared together with its model",
                given=f"{type(former).__name__} alone",
                allowed="prepare(model, optimizer, loader)",
                fix="write model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
            )
        names = {id(p): name for name, p in self._model.plain.named_parameters(remove_duplicate=False)}
        first = {id(p): name for name, p in self._model.plain.named_parameters()}
        options = {
            first.get(id(p), names.get(id(p), "")): {
                **{k: v for k, v in group.items() if k != "params"},
                "group": place,
            }
            for place, group in enumerate(former.param_groups)
            for p in group["params"]
        }
        if "" in options or former.state:
            raise PlanError(
                "an optimizer is prepared before its first step, and over the parameters of the model",
                given=f"{type(former).__name__} with state"
                if former.state
                else "a parameter that the model does not have",
                allowed="a new optimizer over model.parameters(), or groups of them",
                fix="make the optimizer right before prepare; accelerator.load_state restores its state",
            )
        takes = inspect.signature(type(former).__init__).parameters
        defaults = {key: value for key, value in former.defaults.items() if key in takes}
        optimizer = self.run.optimizer(type(former), parameters=lambda name, _: options.get(name), **defaults)
        self._optimizer, self._former = optimizer, former
        return optimizer

    # ---- the loop

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Returns a context for one batch; every ``gradient_accumulation_steps``-th batch updates the parameters.

        So does the last batch of a prepared loader, after which batches are counted from 0 again.
        """
        is_last = bool(self._under_way) and self._under_way[-1].is_at_end
        self._num_batches += 1
        self.sync_gradients = is_last or self._num_batches % self.gradient_accumulation_steps == 0
        if is_last:
            self._num_batches = 0
        yield

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Takes over the gradients of the loss, which were computed with it; all ranks call it.

        Raises: PlanError: ``loss`` is another tensor than the loss of the model, such as that loss times a number.
        """
        run = self._prepared()
        if self._model is None or loss is not self._model.last_loss:
            raise PlanError(
                "backward takes the loss that the model has just computed",
                given=f"another tensor, of {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__,
                allowed="model(**batch).loss, or a loss of torch on model(x), unchanged",
                fix="leave out what scales the loss; to accumulate write with accelerator.accumulate(model)",
            )
        self._model.last_loss = None
        if self.gradient_accumulation_steps == 1:
            return
        for parameter in run.parameters.values():
            if parameter.grad is not None:
                share = parameter.grad / self.gradient_accumulation_steps
                before = self._sums.get(parameter)
                self._sums[parameter] = share if before is None else before.add_(share)
            parameter.grad = self._sums.get(parameter) if self.sync_gradients else None
        if self.sync_gradients:
            self._sums = {}

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Clips the gradients of the whole model by their 2-norm, which is returned; None between updates.

        Raises: PlanError: ``parameters`` are not all of the model, or ``norm_type`` is not 2.
        """
        run = self._prepared()
        if norm_type != 2:
            raise PlanError(
                "gradients are clipped by their 2-norm, which each rank adds up of its parts",
                given=f"norm_type={norm_type}",
                allowed="norm_type=2",
                fix="leave out norm_type",
            )
        ids = {id(parameter) for parameter in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        plain = [] if self._model is None else [p for p in self._model.plain.parameters() if p.requires_grad]
        left_out = [name for name, p in run.parameters.items() if p.requires_grad and id(p) not in ids]
        if left_out and not (plain and all(id(p) in ids for p in plain)):
            raise PlanError(
                "gradients are clipped by the norm of the whole model",
                given=f"{len(ids)} tensors, without '{left_out[0]}'",
                allowed="all parameters of the model",
                fix="write accelerator.clip_grad_norm_(model.parameters(), max_norm)",
            )
        return run.clip_grad_norm_(max_norm) if self.sync_gradients else None

    def gather_for_metrics(self, values: Any) -> Any:
        """Returns ``values``: what a prepared model predicts is whole on every rank already."""
        return values

    gather = gather_for_metrics

    # ---- the state

    def unwrap_model(self, model: Any) -> nn.Module:
        """Returns the plain model, whose own values are those before training; see :meth:`get_state_dict`."""
        return model.plain if isinstance(model, StepModel) else model

    def get_state_dict(self, model: Any) -> dict[str, Tensor]:
        """Returns the trained model's whole ``state_dict`` on every rank; all ranks call it.

        ``accelerator.unwrap_model(model).save_pretrained(folder, state_dict=accelerator.get_state_dict(model))`` saves
        a model of transformers.
        """
        return self._prepared().state_dict()

    def save_state(self, output_dir: str | Path) -> str:
        """Saves model, optimizer and schedulers as a checkpoint that any layout loads; returns its path."""
        run = self._prepared()
        extra = {"schedulers": [scheduler.state_dict() for scheduler in self._schedulers], "batches": self._num_batches}
        return str(save(Path(output_dir), run, self._optimizer, extra=extra))

    def load_state(self, input_dir: str | Path) -> None:
        """Loads what :meth:`save_state` has saved, under any layout.

        Raises: as :func:`~shardwright.load`; PlanError: another number of schedulers is prepared than was saved.
        """
        run, folder = self._prepared(), Path(input_dir)
        extra = load(folder, run, self._optimizer)
        states = extra.get("schedulers", ())
        if len(states) != len(self._schedulers):
            raise PlanError(
                "other schedulers are prepared than were saved; parameters and optimizer are loaded already",
                given=f"{len(self._schedulers)} schedulers, and {len(states)} in '{folder}'",
                allowed="as many as save_state has saved, in their order",
                fix=f"prepare {len(states)} schedulers before accelerator.load_state",
            )
        self._take_back_rates()
        for schedule, state in zip(self._schedulers, states, strict=True):
            schedule.load_state_dict(state)
        self._num_batches = int(extra.get("batches", 0))

    def _take_back_rates(self) -> None:
        """Gives the script's own optimizer the options of the prepared one: many schedules go on from the last rate."""
        if self._optimizer is None or self._former is None:
            return
        for group in self._optimizer.param_groups:
            former = self._former.param_groups[group["group"]]
            former.update({k: v for k, v in group.items() if k not in ("params", "group")})

    def _prepared(self) -> Run:
        if self.run is None:
            raise PlanError(
                "there is no model yet",
                given="an accelerator before prepare",
                allowed="prepare first, then the loop and the state",
                fix="write model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
            )
        return self.run

    # ---- ranks

    def wait_for_everyone(self) -> None:
        """Waits until all ranks have called it."""
        if self.run is not None:
            self.run.axes["world"].barrier()

    def print(self, *values: Any, **options: Any) -> None:
        """Prints on the first rank."""
        if self.is_main_process:
            print(*values, **options)  # noqa: T201  # what the script prints

    def end_training(self) -> None:
        """Waits for checkpoints that are being written."""
        if self.run is not None:
            self.run.wait_saves()


class StepModel(nn.Module):
    """A model under a layout, called as the script calls the plain one; it has no parameters of its own.

    In training, a call with labels takes a step at once and returns an output whose ``loss`` is the mean over the
    global batch. A call without labels returns an output on which a loss of torch takes the step. In eval mode, a call
    returns the whole prediction on every rank, and with labels the loss over the global batch.
    """

    def __init__(self, accelerator: Accelerator, plain: nn.Module, run: Run) -> None:
        super().__init__()
        self._held = accelerator, plain, run  # in a tuple, or torch would register the plain model as a submodule
        self.last_loss: Tensor | None = None
        self._model_loss = ModelLoss().for_model(plain)

    @property
    def plain(self) -> nn.Module:
        """The plain model that was prepared."""
        return self._held[1]

    @property
    def config(self) -> Any:
        """The plain model's config, which models of transformers have."""
        return self.plain.config

    def forward(self, *args: Any, **named: Any) -> Any:
        """Takes a step if ``named`` has labels, else returns a :class:`DeferredOutput`; in eval mode it predicts."""
        run, labels = self._held[2], named.get("labels")
        if not self.training:
            inputs = {key: value for key, value in named.items() if key != "labels"}
            output = run.predict(inputs if inputs else args[0] if len(args) == 1 else args)
            if labels is None:
                return output
            return _with_loss(output, self._evaluate(named, labels))
        if labels is None:
            return DeferredOutput(self, named if named else args[0] if len(args) == 1 else args)
        return _with_loss({}, self.take_step(named, labels, self._model_loss))

    def take_step(self, inputs: Any, targets: Any, loss: Callable[[Any, Any], Any]) -> Tensor:
        """Returns the mean loss of one global batch over all ranks, and leaves its gradients."""
        run = self._held[2]
        self._set_loss(loss)
        self.last_loss = run.step(next(run.shard([(inputs, targets)])))
        return self.last_loss

    def _evaluate(self, inputs: Any, targets: Any) -> Tensor:
        run = self._held[2]
        self._set_loss(self._model_loss)
        return run.evaluate(next(run.shard([(inputs, targets)])))

    def _set_loss(self, loss: Callable[[Any, Any], Any]) -> None:
        run = self._held[2]
        assert isinstance(run.loss, CallersLoss), "the loss of a prepared model"
        run.loss.function = loss

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yields this rank's tensors that the optimizer updates."""
        return iter(self._held[2].parameters.values())


class DeferredOutput:
    """The output of a prepared model in training, before it is computed: a loss of torch on it takes the step.

    Pipeline stages and microbatches need the loss before the output is there, so only losses of torch with the mean
    over their targets can be called on it, with targets that have the batch's samples in dim 0.
    """

    def __init__(self, model: StepModel, inputs: Any) -> None:
        self.model, self.inputs = model, inputs

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), named: Mapping[str, Any] | None = None
    ) -> Tensor:
        """Takes the step for a loss of torch that is called on the output; other functions are refused."""
        options = dict(named or {})
        kind: Callable[..., nn.Module] | None = loss_modules().get(function)
        output, *more_args = args if args else (options.pop("input", None),)
        targets = more_args[0] if more_args else options.pop("target", None)
        if kind is None or not isinstance(output, DeferredOutput) or len(more_args) > 1:
            raise _too_early(getattr(function, "__name__", str(function)))
        takes, options = inspect.signature(kind).parameters, {k: v for k, v in options.items() if v is not None}
        if lacking := options.keys() - takes.keys():
            raise _too_early(f"{function.__name__}(..., {min(lacking)}=...)")
        return output.model.take_step(output.inputs, targets, as_loss(kind(**options)))

    def __getattr__(self, name: str) -> Any:
        if name == "loss":
            raise OutputError(
                "the model computes a loss from labels, and this batch has none",
                given="a call without labels=...",
                allowed="model(**batch) with labels in the batch, or a loss of torch on model(x)",
                fix="pass the labels to the model, or write torch.nn.functional.cross_entropy(model(x), y)",
            )
        raise _too_early(name)

    def __getitem__(self, key: Any) -> Any:
        raise _too_early(f"[{key!r}]")


class OutputError(PlanError, AttributeError):
    """Raised for an attribute of an output that is not computed yet; ``hasattr`` is False, as for any missing one."""


def _too_early(what: str) -> PlanError:
    return OutputError(
        "the output of a prepared model in training is not there before its loss is known",
        given=f"'{what}' of it",
        allowed="a loss of torch on the whole output, with the mean over targets of the same samples; "
        "model.eval() predicts whole outputs",
        fix="call the loss on model(x) itself, move what changes the output into the model, or write the loop with "
        "run.step",
    )


class StepSchedule:
    """A schedule of the learning rate that steps once for each update, however many ranks there are."""

    def __init__(self, accelerator: Accelerator, scheduler: Any) -> None:
        self.accelerator, self.scheduler = accelerator, scheduler

    def step(self, *args: Any, **named: Any) -> None:
        """Steps the schedule, unless gradients are being accumulated, and passes its rates on to the optimizer."""
        if not self.accelerator.sync_gradients:
            return
        self.accelerator._take_back_rates()  # the script may have set options of the prepared optimizer
        self.scheduler.optimizer._opt_called = True  # torch warns of a schedule that steps before its optimizer
        self.scheduler.step(*args, **named)
        self._pass_on()

    def _pass_on(self) -> None:
        optimizer, former = self.accelerator._optimizer, self.accelerator._former
        if optimizer is None or former is None or self.scheduler.optimizer is not former:
            return
        for group in optimizer.param_groups:
            group.update({k: v for k, v in former.param_groups[group["group"]].items() if k != "params"})

    def get_last_lr(self) -> list[float]:
        """Returns the learning rate of each of the script's parameter groups."""
        rates: list[float] = self.scheduler.get_last_lr()
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Returns the schedule's state as plain data."""
        return {k: v for k, v in self.scheduler.state_dict().items() if not callable(v) and k != "lr_lambdas"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the schedule's state; ``Accelerator.load_state`` restores the rates of the optimizer that it has."""
        self.scheduler.load_state_dict({**self.scheduler.state_dict(), **state})


class ModelOutput(dict[str, Any]):
    """What a prepared model returns: a mapping whose entries are attributes too, "loss" first."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"in training a prepared model returns its loss alone, and no '{name}'")

    def __getitem__(self, key: Any) -> Any:
        return tuple(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


def _with_loss(output: Any, loss: Tensor) -> ModelOutput:
    named = dict(output) if isinstance(output, Mapping) else {"logits": output}
    return ModelOutput({"loss": loss, **{key: value for key, value in named.items() if key != "loss"}})


def _world() -> World:
    if is_started() and not dist.is_initialized():
        dist.init_process_group(backend_of(default().type))
    return current_world()
