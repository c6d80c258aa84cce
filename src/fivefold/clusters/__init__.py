"""Writes what starts a job on a cluster: an sbatch file, torchrun commands, a Kubernetes manifest, a script for ssh."""
