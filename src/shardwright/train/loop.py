"""The training loop of ``shardwright train``: :func:`train` checks the options and starts ranks that run the loop."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import IO, Any

import numpy
import torch

from shardwright import devices
from shardwright.checkpoint.loading import load
from shardwright.checkpoint.manifest import find, find_on_all, read, steps_in
from shardwright.checkpoint.saving import save
from shardwright.comm.agreement import first_problem, gather_json
from shardwright.comm.failures import StopRequested
from shardwright.comm.launch import launch
from shardwright.comm.limits import Ranks, check_can_start
from shardwright.comm.started_world import is_started
from shardwright.comm.stop import Stop
from shardwright.comm.world import World
from shardwright.errors import CheckpointError, PlanError
from shardwright.file_locks import lock
from shardwright.layout import Layout
from shardwright.parallelize import parallelize
from shardwright.parallelize.overlapped_update import overlapped_offload
from shardwright.parallelize.planning import job_for, make_plan
from shardwright.runtime.executor import Microbatch
from shardwright.train.config import TrainConfig
from shardwright.train.data import Dataset, Indices, SampleOrder, collates, fingerprint, global_batch
from shardwright.train.emergency import EmergencyCheckpoint
from shardwright.train.fitting import check_room, check_takes
from shardwright.train.loggers import check_loggers
from shardwright.train.measuring import agreed_seconds, memory_of_ranks, step_usage
from shardwright.train.opening import inputs_of, num_tokens, opened, other_split
from shardwright.train.out_folder import (
    CHECKPOINTS,
    LOCK,
    in_use,
    locked_again,
    locked_folder,
    remove_remains,
    writing,
)
from shardwright.train.progress import METRICS_FILE, Log, StatusLog, cut_metrics, say
from shardwright.train.run_figures import check_cluster, note_figures, note_predicted, settled_by_price
from shardwright.train.run_file import (
    RUN_FILE,
    RunPart,
    command_line,
    noted_data,
    options_of,
    parts_before,
    started_again,
    write_run,
)
from shardwright.train.same_run import (
    check_regular,
    check_same_data,
    check_same_run,
    finished,
    moved_decay,
    moved_schedule,
)
from shardwright.train.spaced_values import SpacedValues
from shardwright.train.step_recording import StepRecording
from shardwright.weights.loading import load_weights
from shardwright.weights.stores import open_store

TRACE_FILE = "trace.json"
"""The trace that ``--profile`` writes into the run's folder."""

OnStep = Callable[[dict[str, Any]], Any]
"""A function of the metrics of a step; True ends the run after it."""


