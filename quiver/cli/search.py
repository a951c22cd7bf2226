"""``quiver search``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from quiver.cli.explained import explanation_json, explanation_view
from quiver.cli.index import read_ids
from quiver.cli.output import GenerationOption, JsonOption, ProgressOption, VerifyOption, print_json, print_table, say, show_progress
from quiver.cli.sharded import AddressOption, ReplicasOption, ShardChoices, ShardMemoryOption, ShardsOption, report_missing, sharded
from quiver.cli.sources import Choices, Explained, Opened, SecondStage, Source, short_names
from quiver.encoder import InputError
from quiver.encoder.files import check_target
from quiver.retrieval.data.corpus import read_queries
from quiver.retrieval.data.run import ranked, write_run
from quiver.retrieval.index import DamagedIndexError, Filter, Index
from quiver.retrieval.index.documents.metadata import GRAMMAR
from quiver.retrieval.index.errors import LostTextError
from quiver.retrieval.records import Query, Run
from quiver.retrieval.search import bm25
from quiver.retrieval.search.hybrid import Fusion, check_fusible, search_fused
from quiver.retrieval.search.reranking import rerank as rerank_run

# Characters of a found document that are shown.
EXCERPT = 160
# The id of a query that is given as a text.
_QUERY = "query"


EFFORT_HELP = (
    "How much of the index is looked at: exact, everything; balanced, the default, the fastest effort that was measured to have a recall "
    "of 0.95; fast, that with 0.90. Of an index that was not measured, balanced and fast depend on its size."
)


class Effort(str, Enum):
    """The presets of a search."""

    EXACT = "exact"
    BALANCED = "balanced"
    FAST = "fast"


class Method(str, Enum):
    """How rankings are fused."""

    RRF = "rrf"
    WEIGHTED = "weighted"


class Normalise(str, Enum):
    """How scores are put on one scale."""

    MIN_MAX = "min-max"
    Z_SCORE = "z-score"


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        run: What is shown.
        lists: Source -> what it found, where several were asked.
        candidates: What was re-ranked; None where nothing was.
    """

    run: Run
    lists: Mapping[str, Run]
    candidates: Run | None


