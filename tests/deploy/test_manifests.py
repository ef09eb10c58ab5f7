"""The manifests are of the published types, and have what those do not ask for: fitting names, time, `exec`."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aiorpc.draining import REST
from aiorpc.options import DRAIN_TIMEOUT
from aiorpc.runtime.meeting.launchers import LAUNCHERS

from .manifests import FOLDER, Manifest, check, manifests, pods

PAGES = FOLDER.parents[1] / "docs" / "clusters"
FILES = sorted(FOLDER.glob("*.yaml"))
EACH = [pytest.param(each, id=f"{path.stem}-{each['kind']}") for path in FILES for each in manifests(path)]
WITH_PODS = [each for each in EACH if [*pods(each.values[0])]]  # type: ignore[arg-type]
SHELLS = {"sh", "bash", "/bin/sh", "/bin/bash"}
#: What starts the containers sets these, besides the manifest.
SET = {"JOB_COMPLETION_INDEX", "LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX", "LWS_GROUP_SIZE"}


def named(name: str) -> Manifest:
    """The first object of that file."""
    return manifests(FOLDER / f"{name}.yaml")[0]


def variables(container: Manifest) -> dict[str, Any]:
    """Those that a container is given: their texts, or where they come from."""
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container.get("env", [])}


@pytest.mark.parametrize("manifest", EACH)
def test_a_manifest_is_of_the_published_type(manifest: Manifest) -> None:
    """With all that is needed, and nothing that the type does not have."""
    check(manifest)


def within(manifest: Manifest) -> list[Manifest]:
    """Mappings of it whose fields the types name, from the outermost to an entry of a container's environment."""
    found = [manifest, *([manifest["spec"]] if "spec" in manifest else [])]
    for pod in pods(manifest):
        found += [pod] if manifest["kind"] != "TrainJob" else []  # whose pods are made for us
        found += [part for container in pod["containers"] for part in (container, container["env"][0])]
    return found


@pytest.mark.parametrize("manifest", EACH)
def test_a_field_that_the_type_does_not_have_is_found(manifest: Manifest) -> None:
    """On each level."""
    for number in range(len(within(manifest))):
        worse = copy.deepcopy(manifest)
        within(worse)[number]["noSuchField"] = "1"
        with pytest.raises((AssertionError, ValueError)):
            check(worse)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("indexed-job", lambda job: job["spec"].update(completions="four")),
        ("indexed-job", lambda job: job["spec"]["template"]["spec"].pop("containers")),
        ("jobset", lambda jobs: jobs["spec"]["failurePolicy"].update(maxRestarts="many")),
        ("leaderworkerset", lambda sets: sets["spec"]["leaderWorkerTemplate"].update(restartPolicy="Never")),
        ("leaderworkerset", lambda sets: sets.update(apiVersion="leaderworkerset.x-k8s.io/v2")),
        ("trainjob", lambda job: job["spec"]["trainer"].update(numNodes="two")),
    ],
)
def test_a_wrong_value_is_found(name: str, spoil: Callable[[Manifest], object]) -> None:
    """A text for a number, nothing for a list, another word than those there are, a version that is unknown."""
    manifest = named(name)
    spoil(manifest)
    with pytest.raises((AssertionError, ValueError)):
        check(manifest)


@pytest.mark.parametrize("manifest", WITH_PODS)
def test_a_pod_has_time_to_drain(manifest: Manifest) -> None:
    """More than a worker takes at most, and than the 30 s after which torchrun kills."""
    assert all(pod["terminationGracePeriodSeconds"] > max(DRAIN_TIMEOUT + REST, 30.0) for pod in pods(manifest))


@pytest.mark.parametrize("manifest", WITH_PODS)
def test_process_1_is_the_program(manifest: Manifest) -> None:
    """No container has a shell that stays; nor has a probe, which would be another process each time."""
    for pod in pods(manifest):
        for container in pod["containers"]:
            probes = [container[key]["exec"] for key in container if key.endswith("Probe")]
            for command in (container["command"], *(probe["command"] for probe in probes)):
                assert command[0] not in SHELLS or re.search(r"(^|\n| )exec [^\n]+\n?\Z", command[2]), command


