"""Synthetic results for reports: single collections, and four systems on six collections and a group of forums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder.files import file_sha256
from quiver.eval.metrics import DEFAULT, Interval
from quiver.eval.results import (
    Baseline,
    CollectionResult,
    FileReference,
    IndexUsed,
    Provenance,
    Results,
    ShownDocument,
    System,
    TokenMatch,
    Truncated,
    WorstQuery,
    write_results,
)

MEASURES = {"ndcg@10": 0.5, "map": 0.25, "mrr@10": 0.4, "recall@10": 0.6, "recall@100": 0.7, "recall@1000": 0.8, "p@10": 0.1}
WORST = WorstQuery(
    query="q1",
    text="what | is\n<b>it</b>",
    score=0.0,
    found=(ShownDocument("d9", "not *this*", None, 1, 0.75),),
    wanted=(ShownDocument("d1", "but this", 2, 37, 0.25), ShownDocument("d2", "or this", 1, None, None)),
    relevant=4,
)


@pytest.fixture
def make_scored() -> Callable[..., CollectionResult]:
    return score_by_hand


def score_by_hand(name: str, score: float, *, floor: float | None = None, **changed: Any) -> CollectionResult:
    """The result of a collection with a score; other fields as given or by default."""
    interval = Interval(score - 0.05, score + 0.05, 0.95, 10_000)
    baselines = ()
    if floor is not None:
        below = Interval(floor - 0.04, floor + 0.04, 0.95, 10_000)
        baselines = (Baseline("bm25", {"k1": 0.9, "stemmer": None}, MEASURES | {"ndcg@10": floor}, below, None, None),)
    scored = CollectionResult(
        name=name,
        split="test",
        group=None,
        group_size=1,
        in_domain=False,
        licence="CC BY 4.0",
        revision="c" * 40,
        documents=5183,
        queries=300,
        judgements=339,
        use_title=True,
        exclude_self=False,
        k=1000,
        measures=MEASURES | {"ndcg@10": score},
        interval=interval,
        judged=0.125,
        unanswered=2,
        truncated=Truncated(documents=1234, queries=7),
        empty_texts=1,
        index=IndexUsed("exact", {"similarity": "cosine"}, {"overlap@10": 1.0, "overlap@100": 1.0}, 3 * 2**20, 0.125),
        cached=4321,
        seconds={"encode_documents": 12.34, "search": 0.56},
        run=None,
        per_query=None,
        query_texts=None,
        data_sha256=f"{name:0<64}",
        worst=(WORST,),
        baselines=baselines,
    )
    return replace(scored, **changed)


@pytest.fixture
def make_results() -> Callable[..., Results]:
    """A system with collections."""

    def make(source: str, *collections: CollectionResult, command: str | None = "quiver evaluate", **changed: Any) -> Results:
        kind = changed.pop("kind", "dense")
        system = System(source, kind, fingerprint="f" * 64, dim=384, similarity="cosine", query_length=256, document_length=256)
        origin = Provenance(command, "2030-01-02T03:04:05+00:00", {"torch": "2.11", "quiver": "0.1", "python": "3.11"}, "Linux", 2)
        return Results(replace(system, **changed), collections, origin)

    return make


@pytest.fixture
def make_folder(tmp_path: Path, make_scored: Callable[..., CollectionResult], make_results: Callable[..., Results]) -> Callable[..., Path]:
    """Write a results folder from collection -> query -> nDCG@10; the other measures are half of that value."""

    def make(
        source: str,
        scores: Mapping[str, Mapping[str, float]],
        *,
        bm25: Mapping[str, Mapping[str, float]] | None = None,
        changed: Mapping[str, Mapping[str, Any]] | None = None,
        folder: str | None = None,
        measures: Sequence[str] = DEFAULT,
        **system: Any,
    ) -> Path:
        target = tmp_path / (folder or source)
        target.mkdir()

        def file(name: str, content: object) -> FileReference:
            (target / name).write_text(json.dumps(content), encoding="utf-8")
            return FileReference(name, file_sha256(target / name))

        def by_query(headline: Mapping[str, float]) -> dict[str, dict[str, float]]:
            return {query: {name: score if name == "ndcg@10" else score / 2 for name in measures} for query, score in headline.items()}

        collections = []
        for name, headline in scores.items():
            fields: dict[str, Any] = {"queries": len(headline), "per_query": file(f"{name}.json", by_query(headline))}
            fields["query_texts"] = file(f"{name}.queries.json", {query: f"what is | {query}?" for query in headline})
            plain = make_scored(name, 0.5, floor=0.5)
            fields["measures"] = {measure: plain.measures[measure] for measure in measures}
            if bm25 is not None and name in bm25:
                reference = file(f"{name}.bm25.json", by_query(bm25[name]))
                fields["baselines"] = (replace(plain.baselines[0], measures=fields["measures"], per_query=reference),)
            else:
                fields["baselines"] = ()
            collections.append(replace(plain, **fields | dict((changed or {}).get(name, {}))))
        write_results(make_results(source, *collections, **system), target)
        return target

    return make


HOSTILE = "<script>document.title='owned'</script>\"'><img src=x onerror=alert(1)>{{ 7*7 }}&amp;\x00\x07\x85\u202egnp.exe\ud800"
"""Markup, entities, quotes, template syntax, controls, an override of the direction of writing and half a character."""

UNBROKEN = "x" * 700

COLLECTIONS = {
    "scifact": (5_183, 300, 0.66),
    "nfcorpus": (3_633, 323, 0.31),
    "fiqa": (57_638, 648, 0.33),
    "arguana": (8_674, 1_406, 0.47),
    "webis-touche2020-v3": (303_732, 49, 0.42),
    "designdocs_long": (2_322, 1_190, 0.71),
}
"""Name -> documents, queries and about what a system scores."""

FORUMS = ("android", "english", "gaming", "gis")

BM25 = {"variant": "lucene", "k1": 0.9, "b": 0.4, "stopwords": "english", "stemmer": None}

QUERY = "Does the enzyme cathepsin B cleave the amyloid precursor protein at the β-secretase site?"
FOUND = (
    "Cathepsin B is a lysosomal cysteine protease. In neurons of the regulated secretory pathway it acts as a β-secretase for the"
    " wild-type site of the amyloid precursor protein, which most patients with Alzheimer's disease express; its inhibitors lower"
    " amyloid-β in animals and improve their memory."
)
OTHER = "Prion protein in the synaptic membrane binds oligomers of amyloid-β. مرحبا بالعالم، هذا نص من اليمين إلى اليسار."
TOKENS = ["[CLS]", "[Q]", "does", "the", "enzyme", "cat", "##hep", "##sin", "b", "cleave", "amyloid", "precursor", "protein", "?", "[MASK]"]
STRANGE = (" Ġtab\t", "", "<td>")


@pytest.fixture(scope="session")
def hostile() -> str:
    return HOSTILE


@pytest.fixture(scope="session")
def evaluated() -> Callable[..., list[Results]]:
    """Four systems; BM25 is one of them and the baseline of the others, and the ColBERT model lacks a forum.

    ``approximate`` gives the int8 system a FAISS index; ``systems``, ``collections`` and ``forums`` set their numbers.
    """
    return evaluate_by_hand


def evaluate_by_hand(*, approximate: bool = True, systems: int = 4, collections: int = 6, forums: bool = True) -> list[Results]:
    minilm = System("sentence-transformers/all-MiniLM-L6-v2", "dense", "quiver", "a" * 64, 384, "cosine", 256, 256, dtype="float32")
    long = "runs/colbert-distilled-from-bge-m3-at-step-100000-with-a-long-name"
    known = [
        minilm,
        replace(minilm, fingerprint="b" * 64, dtype="int8"),
        System(long, "colbert", "pylate", "c" * 64, 128, "maxsim", 32, 300, "[Q] ", "[D] ", "float32"),
        System("bm25", "bm25", "bm25s"),
    ]
    known += [replace(minilm, source=f"lab/model-{place}", fingerprint=f"{place:064x}") for place in range(systems - len(known))]
    names = [*COLLECTIONS, *(f"collection-{place}" for place in range(collections - len(COLLECTIONS)))][:collections]
    parts = [(name, None) for name in names] + [(f"cqadupstack-{forum}", "cqadupstack") for forum in FORUMS if forums]
    made = []
    for system in known[:systems]:
        held = parts[:-1] if system.kind == "colbert" and forums else parts
        scored = tuple(_collection(system, name, group, approximate=approximate) for name, group in held)
        command = f"quiver evaluate --model {system.source} --data beir/scifact --data 'my data' --out runs/{system.kind}"
        versions = {"python": "3.11.9", "torch": "2.11.0", "quiver": "0.1.0"}
        made.append(Results(system, scored, Provenance(command, "2030-01-02T03:04:05+00:00", versions, "Linux, 2 CPUs", 2)))
    return made


def _collection(system: System, name: str, group: str | None, *, approximate: bool) -> CollectionResult:
    documents, queries, about = COLLECTIONS.get(name, (30_000, 1_100, 0.34))
    score = min(0.98, max(0.02, about * (0.8 + 0.4 * _fraction(system.source, "int8" if system.dtype == "int8" else "float", name))))
    floor = min(0.98, max(0.02, about * (0.8 + 0.4 * _fraction("bm25", "float", name))))
    if system.kind == "bm25":
        seconds = {"search": 3.25, "other": 0.04}
    else:
        seconds = {"encode_documents": 432.1, "index": 0.4, "encode_queries": 4.4, "search": 0.9, "other": 1.7}
    file = FileReference(f"runs/{name}.test.trec.gz", hashlib.sha256(name.encode()).hexdigest())
    queries_shown = 0 if group else 10 if name == "scifact" else 3
    return score_by_hand(
        name,
        score,
        group=group,
        group_size=len(FORUMS) if group else 1,
        in_domain=name == "designdocs_long" and system.kind == "colbert",
        licence="CC BY-SA 4.0" if group is None else None,
        revision="md5 5f7d1de60b170fc8027bb7898e2efca1" if name == "scifact" else None,
        documents=documents,
        queries=queries,
        judgements=2 * queries,
        use_title=name != "designdocs_long",
        exclude_self=name == "arguana",
        measures=_measures(score),
        interval=_interval(score, queries),
        judged=0.2 + 0.7 * _fraction(name),
        truncated=Truncated(documents // 7, 0),
        index=_index(system, name, approximate=approximate),
        cached=documents,
        seconds=seconds,
        **dict.fromkeys(("run", "per_query", "query_texts"), file),
        worst=tuple(_worst(place, explained=system.kind == "colbert") for place in range(queries_shown)),
        baselines=() if system.kind == "bm25" else (Baseline("bm25", BM25, _measures(floor), _interval(floor, queries), file, None),),
    )


def _fraction(*parts: object) -> float:
    """A number in [0, 1) that depends only on the arguments."""
    return int(hashlib.sha256(repr(parts).encode()).hexdigest()[:8], 16) / 2**32


def _measures(score: float) -> dict[str, float]:
    factors = {"ndcg@10": 1.0, "map": 0.8, "mrr@10": 0.95, "recall@10": 1.1, "recall@100": 1.25, "recall@1000": 1.4, "p@10": 0.14}
    return {name: min(1.0, score * factor) for name, factor in factors.items()}


def _interval(score: float, queries: int) -> Interval:
    spread = 0.45 / queries**0.5
    return Interval(max(0.0, score - spread), min(1.0, score + spread), 0.95, 10_000)


def _index(system: System, name: str, *, approximate: bool) -> IndexUsed:
    if system.kind == "bm25":
        return IndexUsed("bm25", BM25)
    seed = _fraction(system.source, name, "time")
    if approximate and system.dtype == "int8":
        overlaps = {"overlap@10": 1 - 0.2 * seed, "overlap@100": 0.95 - 0.2 * seed}
        return IndexUsed("faiss", {"factory": "IVF1024,Flat", "nprobe": 16}, overlaps, 9_876_543, 0.05 + seed / 8)
    milliseconds = (40.0 if system.kind == "colbert" else 1.0) * (0.5 + seed)
    return IndexUsed("exact", {"similarity": system.similarity}, {"overlap@10": 1.0, "overlap@100": 1.0}, 7_961_088, milliseconds)


def _worst(place: int, *, explained: bool) -> WorstQuery:
    matches = _matches(place) if explained else ()
    found = (
        ShownDocument("4983", FOUND, None, 1, 13.456789 if explained else 0.7312, matches),
        ShownDocument("PLAIN-22", OTHER, 0, 2, 0.69),
        ShownDocument("d-3", "", 1, 3, 0.5),
    )
    wanted = (ShownDocument("11-β", OTHER * 2, 2, 214, 0.31, matches), ShownDocument("MED-9", FOUND, 1, None, None))
    texts = (QUERY, HOSTILE, UNBROKEN, "", "amyloid")
    return WorstQuery(f"q{place}", texts[place % 5], place / 50, () if place == 3 else found, () if place == 4 else wanted, 12)


def _matches(seed: int) -> tuple[TokenMatch, ...]:
    tokens = [*TOKENS, *STRANGE]
    return tuple(
        TokenMatch(token, tokens[-place - 1] if place % 3 else token, 2 * _fraction(seed, place) ** 0.3 - 1)
        for place, token in enumerate(tokens)
    )