def search(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="An index.")],
    text: Annotated[str | None, typer.Argument(help="The query.")] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="Documents a query; capped at the index's.")] = 10,
    queries: Annotated[Path | None, typer.Option("--queries", help="Queries from a .jsonl[.gz] or .tsv file instead.")] = None,
    run: Annotated[Path | None, typer.Option("--run", help="Write a TREC run there (with --queries).")] = None,
    conditions: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            help=f"Condition on a field: {GRAMMAR}. May be repeated; all must hold. Fields and values with spaces or operators stand in"
            " double quotes: --filter 'city=\"New York\"'.",
        ),
    ] = None,
    ids: Annotated[Path | None, typer.Option("--ids", help="Search only the documents whose ids are in this file, one a line.")] = None,
    effort: Annotated[Effort | None, typer.Option("--effort", help=EFFORT_HELP)] = None,
    target_recall: Annotated[
        float | None, typer.Option("--target-recall", help="Or as little as was measured to find this share of the best, such as 0.95.")
    ] = None,
    beside: Annotated[
        list[str] | None, typer.Option("--with", help="Fuse with bm25, or with another index of the documents; may be repeated.")
    ] = None,
    fusion: Annotated[Method | None, typer.Option("--fusion", help="By ranks (rrf, the default) or by scores, with --with.")] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", help="The index's and one for each --with, such as 1,0.5; a ranking of 0 is not asked.")
    ] = None,
    normalise: Annotated[Normalise | None, typer.Option("--normalise", help="Scores of --fusion weighted; by default min-max.")] = None,
    rerank: Annotated[str | None, typer.Option("--rerank", help="Re-rank the candidates by a ColBERT, or by its index.")] = None,
    candidates: Annotated[int, typer.Option("--candidates", min=1, help="Documents a ranking gives to --with and --rerank.")] = 100,
    explain: Annotated[bool, typer.Option("--explain", help="Show which tokens and words met in each document.")] = False,
    model: Annotated[str | None, typer.Option("--model", "-m", help="The model; by default the one that built the index.")] = None,
    shards: Annotated[int | None, ShardsOption] = None,
    shard_memory: Annotated[str | None, ShardMemoryOption] = None,
    replicas: Annotated[int | None, ReplicasOption] = None,
    address: Annotated[str | None, AddressOption] = None,
    generation: Annotated[int | None, GenerationOption] = None,
    verify: Annotated[bool, VerifyOption] = True,
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Search an index by one text or by a file of queries.

    Examples: quiver search indexes/scifact "vitamin D and bones" -k 5 --filter "year>=2015" --explain

    quiver search indexes/dense "vitamin D and bones" --with bm25 --weights 1,0.5 --rerank indexes/colbert

    quiver search indexes/scifact --queries queries.jsonl --run runs/scifact.trec -k 1000

    quiver search indexes/msmarco --queries queries.jsonl --run runs/msmarco.trec --shard-memory 16GB --replicas 2 --address auto
    """
    _check_options(text, queries, run, explain=explain)
    _check_effort(effort, target_recall)
    filter = Filter.parse(conditions or [], ids=None if ids is None else read_ids(ids)) if conditions or ids else None
    how = _fusion(beside or [], fusion, weights, normalise)
    asked = [Query(_QUERY, text)] if text is not None else list(read_queries(queries or Path()))
    if generation is not None and (shards or shard_memory):
        raise InputError("--generation opens one index in this process; leave --shards and --shard-memory out")
    _check_queries(asked, queries)
    spread = context.with_resource(sharded(folder, ShardChoices(shards, shard_memory, replicas, address), verify=verify))
    opened = Opened(folder, model=model, generation=generation, verify=verify, sharded=spread)
    stage = None if rerank is None else opened.second_stage(rerank)
    choices = Choices(filter, (effort or Effort.BALANCED).value, target_recall, show_progress(progress))
    sources = _sources(opened, [str(folder), *(beside or [])], how, choices)
    if run is not None:
        _check_run(run, asked, opened.indexes)
    found = _search(asked, k, sources, how, stage, candidates)
    report_missing(opened.missing, run=run)
    if run is not None:
        write_run(found.run, run, tag="quiver")
        _report_run(run, found.run)
        return
    explained = _explained(text or "", found, sources, stage) if explain else {}
    hits = _hits(opened, found, explained)
    if as_json:
        print_json(hits)
    elif not hits:
        say(f"nothing found in {len(opened.index(folder)):,} documents")
    elif explain:
        _print_explained(text or "", hits, explained)
    else:
        _print_table(hits, found, len(opened.index(folder)))


def _report_run(path: Path, run: Run) -> None:
    empty = sum(not documents for documents in run.values())
    nothing = f"; nothing found for {empty} of them" if empty else ""
    say(f"{path}: {len(run)} queries, {sum(map(len, run.values()))} documents{nothing}")


def _check_options(text: str | None, queries: Path | None, run: Path | None, *, explain: bool) -> None:
    if (text is None) == (queries is None):
        raise InputError("give either a query text or --queries FILE")
    if (queries is None) != (run is None):
        raise InputError("--queries FILE and --run FILE go together")
    if explain and text is None:
        raise InputError("--explain says why one text finds what it finds; it does not go with --queries")


def _check_queries(asked: Sequence[Query], file: Path | None) -> None:
    blank = next((query for query in asked if not query.text.strip()), None)
    if blank is not None:
        raise InputError("the query is blank; give a text to search for" if file is None else f"{file}: query '{blank.id}' is blank")


def _check_effort(effort: Effort | None, target_recall: float | None) -> None:
    if target_recall is None:
        return
    if effort is not None:
        raise InputError("--target-recall chooses the effort; leave --effort out")
    if not 0 < target_recall <= 1:
        raise InputError(f"--target-recall must be above 0 and at most 1, got {target_recall}")


def _fusion(beside: Sequence[str], method: Method | None, weights: str | None, normalise: Normalise | None) -> Fusion | None:
    """How rankings are fused; None where there is but one."""
    if not beside:
        if method or weights is not None or normalise:
            raise InputError("--fusion, --weights and --normalise say how rankings are fused; add --with bm25 or --with INDEX")
        return None
    if len(set(beside)) < len(beside):
        raise InputError(f"--with {max(beside, key=beside.count)} is there twice; give its weight instead")
    if normalise and method is not Method.WEIGHTED:
        raise InputError("--normalise is for --fusion weighted; ranks need none")
    fusion = Fusion((method or Method.RRF).value, _weights(weights), normalise=(normalise or Normalise.MIN_MAX).value)
    fusion.weights_of(len(beside) + 1)
    return fusion


def _weights(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"--weights {text!r}: expected numbers between commas, such as 1,0.5") from error


def _sources(opened: Opened, given: Sequence[str], fusion: Fusion | None, choices: Choices) -> list[Source]:
    """The rankings whose weight is not 0; the first one is the index.

    Raises:
        InputError: An index cannot be opened, or shares no document with the first one.
    """
    weights = (1.0,) if fusion is None else fusion.weights_of(len(given))
    sources: list[Source] = []
    indexes: list[Index] = []
    for place, (path, name, weight) in enumerate(zip(given, short_names(given), weights, strict=True)):
        if not weight:
            continue
        words = place > 0 and path == bm25.NAME
        index = opened.index(Path(given[0] if words else path))
        if indexes:
            check_fusible(indexes[0], index)
        indexes.append(index)
        sources.append(opened.words(choices) if words else opened.source(path, choices, name=name))
    return sources


def _search(
    asked: Sequence[Query], k: int, sources: Sequence[Source], fusion: Fusion | None, stage: SecondStage | None, candidates: int
) -> Found:
    wanted = k if stage is None else max(k, candidates)
    lists: Mapping[str, Run] = {}
    if fusion is None:
        first = sources[0].system(asked, wanted)
    else:
        weights = None if fusion.weights is None else tuple(weight for weight in fusion.weights if weight)
        fused = search_fused([each.system for each in sources], asked, wanted, fusion=replace(fusion, weights=weights), depth=candidates)
        first, lists = fused.run, {each.name: run for each, run in zip(sources, fused.lists, strict=True)}
    return Found(first, lists, None) if stage is None else Found(rerank_run(first, asked, stage.scorer, k), lists, first)


def _check_run(run: Path, asked: Sequence[Query], indexes: Sequence[Index]) -> None:
    """Find out before the queries are encoded that their run could not be written."""
    check_target(run)
    for kind, ids in (("query", [query.id for query in asked]), *(("document", index.ids) for index in indexes)):
        for key in ids:
            if key.split() != [key]:
                raise InputError(f"{run}: a run cannot hold the {kind} id {key!r}: ids must be without white space")


def _explained(text: str, found: Found, sources: Sequence[Source], stage: SecondStage | None) -> dict[str, dict[str, Explained]]:
    """Document -> source -> why it gives the document its score; of what was re-ranked the second stage's alone."""
    documents = list(found.run[_QUERY])
    explained: dict[str, dict[str, Explained]] = {document: {} for document in documents}
    for source in sources if stage is None else [stage]:
        for document, why in source.explain(text, documents).items():
            explained[document][source.name] = why
    return explained


