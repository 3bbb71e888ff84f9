"""A certificate authority for tests: names, addresses, and certificates with every fault."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

Key = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


class Authority:
    """A certificate authority that lives as long as the tests of a file."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        certificate = self._unsigned(self._name, self._key).add_extension(constraints, critical=True)
        self.bundle = folder / f"{name}.pem"
        self.bundle.write_bytes(certificate.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, *names: str, days: int = 1, weak: bool = False, common_name_only: bool = False) -> Path:
        """A PEM file with a certificate for these names or addresses, and its key."""
        key: Key = ec.generate_private_key(ec.SECP256R1()) if not weak else rsa.generate_private_key(65537, 1024)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        alternatives = x509.SubjectAlternativeName([_general_name(name) for name in names])
        unsigned = self._unsigned(subject, key, days)
        if not common_name_only:
            unsigned = unsigned.add_extension(alternatives, critical=False)
        certificate = unsigned.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True).sign(
            self._key, hashes.SHA256()
        )
        file = self._folder / f"leaf{certificate.serial_number}.pem"
        file.write_bytes(
            certificate.public_bytes(serialization.Encoding.PEM)
            + key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return file

    def itself(self) -> Path:
        """Its own certificate as a server's: signed by itself, and nobody else knows it."""
        file = self._folder / "itself.pem"
        file.write_bytes(
            self.bundle.read_bytes()
            + self._key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return file

    def _unsigned(self, subject: x509.Name, key: Key, days: int = 1) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=2))
            .not_valid_after(now + datetime.timedelta(days=days))
        )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def server_side(certificate: Path, *, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_ciphers("DEFAULT@SECLEVEL=0")  # whatever it is given: refusing is the other side's business
    context.load_cert_chain(certificate)
    context.maximum_version = newest
    return context
