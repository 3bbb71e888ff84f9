"""Talking to a running sidecar: where its admin port is, and what to tell a person when it does not answer.

Law: straight to that address, never through a proxy, whatever HTTP_PROXY says: that would be the sidecar itself. Every
failure names the address, who named it, and what to do next.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import json
import os
import pwd
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode, urlsplit

if TYPE_CHECKING:
    from config.model import Settings

DEFAULT = "http://127.0.0.1:4141"
VARIABLE = "SIDECAR_ADMIN"
TOKEN_VARIABLE = "SIDECAR_ADMIN_TOKEN"
_EVERY_INTERFACE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_PATIENCE = 10.0
_WRONG_USE = frozenset({400, 413, 415})


class Failed(Exception):
    """Told to the person; `code` is the exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class NotThere(Failed):
    """What was asked for is not there."""


class Address(NamedTuple):
    """Where to ask, who said so, and with which certificate it answers if that is known."""

    host: str
    port: int
    named_by: str
    scheme: str = "http"
    certificate: Path | None = None

    @property
    def url(self) -> str:
        return f"{self.scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


Command = Callable[[argparse.Namespace], int]


def telling_failures(command: Command) -> Command:
    """A command whose failures are printed instead of raised."""

    @functools.wraps(command)
    def told(chosen: argparse.Namespace) -> int:
        try:
            return command(chosen)
        except Failed as failed:
            print(f"sidecar {chosen.command}: {failed}", file=sys.stderr)
            return failed.code

    return told


def find_address(chosen: argparse.Namespace, environ: Mapping[str, str]) -> Address:
    """`--admin`, `SIDECAR_ADMIN`, the configuration, or the default, in this order."""
    if chosen.admin is not None:
        return _parsed(chosen.admin, "--admin")
    if environ.get(VARIABLE):
        return _parsed(environ[VARIABLE], VARIABLE)
    if chosen.config is None and not any(_configures(name) for name in environ):
        return _parsed(DEFAULT, "the default")
    settings, named_by = configured(chosen.config, environ)
    admin = settings.admin
    named_by = f"admin in {named_by}" if named_by else "the environment"
    if admin.port == 0:
        raise Failed(f"the admin port is any free one (port 0, {named_by}); use --admin URL with that of the log", 2)
    host = on_this_machine(admin.host)
    if admin.tls is None:
        return Address(host, admin.port, named_by)
    return Address(host, admin.port, named_by, "https", admin.tls.cert)


def configured(config: Path | None, environ: Mapping[str, str]) -> tuple[Settings, str]:
    """The configuration and its file. What is valid of one with mistakes: a sidecar may be running on with an earlier
    one, and now is when somebody wants to talk to it."""
    from config.loader import ConfigError, as_far_as_valid, load  # a third of a second, so only when needed

    try:
        loaded = load(config, environ)
    except ConfigError as wrong:
        settings = as_far_as_valid(config, environ)
        if settings is None:
            raise Failed(
                f"the configuration that names the admin port cannot be read; use --admin URL\n{wrong}", 2
            ) from None
        return settings, f"{config or environ.get('SIDECAR_CONFIG') or 'the environment'}, which has mistakes"
    return loaded.settings, "" if loaded.path is None else str(loaded.path)


def on_this_machine(host: str) -> str:
    """Where to reach a listener that listens everywhere."""
    return _EVERY_INTERFACE.get(host, host)


def _configures(variable: str) -> bool:
    return variable == "SIDECAR_CONFIG" or variable.upper().startswith("SIDECAR__ADMIN__")


def _parsed(text: str, named_by: str) -> Address:
    example = f"write it as {DEFAULT}"
    scheme, slashes, rest = text.rpartition("://")
    shown = f"{scheme}{slashes}…@{rest.rpartition('@')[2]}" if "@" in rest else text
    url = urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = url.port
    except ValueError:
        raise Failed(f"{named_by}: {shown!r} has no valid port; {example}", 2) from None
    if (
        url.scheme not in ("http", "https")
        or not url.hostname
        or url.path not in ("", "/")
        or url.query
        or url.username
    ):
        raise Failed(f"{named_by}: {shown!r} is not the address of an admin port; {example}", 2)
    return Address(url.hostname, port or 4141, named_by, url.scheme)


