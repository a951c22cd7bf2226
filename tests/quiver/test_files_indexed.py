"""A folder of documentation and sources is indexed with MiniLM and searched: hits name the file and the lines that hold the text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.index import add_documents, build_index, open_index
from quiver.retrieval.index.index import LiveRows, Place
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.records import Document, Hits
from quiver.retrieval.search.groups import field_of, group_hits, search_groups

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = ("docs/glossary.md", "docs/indexes.md", "docs/serving.md", "encoder/progress.py", "retrieval/options.py", "retrieval/records.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for name in PAGES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes((REPOSITORY / name).read_bytes())
    return root


@pytest.fixture(scope="module")
def index(minilm: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("indexes") / "index"
    build_index(folder, load_model(minilm), path)
    return path


@pytest.mark.slow
def test_hits_of_a_folder_name_the_lines_that_hold_their_text(quiver: Callable[..., Any], folder: Path, index: Path) -> None:
    opened = open_index(index)
    wanted = {
        "how are killed builds resumed and files checked": ("docs/indexes.md", "Durability"),
        "parse a duration such as 5m in seconds": ("retrieval/options.py", "parse_duration"),
        "record of a document with title and metadata": ("retrieval/records.py", "Document"),
    }
    for query, (file, name) in wanted.items():
        done = quiver("search", index, query, "-k", "3", "--json")
        hits = json.loads(done.out)
        assert any(hit["metadata"]["file"] == file and name in opened.document(hit["id"]).title for hit in hits), (query, hits)
        for hit in hits:
            place, stored = hit["metadata"], opened.document(hit["id"])
            text = (folder / place["file"]).read_text(encoding="utf-8")
            assert text[place["start"] : place["end"]] == stored.text
            assert "\n".join(text.split("\n")[place["line"] - 1 : place["end_line"]]).strip() == stored.text.strip()
    shown = quiver("search", index, "parse a duration such as 5m in seconds", "-k", "1").out
    assert re.search(r"options\.py:\d+-\d+", "".join(shown.split()).replace("│", ""))


@pytest.mark.slow
def test_no_passage_is_truncated_by_the_model(index: Path) -> None:
    opened = open_index(index)
    assert opened.manifest.tokens.truncated == 0
    assert len(opened) > 60


def test_the_group_of_a_passage_is_its_stored_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x" * 600
    fields: list[dict[str, Any]] = [
        {"f": "a"},
        {"f": 7},
        {"f": 0.5},
        {"f": True},
        {"f": ["b", "c", "b"]},
        {"f": long},
        {"g": 1},
        {},
        {"f": ["a", long]},
    ]
    documents = [Document(str(number), "words", metadata=each) for number, each in enumerate(fields)]
    build_index(documents[:5], "bm25", tmp_path / "index")
    add_documents(tmp_path / "index", documents[5:], "bm25")
    reads: list[Place] = []
    at = LiveRows.at
    monkeypatch.setattr(LiveRows, "at", lambda self, place: (reads.append(place), at(self, place))[1])
    keys_of = field_of(open_index(tmp_path / "index"), "f")
    for _ in range(2):
        assert keys_of([each.id for each in documents]) == ["a", "7", "0.5", "true", "b, c", long, "6", "7", f"a, {long}"]
    assert len(reads) == 4  # single values need no document, and no document is read twice
    assert keys_of(["of another index"]) == ["of another index"]


def test_groups_are_searched_for_until_there_are_enough() -> None:
    ranking = {f"{'a' if number < 90 else number}#{number}": 1.0 - number / 100 for number in range(100)}
    depths: list[int] = []

    def search(depth: int) -> Hits:
        depths.append(depth)
        return Hits.of([dict(list(ranking.items())[:depth])])

    def files_of(ids: Sequence[str]) -> list[str]:
        return [key.partition("#")[0] for key in ids]

    found = search_groups(search, 3, files_of)
    (groups,) = found.groups or []
    assert found.ranking(0) == {"a#0": 1.0, "90#90": ranking["90#90"], "91#91": ranking["91#91"]}
    assert [group.key for group in groups] == ["a", "90", "91"]
    assert (groups[0].best, groups[0].score, len(groups[0].passages)) == ("a#0", 1.0, 90)
    assert depths == [12, 48, 192]
    assert len(search_groups(search, 50, files_of).ids[0]) == 11
    assert group_hits({}, list) == []
    with pytest.raises(InputError, match="no document has the field 'x'"):
        field_of(build_index(["words"], "bm25"), "x")
