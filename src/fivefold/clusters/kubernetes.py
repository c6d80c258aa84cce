"""Kubernetes: an Indexed Job with a headless service, one pod a node; or a TrainJob of Kubeflow Trainer 2.3.

In both, each pod runs torchrun. The job is a ConfigMap, and data and runs are on a volume that all pods share.
"""

import os
import re
from typing import Any

from fivefold.clusters.deployment import Deployment
from fivefold.clusters.environment import rank_variables
from fivefold.clusters.torchrun import PORT, shutdown_timeout, torchrun_command
from fivefold.job.toml_writer import to_toml
from fivefold.support.errors import UserError

IMAGE, CLAIM = "FILL_IN_IMAGE", "FILL_IN_CLAIM"  # neither is a legal name, so Kubernetes refuses them
_VOLUME, _JOB_FILE = "/work", "/etc/fivefold/job.toml"
_MAX_CONFIG_MAP_BYTES = 1 << 20  # kubernetes.io/docs/concepts/configuration/configmap
_THREADS_PER_RANK = 8  # the cluster decides how many cores a pod gets
Table = dict[str, Any]

# ---- manifests -------------------------------------------------------------------------------------------------------


def indexed_job(deployment: Deployment, image: str, claim: str, restarts: int) -> list[Table]:
    """A headless service, the job file, and the Job."""
    name, nodes = service_name(deployment), deployment.machines.nodes
    service = {
        "#": f"{deployment.title}.",
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "#": "Headless: it gives each pod a name. Pods look for each other before they are ready.",
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": name},
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "#": "Pods of a Job start one by one, and may hold GPUs while others wait for theirs. With Kueue they "
            "start together: labels: {kueue.x-k8s.io/queue-name: QUEUE}.",
        },
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "#1": f"When a rank fails torchrun starts the ranks of all pods again, up to {restarts} times; then its "
            f"pod has failed, and the others with it: {nodes} failures for one.",
            "backoffLimit": restarts * nodes,
            "podFailurePolicy": {
                "rules": [
                    {
                        "#": "A job that is refused would be again.",
                        "action": "FailJob",
                        "onExitCodes": {"containerName": "ranks", "operator": "In", "values": [2]},
                    },
                    {
                        "#": "Drained or preempted: not the job's fault.",
                        "action": "Ignore",
                        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                    },
                ]
            },
            "template": {"spec": _pod(deployment, name, image, claim, restarts)},
        },
    }
    return [service, _config_map(deployment, name), job]


def train_job(deployment: Deployment, image: str, claim: str, restarts: int) -> list[Table]:
    """The job file, and a TrainJob on Kubeflow's torch-distributed runtime, which tells torchrun where it is."""
    name = service_name(deployment)
    in_pod = Deployment(deployment.job, deployment.machines, _JOB_FILE)
    check = f"fivefold train {_JOB_FILE} --check --nproc {deployment.machines.world} > /dev/null"
    start = f"exec torchrun --max-restarts={restarts} -m {in_pod.rank_command()}"
    script = f"cd {_VOLUME} && {check} && {start}\n"
    job = {
        "#": f"{deployment.title}.",
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "#": "The runtime starts the pods, names them to each other, and says what happens when one fails.",
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": image or IMAGE,
                "command": ["bash", "-c", script],
                "numNodes": deployment.machines.nodes,
                "numProcPerNode": deployment.machines.per_node,
                "env": _environment(deployment),
                "resourcesPerNode": _resources(deployment)["resources"],
            },
            "runtimePatches": [{"manager": "fivefold/launch", "trainingRuntimeSpec": _patch(deployment, name, claim)}],
        },
    }
    return [_config_map(deployment, name), job]


def service_name(deployment: Deployment) -> str:
    """The run's name as the name of a service: lower case, digits and hyphens, at most 50, as pods' names add to it."""
    plain = re.sub(r"[^a-z0-9]+", "-", deployment.job.run.name.lower()).strip("-")[:50].strip("-")
    return plain if plain[:1].isalpha() else f"run-{plain}".strip("-")


def notes(deployment: Deployment) -> list[str]:
    """A note about paths of the job that the pods may not have."""
    to_copy = ("run.weights", "layout.schedule")  # made on this machine, so not on the volume yet
    paths = [
        f"{key}={path}"
        for key, path in deployment.paths.items()
        if key in to_copy or (path.startswith(("/", "~")) and not path.startswith(f"{_VOLUME}/"))
    ]
    return [f"in the pods, {', '.join(paths)} must be on the volume, which is at {_VOLUME}"] if paths else []


# ---- their parts -----------------------------------------------------------------------------------------------------


def _config_map(deployment: Deployment, name: str) -> Table:
    """The job file."""
    meta, text = {"name": f"{name}-job"}, to_toml(deployment.job)
    if (size := len(text.encode())) > _MAX_CONFIG_MAP_BYTES:
        most = f"a ConfigMap of Kubernetes holds {_MAX_CONFIG_MAP_BYTES}; shorten its texts"
        raise UserError(f"the job has {size} bytes, and {most}", "launch.job.size")
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"job.toml": text}}


