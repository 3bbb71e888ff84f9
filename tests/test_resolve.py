"""Names that the system's resolver never answers: they cost their own callers time, and nobody else."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sidecar.failures import AttemptFailed
from sidecar.upstream import resolve, system_lookup
from sidecar.upstream.resolve import Resolver
from tests.conftest import Starter, UpstreamStarter
from tests.doubles.upstream import answer, once

SHORT = 0.05


class System:
    """A `getaddrinfo` that answers at once, never, or with a failure, and its clock."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.failure: Exception | None = None
        self.silent = ("silent",)
        self.answers = threading.Event()
        self.time = 1000.0

    def getaddrinfo(self, host: str, port: int, **options: Any) -> list[Any]:
        self.asked.append(host)
        if host.startswith(self.silent):
            self.answers.wait(30)
        if self.failure is not None:
            raise self.failure
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    def now(self) -> float:
        return self.time


@pytest.fixture
def system() -> Iterator[System]:
    made = System()
    yield made
    made.answers.set()


@pytest.fixture
def resolver(system: System, monkeypatch: pytest.MonkeyPatch) -> Resolver:
    monkeypatch.setattr(system_lookup, "MOST_THREADS", 5)
    monkeypatch.setattr(system_lookup, "FOR_KNOWN_NAMES", 2)
    monkeypatch.setattr(system_lookup, "MOST_WAITING", 3)
    monkeypatch.setattr(resolve, "LOOKUP_TIMEOUT", SHORT)
    monkeypatch.setattr(resolve, "STALE_PATIENCE", SHORT)
    return Resolver(now=system.now, getaddrinfo=system.getaddrinfo)


def threads(resolver: Resolver) -> int:
    assert isinstance(resolver._lookup, system_lookup.SystemLookup)
    return resolver._lookup.threads


async def found(resolver: Resolver, host: str, port: int = 80) -> list[tuple[str, int]]:
    return [info[4] for info in await resolver.addresses(host, port)]


async def why_not(resolver: Resolver, host: str) -> str:
    with pytest.raises(AttemptFailed) as failed:
        await resolver.addresses(host, 80)
    assert "DNS_FAILURE" == failed.value.code
    return failed.value.message


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_question_without_an_answer_ends_in_its_time(resolver: Resolver, system: System) -> None:
    told = await why_not(resolver, "silent.test")
    assert "the name silent.test could not be resolved: the name server has not answered for 0.05 s" == told


