"""The folder of an index: commits that are whole or not there, and damage that is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from encoder.errors import InputError
from retrieval.indexes import IndexFolder, build_index, open_index
from retrieval.indexes.store import MANIFEST, open_folder
from retrieval.protocols import DenseModel, TokenModel
from retrieval.records import Document

OLD = [Document(f"old{number}", f"word{number} text", "Title") for number in range(5)]
NEW = [Document(f"new{number}", f"other{number}") for number in range(7)]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture(params=["dense", "colbert"])
def built(request: pytest.FixtureRequest, tmp_path: Path, word_sum: DenseModel, word_by_word: TokenModel) -> Path:
    model = word_sum if request.param == "dense" else word_by_word
    return build_index(OLD, model, tmp_path / "index").path


def test_the_manifest_names_every_file_with_size_and_checksum(built: Path) -> None:
    manifest, folder = open_folder(built)
    on_disk = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert {name: entry.bytes for name, entry in manifest.files.items()} == on_disk
    assert len(on_disk) in (4, 5)
    assert [path.name for path in built.parent.iterdir()] == ["index"]
    written = json.loads((built / MANIFEST).read_text())
    assert (written["format"], written["version"], written["count"]) == ("quiver-index", 1, 5)


def test_a_flipped_byte_in_any_file_is_found_and_named(built: Path) -> None:
    seen = 0
    for path in files_of(built):
        whole = path.read_bytes()
        for place in (0, len(whole) // 2, len(whole) - 2):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
            with pytest.raises(InputError, match=path.name):
                open_index(built)
            seen += 1
        path.write_bytes(whole)
    open_index(built)
    assert seen in (15, 18)


def test_a_truncated_or_missing_file_is_found_without_hashing(built: Path) -> None:
    for path in files_of(built):
        whole = path.read_bytes()
        for length in (0, 1, len(whole) - 1 if path.name != MANIFEST else len(whole) - 3):
            path.write_bytes(whole[:length])
            with pytest.raises(
                InputError, match=f"{path.name}: " + ("not JSON" if path.name == MANIFEST else f"{length} bytes, but {len(whole)}")
            ):
                open_index(built, verify=False)
        path.unlink()
        with pytest.raises(InputError, match=path.name):
            open_index(built, verify=False)
        path.write_bytes(whole)
    assert len(open_index(built, verify=False)) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "index format version 2, this Quiver reads version 1"),
        ({"version": None}, "index format version None"),
        ({"format": "other"}, "not the manifest of a Quiver index"),
        ({"count": 6}, "checksum does not match"),
        ({"checksum": "0"}, "checksum does not match"),
    ],
)
def test_another_format_version_or_an_edited_manifest_is_refused(built: Path, change: dict[str, object], message: str) -> None:
    path = built / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match=message):
        open_index(built)


@pytest.mark.parametrize("content", ["[]", "{}", "null", "{", '{"name": "my project"}'])
def test_a_foreign_folder_is_not_opened_and_not_overwritten(tmp_path: Path, word_sum: DenseModel, content: str) -> None:
    foreign = tmp_path / "home"
    foreign.mkdir()
    (foreign / MANIFEST).write_text(content)
    (foreign / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match=MANIFEST):
        open_index(foreign)
    with pytest.raises(InputError, match="not empty and not an index"):
        build_index(OLD, word_sum, foreign, overwrite=True)
    assert (foreign / "thesis.txt").read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_a_missing_folder_a_file_and_an_empty_folder(tmp_path: Path, word_sum: DenseModel) -> None:
    with pytest.raises(InputError, match="is not an index"):
        open_index(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="not empty and not an index"):
        build_index(OLD, word_sum, tmp_path / "file")
    with pytest.raises(InputError, match="cannot be written"):
        build_index(OLD, word_sum, tmp_path / "file" / "below")
    (tmp_path / "empty").mkdir()
    assert len(build_index(OLD, word_sum, tmp_path / "empty")) == 5
    assert len(build_index(OLD, word_sum, tmp_path / "deep" / "er")) == 5


def test_an_existing_index_is_kept_unless_overwriting_is_asked_for(built: Path, word_sum: DenseModel) -> None:
    with pytest.raises(InputError, match="there is an index already"):
        build_index(NEW, word_sum, built)
    assert open_index(built).ids[0] == "old0"
    assert not word_sum.calls or word_sum.calls[-1][1][0].startswith("Title")  # refused before anything was encoded
    build_index(NEW, word_sum, built, overwrite=True)
    assert list(open_index(built).ids) == [document.id for document in NEW]
    assert len([path for path in built.iterdir() if path.is_dir()]) == 1
    assert [path.name for path in built.parent.iterdir()] == ["index"]


def test_an_index_in_use_survives_being_overwritten(built: Path, word_sum: DenseModel) -> None:
    in_use = open_index(built)
    build_index(NEW, word_sum, built, overwrite=True)
    assert in_use.text_of("old3") == "Title word3 text"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("function", ["fsync", "rename", "replace"])
def test_a_fault_at_any_step_leaves_the_old_or_the_new(
    tmp_path: Path, word_sum: DenseModel, monkeypatch: pytest.MonkeyPatch, function: str, overwrite: bool
) -> None:
    target = tmp_path / "index"
    real = getattr(os, function)
    outcomes = []
    for failing in range(1, 30):
        shutil.rmtree(target, ignore_errors=True)
        if overwrite:
            build_index(OLD, word_sum, target)
        calls = 0

        def fail(*args: object, failing: int = failing) -> object:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise OSError(5, "input/output error")
            return real(*args)

        with monkeypatch.context() as patched:
            patched.setattr(os, function, fail)
            broken = breaks(lambda: build_index(NEW, word_sum, target, overwrite=True))
        outcomes.append(state(target))
        assert not [path for path in tmp_path.iterdir() if path.name != "index"]
        if not broken:
            break
    before = "old" if overwrite else "none"
    assert outcomes[-1] == "new"
    assert set(outcomes[:-1]) <= {before, "new"}
    assert outcomes.count(before) >= EARLY_FAULTS[function, overwrite]


# How many calls there are at least before the commit: three files and four folders and manifests are synced, ...
EARLY_FAULTS = {
    ("fsync", False): 6,
    ("fsync", True): 7,
    ("rename", False): 1,
    ("rename", True): 1,
    ("replace", False): 0,
    ("replace", True): 1,
}


def breaks(action: Callable[[], object]) -> bool:
    """Whether the input/output error came out, as it is or as the user's one line."""
    try:
        action()
    except (OSError, InputError) as error:
        return "input/output error" in str(error)
    return False


