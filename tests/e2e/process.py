"""`python -m sidecar run` as a process of its own: its log lines, its ports, what it takes of the machine, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.doubles.app import App, Reply
from tests.e2e.signs import Scrape, get, scrape

REPOSITORY = Path(__file__).resolve().parent.parent.parent
_NOT_OURS = ("SIDECAR", "OTEL_")  # variables of whoever runs the tests


class Process:
    """Use `start`, then `ready`; `clean_up` in the end."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self.pid = process.pid
        self.folder = folder
        self.config = folder / "sidecar.yaml"
        self.written: list[bytes] = []
        self._apps: list[App] = []
        self._reader = asyncio.create_task(self._read())
        self.address = self.admin_address = ("", 0)

    @classmethod
    async def start(
        cls, folder: Path, environ: dict[str, str] | None, keys: dict[str, Any], before: tuple[str, ...] = ()
    ) -> Process:
        """`before`: a command that replaces itself by the one behind it, such as `prlimit --nofile=64`."""
        config = _write(folder, keys)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_OURS)}
        ports = {"SIDECAR__LISTEN__PORT": "0", "SIDECAR__ADMIN__PORT": "0"}
        process = await asyncio.create_subprocess_exec(
            *(*before, sys.executable, "-m", "sidecar", "run", "-c", str(config)),
            stderr=asyncio.subprocess.PIPE,
            cwd=folder,
            env={**clean, "PYTHONPATH": str(REPOSITORY), **ports, **(environ or {})},
        )
        return cls(process, folder)

    async def _read(self) -> None:
        assert self._process.stderr is not None
        async for raw in self._process.stderr:
            self.written.append(raw)

    @property
    def stderr(self) -> str:
        return b"".join(self.written).decode()

    def lines(self, event: str | None = None) -> list[dict[str, Any]]:
        said = [json.loads(raw) for raw in tuple(self.written) if raw.startswith(b"{")]
        return [line for line in said if event in (None, line["event_name"])]

    async def logged(self, event: str, count: int = 1) -> dict[str, Any]:
        """The last line with this event, once there are so many."""
        for _ in range(2000):
            found = self.lines(event)
            if len(found) >= count:
                return found[count - 1]
            if self._reader.done():
                break
            await asyncio.sleep(0.01)
        raise AssertionError(f"no {event} in:\n{self.stderr}")

    async def ready(self) -> Process:
        started = await self.logged("sidecar.started")
        self.address, self.admin_address = _address(started["listen"]), _address(started["admin"])
        return self

    async def app(self) -> App:
        self._apps.append(await App.connect(self.address))
        return self._apps[-1]

    async def ask(self, data: bytes | str) -> Reply:
        """One request on a connection of its own."""
        app = await self.app()
        try:
            return await app.ask(data)
        finally:
            app.close()

    async def admin(self, path: str, *fields: str) -> Reply:
        return await get(self.admin_address, path, *fields)

    async def order(self, path: str, body: dict[str, Any] | None, method: str = "POST") -> Reply:
        """A change, at the admin port."""
        app = await App.connect(self.admin_address)
        self._apps.append(app)
        content = b"" if body is None else json.dumps(body).encode()
        fields = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
        return await app.ask(f"{method} {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + content)

    async def metrics(self) -> Scrape:
        return await scrape(self.admin_address)

    def resident(self) -> int:
        """Bytes of memory it holds."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def sockets(self) -> int:
        """Those of the descriptors that are connections or listeners."""
        found = 0
        for name in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed since
                found += os.readlink(f"/proc/{self.pid}/fd/{name}").startswith("socket:")
        return found

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def ended(self, within: float = 20.0) -> int:
        code = await asyncio.wait_for(self._process.wait(), within)
        await self._reader
        return code

    async def clean_up(self) -> None:
        for app in self._apps:
            app.close()
        if self.running:
            self._process.kill()
        await self.ended()


def _write(folder: Path, keys: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    config = folder / "sidecar.yaml"
    config.write_text(json.dumps(keys))
    return config


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)
