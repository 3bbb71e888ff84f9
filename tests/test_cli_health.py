"""`sidecar health`, which a container's health check runs: finds the listener, and says ready or why not."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest

from sidecar.cli import health
from tests.conftest import Starter, UpstreamStarter
from tests.doubles.prometheus import free_port
from tests.doubles.upstream import always, answer
from tests.test_cli_admin import here, run
from tests.test_tls import Authority


def written(folder: Path, **keys: object) -> str:
    path = folder / "sidecar.yaml"
    path.write_text(json.dumps(keys))  # JSON is YAML
    return str(path)


async def test_a_sidecar_that_is_ready_is_healthy(start_sidecar: Starter, tmp_path: Path) -> None:
    sidecar = await start_sidecar()
    config = written(tmp_path, admin={"port": sidecar.admin_address[1]})
    assert (0, "ready\n", "") == await run("health", "-c", config)
    assert (0, "ready\n", "") == await here("health", SIDECAR_CONFIG=config)
    assert (0, "ready\n", "") == await here("health", SIDECAR__ADMIN__PORT=str(sidecar.admin_address[1]))


async def test_one_that_drains_is_not_and_the_reason_is_told(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    sidecar.api.not_ready = "draining"
    ended = await here("health", "--admin", "http://127.0.0.1:{1}".format(*sidecar.admin_address))
    assert (1, "", "sidecar health: not ready: draining\n") == ended


async def test_one_whose_new_configuration_was_refused_is_ready_and_the_reason_is_told(start_sidecar: Starter) -> None:
    sidecar = await start_sidecar()
    sidecar.reloading.refused = "s.yaml:1: listn: unknown key"
    ended = await here("health", "--admin", "http://127.0.0.1:{1}".format(*sidecar.admin_address))
    assert (0, "ready\n") == (ended.code, ended.out)
    assert "sidecar health: runs on an earlier configuration: s.yaml:1: listn: unknown key\n" == ended.err


async def test_what_is_wrong_with_its_store_is_told_with_what_to_do(start_sidecar: Starter, tmp_path: Path) -> None:
    sidecar = await start_sidecar(state_dir=str(tmp_path / "state"), dead_letter={"min_free_bytes": 2**60})
    await (await sidecar.proxy.kept.open()).listing.refresh()
    address = "http://127.0.0.1:{1}".format(*sidecar.admin_address)
    full = await here("health", "--admin", address)
    assert (0, "ready\n") == (full.code, full.out)
    assert "the store is degraded: " in full.err
    shutil.rmtree(tmp_path / "state", ignore_errors=True)
    async with asyncio.timeout(5):
        while (gone := await here("health", "--admin", address)).code == 0:
            await asyncio.sleep(0.05)
    assert "not ready: gone: " in gone.err
    assert "put the same files back" in gone.err


async def test_nothing_there_is_not_healthy() -> None:
    ended = await here("health", "--admin", "http://127.0.0.1:1")
    assert (1, "") == (ended.code, ended.out)
    assert "sidecar health: nothing answers at http://127.0.0.1:1 (--admin): Connection refused" in ended.err


async def test_something_else_that_answers_is_not_healthy(start_upstream: UpstreamStarter) -> None:
    stranger = await start_upstream(always(answer(b"hello")))
    ended = await here("health", "--admin", stranger.url)
    assert (1, "") == (ended.code, ended.out)
    assert "is not a sidecar: it says 200" in ended.err


async def test_a_configuration_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    ended = await here("health", "-c", written(tmp_path, admin={"prot": 1}))
    assert (2, "") == (ended.code, ended.out)
    assert "admin.prot" in ended.err


async def test_probes_are_asked_where_the_admin_port_wants_a_token(start_sidecar: Starter, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    assert 0 == (await here("tokens", "new", "me", "--file", str(tokens))).code
    pem = str(Authority(tmp_path, "authority").issue("elsewhere.test"))
    admin = {"port": 0, "token_file": str(tokens), "tls": {"cert": pem, "key": pem}}
    probes = {"host": "127.0.0.1", "port": free_port()}
    sidecar = await start_sidecar(admin=admin, probes=probes)
    admin["port"] = sidecar.admin_address[1]
    assert (0, "ready\n", "") == await here("health", "-c", written(tmp_path, admin=admin, probes=probes))
    # Without them it is known to answer, under whatever name its certificate is for.
    ended = await here("health", "-c", written(tmp_path, admin=admin))
    assert (0, "it answers; whether it is ready it tells without a token only on `probes`\n", "") == ended


@pytest.mark.parametrize(
    "words",
    [
        "/opt/bin/python /opt/bin/sidecar run -c FILE",
        "/sbin/docker-init -- sidecar run --config FILE",
        "python -IS sidecar run --config=FILE",
    ],
)
async def test_in_a_container_the_configuration_of_the_first_process_counts(
    start_sidecar: Starter, tmp_path: Path, words: str
) -> None:
    sidecar = await start_sidecar()
    config = written(tmp_path, admin={"port": sidecar.admin_address[1]})
    first = tmp_path / "cmdline"
    first.write_bytes("\0".join((*words.replace("FILE", config).split(), "")).encode())
    with patch.object(health, "FIRST_PROCESS", first):
        assert (0, "ready\n", "") == await here("health")


@pytest.mark.parametrize("words", ["/sbin/init", "nginx -c FILE", "sidecar check -c FILE", "sidecar run", ""])
def test_another_first_process_names_no_configuration(tmp_path: Path, words: str) -> None:
    first = tmp_path / "cmdline"
    first.write_bytes("\0".join((*words.split(), "")).encode())
    assert health.config_of(first) is None


def test_a_first_process_that_cannot_be_read_names_none(tmp_path: Path) -> None:
    assert health.config_of(tmp_path / "nobody") is None
