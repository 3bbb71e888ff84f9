"""The files the configuration refers to: do they exist, can they be read, do they hold what they should?

Asked once, when the configuration is loaded, so that a missing certificate is found before the first request
needs it. Looks for PEM markers, and whether a key is that of its certificate; all else about them is decided when they
are used.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

from config.checks import Contradiction, KeyPath
from config.model import Settings

_LARGEST_PEM = 16 * 1024 * 1024
_CERTIFICATE = (
    b"-----BEGIN CERTIFICATE-----",
    b"-----BEGIN TRUSTED CERTIFICATE-----",
    b"-----BEGIN X509 CERTIFICATE-----",
)
_PRIVATE_KEY = b"PRIVATE KEY-----"
_ANOTHER_KEY = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
_ENCRYPTED = (b"-----BEGIN ENCRYPTED PRIVATE KEY-----", b"Proc-Type: 4,ENCRYPTED")


class UnreadableFile(Exception):
    """A file that cannot be read; the message says why, in words."""


def read_file(path: Path, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes; raises UnreadableFile with a sentence."""
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except (OSError, ValueError) as error:
        raise UnreadableFile(_why(error)) from None
    if len(content) > limit:
        raise UnreadableFile(f"the file is larger than {limit // 1024} KiB; is it the right one?")
    return content


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return "the file does not exist; check the path (relative ones start at the working directory)"
    if isinstance(error, PermissionError):
        return "the file may not be read by this user; check its owner and mode (`ls -l`)"
    if isinstance(error, IsADirectoryError):
        return "this is a directory; name a file"
    if isinstance(error, NotADirectoryError):
        return "a part of the path is a file, not a directory"
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        return "the path is a loop of symbolic links"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return "the path is too long"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else "the path is not valid"
    return f"the file cannot be read: {reason}"


def certificate_files(settings: Settings) -> Iterator[Path]:
    """Files that somebody renews under their names."""
    upstreams = settings.upstreams.values()
    for pair in (settings.admin.tls, settings.listen.tls, *(upstream.client_cert for upstream in upstreams)):
        if pair is not None:
            yield from {pair.cert, pair.key}
    yield from (upstream.ca_bundle for upstream in upstreams if upstream.ca_bundle is not None)


def file_problems(settings: Settings) -> Iterator[Contradiction]:
    """Every certificate or key file that cannot do its work."""
    if settings.admin.tls is not None:
        yield from _pair_problems(("admin", "tls"), settings.admin.tls.cert, settings.admin.tls.key)
    if settings.listen.tls is not None:
        yield from _pair_problems(("listen", "tls"), settings.listen.tls.cert, settings.listen.tls.key)
    for name, upstream in settings.upstreams.items():
        if upstream.ca_bundle is not None:
            path: KeyPath = ("upstreams", name, "ca_bundle")
            yield from _missing_parts(path, upstream.ca_bundle, certificate=True)
        if upstream.client_cert is not None:
            path = ("upstreams", name, "client_cert")
            yield from _pair_problems(path, upstream.client_cert.cert, upstream.client_cert.key)


def _pair_problems(path: KeyPath, cert: Path, key: Path) -> Iterator[Contradiction]:
    """A certificate and its key, in two files or in one."""
    one_file = cert == key
    found = [*_missing_parts(path if one_file else (*path, "cert"), cert, certificate=True, key=one_file)]
    if not one_file:
        found += _missing_parts((*path, "key"), key, key=True)
    yield from found
    if not found and not _belong_together(cert, key):
        message = f"the key is not that of the certificate {cert}; name the two that were made together"
        yield Contradiction(path if one_file else (*path, "key"), message, (path,))


def _belong_together(cert: Path, key: Path) -> bool:
    """Whatever else may be wrong with them is told when they are used."""
    import ssl  # not for those who use none

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except ssl.SSLError as error:
        return error.reason not in _ANOTHER_KEY
    except OSError:
        pass
    return True


def _missing_parts(
    path: KeyPath, file: Path, *, certificate: bool = False, key: bool = False
) -> Iterator[Contradiction]:
    try:
        content = read_file(file, _LARGEST_PEM)
    except UnreadableFile as unreadable:
        yield Contradiction(path, str(unreadable), (path,))
        return
    if certificate and not any(marker in content for marker in _CERTIFICATE):
        yield Contradiction(path, "the file holds no PEM certificate (`-----BEGIN CERTIFICATE-----`)", (path,))
    if key and _PRIVATE_KEY not in content:
        yield Contradiction(path, "the file holds no PEM private key (`-----BEGIN PRIVATE KEY-----`)", (path,))
    elif key and any(marker in content for marker in _ENCRYPTED):
        message = "the private key needs a passphrase, which nobody can type here; decrypt it with `openssl pkey`"
        yield Contradiction(path, message, (path,))
