"""The manifests of deploy/kubernetes: read, and compared with the types that the projects behind them have published.

`kubeflow-trainer-api` has the types of Kubernetes itself, of JobSet and of TrainJob, made from their schemas. It takes
no notice of fields that it does not know, so what a manifest becomes as a type is compared with the manifest. For
LeaderWorkerSet there is no such package: what the manifest has of its fields stands below; its pods are Kubernetes'.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from kubeflow_trainer_api import models
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
Manifest = dict[str, Any]


def manifests(path: Path) -> list[Manifest]:
    """The objects of a file."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def check(manifest: Manifest) -> None:
    """Compare with the type of its kind. pydantic.ValidationError if a field is missing or has a wrong value,
    AssertionError if it has fields that the type does not have, or the kind is unknown."""
    of = manifest["apiVersion"], manifest["kind"]
    assert of in KINDS, f"there is no type for {of}"
    kind = KINDS[of]
    if issubclass(kind, LeaderWorkerSet):
        kind.model_validate(manifest)
    else:
        same(kind, manifest)


def same(kind: type[Any], value: Manifest) -> Manifest:
    """The value, if nothing of it is lost as that type. As `check`."""
    missing = lost(value, kind.from_dict(value).to_dict())
    assert not missing, f"no fields of {kind.__name__}: {', '.join(missing)}"
    return value


def lost(before: Any, after: Any, path: str = "") -> list[str]:
    """The places of a value of YAML that are not the same in another one. What that has more are defaults."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [found for key in before for found in lost(before[key], after.get(key), f"{path}.{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [found for at, (one, other) in pairs for found in lost(one, other, f"{path}[{at}]")]
    return [] if before == after else [path]


def pods(manifest: Manifest) -> Iterator[Manifest]:
    """The specifications of pods in it; of a TrainJob what it changes in those of its runtime."""
    spec = manifest.get("spec", {})
    match manifest["kind"]:
        case "Job":
            yield spec["template"]["spec"]
        case "JobSet":
            yield from (job["template"]["spec"]["template"]["spec"] for job in spec["replicatedJobs"])
        case "LeaderWorkerSet":
            yield from (spec["leaderWorkerTemplate"][name]["spec"] for name in ("leaderTemplate", "workerTemplate"))
        case "TrainJob":
            for patch in spec["runtimePatches"]:
                for job in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
                    patch_of_pod = job["template"]["spec"]["template"]["spec"]
                    yield {"containers": [spec["trainer"]], **patch_of_pod}


# --- leaderworkerset.x-k8s.io/v1, as of LeaderWorkerSet 0.7 -----------------------------------------------------------


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


_Template = Annotated[Manifest, AfterValidator(lambda value: same(models.IoK8sApiCoreV1PodTemplateSpec, value))]
_Metadata = Annotated[
    Manifest, AfterValidator(lambda value: same(models.IoK8sApimachineryPkgApisMetaV1ObjectMeta, value))
]


class _LeaderWorkerTemplate(_Strict):
    size: int = Field(ge=1)
    restartPolicy: Literal["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
    leaderTemplate: _Template
    workerTemplate: _Template


class _Spec(_Strict):
    replicas: int = Field(ge=0)
    leaderWorkerTemplate: _LeaderWorkerTemplate


class LeaderWorkerSet(_Strict):
    """What the manifest has of it."""

    apiVersion: str
    kind: str
    metadata: _Metadata
    spec: _Spec


KINDS: dict[tuple[str, str], type[Any]] = {
    ("v1", "Secret"): models.IoK8sApiCoreV1Secret,
    ("v1", "Service"): models.IoK8sApiCoreV1Service,
    ("v1", "PersistentVolumeClaim"): models.IoK8sApiCoreV1PersistentVolumeClaim,
    ("batch/v1", "Job"): models.IoK8sApiBatchV1Job,
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): models.JobsetV1alpha2JobSet,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): models.TrainerV1alpha1TrainJob,
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): LeaderWorkerSet,
}