def _hits(opened: Opened, found: Found, explained: Mapping[str, Mapping[str, Explained]]) -> list[dict[str, Any]]:
    lists = {name: _places(run.get(_QUERY, {})) for name, run in found.lists.items()}
    candidates = None if found.candidates is None else _places(found.candidates[_QUERY])
    hits = []
    for rank, (document, score) in enumerate(found.run[_QUERY].items(), start=1):
        hit: dict[str, Any] = {"rank": rank, "id": document, "score": score, "effort": opened.efforts}
        if candidates is not None:
            hit["candidate"] = candidates[document]
        if lists:
            hit["lists"] = {name: places.get(document) for name, places in lists.items()}
        try:
            stored = opened.stored(document)
        except (DamagedIndexError, LostTextError) as error:  # what was found is right all the same
            hit["text_error"] = str(error)
        else:
            if stored is not None:
                # Explanations are of the text as it was encoded.
                hit["text"] = stored.text if explained else _excerpt(stored.text)
                if stored.metadata:
                    hit["metadata"] = stored.metadata
        if explained:
            hit["explained"] = explanation_json(explained[document])
        if opened.missing is not None:
            hit["partial"] = opened.missing._asdict()
        hits.append(hit)
    return hits


def _places(ranking: Mapping[str, float]) -> dict[str, dict[str, float]]:
    return {document: {"rank": rank, "score": ranking[document]} for rank, document in enumerate(ranked(ranking), start=1)}


def _excerpt(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= EXCERPT else flat[: EXCERPT - 1] + "…"


def _origin(hit: Mapping[str, Any]) -> list[str]:
    """Where a hit comes from: its rank and score in each ranking, a dash where that does not have it."""
    places = [*hit.get("lists", {}).values(), *([hit["candidate"]] if "candidate" in hit else [])]
    return ["-" if place is None else f"{place['rank']} ({place['score']:.4f})" for place in places]


def _print_table(hits: Sequence[Mapping[str, Any]], found: Found, documents: int) -> None:
    origins = [*found.lists, *(["candidate"] if found.candidates is not None else [])]
    rows = [(hit["id"], f"{hit['score']:.4f}", *_origin(hit), hit.get("text", hit.get("text_error", ""))) for hit in hits]
    print_table(f"{len(hits)} of {documents:,} documents", ("document", "score", *origins, "text"), rows)


def _print_explained(text: str, hits: Sequence[Mapping[str, Any]], explained: Mapping[str, Mapping[str, Explained]]) -> None:
    console = Console()
    for hit in hits:
        heading = f"{hit['rank']}. {hit['id']}  {hit['score']:.4f}"
        names = [*hit.get("lists", {}), *(["candidate"] if "candidate" in hit else [])]
        origin = ", ".join(f"{name} {place}" for name, place in zip(names, _origin(hit), strict=True))
        console.print(Text.assemble((heading, "bold"), f"  {origin}" if origin else ""))
        for view in explanation_view(text, explained[hit["id"]]):
            console.print(view)
        console.print()
