"""Damage is confined to what is damaged: what still answers, what a repair keeps and encodes again, which generations stay on the disk."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.index import (
    BuildOptions,
    DamagedIndexError,
    IndexReader,
    add_documents,
    build_index,
    check_index,
    compact_index,
    delete_documents,
    open_index,
    repair_index,
)
from quiver.retrieval.records import Document

COUNT = 800
DOCUMENTS = [
    Document(f"d{number:04d}", f"word{number % 97} word{number % 13} " + "padding " * 20, "", {"year": 1900 + number % 100})
    for number in range(COUNT)
]
ENGINES = ["exact-dense", "pq-dense", "exact-tokens", "ivf-tokens", "bm25"]


@pytest.fixture(scope="module", params=ENGINES)
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, word_model: Callable[[str], Any]) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    options = BuildOptions(engine=request.param, calibrate=False)
    return build_index(write_corpus(folder), word_model(request.param), folder / "index", options=options).path


def write_corpus(folder: Path) -> Path:
    lines = [json.dumps({"_id": each.id, "text": each.text, **(each.metadata or {})}) + "\n" for each in DOCUMENTS]
    (folder / "corpus.jsonl").write_text("".join(lines))
    return folder / "corpus.jsonl"


@pytest.fixture
def built(pristine: Path, tmp_path: Path) -> Path:
    """A copy of the index that the test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / "index"))


@pytest.fixture
def exact(tmp_path: Path, word_sum: Any) -> Path:
    return build_index(DOCUMENTS, word_sum, tmp_path / "index").path


def scores_of(index: IndexReader) -> dict[str, float]:
    """The score of every document for one query, looking at everything."""
    if index.kind == "bm25":
        words = index.search([["padding", "word7", "word12"]], len(index))
        return dict(zip(words.ids[0], words.scores[0].tolist(), strict=True))
    rng = np.random.default_rng(0)
    dim = index.manifest.model.dim
    query = rng.standard_normal((1, dim)) if index.manifest.model.kind == "dense" else [rng.standard_normal((2, dim))]
    hits = index.search(
        [each.astype(np.float32) for each in query] if isinstance(query, list) else query.astype(np.float32), len(index), effort="exact"
    )
    return dict(zip(hits.ids[0], hits.scores[0].tolist(), strict=True))


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.rglob(pattern)
    return path


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)


def wipe(path: Path, place: int, size: int = 4096) -> None:
    content = bytearray(path.read_bytes())
    content[place : place + size] = bytes(len(content[place : place + size]))
    path.write_bytes(content)


def digest_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "LOCK"
    }


def test_search_answers_and_filters_where_only_a_text_is_damaged(built: Path) -> None:
    right = scores_of(open_index(built))
    path = only(built, "texts.arrow")
    flip(path, path.read_bytes().index(DOCUMENTS[400].text.encode()))
    index = open_index(built)
    assert scores_of(index) == right
    assert index.locate(["d0400"])[0] is not None
    with pytest.raises(DamagedIndexError, match=r"texts\.arrow: bytes [0-9]+ to [0-9]+ have changed"):
        index.document("d0400")
    assert index.document("d0799") == DOCUMENTS[799]