def state(target: Path) -> str:
    if not target.exists():
        return "none"
    index: IndexFolder = open_index(target)
    assert list(index.ids) in ([document.id for document in OLD], [document.id for document in NEW])
    return index.ids[0][:3]


KILLED = """
    import os, shutil, sys
    from pathlib import Path
    from retrieval.indexes.store import Description, commit, open_folder, staging
    from retrieval.records import ModelCard, TokenCounts

    target, overwrite = Path(sys.argv[1]), sys.argv[2] == "True"
    card = ModelCard("m", "dense", "f", 1, "dot", 1, 1)
    description = Description("exact-dense", 1, "now", {}, card, True, " ", False, TokenCounts(1, 1, 0, 0))

    def write(content):
        with staging(target, overwrite=True) as place:
            (place.data / "content.txt").write_text(content)
            commit(place, description, {"content.txt": "content"})

    def content():
        return (open_folder(target)[1] / "content.txt").read_text() if target.exists() else "none"

    def write_and_die(fatal):
        calls = 0

        def deadly(real):
            def call(*args, **options):
                nonlocal calls
                calls += 1
                if calls == fatal:
                    os._exit(137)
                return real(*args, **options)
            return call

        for name in ("mkdir", "rename", "replace", "fsync", "rmdir", "unlink"):
            setattr(os, name, deadly(getattr(os, name)))
        write("new")
        os._exit(0)

    for fatal in range(1, 60):
        shutil.rmtree(target, ignore_errors=True)
        if overwrite:
            write("old")
        child = os.fork()
        if child == 0:
            write_and_die(fatal)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = content()
        write("again")  # what the kill left behind is in nobody's way
        print(code, found, content(), len(list(target.glob("g-*"))))
        if code == 0:
            break
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("overwrite", [False, True])
def test_after_a_kill_at_any_system_call_the_folder_is_the_old_or_the_new(tmp_path: Path, overwrite: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(KILLED))
    command = [sys.executable, str(script), str(tmp_path / "index"), str(overwrite)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = [line.split() for line in done.stdout.splitlines()]
    codes, found, again, generations = zip(*rows, strict=True)
    assert codes == ("137",) * (len(rows) - 1) + ("0",)
    assert set(again) == {"again"}
    assert set(generations) == {"1"}
    first_new = found.index("new")
    assert found == (("old" if overwrite else "none"),) * first_new + ("new",) * (len(rows) - first_new)
    assert first_new >= 6  # folder, file, manifest, two syncs of folders, the renames
    assert len(rows) > first_new + 1
