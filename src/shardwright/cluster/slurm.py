"""Makes the sbatch script of a training run: a task per rank, a save before the time limit, and a requeue after it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from shlex import join

from shardwright.cluster.job import ClusterJob

_BODY = r"""
# The ranks find each other at the first node. A job that is queued again keeps its number, and with it the run.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
TORCHELASTIC_RUN_ID=slurm-$SLURM_JOB_ID
export MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID
export WORLD_SIZE=@WORLD@ LOCAL_WORLD_SIZE=@LOCAL@ OMP_NUM_THREADS=@CPUS@

# @SAVE@ s before the limit Slurm signals this shell alone: the ranks finish their step, save and end, and the job is
# queued again. A job that is cancelled or preempted saves too, and is not.
again= ended=
stop() { ended=yes; scancel --signal=TERM "$SLURM_JOB_ID"; }
trap 'again=yes; stop' USR1
trap stop TERM

run() {
    srun --kill-on-bad-exit=0 --wait=@SAVE@ bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"' rank \
        @TRAIN@ &
    step=$!
    while :; do  # a signal ends a wait before the step has ended
        wait "$step"; code=$?
        kill -0 "$step" 2>/dev/null || return "$code"
    done
}

failures=0
until run; do
    # 2 is bad input, which no restart mends
    if [ -n "$ended" ] || [ "$code" -eq 2 ] || [ "$failures" -ge @RESTARTS@ ]; then break; fi
    failures=$((failures + 1))
    echo "the ranks ended with code $code; start $failures of @RESTARTS@ more, from the newest checkpoint" >&2
done
if [ -n "$again" ] && [ "$code" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def sbatch_script(job: ClusterJob, more: Sequence[str] = ()) -> str:
    """Returns the sbatch script that trains ``job``; ``more`` are options of sbatch, such as ``--partition=gpu``.

    ``job.save_s`` seconds before the time limit the ranks save and end, and the job is requeued unless training has
    ended. After a failure the script starts the ranks again, up to ``job.restarts`` times, unless their input was
    refused (exit code 2).
    """
    hours, rest = divmod(job.time_s, 3600)
    options = {
        "job-name": job.name,
        "nodes": job.nodes.num_nodes,
        "ntasks-per-node": job.nodes.ranks_per_node,
        "cpus-per-task": job.cpus,
        "time": f"{hours:02}:{rest // 60:02}:{rest % 60:02}",
        "signal": f"B:USR1@{job.save_s}",
        "output": f"{job.name}-%j.log",
        "open-mode": "append",
    }
    lines = [f"--{key}={value}" for key, value in options.items()] + ["--requeue"]
    # --gpus-per-task would hide the GPU of each rank from the others of its node, and NCCL could not send between them
    # directly. A rank that sees all GPUs of its node takes the one with the number in LOCAL_RANK.
    lines += [f"--gpus-per-node={job.nodes.ranks_per_node * job.gpus}", "--gpu-bind=none"] if job.gpus else []
    values = {"WORLD": job.nodes.num_nodes * job.nodes.ranks_per_node, "LOCAL": job.nodes.ranks_per_node}
    values |= {"CPUS": job.cpus, "SAVE": job.save_s, "RESTARTS": job.restarts}
    body = _BODY
    for name, value in values.items():
        body = body.replace(f"@{name}@", str(value))
    head = "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in [*lines, *more])])
    return f"{head}\n{body.replace('@TRAIN@', join(job.train(sys.executable)))}"