def test_repair_encodes_the_documents_of_damaged_blocks_again(pristine: Path, tmp_path: Path, word_model: Callable[[str], Any]) -> None:
    whole = open_index(pristine)
    right, model = scores_of(whole), word_model(whole.kind)
    (segment,) = (pristine / "segments").iterdir()
    for name in sorted(path.name for path in segment.iterdir()):
        built = Path(shutil.copytree(pristine, tmp_path / name))
        flip(built / "segments" / segment.name / name, (segment / name).stat().st_size // 2)
        assert any(name in problem for problem in check_index(built).problems), name
        planned = repair_index(built, model=model, dry_run=True)
        report = repair_index(built, model=model)
        assert (report.documents, report.lost_unnamed, check_index(built).problems) == (COUNT, 0, ()), name
        assert (planned.encoded, planned.lost, planned.documents) == (report.encoded, report.lost, report.documents), name
        index = open_index(built)
        assert scores_of(index) == pytest.approx(right, abs=1e-4), name
        assert sorted(index.documents, key=lambda document: document.id) == DOCUMENTS, name
        add_documents(built, [Document("more", "word1")], model)
        assert len(compact_index(built)) == COUNT + 1


@pytest.mark.parametrize("store_text", [True, False])
def test_repair_names_the_documents_that_it_cannot_encode_again(tmp_path: Path, word_sum: Any, store_text: bool) -> None:
    built = build_index(DOCUMENTS, word_sum, tmp_path / "index", options=BuildOptions(store_text=store_text)).path
    right = scores_of(open_index(built))
    wipe(only(built, "vectors.f32"), 300_000)
    report = repair_index(built, encode_again=not store_text)
    assert 0 < len(report.lost) <= 2 * 16384 // 1024 + 2  # the rows of two blocks at most
    assert (report.encoded, report.lost_unnamed, report.documents) == ((), 0, COUNT - len(report.lost))
    assert scores_of(open_index(built)) == {key: score for key, score in right.items() if key not in report.lost}


def test_a_missing_file_costs_the_rows_that_cannot_be_encoded_again(exact: Path, word_sum: Any) -> None:
    add_documents(exact, [Document("more", "word1")], word_sum)
    only(exact / "segments" / "s-000000000001-0000", "vectors.f32").unlink()
    report = repair_index(exact, model=word_sum)
    assert (report.documents, len(report.encoded), report.lost) == (COUNT + 1, COUNT, ())
    (encoded,) = [path for path in (exact / "segments").glob("*/vectors.f32") if path.stat().st_size > 10_000]
    encoded.unlink()
    report = repair_index(exact, encode_again=False)
    assert (report.documents, len(report.lost)) == (1, COUNT)
    assert [*open_index(exact).ids] == ["more"]


@pytest.fixture
def from_file(tmp_path: Path, word_sum: Any) -> Path:
    """An index of a file, without texts."""
    return build_index(write_corpus(tmp_path), word_sum, tmp_path / "index", options=BuildOptions(store_text=False)).path


@pytest.mark.parametrize("name", ["vectors.f32", "ids.arrow"])
def test_repair_reads_damaged_documents_from_their_source(from_file: Path, word_sum: Any, name: str) -> None:
    """Those whose ids are lost, too: they are the ones that the index has not."""
    right = scores_of(open_index(from_file))
    wipe(only(from_file, name), 1000, 1)
    report = repair_index(from_file, model=word_sum)
    assert (report.lost, report.lost_unnamed, report.documents) == ((), 0, COUNT)
    assert len(report.encoded) == (16 if name == "vectors.f32" else COUNT)
    assert scores_of(open_index(from_file)) == pytest.approx(right)


def test_a_source_that_is_gone_leaves_the_documents_lost(from_file: Path, word_sum: Any, caplog: pytest.LogCaptureFixture) -> None:
    (from_file.parent / "corpus.jsonl").unlink()
    wipe(only(from_file, "vectors.f32"), 1000, 1)
    report = repair_index(from_file, model=word_sum)
    assert (report.encoded, len(report.lost), report.documents) == ((), 16, COUNT - 16)
    assert "no documents of this source can be encoded again" in caplog.text


def test_documents_of_unknown_ids_are_not_guessed_where_the_source_has_more_new_ones(from_file: Path, word_sum: Any) -> None:
    add_documents(from_file, [Document("more", "word1")], word_sum)
    delete_documents(from_file, ["d0790"])
    wipe(only(from_file / "segments" / "s-000000000001-0000", "ids.arrow"), 1000, 1)
    report = repair_index(from_file, model=word_sum)
    assert (report.lost_unnamed, [*open_index(from_file).ids]) == (COUNT - 1, ["more"])


def test_repair_refuses_a_model_that_is_missing_or_not_that_of_the_index(exact: Path, word_by_word: Any) -> None:
    wipe(only(exact, "vectors.f32"), 1000, 1)
    before = digest_of(exact)
    with pytest.raises(InputError, match=r"damaged documents have to be encoded again, but .*; or leave them out: --no-encode"):
        repair_index(exact)
    with pytest.raises(InputError, match="built with"):
        repair_index(exact, model=word_by_word)
    assert digest_of(exact) == before
    assert len(repair_index(exact, encode_again=False).lost) == 16


def test_a_damaged_codec_is_read_from_its_copy(pristine: Path, tmp_path: Path) -> None:
    right = scores_of(open_index(pristine))
    (codec,) = (pristine / "codec").iterdir()
    for name in sorted(path.name for path in codec.iterdir()):
        built = Path(shutil.copytree(pristine, tmp_path / name))
        flip(built / "codec" / codec.name / name, (codec / name).stat().st_size // 2)
        assert any(name in problem for problem in check_index(built).problems), name
        report = repair_index(built)
        assert (report.documents, report.lost, report.encoded, check_index(built).problems) == (COUNT, (), (), ()), name
        assert scores_of(open_index(built)) == right, name
    damaged = Path(shutil.copytree(pristine, tmp_path / "both"))
    for path in list((damaged / "codec" / codec.name).iterdir()):
        path.write_bytes(b"")
    with pytest.raises(InputError, match="the codec and its copy are damaged, so no vector can be read; build the index again"):
        repair_index(damaged)


def test_a_dry_run_changes_no_byte_and_repair_deletes_none(exact: Path, word_sum: Any) -> None:
    add_documents(exact, [Document("more", "word1")], word_sum)
    wipe(only(exact / "segments" / "s-000000000001-0000", "vectors.f32"), 100_000)
    damaged = digest_of(exact)
    planned = repair_index(exact, dry_run=True)
    assert planned.dry_run
    assert digest_of(exact) == damaged
    report = repair_index(exact, model=word_sum)
    assert len(planned.encoded) > 0
    assert (planned.encoded, planned.lost, planned.documents, planned.problems) == (
        report.encoded,
        report.lost,
        report.documents,
        report.problems,
    )
    kept = set(digest_of(exact).values())
    assert {name for name, digest in damaged.items() if digest not in kept} == set()
    assert all(path.is_relative_to(exact / "quarantine") and path.exists() for path in report.quarantined)


@pytest.mark.parametrize("name", ["FORMAT", "HEAD"])
def test_repair_keeps_the_damaged_content_of_a_file_that_it_overwrites(exact: Path, name: str) -> None:
    flip(exact / name, 20)
    damaged = (exact / name).read_bytes()
    report = repair_index(exact)
    assert [path.read_bytes() for path in report.quarantined if path.name == name] == [damaged]
    assert check_index(exact).problems == ()
    assert len(open_index(exact)) == COUNT


def test_a_missing_newest_manifest_is_an_error_and_deleted_documents_do_not_return(exact: Path) -> None:
    delete_documents(exact, ["d0000"])
    delete_documents(exact, ["d0001"])
    newest = exact / "manifests" / "m-000000000003.json"
    newest.unlink()
    for attempt in (lambda: open_index(exact), lambda: delete_documents(exact, ["d0002"]), lambda: compact_index(exact)):
        with pytest.raises(DamagedIndexError, match=r"m-000000000003\.json: missing, and it is the newest .*--generation 2 .* opens"):
            attempt()
    older = open_index(exact, generation=2)
    assert (older.manifest.generation, len(older)) == (2, COUNT - 1)
    report = repair_index(exact)  # from the copy in the head
    assert (report.restored, report.documents) == (3, COUNT - 2)
    assert open_index(exact).locate(["d0000", "d0001"]) == [None, None]


@pytest.mark.parametrize("engine", ENGINES)
def test_no_flipped_bit_changes_an_answer_silently(engine: str, tmp_path: Path, word_sum: Any, word_by_word: Any) -> None:
    model = "bm25" if engine == "bm25" else word_sum if engine.endswith("dense") else word_by_word
    build_index(DOCUMENTS[:300], model, tmp_path / "i", options=BuildOptions(engine=engine, calibrate=False))
    delete_documents(tmp_path / "i", ["d0007", "d0150"])
    right = scores_of(open_index(tmp_path / "i"))
    files = [path for path in sorted((tmp_path / "i" / "segments").rglob("*")) if path.is_file()]
    rng, noticed = np.random.default_rng(0), 0
    for _ in range(100):
        path = files[int(rng.integers(len(files)))]
        whole = path.read_bytes()
        flip(path, int(rng.integers(len(whole))))
        try:
            assert scores_of(open_index(tmp_path / "i")) == right
        except DamagedIndexError:
            noticed += 1
        path.write_bytes(whole)
    assert noticed > 20


def test_random_damage_is_noticed_and_repair_loses_no_document(pristine: Path, tmp_path: Path, word_model: Callable[[str], Any]) -> None:
    """Flipped bits, wiped sectors, files that are cut short or gone, in any file: answers are right or refused, and all texts come back."""
    whole = open_index(pristine)
    right, model, rng = scores_of(whole), word_model(whole.kind), random.Random(whole.kind)
    files = [
        path for path in sorted(pristine.rglob("*")) if path.is_file() and path.stat().st_size and path.name not in ("LOCK", "sources.json")
    ]
    for number in range(10):
        built = Path(shutil.copytree(pristine, tmp_path / str(number)))
        path = built / rng.choice(files).relative_to(pristine)
        content = bytearray(path.read_bytes())
        place, kind = rng.randrange(len(content)), rng.choice(["bit", "sector", "cut", "missing"])
        path.unlink()
        if kind != "missing":
            content[place] ^= 1 << rng.randrange(8)
            path.write_bytes(content[:place] if kind == "cut" else content)
        if kind == "sector":
            wipe(path, place // 4096 * 4096)
        damage = (kind, path, place)
        with suppress(InputError):
            assert scores_of(open_index(built)) == right, damage
            assert list(open_index(built).documents) == DOCUMENTS, damage
        with suppress(InputError):
            assert any(path.name in problem for problem in check_index(built).problems), damage
        report = repair_index(built, model=model)
        assert (report.lost, report.lost_unnamed, check_index(built).problems) == ((), 0, ()), damage
        assert scores_of(open_index(built)) == pytest.approx(right, abs=1e-4), damage
        assert sorted(open_index(built).documents, key=lambda document: document.id) == DOCUMENTS, damage


def test_a_replaced_document_does_not_return_with_lost_tombstones(exact: Path, word_sum: Any) -> None:
    new = Document("d0003", "another text", "", {"year": 2000})
    add_documents(exact, [new], word_sum, replace_existing=True, memory=1)
    delete_documents(exact, ["d0009"])
    for path in (exact / "tombstones").iterdir():
        path.unlink()
    report = repair_index(exact)
    index = open_index(exact)
    assert list(index.ids).count("d0003") == 1
    assert index.document("d0003") == new
    assert (report.undone_deletions, index.locate(["d0009"])[0] is not None) == (1, True)


@pytest.mark.parametrize("half", [0, 1])
def test_deleted_documents_stay_deleted_where_one_copy_of_the_tombstones_is_damaged(exact: Path, half: int) -> None:
    delete_documents(exact, ["d0009"])
    path = only(exact, "tombstones/*")
    flip(path, half * (path.stat().st_size // 2))
    assert open_index(exact).locate(["d0009"])[0] is None
    assert "one of its two copies has changed" in check_index(exact).problems[0]


READ_ONLY = """
import sys
from pathlib import Path
import numpy as np
from quiver.retrieval.index import check_index, delete_documents, open_index
index = open_index(sys.argv[1])
hits = index.search(np.ones((1, index.manifest.model.dim), np.float32), 5)
print(len(hits.ids[0]), index.document("d0000").id, len(check_index(sys.argv[1]).problems))
try:
    delete_documents(sys.argv[1], ["d0000"])
except ValueError as error:
    print(error)
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs a mount that only one process sees")
def test_an_index_on_a_read_only_disk_is_searched(exact: Path) -> None:
    mount = f"mount --bind {exact} {exact} && mount -o remount,ro,bind {exact} && exec {sys.executable} -c '{READ_ONLY}' {exact}"
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("mounts are not allowed here")
    done = subprocess.run([*unshare, "sh", "-c", mount], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found, refused = done.stdout.splitlines()
    assert found == "5 d0000 0"
    assert "cannot be written" in refused
