"""What an idle sidecar has not loaded: each of these would cost every app's neighbour megabytes for nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import aiohttp.http
import pytest

from tests.e2e.process import REPOSITORY

_NOT_AT_START = (
    "aiohttp.client",
    "aiohttp.connector",  # which makes two TLS contexts with all root certificates
    "cryptography",
    "grpc",
    "opentelemetry.sdk",
    "requests",
    "sqlite3",
)


def _in_a_new_process(code: str) -> object:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def loaded() -> object:
    return _in_a_new_process(
        "import json, sys, sidecar.cli.running, sidecar.lifecycle; print(json.dumps([*sys.modules]))"
    )


@pytest.mark.parametrize("name", _NOT_AT_START)
def test_the_sidecar_starts_without(name: str, loaded: list[str]) -> None:
    assert name not in loaded, f"{name} is imported at start; import it where it is used"


def test_the_server_of_aiohttp_is_there_and_knows_its_version(loaded: list[str]) -> None:
    assert {"aiohttp.web", "aiohttp.web_server"} <= {*loaded}
    code = "import json, sidecar.lean_aiohttp, aiohttp.http; print(json.dumps(aiohttp.http.SERVER_SOFTWARE))"
    assert aiohttp.http.SERVER_SOFTWARE == _in_a_new_process(code)


def test_whoever_asks_for_a_client_of_aiohttp_gets_the_whole_package() -> None:
    asked = "import json, sidecar.lean_aiohttp, aiohttp; from aiohttp import web, ClientSession; "
    shown = "print(json.dumps([ClientSession.__module__, aiohttp.web is web, hasattr(aiohttp, 'nonsense')]))"
    assert ["aiohttp.client", True, False] == _in_a_new_process(asked + shown)
