"""Small files: JSON with clear errors, and what is written where."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from quiver.encoder.errors import InputError
from quiver.encoder.files import check_target, expand_home, read_json, replacing, write_json, write_text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON: Expecting value"),
        (b"{'a': 1}", "not JSON: Expecting property name"),
        (b'{"a": "\xff"}', "not JSON: .* can't decode byte 0xff"),
        (b"[1]", "must hold a JSON object, got list"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "JSON is nested too deeply$"),
        (b'{"a": ' + b"7" * 5_000 + b"}", "contains a number with too many digits$"),
    ],
    ids=["empty", "quotes", "bytes", "list", "nested", "digits"],
)
def test_what_is_no_json_object_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"a\.json: {message}") as error:
        read_json(path)
    assert "\n" not in str(error.value)


def test_json_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.json: the file is missing"):
        read_json(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot be read"):
        read_json(tmp_path)


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path, full_disk: Callable[[int], AbstractContextManager[None]]) -> None:
    write_text(tmp_path / "a.txt", "old")
    with full_disk(4096), pytest.raises(OSError, match="File too large") as caught:
        write_text(tmp_path / "a.txt", "new" * 4096)
    assert caught.value.filename == str(tmp_path / "a.txt")
    assert (tmp_path / "a.txt").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": [1, "ü"]})
    assert read_json(tmp_path / "a.json") == {"a": [1, "ü"]}


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_home("~/a") == tmp_path / "a"
    assert expand_home("a/~b") == Path("a/~b")
    with pytest.raises(InputError, match=r"^~nosuchuser/x: no home folder is known for ~nosuchuser; write the full path$"):
        expand_home("~nosuchuser/x")


@pytest.mark.skipif(os.name == "nt", reason="no pipes and sockets with names")
@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_what_is_no_file_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, linked: bool) -> None:
    """As root, a rename would have put a file in the place of a device."""
    monkeypatch.chdir(tmp_path)  # the name of a socket may not be long
    if kind == "pipe":
        os.mkfifo("special")
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("special")
    before = Path("special").lstat()
    path = Path("link" if linked else "special")
    if linked:
        path.symlink_to("special")
    for write in (check_target, lambda path: write_text(path, "new")):
        with pytest.raises(InputError, match="cannot be written, it is a device, a pipe or a socket; name a file"):
            write(path)
    after = Path("special").lstat()
    assert (stat.S_IFMT(after.st_mode), after.st_ino) == (stat.S_IFMT(before.st_mode), before.st_ino)
    assert path.is_symlink() == linked
    assert len(list(tmp_path.iterdir())) == 1 + linked


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_its_file_is_written(tmp_path: Path, there: bool) -> None:
    (tmp_path / "far").mkdir()
    target = tmp_path / "far" / "real.txt"
    if there:
        target.write_text("old", encoding="utf-8")
    link, first = tmp_path / "second", tmp_path / "first"
    first.symlink_to(Path("far") / "real.txt")
    link.symlink_to("first")
    check_target(link)
    with replacing(link) as temporary:
        assert temporary.parent == target.parent  # a rename does not cross file systems
        temporary.write_text("new", encoding="utf-8")
    assert target.read_text(encoding="utf-8") == link.read_text(encoding="utf-8") == "new"
    assert link.is_symlink()
    assert first.is_symlink()
    assert [path.name for path in target.parent.iterdir()] == ["real.txt"]


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    one, two, lost = tmp_path / "one", tmp_path / "two", tmp_path / "lost"
    one.symlink_to(two)
    two.symlink_to(one)
    lost.symlink_to(tmp_path / "none" / "a.txt")
    for path, message in ((one, "the symbolic link leads back to itself"), (lost, r"the folder \S+/none does not exist")):
        for write in (check_target, lambda path: write_text(path, "new")):
            with pytest.raises(InputError, match=f"{path.name}: cannot be written, {message}"):
                write(path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "to-folder").symlink_to("folder")
    with pytest.raises(InputError, match="it is a folder"):
        check_target(tmp_path / "to-folder")
