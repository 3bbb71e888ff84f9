"""Who is at the other end of a connection on this machine: the kernel's table, and the programs behind it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.policy.demotion import Program
from sidecar.socket_owner import Owner, SocketOwners, in_kernel_words, on_loopback, owner_among, owner_by_diagnosis

HEADER = b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LINE = (
    b"   3: 0100007F:C350 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1000        0 424242 1 "
    b"0000000000000000 20 4 30 10 -1\n"
)
OTHER_WAY = LINE.replace(b"0100007F:C350 0100007F:1F90", b"0100007F:1F90 0100007F:C350")
APP, LISTENER = b"0100007F:C350", b"0100007F:1F90"
CALLS = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as held:
    held.sendall(b"x")
    sys.stdin.read()
"""

needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="there is no /proc here")
little_endian = pytest.mark.skipif(sys.byteorder == "big", reason="the lines are of a machine of the other kind")


@little_endian
@pytest.mark.parametrize(
    ("endpoint", "mapped", "written"),
    [
        (("127.0.0.1", 8080), False, b"0100007F:1F90"),
        (("10.1.2.3", 80), False, b"0302010A:0050"),
        (("127.0.0.1", 8080), True, b"0000000000000000FFFF00000100007F:1F90"),
        (("::1", 443), False, b"00000000000000000000000001000000:01BB"),
    ],
)
def test_endpoints_are_written_as_the_kernel_writes_them(
    endpoint: tuple[str, int], mapped: bool, written: bytes
) -> None:
    assert written == in_kernel_words(endpoint, mapped=mapped)


def test_the_owner_is_that_of_the_callers_end() -> None:
    table = [HEADER, OTHER_WAY.replace(b"424242", b"171717"), LINE]
    assert Owner(1000, 424242) == owner_among(table, APP, LISTENER)
    assert None is owner_among(table, b"0100007F:C351", LISTENER)


@pytest.mark.parametrize(
    "line",
    [
        LINE.replace(b" 01 ", b" 06 "),  # TIME_WAIT
        LINE.replace(b" 424242 ", b" 0 "),  # held by nobody
        LINE.replace(b" 424242 ", b" none "),
        LINE.replace(b" 1000 ", b" root "),
    ],
)
def test_a_connection_that_nobody_holds_has_no_owner(line: bytes) -> None:
    assert None is owner_among([HEADER, line], APP, LISTENER)


def test_a_line_that_breaks_off_anywhere_is_passed_over() -> None:
    inode_from = LINE.index(b"424242")
    for end in range(inode_from + 1):
        assert None is owner_among([LINE[:end]], APP, LISTENER)
        assert Owner(1000, 424242) == owner_among([LINE[:end], LINE], APP, LISTENER)


@pytest.mark.parametrize(
    ("address", "shown"),
    [("127.0.0.1", "127.0.0.1"), ("127.9.9.9", "127.9.9.9"), ("::1", "::1"), ("::ffff:127.0.0.1", "127.0.0.1"),
     ("10.0.0.1", None), ("::ffff:10.0.0.1", None), ("", None), ("/run/app.sock", None)],
)  # fmt: skip
def test_only_loopback_is_looked_up(address: str, shown: str | None) -> None:
    assert shown == on_loopback(address)


# ---- real connections --------------------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "app.py"
    file.write_text(CALLS)
    return str(file)


def program(
    listener: socket.socket, *command: str, owners: SocketOwners | None = None, **environ: str
) -> Program | None:
    """Of a process that is started with this, calls, and is looked up while it holds the connection."""
    listener.settimeout(20)
    ours = listener.getsockname()[:2]
    whole = [sys.executable, *command, ours[0], str(ours[1])]
    with subprocess.Popen(whole, stdin=subprocess.PIPE, env={**os.environ, **environ}) as started:
        accepted, peer = listener.accept()
        with accepted:
            accepted.settimeout(20)
            assert b"x" == accepted.recv(1)
            found = (owners or SocketOwners()).program_at(peer[:2], ours)
        started.communicate(timeout=20)
    return found


