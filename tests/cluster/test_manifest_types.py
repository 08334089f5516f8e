"""Manifests read by the types that Kubeflow publishes for them: of JobSet v1alpha2, of a PyTorchJob, and of pods.

Skipped where their packages, ``kubeflow-trainer-api`` and ``kubeflow-training``, are not installed.
"""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from shardwright.cli.main import app

TINY = ["--", "--set", "num_layers=2", "--set", "width=16", "--set", "num_heads=2", "--seq", "16", "--batch", "4"]


def read_jobset(manifest):
    """The manifest as it comes back from the type of a JobSet: what the type does not know is gone."""
    types = pytest.importorskip("kubeflow_trainer_api.models")
    return types.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()


def read_pytorchjob(manifest):
    """The manifest as it comes back from the type of a PyTorchJob."""
    types = pytest.importorskip("kubeflow.training.models")
    client = pytest.importorskip("kubernetes.client")
    for name in dir(types):  # the client of Kubernetes looks for all types among its own
        if name.startswith("KubeflowOrgV1"):
            setattr(client.models, name, getattr(types, name))
    api, given = client.ApiClient(), SimpleNamespace(data=json.dumps(manifest))
    return api.sanitize_for_serialization(api.deserialize(given, "KubeflowOrgV1PyTorchJob"))


READERS = {"jobset": read_jobset, "pytorchjob": read_pytorchjob}


def manifest(kind, gpus, nodes):
    words = ["launch", "dp2 tp2", "--k8s", "--kind", kind, "--nodes", nodes, "--gpus", gpus, "--image", "here/it:1"]
    done = CliRunner().invoke(app, [*words, "--dry-run", *TINY])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("nodes", ["1x4", "2x2"])
@pytest.mark.parametrize("gpus", ["0", "1"])
@pytest.mark.parametrize("kind", READERS)
def test_the_published_types_know_every_field_of_a_manifest(kind, gpus, nodes):
    given = manifest(kind, gpus, nodes)
    assert READERS[kind](given) == given


def fields(node, path=()):
    """The path of every field at every level."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if isinstance(node, dict):
            yield (*path, key)
        yield from fields(value, (*path, key))


FREE = ("limits",)
"""Fields whose own keys are names that a user chooses, which no type can know."""


@pytest.mark.parametrize("kind", READERS)
def test_they_would_tell_of_each_field_that_has_a_wrong_name(kind):
    given = manifest(kind, "1", "2x2")
    tried = 0
    for path in fields(given):
        if len(path) > 1 and path[-2] in FREE:
            continue
        wrong = copy.deepcopy(given)
        holder = wrong
        for step in path[:-1]:
            holder = holder[step]
        holder[f"{path[-1]}s"] = holder.pop(path[-1])
        try:
            known = READERS[kind](wrong) == wrong
        except ValueError:  # a field that must be there is not
            known = False
        # keys of replicas are names too, which the operator of PyTorchJobs reads
        assert known == (path[:-1] == ("spec", "pytorchReplicaSpecs")), path
        tried += 1
    assert tried > 30, "fields of all levels"
