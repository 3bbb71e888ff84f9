"""Files that the configuration names and that cannot be read: the reason is told in words."""

from pathlib import Path

import pytest

from config.files import UnreadableFile, read_file
from config.problems import Problem, shown_value


def reason(path: Path) -> str:
    with pytest.raises(UnreadableFile) as caught:
        read_file(path, 100)
    return str(caught.value)


def test_a_path_through_a_file_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "a part of the path is a file" in reason(tmp_path / "file" / "below")


def test_a_loop_of_links_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert "a loop of symbolic links" in reason(tmp_path / "a")


def test_a_path_that_no_system_takes_is_recognised(tmp_path: Path) -> None:
    assert "too long" in reason(tmp_path / ("x" * 300))
    assert "the path is not valid" in reason(tmp_path / "a\0b")


def test_a_file_may_be_as_large_as_the_limit_and_no_larger(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert 100 == len(read_file(path, 100))
    path.write_bytes(b"x" * 101)
    assert "larger than" in reason(path)


def test_a_file_that_may_not_be_read_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)  # whoever runs the tests may be allowed to read everything
    assert "may not be read by this user" in reason(tmp_path / "file")


def test_a_problem_without_a_place_is_just_its_sentence() -> None:
    assert "nothing works" == str(Problem("nothing works"))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (5, "5"),
        ("5", '"5"'),
        (["a", 1, None, True, "b"], "[a, 1, null, true, …]"),
        ([["a"], {"b": 1}], "[…, …]"),
        ({"a": 1}, None),
        (1 << 300, "a very large number"),
        ("user:hunter2@corp:3128", "(hidden)"),
    ],
)
def test_a_value_is_shown_briefly(value: object, shown: str | None) -> None:
    assert shown == shown_value(("some", "key"), value)


@pytest.mark.parametrize(
    "value",
    [
        "http://user:hunter2 x@corp:3128",
        "http://user:hun/ter2@corp:3128",
        "user:hunter2 @corp",
        "u:p\nhunter2@corp",
        "https://hunter2@corp",
        "http://x.test/?api-key=hunter2",
        "http://x.test/?page=1&pwd=hunter2",
        "api-key=hunter2",
        "password: hunter2",
        "Token hunter2",
        "scrypt:hunter2",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.hunter2",
        ["fine", "http://user:hunter2 x@corp"],
    ],
)
def test_a_value_with_a_credential_in_it_is_never_shown(value: object) -> None:
    assert "(hidden)" in str(shown_value(("some", "key"), value))
    assert "hunter2" not in str(shown_value(("some", "key"), value))


@pytest.mark.parametrize("key", ["egress_proxy", "notify_url", "pwd", "sas", "client_assertion", "x-api-key"])
def test_a_value_under_a_telling_key_is_never_shown(key: str) -> None:
    assert "(hidden)" == shown_value(("some", key), "hunter2")


def test_of_an_address_the_host_is_shown_and_not_its_path() -> None:
    assert "https://hooks.test/…" == shown_value(("some", "webhook_address"), "https://hooks.test/services/hunter2")
    assert "https://hooks.test" == shown_value(("some", "address"), "https://hooks.test")
