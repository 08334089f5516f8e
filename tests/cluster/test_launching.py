"""``shardwright launch``: what it writes, and what it refuses before anything waits in a queue."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.cluster import ray_driver
from shardwright.cluster.job import ClusterJob
from shardwright.errors import CommunicationError, PlanError
from shardwright.nodes import Nodes

LAYOUT = "pp2 mb2 dp2 tp2"
TINY = ["--", "--set", "num_layers=2", "--set", "width=16", "--set", "num_heads=2", "--seq", "16", "--batch", "4"]
TEXT, NUMBER, TRUE = str, int, bool

# The fields that manifests have, at each level, with the names and types of the CustomResourceDefinitions: of JobSet
# (jobset.x-k8s.io/v1alpha2) and of the training operator 1.9 (kubeflow.org/v1), which contain a pod's. A field with "?"
# may be absent.
POD = {
    "spec": {
        "restartPolicy?": "Never",
        "terminationGracePeriodSeconds": NUMBER,
        "containers": [
            {
                "name": TEXT, "image": TEXT, "command": [TEXT], "env": [{"name": TEXT, "value": TEXT}],
                "resources": {"limits": {"cpu": TEXT, "nvidia.com/gpu?": TEXT}},
                "volumeMounts": [{"name": TEXT, "mountPath": TEXT}],
            }
        ],
        "volumes": [
            {"name": TEXT, "persistentVolumeClaim?": {"claimName": TEXT}, "emptyDir?": {"medium": "Memory"}}
        ],
    }
}  # fmt: skip
JOBSET = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": TEXT},
    "spec": {
        "failurePolicy": {"maxRestarts": NUMBER},
        "network": {"enableDNSHostnames": TRUE},
        "replicatedJobs": [
            {
                "name": TEXT,
                "replicas": NUMBER,
                "template": {
                    "spec": {
                        "parallelism": NUMBER, "completions": NUMBER, "completionMode": "Indexed",
                        "backoffLimit": NUMBER, "template": POD,
                    }
                },
            }
        ],
    },
}  # fmt: skip
REPLICA = {"replicas": NUMBER, "restartPolicy": "OnFailure", "template": POD}
PYTORCHJOB = {
    "apiVersion": "kubeflow.org/v1",
    "kind": "PyTorchJob",
    "metadata": {"name": TEXT},
    "spec": {
        "nprocPerNode": TEXT,
        "runPolicy": {"backoffLimit": NUMBER, "cleanPodPolicy": "Running"},
        "pytorchReplicaSpecs": {"Master": REPLICA, "Worker?": REPLICA},
    },
}
KINDS = {"jobset": JOBSET, "pytorchjob": PYTORCHJOB}


def run(*words):
    return CliRunner().invoke(app, ["launch", *words])


def check(found, schema, path=""):
    """Every field of the schema is there and of its type, and there is no other, at any level."""
    if isinstance(schema, dict):
        fields = {key.removesuffix("?"): each for key, each in schema.items()}
        assert not found.keys() - fields.keys(), f"{path} has no field {sorted(found.keys() - fields.keys())}"
        absent = {key for key in schema if not key.endswith("?")} - found.keys()
        assert not absent, f"{path} lacks {sorted(absent)}"
        for key in found:
            check(found[key], fields[key], f"{path}.{key}")
    elif isinstance(schema, list):
        assert found, path
        for each in found:
            check(each, schema[0], f"{path}[]")
    elif isinstance(schema, type):
        assert type(found) is schema, path  # for Kubernetes a boolean is no number
    else:
        assert found == schema, path


@cache
def printed(*words):
    done = run("--k8s", *words, "--image", "here/it:1", "--dry-run", *TINY)
    assert done.exit_code == 0, done.output
    return done.stdout


def manifest(kind, *more, layout=LAYOUT, nodes="2x4"):
    return json.loads(printed(layout, "--nodes", nodes, "--kind", kind, *more))


@pytest.mark.parametrize("gpus", ["0", "1"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_has_the_fields_that_the_documentation_requires_and_no_other(kind, gpus):
    found = manifest(kind, "--gpus", gpus)
    check(found, KINDS[kind])
    for pod in pods_of(found):
        assert "--nnodes" in pod["containers"][0]["command"]
    assert found["metadata"]["name"] == "shardwright"


def test_a_manifest_for_one_node_has_no_workers():
    found = manifest("pytorchjob", layout="dp2", nodes="1x2")
    check(found, PYTORCHJOB)
    assert [*found["spec"]["pytorchReplicaSpecs"]] == ["Master"]


def levels(schema, path=""):
    """The path of each object of a schema, as ``check`` writes it."""
    if isinstance(schema, dict):
        yield path
        for key, each in schema.items():
            yield from levels(each, f"{path}.{key.removesuffix('?')}")
    elif isinstance(schema, list):
        yield from levels(schema[0], f"{path}[]")


def objects_at(found, names):
    """The objects of a manifest behind some names, of which "[]" stands for each item of a list."""
    if not names:
        yield found
    elif names[0] == "[]":
        for each in found:
            yield from objects_at(each, names[1:])
    elif names[0] in found:
        yield from objects_at(found[names[0]], names[1:])


LEVELS = [(kind, path) for kind, schema in KINDS.items() for path in levels(schema)]


@pytest.mark.parametrize(("kind", "path"), LEVELS, ids=[f"{kind}{path}" for kind, path in LEVELS])
def test_a_misspelt_field_is_refused_at_each_level_of_a_manifest(kind, path):
    check(manifest(kind, "--gpus", "1"), KINDS[kind])
    names = re.findall(r"\[\]|[^.\[]+", path)
    fields = sorted(next(objects_at(manifest(kind, "--gpus", "1"), names)))
    assert fields
    for field in fields:
        wrong = manifest(kind, "--gpus", "1")
        level = next(objects_at(wrong, names))
        level[f"{field}s"] = level.pop(field)
        with pytest.raises(AssertionError) as raised:
            check(wrong, KINDS[kind])
        assert f"{path} has no field ['{field}s']" in str(raised.value)


def pods_of(found):
    """The specifications of all pods, wherever they stand."""
    if isinstance(found, dict):
        yield from [found] if "containers" in found else (pod for each in found.values() for pod in pods_of(each))
    elif isinstance(found, list):
        for each in found:
            yield from pods_of(each)


def pods_with(*words):
    pods = [*pods_of(json.loads(printed(LAYOUT, "--nodes", "2x4", *words)))]
    assert pods
    return pods


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
def test_a_pod_with_gpus_has_a_volume_in_memory_where_nccl_keeps_its_shared_memory(kind):
    for pod in pods_with("--kind", kind, "--gpus", "1"):
        claim, memory = pod["volumes"]
        assert claim["persistentVolumeClaim"] == {"claimName": "runs"}
        assert memory["emptyDir"] == {"medium": "Memory"}
        mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
        assert mounts == {claim["name"]: "/runs", memory["name"]: "/dev/shm"}
    for pod in pods_with("--kind", kind):
        assert [each["persistentVolumeClaim"] for each in pod["volumes"]] == [{"claimName": "runs"}]
        assert [each["mountPath"] for each in pod["containers"][0]["volumeMounts"]] == ["/runs"]


def test_the_seconds_for_a_save_are_told_to_torchrun_by_a_variable_because_torch_2_11_does_not_know_the_option():
    for pod in pods_with("--save-before", "77"):
        (container,) = pod["containers"]
        assert {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": "77"} in container["env"]
        assert "--shutdown-timeout" not in container["command"]


def test_a_script_for_slurm_asks_for_gpus_that_all_ranks_of_a_node_see():
    done = run("--slurm", LAYOUT, "--nodes", "2x4", "--gpus", "1", "--dry-run", *TINY)
    assert {"#SBATCH --gpus-per-node=4", "#SBATCH --gpu-bind=none"} <= {*done.stdout.splitlines()}
    assert "--gpus-per-task" not in done.stdout
    assert "--gpu" not in run("--slurm", LAYOUT, "--nodes", "2x4", "--dry-run", *TINY).stdout


def test_a_script_for_slurm_is_one_that_bash_reads_and_asks_for_the_nodes_and_a_signal_before_the_limit():
    done = run("--slurm", LAYOUT, "--nodes", "2x4", "--time", "2:00:00", "--sbatch=--partition=gpu", "--dry-run", *TINY)
    assert done.exit_code == 0, done.output
    asked = {line.removeprefix("#SBATCH --") for line in done.stdout.splitlines() if line.startswith("#SBATCH")}
    assert {"nodes=2", "ntasks-per-node=4", "time=02:00:00", "signal=B:USR1@180", "requeue", "partition=gpu"} <= asked
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False).returncode == 0
    assert "@" not in done.stdout.replace("USR1@180", "").replace('"$@"', "")


def test_a_driver_for_ray_is_a_program_that_holds_the_job():
    done = run("--ray", "dp2 tp2", "--nodes", "2x2", "--dry-run", *TINY)
    assert done.exit_code == 0, done.output
    compile(done.stdout, "driver.py", "exec")
    job = ClusterJob(layout="dp2 tp2", nodes=Nodes(2, 2), out="runs/train", options=tuple(TINY[1:]))
    assert repr(job) in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--slurm", "dp2", *TINY], "error: sbatch is not on the PATH, so there is no Slurm to submit to; --dry-run"),
        (["--k8s", "dp2", "--image", "a/b", *TINY], "error: kubectl is not on the PATH, so there is no Kubernetes"),
        (["--ray", "dp2", *TINY], "error: Ray is not installed here (pip install ray); --dry-run prints the file"),
    ],
)
def test_a_cluster_that_is_not_there_is_one_line_and_exit_code_2(words, said, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = run(*words)
    assert done.exit_code == 2
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


SUBMISSIONS = [
    (["--slurm", "dp2 tp2", "--nodes", "2x2", "--sbatch=--partition=gpu"], "sbatch", []),
    (["--k8s", "dp2 tp2", "--nodes", "2x2", "--kind", "jobset", "--image", "a/b"], "kubectl", ["apply", "-f", "-"]),
    (["--k8s", "dp2 tp2", "--nodes", "2x2", "--kind", "pytorchjob", "--image", "a/b"], "kubectl", ["apply", "-f", "-"]),
]


def stand_in(folder, monkeypatch, name, code, *, reads=True):
    """Puts a program first on the PATH, which notes what it is given, says something on both outputs, and ends."""
    lines = [f"printf '%s\\n' \"$@\" > {folder}/arguments", f"cat > {folder}/read" if reads else ":"]
    lines += ["echo it is submitted", f"echo {name} complains >&2", f"exit {code}"]
    (folder / name).write_text("\n".join(["#!/bin/sh", *lines, ""]))
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize(("words", "program", "arguments"), SUBMISSIONS)
def test_a_job_is_submitted_as_it_is_printed(words, program, arguments, tmp_path, monkeypatch, capfd):
    shown = run(*words, "--dry-run", *TINY)
    assert shown.exit_code == 0, shown.output
    stand_in(tmp_path, monkeypatch, program, 0)
    done = run(*words, *TINY)
    assert (done.exit_code, done.output) == (0, "")
    assert (tmp_path / "read").read_text() == shown.stdout
    assert (tmp_path / "arguments").read_text().split() == arguments
    assert capfd.readouterr() == ("it is submitted\n", f"{program} complains\n")


@pytest.mark.parametrize("reads", [True, False], ids=["reads", "does not read"])
@pytest.mark.parametrize(("words", "program", "arguments"), SUBMISSIONS)
def test_a_submission_that_fails_is_one_line_with_its_code_under_what_the_program_says(
    words, program, arguments, reads, tmp_path, monkeypatch, capfd
):
    stand_in(tmp_path, monkeypatch, program, 3, reads=reads)
    done = run(*words, *TINY)
    assert done.exit_code == 2
    assert done.stderr == f"error: {program} refused the job, with code 3; --dry-run prints the file\n"
    assert not done.stdout
    assert capfd.readouterr().err == f"{program} complains\n"
    assert (tmp_path / "arguments").read_text().split() == arguments


def test_a_job_for_ray_is_run_on_the_cluster_that_is_there(monkeypatch):
    asked = []
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=lambda **given: asked.append(given)))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(ray_driver, "run", asked.append)
    done = run("--ray", "dp2 tp2", "--nodes", "2x2", *TINY)
    assert (done.exit_code, done.output) == (0, "")
    job = ClusterJob(layout="dp2 tp2", nodes=Nodes(2, 2), out="runs/train", options=tuple(TINY[1:]))
    assert asked == [{"address": "auto", "log_to_driver": True}, job]


@pytest.mark.parametrize(
    ("failing", "failure", "code", "said"),
    [
        ("init", ConnectionError("no address"), 2, "error: no Ray cluster runs here (ray start --head); --dry-run"),
        ("run", PlanError("the ranks refused it", given="g", allowed="a", fix="f"), 2, "error: the ranks refused it"),
        ("run", CommunicationError("the ranks failed", given="g", allowed="a", fix="f"), 1, "error: the ranks failed"),
    ],
)
def test_a_job_for_ray_that_fails_says_why_and_ends_with_its_code(failing, failure, code, said, monkeypatch):
    def fail(*_, **__):
        raise failure

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=fail if failing == "init" else lambda **_: None))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(ray_driver, "run", fail)
    done = run("--ray", "dp2", *TINY)
    assert done.exit_code == code, done.output
    assert done.stderr.startswith(said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dp2", *TINY], "launch writes for one cluster"),
        (["--slurm", "--ray", "dp2", *TINY], "launch writes for one cluster"),
        (["--slurm", "dp2", "--nodes", "2x2", *TINY], "the nodes have another number of ranks"),
        (["--slurm", "dp2", "--", "--stepz", "3"], "No such option: --stepz"),
        (["--slurm", "dp2", "--", "--out", "x"], "launch itself gives train some of its options"),
        (["--slurm", "tp2x2 dp2", *TINY], "need a grid mode"),
        (["--slurm", "dp2", "--name", "My Run", *TINY], "no such name of a job"),
        (["--slurm", "dp2", "--time", "soon", *TINY], "no such time limit"),
        (["--slurm", "dp2", "--time", "1", *TINY], "no time to save before the limit"),
        (["--slurm", "dp2", "--restarts", "-1", *TINY], "a job cannot be asked for with these numbers"),
        (["--slurm", "dp2", "--gpus", "2", *TINY], "a rank cannot use this number of GPUs"),
        (["--k8s", "dp2", "--gpus", "-1", *TINY], "a rank cannot use this number of GPUs"),
        (["--k8s", "dp2", *TINY], "a manifest needs a kind and an image"),
    ],
)
def test_what_a_cluster_would_refuse_hours_later_is_refused_at_once(words, said):
    done = run("--dry-run", *words)
    assert done.exit_code == 2
    assert said in done.output
    assert not done.stdout


def test_a_layout_whose_tp_crosses_nodes_is_written_with_a_warning_and_its_price():
    done = run("--slurm", "tp4", "--nodes", "2x2", "--dry-run", "--", "--set", "num_heads=4", *TINY[1:])
    assert "warning: 'tp' crosses nodes: ranks 0 and 2 are on nodes 0 and 1, and" in done.stderr
    assert "KiB a step go over the link" in done.stderr
