"""Ranks that other launchers have started are numbered by those launchers' own names."""

from __future__ import annotations

import pytest

from shardwright.comm.started_world import is_started, started_by
from shardwright.errors import PlanError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MEET = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
OPEN_MPI = dict(
    zip([f"OMPI_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")], "3421", strict=True)
)
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
TORCHRUN = dict(zip(NAMES, "3411", strict=True)) | {"TORCHELASTIC_RUN_ID": "x"}


@pytest.mark.parametrize(
    ("environment", "launcher", "names"),
    [
        (SRUN, "srun", "581"),
        (BATCH | MEET, "Slurm", "080"),
        (OPEN_MPI, "mpirun of Open MPI", "3421"),
        (HYDRA, "mpirun", "2402"),
        (OPEN_MPI | BATCH | MEET, "mpirun of Open MPI", "3421"),
        (HYDRA | SRUN, "mpirun", "2402"),
        ({"PMI_RANK": "5", "PMI_SIZE": "8"} | SRUN, "mpirun", "581"),
        (TORCHRUN | MEET, "torchrun", "3411"),
        (TORCHRUN | MEET | SRUN, "torchrun", "3411"),
        ({"RANK": "5", "WORLD_SIZE": "8"} | MEET | SRUN, "srun", "581"),
        ({"RANK": "5", "WORLD_SIZE": "8"} | MEET, "torchrun", "58"),
    ],
)
def test_a_rank_has_the_numbers_that_the_innermost_launcher_gave_it(environment, launcher, names):
    environment = dict(environment)
    assert started_by(environment) == launcher
    assert [environment[name] for name in NAMES if name in environment] == list(names)
    assert is_started(environment | MEET)


@pytest.mark.parametrize("environment", [{}, BATCH, SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, {"RANK": "0"}])
def test_a_shell_a_batch_script_and_a_job_of_one_task_are_no_ranks(environment):
    given = dict(environment)
    assert not is_started(given)
    assert given == environment


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_ranks_that_were_not_told_where_to_meet_are_refused(missing):
    environment = SRUN | MEET
    del environment[missing]
    with pytest.raises(PlanError, match=f"ranks that srun has started do not know where to meet\n.*no {missing} in"):
        is_started(environment)


@pytest.mark.parametrize(
    "wrong",
    [
        {"RANK": "x"}, {"RANK": "-1"}, {"RANK": "8"}, {"LOCAL_RANK": "8"}, {"LOCAL_RANK": ""}, {"WORLD_SIZE": "0"},
        {"WORLD_SIZE": "9" * 5000}, {"MASTER_PORT": "http"}, {"MASTER_PORT": "65536"}, {"SLURM_PROCID": "x"},
    ],
)  # fmt: skip
def test_a_number_that_no_rank_can_have_is_refused_by_its_name(wrong):
    slurm = "SLURM_PROCID" in wrong
    environment = (SRUN if slurm else {"RANK": "5", "WORLD_SIZE": "8"}) | MEET | wrong
    name = "RANK" if slurm else next(iter(wrong))
    with pytest.raises(PlanError, match=f"has given a rank a number that cannot be\n.*{name}='.*\n.*{name} from"):
        is_started(environment)


def test_a_number_of_another_launcher_that_is_none_ends_no_command():
    assert started_by({"SLURM_PROCID": "0", "SLURM_NTASKS": "many"}) == ""
