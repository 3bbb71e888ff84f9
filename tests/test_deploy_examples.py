"""The examples of how to run it: they name what there is, and would be taken by what they are written for."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from config.loader import load
from config.model import Settings
from sidecar.cli.parser import COMMANDS, parser
from tests.conftest import Starter

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "config" / "examples" / "deploy"
OLDEST_WITH_SIDECARS = "1.29"
LAST_WORDS = 16
"""What the end may take beyond the grace, in seconds."""


def unit(name: str = "sidecar.service") -> dict[str, list[str]]:
    """The settings of the unit, each with all its values."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / name).read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def manifests() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


def pod() -> Any:
    return manifests()["StatefulSet"]["spec"]["template"]["spec"]


def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def settings() -> Settings:
    return load(DEPLOY / "sidecar.yaml", {}).settings


def image_user() -> int:
    found = re.search(r"^USER (\d+):", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def variables_of(container: Any) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"]}


# ---- the configuration -------------------------------------------------------------------------------------------


def test_all_start_with_the_same_configuration_and_it_is_good(tmp_path: Path) -> None:
    file = tmp_path / "from-the-map.yaml"
    file.write_text(manifests()["ConfigMap"]["data"]["sidecar.yaml"])
    assert settings() == load(file, {}).settings


async def test_the_paths_that_are_probed_are_served_on_the_probes_listener(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    served = {row.path for row in sidecar.api.routes if row.probe}
    probes = [pod()["initContainers"][0][name] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert ["/readyz", "/livez", "/readyz"] == [probe["httpGet"]["path"] for probe in probes]
    assert {probe["httpGet"]["path"] for probe in probes} <= served
    annotations = manifests()["StatefulSet"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] in served


# ---- systemd -----------------------------------------------------------------------------------------------------


def test_the_unit_runs_commands_that_there_are() -> None:
    for key in ("ExecStart", "ExecStartPre"):
        program, *words = shlex.split(unit()[key][0])
        assert "sidecar" == Path(program).name
        chosen = parser().parse_args(words)
        assert chosen.command in COMMANDS
        assert Path("/etc/sidecar/sidecar.yaml") == chosen.config


def test_the_unit_gives_time_to_drain_and_a_place_for_the_state() -> None:
    assert int(unit()["TimeoutStopSec"][0]) > settings().shutdown_grace + LAST_WORDS
    assert f"SIDECAR__STATE_DIR=/var/lib/{unit()['StateDirectory'][0]}" in unit()["Environment"]
    assert 2 * settings().limits.connections <= int(unit()["LimitNOFILE"][0])
    assert "/bin/kill -HUP $MAINPID" == unit()["ExecReload"][0]


def test_the_sockets_are_those_of_the_configuration_and_belong_to_the_unit() -> None:
    listeners = {"sidecar.socket": "listen", "sidecar-admin.socket": "admin", "sidecar-probes.socket": "probes"}
    for name, role in listeners.items():
        socket, where = unit(name), getattr(settings(), role)
        assert [f"{where.host}:{where.port}"] == socket["ListenStream"]
        assert ([role], ["sidecar.service"]) == (socket["FileDescriptorName"], socket["Service"])
        assert name in unit()["Sockets"][0].split()
    assert ["notify"] == unit()["Type"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_takes_the_unit_and_finds_little_exposed(tmp_path: Path) -> None:
    here = tmp_path / "sidecar.service"
    text = (DEPLOY / "sidecar.service").read_text()
    here.write_text(text.replace("/opt/sidecar/bin/sidecar", "/bin/true"))  # a program that exists on this machine
    sockets = [shutil.copy(one, tmp_path) for one in DEPLOY.glob("*.socket")]
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", here, *sockets], capture_output=True, text=True, timeout=50
    )
    complaints = [line for line in verified.stderr.splitlines() if "sidecar" in line]
    assert (0, []) == (verified.returncode, complaints)
    exposed = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=20", "--no-pager", here],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert 0 == exposed.returncode, exposed.stdout[-500:]  # at most 2.0 of 10


# ---- Kubernetes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [OLDEST_WITH_SIDECARS, kubernetes_validate.latest_version()])
def test_the_manifest_keeps_to_the_schemas_of_kubernetes(version: str) -> None:
    for manifest in manifests().values():
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_manifest_with_a_misspelled_key_would_not_pass() -> None:
    manifest = manifests()["StatefulSet"]
    sidecar = manifest["spec"]["template"]["spec"]["initContainers"][0]
    sidecar["livenesProbe"] = sidecar.pop("livenessProbe")
    with pytest.raises(kubernetes_validate.ValidationError, match="livenesProbe"):
        kubernetes_validate.validate(manifest, OLDEST_WITH_SIDECARS, strict=True)


def test_the_sidecar_is_a_native_one_that_is_probed_where_it_listens() -> None:
    sidecar = pod()["initContainers"][0]
    assert "Always" == sidecar["restartPolicy"]
    chosen = parser().parse_args(sidecar["args"])
    assert ("run", Path("/etc/sidecar/sidecar.yaml")) == (chosen.command, chosen.config)
    ports = {port["name"]: port["containerPort"] for port in sidecar["ports"]}
    probes = settings().probes
    assert probes is not None
    assert ("0.0.0.0", {"probes": probes.port}) == (probes.host, ports)
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert sidecar[name]["httpGet"]["port"] in ports
    service = manifests()["Service"]["spec"]["ports"][0]
    assert (probes.port, True) == (service["port"], service["targetPort"] in ports)
    annotations = manifests()["StatefulSet"]["spec"]["template"]["metadata"]["annotations"]
    assert str(probes.port) == annotations["prometheus.io/port"]


def test_the_pod_lives_long_enough_for_both_to_drain() -> None:
    assert pod()["terminationGracePeriodSeconds"] >= 2 * settings().shutdown_grace + LAST_WORDS


def test_everything_that_is_mounted_is_there_and_the_state_is_claimed() -> None:
    sidecar = pod()["initContainers"][0]
    spec = manifests()["StatefulSet"]["spec"]
    claims = {claim["metadata"]["name"] for claim in spec["volumeClaimTemplates"]}
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    mounts = {mount["name"]: mount for mount in sidecar["volumeMounts"]}
    assert set(mounts) == claims | set(volumes)
    assert manifests()["ConfigMap"]["metadata"]["name"] == volumes["config"]["configMap"]["name"]
    assert "subPath" not in mounts["config"]
    state = Path(variables_of(sidecar)["SIDECAR__STATE_DIR"])
    assert Path(mounts["state"]["mountPath"]) in state.parents  # below it: the volume's own is not ours to chmod
    assert {"state"} == claims
    assert manifests()["Service"]["metadata"]["name"] == spec["serviceName"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]


def test_the_container_has_no_more_rights_than_it_needs() -> None:
    assert (True, image_user()) == (pod()["securityContext"]["runAsNonRoot"], pod()["securityContext"]["runAsUser"])
    rights = pod()["initContainers"][0]["securityContext"]
    assert (False, True, ["ALL"]) == (
        rights["allowPrivilegeEscalation"],
        rights["readOnlyRootFilesystem"],
        rights["capabilities"]["drop"],
    )


def test_the_app_is_pointed_at_the_listener() -> None:
    listen = settings().listen
    proxy = f"http://{listen.host}:{listen.port}"
    in_a_pod, in_compose = variables_of(pod()["containers"][0]), compose()["services"]["app"]["environment"]
    for variables in (in_a_pod, in_compose):
        assert (proxy, proxy) == (variables["HTTP_PROXY"], variables["HTTPS_PROXY"])
        assert listen.host in variables["NO_PROXY"].split(",")


# ---- compose -----------------------------------------------------------------------------------------------------


def test_compose_names_what_there_is() -> None:
    file = compose()
    sidecar, app = file["services"]["sidecar"], file["services"]["app"]
    chosen = parser().parse_args(sidecar["command"])
    assert ("run", Path("/etc/sidecar/sidecar.yaml")) == (chosen.command, chosen.config)
    assert int(sidecar["stop_grace_period"].removesuffix("s")) > settings().shutdown_grace + LAST_WORDS
    mounts = {where: what for what, where, *_ in (volume.split(":") for volume in sidecar["volumes"])}
    assert (DEPLOY / mounts["/etc/sidecar"] / "sidecar.yaml").is_file()
    assert mounts["/var/lib/sidecar"] in file["volumes"]
    assert "SIDECAR__STATE_DIR=/var/lib/sidecar" in (ROOT / "Dockerfile").read_text()
    probes = settings().probes
    assert probes is not None
    assert [f"127.0.0.1:{probes.port}:{probes.port}"] == sidecar["ports"]
    assert ("service:sidecar", "service_healthy") == (app["network_mode"], app["depends_on"]["sidecar"]["condition"])
    assert "HEALTHCHECK" in (ROOT / "Dockerfile").read_text()  # or it would never be healthy
    assert (True, ["ALL"]) == (sidecar["read_only"], sidecar["cap_drop"])


def test_all_images_of_the_sidecar_have_the_version_of_this_tree() -> None:
    from sidecar import __version__

    wanted = f"sidecar:{__version__}"
    assert [wanted, wanted] == [pod()["initContainers"][0]["image"], compose()["services"]["sidecar"]["image"]]


def test_the_app_gets_the_proxy_in_both_spellings_in_every_example() -> None:
    app = manifests()["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]
    in_kubernetes = {one["name"]: one["value"] for one in app["env"]}
    in_compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["app"]["environment"]
    for given in (in_kubernetes, in_compose):
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
            assert given[name] == given[name.lower()]
