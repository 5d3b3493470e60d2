"""The files of deploy/: they fit each other, this package's figures, and the page about them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from placement.host.topology import Core, Gpu, Host, NumaNode
from ray_hetero.config import HeteroConfig, load_config
from ray_hetero.config_sources import ENVIRONMENT_VARIABLE
from ray_hetero.names import BACKEND
from ray_hetero.preflight.checks import ENOUGH_FILES, LEAST_SHM_BYTES
from ray_hetero.runtime.credentials import is_secret
from ray_hetero.runtime.ray_arguments import RAY_SETTINGS, ray_arguments

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
CONTAINER, KUBERNETES = DEPLOY / "container", DEPLOY / "kubernetes"
UNIT = DEPLOY / "systemd" / "ray-hetero@.service"
PROXY = DEPLOY / "proxy"
GIB = 1 << 30
UNITS = {"Gi": GIB, "gb": GIB}


def loaded(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def bytes_of(size: str) -> int:
    return int(size[:-2]) * UNITS[size[-2:]]


def is_configuration(path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(path))
    return load_config({}) != HeteroConfig()


def test_every_file_says_what_it_is_for_and_is_on_the_page() -> None:
    page = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")
    files = [path for path in DEPLOY.rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        first = path.read_text(encoding="utf-8").removeprefix("#!/bin/sh\n")
        assert first.startswith("# "), path.name
        assert str(path.relative_to(ROOT)) in page or path.is_relative_to(DEPLOY / "grafana")


# Containers.


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    (found,) = loaded(CONTAINER / "compose.yaml")
    return found


@pytest.mark.parametrize("name", ["engine", "engine-cpu"])
def test_the_engine_in_a_container_has_what_it_needs(name: str, compose: dict[str, Any]) -> None:
    service = compose["services"][name]
    assert f"--distributed-executor-backend={BACKEND}" in service["command"]
    assert (service["cap_drop"], service["cap_add"]) == (["ALL"], ["SYS_NICE"])
    assert bytes_of(service["shm_size"]) > 4 * LEAST_SHM_BYTES + GIB
    assert service["ulimits"]["nofile"] >= ENOUGH_FILES
    assert service["restart"] == "unless-stopped"
    assert service["stop_grace_period"] == "90s"
    assert service["build"]["args"]["EXTRA"] == ("cpu" if name.endswith("cpu") else "cuda")
    has_gpus = "gpu" in str(service.get("deploy"))
    assert has_gpus == (name == "engine")


def test_no_container_gains_privileges(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["cap_drop"] == ["ALL"], name
        # Of this host only.
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        assert not service.get("privileged")


def test_images_that_are_not_built_here_have_a_version(compose: dict[str, Any]) -> None:
    images = [one["image"] for one in compose["services"].values() if "build" not in one]
    assert len(images) == 2
    for image in images:
        assert re.search(r":v?\d+\.\d+\.\d+$", image), image


def test_what_containers_mount_and_build_from_is_there(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (CONTAINER / source).exists(), source
            elif not source.startswith("$"):
                assert source in compose["volumes"]
        if build := service.get("build"):
            context = (CONTAINER / build["context"]).resolve()
            assert context == ROOT
            assert (context / build["dockerfile"]).exists()


def test_the_configuration_of_the_container_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_configuration(CONTAINER / "ray_hetero.yaml", monkeypatch)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Instructions of a Containerfile with what follows them, comments left out."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for line in re.sub(r"\\\n\s*", " ", lines).splitlines():
        if line:
            name, _, rest = line.partition(" ")
            yield name, rest


def test_the_containerfile_copies_what_is_there_and_let_through() -> None:
    found = list(instructions((CONTAINER / "Containerfile").read_text(encoding="utf-8")))
    known = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "RUN", "STOPSIGNAL",
             "USER", "WORKDIR"}  # fmt: skip
    assert {name for name, _ in found} <= known
    ignore = (CONTAINER / "Containerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    let_through = {line[1:] for line in ignore if line.startswith("!")}
    copied = [
        source
        for name, rest in found
        if name == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]
    assert set(copied) == let_through
    assert all((ROOT / source).exists() for source in copied)
    environment = " ".join(rest for name, rest in found if name == "ENV")
    for name, value in RAY_SETTINGS.items():
        assert f"{name}={value}" in environment


def test_the_shell_reads_what_the_containerfile_runs() -> None:
    found = list(instructions((CONTAINER / "Containerfile").read_text(encoding="utf-8")))
    runs = [rest for name, rest in found if name == "RUN"]
    assert len(runs) > 3
    for run in runs:
        read = subprocess.run(["sh", "-n", "-c", run], capture_output=True, text=True, timeout=20)
        assert (read.stderr, read.returncode) == ("", 0), run


# Kubernetes.


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    return loaded(KUBERNETES / "rayjob.yaml")[0]


def pods(path: Path) -> Iterator[dict[str, Any]]:
    """Every template of a pod in a file."""
    spec = loaded(path)[0]["spec"]
    if "template" in spec:
        yield spec["template"]
    else:
        for group in groups(cluster_of(loaded(path)[0])):
            yield group["template"]


def cluster_of(resource: dict[str, Any]) -> dict[str, Any]:
    """The Ray cluster of a job or a service of KubeRay."""
    spec = resource["spec"]
    found: dict[str, Any] = spec.get("rayClusterSpec") or spec["rayClusterConfig"]
    return found


def groups(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """Groups of a cluster's pods."""
    return [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", ())]


def user_of_the_image() -> int:
    found = re.search(r"--uid (\d+) ", (CONTAINER / "Containerfile").read_text(encoding="utf-8"))
    assert found
    return int(found[1])


MANIFESTS = [KUBERNETES / f"{name}.yaml" for name in ("deployment", "rayjob", "rayservice")]
KUBERAY = MANIFESTS[1:]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_pod_of_an_engine_has_what_it_needs(path: Path) -> None:
    for pod in pods(path):
        (container,) = pod["spec"]["containers"]
        security = container["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"], "add": ["SYS_NICE"]}
        assert security["allowPrivilegeEscalation"] is False
        assert pod["spec"]["automountServiceAccountToken"] is False
        whole = pod["spec"]["securityContext"]
        assert whole["runAsNonRoot"] is True
        assert whole["runAsUser"] == user_of_the_image()
        assert whole["seccompProfile"] == {"type": "RuntimeDefault"}
        limits, requests = container["resources"]["limits"], container["resources"]["requests"]
        assert limits["memory"] == requests["memory"]
        assert "cpu" not in limits
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounted.values()) == set(volumes)
        shared = volumes[mounted["/dev/shm"]]["emptyDir"]
        assert shared["medium"] == "Memory"
        assert bytes_of(shared["sizeLimit"]) > 4 * LEAST_SHM_BYTES + GIB


