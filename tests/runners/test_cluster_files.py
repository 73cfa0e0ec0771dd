"""The manifests and the script in examples/cluster: what KubeRay's schema requires, and settings that exist."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from hurtle.runners.settings import setting_types

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
# Required by KubeRay's resource definitions of ray.io/v1 (versions 1.0 to 1.4, whichever asks for more), and their types.
CLUSTER = {"headGroupSpec": dict}
HEAD = {"rayStartParams": dict, "template": dict}
WORKERS = {"groupName": str, "minReplicas": int, "maxReplicas": int, "rayStartParams": dict, "template": dict}
CONTAINER = {"name": str, "image": str}
CLUSTER_FIELDS = {*CLUSTER, "workerGroupSpecs", "rayVersion", "enableInTreeAutoscaling", "autoscalerOptions", "suspend"}
JOB_FIELDS = {
    *("entrypoint", "submissionMode", "shutdownAfterJobFinishes", "backoffLimit", "rayClusterSpec", "ttlSecondsAfterFinished"),
    *("activeDeadlineSeconds", "runtimeEnvYAML", "entrypointNumCpus", "metadata", "suspend", "jobId"),
}


def manifest(name):
    return yaml.safe_load((FOLDER / name).read_text())


def check(found, required, where):
    for name, kind in required.items():
        assert isinstance(found.get(name), kind), f"{where}.{name} must be {kind.__name__}"


def check_cluster(spec):
    assert not spec.keys() - CLUSTER_FIELDS
    check(spec, CLUSTER, "spec")
    check(spec["headGroupSpec"], HEAD, "headGroupSpec")
    for group in spec["workerGroupSpecs"]:
        check(group, WORKERS, "workerGroupSpecs")
        assert NAME.fullmatch(group["groupName"])
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())  # numbers are refused
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        for container in pod["containers"]:
            check(container, CONTAINER, "container")
            resources = container["resources"]
            assert resources["requests"] == resources["limits"]
            assert all(isinstance(amount, str) for amount in resources["requests"].values())
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
            for variable in container.get("env", ()):
                assert "value" not in variable  # secrets come from elsewhere
    assert spec["headGroupSpec"]["rayStartParams"]["dashboard-host"] == "127.0.0.1"


@pytest.mark.parametrize(("name", "kind"), [("rayjob.yaml", "RayJob"), ("raycluster.yaml", "RayCluster")])
def test_manifests(name, kind):
    found = manifest(name)
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", kind)
    assert found.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert NAME.fullmatch(found["metadata"]["name"])
    spec = found["spec"]
    if kind == "RayJob":
        assert not spec.keys() - JOB_FIELDS
        assert spec["submissionMode"] in ("K8sJobMode", "HTTPMode", "InteractiveMode")
        spec = spec["rayClusterSpec"]
    check_cluster(spec)


def test_faults_of_manifests_are_found():
    spec = manifest("raycluster.yaml")["spec"]
    del spec["workerGroupSpecs"][0]["groupName"]
    with pytest.raises(AssertionError, match=r"workerGroupSpecs\.groupName must be str"):
        check_cluster(spec)


def flags_of(text):
    return {word[2:].replace("-", "_") for word in shlex.split(text) if word.startswith("--")}


def test_the_commands_have_settings_that_exist():
    known = set(setting_types("ppo"))
    script = (FOLDER / "slurm.sh").read_text()
    commands = [manifest("rayjob.yaml")["spec"]["entrypoint"], *re.findall(r"hurtle train (?:[^\n]|(?<=\\)\n)+(?= &)", script)]
    assert len(commands) == 2
    for command in commands:
        flags = flags_of(command.replace("\\\n", " "))
        assert {"runner", "address", "num_collectors"} <= flags <= known


def test_the_slurm_script_is_a_script():
    assert subprocess.run(["bash", "-n", FOLDER / "slurm.sh"], check=False).returncode == 0


def test_images_have_one_version_of_ray():
    texts = "".join((FOLDER / name).read_text() for name in ("rayjob.yaml", "raycluster.yaml"))
    assert len(set(re.findall(r'(?:rayVersion: "|rayproject/ray:)([\d.]+)', texts))) == 1
