"""What an app needs in its environment to come through the sidecar, and to trust it where TLS ends here.

Law: pure, but for `write_bundle`. A variable that replaces an app's roots gets a bundle with those it had and ours, one
that adds to them gets ours alone. The sidecar's own address is never called through itself.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path

from sidecar.durable.disk import Disk

LOOPBACK = ("localhost", "127.0.0.1", "::1")
REPLACES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "PIP_CERT", "GIT_SSL_CAINFO")
"""Take a file instead of the roots they would use."""
APPENDS = ("NODE_EXTRA_CA_CERTS", "DENO_CERT")
"""Take a file besides them."""
BUNDLE = "bundle.pem"
_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
# Where distributions keep their roots, for a Python that was built elsewhere.
_USUAL_ROOTS = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)


def proxy_variables(url: str, environ: Mapping[str, str]) -> dict[str, str]:
    """`url` is the listener's, credentials included."""
    made = {}
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        made[name] = made[name.lower()] = url
    given = environ.get("NO_PROXY") or environ.get("no_proxy") or ""
    kept = [entry.strip() for entry in given.split(",") if entry.strip()]
    direct = ",".join(dict.fromkeys([*kept, *LOOPBACK]))
    # Node 24 and newer honours the others only then.
    return {**made, "NO_PROXY": direct, "no_proxy": direct, "NODE_USE_ENV_PROXY": "1"}


def trust_variables(bundle: Path, certificate: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Whoever adds something to the roots already keeps it: it is in the bundle."""
    made = dict.fromkeys(REPLACES, bundle)
    made |= {name: bundle if environ.get(name) else certificate for name in APPENDS}
    return {name: str(path.absolute()) for name, path in made.items()}


def write_bundle(folder: Path, own: bytes, environ: Mapping[str, str]) -> tuple[Path, int]:
    """The app's roots and our own certificate in one file, and how many others are in it."""
    found: dict[bytes, None] = {}
    for file in _root_files(environ):
        try:
            content = file.read_bytes()
        except OSError:
            continue  # it would not have helped the app either
        found.update(dict.fromkeys(_certificates(content)))
    bundle = folder / BUNDLE
    Disk().write_whole(bundle, b"".join([own, *found]))
    return bundle, len(found)


def _root_files(environ: Mapping[str, str]) -> Iterator[Path]:
    """What the app would have used: what its variables name, and the system's."""
    named = {environ[name] for name in (*REPLACES, *APPENDS) if environ.get(name)}
    yield from map(Path, sorted(named))
    if "SSL_CERT_FILE" not in environ:
        default = ssl.get_default_verify_paths().cafile
        usual = [Path(path) for path in ([default] if default else []) + list(_USUAL_ROOTS)]
        yield from [path for path in usual if path.is_file()][:1]


def _certificates(pem: bytes) -> Iterator[bytes]:
    for piece in pem.split(_BEGIN)[1:]:
        body, end, _ = piece.partition(_END)
        if end:
            yield _BEGIN + body + end + b"\n"
