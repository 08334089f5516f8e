"""Makes the Kubernetes manifest of a training run: a JobSet, or a PyTorchJob of the Kubeflow training operator."""

from __future__ import annotations

from typing import Any

from shardwright.cluster.job import ClusterJob

KINDS = ("jobset", "pytorchjob")
_PORT = "29500"


def manifest_of(job: ClusterJob, kind: str, image: str, claim: str, mount: str) -> dict[str, Any]:
    """Returns a Kubernetes manifest, as a dictionary for JSON, with one pod per node, where torchrun starts the ranks.

    ``kind`` is ``jobset`` or ``pytorchjob``, and ``image`` a container image in which shardwright is installed.
    ``claim`` is the name of the volume claim that all pods mount at ``mount``, for the run's folder. A pod that is told
    to end has ``job.save_s`` seconds in which its ranks save. The manifest has no time limit.
    """
    pods = {"image": image, "claim": claim, "mount": mount}
    return (_jobset if kind == "jobset" else _pytorchjob)(job, **pods)


def _jobset(job: ClusterJob, **pods: str) -> dict[str, Any]:
    num, head = job.nodes.num_nodes, f"{job.name}-nodes-0-0.{job.name}"
    pod = _pod(job, job.torchrun("python", job.name, "$(JOB_COMPLETION_INDEX)", head, _PORT, 0), "Never", **pods)
    # a pod that fails ends all pods, and the JobSet starts them again: the run goes on from its newest checkpoint
    indexed = {"parallelism": num, "completions": num, "completionMode": "Indexed", "backoffLimit": 0}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {
            "failurePolicy": {"maxRestarts": job.restarts},
            "network": {"enableDNSHostnames": True},
            "replicatedJobs": [{"name": "nodes", "replicas": 1, "template": {"spec": {**indexed, "template": pod}}}],
        },
    }


def _pytorchjob(job: ClusterJob, **pods: str) -> dict[str, Any]:
    words = job.torchrun("python", job.name, "$(RANK)", "$(MASTER_ADDR)", "$(MASTER_PORT)", job.restarts)
    one = {"restartPolicy": "OnFailure", "template": _pod(job, words, None, **pods)}
    workers = job.nodes.num_nodes - 1
    replicas = {"Master": {"replicas": 1, **one}, **({"Worker": {"replicas": workers, **one}} if workers else {})}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.name},
        "spec": {
            "nprocPerNode": str(job.nodes.ranks_per_node),
            "runPolicy": {"backoffLimit": job.restarts, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": replicas,
        },
    }


def _pod(
    job: ClusterJob, command: list[str], restart: str | None, image: str, claim: str, mount: str
) -> dict[str, Any]:
    """Returns a pod template with its volumes and one container, named pytorch as the operator demands."""
    num = job.nodes.ranks_per_node
    limits = {"cpu": str(num * job.cpus), **({"nvidia.com/gpu": str(num * job.gpus)} if job.gpus else {})}
    mounts: list[dict[str, Any]] = [{"name": "runs", "mountPath": mount}]
    volumes: list[dict[str, Any]] = [{"name": "runs", "persistentVolumeClaim": {"claimName": claim}}]
    if job.gpus:  # NCCL needs more shared memory between the GPUs of a node than the 64 MiB that a pod has
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
    container = {
        "name": "pytorch",
        "image": image,
        "command": command,
        "env": [{"name": name, "value": value} for name, value in job.torchrun_environment().items()],
        "resources": {"limits": limits},
        "volumeMounts": mounts,
    }
    spec = {
        **({"restartPolicy": restart} if restart else {}),
        "terminationGracePeriodSeconds": job.save_s,
        "containers": [container],
        "volumes": volumes,
    }
    return {"spec": spec}
