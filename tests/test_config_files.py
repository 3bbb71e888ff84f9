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
