"""What is written for Kubernetes, read by others: PyYAML, Kubernetes' schemas, and Kubeflow's own classes."""

import copy
import subprocess
import tomllib
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

from fivefold.clusters.deployment import Deployment
from fivefold.clusters.kubernetes import indexed_job, notes, service_name, train_job
from fivefold.clusters.machines import Machines
from fivefold.clusters.quoting import without_comments, yaml_documents
from fivefold.job.reading import read_job
from fivefold.job.toml_writer import to_toml
from fivefold.support.errors import UserError

VERSIONS = ("1.31", kubernetes_validate.latest_version())  # pod failure policies are stable since 1.31


def deployed(gpus: bool = True, *changes: str) -> Deployment:
    job = read_job(None, ["layout=dp=4", "run.name=Llama 3.1_70B", *changes])
    return Deployment(job, Machines(2, 2, gpus), "job.toml", changes)


def read(texts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As a cluster reads what is written."""
    found = list(yaml.safe_load_all(yaml_documents(*texts)))
    assert found == [without_comments(text) for text in texts]
    return found


def validate(resource: dict[str, Any]) -> None:
    for version in VERSIONS:
        kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("gpus", [True, False])
def test_the_manifests_are_legal(gpus: bool) -> None:
    service, config, job = read(indexed_job(deployed(gpus), "lab/image:1", "shared", 3))
    for resource in (service, config, job):
        validate(resource)
    assert config["data"]["job.toml"] == to_toml(deployed(gpus).job)
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 2, 2)
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] == service["spec"]["selector"]["job-name"] == "llama-3-1-70b"
    assert pod["volumes"][2]["emptyDir"]["medium"] == "Memory"
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == ({"nvidia.com/gpu": 2} if gpus else {"cpu": 2})
    assert [bool(one["name"].startswith("NCCL")) for one in container["env"]].count(True) == gpus
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_a_misspelt_key_is_found() -> None:
    *_, job = read(indexed_job(deployed(), "lab/image:1", "shared", 3))
    job["spec"]["template"]["spec"]["restartPolizy"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError, match="restartPolizy"):
        kubernetes_validate.validate(job, VERSIONS[0], strict=True)


def test_a_refused_job_ends_and_a_drained_pod_is_no_failure() -> None:
    *_, job = read(indexed_job(deployed(), "lab/image:1", "shared", 3))
    refused, drained = job["spec"]["podFailurePolicy"]["rules"]
    assert (refused["action"], refused["onExitCodes"]["values"]) == ("FailJob", [2])
    assert drained["action"] == "Ignore"
    assert job["spec"]["backoffLimit"] == 3 * 2  # all pods of a start fail together


def test_the_pod_script_is_bash_and_names_the_first_pod() -> None:
    *_, job = read(indexed_job(deployed(), "lab/image:1", "shared", 3))
    shell, option, script = job["spec"]["template"]["spec"]["containers"][0]["command"]
    subprocess.run([shell, "-n", option, script], check=True)
    assert "--rdzv-endpoint=llama-3-1-70b-0.llama-3-1-70b:29400" in script


def test_a_check_that_is_killed_is_not_taken_for_a_refusal() -> None:
    *_, job = read(indexed_job(deployed(), "lab/image:1", "shared", 3))
    script = job["spec"]["template"]["spec"]["containers"][0]["command"][2]
    for code in (137, 2):
        said = subprocess.run(["bash", "-c", f"fivefold() {{ return {code}; }}\n{script}"])
        assert said.returncode == code


def test_a_home_is_not_on_the_volume() -> None:
    it = deployed(True, "run.dir=~/runs")
    assert notes(it) == ["in the pods, run.dir=~/runs must be on the volume, which is at /work"]
    *_, job = read(indexed_job(it, "lab/image:1", "shared", 3))
    env = {one["name"]: one.get("value") for one in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert env["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "/work/nccl-rank-"


def kept(resource: dict[str, Any]) -> bool:
    """Whether Kubeflow's classes keep all of it: they drop what they do not know."""
    found = TrainerV1alpha1TrainJob.from_dict(copy.deepcopy(resource))
    return found is not None and found.to_dict() == resource


def test_a_train_job_is_legal() -> None:
    config, job = read(train_job(deployed(), "lab/image:1", "shared", 3))
    validate(config)
    assert kept(job)
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)
    subprocess.run(["bash", "-n", *trainer["command"][1:]], check=True)


@pytest.mark.parametrize("path", [("spec",), ("spec", "trainer"), ("spec", "runtimePatches", 0, "trainingRuntimeSpec")])
def test_a_misspelt_key_of_a_train_job_is_found(path: tuple[Any, ...]) -> None:
    _, job = read(train_job(deployed(), "lab/image:1", "shared", 3))
    place = job
    for key in path:
        place = place[key]
    place["mispelt"] = {"name": "x"}
    assert not kept(job)


@pytest.mark.parametrize(
    ("name", "legal"), [("a", "a"), ("8B run", "run-8b-run"), ("...", "run"), ("x" * 99, "x" * 50)]
)
def test_names_are_those_of_services(name: str, legal: str) -> None:
    assert service_name(deployed(True, f"run.name={name}")) == legal


ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
KEYS = st.sampled_from(["key", "a.b/c", "x-y"])
TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab:- #'\"\n$\\{}[]|>%@&*!?0.é", max_size=8) | ANY,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=2),
    max_leaves=5,
)


@given(st.dictionaries(KEYS, TREES, min_size=1), ANY)
def test_yaml_reads_back(tree: dict[str, Any], why: str) -> None:
    assert yaml.safe_load(yaml_documents({"#": why, **tree})) == tree


ODD = ["\0", "\x1b", "\x7f", "\x85", "\u2028", "\u2029", "\ufeff", "\ufffe", "\U0001f600", "\U0010ffff", "\r\n", "\t"]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("form", ["{}", "{}\n", "a{}b: c", "{}a\nb\n", "a\n{}b\n", "- {}"])
def test_no_character_ends_a_text_or_makes_it_unreadable(odd: str, form: str) -> None:
    text = form.format(odd)
    for value in ({"key": text}, {"key": [text, {"key": text}]}, {"key": [[text]]}):
        assert yaml.safe_load(yaml_documents({"#": text, **value})) == value
    assert "\\ud83d" not in yaml_documents({"key": text}).lower()  # half a character, which Kubernetes' reader refuses


@pytest.mark.parametrize("make", [indexed_job, train_job])
def test_a_name_is_no_part_of_the_manifest(make: Any) -> None:
    it = deployed(True, "model.name=x\u2028kind: Pod\x85\x1b\x7f", "run.dir=a$(JOB_UID)$b")
    found = read(make(it, "lab/image:1", "shared", 3))
    assert "Pod" not in [one["kind"] for one in found]
    assert tomllib.loads(found[-2]["data"]["job.toml"])["model"]["name"] == it.job.model.name
    spec = found[-1]["spec"]
    env = spec["trainer"]["env"] if "trainer" in spec else spec["template"]["spec"]["containers"][0]["env"]
    values = {one["name"]: one.get("value") for one in env}
    # Kubernetes replaces $(NAME), and $$ by $.
    assert values["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "/work/a$$(JOB_UID)$$b/nccl-rank-"


def test_a_job_that_no_config_map_holds_is_refused() -> None:
    with pytest.raises(UserError, match="holds 1048576"):
        indexed_job(deployed(True, f"model.name={'a' * 2**20}"), "lab/image:1", "shared", 3)
