"""Lines with their numbers, and files that appear whole or not at all."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from quiver.encoder.errors import InputError
from quiver.encoder.files import atomic_file, cache_folder, check_target, read_lines, read_whole


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