@pytest.mark.parametrize("manifest", WITH_PODS)
def test_the_secret_comes_from_the_secret(manifest: Manifest) -> None:
    """Each container has it, by the name and the key of secret.yaml."""
    secret = named("secret")
    [key] = secret["stringData"]
    where = {"secretKeyRef": {"name": secret["metadata"]["name"], "key": key}}
    assert all(
        variables(container)["AIORPC_SECRET"] == where for pod in pods(manifest) for container in pod["containers"]
    )


@pytest.mark.parametrize("manifest", WITH_PODS)
def test_variables_that_commands_use_are_set(manifest: Manifest) -> None:
    """By the manifest, or by what starts the containers; the latter are those that aiorpc knows."""
    known = {name for each in LAUNCHERS for name in (each.rank, *each.size)} | {"LWS_LEADER_ADDRESS"}
    assert known >= SET
    for pod in pods(manifest):
        for container in pod["containers"]:
            text = str({**container, "env": [each for each in container["env"] if "value" in each]})
            used = set(re.findall(r"\$\(?\(?([A-Z][A-Z_]+)", text))
            assert used <= SET | set(variables(container)), used


def test_the_service_is_that_of_the_job() -> None:
    """Its name is the pods' subdomain, its label theirs, and it knows them before they are ready."""
    service, job = named("service"), named("indexed-job")
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True


def test_sizes_are_those_of_the_groups() -> None:
    """WORLD_SIZE counts the pods of all jobs, and all of them run at once."""
    job, jobs = named("indexed-job")["spec"], named("jobset")["spec"]["replicatedJobs"]
    [container] = job["template"]["spec"]["containers"]
    assert variables(container)["WORLD_SIZE"] == str(job["completions"]) and job["completions"] == job["parallelism"]
    counts = [each["template"]["spec"].get("completions", 1) for each in jobs]
    for each in jobs:
        [container] = each["template"]["spec"]["template"]["spec"]["containers"]
        assert variables(container)["WORLD_SIZE"] == str(sum(counts))


def test_the_jobs_meet_at_the_learner() -> None:
    """At the name of the first pod of the first job, which the service of the JobSet gives it."""
    manifest = named("jobset")
    name, [first, *_] = manifest["metadata"]["name"], manifest["spec"]["replicatedJobs"]
    for pod in pods(manifest):
        given = variables(pod["containers"][0])
        assert given["MASTER_ADDR"] == f"{name}-{first['name']}-0-0.{name}"
    assert variables(next(pods(manifest))["containers"][0])["RANK"] == "0"


def test_the_volume_is_that_of_the_claim() -> None:
    """The checkpoint lies in it."""
    [learner, _] = pods(named("jobset"))
    [volume], [container] = learner["volumes"], learner["containers"]
    assert volume["persistentVolumeClaim"]["claimName"] == named("checkpoints")["metadata"]["name"]
    [mount] = container["volumeMounts"]
    assert mount["name"] == volume["name"] and container["command"][-1].startswith(f"{mount['mountPath']}/")


def test_a_place_is_taken_only_after_the_old_pod_has_ended() -> None:
    """Else the new one would find its name taken, as long as the old one drains."""
    actors = named("jobset")["spec"]["replicatedJobs"][1]["template"]["spec"]
    assert {each["podReplacementPolicy"] for each in (named("indexed-job")["spec"], actors)} == {"Failed"}


def test_modules_of_commands_are_there() -> None:
    """Each `-m` names a module of aiorpc, and each file lies in examples/."""
    root, text = FOLDER.parents[1], "\n".join(path.read_text(encoding="utf-8") for path in FILES)
    modules = set(re.findall(r"-m,? ([\w.]+)", text))
    assert {"aiorpc", "aiorpc.examples.actor_learner"} <= modules
    for name in modules:
        path = root / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name
    assert Path(root, "examples", "inference_service.py").exists()


@pytest.mark.parametrize("page", ["kubernetes", "skypilot"])
def test_a_page_has_the_files_as_they_are(page: str) -> None:
    """Its blocks of YAML are files of deploy/."""
    files = [path.read_text(encoding="utf-8") for path in FOLDER.parent.rglob("*.yaml")]
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.+?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks and [block for block in blocks if block not in files] == []


def test_skypilot_hands_the_secret_on() -> None:
    """The secret has no value in the file, and Python takes the place of the shell."""
    [task] = manifests(FOLDER.parent / "skypilot.yaml")
    assert task["secrets"] == {"AIORPC_SECRET": None} and "exec " in task["run"]
