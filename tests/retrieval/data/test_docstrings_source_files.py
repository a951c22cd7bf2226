"""Source files are found by name without importing, and test code is left out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.data.docstrings import package_files, stdlib_files


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the import system searches, for packages made by a test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def make(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise RuntimeError('imported')\n", encoding="utf-8")


def test_the_standard_library_without_tests_programs_and_site_packages() -> None:
    files = stdlib_files()
    assert len(files) > 400
    assert {"os", "json.decoder", "asyncio", "asyncio.tasks", "unittest.mock", "doctest"} <= files.keys()
    parts = {part for module in files for part in module.split(".")}
    assert parts.isdisjoint({"test", "tests", "idle_test", "idlelib", "turtledemo", "site-packages", "pytest"})
    assert all(path.is_file() and path.suffix == ".py" for path in files.values())
    assert "sys" not in files  # written in C
    assert list(files) == list(stdlib_files())


def test_a_missing_standard_library_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    with pytest.raises(InputError, match="the source of the standard library is missing"):
        stdlib_files()


def test_a_package_is_listed_without_being_imported(on_path: Path) -> None:
    make(
        on_path / "quiver_sample", "__init__.py", "a.py", "sub/__init__.py", "sub/b.py", "data/plain.py", "tests/test_a.py", "not-a-name.py"
    )
    make(on_path / "quiver_sample", "test_c.py", "conftest.py", "contest.py", "notes.txt", "testing.py", "deep/unit_tests/d.py")
    files = package_files("quiver_sample")
    assert list(files) == [
        "quiver_sample",
        "quiver_sample.a",
        "quiver_sample.contest",
        "quiver_sample.data.plain",
        "quiver_sample.sub",
        "quiver_sample.sub.b",
        "quiver_sample.testing",
    ]
    assert files["quiver_sample.sub"] == on_path / "quiver_sample" / "sub" / "__init__.py"
    assert "quiver_sample" not in sys.modules


def test_a_single_module_and_a_namespace_package_are_packages_too(on_path: Path) -> None:
    make(on_path, "quiver_single.py", "quiver_namespace/part.py")
    assert package_files("quiver_single") == {"quiver_single": on_path / "quiver_single.py"}
    assert list(package_files("quiver_namespace")) == ["quiver_namespace.part"]


def test_a_link_to_a_parent_folder_is_not_followed(on_path: Path) -> None:
    make(on_path / "quiver_linked", "__init__.py")
    (on_path / "quiver_linked" / "again").symlink_to(on_path / "quiver_linked", target_is_directory=True)
    assert list(package_files("quiver_linked")) == ["quiver_linked"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("json", "'json' belongs to the standard library"),
        ("no_such_package_here", "'no_such_package_here' is not installed"),
        ("pyyaml", "use its import name .*yaml"),
        ("PyYAML", "use its import name .*yaml"),
        ("nunpy", "did you mean 'numpy'"),
        ("numpy.linalg", "is not installed"),
        ("__main__", "is not installed"),
        ("", "is not installed"),
    ],
)
def test_a_package_that_cannot_be_mined_is_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        package_files(name)


def test_a_package_without_python_source_is_refused(on_path: Path) -> None:
    (on_path / "quiver_hollow").mkdir()
    with pytest.raises(InputError, match="'quiver_hollow' has no Python source"):
        package_files("quiver_hollow")
