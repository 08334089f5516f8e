"""``shardwright launch``: what it writes, and what it refuses before anything waits in a queue."""

import json
import subprocess

import pytest
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.cluster.job import ClusterJob
from shardwright.nodes import Nodes

LAYOUT = "pp2 mb2 dp2 tp2"
TINY = ["--", "--set", "num_layers=2", "--set", "width=16", "--set", "num_heads=2", "--seq", "16", "--batch", "4"]
TEXT, NUMBER, TRUE = str, int, bool

# what the pages of the two projects and of Kubernetes call required, with the types of the fields
POD = {
    "spec": {
        "terminationGracePeriodSeconds": NUMBER,
        "containers": [
            {
                "name": TEXT, "image": TEXT, "command": [TEXT], "env": [{"name": TEXT, "value": TEXT}],
                "resources": {"limits": {"cpu": TEXT}}, "volumeMounts": [{"name": TEXT, "mountPath": TEXT}],
            }
        ],
        "volumes": [{"name": TEXT}],
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
        "runPolicy": {"backoffLimit": NUMBER, "cleanPodPolicy": TEXT},
        "pytorchReplicaSpecs": {"Master": REPLICA, "Worker": REPLICA},
    },
}


def run(*words):
    return CliRunner().invoke(app, ["launch", *words])


def check(found, schema, path=""):
    """Every field of the schema is there and of its type, and, but for a pod's, there is no other."""
    if isinstance(schema, dict):
        assert schema.keys() <= found.keys(), path
        for key, each in schema.items():
            check(found[key], each, f"{path}.{key}")
    elif isinstance(schema, list):
        assert found, path
        for each in found:
            check(each, schema[0], f"{path}[]")
    else:
        assert isinstance(found, schema) if isinstance(schema, type) else found == schema, path


@pytest.mark.parametrize(("kind", "schema"), [("jobset", JOBSET), ("pytorchjob", PYTORCHJOB)])
def test_a_manifest_has_the_fields_that_the_documentation_requires(kind, schema):
    done = run(
        "--k8s", LAYOUT, "--nodes", "2x4", "--kind", kind, "--image", "here/it:1", "--gpus", "1", "--dry-run", *TINY
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    check(found, schema)
    for pod in pods_of(found):
        assert "--nnodes" in pod["containers"][0]["command"]
    assert found["metadata"]["name"] == "shardwright"


def pods_of(found):
    """The specifications of all pods, wherever they stand."""
    if isinstance(found, dict):
        yield from [found] if "containers" in found else (pod for each in found.values() for pod in pods_of(each))
    elif isinstance(found, list):
        for each in found:
            yield from pods_of(each)


def pods_with(*words):
    done = run("--k8s", LAYOUT, "--nodes", "2x4", "--image", "here/it:1", *words, "--dry-run", *TINY)
    assert done.exit_code == 0, done.output
    pods = [*pods_of(json.loads(done.stdout))]
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
