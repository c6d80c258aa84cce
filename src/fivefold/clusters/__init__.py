"""From a job to what a cluster runs: an sbatch file, lines for torchrun, a Kubernetes manifest, a script for ssh."""
