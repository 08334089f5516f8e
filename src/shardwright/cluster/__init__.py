"""Writes training jobs for a cluster: a script for Slurm, a manifest for Kubernetes, a driver for Ray."""