@needs_proc
def test_a_program_is_known_by_its_file_and_its_whole_command_and_not_by_its_pid(
    listener: socket.socket, script: str
) -> None:
    first, again = program(listener, script), program(listener, script)
    assert first is not None
    assert first == again
    assert first.name == f"{Path(os.path.realpath(sys.executable)).name} app.py"
    other = program(listener, "-X", "utf8", script)
    assert other is not None
    assert first.digest != other.digest


@needs_proc
def test_the_same_command_with_other_trusted_roots_is_another_program(listener: socket.socket, script: str) -> None:
    without = program(listener, script)
    other = program(listener, script, SSL_CERT_FILE="/bundle.pem")
    alike = program(listener, script, UNRELATED="1")
    assert without is not None and other is not None
    assert without == alike
    assert (without.name, False) == (other.name, without.digest == other.digest)


@needs_proc
def test_arguments_are_in_the_digest_and_not_in_the_name(listener: socket.socket) -> None:
    found = program(listener, "-c", CALLS)
    assert found is not None
    assert found.name == Path(os.path.realpath(sys.executable)).name


@needs_proc
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_kernel_and_its_table_name_the_same_owner(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listening = socket.create_server((address, 0), family=family)
    except OSError:
        pytest.skip("there is no IPv6 here")
    with listening, socket.create_connection(listening.getsockname()[:2]) as app:
        peer, ours = app.getsockname()[:2], listening.getsockname()[:2]
        expected = Owner(os.getuid(), os.fstat(app.fileno()).st_ino)
        with open("/proc/net/tcp6" if ":" in address else "/proc/net/tcp", "rb") as table:
            assert expected == owner_among(table, in_kernel_words(peer), in_kernel_words(ours))
        assert owner_by_diagnosis(peer, ours) in (expected, None)  # a sandbox may not answer
        assert None is owner_by_diagnosis((address, 1), ours), "whoever listens is not who calls"
    assert None is owner_by_diagnosis(peer, ours)


@needs_proc
def test_a_kernel_that_does_not_answer_is_read_instead(
    listener: socket.socket, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = program(listener, script)
    monkeypatch.setattr("sidecar.socket_owner._NETLINK_SOCK_DIAG", 31)  # there is no such protocol
    assert asked == program(listener, script)
    assert asked is not None


@needs_proc
def test_a_connection_of_ipv4_from_a_socket_of_ipv6_is_found(listener: socket.socket) -> None:
    ours = listener.getsockname()
    try:
        app = socket.socket(socket.AF_INET6)
        app.connect(("::ffff:127.0.0.1", ours[1]))
    except OSError:
        pytest.skip("there is no IPv6 here")
    with app:
        accepted, peer = listener.accept()
        with accepted:
            assert None is not SocketOwners().program_at(peer, ours)


@needs_proc
def test_ipv6_is_looked_up_too(script: str) -> None:
    try:
        listening = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("there is no IPv6 here")
    with listening:
        found = program(listening, script)
    assert found is not None
    assert found.name.endswith(" app.py")


@needs_proc
def test_the_search_ends_at_its_bounds_without_an_answer(listener: socket.socket, script: str) -> None:
    assert None is program(listener, script, owners=SocketOwners(links=0))
    assert None is program(listener, script, owners=SocketOwners(processes=0))


@needs_proc
def test_who_was_found_lately_is_found_without_a_search(listener: socket.socket) -> None:
    ours = listener.getsockname()
    owners = SocketOwners()
    with socket.create_connection(ours) as one, socket.create_connection(ours) as other:
        found = owners.program_at(one.getsockname(), ours)
        assert found is not None
        owners._processes = 0
        assert found == owners.program_at(other.getsockname(), ours)


def test_without_such_a_table_nothing_is_known(listener: socket.socket, tmp_path: Path) -> None:
    ours = listener.getsockname()
    with socket.create_connection(ours) as app:
        assert None is SocketOwners(tmp_path).program_at(app.getsockname(), ours)
