"""`sidecar run -- CMD`: the command's environment, input, signals, last calls and exit code; `env`, `ca`, `password`."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sidecar.__main__ import main
from sidecar.guard import hashed
from sidecar.variables import APPENDS, REPLACES
from tests.conftest import UpstreamStarter
from tests.doubles.upstream import Talk, always, answer
from tests.e2e.test_clients import environment, sidecar_run

PYTHON = sys.executable
PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"


class Told(NamedTuple):
    """What a command said in this process."""

    returncode: int
    stdout: str
    stderr: str


Say = Callable[..., Told]


@pytest.fixture
def sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Say]:
    """`sidecar("ca", "show")` in a folder of its own."""
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    umask = os.umask(0o022)

    def say(*arguments: str, given: str = "") -> Told:
        monkeypatch.setattr(sys, "stdin", io.StringIO(given))
        code = main(list(arguments))
        return Told(code, *capsys.readouterr())

    yield say
    os.umask(umask)


async def test_a_command_gets_every_variable_and_a_bundle_that_has_the_systems_roots_too(tmp_path: Path) -> None:
    roots = tmp_path / "roots.pem"
    roots.write_text("-----BEGIN CERTIFICATE-----\nb3RoZXI=\n-----END CERTIFICATE-----\n")
    given = {"SSL_CERT_FILE": str(roots), "NO_PROXY": "corp.test", "NODE_EXTRA_CA_CERTS": str(roots)}
    command = ("--intercept", "api.test", "--", PYTHON, "-c", PRINT_ENVIRONMENT)
    ran = await sidecar_run(tmp_path, *command, environ=given)
    assert 0 == ran.code, ran.err
    env = json.loads(ran.out)
    (url,) = {env[name] for pair in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY") for name in (pair, pair.lower())}
    assert url.startswith("http://127.0.0.1:")
    assert not url.endswith(":4140")
    assert "corp.test,localhost,127.0.0.1,::1" == env["NO_PROXY"] == env["no_proxy"]
    replaced = {"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "PIP_CERT", "GIT_SSL_CAINFO"}
    (bundle,) = {env[name] for name in replaced}
    own = (tmp_path / "sidecar-data" / "ca" / "ca.pem").read_text()
    assert str(tmp_path / "sidecar-data" / "ca" / "bundle.pem") == bundle
    assert own + roots.read_text() == (tmp_path / "sidecar-data" / "ca" / "bundle.pem").read_text()
    assert str(tmp_path / "sidecar-data" / "ca" / "ca.pem") == env["DENO_CERT"]
    assert bundle == env["NODE_EXTRA_CA_CERTS"], "what the app had added is kept"
    assert not [name for name in env if name.startswith("SIDECAR__")]


async def test_without_interception_trust_stays_as_it_is(tmp_path: Path) -> None:
    ran = await sidecar_run(tmp_path, "--", PYTHON, "-c", PRINT_ENVIRONMENT)
    env = json.loads(ran.out)
    assert not [name for name in env if name in (*REPLACES, *APPENDS)]
    assert "HTTPS_PROXY" in env
    assert not (tmp_path / "sidecar-data" / "ca").exists()


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ((PYTHON, "-c", "raise SystemExit(7)"), 7),
        (("sh", "-c", "kill -9 $$"), 137),
        (("no-such-program",), 127),
        (("/",), 126),
    ],
)
async def test_the_exit_code_is_the_commands(tmp_path: Path, command: tuple[str, ...], code: int) -> None:
    ran = await sidecar_run(tmp_path, "--", *command)
    assert code == ran.code, ran.err
    assert (code not in (126, 127)) == ("no call came through" in ran.err)  # what never ran need not be told of


async def test_nothing_behind_the_dashes_is_wrong_use(tmp_path: Path) -> None:
    ran = await sidecar_run(tmp_path, "--")
    assert (2, True) == (ran.code, "no command" in ran.err)


@pytest.mark.parametrize(
    ("host", "said"), [("*.api.test", "one by one"), ("http://x", "without http"), ("a.wild.test", "upstream wild")]
)
async def test_what_cannot_be_intercepted_is_told_before_anything_starts(tmp_path: Path, host: str, said: str) -> None:
    config = tmp_path / "sidecar.yaml"
    config.write_text("upstreams: {wild: {hosts: ['*.wild.test']}}")
    ran = await sidecar_run(tmp_path, "-c", str(config), "--intercept", host, "--", "touch", "ran")
    assert (2, True) == (ran.code, said in ran.err), ran.err
    assert not (tmp_path / "ran").exists()


async def test_a_sidecar_that_cannot_start_does_not_start_the_command(tmp_path: Path) -> None:
    (tmp_path / "sidecar-data").write_text("in the way")
    ran = await sidecar_run(tmp_path, "--", "touch", "ran")
    assert (1, True) == (ran.code, "state_dir" in ran.err)
    assert not (tmp_path / "ran").exists()


async def test_an_authority_that_cannot_be_used_does_not_keep_the_command_from_running(tmp_path: Path) -> None:
    (tmp_path / "sidecar-data" / "ca").mkdir(parents=True)
    (tmp_path / "sidecar-data" / "ca" / "authority.pem").write_text("scratched")
    ran = await sidecar_run(tmp_path, "--intercept", "api.test", "--", PYTHON, "-c", PRINT_ENVIRONMENT)
    assert 0 == ran.code, ran.err
    assert "sidecar ca rotate" in ran.err
    assert "SSL_CERT_FILE" not in json.loads(ran.out)


async def started(folder: Path, program: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(PYTHON, "-m", "sidecar", "run", "--", PYTHON, "-u", "-c", program),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=folder,
        env=environment(),
        start_new_session=True,  # no terminal
    )


async def ended(process: asyncio.subprocess.Process) -> int:
    try:
        return await asyncio.wait_for(process.wait(), 40)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def line_of(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    return await asyncio.wait_for(process.stdout.readline(), 40)


async def test_standard_input_is_the_commands(tmp_path: Path) -> None:
    process = await started(tmp_path, "import sys; print(sys.stdin.read()[::-1])")
    assert process.stdin is not None
    process.stdin.write(b"olleh")
    process.stdin.close()
    assert b"hello\n" == await line_of(process)
    assert 0 == await ended(process)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
async def test_signals_are_the_commands(tmp_path: Path, number: signal.Signals) -> None:
    program = (
        f"import signal, sys, time\nsignal.signal({int(number)}, lambda *_: sys.exit(5))\n"
        "print('ready')\nwhile True: time.sleep(0.05)"
    )
    process = await started(tmp_path, program)
    assert b"ready\n" == await line_of(process)
    process.send_signal(number)
    assert 5 == await ended(process)


async def test_the_last_call_of_a_command_is_finished_after_its_end(
    start_upstream: UpstreamStarter, tmp_path: Path
) -> None:
    """A grandchild still talks when the command has ended."""

    async def slow(talk: Talk) -> None:
        await talk.read_request()
        await asyncio.sleep(1.0)
        await talk.send(answer(b"late but whole"))

    upstream = await start_upstream(slow)
    call = f"import urllib.request as u; open('got', 'wb').write(u.urlopen('http://api.test:{upstream.port}/').read())"
    config = tmp_path / "sidecar.yaml"
    config.write_text(json.dumps({"upstreams": {"api": {"hosts": ["api.test"], "endpoints": [upstream.url]}}}))
    shell = f'{PYTHON} -c "{call}" > /dev/null 2>&1 &\nsleep 0.1; while ! grep -q . asked; do sleep 0.05; done; exit 4'
    (tmp_path / "asked").write_text("")

    async def note() -> None:
        while not upstream.requests:
            await asyncio.sleep(0.01)
        (tmp_path / "asked").write_text("now")

    noting = asyncio.create_task(note())
    ran = await sidecar_run(tmp_path, "-c", str(config), "--", "sh", "-c", shell)
    await noting
    assert 4 == ran.code, ran.err
    for _ in range(1000):
        if (tmp_path / "got").exists() and (tmp_path / "got").read_bytes():
            break
        await asyncio.sleep(0.01)
    assert b"late but whole" == (tmp_path / "got").read_bytes()


async def test_a_listener_with_users_lets_its_own_command_in(start_upstream: UpstreamStarter, tmp_path: Path) -> None:
    upstream = await start_upstream(always(answer(b"fine")))
    config = tmp_path / "sidecar.yaml"
    keys: dict[str, Any] = {"listen": {"auth": {"users": {"me": hashed(b"secret")}}}}
    keys["upstreams"] = {"api": {"hosts": ["api.test"], "endpoints": [upstream.url]}}
    config.write_text(json.dumps(keys))
    call = "import urllib.request as u; print(u.urlopen('http://api.test/').read())"
    ran = await sidecar_run(tmp_path, "-c", str(config), "--", PYTHON, "-c", call)
    assert (0, b"b'fine'\n") == (ran.code, ran.out), ran.err


# ---- env, ca, password -------------------------------------------------------------------------------------------


def test_env_prints_what_a_shell_understands(sidecar: Say, tmp_path: Path) -> None:
    config = tmp_path / "it's.yaml"
    config.write_text(
        "listen: {port: 5140}\nstate_dir: it's here\nupstreams: {api: {hosts: [api.test], intercept: true}}"
    )
    told = sidecar("env", "-c", str(config))
    shell = subprocess.run(
        ["sh", "-c", f'{told.stdout}\necho "$https_proxy"; cat "$NODE_EXTRA_CA_CERTS"'],
        capture_output=True, text=True, check=True, cwd=tmp_path, env={"PATH": os.environ["PATH"]},
    ).stdout  # fmt: skip
    assert shell.startswith("http://127.0.0.1:5140\n-----BEGIN CERTIFICATE-----\n")
    as_json = json.loads(sidecar("env", "-c", str(config), "--json").stdout)
    assert str(tmp_path / "it's here" / "ca" / "bundle.pem") == as_json["SSL_CERT_FILE"]


def test_a_bundle_that_cannot_be_written_is_told_in_a_sentence(sidecar: Say, tmp_path: Path) -> None:
    config = tmp_path / "sidecar.yaml"
    config.write_text("state_dir: state\nupstreams: {api: {hosts: [api.test], intercept: true}}")
    (tmp_path / "state" / "ca" / "bundle.pem").mkdir(parents=True)
    told = sidecar("env", "-c", str(config))
    assert (1, "") == (told.returncode, told.stdout)
    assert "no bundle can be written to state/ca: Is a directory" in told.stderr


def test_env_without_a_port_says_what_to_do(sidecar: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDECAR__LISTEN__PORT", "0")
    told = sidecar("env")
    assert (1, True) == (told.returncode, "sidecar run -- CMD" in told.stderr)


def test_the_authority_is_shown_exported_and_rotated(sidecar: Say, tmp_path: Path) -> None:
    config = tmp_path / "sidecar.yaml"
    config.write_text("upstreams: {api: {hosts: [api.test, 10.0.0.7], intercept: true}}")
    none_yet = sidecar("ca", "show", "-c", str(config))
    assert (1, True) == (none_yet.returncode, "no authority" in none_yet.stderr)
    exported = sidecar("ca", "export", "-c", str(config)).stdout
    shown = json.loads(sidecar("ca", "show", "-c", str(config), "--json").stdout)
    assert ["10.0.0.7", "api.test"] == shown["hosts"]
    assert exported == (tmp_path / shown["file"]).read_text()
    assert exported == sidecar("ca", "export", "-c", str(config)).stdout, "it stays the same"
    assert 0 == sidecar("ca", "rotate", "-c", str(config)).returncode
    assert exported != sidecar("ca", "export", "-c", str(config)).stdout
    assert 0 == sidecar("ca", "export", "-c", str(config), "--bundle", "all.pem").returncode
    ssl.create_default_context(cafile=str(tmp_path / "all.pem"))


def test_without_anything_to_intercept_there_is_no_authority(sidecar: Say) -> None:
    for action in ("show", "export", "rotate"):
        told = sidecar("ca", action)
        assert 1 == told.returncode, action
        assert "intercept" in told.stderr


def test_other_hosts_mean_another_certificate_with_the_same_key(tmp_path: Path) -> None:
    from cryptography import x509

    from sidecar.authority import ensure

    first, replaced = ensure(tmp_path, ["a.test"])
    assert not replaced
    second, replaced = ensure(tmp_path, ["a.test", "b.test"])
    assert replaced
    assert first.certificate.public_key() == second.certificate.public_key()
    assert {"a.test", "b.test"} == second.hosts
    kept, replaced = ensure(tmp_path, ["b.test", "a.test"])
    assert (False, second.pem) == (replaced, kept.pem)
    assert isinstance(x509.load_pem_x509_certificate(kept.pem), x509.Certificate)


def test_a_password_is_hashed_and_an_empty_one_refused(sidecar: Say) -> None:
    told = sidecar("password", given="s3cret\n")
    assert (0, True) == (told.returncode, told.stdout.startswith("scrypt:16384:8:1$"))
    assert "s3cret" not in told.stdout
    assert 2 == sidecar("password", given="\n").returncode


# ---- what is said at the end -------------------------------------------------------------------------------------

CALLS = """
import os, socket, urllib.request
for path in ("/ok", "/flaky"):
    urllib.request.urlopen(os.environ["CALLED"] + path, timeout=10).read()
