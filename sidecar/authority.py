"""The local certificate authority: made on first use, kept in `state_dir/ca`, good for the listed hosts and no others.

Law: the key never leaves `state_dir` (one file, 0600, replaced as a whole). The authority's own certificate is
constrained to the hosts it was made for, so that a stolen key opens nothing else, and is made anew, with the same key,
when those change or its time runs out. Leaf certificates live for hours and share a key that is never written down.
Imports `cryptography`, so import this file only where interception is really wanted.
"""

from __future__ import annotations

import datetime
import fcntl
import ipaddress
import os
import ssl
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sidecar.durable.disk import Disk
from sidecar.handshakes import TellingContext

FOLDER = "ca"
CERTIFICATE = "ca.pem"
"""The certificate alone, for whoever has to trust it."""
WHOLE = f"{FOLDER}/authority.pem"
"""In `state_dir`: the key and the certificate."""
_LASTS = datetime.timedelta(days=365)
_RENEWED_BEFORE = datetime.timedelta(days=30)
_LEAF_LASTS = datetime.timedelta(hours=24)
_CLOCKS_DIFFER = datetime.timedelta(hours=1)
_PEM = serialization.Encoding.PEM


class NoAuthority(Exception):
    """Why there is none, and what to do."""


class Authority:
    """One authority: its key, its certificate, and the hosts it may speak for. Use `ensure` or `read`."""

    def __init__(
        self, folder: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate, exposed: str | None = None
    ) -> None:
        self.folder = folder
        self.exposed = exposed
        """What to say when others could read the key until now."""
        self._key = key
        self.certificate = certificate
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(_PEM)

    @property
    def fingerprint(self) -> str:
        return self.certificate.fingerprint(hashes.SHA256()).hex(":").upper()

    @property
    def hosts(self) -> frozenset[str]:
        """Names and addresses that its constraints permit."""
        constraints = self.certificate.extensions.get_extension_for_class(x509.NameConstraints).value
        return frozenset(_host_of(name) for name in constraints.permitted_subtrees or ())

    def is_current(self, hosts: frozenset[str]) -> bool:
        """Whether it speaks for these hosts, no more and no less, and for some time yet."""
        now, mine = _now(), self.certificate  # made by a clock that was ahead it would not be valid yet
        lasts = mine.not_valid_before_utc <= now and now + _RENEWED_BEFORE < mine.not_valid_after_utc
        return hosts == self.hosts and lasts

    def leaf(self, host: str) -> ssl.SSLContext:
        """What the app is shown in place of the host: a certificate for it, valid for a day, over HTTP/1.1."""
        now = _now()
        certificate = (
            _unsigned(self.certificate.subject, self._leaf_key, now, min(now + _LEAF_LASTS, self._ends()))
            # No common name: what a verifier may take for a host is in the alternative name only.
            .subject_name(x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Sidecar interception")]))
            .add_extension(x509.SubjectAlternativeName([_general_name(host)]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        context = TellingContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        with _readable(_private(self._leaf_key) + certificate.public_bytes(_PEM) + self.pem) as path:
            context.load_cert_chain(path)
        return context

    def _ends(self) -> datetime.datetime:
        return self.certificate.not_valid_after_utc


def read(state_dir: Path) -> Authority | None:
    """The authority as it is kept; None when there is none yet."""
    folder = state_dir / FOLDER
    try:
        whole = (folder.parent / WHOLE).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NoAuthority(
            f"{folder.parent / WHOLE} cannot be read: {error.strerror}; check its owner and mode"
        ) from error
    try:
        key = serialization.load_pem_private_key(whole, password=None)
        certificate = x509.load_pem_x509_certificate(whole)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _damaged(folder) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise _damaged(folder)
    return Authority(folder, key, certificate, _closed_to_others(folder.parent / WHOLE))


def _closed_to_others(path: Path) -> str | None:
    """A copy, a restore or a careless chmod may have opened it."""
    mode = path.stat().st_mode & 0o777
    if not mode & 0o077:
        return None
    told = f"the key of the authority in {path} could be read by others (mode {mode:04o})"
    again = "whoever did can pose as the intercepted hosts, to apps that trust it: `sidecar ca rotate` makes another"
    try:
        path.chmod(0o600)
    except OSError as error:
        return f"{told}, and cannot be closed: {error.strerror}; `chmod 600` it. And {again}"
    return f"{told}; it is 0600 now. But {again}"


def ensure(state_dir: Path, hosts: Iterable[str]) -> tuple[Authority, bool]:
    """The authority for exactly these hosts, made if need be; True when it takes the place of another."""
    wanted = frozenset(hosts)
    if not wanted:
        raise NoAuthority("no upstream has `intercept: true`, so there is nothing to make an authority for")
    with _locked(state_dir) as folder:
        kept = read(state_dir)
        if kept is not None and kept.is_current(wanted):
            return kept, False
        return _make(folder, kept._key if kept is not None else None, wanted), kept is not None


def rotate(state_dir: Path, hosts: Iterable[str]) -> Authority:
    """Another authority with another key, in place of the one that was."""
    with _locked(state_dir) as folder:
        kept = _if_readable(state_dir)
        wanted = frozenset(hosts) or (kept.hosts if kept is not None else frozenset())
        if not wanted:
            raise NoAuthority("no upstream has `intercept: true`, so there is no authority to make another of")
        return _make(folder, None, wanted)


def _if_readable(state_dir: Path) -> Authority | None:
    try:
        return read(state_dir)
    except NoAuthority:
        return None  # about to be replaced anyway


def _make(folder: Path, key: ec.EllipticCurvePrivateKey | None, hosts: frozenset[str]) -> Authority:
    key = key or ec.generate_private_key(ec.SECP256R1())
    now = _now()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Sidecar local CA {os.urandom(4).hex()}")])
    certificate = (
        _unsigned(name, key, now, now + _LASTS)
        .subject_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_constraints(hosts), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    made, disk = Authority(folder, key, certificate), Disk()
    try:
        # The whole first: it alone counts, the other is a copy for others.
        disk.write_whole(folder.parent / WHOLE, _private(key) + made.pem)
        disk.write_whole(folder / CERTIFICATE, made.pem)
    except OSError as error:
        raise NoAuthority(f"{folder} cannot be written to: {error.strerror}; make room, or check its owner") from error
    return made


def _constraints(hosts: frozenset[str]) -> x509.NameConstraints:
    """Kinds of names that are not permitted at all have to be excluded: unmentioned they would all be permitted."""
    permitted = [_subtree(host) for host in sorted(hosts)]
    excluded: list[x509.GeneralName] = []
    if not any(isinstance(name, x509.DNSName) for name in permitted):
        excluded.append(x509.DNSName(""))
    if not any(isinstance(name, x509.IPAddress) for name in permitted):
        excluded += [x509.IPAddress(ipaddress.ip_network(every)) for every in ("0.0.0.0/0", "::/0")]
    return x509.NameConstraints(permitted, excluded or None)


def _unsigned(
    issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime.datetime, until: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(until)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _subtree(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_network(host))
    except ValueError:
        return x509.DNSName(host)


def _host_of(name: x509.GeneralName) -> str:
    if isinstance(name, x509.IPAddress):
        assert isinstance(name.value, (ipaddress.IPv4Network, ipaddress.IPv6Network))
        return str(name.value.network_address)
    return str(name.value)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


@contextmanager
def _locked(state_dir: Path) -> Iterator[Path]:
    """`sidecar ca rotate` may run beside a sidecar: one of them writes at a time."""
    folder = state_dir / FOLDER
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise NoAuthority(
            f"{folder} cannot be used: {error.strerror}; make `state_dir` writable or set another"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(descriptor)


@contextmanager
def _readable(content: bytes) -> Iterator[str]:
    """A path that OpenSSL can read this from: Python hands it files only. In memory where that is possible."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("leaf", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, content)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        yield file.name


def _damaged(folder: Path) -> NoAuthority:
    return NoAuthority(
        f"{folder.parent / WHOLE} does not hold a key with its certificate; `sidecar ca rotate` makes another "
        "authority, which your applications then have to trust"
    )
