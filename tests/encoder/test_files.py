"""Files: JSON with clear errors, lines with their numbers, and files that appear whole or not at all."""

from __future__ import annotations

import gzip
import os
import socket
import stat
from pathlib import Path

import pytest

from quiver.encoder.errors import InputError
from quiver.encoder.files import (
    atomic_file,
    cache_folder,
    check_target,
    expand_home,
    read_json,
    read_lines,
    read_whole,
    replacing,
    write_text,
)


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


def test_lines_keep_their_numbers_across_blank_lines_and_windows_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\n\r\n  \ntwo\u2028still two\nthree".encode())
    assert list(read_lines(path)) == [(1, "one"), (4, "two\u2028still two"), (5, "three")]


def test_a_whole_file_keeps_its_ends_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\n\ntwo\u2028\ufeffthree".encode())
    assert read_whole(path) == "one\r\n\ntwo\u2028\ufeffthree"
    path.write_bytes(b"one\ntwo \xff\n")
    for read in (read_whole, lambda path: list(read_lines(path))):
        with pytest.raises(InputError, match=r"a\.txt:2: not UTF-8 \(invalid start byte at byte 4 of the line\)"):
            read(path)


def test_a_damaged_gzip_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    whole = gzip.compress(os.urandom(5000).hex().encode())
    for content in (whole[: len(whole) // 2], b"not gzip at all", whole[:100] + b"\xff" * 8 + whole[108:]):
        path.write_bytes(content)
        for read in (read_whole, lambda path: list(read_lines(path))):
            with pytest.raises(InputError, match=r"a\.txt\.gz.*damaged gzip"):
                read(path)


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(InputError, match="the file is empty"):
        list(read_lines(path))


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            list(read_lines(path))


def test_equal_content_gives_equal_gzip(tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz"):
        with atomic_file(tmp_path / name) as file:
            file.write(b"content")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert (tmp_path / "a.gz").read_bytes()[3:8] == bytes(5)  # RFC 1952: no name flagged, no time
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == b"content"


@pytest.mark.parametrize("fault", ["write", "fsync", "replace"])
def test_a_fault_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"old")

    def fail(*args: object) -> None:
        raise OSError("disk full")

    def write() -> None:
        with atomic_file(path) as file:
            file.write(b"new")
            if fault == "write":
                fail()

    if fault != "write":
        monkeypatch.setattr(os, fault, fail)
    with pytest.raises(OSError, match="disk full"):
        write()
    assert {entry.name: entry.read_bytes() for entry in tmp_path.iterdir()} == {"a.txt": b"old"}


def test_the_early_check_agrees_with_writing(tmp_path: Path) -> None:
    check_target(tmp_path / "new.txt")
    (tmp_path / "old.txt").touch()
    check_target(tmp_path / "old.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["old.txt"]
    with pytest.raises(InputError, match="does not exist"):
        check_target(tmp_path / "none" / "a.txt")
    with pytest.raises(InputError, match="does not exist"):
        check_target(tmp_path / "old.txt" / "a.txt")


@pytest.mark.skipif(os.name == "nt" or (hasattr(os, "geteuid") and os.geteuid() == 0), reason="no folder is closed to this user")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with pytest.raises(InputError, match="no permission"):
        check_target(closed / "a.txt")


def test_where_things_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("QUIVER_CACHE", "~/here")
    assert cache_folder("vectors") == tmp_path / "here" / "vectors"
    monkeypatch.delenv("QUIVER_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder("vectors") == tmp_path / ".cache" / "quiver" / "vectors"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder("vectors") == tmp_path / "xdg" / "quiver" / "vectors"