def as_pod(template: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": "engine", **template.get("metadata", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_knows_every_field(path: Path) -> None:
    found = [as_pod(pod) for pod in pods(path)]
    # Those of KubeRay are no resources of Kubernetes; their pods are checked above.
    found += [one for one in loaded(path) if one["kind"] not in ("RayJob", "RayService")]
    kinds = {one["kind"] for one in found}
    assert kinds - {"Deployment", "Service"} == {"Pod", "ConfigMap", "NetworkPolicy"}
    for resource in found:
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize(
    ("field", "value"), [("terminationGraceSeconds", 90), ("restartPolicy", ["Never"])]
)
def test_a_field_that_kubernetes_does_not_know_is_noticed(field: str, value: object) -> None:
    pod = as_pod(next(pods(KUBERNETES / "deployment.yaml")))
    pod["spec"][field] = value
    with pytest.raises(kubernetes_validate.ValidationError, match=f"{field}|Never"):
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("path", MANIFESTS[:2], ids=lambda path: path.name)
def test_the_service_leads_to_the_server(path: Path) -> None:
    (service,) = [one for one in loaded(path) if one["kind"] == "Service"]
    leads = [
        pod
        for pod in pods(path)
        if service["spec"]["selector"].items() <= pod.get("metadata", {}).get("labels", {}).items()
    ]
    ((container,),) = [pod["spec"]["containers"] for pod in leads]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    (port,) = service["spec"]["ports"]
    assert ports[port["targetPort"]] == 8000


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_only_the_server_is_for_everybody(path: Path) -> None:
    (policy,) = [one for one in loaded(path) if one["kind"] == "NetworkPolicy"]
    chosen = policy["spec"]["podSelector"]["matchLabels"].items()
    found = list(pods(path))
    assert all(chosen <= pod["metadata"]["labels"].items() for pod in found)
    open_to_all = [rule for rule in policy["spec"]["ingress"] if "from" not in rule]
    assert [[port["port"] for port in rule["ports"]] for rule in open_to_all] in (
        [["http"]],
        [[8000]],
    )
    for rule in policy["spec"]["ingress"]:
        for peer in rule.get("from", ()):
            assert peer["podSelector"]["matchLabels"]
        if "from" in rule and "ports" not in rule:
            # The pods of one cluster among themselves.
            assert [peer["podSelector"]["matchLabels"].items() for peer in rule["from"]] == [chosen]


@pytest.mark.parametrize("path", KUBERAY, ids=lambda path: path.name)
def test_ray_on_kubernetes_asks_for_a_token(path: Path) -> None:
    assert cluster_of(loaded(path)[0])["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_the_configuration_of_a_pod_is_one(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (config,) = [one for one in loaded(path) if one["kind"] == "ConfigMap"]
    ((name, content),) = config["data"].items()
    (tmp_path / name).write_text(content)
    assert is_configuration(tmp_path / name, monkeypatch)
    for pod in pods(path):
        (container,) = pod["spec"]["containers"]
        named = {entry["name"]: entry.get("value") for entry in container["env"]}
        # A secret is named, and not written out; and Ray's workers inherit what its pods have.
        secret = [entry["name"] for entry in container["env"] if "valueFrom" in entry]
        expected = ["VLLM_API_KEY", "HF_TOKEN"] if path.name == "deployment.yaml" else []
        assert secret == expected
        assert not any(is_secret(*entry) for entry in named.items() if entry[1])
        folder = next(m["mountPath"] for m in container["volumeMounts"] if m["name"] == "config")
        assert named[ENVIRONMENT_VARIABLE] == f"{folder}/{name}"


@pytest.mark.parametrize("path", KUBERAY, ids=lambda path: path.name)
def test_ray_starts_with_what_the_command_prints_there(path: Path) -> None:
    sockets = tuple(
        NumaNode(
            socket,
            socket,
            tuple(Core((core, core + 112)) for core in range(56 * socket, 56 * socket + 56)),
            512 * GIB,
            500 * GIB,
        )
        for socket in range(2)
    )
    for group in groups(cluster_of(loaded(path)[0])):
        (container,) = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        gpus = tuple(Gpu(index) for index in range(int(limits.get("nvidia.com/gpu", 0))))
        host = Host("h", sockets, gpus=gpus, memory_limit_bytes=bytes_of(limits["memory"]))
        printed = dict(option[2:].split("=") for option in ray_arguments(host).options)
        # KubeRay takes the number of GPUs from the container's limits.
        printed.pop("num-gpus", None)
        assert group["rayStartParams"] == printed
        named = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert named.items() >= RAY_SETTINGS.items()


def test_the_job_is_one_of_kuberay(job: dict[str, Any]) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert f"--distributed-executor-backend {BACKEND}" in job["spec"]["entrypoint"]
    for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]


@pytest.mark.parametrize("path", KUBERAY, ids=lambda path: path.name)
def test_ray_has_the_version_of_the_image(path: Path) -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert f"ray=={cluster_of(loaded(path)[0])['rayVersion']}\n" in lock


def test_the_application_of_ray_serve_has_a_bundle_for_every_rank() -> None:
    (service, *_) = loaded(KUBERNETES / "rayservice.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert application["import_path"] == "ray.serve.llm:build_openai_app"
    (model,) = application["args"]["llm_configs"]
    engine = model["engine_kwargs"]
    config = load_config(engine["additional_config"])
    bundles = model["placement_group_config"]["bundles"]
    gpus = [bundle for bundle in bundles if "GPU" in bundle]
    assert len(gpus) == engine["pipeline_parallel_size"]
    assert len(bundles) - len(gpus) == config.experts.ranks
    assert model["runtime_env"]["env_vars"] == {"RAY_HETERO_INSTEAD_OF": "ray"}
    (pod,) = pods(KUBERNETES / "rayservice.yaml")
    requested = pod["spec"]["containers"][0]["resources"]["requests"]
    assert sum(bundle["CPU"] for bundle in bundles) <= int(requested["cpu"])


def test_prometheus_finds_the_services_under_the_name_that_alerts_have() -> None:
    (monitor,) = loaded(KUBERNETES / "servicemonitor.yaml")
    labels = monitor["spec"]["selector"]["matchLabels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "ray_hetero"}]
    for path in MANIFESTS[:2]:
        (service,) = [one for one in loaded(path) if one["kind"] == "Service"]
        assert labels <= service["metadata"]["labels"].items()
        assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]


def test_running_requests_have_time_to_end() -> None:
    (command,) = settings_of_unit()["ExecStart"]
    stops = int(settings_of_unit()["TimeoutStopSec"][0])
    assert stops >= int(re.findall(r"--shutdown-timeout (\d+)", command)[0]) + 30
    (pod,) = pods(KUBERNETES / "deployment.yaml")
    (container,) = pod["spec"]["containers"]
    waits = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    (drains,) = [word for word in container["args"] if word.startswith("--shutdown-timeout=")]
    assert pod["spec"]["terminationGracePeriodSeconds"] >= waits + int(drains[19:]) + 20


# Proxy.


def test_the_proxy_leads_to_the_ports_of_the_units() -> None:
    text = (PROXY / "haproxy.cfg").read_text(encoding="utf-8")
    assert "PORT=8001\n" in (UNIT.parent / "chat.env").read_text(encoding="utf-8")
    fronts = re.findall(r"^frontend (\w+)\n +bind :(\d+)\n +default_backend (\w+)$", text, re.M)
    backs = re.findall(r"^backend (\w+)\n +server engine 127.0.0.1:(\d+)$", text, re.M)
    assert [name for name, _, _ in fronts] == [name for _, _, name in fronts]
    assert [name for name, _ in backs] == [name for name, _, _ in fronts]
    ports = [port for _, port, _ in fronts] + [port for _, port in backs]
    assert len(set(ports)) == len(ports)
    assert dict(backs)["chat"] == "8001"
    # A request waits for a server that starts, and its connection ends with it.
    assert "option http-server-close" in text
    assert int(re.findall(r"retries (\d+)", text)[0]) >= 600


@pytest.mark.skipif(shutil.which("haproxy") is None, reason="no haproxy here")
def test_haproxy_takes_its_configuration() -> None:
    check = ["haproxy", "-c", "-f", str(PROXY / "haproxy.cfg")]
    checked = subprocess.run(check, capture_output=True, text=True, timeout=20)
    assert (checked.returncode, "WARNING" in checked.stderr) == (0, False), checked.stderr


def test_an_upgrade_leads_requests_away_before_the_old_instance_stops(tmp_path: Path) -> None:
    for program in ("socat", "systemctl", "sleep"):
        fake = tmp_path / program
        fake.write_text(f'#!/bin/sh\ntest {program} != socat || cat >> {tmp_path}/said\n'
                        f'echo {program} "$@" >> {tmp_path}/said\n')  # fmt: skip
        fake.chmod(0o755)
    (tmp_path / "chat-new.env").write_text('MODEL=x\nPORT="8101"\n')
    given = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RAY_HETERO_ENV": str(tmp_path)}
    upgrade = [str(PROXY / "upgrade.sh"), "chat", "chat"]
    done = subprocess.run([*upgrade, "chat-new"], env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "said").read_text().splitlines() == [
        "set server chat/engine addr 127.0.0.1 port 8101",
        "socat - UNIX-CONNECT:/run/haproxy/admin.sock",
        "sleep 2",
        "systemctl stop ray-hetero@chat",
        "systemctl start ray-hetero@chat-new",
    ]
    (tmp_path / "chat-new.env").write_text("MODEL=x\n")
    done = subprocess.run([*upgrade, "chat-new"], env=given, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"expected PORT=number in {tmp_path}/chat-new.env" in done.stderr
    for missing, expected in (
        ([], "got 2 words"),
        (["nobody"], f"expected {tmp_path}/nobody.env, as of chat"),
    ):
        done = subprocess.run([*upgrade, *missing], env=given, capture_output=True, text=True)
        assert done.returncode != 0
        assert expected in done.stderr


def test_an_upgrade_of_a_backend_that_haproxy_does_not_know_stops_nothing(tmp_path: Path) -> None:
    for program, does in (("socat", "echo No such backend."), ("systemctl", "exit 7")):
        (tmp_path / program).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / program).chmod(0o755)
    (tmp_path / "new.env").write_text("PORT=8101\n")
    given = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RAY_HETERO_ENV": str(tmp_path)}
    upgrade = [str(PROXY / "upgrade.sh"), "chatt", "chat", "new"]
    done = subprocess.run(upgrade, env=given, capture_output=True, text=True)
    assert done.returncode == 1
    assert "expected a backend chatt in haproxy.cfg" in done.stderr


# systemd.


def settings_of_unit() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text(encoding="utf-8").replace("\\\n", "").splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_the_unit_starts_again_and_ends_in_order() -> None:
    found = settings_of_unit()
    assert found["Restart"] == ["always"]
    # The server ends its ranks itself.
    assert found["KillMode"] == ["mixed"]
    assert int(found["LimitNOFILE"][0]) >= ENOUGH_FILES
    assert (found["UMask"], found["NoNewPrivileges"]) == (["0077"], ["yes"])
    assert found["CapabilityBoundingSet"] == [""]
    protected = {name for name in found if name.startswith(("Protect", "Restrict"))}
    assert len(protected) >= 7
    environment = " ".join(found["Environment"]).split()
    assert {f"{name}={value}" for name, value in RAY_SETTINGS.items()} <= set(environment)


def test_the_unit_has_its_variables_from_the_file() -> None:
    (command,) = settings_of_unit()["ExecStart"]
    assert f"--distributed-executor-backend {BACKEND}" in command
    lines = (UNIT.parent / "chat.env").read_text(encoding="utf-8").splitlines()
    given = {line.partition("=")[0] for line in lines if re.match(r"[A-Z_]+=", line)}
    assert set(re.findall(r"\$\{?([A-Z_]+)", command)) == given


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_knows_every_setting_of_the_unit(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/ray_hetero", str(tmp_path)))
    verify = ["systemd-analyze", "verify", "--man=no", str(unit)]
    checked = subprocess.run(verify, capture_output=True, text=True, timeout=60)
    said = [line for line in checked.stderr.splitlines() if UNIT.name in line]
    assert (said, checked.returncode) == ([], 0)
    unit.write_text(unit.read_text().replace("Restart=always", "Restart=sometimes"))
    checked = subprocess.run(verify, capture_output=True, text=True, timeout=60)
    assert "sometimes" in checked.stderr


# Prometheus and Grafana.


def test_prometheus_loads_the_alerts_and_scrapes_the_engine(compose: dict[str, Any]) -> None:
    (config,) = loaded(DEPLOY / "prometheus" / "prometheus.yml")
    assert all((DEPLOY / "prometheus" / name).exists() for name in config["rule_files"])
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    (static,) = jobs["ray_hetero"]["static_configs"]
    host, _, port = static["targets"][0].partition(":")
    assert host in compose["services"]
    assert f"127.0.0.1:{port}:{port}" in compose["services"][host]["ports"]


def test_the_page_has_every_alert() -> None:
    page = (ROOT / "docs/deployment.md").read_text(encoding="utf-8")
    (alerts,) = loaded(DEPLOY / "prometheus" / "alerts.yml")
    named = [alert["alert"] for group in alerts["groups"] for alert in group["rules"]]
    assert re.findall(r"^\| `(RayHetero\w+)` \|", page, re.M) == named


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    (alerts,) = loaded(DEPLOY / "prometheus" / "alerts.yml")
    named = {alert["alert"] for group in alerts["groups"] for alert in group["rules"]}
    cases = (DEPLOY / "prometheus" / "alerts.test.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"RayHetero\w+", cases)) == named


@pytest.mark.slow
def test_alerts_fire_in_these_cases_and_on_no_server_that_is_well() -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("needs promtool, which comes with Prometheus")
    command = [promtool, "test", "rules", str(DEPLOY / "prometheus" / "alerts.test.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_finds_prometheus_and_the_dashboard(compose: dict[str, Any]) -> None:
    grafana = DEPLOY / "grafana"
    (sources,) = loaded(grafana / "datasources" / "prometheus.yaml")
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"
    (providers,) = loaded(grafana / "dashboards" / "ray_hetero.yaml")
    path = providers["providers"][0]["options"]["path"]
    mounts = compose["services"]["grafana"]["volumes"]
    (source,) = [m.split(":")[0] for m in mounts if m.split(":")[1] == path]
    assert (CONTAINER / source / "ray_hetero.json").exists()
