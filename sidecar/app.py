"""The app that is started beside the sidecar, and the environment it gets.

Law: its environment is that of whoever started us, with the variables of `variables.py` laid over it and nothing of
what the sidecar was given for itself by `sidecar run`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from config.addresses import join_host_port
from sidecar import clock
from sidecar.guard import Guard, basic
from sidecar.intercept import intercepted_hosts
from sidecar.variables import proxy_variables, trust_variables, write_bundle

if TYPE_CHECKING:
    from config.model import Settings
    from sidecar.assembly import Sidecar
    from telemetry.logs import Log

_REACHED_AT = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_USER = "sidecar-run"


@dataclass(frozen=True, slots=True)
class App:
    """What to run, and the environment it would have had without us."""

    command: Sequence[str]
    environ: Mapping[str, str]

    def environment(self, sidecar: Sidecar) -> dict[str, str]:
        """For a sidecar that has started."""
        settings, log = sidecar.proxy.settings, sidecar.log
        before = next((name for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy")
                       if self.environ.get(name)), None)  # fmt: skip
        if before is not None:
            log.warn(
                "sidecar.run.proxy_replaced",
                f"{before} was set, and the app comes through the sidecar instead; what the sidecar sends goes out "
                "directly unless the upstream has `egress_proxy`",
            )
        credentials = "" if sidecar.proxy.guard is None else _let_in(sidecar.proxy.guard)
        url = listener_url(settings, sidecar.address, credentials)
        scheme = "http" if settings.admin.tls is None else "https"
        admin = f"{scheme}://{join_host_port(*_reached(sidecar.admin_address))}"
        made = {**self.environ, **proxy_variables(url, self.environ), "SIDECAR_ADMIN": admin}
        if intercepted_hosts(settings.upstreams.values()):
            from sidecar.authority import NoAuthority

            try:
                made |= trust(settings, self.environ, log)
            except NoAuthority as why:  # then nothing is intercepted either, or only until the app refuses it
                log.error("sidecar.run.no_authority", f"the app trusts no authority of ours: {why}")
        return made


def trust(settings: Settings, environ: Mapping[str, str], log: Log | None = None) -> dict[str, str]:
    """The variables that make an app trust the local authority, which is made if need be. Raises NoAuthority."""
    from sidecar.authority import CERTIFICATE, NoAuthority, ensure

    authority, _ = ensure(Path(settings.state_dir), intercepted_hosts(settings.upstreams.values()))
    try:
        bundle, others = write_bundle(authority.folder, authority.pem, environ)
    except OSError as error:
        raise NoAuthority(
            f"no bundle can be written to {authority.folder}: {error.strerror}; make room, or check what is in its way"
        ) from error
    if not others and log is not None:
        log.warn(
            "sidecar.run.no_roots",
            "no root certificates were found on this machine, so the app will trust intercepted hosts only; install "
            "ca-certificates, or name a bundle in SSL_CERT_FILE",
        )
    return trust_variables(bundle, authority.folder / CERTIFICATE, environ)


def listener_url(settings: Settings, address: tuple[str, int], credentials: str = "") -> str:
    """`credentials` end with `@`, or are empty."""
    scheme = "http" if settings.listen.tls is None else "https"
    return f"{scheme}://{credentials}{join_host_port(*_reached(address))}"


def _reached(address: tuple[str, int]) -> tuple[str, int]:
    return _REACHED_AT.get(address[0], address[0]), address[1]


def _let_in(guard: Guard) -> str:
    """The app we start is known to us, whoever else is in `listen.auth`."""
    password = clock.unguessable(32)
    guard.admit(basic(_USER, password))
    return f"{_USER}:{password}@"