host, _, port = os.environ["HTTP_PROXY"].removeprefix("http://").partition(":")
with socket.create_connection((host, int(port)), timeout=10) as plain:
    plain.sendall(b"CONNECT api.test:9443 HTTP/1.1\\r\\nHost: api.test:9443\\r\\n\\r\\n")
    assert b" 403 " in plain.recv(65536)
"""


async def flaky_once(talk: Talk) -> None:
    while True:
        await talk.read_request()
        await talk.send(answer(b"", "503 Busy") if len(talk.upstream.requests) == 2 else answer())


async def test_the_end_says_how_the_calls_went_and_where_each_is_explained(
    start_upstream: UpstreamStarter, tmp_path: Path
) -> None:
    upstream = await start_upstream(flaky_once)
    config = tmp_path / "sidecar.yaml"
    config.write_text(json.dumps({"upstreams": {"api": {"route": "/api", "endpoints": [upstream.url]}}}))
    program = CALLS.replace('os.environ["CALLED"]', 'os.environ["HTTP_PROXY"] + "/api"')
    ran = await sidecar_run(tmp_path, "-c", str(config), "--", PYTHON, "-c", program, environ={"no_proxy": "*"})
    assert 0 == ran.code, ran.err
    last = ran.err.splitlines()[-1]
    assert last.startswith("sidecar: 3 calls, 1 recovered, 1 refused (EGRESS_DENIED: ")
    explained = tmp_path / last.rpartition("explained in ")[2]
    text = explained.read_text()
    assert text.index("/flaky") < text.index("api.test:9443")
    assert 0o600 == explained.stat().st_mode & 0o777


async def test_a_command_that_refuses_the_certificate_is_told_so(tmp_path: Path) -> None:
    refusing = (
        "import ssl, urllib.request, os; os.environ.pop('SSL_CERT_FILE'); urllib.request.urlopen('https://api.test')"
    )
    ran = await sidecar_run(tmp_path, "--intercept", "api.test", "--", PYTHON, "-c", refusing)
    assert (1, True) == (
        ran.code,
        "0 calls, a client refused our certificate, whose calls pass unopened" in ran.err.splitlines()[-1],
    )


async def test_a_command_that_calls_nobody_is_told_so(tmp_path: Path) -> None:
    ran = await sidecar_run(tmp_path, "--", "true")
    assert 0 == ran.code
    assert ran.err.splitlines()[-1].startswith("sidecar: no call came through the sidecar: ")


async def test_two_commands_in_one_folder_have_a_state_each(tmp_path: Path) -> None:
    first = await started(tmp_path, "print('up'); input()")
    assert b"up\n" == await line_of(first)
    second = await sidecar_run(tmp_path, "--", "true")
    assert (0, True) == (second.code, "keeps its state in sidecar-data-2; set `state_dir`" in second.err)
    assert first.stdin is not None
    first.stdin.write(b"\n")
    assert 0 == await ended(first)
    third = await sidecar_run(tmp_path, "--", "true")
    assert (0, False) == (third.code, "keeps its state in" in third.err)
