"""The digest of a ClientHello: of real ones, of every part of them, and of some with every fault."""

from __future__ import annotations

import ssl

import pytest

from sidecar.hello import Incomplete, digest_of_hello, is_decided

GREASE = (0x0A0A, 0x1A1A, 0xDADA, 0xFAFA)
CIPHERS, VERSIONS = (0x1301, 0x1302), (0x0304, 0x0303)


def real(context: ssl.SSLContext | None = None, name: str = "api.test") -> bytes:
    context = context or ssl.create_default_context()
    outgoing = ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def vector(width: int, data: bytes) -> bytes:
    return len(data).to_bytes(width, "big") + data


def words(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(2, "big") for number in numbers)


def alpn(*names: bytes) -> tuple[int, bytes]:
    return 16, vector(2, b"".join(vector(1, name) for name in names))


def versions(*numbers: int) -> tuple[int, bytes]:
    return 43, vector(1, words(*numbers))


def body(ciphers: tuple[int, ...] = CIPHERS, extensions: tuple[tuple[int, bytes], ...] = (), random: int = 7) -> bytes:
    listed = b"".join(words(kind) + vector(2, content) for kind, content in extensions)
    start = b"\x03\x03" + bytes((random,)) * 32 + vector(1, bytes((random,)) * 32)
    return start + vector(2, words(*ciphers)) + b"\x01\x00" + vector(2, listed)


def hello(message: bytes, in_records_of: int = 16_384) -> bytes:
    whole = b"\x01" + vector(3, message)
    pieces = (whole[at : at + in_records_of] for at in range(0, len(whole), in_records_of))
    return b"".join(b"\x16\x03\x01" + vector(2, piece) for piece in pieces)


USUAL = (versions(*VERSIONS), alpn(b"h2", b"http/1.1"), (10, words(2, 29)))


def usual(ciphers: tuple[int, ...] = CIPHERS, *extensions: tuple[int, bytes], random: int = 7) -> str | None:
    return digest_of_hello(hello(body(ciphers, extensions or USUAL, random)))


@pytest.mark.parametrize("data", [real(), hello(body(extensions=USUAL)), hello(body(extensions=USUAL), 40)])
def test_a_hello_that_breaks_off_anywhere_needs_more_bytes(data: bytes) -> None:
    for end in range(len(data)):
        with pytest.raises(Incomplete):
            digest_of_hello(data[:end])
        assert not is_decided(data[:end])
    assert digest_of_hello(data) is not None
    assert digest_of_hello(data) == digest_of_hello(data + b"\x14\x03\x03\x00\x01\x01"), "what follows does not matter"


def test_a_message_that_ends_before_its_fields_do_has_no_digest() -> None:
    whole = body(extensions=USUAL)
    without_extensions = len(body()) - 2  # which is how clients of old ended
    assert digest_of_hello(hello(whole)) is not None
    for end in range(1, len(whole)):
        assert (end == without_extensions) is (digest_of_hello(hello(whole[:end])) is not None)


def test_any_single_wrong_byte_does_no_harm() -> None:
    data = bytearray(hello(body(extensions=USUAL)))
    for at in range(len(data)):
        for wrong in (0, 255, data[at] ^ 1):
            try:
                found = digest_of_hello(bytes(data[:at]) + bytes((wrong,)) + bytes(data[at + 1 :]))
            except Incomplete:
                continue
            assert found is None or 12 == len(found)


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n", b"\x15\x03\x01\x00\x02", b"\x16\x02\x01", b"\x16\x03\x01\x00\x00", b"\x16\x03\x01\x00\x04\x02",
     b"\x16\x03\x01\x00\x04\x01\x00\x00\x00", b"\x16\x03\x01\x00\x04\x01\xff\xff\xff", b"\x80\x2e\x01"],
)  # fmt: skip
def test_what_is_no_hello_is_known_for_that_at_once(data: bytes) -> None:
    assert is_decided(data)
    assert None is digest_of_hello(data)


def test_the_same_client_has_the_same_digest_every_time_and_for_every_host() -> None:
    assert digest_of_hello(real()) == digest_of_hello(real()) == digest_of_hello(real(name="other.test"))


def test_in_how_many_records_it_comes_does_not_matter() -> None:
    whole = body(extensions=USUAL)
    assert 1 == len({digest_of_hello(hello(whole, size)) for size in (1, 3, 50, 16_384)})


def test_versions_ciphers_and_protocols_of_a_real_client_each_make_another() -> None:
    old, few, named = (ssl.create_default_context() for _ in range(3))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    few.set_ciphers("ECDHE-RSA-AES128-GCM-SHA256")
    named.set_alpn_protocols(["http/1.1"])
    assert 4 == len({digest_of_hello(real(context)) for context in (None, old, few, named)})


@pytest.mark.parametrize("grease", GREASE)
def test_grease_is_not_part_of_it(grease: int) -> None:
    greased = (versions(grease, *VERSIONS), (grease, b"\0"), *USUAL[1:])
    assert usual() == usual((grease, *CIPHERS), *greased)
    assert usual() != usual((0x0A1A, *CIPHERS)), "that is none"


def test_what_changes_from_call_to_call_is_not_part_of_it() -> None:
    assert usual() == usual(random=9)
    assert usual() == usual(CIPHERS, *reversed(USUAL)), "browsers shuffle their extensions"
    assert usual() == usual(CIPHERS, *USUAL, (21, b"\0" * 40), (41, b"ticket"), (42, b"")), "as when resuming"


@pytest.mark.parametrize(
    "extensions",
    [USUAL[1:], (*USUAL, (23, b"")), (versions(0x0304), *USUAL[1:]), (USUAL[0], alpn(b"http/1.1", b"h2"), USUAL[2])],
)
def test_what_software_is_made_of_is_part_of_it(extensions: tuple[tuple[int, bytes], ...]) -> None:
    assert usual() != usual(CIPHERS, *extensions)
    assert usual() != usual(tuple(reversed(CIPHERS)))