def train(
    config: TrainConfig, out: Path, *, resume: bool = False, ranks: Ranks = "processes", stop: Stop | None = None,
    changed_data: bool = False, on_step: OnStep | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Trains a model, writes metrics and checkpoints into the folder ``out``, and returns a summary of the run.

    With ``resume``, or if ``torchrun`` has restarted the run, training continues from the newest checkpoint in ``out``,
    under any layout, with the batches and dropout masks of an uninterrupted run. It is then an error to change the
    model, its settings, the data, the batch size, ``seq`` or the seed. Data files that have changed since the run was
    started are an error too, unless ``changed_data`` accepts them. A step whose loss or gradient norm (which is known
    if ``config.clip`` is not 0) is not finite ends the run, because AdamW does not recover from it: the step is not
    saved, and ``diverged`` of the summary is its number, else None.

    ``on_step(row)`` is called on the first rank with the metrics of each step, those of ``metrics.jsonl``, once they
    are written; if it returns True, the run ends after the step, with a checkpoint. If ranks are processes, the
    function is sent to them, so objects that it changes stay unchanged in this process.

    A stop signal, or ``stop`` if ranks are threads, ends the run after the current step, with a checkpoint. ``stopped``
    of the summary is then True if ranks are threads; processes raise KeyboardInterrupt instead. The summary is plain
    data for JSON. It also has the layout, the numbers of ranks, of parameters, of those that are trained, and of steps,
    the first and the last loss of this call, the medians of step time and tokens per second, each rank's peak memory in
    bytes, and the path of the last checkpoint.

    Raises: before the first step, LayoutError: the layout does not fit the model or the ranks; PlanError: the options
        do not fit, or ``out`` has a run or is in use; CheckpointError: there is nothing to resume. Later,
        RankFailedError: a rank failed. An error of the library, such as CheckpointError if the last checkpoint cannot
        be written, is raised as it is.
    """
    check_cluster(config)
    check_can_start(Layout.parse(config.layout).num_ranks, ranks)
    with writing(out):
        out.exists()  # raises for a name that is too long
    check_regular(out)
    _check_before(config, out, resume=resume)
    # a restart is checked as --resume is; without a checkpoint it begins anew, with whatever data there are
    if (resume or (started_again(out) and steps_in(out / CHECKPOINTS))) and not changed_data:
        check_same_data(config, noted_data(out))
    if resume and os.environ.get("RANK", "0") == "0":
        before = options_of(out)
        done = read(find(out / CHECKPOINTS)).step
        for line in (moved_schedule(config, before, done), moved_decay(config, before), finished(config, done)):
            if line:
                say(line)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    config = settled_by_price(config)
    layout = Layout.parse(config.layout)
    command = command_line(sys.argv)  # here, since ranks that are processes have other arguments
    if ranks == "threads":
        stop = stop or Stop()
        with stop.on_signals():
            summary = launch(_rank, layout, config, out, resume, stop, command, on_step, ranks=ranks)[0]
    else:
        options = {"debug": config.debug, "timeout_s": config.timeout_s, "bind_cores": config.bind_cores,
                   "grace_s": config.grace_s}  # fmt: skip
        try:
            summary = launch(_rank, layout, config, out, resume, None, command, on_step, ranks=ranks, **options)[0]
        finally:
            if not is_started():  # if this process is a rank itself, others may still save
                remove_remains(out)
    note_predicted(config, out, ranks, summary["steps"])  # after training, here: no step waits for it
    return summary


def _check_before(config: TrainConfig, out: Path, *, resume: bool) -> None:
    """Checks, without ranks, that data exist, the layout fits the model, and ``out`` is free or can be resumed."""
    model, loss, model_config, data = training_job = opened(config)
    other_split(config, training_job, "eval")
    layout, inputs = Layout.parse(config.layout), inputs_of(data, config.batch)
    check_room(model, layout)
    if model_config is None:
        check_takes(config, model, loss, data)
    make_plan(job_for(model, loss, layout, inputs, config.num_tokens, config.roles), layout)
    saved, again = bool(steps_in(out / CHECKPOINTS)), started_again(out)
    if config.weights and not (resume or (again and saved)):
        open_store(
            Path(config.weights), averages=config.averages
        )  # raises before ranks start; each rank opens it again
    if again and not saved:
        return
    if resume and not saved and (out / METRICS_FILE).exists():
        with contextlib.suppress(OSError), (out / LOCK).open() as file:
            if not lock(file):
                raise in_use(out)
        raise CheckpointError(
            f"the run in '{out}' ended before its first checkpoint",
            given=f"{METRICS_FILE} in it, and no checkpoint",
            allowed="a run that has saved one; --save-every sets how often",
            fix=f"remove '{out}', or give another --out, and start without --resume",
        )
    check_loggers(config.loggers)
    if resume or again:  # after a restart rank 0 chooses the checkpoint, once all ranks are there
        find(out / CHECKPOINTS)
        check_same_run(config, options_of(out))
    elif (out / METRICS_FILE).exists():
        raise PlanError(
            f"'{out}' holds a run already",
            given=f"{METRICS_FILE} in it" + ("" if saved else ", and no checkpoint"),
            allowed="a new or empty folder, or --resume" if saved else "a new or empty folder",
            fix="add --resume to continue it, or give another --out" if saved else "give another --out, or remove it",
        )


def _rank(
    world: World, config: TrainConfig, out: Path, resume: bool, stop: Stop | None, command: str,
    on_step: OnStep | None,
) -> dict[str, Any]:  # fmt: skip
    stop, again = stop or Stop(), started_again(out)
    with stop.on_signals(), locked_folder(world, out, new=not resume and not again) as held:
        if again:
            resume = gather_json(world.everyone(), bool(steps_in(out / CHECKPOINTS)))[0]
        training = _Training(world, config, out, resume, stop, held, command, on_step)
        try:
            summary = training.run_all()
        except Exception as failure:  # any error that ends the run: it is raised again below
            training.emergency.save(failure)
            raise
        if summary["stopped"] and not world.local:
            # everything is saved, and a launcher that is itself stopping accepts no results
            raise StopRequested(_signalled_ranks(world, stop))
    return summary


def _signalled_ranks(world: World, stop: Stop) -> str:
    """Returns text on the ranks that got a stop signal; "" if all did, since only then it was meant for the run."""
    signals = gather_json(world.everyone(), stop.signal)
    stopped = [f"rank {rank} was told to stop by {signal.Signals(sig).name}" for rank, sig in enumerate(signals) if sig]
    return f"{', '.join(stopped)}; all ranks have saved and ended" if len(stopped) < world.size else ""


class _Training:
    """The training loop on one rank: its run, optimizer, data and checkpoints."""

    def __init__(
        self, world: World, config: TrainConfig, out: Path, resume: bool, stop: Stop, held: IO[str] | None,
        command: str, on_step: OnStep | None = None,
    ) -> None:  # fmt: skip
        self.on_step = on_step if world.rank == 0 else None
        self.world, self.config, self.out, self.stop, self.held = world, config, out, stop, held
        self.command = command
        if config.deterministic:
            devices.use_deterministic_kernels()
        plain, loss, _, self.data = training_job = opened(config)
        self.eval_data = other_split(config, training_job, "eval")
        self.order = SampleOrder(len(self.data), config.batch, config.seed)
        self.tokens_per_sample = 0 if collates(self.data) else num_tokens(self.data)  # batches may differ in length
        self.seconds = agreed_seconds(config, world)
        self.run = parallelize(
            plain, config.layout, world, loss=loss, seed=config.seed, num_tokens=config.num_tokens, roles=config.roles,
            example=inputs_of(self.data, config.batch), seconds=self.seconds,
            offload_folder=config.offload_folder or None, check_every=config.check_every,
        )  # fmt: skip
        self.optimizer = self.run.optimizer(
            torch.optim.AdamW, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay, fused=True
        )
        self.averages = self.run.average(self.optimizer, config.ema) if config.ema else None
        self.everyone = world.everyone()
        self.saved: Path | None = None
        self.series = {key: SpacedValues() for key in ("step_ms", "samples_per_s", "tokens_per_s")}
        self.locks, self._profiled = contextlib.ExitStack(), contextlib.ExitStack()
        self.start_s = time.monotonic()
        if resume:
            self.saved = find_on_all(self.everyone, out / CHECKPOINTS)
            load(self.saved, self.run, self.optimizer)
            for group in self.optimizer.param_groups:
                group["weight_decay"] = config.weight_decay  # a resumed run may change it; load restored the old one
        elif config.weights:
            load_weights(self.run, config.weights, names=config.weights_prefix, averages=config.averages)
        self.first_step = self.run.num_steps
        self._ahead: Microbatch
        self._failure: Exception | None = None
        self._num_saves_requested = stop.num_saves_requested
        self.recording = StepRecording(self.run, self.optimizer, self._num_left)
        problem = (self._begin_files(resume=resume) or self._open_log()) if world.rank == 0 else self._open_log()
        if wrong := first_problem(self.everyone, problem):  # the other ranks would wait for the first one
            raise PlanError(wrong[1])
        # it reads run.json, which is there now
        self.emergency = EmergencyCheckpoint(self.run, self.optimizer, out, keep=config.keep, most_s=config.grace_s)

    def _begin_files(self, *, resume: bool) -> str:
        """Writes ``run.json`` and cuts metrics of steps to come; returns a new run's error text, or "".

        A resumed run that cannot write prints a warning instead.
        """
        self.data_noted = fingerprint(self.config.data)
        self.parts = parts_before(self.out, self.first_step) if resume else []
        try:
            with writing(self.out):
                self._write_run()
                if num_damaged := cut_metrics(self.out, self.first_step):
                    file = self.out / METRICS_FILE
                    say(f"warning: {num_damaged} damaged rows of '{file}' were removed; the run goes on")
        except PlanError as failure:
            if not resume:
                return str(failure)
            say(f"warning: cannot write to '{self.out}': {failure.given}")  # a resumed run needs neither file
        return ""

    def _open_log(self) -> str:
        """Opens the log of this rank, and on the first one the loggers; returns the error of one that cannot be opened.

        Called after the folder's files are begun, in which loggers write.
        """
        try:
            self.log = Log(
                self.out, self.config.last_step, self.first_step, writes=self.world.rank == 0,
                loggers=self.config.loggers, options=self.config.to_dict(),
            )  # fmt: skip
        except PlanError as failure:
            return str(failure)
        return ""

    def run_all(self) -> dict[str, Any]:
        """Runs all steps, saves the last checkpoint, and returns the summary of the run."""
        config = self.config
        rows: list[dict[str, Any]] = []  # only the first and the last: all rows of a long run would be gigabytes
        stopped = diverged = False
        with self.locks, self._profiled, self.log as log:
            is_tuned = config.weights and config.eval_every and not self.first_step and not config.ema
            if is_tuned and (figures := self._evaluate()):  # figures are empty if the run is stopped
                log.warn(f"before the first step: eval loss {figures['eval_loss']:.4f}")
            if self._num_left:
                self._ahead = self._part(self.data, self.order.batch(self.first_step))
            while self._num_left and not stopped:
                self._profile_from_here()
                row = self._step()
                if self.run.num_steps == self.first_step + self.recording.num_first + config.profile:
                    self._profiled.close()
                if not (taken := not self._lock_again()):
                    log.add(row)
                wants_end = self.on_step is not None and self.on_step(row) is True
                self._read_ahead()
                rows[1:] = [row]
                for key, values in self.series.items():
                    if row[key] is not None:
                        values.append(row[key])
                broken = [f"its {key} is {row[key]}" for key in ("loss", "grad_norm") if not isfinite(row[key] or 0.0)]
                # all ranks agree on these flags: a rank that left the loop alone would leave others in a collective
                warned = self.stop.num_saves_requested > self._num_saves_requested
                flags = self.stop.requested or wants_end, bool(broken), self._failure is not None, warned, taken
                stopped, diverged, failed, warned, taken = self._on_any_rank(*flags)
                if taken:
                    raise in_use(self.out, "it was removed, and another run has begun in it")
                if warned:
                    self._num_saves_requested = self.stop.num_saves_requested  # one checkpoint for all ranks
                if diverged:
                    log.warn(f"warning: step {row['step']} went wrong, {' and '.join(broken)}: the run ends here")
                    break
                num_steps = self.run.num_steps
                if failed:
                    self._end_saved()
                due = warned or (config.save_every and num_steps % config.save_every == 0)
                if due and num_steps < config.last_step and not stopped:
                    self._save(wait=not config.save_async)
            if (rows or self.saved is None) and not diverged:
                self._save()
            self._wait_saves()
        self._note_measured()
        return {**self._summary(rows, stopped), "diverged": self.run.num_steps if diverged else None}

    @property
    def _num_left(self) -> int:
        return max(0, self.config.last_step - self.run.num_steps)

    def _read_ahead(self) -> None:
        """Reads this rank's part of the next batch, so that a failure to read is known where all can still save."""
        try:
            if self._num_left:
                self._ahead = self._part(self.data, self.order.batch(self.run.num_steps))
        except Exception as failure:  # whatever a dataset raises
            self._failure = failure

    def _end_saved(self) -> None:
        """Saves a checkpoint, then raises the failure to read data on its rank; the other ranks end with it."""
        try:
            self._save()
        except CheckpointError as failure:  # only a warning: the failure to read data is the one to raise
            self.log.warn(f"warning: {failure}")
        if self._failure is not None:
            raise self._failure
        self.everyone.barrier()

    def _profile_from_here(self) -> None:
        """Begins the profile of ``--profile`` steps after the first steps, and those that recording makes slower."""
        if self.config.profile and self.run.num_steps == self.first_step + self.recording.num_first:
            self._profiled.enter_context(self.run.profile(self.out / TRACE_FILE))

    def _step(self) -> dict[str, Any]:
        """Runs one training step on the batch that was read ahead; returns its row of metrics."""
        config, run, part = self.config, self.run, self._ahead
        start_s = time.perf_counter()
        num_samples = len(self.order.batch(run.num_steps))
        rate = config.learning_rate(run.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = None
        within = not config.clip and bool(overlapped_offload(run.plan, run.offload))
        with self.recording.step(part, updates_within=within):
            # clipping needs the norm of all gradients before any update
            if within:
                self.emergency.refuse("without clipping, offloaded state is updated while gradients are computed")
                loss = run.step(part, update=self.optimizer)
            else:
                loss = run.step(part)
                if config.clip:
                    norm = run.clip_grad_norm_(config.clip)
                self.emergency.refuse("the step that failed had begun to update the parameters")
                with self.recording.update():
                    self.optimizer.step()
                if not config.clip:
                    self.optimizer.zero_grad()
        finite = isfinite(loss) and isfinite(norm or 0.0)  # waits for the device, so that step_s has all of its work
        step_s = time.perf_counter() - start_s
        tokens = num_samples * self.tokens_per_sample or None
        row: dict[str, Any] = {
            "step": run.num_steps,
            "loss": loss.item(),
            "lr": rate,
            "grad_norm": norm.item() if norm is not None else None,
            "step_ms": step_s * 1000,
            "samples_per_s": num_samples / step_s,
            "tokens_per_s": tokens / step_s if tokens else None,
            "time_s": time.monotonic() - self.start_s,
        }
        if finite:
            self.emergency.note({**row})
        memory, bubble = step_usage(self.run, self.everyone)
        row |= {"memory_bytes": memory.peak, "held_bytes": memory.held, "bubble": bubble}
        if config.eval_every and (run.num_steps % config.eval_every == 0 or run.num_steps == config.last_step):
            row |= self._evaluate()
        return row

    def _evaluate(self) -> dict[str, float]:
        """Returns the loss on the held-out data, of the averages (EMA) if the run keeps some; {} if the run is stopped.

        Batches are as equal as they can be: a small last one would leave ranks and microbatches without samples.
        """
        most, size = self.config.eval_batches, self.config.batch
        num = min(most * size, len(self.eval_data)) if most else len(self.eval_data)
        count = -(-num // size)
        waited = StatusLog("evaluated" * (self.world.rank == 0), num, "samples")
        is_stopped = False

        def parts() -> Iterator[Microbatch]:
            nonlocal is_stopped
            for i in range(count):
                start, stop = (num * index // count for index in (i, i + 1))
                # soon after a stop signal ranks are killed, and the last step is not saved yet
                is_stopped = i > 0 and any(self._on_any_rank(self.stop.requested))
                if is_stopped:
                    return
                yield self._part(self.eval_data, range(start, stop))
                waited.show(stop)

        with self.averages.applied() if self.averages is not None else contextlib.nullcontext():
            loss = self.run.evaluate_all(parts()).item()
        return {} if is_stopped else {"eval_loss": loss}

    def _part(self, data: Dataset, indices: Sequence[int] | Indices) -> Microbatch:
        """Returns this rank's part of the global batch of these samples; all are read only if the dataset collates."""
        if collates(data):
            return next(iter(self.run.shard([global_batch(data, indices)])))
        share = self.run.share(len(indices))
        return self.run.part(*global_batch(data, indices[share.start : share.stop]), len(indices))

    def _on_any_rank(self, *here: bool) -> list[bool]:
        """Returns, for each flag, whether it is set on any rank."""
        flags = torch.tensor(here, dtype=torch.uint8, device=self.world.device)
        return [bool(flag) for flag in self.everyone.for_strategy("progress").all_reduce(flags, "max")]

    def _save(self, *, wait: bool = True) -> None:
        try:
            self._write_checkpoint(wait=wait)
        except CheckpointError as failure:  # on all ranks
            gone = not (self.out / RUN_FILE).exists() or not (self.out / CHECKPOINTS).exists()
            if not any(self._on_any_rank(self.world.rank == 0 and gone)):
                raise
            self.log.warn(f"warning: {failure}; it was removed meanwhile, and is written once more")
            self._write_checkpoint(wait=True)

    def _write_checkpoint(self, *, wait: bool) -> None:
        gone = self.world.rank == 0 and not (self.out / RUN_FILE).exists()
        if any(self._on_any_rank(gone and not self._write_anew())):
            raise in_use(self.out)
        wait = self._wait_saves() or wait  # after a failure to write beside training, this save is waited for
        self.saved = save(self.out / CHECKPOINTS, self.run, self.optimizer, keep=self.config.keep, wait=wait)
        self.emergency.know_folder()

    def _wait_saves(self) -> bool:
        """Waits for the checkpoint being written; returns True, after a warning, if it could not be written."""
        try:
            self.run.wait_saves()
        except CheckpointError as failure:
            self.log.warn(f"warning: {failure}; the run goes on")
            self.saved = next(reversed(steps_in(self.out / CHECKPOINTS)), None)
            return True
        return False

    def _write_anew(self) -> bool:
        """Makes the run's folder again if it was removed during the run, and writes metrics and options into it.

        Returns False if another run has locked it.
        """
        self.log.warn(f"warning: '{self.out}' was removed; it is written anew, with its metrics")
        with contextlib.suppress(OSError):  # the save that follows says what is wrong, on every rank
            self.out.mkdir(parents=True, exist_ok=True)
            if not self._lock_again("a"):  # the file that was locked first is gone, so a new one is locked
                return False
            self._write_run()
            self.log.write_anew()
        return True

    def _lock_again(self, mode: str = "r+") -> bool:
        """Returns whether the folder still belongs to this run, by the lock that rank 0 holds on it."""
        if self.held is not None:
            self.held = locked_again(self.out, self.held, self.locks, mode)
        return self.held is not None or self.world.rank != 0

    def _write_run(self) -> None:
        part = RunPart(self.config, self.first_step, self.world.size, self.seconds, self.command)
        write_run(self.out, part, self.data_noted, self.parts)

    def _note_measured(self) -> None:
        """Writes this part's measured figures into ``run.json``; all ranks call it, and rank 0 writes."""
        step_ms = self.series["step_ms"].median(num_first=2)
        measured = self.recording.figures(self.everyone, None if step_ms is None else step_ms / 1000)
        if self.world.rank == 0 and step_ms is not None:
            kind: Ranks = "threads" if self.world.local else "processes"
            with contextlib.suppress(OSError, ValueError):  # without these figures the run is complete too
                note_figures(self.out, measured=measured, ranks=kind)

    def _summary(self, rows: list[dict[str, Any]], stopped: bool) -> dict[str, Any]:
        medians = {key: series.median(num_first=2) for key, series in self.series.items()}  # the first steps warm up
        plan = self.run.plan
        sizes = {name: numpy.prod(layout.shape, dtype=int).item() for name, layout in plan.compute.items()}
        return {
            "layout": self.config.layout,
            "world_size": self.world.size,
            "parameters": sum(sizes.values()),
            "trained_parameters": sum(size for name, size in sizes.items() if name not in plan.frozen),
            "steps": self.run.num_steps,
            "first_loss": rows[0]["loss"] if rows else None,
            "last_loss": rows[-1]["loss"] if rows else None,
            "step_ms_median": medians["step_ms"],
            "samples_per_s_median": medians["samples_per_s"],
            "tokens_per_s_median": medians["tokens_per_s"],
            "peak_memory_bytes": rows[-1]["memory_bytes"] if rows else memory_of_ranks(self.everyone).peak,
            "checkpoint": str(self.saved) if self.saved is not None else None,
            "trace": str(trace) if (trace := self.out / TRACE_FILE).exists() else None,
            "stopped": stopped,
        }
