"""The processes of one run: each pinned to its core, watched through /proc, and always ended.

A `Stage` owns a temporary folder and everything started in it. Leaving the stage, by whatever door (the end,
an error, Ctrl-C), kills every process group it started and removes the folder.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

LOOPBACK = "127.0.0.1"
START_LIMIT_SECONDS = 15.0
STOP_LIMIT_SECONDS = 3.0
QUIET_SHARE_OF_A_CORE = 0.1
QUIET_SAMPLE_SECONDS = 0.05
QUIET_LIMIT_SECONDS = 5.0
OPEN_FILES_WANTED = 8192  # a thousand idle connections, both ends of them, with room to spare


class StartFailed(Exception):
    """A process ended, or did not open its port, before the run could begin."""


@dataclass(frozen=True)
class Running:
    """One started process and where its words go."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def last_words(self, lines: int = 15) -> str:
        text = self.log.read_text(errors="replace").strip()
        return "\n".join(text.splitlines()[-lines:]) or "(it said nothing)"

    def resident_bytes(self) -> int:
        """Resident memory of the process and its descendants; 0 once it is gone."""
        return sum(_resident_bytes(pid) for pid in _family(self.process.pid))

    def cpu_seconds(self) -> float:
        """Time on a core, of the process and its descendants, since they began."""
        return sum(_cpu_seconds(pid) for pid in _family(self.process.pid))

    def wait_until_quiet(self) -> None:
        """What a round leaves behind (spans not yet exported) must not be done in the next one's time."""
        deadline = time.monotonic() + QUIET_LIMIT_SECONDS
        before = self.cpu_seconds()
        while time.monotonic() < deadline:
            time.sleep(QUIET_SAMPLE_SECONDS)
            now = self.cpu_seconds()
            if now - before < QUIET_SHARE_OF_A_CORE * QUIET_SAMPLE_SECONDS:
                return
            before = now

    def seconds_waiting_for_a_core(self) -> float:
        """Time its busiest thread was ready but something else held the core; 0 where Linux does not tell."""
        busiest, waited = -1, 0
        for schedstat in Path(f"/proc/{self.process.pid}/task").glob("*/schedstat"):
            try:
                ran, waiting = map(int, schedstat.read_text().split()[:2])
            except (OSError, ValueError):
                continue  # the thread ended between listing and reading
            if ran > busiest:
                busiest, waited = ran, waiting
        return waited / 1e9


class Stage:
    """A temporary folder and the processes that live in it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sidecar-bench-"))
        self.running: list[Running] = []

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        core: int,
        port: int,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Running:
        """Start one process on one core and wait until it accepts connections on `port`."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                list(argv),
                cwd=cwd or self.folder,
                env={**clean_environment(), **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the harness alone, which ends the others
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )
        running = Running(name, process, log)
        self.running.append(running)
        deadline = time.monotonic() + START_LIMIT_SECONDS
        while not _accepts(port):
            if not running.alive:
                raise StartFailed(f"{name} ended, exit code {process.returncode}:\n{running.last_words()}")
            if time.monotonic() > deadline:
                limit = f"{START_LIMIT_SECONDS:.0f} s"
                raise StartFailed(f"{name} did not open its port within {limit}:\n{running.last_words()}")
            time.sleep(0.02)
        return running

    def kill(self, running: Running) -> None:
        """End one at once, as a crash would."""
        _signal_group(running, signal.SIGKILL)
        running.process.wait()
        self.running.remove(running)

    def close(self) -> None:
        """End everything, politely first; safe to call twice."""
        for running in self.running:
            _signal_group(running, signal.SIGTERM)
        deadline = time.monotonic() + STOP_LIMIT_SECONDS
        for running in self.running:
            try:
                running.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pass
            _signal_group(running, signal.SIGKILL)
            running.process.wait()
        self.running.clear()
        shutil.rmtree(self.folder, ignore_errors=True)


def choose_cores() -> tuple[int, int] | None:
    """The core of the proxies and the core of load and upstream, or None when there are not two."""
    allowed = sorted(os.sched_getaffinity(0))
    return (allowed[0], allowed[1]) if len(allowed) >= 2 else None


def raise_open_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES_WANTED if hard == resource.RLIM_INFINITY else min(OPEN_FILES_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def free_ports(count: int) -> list[int]:
    """Distinct ports nobody listens on: all are held until the last one is known."""
    held = [socket.socket() for _ in range(count)]
    try:
        for each in held:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()


def stolen_seconds(core: int) -> float:
    """Time the hypervisor gave this core to somebody else, since boot."""
    for line in Path("/proc/stat").read_text().splitlines():
        fields = line.split()
        if fields and fields[0] == f"cpu{core}" and len(fields) > 8:
            return int(fields[8]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def clean_environment() -> dict[str, str]:
    """The caller's environment without what would change a peer: its settings and any proxy to go through."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SIDECAR_", "OTEL_")) and not key.lower().endswith("_proxy")
    }


def _accepts(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _signal_group(running: Running, number: signal.Signals) -> None:
    try:
        os.killpg(running.process.pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # already gone


def _family(pid: int) -> list[int]:
    found = [pid]
    for each in found:  # grows while it is walked: children of children come too
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                found.extend(int(child) for child in children.read_text().split())
            except OSError:
                continue
    return found


def _cpu_seconds(pid: int) -> float:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    user, system = stat.rpartition(")")[2].split()[11:13]  # behind the name, which may hold anything
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