def _pod(deployment: Deployment, name: str, image: str, claim: str, restarts: int) -> Table:
    """What each node runs."""
    host = f"{name}-0.{name}:{PORT}"
    in_pod = Deployment(deployment.job, deployment.machines, _JOB_FILE)
    agent = torchrun_command(in_pod, host, f"{name}-$JOB_UID", restarts, ",is_host=$host")
    script = "\n".join(
        [
            "# What is wrong with the job ends it at once, with code 2; torchrun would try again.",
            f"fivefold train {_JOB_FILE} --check --nproc {deployment.machines.world} > /dev/null || exit $?",
            '[ "$JOB_COMPLETION_INDEX" = 0 ] && host=1 || host=0',
            "exec " + " \\\n  ".join(agent),
        ]
    )
    uid = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}}
    container = {
        "name": "ranks",
        "image": image or IMAGE,
        "command": ["bash", "-c", f"{script}\n"],
        "#": f"The volume's directory: a data.path or run.dir that does not begin with / is looked for in {_VOLUME}.",
        "workingDir": _VOLUME,
        "env": [{"name": "JOB_UID", "valueFrom": uid}, *_environment(deployment)],
        **_resources(deployment),
        "#1": "Ready: the ranks have been started. There is no liveness probe: ranks that hang end by themselves after "
        "train.timeout seconds, and a probe cannot tell those that wait from those that compile.",
        "readinessProbe": {"exec": {"command": ["pgrep", "--full", "python.* -u -m fivefold"]}, "periodSeconds": 10},
        "volumeMounts": _mounts(),
    }
    return {
        "#": "Pods of a Job get the host names NAME-0, NAME-1 ... below the service.",
        "subdomain": name,
        "#1": "A pod that has failed is replaced, on another node if need be.",
        "restartPolicy": "Never",
        "#2": f"Pods that are drained save a checkpoint first: {deployment.save_estimate}.",
        "terminationGracePeriodSeconds": deployment.save_notice + 60,
        "containers": [container],
        "volumes": _volumes(name, claim),
    }


def _patch(deployment: Deployment, name: str, claim: str) -> Table:
    """The patch of the runtime's job `node` that adds the volumes, for which a TrainJob has no fields."""
    pod = {
        "#": f"Pods that are drained save a checkpoint first: {deployment.save_estimate}.",
        "terminationGracePeriodSeconds": deployment.save_notice + 60,
        "containers": [{"name": "node", "volumeMounts": _mounts()}],
        "volumes": _volumes(name, claim),
    }
    return {
        "template": {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}}
    }


def _environment(deployment: Deployment) -> list[Table]:
    """The variables of a container, with their reasons as comments; those for the user to set are comments alone."""
    runs = _VOLUME if deployment.log_directory.startswith("~") else os.path.join(_VOLUME, deployment.log_directory)
    rows: list[Table] = []
    comments: Table = {}
    for variable in [
        shutdown_timeout(deployment),
        *rank_variables(deployment.machines, str(_THREADS_PER_RANK), "/tmp/fivefold", runs),
    ]:
        key = f"#{variable.name}"
        if variable.enabled:
            why = {key: f"{variable.why[:1].upper()}{variable.why[1:]}."} if variable.why else {}
            # Kubernetes replaces $(NAME) in a value, and $$ by $.
            rows.append(comments | why | {"name": variable.name, "value": variable.value.replace("$", "$$")})
            comments = {}
        else:
            comments[key] = f"{variable.name}={variable.value}: {variable.why}."
    return [*rows[:-1], {**rows[-1], **comments}]


def _resources(deployment: Deployment) -> Table:
    """The limits of a container."""
    if not deployment.machines.gpus:
        return {"resources": {"limits": {"cpu": deployment.machines.per_node}}}
    why = (
        "All GPUs of a node. Memory, cores and adapters are named differently on every cluster, and yours to add: for "
        "example rdma/hca: 1, with the capability IPC_LOCK."
    )
    return {"resources": {"#": why, "limits": {"nvidia.com/gpu": deployment.machines.per_node}}}


def _mounts() -> list[Table]:
    """Where a container has its volumes."""
    return [
        {"name": "work", "mountPath": _VOLUME},
        {"name": "job", "mountPath": _JOB_FILE.rpartition("/")[0]},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]


def _volumes(name: str, claim: str) -> list[Table]:
    """The volumes of a pod."""
    return [
        {"name": "work", "persistentVolumeClaim": {"#": "ReadWriteMany: all pods.", "claimName": claim or CLAIM}},
        {"name": "job", "configMap": {"name": f"{name}-job"}},
        {
            "#": "NCCL's ranks of a node talk through shared memory, and a container has 64 MiB of it.",
            "name": "shm",
            "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"},
        },
    ]