def connect(chosen: argparse.Namespace, environ: Mapping[str, str]) -> Admin:
    """The sidecar that a command is about, with the token of whoever runs it."""
    address = find_address(chosen, environ)
    return Admin(address, find_token(chosen, environ), _trust(address, chosen.ca))


def find_token(chosen: argparse.Namespace, environ: Mapping[str, str]) -> str | None:
    """From `--token-file` or `SIDECAR_ADMIN_TOKEN`."""
    if chosen.token_file is None:
        token, named_by = environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE
        if not token:
            return None
    else:
        named_by = f"--token-file {chosen.token_file}"
        try:
            token = chosen.token_file.read_text().strip()
            if chosen.token_file.stat().st_mode & 0o077:
                print(
                    f"Warning: {chosen.token_file} can be read by others on this machine; `chmod 600` it.",
                    file=sys.stderr,
                )
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not text"
            raise Failed(f"{named_by}: cannot be read: {why}", 2) from None
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        listed = " This looks like the sidecar's own list, which has only digests." if "sha256:" in token else ""
        raise Failed(f"{named_by}: is not one token, as `sidecar tokens new` prints it.{listed}", 2)
    return token


def _trust(address: Address, ca: Path | None) -> ssl.SSLContext | None:
    if address.scheme == "http":
        if ca is not None:
            raise Failed(f"--ca is for https, and {address.named_by} names {address.url}", 2)
        return None
    context = ssl.create_default_context()
    trusted = ca or address.certificate
    if trusted is not None:
        try:
            context.load_verify_locations(trusted)
        except (OSError, ssl.SSLError) as error:
            why = getattr(error, "reason", None) or error.strerror or str(error)
            named_by = "--ca" if ca is not None else address.named_by
            raise Failed(f"{named_by}: {trusted} cannot be used as an authority: {why}", 2) from None
    return context


class _Answer(dict[str, Any]):
    """An answer of a sidecar has what its commands look for; one that has not is somebody else's."""

    def __init__(self, told: Mapping[str, Any], stranger: str) -> None:
        super().__init__(told)
        self._stranger = stranger

    def __missing__(self, key: str) -> Any:
        raise Failed(self._stranger)


