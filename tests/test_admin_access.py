"""Who gets into the admin port: tokens and their roles, addresses beyond this machine, TLS, and those who guess."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from config.loader import ConfigError, load
from config.problems import shown_value
from config.tokens import Token, WrongTokens, digest_of, new_token, read_tokens
from sidecar.admin import access
from sidecar.admin.problem import ErrorAnswer
from sidecar.assembly import CannotStart
from tests.conftest import Running, Starter
from tests.doubles.app import App, Reply
from tests.test_admin import admin, ask
from tests.test_cli_admin import here, run
from tests.test_tls import Authority

READER, OPERATOR = new_token(), new_token()


def write(file: Path, *tokens: Token, mode: int = 0o600) -> Path:
    beside = file.with_name("beside")
    beside.write_text("# who may ask\n\n" + "".join(f"{token}\n" for token in tokens))
    beside.chmod(mode)
    beside.replace(file)  # as an editor or Kubernetes does, so that nobody reads half of it
    return file


def spoil(file: Path) -> None:
    file.write_text("late admin x\n")


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    reader, operator = Token("eve", "read", digest_of(READER)), Token("olga", "operate", digest_of(OPERATOR))
    return write(tmp_path / "tokens", reader, operator)


@pytest.fixture
async def guarded(start_sidecar: Starter, token_file: Path) -> Running:
    return await start_sidecar(
        admin={"port": 0, "token_file": str(token_file)}, probes={"host": "127.0.0.1", "port": 0}
    )


def bearer(token: str) -> str:
    return f"Authorization: Bearer {token}"


async def switch(sidecar: Running, token: str, *fields: str) -> Reply:
    return await admin(sidecar, "/retries/disable", bearer(token), "Content-Length: 0", *fields, method="POST")


# ---- tokens ------------------------------------------------------------------------------------------------------


async def test_what_is_kept_sealed_is_not_for_who_may_only_look(guarded: Running) -> None:
    refused = await ask(guarded.admin_address, "/jobs/job_0/result", bearer(READER))
    assert (403, "INSUFFICIENT_PERMISSIONS") == (refused.status, refused.json["error_code"])
    assert "kept sealed" in refused.json["message"]
    assert 404 == (await ask(guarded.admin_address, "/jobs/job_0/result", bearer(OPERATOR))).status
    assert 404 == (await ask(guarded.admin_address, "/jobs/job_0", bearer(READER))).status


async def test_without_a_token_nothing_on_the_admin_port_is_answered(guarded: Running) -> None:
    for row in guarded.api.routes:
        path = row.path.replace("{", "").replace("}", "")
        reply = await admin(guarded, path, "Content-Length: 0", method=row.method)
        assert (401, "INVALID_API_KEY") == (reply.status, reply.json["error_code"]), row.path
        assert 'Bearer realm="sidecar"' == reply.get("www-authenticate")
        ErrorAnswer.model_validate_json(reply.body)
    assert 401 == (await admin(guarded, "/nowhere")).status


async def test_the_probes_listener_asks_for_no_token_and_has_nothing_else(guarded: Running) -> None:
    for path in ("/livez", "/readyz", "/metrics"):
        assert 200 == (await ask(guarded.probes_address, path, host="10.0.0.7:4142")).status
    assert 404 == (await ask(guarded.probes_address, "/config", bearer(OPERATOR))).status


async def test_a_reader_looks_and_an_operator_changes(guarded: Running) -> None:
    for token in (READER, OPERATOR):
        assert 200 == (await admin(guarded, "/config", bearer(token))).status
        assert 200 == (await admin(guarded, "/config", bearer(token), method="HEAD")).status
    refused = await switch(guarded, READER)
    assert (403, "INSUFFICIENT_PERMISSIONS") == (refused.status, refused.json["error_code"])
    assert "eve" in refused.json["message"]
    assert guarded.proxy.retries_enabled
    assert 200 == (await switch(guarded, OPERATOR, "x-sidecar-user: olga")).status
    assert not guarded.proxy.retries_enabled
    assert '"who":"olga","user":"olga"' in guarded.logged.getvalue()


@pytest.mark.parametrize(
    "field",
    [
        "Authorization: Bearer",
        "Authorization: Bearer ",
        f"Authorization: {OPERATOR}",
        f"Authorization: Basic {OPERATOR}",
        f"Authorization: Bearer {OPERATOR}x",
        f"Authorization: Bearer {OPERATOR[:-1]}",
        f"Authorization: Bearer {digest_of(OPERATOR)}",
        f"Authorization: Bearer {OPERATOR} {OPERATOR}",
        "Authorization: Bearer \xff\xfe",
        "Authorization: Bearer " + "x" * 1000,
        f"Cookie: token={OPERATOR}",
        f"X-Api-Key: {OPERATOR}",
    ],
    ids=lambda field: field.split(":")[0],  # the same in every worker: tokens are another in each
)
async def test_what_is_not_a_known_token_does_not_get_in(guarded: Running, field: str) -> None:
    reply = await admin(guarded, "/config", field)
    assert (401, "INVALID_API_KEY") == (reply.status, reply.json["error_code"])
    assert OPERATOR not in reply.body.decode()
    assert OPERATOR not in guarded.logged.getvalue()


async def test_two_authorization_fields_are_no_way_around(guarded: Running) -> None:
    reply = await admin(guarded, "/config", bearer("wrong"), bearer(OPERATOR))
    assert reply.status in (400, 401)


async def test_a_token_is_no_way_around_the_check_of_host_and_origin(guarded: Running) -> None:
    assert 403 == (await admin(guarded, "/config", bearer(OPERATOR), host="evil.test")).status
    assert 403 == (await admin(guarded, "/config", bearer(OPERATOR), "Origin: http://evil.test")).status


# ---- guessing ----------------------------------------------------------------------------------------------------


async def test_whoever_guesses_is_told_to_wait_and_a_right_token_always_opens(
    guarded: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(access.MOST_GUESSES):
        assert 401 == (await admin(guarded, "/config", bearer(f"guess{number}"))).status
    refused = await admin(guarded, "/config", bearer("guess99"))
    assert (429, "RATE_LIMIT_EXCEEDED") == (refused.status, refused.json["error_code"])
    assert 1 <= int(refused.get("retry-after") or 0) <= access.GUESS_WINDOW
    assert 200 == (await admin(guarded, "/config", bearer(OPERATOR))).status
    assert access.MOST_GUESSES == guarded.logged.getvalue().count('"sidecar.admin.wrong_token"')
    monkeypatch.setattr(access, "GUESS_WINDOW", 0.0)  # the time is over
    assert 401 == (await admin(guarded, "/config", bearer("guess100"))).status


async def test_a_forgotten_script_with_one_wrong_token_shuts_nobody_out(guarded: Running) -> None:
    for _ in range(access.MOST_GUESSES * 3):
        assert 401 == (await admin(guarded, "/config", bearer("of-last-year"))).status
        assert 401 == (await admin(guarded, "/config")).status
    assert 200 == (await admin(guarded, "/config", bearer(OPERATOR))).status


async def test_those_who_guess_are_remembered_in_bounded_memory(
    guarded: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_MOST_STRANGERS", 3)
    guard = access.Access(guarded.proxy)
    for number in range(10):
        guard._note_guess(f"10.0.0.{number}", "x", 0.0)
    assert ["10.0.0.7", "10.0.0.8", "10.0.0.9"] == list(guard._wrong)


# ---- the file ----------------------------------------------------------------------------------------------------


async def test_the_file_is_read_again_when_it_changes_and_a_bad_one_changes_nothing(
    guarded: Running, token_file: Path
) -> None:
    late = new_token()
    assert 401 == (await admin(guarded, "/config", bearer(late))).status
    write(token_file, Token("late", "read", digest_of(late)))
    assert 200 == (await admin(guarded, "/config", bearer(late))).status
    assert 401 == (await admin(guarded, "/config", bearer(OPERATOR))).status
    spoil(token_file)
    assert 200 == (await admin(guarded, "/config", bearer(late))).status
    os.unlink(token_file)
    assert 200 == (await admin(guarded, "/config", bearer(late))).status
    assert 2 == guarded.logged.getvalue().count("sidecar.admin.tokens_unusable")
    write(token_file, Token("olga", "operate", digest_of(OPERATOR)))
    assert [401, 200] == [(await admin(guarded, "/config", bearer(token))).status for token in (late, OPERATOR)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no token"),
        ("# nothing\n\n", "holds no token"),
        ("eve\n", "line 1: write NAME ROLE sha256:DIGEST"),
        (f"eve read {digest_of('a')} more\n", "line 1: write NAME ROLE"),
        (f"eve reed {digest_of('a')}\n", 'did you mean "read"?'),
        (f"eve admin {digest_of('a')}\n", "one of read, operate"),
        (f"# x\n-eve read {digest_of('a')}\n", "line 2: a name has"),
        ("eve read verysecret\n", "64 hexadecimal digits"),
        (f"eve read {digest_of('a').upper()}\n", "64 hexadecimal digits"),
        (f"eve read {digest_of('a')}\neve operate {digest_of('b')}\n", "line 2: eve is there twice"),
        (f"eve read {digest_of('a')}\nbob operate {digest_of('a')}\n", "line 2: bob has the token of another name"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    file.chmod(0o600)
    config = tmp_path / "sidecar.yaml"
    config.write_text(json.dumps({"admin": {"token_file": str(file)}}))
    with pytest.raises(ConfigError) as refused:
        load(config, {})
    assert f"{config}:1: admin.token_file: " in str(refused.value)
    assert words in str(refused.value)
    assert "verysecret" not in str(refused.value)


def test_the_name_of_the_file_is_no_secret() -> None:
    for key, shown in (("token_file", "/etc/sidecar/tokens"), ("token", "(hidden)")):
        assert shown == shown_value(("admin", key), "/etc/sidecar/tokens", known_key=True)


def test_a_file_that_others_may_write_to_is_refused(token_file: Path) -> None:
    for mode in (0o620, 0o602, 0o666):
        token_file.chmod(mode)
        with pytest.raises(WrongTokens, match="chmod go-w"):
            read_tokens(token_file)
    token_file.chmod(0o644)
    assert ["eve", "olga"] == [token.name for token in read_tokens(token_file)]
    with pytest.raises(WrongTokens, match="does not exist"):
        read_tokens(token_file.with_name("nothing"))
    token_file.write_bytes(b"\xff\xfe")
    with pytest.raises(WrongTokens, match="UTF-8"):
        read_tokens(token_file)


# ---- beyond this machine -----------------------------------------------------------------------------------------


async def test_an_admin_port_beyond_this_machine_without_tokens_does_not_start(tmp_path: Path) -> None:
    config = tmp_path / "sidecar.yaml"
    config.write_text("admin: {host: 0.0.0.0}\n")
    for command in ("check", "run"):
        ended = await run(command, "-c", str(config))
        assert 2 == ended.code
        assert f"{config}:1: admin.host" in ended.err
        assert "set `admin.token_file`" in ended.err


async def test_beyond_this_machine_any_host_name_is_fine_with_a_token_and_an_origin_must_be_it(
    start_sidecar: Starter, token_file: Path
) -> None:
    sidecar = await start_sidecar(admin={"host": "0.0.0.0", "port": 0, "token_file": str(token_file)})
    assert "sidecar.admin.unencrypted" in sidecar.logged.getvalue()
    address = ("127.0.0.1", sidecar.admin_address[1])
    assert 200 == (await ask(address, "/config", bearer(READER), host="sidecar.prod.svc:4141")).status
    assert 401 == (await ask(address, "/config", host="sidecar.prod.svc:4141")).status
    origin = "Origin: http://evil.test"
    assert 403 == (await ask(address, "/config", bearer(READER), origin, host="sidecar.prod.svc:4141")).status


async def test_tokens_taken_away_by_a_reload_do_not_open_a_port_that_others_reach(
    start_sidecar: Starter, token_file: Path
) -> None:
    sidecar = await start_sidecar(admin={"host": "0.0.0.0", "port": 0, "token_file": str(token_file)})
    address = ("127.0.0.1", sidecar.admin_address[1])
    admin_now = sidecar.proxy.settings.admin.model_copy(update={"host": "127.0.0.1", "token_file": None})
    sidecar.proxy.settings = sidecar.proxy.settings.model_copy(update={"admin": admin_now})
    for fields in ((), (bearer(OPERATOR),)):
        refused = await ask(address, "/config", *fields)
        assert (403, True) == (refused.status, "restart" in refused.json["message"])


# ---- TLS ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "the authority of the admin port")


@pytest.fixture
async def encrypted(start_sidecar: Starter, token_file: Path, authority: Authority) -> Running:
    pem = str(authority.issue("localhost", "127.0.0.1"))
    return await start_sidecar(admin={"port": 0, "token_file": str(token_file), "tls": {"cert": pem, "key": pem}})


async def test_the_admin_port_speaks_tls_and_says_so_in_its_links(encrypted: Running, authority: Authority) -> None:
    context = ssl.create_default_context(cafile=authority.bundle)
    connection = await asyncio.open_connection(*encrypted.admin_address, ssl=context, server_hostname="localhost")
    app = App(*connection)
    reply = await app.ask("GET /nowhere HTTP/1.1\r\nHost: localhost\r\n" + bearer(READER) + "\r\n\r\n")
    app.close()
    assert 404 == reply.status
    port = encrypted.admin_address[1]
    assert f"https://127.0.0.1:{port}/errors/NOT_FOUND" == reply.json["documentation_url"]


async def test_the_command_line_shows_its_token_over_tls(
    encrypted: Running, authority: Authority, tmp_path: Path
) -> None:
    url = f"https://127.0.0.1:{encrypted.admin_address[1]}"
    mine = tmp_path / "mine"
    mine.write_text(f"{OPERATOR}\n")
    trusting = ("--admin", url, "--ca", str(authority.bundle))
    ended = await here("sessions", *trusting, "--token-file", str(mine), "--json")
    assert (0, []) == (ended.code, json.loads(ended.out)["items"])
    assert 0 == (await here("breakers", *trusting, SIDECAR_ADMIN_TOKEN=READER)).code
    for arguments, environ, code, words in [
        (trusting, {}, 1, "line takes --token-file or SIDECAR_ADMIN_TOKEN"),
        (trusting, {"SIDECAR_ADMIN_TOKEN": "wrong"}, 1, "is not in admin.token_file"),
        (("--admin", url), {"SIDECAR_ADMIN_TOKEN": READER}, 1, "Give its authority with --ca FILE"),
        (("--admin", url.replace("https", "http")), {"SIDECAR_ADMIN_TOKEN": READER}, 1, "no sidecar answers at"),
        (("--admin", "http://127.0.0.1:1", "--ca", "x"), {}, 2, "--ca is for https"),
        (("--admin", url, "--ca", str(mine)), {}, 2, "cannot be used as an authority"),
        ((*trusting, "--token-file", str(tmp_path / "none")), {}, 2, "No such file"),
        ((*trusting, "--token-file", str(tmp_path / "tokens")), {}, 2, "has only digests"),
        (trusting, {"SIDECAR_ADMIN_TOKEN": "two words"}, 2, "is not one token"),
    ]:
        ended = await here("sessions", *arguments, **environ)
        assert (code, True) == (ended.code, words in ended.err), ended


async def test_the_command_line_finds_an_encrypted_port_beyond_this_machine_by_the_configuration(
    start_sidecar: Starter, token_file: Path, authority: Authority, tmp_path: Path
) -> None:
    pem = str(authority.issue("localhost", "127.0.0.1"))
    keys: dict[str, Any] = {"host": "0.0.0.0", "token_file": str(token_file), "tls": {"cert": pem, "key": pem}}
    sidecar = await start_sidecar(admin={**keys, "port": 0})
    config = tmp_path / "sidecar.yaml"
    config.write_text(json.dumps({"admin": {**keys, "port": sidecar.admin_address[1]}}))
    ended = await here("sessions", "-c", str(config), "--ca", str(authority.bundle), SIDECAR_ADMIN_TOKEN=READER)
    assert (0, "") == (ended.code, ended.err)


async def test_a_certificate_that_does_not_fit_its_key_is_told_at_the_start(
    start_sidecar: Starter, authority: Authority
) -> None:
    pair = {"cert": str(authority.issue("a.test")), "key": str(authority.issue("b.test"))}
    with pytest.raises(CannotStart, match=r"admin.tls: .* cannot be used: KEY_VALUES_MISMATCH"):
        await start_sidecar(admin={"port": 0, "tls": pair})


# ---- sidecar tokens ----------------------------------------------------------------------------------------------


async def test_tokens_are_made_listed_and_revoked(start_sidecar: Starter, tmp_path: Path) -> None:
    file = tmp_path / "made"
    made = await here("tokens", "new", "olga", "--role", "operate", "--file", str(file))
    assert (0, 0o600) == (made.code, file.stat().st_mode & 0o777)
    token = made.out.strip()
    assert token not in file.read_text()
    assert (Token("olga", "operate", digest_of(token)),) == read_tokens(file)
    sidecar = await start_sidecar(admin={"port": 0, "token_file": str(file)})
    assert 200 == (await switch(sidecar, token)).status
    config = tmp_path / "sidecar.yaml"
    config.write_text(json.dumps({"admin": {"token_file": str(file)}}))
    other = (await here("tokens", "new", "eve", "-c", str(config))).out.strip()
    assert 200 == (await admin(sidecar, "/config", bearer(other))).status
    listed = json.loads((await here("tokens", "list", "--file", str(file), "--json")).out)["items"]
    assert [{"name": "olga", "role": "operate"}, {"name": "eve", "role": "read"}] == listed
    assert ["NAME  ROLE", "olga  operate", "eve   read"] == (
        await here("tokens", "list", "--file", str(file))
    ).out.splitlines()
    assert 0 == (await here("tokens", "revoke", "olga", "--file", str(file))).code
    assert [401, 200] == [(await admin(sidecar, "/config", bearer(one))).status for one in (token, other)]


async def test_a_token_is_saved_where_only_its_owner_reads_it(
    guarded: Running, token_file: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "olga.token"
    made = await here("tokens", "new", "new", "--save", str(saved), "--file", str(token_file))
    assert (0, f"{saved}\n", 0o600) == (made.code, made.out, saved.stat().st_mode & 0o777)
    token = saved.read_text().strip()
    assert token not in made.out + made.err
    assert 200 == (await admin(guarded, "/config", bearer(token))).status
    again = await here("tokens", "new", "other", "--save", str(saved), "--file", str(token_file))
    assert (1, True) == (again.code, "--save writes a new file" in again.err)
    assert token == saved.read_text().strip()
    assert "other" not in [token.name for token in read_tokens(token_file)]
    nowhere, unneeded = str(tmp_path / "nowhere" / "tokens"), tmp_path / "unneeded"
    failed = await here("tokens", "new", "third", "--save", str(unneeded), "--file", nowhere)
    assert (False, True) == (failed.code == 0, "cannot be written" in failed.err)
    assert not unneeded.exists()


def test_a_token_in_a_file_that_others_may_read_is_told(token_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sidecar", "tokens", "new", "one", "--file", str(token_file)]
    for mode, warned in ((0o644, True), (0o600, False)):
        printed = tmp_path / f"{mode:o}"
        printed.touch(mode)
        printed.chmod(mode)
        with printed.open("w") as out:
            told = subprocess.run(
                [*command[:5], f"t{mode:o}", *command[6:]], stdout=out, stderr=subprocess.PIPE, text=True
            )
        assert (0, warned) == (told.returncode, "can be read by others" in told.stderr)
        asked = subprocess.run(
            [sys.executable, "-m", "sidecar", "breakers", "--admin", "127.0.0.1:1", "--token-file", str(printed)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert warned == ("can be read by others" in asked.stderr)


async def test_orders_about_tokens_that_cannot_be_followed_are_told(token_file: Path) -> None:
    for arguments, code, words in [
        (("new", "olga"), 1, "sidecar tokens revoke olga"),
        (("new", "-x"), 2, "NAME"),
        (("new", "a b"), 2, "a name has"),
        (("revoke", "nobody"), 1, "there is one of eve, olga"),
        (("new", "x", "--role", "admin"), 2, "invalid choice"),
    ]:
        ended = await here("tokens", *arguments, "--file", str(token_file))
        assert (code, True) == (ended.code, words in ended.err), ended
    assert (2, True) == ((ended := await here("tokens", "list")).code, "say which one with --file" in ended.err)
    missing = await here("tokens", "list", "--file", str(token_file.with_name("nothing")))
    assert (1, True) == (missing.code, "tokens new" in missing.err)
    nowhere = await here("tokens", "new", "x", "--file", "/nowhere/tokens")
    assert (1, "") == (nowhere.code, nowhere.out)
    assert ("eve", "olga") == tuple(token.name for token in read_tokens(token_file))
    assert not [name for name in os.listdir(token_file.parent) if name.startswith(".tokens")]
