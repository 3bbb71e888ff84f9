"""Intercepted HTTPS: Sidecar against mitmproxy, which does the same and is what people use for it.

Both end the load's TLS with a certificate of their own and speak verified TLS to the same nginx. The load is wrk, whose
connections come through a relay that sends the CONNECT (`connecting.py`).
"""

from __future__ import annotations

import datetime
import http.client
import ipaddress
import ssl
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from benchmarks.bench import SMALL_CONNECTIONS, Bench
from benchmarks.load import Sample, failure, wrk
from benchmarks.peers import JSON_BODY, ROOT, Aim, Peer, sidecar_argv
from benchmarks.processes import LOOPBACK, free_ports
from benchmarks.report import Must, Row, cpu_row, median_row

MITMDUMP = ROOT / ".venv-mitmproxy" / "bin" / "mitmdump"
SHORTEST_SECONDS = 3  # in a second mitmproxy has hardly shaken 32 hands
WITH = "not Envoy: mitmproxy"


def https(bench: Bench) -> list[Row]:
    """Small JSON answers inside TLS that the proxy opens."""
    what = "150-byte JSON, intercepted HTTPS"
    must = Must("ratio", "at least", 10)
    if not MITMDUMP.exists():
        bench.complaints.append(f"https: {MITMDUMP.name} is not installed; `make bench` installs it")
        return [Row(what, "requests/s", None, None, None, must, envoy_with=WITH)]
    certificate = make_certificate(bench.folder / "https.pem")
    (upstream_port,) = free_ports(1)
    nginx = bench.casting.nginx("https.conf", "nginx-https", upstream_port, certificate=certificate, json=JSON_BODY)
    direct = Peer("direct", upstream_port, upstream_port, "", nginx)
    sidecar, mitmproxy = _sidecar(bench, upstream_port, certificate), _mitmproxy(bench, upstream_port, certificate)
    rounds, seconds = bench.profile.throughput
    seconds = max(seconds, SHORTEST_SECONDS)

    def rate(peer: Peer) -> Sample:
        aim = Aim(peer.port, "/json", peer.authority)
        load = wrk(aim, connections=SMALL_CONNECTIONS, seconds=seconds, body_bytes=len(JSON_BODY), scheme="https")
        return load.requests_per_second

    for peer in (sidecar, mitmproxy):
        bench.take(f"{what}, bytes", peer, compare)
    bench.rounds("warm-up", (sidecar, mitmproxy), 1, rate)
    taken = bench.rounds(what, (sidecar, mitmproxy), rounds, rate)
    taken["envoy"] = taken.pop("mitmproxy")
    taken["direct"] = [bench.take(what, direct, rate)]
    return [median_row(what, "requests/s", must, taken, WITH), cpu_row(what, taken, WITH)]


def compare(peer: Peer) -> Sample:
    """Whether one answer is exactly what the upstream holds."""
    unverified = ssl._create_unverified_context()  # the authorities of both are made for this run
    connection = http.client.HTTPSConnection(LOOPBACK, peer.port, timeout=20.0, context=unverified)
    try:
        connection.request("GET", "/json", headers={"Host": peer.authority})
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        return failure(f"GET https://{peer.authority}/json: {error!r}")
    finally:
        connection.close()
    if (answer.status, body) != (200, JSON_BODY.encode()):
        return failure(f"GET https://{peer.authority}/json: status {answer.status}, {body[:200]!r}")
    return Sample(1.0, 1)


def _sidecar(bench: Bench, upstream_port: int, certificate: Path) -> Peer:
    port, admin_port = free_ports(2)
    name = "sidecar-intercepting"
    config = bench.casting.fill(
        "intercepting.yaml",
        name,
        name=name,
        port=port,
        admin_port=admin_port,
        upstream_port=upstream_port,
        certificate=certificate,
    )
    running = bench.casting.beside(name, sidecar_argv(None, config), port, with_proxies=True)
    return Peer("sidecar", _relay(bench, name, port, upstream_port), upstream_port, "", running, "intercepting")


def _mitmproxy(bench: Bench, upstream_port: int, certificate: Path) -> Peer:
    (port,) = free_ports(1)
    settings = {
        "confdir": bench.folder / "mitmproxy",
        "ssl_verify_upstream_trusted_ca": certificate,
        "http2": "false",  # as for Sidecar
        "flow_detail": "0",
    }
    argv = [str(MITMDUMP), "-q", "--listen-host", LOOPBACK, "-p", str(port)]
    for key, value in settings.items():
        argv += ["--set", f"{key}={value}"]
    running = bench.casting.beside("mitmproxy", argv, port, with_proxies=True)
    return Peer("mitmproxy", _relay(bench, "mitmproxy", port, upstream_port), upstream_port, "", running)


def _relay(bench: Bench, name: str, proxy_port: int, upstream_port: int) -> int:
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "benchmarks.connecting", str(port), str(proxy_port), f"{LOOPBACK}:{upstream_port}"]
    bench.casting.beside(f"{name}-relay", argv, port, with_proxies=False)
    return port


def make_certificate(path: Path) -> Path:
    """One file with a key and a certificate for the loopback address that is its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "benchmark upstream")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(LOOPBACK))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    path.write_bytes(
        certificate.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    )
    return path
