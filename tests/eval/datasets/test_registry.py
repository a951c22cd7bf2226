"""The registry of published collections, compared with the official topics and with MTEB."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quiver.encoder.errors import InputError
from quiver.eval.datasets.benchmarks import find, near, registry, require
from quiver.eval.datasets.catalogue import Entry
from quiver.eval.datasets.sources import HubTables, ZipArchive
from quiver.retrieval.data.corpus import read_qrels, read_queries


def test_names_are_unique_and_entries_complete() -> None:
    entries = list(registry().values())
    assert len(entries) == 14 + 12 + 13 + 7 + 7 + 13
    assert len({entry.name for entry in entries}) == len({entry.key for entry in entries}) == len(entries)
    for entry in entries:
        assert entry.split == entry.splits[0]
        assert entry.metadata.url == entry.source.url
        assert entry.metadata.revision == entry.source.revision
        assert (entry.metadata.documents or 0) > 0
        assert (entry.metadata.queries or 0) > 0
        for source in entry.sources.values():
            assert source.unit.startswith(entry.key.rpartition("/")[0])
            if isinstance(source, ZipArchive):
                assert len(source.md5) == 32
                assert source.url.endswith(".zip")
            if isinstance(source, HubTables):
                assert all(len(revision) == 40 for revision in source.revisions.values())


@pytest.mark.parametrize(
    ("name", "count", "group", "size"),
    [
        ("beir/cqadupstack", 12, "cqadupstack", 12),
        ("coir/codesearchnet", 6, "coir-codesearchnet", 6),
        ("mteb/codesearchnet", 6, "mteb-codesearchnet", 6),
        ("mldr", 13, None, 1),
        ("nanobeir", 13, None, 1),
        ("BEIR/SciFact", 1, None, 1),
        ("beir/sci", 0, None, 1),
        ("", 0, None, 1),
    ],
)
def test_a_name_selects_a_collection_a_group_or_a_family(name: str, count: int, group: str | None, size: int) -> None:
    found = find(name)
    assert len(found) == count
    assert {(entry.metadata.group, entry.metadata.group_size) for entry in found} <= {(group, size)}


@pytest.mark.parametrize(
    ("wrong", "suggestion"),
    [
        ("scifact", "unknown collection 'scifact'; did you mean beir/scifact or nanobeir/scifact?"),
        ("beir/scifcat", "did you mean beir/scifact"),
        ("beir/codesearchnet", "did you mean coir/codesearchnet or mteb/codesearchnet"),
        ("?", "run quiver collections list to see all names"),
    ],
)
def test_an_unknown_name_gets_suggestions(wrong: str, suggestion: str) -> None:
    with pytest.raises(InputError) as error:
        require(wrong)
    assert suggestion in str(error.value)
    assert near(wrong) in str(error.value)


@pytest.mark.data
def test_all_official_topics_and_judgements_load_and_agree(quiver_data: Path) -> None:
    folder = quiver_data / "beir_topics_qrels"
    official = {row["name"]: row for row in json.loads((folder / "counts.json").read_text(encoding="utf-8"))}
    by_name = {entry.name: entry for entry in find("beir")}
    seen, in_registry = set(), set()
    for name, counts in official.items():
        queries = list(read_queries(folder / f"{name}.queries.test.tsv.gz"))
        qrels = read_qrels(folder / f"{name}.qrels.test.trec.gz")
        grades = [grade for document in qrels.values() for grade in document.values()]
        assert {query.id for query in queries} == set(qrels)
        assert (len(queries), len(qrels)) == (counts["topics"], counts["qrel_queries"])
        assert (len(grades), sum(grade > 0 for grade in grades)) == (counts["judgements"], counts["positive"])
        seen.add(name)
        if name in by_name and by_name[name].split == "test":
            assert by_name[name].metadata.queries == len(queries), name
            in_registry.add(name)
    # Sixteen data sets, and the twelve forums of the seventeenth.
    assert len(seen) == 28 == len(list(folder.glob("*.qrels.test.trec.gz")))
    # The registry has only public collections: not BioASQ, Signal-1M and TREC-NEWS; MS MARCO is scored on dev, which is absent here.
    assert seen - in_registry == {"bioasq", "signal1m", "trec-news"}
    assert set(by_name) - in_registry == {"msmarco"}


MTEB_TASKS = {
    "trec-covid": "TRECCOVID", "nfcorpus": "NFCorpus", "nq": "NQ", "hotpotqa": "HotpotQA", "fiqa": "FiQA2018", "arguana": "ArguAna",
    "webis-touche2020": "Touche2020", "quora": "QuoraRetrieval", "dbpedia-entity": "DBPedia", "scidocs": "SCIDOCS", "fever": "FEVER",
    "climate-fever": "ClimateFEVER", "scifact": "SciFact", "msmarco": "MSMARCO", "webis-touche2020-v3": "Touche2020Retrieval.v3",
    "coir-stackoverflow-qa": "StackOverflowQA",
}  # fmt: skip


def of_mteb(entry: Entry) -> tuple[str, str | None]:
    """MTEB's names of the task and subset."""
    family, *middle, last = entry.key.split("/")
    if "cqadupstack" in middle:
        return f"CQADupstack{last.title()}Retrieval", None
    if "codesearchnet" in middle:
        return {"coir": "COIRCodeSearchNetRetrieval", "mteb": "CodeSearchNetRetrieval"}[family], last
    if family == "nanobeir":
        tables = entry.sources["mteb"]
        assert isinstance(tables, HubTables)
        return tables.documents.repository.removeprefix("mteb/"), None
    return ("MultiLongDocRetrieval", last) if family == "mldr" else (MTEB_TASKS[entry.name], None)


@pytest.mark.parity
def test_sizes_licences_and_revisions_equal_those_of_mteb() -> None:
    mteb = pytest.importorskip("mteb")
    seen = 0
    for entry in registry().values():
        name, subset = of_mteb(entry)
        metadata = mteb.get_task(name).metadata
        figures = metadata.descriptive_stats[entry.split]
        if subset is not None:
            figures = figures["hf_subset_descriptive_stats"][subset]
        if figures.get("num_documents") is None:  # Touche-2020 v2 has only the sum
            assert figures["num_samples"] == (entry.metadata.documents or 0) + (entry.metadata.queries or 0)
        else:
            assert (entry.metadata.documents, entry.metadata.queries) == (figures["num_documents"], figures["num_queries"]), entry.key
        licence = None if metadata.license == "not specified" else str(metadata.license)
        assert entry.metadata.licence == licence, entry.key
        tables = entry.sources.get("mteb")
        if isinstance(tables, HubTables):
            assert tables.revisions == {metadata.dataset["path"]: metadata.dataset["revision"]}, entry.key
        seen += 1
    assert seen == len(registry())
