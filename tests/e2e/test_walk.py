"""The first walk of the README, walked: its own lines, in a shell, with real processes and the real command line."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.examples import README, between
from tests.e2e.process import REPOSITORY

PORTS = ("4140", "4141", "9000")
EXPECTED = {
    "until sidecar health": r"^ready$",
    "pay/flaky | grep": r"x-sidecar-attempts: 2\nx-sidecar-outcome: recovered",
    "sidecar explain": r"(?s)recovered after 2 attempts.*answered with 503.*decided by:.*The app got 200",
    "force-open": r"payments +127\.0\.0\.1:\d+ +open .*their maintenance",
    "pay/ok": r'"error_code":"CIRCUIT_OPEN"',
    "breakers reset": r"payments +127\.0\.0\.1:\d+ +closed ",
    "policies set": r"default +runtime +2 ",
    "pay/charges": r"(?s)x-sidecar-attempts: 2\nx-sidecar-outcome: exhausted.*x-sidecar-dlq-id: dlq_",
    "policies remove": r"default +default +4 ",
    "sidecar reload": r'nothing has changed: sidecar\.yaml:\d+: upstreams\.payments\.max_in_flihgt: unknown key; did you mean "max_in_flight"\?',
    "dlq list": r"dlq_\w+ +payments +POST .*/charges .* safe +pending ",
    "repair": r'"status": 200',
    "dlq replay": r"(?i)1 .*(completed|succeeded|sent)",
    "sidecar audit": r"(?s)replay.*set policy default .*less load on them.*force-open .*their maintenance",
}


def commands() -> list[str]:
    lines = between(README.read_text(), "walk").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def free_ports() -> list[str]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in PORTS]
    found = [str(listener.getsockname()[1]) for listener in listeners]
    for listener in listeners:
        listener.close()
    return found


def a_tree(folder: Path, ports: dict[str, str]) -> None:
    """What the walk needs of this tree, on ports that are free here."""
    examples = folder / "config" / "examples"
    examples.mkdir(parents=True)
    for name in ("walk.py", "walk.yaml"):
        text = (REPOSITORY / "config" / "examples" / name).read_text()
        (examples / name).write_text(text.replace("9000", ports["9000"]))
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)


def walked(folder: Path) -> dict[str, str]:
    """What each command of the walk said."""
    ports = dict(zip(PORTS, free_ports(), strict=True))
    a_tree(folder, ports)
    lines = []
    for number, command in enumerate(commands()):
        for port, other in ports.items():
            command = command.replace(f":{port}/", f":{other}/").replace(f" {port} &", f" {other} &")
        lines += [f"echo; echo @@{number}", command]
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SIDECAR", "OTEL_", "COLUMNS")) and not name.lower().endswith("_proxy")
    }
    script = folder / "walk.sh"
    script.write_text("\n".join(["shopt -s expand_aliases", *lines, "wait"]))  # as in a shell that a person uses
    shell = subprocess.Popen(
        ["bash", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={
            **clean,
            "PYTHONPATH": str(REPOSITORY),
            "SIDECAR__LISTEN__PORT": ports["4140"],
            "SIDECAR__ADMIN__PORT": ports["4141"],
        },
        start_new_session=True,
    )
    try:
        out, _ = shell.communicate(timeout=150)
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate()
    said = re.split(r"^@@\d+\n", out, flags=re.MULTILINE)[1:]
    return dict(zip(commands(), said, strict=True))


@pytest.mark.timeout(180)  # a dozen processes, one after the other
@pytest.mark.skipif(shutil.which("curl") is None, reason="the walk uses curl, and there is none")
def test_every_step_of_the_walk_shows_what_the_readme_says(tmp_path: Path) -> None:
    said = walked(tmp_path)
    for part, expected in EXPECTED.items():
        (told,) = [told for command, told in said.items() if part in command]
        assert re.search(expected, told, re.MULTILINE), f"{part}: {told}"
    assert "Traceback" not in "".join(said.values())
    log = (tmp_path / "sidecar.log").read_text()
    assert "sidecar.stopped" in log
    assert "sidecar.internal_error" not in log