async def test_a_question_that_is_still_open_takes_no_second_thread_and_nobody_waits_for_it_again(
    resolver: Resolver, system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    await why_not(resolver, "silent.test")
    system.time += 20
    monkeypatch.setattr(resolve.asyncio, "wait", _without_waiting(asyncio.wait))
    for _ in range(5):
        assert "has not answered for 20 s" in await why_not(resolver, "silent.test")
    assert (["silent.test"], 1) == (system.asked, threads(resolver))


def _without_waiting(wait: Any) -> Any:
    async def checked(tasks: Any, *, timeout: float) -> Any:
        assert 0 == timeout
        return await wait(tasks, timeout=timeout)

    return checked


async def test_an_answer_that_comes_late_is_used_all_the_same(resolver: Resolver, system: System) -> None:
    await why_not(resolver, "silent.test")
    system.answers.set()
    await until(lambda: not threads(resolver))
    assert [("127.0.0.1", 80)] == await found(resolver, "silent.test")
    assert ["silent.test"] == system.asked


async def test_one_question_serves_all_who_ask_on_whatever_port(resolver: Resolver, system: System) -> None:
    ports = range(80, 100)
    answers = await asyncio.gather(*(found(resolver, "a.test", port) for port in ports))
    assert [[("127.0.0.1", port)] for port in ports] == answers
    assert ["a.test"] == system.asked


async def test_silent_names_leave_threads_for_names_that_are_known(resolver: Resolver, system: System) -> None:
    await found(resolver, "healthy.test")
    resolver.configured = {"configured.test"}
    waiting = [asyncio.create_task(why_not(resolver, f"silent{n}.test")) for n in range(6)]
    await until(lambda: threads(resolver) == 3)
    system.time += resolve.FRESH_FOR
    resolver.failed("healthy.test", 80)
    system.asked.clear()
    assert [("127.0.0.1", 80)] == await found(resolver, "healthy.test")
    assert [("127.0.0.1", 80)] == await found(resolver, "configured.test")
    assert ["healthy.test", "configured.test"] == system.asked
    await asyncio.gather(*waiting)
    assert 3 == threads(resolver)


async def test_more_names_than_can_wait_are_told_so_at_once(resolver: Resolver, system: System) -> None:
    waiting = [asyncio.create_task(why_not(resolver, f"silent{n}.test")) for n in range(6)]
    await until(lambda: threads(resolver) == 3)
    assert "too many other names wait" in await why_not(resolver, "another.test")
    await asyncio.gather(*waiting)


async def test_a_name_that_waited_for_a_thread_gets_one_when_another_ends(resolver: Resolver, system: System) -> None:
    waiting = [asyncio.create_task(why_not(resolver, f"silent{n}.test")) for n in range(3)]
    await until(lambda: threads(resolver) == 3)
    behind = asyncio.create_task(found(resolver, "behind.test"))
    await asyncio.sleep(0)
    system.answers.set()
    assert [("127.0.0.1", 80)] == await behind
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_name_that_nobody_can_be_waiting_for_any_more_takes_no_thread(
    resolver: Resolver, system: System
) -> None:
    waiting = [asyncio.create_task(why_not(resolver, f"silent{n}.test")) for n in range(4)]
    await asyncio.gather(*waiting)
    system.time += 1
    system.answers.set()
    await until(lambda: not threads(resolver))
    assert ["silent0.test", "silent1.test", "silent2.test"] == sorted(system.asked)
    system.time += 1
    assert [("127.0.0.1", 80)] == await found(resolver, "silent3.test")


async def test_a_machine_without_threads_is_a_failure_of_the_name(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    assert "no thread could be started" in await why_not(resolver, "a.test")
    monkeypatch.undo()
    assert 0 == threads(resolver)


@pytest.mark.parametrize(
    "failure",
    [socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), OSError(24, "Too many open files")],
)
async def test_the_last_answer_stays_good_while_the_name_server_fails(
    resolver: Resolver, system: System, failure: Exception
) -> None:
    told: list[tuple[str, str]] = []
    resolver.on_stale = lambda *what: told.append(what)
    await found(resolver, "a.test")
    system.failure = failure
    for _ in range(3):
        system.time += resolve.FRESH_FOR
        assert [("127.0.0.1", 80)] == await found(resolver, "a.test")
        await until(lambda: not threads(resolver))
    assert [("a.test", failure.strerror)] == told
    system.time += resolve.STALE_FOR
    assert str(failure.strerror) in await why_not(resolver, "a.test")
    system.failure = None
    assert [("127.0.0.1", 80)] == await found(resolver, "a.test")


async def test_the_last_answer_stays_good_while_the_name_server_is_silent(resolver: Resolver, system: System) -> None:
    await found(resolver, "a.test")
    system.silent = ("a",)
    system.time += resolve.FRESH_FOR
    resolver.failed("a.test", 80)
    for _ in range(5):
        assert [("127.0.0.1", 80)] == await found(resolver, "a.test")
        system.time += resolve.ASK_AGAIN_AFTER
    assert 2 == len(system.asked)


async def test_a_name_that_is_said_not_to_exist_has_no_last_answer(resolver: Resolver, system: System) -> None:
    await found(resolver, "a.test")
    system.failure = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    system.time += resolve.FRESH_FOR
    assert "Name or service not known" in await why_not(resolver, "a.test")
    assert "Name or service not known" in await why_not(resolver, "a.test")


async def test_a_name_that_is_asked_for_is_not_forgotten_for_others(
    resolver: Resolver, system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "_REMEMBERED_NAMES", 2)
    await why_not(resolver, "silent.test")
    for name in ("a.test", "b.test", "c.test"):
        await found(resolver, name)
    await why_not(resolver, "silent.test")
    assert 1 == system.asked.count("silent.test")
    assert 2 == len(resolver._names)


async def test_closing_waits_for_nothing(resolver: Resolver, system: System) -> None:
    waiting = asyncio.create_task(resolver.addresses("silent.test", 80))
    await until(lambda: threads(resolver))
    question = resolver._names["silent.test"].asking
    assert question is not None
    resolver.close()
    await asyncio.wait((question,))
    assert question.cancelled()
    waiting.cancel()


async def test_eight_silent_names_take_nothing_from_a_healthy_upstream(
    start_sidecar: Starter, start_upstream: UpstreamStarter, system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = await start_upstream(once(answer(b"ok", "200 OK", "Connection: close")))
    monkeypatch.setattr(socket, "getaddrinfo", system.getaddrinfo)
    monkeypatch.setattr(resolve, "FRESH_FOR", 0.0)
    sidecar = await start_sidecar(policies={"default": {"max_attempts": 1}})
    for n in range(8):
        await (await sidecar.app()).send(f"GET http://silent{n}.test/ HTTP/1.1\r\nHost: silent{n}.test\r\n\r\n")
    await until(lambda: len(system.asked) == 8)
    for _ in range(7):
        reply = await (await sidecar.app()).ask(
            f"GET http://healthy.test:{upstream.port}/ HTTP/1.1\r\nHost: healthy.test\r\n\r\n"
        )
        assert 200 == reply.status
    assert (7, 7) == (system.asked.count("healthy.test"), upstream.connections)


async def test_a_name_that_is_used_on_is_told_once_in_the_log(
    start_sidecar: Starter, start_upstream: UpstreamStarter, system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = await start_upstream(once(answer(b"ok", "200 OK", "Connection: close")))
    monkeypatch.setattr(socket, "getaddrinfo", system.getaddrinfo)
    monkeypatch.setattr(resolve, "FRESH_FOR", 0.0)
    monkeypatch.setattr(resolve, "ASK_AGAIN_AFTER", 0.0)
    sidecar = await start_sidecar()
    for n in range(4):
        if n == 1:
            system.failure = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        app = await sidecar.app()
        get = f"GET http://a.test:{upstream.port}/ HTTP/1.1\r\nHost: a.test\r\n\r\n"
        assert 200 == (await app.ask(get)).status
    assert 1 == sidecar.logged.getvalue().count("sidecar.dns.stale")


async def test_a_silent_name_behind_a_parent_proxy_is_left_to_it(
    start_sidecar: Starter, start_upstream: UpstreamStarter, system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only the proxy knows names, looking one up here must not cost the call."""
    parent = await start_upstream(once(answer(b"by the proxy")))
    monkeypatch.setattr(socket, "getaddrinfo", system.getaddrinfo)
    sidecar = await start_sidecar(
        upstreams={
            "u": {
                "hosts": ["silent.test"],
                "timeouts": {"connect": 2},
                "policy": "once",
                "egress_proxy": f"http://127.0.0.1:{parent.port}",
            }
        },
    )
    reply = await (await sidecar.app()).ask("GET http://silent.test/ HTTP/1.1\r\nHost: silent.test\r\n\r\n")
    assert (200, b"by the proxy") == (reply.status, reply.body)