class Admin:
    """Asks. One connection per question: that is what lasts through restarts."""

    def __init__(self, address: Address, token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._address = address
        self._token = token
        self._tls = tls

    def get(self, path: str, **query: str | int | None) -> Any:
        return self._json(self._ask("GET", path, query))

    def text(self, path: str) -> str:
        """What there is to read at a path, for people."""
        return self._ask("GET", path, {}, accept="text/plain")[1].decode()

    def post(
        self, path: str, body: Mapping[str, Any], *, patience: float | None = None, **query: str | int | None
    ) -> Any:
        return self._json(self._ask("POST", path, query, json.dumps(body).encode(), patience=patience))

    def post_for_bytes(self, path: str, body: Mapping[str, Any], *, patience: float | None = None) -> bytes:
        """What is no JSON."""
        data: bytes = self._ask(
            "POST", path, {}, json.dumps(body).encode(), accept="application/octet-stream", patience=patience
        )[1]
        return data

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._json(self._ask("PATCH", path, {}, json.dumps(body).encode()))

    def put(self, path: str, body: Mapping[str, Any], **query: str | int | None) -> Any:
        return self._json(self._ask("PUT", path, query, json.dumps(body).encode()))

    def delete(self, path: str, **query: str | int | None) -> Any:
        return self._json(self._ask("DELETE", path, query))

    @contextlib.contextmanager
    def stream(
        self, path: str, accept: str, patience: float, **query: str | int | None
    ) -> Iterator[http.client.HTTPResponse]:
        """A long answer, to be read while it comes. What goes wrong then is raised as it is."""
        given = urlencode({name: value for name, value in query.items() if value is not None})
        connection = self._connection(patience)
        try:
            try:
                connection.request(
                    "GET", f"{path}?{given}" if given else path, headers={"Accept": accept, **self._who()}
                )
                response = connection.getresponse()
                data = response.read() if response.status >= 400 else b""
            except (OSError, http.client.HTTPException) as error:
                raise Failed(self._no_answer(error, patience)) from None
            if response.status >= 400:
                raise self._refused(response.status, data)
            if response.headers.get_content_type() != accept:
                raise Failed(self._stranger())
            yield response
        finally:
            connection.close()

    @property
    def url(self) -> str:
        return self._address.url

    def events(
        self, after: str | None, patience: float, *, follow: bool = True
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Events with their ids, live, until the sidecar ends the stream, which it does at once after those that are
        known if they are not to be followed; Failed when nothing comes for so long."""
        headers = {"Accept": "text/event-stream", **self._who()}
        if after is not None:
            headers["Last-Event-ID"] = after
        connection = self._connection(patience)
        event_id = ""
        try:
            connection.request("GET", "/events" if follow else "/events?follow=false", headers=headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise self._refused(response.status, response.read())
            for raw in response:
                name, _, value = raw.decode(errors="replace").rstrip("\n").partition(": ")
                if name == "id":
                    event_id = value
                elif name == "data" and event_id:
                    yield event_id, json.loads(value)
                    event_id = ""
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Failed(self._no_answer(error, patience)) from None
        finally:
            connection.close()

    def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str | int | None],
        body: bytes | None = None,
        accept: str = "application/json",
        patience: float | None = None,
    ) -> tuple[str, bytes]:
        """The content type and the body of a good answer."""
        patience = patience or _PATIENCE
        given = urlencode({name: value for name, value in query.items() if value is not None})
        headers = {"Accept": accept, "Connection": "close", **self._who()}
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection = self._connection(patience)
        try:
            connection.request(method, f"{path}?{given}" if given else path, body, headers)
            response = connection.getresponse()
            content_type, data = response.headers.get_content_type(), response.read()
        except (OSError, http.client.HTTPException) as error:
            raise Failed(self._no_answer(error, patience)) from None
        finally:
            connection.close()
        if response.status >= 400:
            raise self._refused(response.status, data)
        if content_type != accept:
            raise Failed(self._stranger())
        return content_type, data

    def _who(self) -> dict[str, str]:
        token = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        return {"User-Agent": _agent(), **_user(), **token}

    def _connection(self, patience: float) -> http.client.HTTPConnection:
        host, port = self._address.host, self._address.port
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=patience)
        return http.client.HTTPSConnection(host, port, timeout=patience, context=self._tls)

    def _json(self, answer: tuple[str, bytes]) -> Any:
        try:
            return _Answer(json.loads(answer[1]), self._stranger())
        except (ValueError, TypeError):
            raise Failed(self._stranger()) from None

    def _refused(self, status: int, data: bytes) -> Failed:
        try:
            told = json.loads(data)
            code, message = told["error_code"], str(told["message"])
        except (ValueError, KeyError, TypeError):
            return Failed(self._stranger())
        if code == "NO_ROUTE":  # a word of the proxy's listener
            return Failed(self._stranger("is a sidecar's proxy port, not its admin port"))
        if status == 404:
            return NotThere(message)
        return Failed(message, 2 if status in _WRONG_USE else 1)

    def _no_answer(self, error: Exception, patience: float) -> str:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, TimeoutError):
            why = f"no answer within {patience:g} s"
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                f"the certificate of {self._address.url} ({self._address.named_by}) is not trusted: "
                f"{error.verify_message}\nGive its authority with --ca FILE, and a URL with a name the certificate has."
            )
        if isinstance(error, ssl.SSLError):
            why = f"it does not speak TLS ({error.reason or error})"
        if self._tls is None and isinstance(error, http.client.RemoteDisconnected):
            why = "it hung up; where `admin.tls` is set its address begins with https://"
        return (
            f"no sidecar answers at {self._address.url} ({self._address.named_by}): {why}\n"
            f"Start one with `sidecar run`, or say where it is with --admin URL or {VARIABLE}."
        )

    def _stranger(self, what: str = "is not a sidecar's admin port") -> str:
        return (
            f"what answers at {self._address.url} ({self._address.named_by}) {what}\n"
            f"Say where that is with --admin URL or {VARIABLE}; its port is `admin.port`, 4141 unless set."
        )


def _agent() -> str:
    from sidecar import __version__

    return f"sidecar-cli/{__version__}"


def _user() -> dict[str, str]:
    """Says who asks, for the audit. Not proof of anything: only a token is."""
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        name = str(os.getuid())  # a container without an entry for this user
    name = "".join(char for char in name if char.isascii() and (char.isalnum() or char in "._-"))
    return {"x-sidecar-user": name[:40]} if name else {}
