"""The manifests of examples/fleet: what a cluster would refuse, and what they have to agree on."""

from __future__ import annotations

import pathlib
import shlex
from typing import Any

import jsonschema
import pytest
import yaml

from specjax.cli.serve import ServeOptions
from specjax.options.command import parse

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "fleet"
DOCUMENTS = [
    (path.name, document)
    for path in sorted(FOLDER.glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
OBJECT: dict[str, Any] = {"type": "object"}


def closed(required: str = "", **fields: Any) -> dict[str, Any]:
    """The schema of an object that has no other fields, whose `required` ones it must have."""
    return {
        **OBJECT, "properties": fields, "required": required.split(),
        "additionalProperties": False,
    }  # fmt: skip


NUMBER, TEXT = {"type": "integer", "minimum": 0}, {"type": "string"}
STRINGS = {**OBJECT, "additionalProperties": TEXT}
POD = closed("spec", metadata=OBJECT, spec=OBJECT)
HEAD = {"apiVersion": TEXT, "kind": TEXT, "metadata": closed("name", name=TEXT)}
# The fields of the two kinds of resources that are no part of Kubernetes, by their own references.
KINDS = {
    "LeaderWorkerSet": closed("apiVersion kind metadata spec", **HEAD, spec=closed(
        "leaderWorkerTemplate",
        replicas=NUMBER,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        leaderWorkerTemplate=closed(
            "workerTemplate size", size={**NUMBER, "minimum": 1},
            restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]},
            leaderTemplate=POD, workerTemplate=POD,
        ),
    )),
    "RayService": closed("apiVersion kind metadata spec", **HEAD, spec=closed(
        "rayClusterConfig",
        serveConfigV2=TEXT,
        rayClusterConfig=closed(
            "headGroupSpec", rayVersion=TEXT,
            headGroupSpec=closed("template", rayStartParams=STRINGS, template=POD),
            workerGroupSpecs={"type": "array", "items": closed(
                "groupName maxReplicas minReplicas template", groupName=TEXT, replicas=NUMBER,
                minReplicas=NUMBER, maxReplicas=NUMBER, rayStartParams=STRINGS, template=POD,
            )},
        ),
    )),
}  # fmt: skip
VERSIONS = {"LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1", "RayService": "ray.io/v1"}


def templates(tree: Any) -> list[dict[str, Any]]:
    """The templates of pods inside of a resource."""
    if isinstance(tree, list):
        return [one for part in tree for one in templates(part)]
    if not isinstance(tree, dict):
        return []
    own = [tree] if isinstance(tree.get("spec"), dict) and "containers" in tree["spec"] else []
    return own + [one for part in tree.values() for one in templates(part)]


@pytest.mark.parametrize(("name", "document"), DOCUMENTS)
def test_a_schema_accepts_each_resource(name, document):
    """Kubernetes' own schemas for its kinds and for every pod, and closed ones for the others."""
    if (kind := document["kind"]) in KINDS:
        assert document["apiVersion"] == VERSIONS[kind]
        jsonschema.validate(document, KINDS[kind])
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    if kind not in KINDS:
        kubernetes_validate.validate(document, "1.33", strict=True)
    for pod in templates(document["spec"]):
        whole = {"apiVersion": "v1", "kind": "Pod", **pod}
        whole["metadata"] = {**pod.get("metadata", {}), "name": "one"}
        kubernetes_validate.validate(whole, "1.33", strict=True)


def lines() -> list[tuple[dict[str, Any], str]]:
    """The pods that run a server, and the options that they give it."""
    found = []
    for _, document in DOCUMENTS:
        for pod in templates(document["spec"]) if "spec" in document else []:
            for container in pod["spec"]["containers"]:
                text = shlex.join([*container.get("command", []), *container.get("args", [])])
                if "specjax" in text:
                    found.append((pod["spec"], " ".join(container["args"])))
    return found


def test_the_options_exist_and_the_grace_is_long_enough(monkeypatch):
    """Each command line parses; a pod is killed after its sleep and its drain, not before."""
    monkeypatch.setattr("specjax.options.command.join_from", lambda values: None)
    assert len(lines()) == 3
    for pod, text in lines():
        text = text.partition("specjax serve ")[2] or text
        numbers = {"$LWS_GROUP_SIZE": "4", "$LWS_WORKER_INDEX": "1"}
        for variable, value in numbers.items():
            text = text.replace(f'"{variable}"', value)
        options = parse(ServeOptions, shlex.split(text), prog="specjax serve")
        sleeps = [
            one["lifecycle"]["preStop"]["sleep"]["seconds"]
            for one in pod["containers"] if "lifecycle" in one
        ]  # fmt: skip
        assert pod["terminationGracePeriodSeconds"] > options.drain + sum(sleeps)


def test_the_application_of_kuberay_exists():
    """Its import path leads to a function, and its options parse."""
    [service] = [document for _, document in DOCUMENTS if document["kind"] == "RayService"]
    [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    made = __import__(module, fromlist=[name])
    assert callable(getattr(made, name))
    options = parse(ServeOptions, shlex.split(application["args"]["options"]), prog="serve")
    assert options.replicas and options.most_replicas
    cluster = service["spec"]["rayClusterConfig"]
    extras = (FOLDER.parents[1] / "pyproject.toml").read_text()
    assert f"ray[data,serve]=={cluster['rayVersion']}" in extras
