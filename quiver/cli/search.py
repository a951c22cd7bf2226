"""``quiver search``: options, checks, and how hits and explanations are printed. ``quiver.retrieval.search.retrievers`` does the search."""

from __future__ import annotations

import gc
import logging
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quiver.cli import options
from quiver.cli.options import argument, command, group, option, print_json, print_table, read_ids, say, say_error
from quiver.encoder.errors import InputError
from quiver.encoder.files import check_utf8
from quiver.retrieval.display import NOT_SHOWN
from quiver.retrieval.options import parse_size

if TYPE_CHECKING:
    from quiver.retrieval.cluster.index import ShardedIndex
    from quiver.retrieval.index import IndexReader
    from quiver.retrieval.records import Hits, Missing, Query
    from quiver.retrieval.search.bm25 import WordScore
    from quiver.retrieval.search.explain import Explanation
    from quiver.retrieval.search.retrievers import Explained, OpenIndexes, Retriever
    from quiver.retrieval.search.search import Fusion

logger = logging.getLogger(__name__)

_SHADES = ((0.8, "bold green"), (0.6, "green"), (0.4, "yellow"), (-1.0, "dim"))  # least similarity, style
_WIDE = 100  # columns of a terminal from which on a ranking shows scores beside ranks
_EXCERPT = 160  # characters of a text that a table shows
_VALUE = 40  # characters of the value of a field
_PASSAGE = 480  # characters of a text that an explanation shows
_CONTEXT = 24  # characters of them before the first matched token


@dataclass(frozen=True)
@group
class ShardOptions:
    """Search over shards on a Ray cluster."""

    shards: int | None = option(None, "Number of Ray actors to distribute the index over.", min=1)
    shard_memory: int | None = option(None, "Memory per shard, such as 2GB. Without --shards: as few shards as fit.", parse=parse_size)
    replicas: int | None = option(None, "Replicas per shard; with 2, searches survive the loss of an actor. Default: 1.", min=1)
    address: str | None = options.ADDRESS


@command
def search(
    context: typer.Context,
    folder: Path = options.INDEX_FOLDER,
    words: tuple[str, ...] = argument("Query text; quotes around several words may be left out.", (), metavar="QUERY"),
    *,
    k: int = option(10, "Number of results per query.", min=1),
    queries: Path | None = options.QUERY_FILE,
    rename: Mapping[str, str] = options.RENAME,
    out: Path | None = option(None, "TREC run file to write, with --queries.", "-o"),
    conditions: tuple[str, ...] = option(
        (),
        "SQL condition on fields, such as \"year >= 2015 AND lang IN ('en', 'de')\", \"file LIKE 'guides/%'\" or"
        " \"array_contains(tags, 'x')\". Repeatable; all must hold.",
        "--filter",
    ),
    ids: Path | None = options.DOCUMENT_IDS,
    effort: str | None = options.EFFORT,
    target_recall: float | None = option(None, "Target recall, such as 0.95: use the fastest parameters measured to reach it."),
    combination: options.Combination,
    explain: bool = option(False, "Show which tokens and words of each document matched the query."),
    model: options.IndexModel,
    generation: int | None = options.GENERATION,
    verify: bool = options.VERIFY,
    sharding: ShardOptions,
    output: options.Output,
) -> None:
    """Search an index with one query text or a file of queries.

    Examples: quiver search indexes/scifact "vitamin D and bones" -k 5 --filter "year >= 2015" --explain

    quiver search indexes/dense "vitamin D and bones" --fuse bm25 --weights 1,0.5 --rerank indexes/colbert

    quiver search indexes/manual "how to reset the password" --group-by file

    quiver search indexes/scifact --queries queries.jsonl --out runs/scifact.trec -k 1000

    quiver search indexes/msmarco --queries queries.jsonl --out runs/msmarco.trec --shard-memory 16GB --replicas 2 --address auto
    """
    gc.set_threshold(50_000)  # collections while torch is imported take a tenth of a second, and find nothing
    text = " ".join(words) if words else None
    _check_options(folder, words, queries, out, explain=explain)
    if generation is not None and (sharding.shards or sharding.shard_memory):
        raise InputError("--generation opens an index in this process; remove --shards and --shard-memory")
    _check_effort(effort, target_recall)

    from quiver.retrieval.index import Filter
    from quiver.retrieval.index.engines import parse_effort
    from quiver.retrieval.models.bm25 import describe_wordless
    from quiver.retrieval.search.groups import field_of, search_groups
    from quiver.retrieval.search.retrievers import OpenIndexes, search_with
    from quiver.retrieval.search.search import describe_nothing_found

    condition = Filter.parse(list(conditions), ids=None if ids is None else read_ids(ids)) if conditions or ids else None
    how = combination.make_fusion([str(folder)])
    asked = _read_queries(text, queries, rename)
    sharded = context.with_resource(_sharded(folder, sharding, verify=verify))
    opened = OpenIndexes(device=model.device, verify=verify, progress=output.progress)
    index = opened.index(folder, model=model.model, generation=generation, sharded=sharded)
    retriever = _open_combination(opened, combination, folder, how)
    if model.device is not None and combination.rerank is None and all(each.manifest.model.kind == "bm25" for each in opened.indexes):
        raise InputError(f"--device {model.device}: BM25 has no model that runs on a device; remove the option")
    if out is not None:
        _check_run_target(out, asked, opened.indexes)
    how_far = target_recall if target_recall is not None else parse_effort(effort or "balanced")
    search_to = partial(search_with, retriever, asked, filter=condition, effort=how_far)
    group_by = combination.group_by
    if group_by is None:
        found = search_to(k)
    else:
        keys_of = field_of(index, group_by)
        found = search_groups(search_to, min(k, keys_of.most) if set(combination.fuse) <= {"bm25"} else k, keys_of)
    _report_missing(found.missing, run=out)
    by_words = "bm25" in (index.kind, *combination.fuse)
    wordless = describe_wordless([query.text for query in asked]) if by_words else None
    if wordless is not None and any(found.ids):
        logger.warning("%s", wordless)
    if out is not None:
        _write_hits(found, [query.id for query in asked], out)
        return
    explained = retriever.explain(text or "", found.ids[0]) if explain else {}
    hits = _describe_hits(opened, found, explained)
    if output.json:
        print_json(hits)
    if not hits:
        (logger.warning if output.json else say)(describe_nothing_found(index, condition, wordless=wordless))
    elif not output.json:
        filtered = [] if condition is None else [name for name in condition.fields if name not in ("file", group_by)]
        passing = "" if condition is None else f"{index.count(condition):,} documents that pass the filters, "
        among = f"{passing}{len(index):,} {'in all' if passing else 'documents'}"
        _print_explained(text or "", hits, explained, filtered) if explain else _print_hits(hits, found, among, group_by, filtered)


def _open_combination(opened: OpenIndexes, combination: options.Combination, folder: Path, fusion: Fusion | None) -> Retriever:
    from quiver.retrieval.search.retrievers import CANDIDATES

    candidates = combination.candidates or CANDIDATES
    fused = opened.fused([str(folder), *combination.fuse], fusion, candidates=candidates)
    return fused if combination.rerank is None else opened.reranked(fused, combination.rerank, candidates=candidates)


def _check_options(folder: Path, words: Sequence[str], queries: Path | None, run: Path | None, *, explain: bool) -> None:
    if words and not folder.exists() and Path(words[-1]).is_dir():
        turned = ["quiver", "search", words[-1], " ".join([str(folder), *words[:-1]])]
        raise InputError(f"{folder}: no such folder; the index comes first, then the query: {shlex.join(turned)}")
    if bool(words) == (queries is not None):
        raise InputError("pass either a query text or --queries FILE")
    if (queries is None) != (run is None):
        raise InputError("--queries FILE and --out FILE must be used together")
    if explain and not words:
        raise InputError("--explain explains the results of one query text; it cannot be used with --queries")


def _check_effort(effort: str | None, target_recall: float | None) -> None:
    if target_recall is not None and effort is not None:
        raise InputError("--target-recall and --effort exclude each other; pass only one of them")
    if target_recall is not None and not 0 < target_recall <= 1:
        raise InputError(f"--target-recall must be > 0 and <= 1, got {target_recall}")


def _read_queries(text: str | None, queries: Path | None, rename: Mapping[str, str]) -> list[Query]:
    """The query that was given as a text, or those of a file."""
    from quiver.retrieval.data.corpus import check_names_of, read_queries
    from quiver.retrieval.records import Query

    if rename and queries is None:
        raise InputError("--rename names fields of --queries; pass --queries FILE too, or remove --rename")
    if queries is None:
        found = [Query("query", check_utf8(text or "", "the query"))]
    else:
        check_names_of(rename, [queries])
        found = list(read_queries(queries, rename))
    if blank := next((query for query in found if not query.text.strip()), None):
        raise InputError("the query is blank; pass a text to search for" if queries is None else f"{queries}: query '{blank.id}' is blank")
    return found


def _check_run_target(run: Path, queries: Sequence[Query], indexes: Sequence[IndexReader]) -> None:
    """Check before the search that the run can be written."""
    from quiver.encoder.files import check_target
    from quiver.retrieval.data.corpus import UNFIT, fits_run

    check_target(run)
    for kind, ids in (("query", [query.id for query in queries]), *(("document", index.ids) for index in indexes)):
        for key in ids:
            if not fits_run(key):
                raise InputError(f"{run}: the {kind} id {key!r} {UNFIT}")


def _write_hits(found: Hits, queries: Sequence[str], out: Path) -> None:
    from quiver.retrieval.data.corpus import write_run

    run = found.to_run(queries)
    if found.groups is not None:
        run = {query: {each.key: each.score for each in own} for query, own in zip(queries, found.groups, strict=True)}
    write_run(run, out, tag="quiver")
    nothing = f"; no results for {empty} of them" if (empty := sum(not documents for documents in run.values())) else ""
    say(f"{out}: {len(run)} queries, {sum(map(len, run.values()))} documents{nothing}")


def _describe_hits(opened: OpenIndexes, found: Hits, explained: Mapping[str, Mapping[str, Explained]]) -> list[dict[str, Any]]:
    """Describe the hits of a single query for JSON and tables."""
    from quiver.retrieval.data.corpus import ranked

    def places(hits: Hits) -> dict[str, dict[str, float]]:
        ranking = hits.ranking(0)
        return {document: {"rank": rank, "score": ranking[document]} for rank, document in enumerate(ranked(ranking), start=1)}

    lists = {name: places(hits) for name, hits in found.lists.items()}
    candidates = {} if found.candidates is None else places(found.candidates)
    described = []
    for rank, (document, score) in enumerate(found.ranking(0).items(), start=1):
        hit: dict[str, Any] = {"rank": rank, "id": document, "score": score, "effort": found.efforts}
        if candidates:
            hit["candidate"] = candidates[document]
        if lists:
            hit["lists"] = {name: own.get(document) for name, own in lists.items()}
        hit |= _describe_document(opened, document)
        if explained:
            hit["explained"] = explanation_json(explained.get(document, {}))
        if found.missing is not None:
            hit["partial"] = found.missing._asdict()
        if found.groups is not None:
            group = found.groups[0][rank - 1]
            hit |= {"group": group.key, "passages": dict(group.passages)}
        described.append(hit)
    return described


def _describe_document(opened: OpenIndexes, document: str) -> dict[str, Any]:
    """Text and metadata of a document, or why its text cannot be read; the hit itself is valid."""
    from quiver.retrieval.index import DamagedIndexError
    from quiver.retrieval.search.retrievers import storing

    try:
        index = storing(opened.indexes, document)
        if index is None:
            return {}
        stored = index.document(document)
    except DamagedIndexError as error:
        return {"text_error": str(error)}
    # The text as it was encoded, to which the spans of explanations refer.
    text = {"text": stored.content(use_title=index.manifest.policy.use_title)}
    return text | {"metadata": stored.metadata} if stored.metadata else text


def explanation_json(explained: Mapping[str, Explained]) -> dict[str, object]:
    """Convert the explanations of one document to JSON; spans are character offsets in the query and in the hit's text."""
    from quiver.retrieval.search.explain import Explanation

    content: dict[str, object] = {}
    for source, why in explained.items():
        if isinstance(why, Explanation):
            matches = []
            for match in why.matches:
                query = {"query_token": match.query.name, "query_span": match.query.span}
                document = {"document_token": match.document.name, "document_span": match.document.span}
                matches.append({**query, **document, "similarity": match.similarity})
            score = why.score if math.isfinite(why.score) else None  # -inf, the score of a text without vectors, is not valid JSON
            content[source] = {"score": score, "matches": matches}
        else:
            content[source] = {"score": sum(word.score for word in why), "words": [word._asdict() for word in why]}
    return content


@contextmanager
def _sharded(folder: Path, given: ShardOptions, *, verify: bool) -> Iterator[ShardedIndex | None]:
    """Distribute the index over deployments of Ray Serve; None if no option asks for it."""
    if given.shards is None and given.shard_memory is None:
        if given.replicas is not None or given.address is not None:
            raise InputError("--replicas and --address need --shards or --shard-memory")
        yield None
        return
    from quiver.retrieval.cluster.index import Sharding, Timeouts, open_sharded
    from quiver.retrieval.cluster.ray_backend import connected

    # A batch of queries may take long, and a lost replica is replaced meanwhile.
    patient = Timeouts(answer=600, query=10)
    sharding = Sharding(given.shards, given.shard_memory, given.replicas or 1)
    with connected(given.address), open_sharded(folder, sharding, timeouts=patient, verify=verify) as index:
        yield index


def _report_missing(missing: Missing | None, *, run: Path | None) -> None:
    """Report shards that were lost during the search; a run, which would be incomplete, is not written."""
    if missing is None:
        return
    where = f"{missing.documents:,} documents in {len(missing.segments)} segments"
    lost = f"partial results: {where} were not searched, because their shards were lost"
    if run is None:
        logger.warning("%s", lost)
        return
    say_error(f"{lost}; {run} was not written. Repeat the command, or add --replicas 2")
    raise typer.Exit(1)


def _ranks(hit: Mapping[str, Any]) -> list[str]:
    """Rank and score of a hit in each ranking; a dash where the ranking does not contain it."""
    ranked = [*hit.get("lists", {}).values(), *([hit["candidate"]] if "candidate" in hit else [])]
    return ["-" if entry is None else f"{entry['rank']} ({entry['score']:.4f})" for entry in ranked]


def _print_hits(hits: Sequence[Mapping[str, Any]], found: Hits, among: str, group_by: str | None, filtered: Sequence[str]) -> None:
    origins = [*found.lists, *(["candidate"] if found.candidates is not None else [])]
    # Documents show their file already.
    grouped = [] if group_by is None else ["passages"] if group_by == "file" else [group_by, "passages"]
    rows = []
    for hit in hits:
        counts = [] if group_by is None else [str(hit["group"]), str(len(hit["passages"]))][-len(grouped) :]
        ranks = _ranks(hit) if Console().width >= _WIDE else [text.partition(" ")[0] for text in _ranks(hit)]
        text = "\n".join(filter(None, (_shown_fields(hit, filtered), _shown_text(hit))))
        rows.append((_where(hit), f"{hit['score']:.4f}", *counts, *ranks, text))
    each = "" if group_by is None else f", one for each {group_by}; passages: number found of each"
    places = f"; {', '.join(origins)}: rank there" if origins else ""
    print_table(f"{len(hits)} of {among}{each}{places}", ("document", "score", *grouped, *origins, "text"), rows)


def _shown_fields(hit: Mapping[str, Any], fields: Sequence[str]) -> str:
    """The fields of a hit that it was filtered by, in a line: as columns, they would leave little room for the text."""
    given = hit.get("metadata", {})
    values = {name: given[name] if isinstance(given[name], list) else [given[name]] for name in fields if given.get(name) is not None}
    return NOT_SHOWN.sub(" ", "; ".join(f"{name}: {', '.join(map(str, value))[:_VALUE]}" for name, value in values.items()))


def _where(hit: Mapping[str, Any]) -> str:
    """File and lines, pages or cells of a passage of a file; the id of other documents."""
    metadata = hit.get("metadata", {})
    for unit, sign in (("line", ":"), ("page", " p. "), ("cell", " cell ")):
        if "file" in metadata and unit in metadata:
            first, last = metadata[unit], metadata[f"end_{unit}"]
            return f"{metadata['file']}{sign}{first}" + (f"-{last}" if last != first else "")
    return str(hit["id"])


def _shown_text(hit: Mapping[str, Any]) -> str:
    """The beginning of a hit's text, without the name of its file, which is shown beside it."""
    if "text_error" in hit:
        return str(hit["text_error"])
    text = " ".join(hit.get("text", "").split())
    text = text if len(text) <= _EXCERPT else f"{text[: _EXCERPT - 1]}…"
    parts = str(hit.get("metadata", {}).get("file", "")).split("/")
    # The title has the path in the source, without its label.
    named = next((file for file in ("/".join(parts[first:]) for first in range(len(parts))) if file and text.startswith(file)), "")
    return text[len(named) :].removeprefix(" > ").lstrip() if named else text


def _print_explained(
    text: str, hits: Sequence[Mapping[str, Any]], explained: Mapping[str, Mapping[str, Explained]], filtered: Sequence[str]
) -> None:
    console = Console()
    for hit in hits:
        group = f"  {hit['group']}, passages found: {len(hit['passages'])}" if "group" in hit else ""
        heading = f"{hit['rank']}. {_where(hit)}  {hit['score']:.4f}{group}"
        names = [*hit.get("lists", {}), *(["candidate"] if "candidate" in hit else [])]
        origin = ", ".join(f"{name} {rank}" for name, rank in zip(names, _ranks(hit), strict=True))
        console.print(Text.assemble((heading, "bold"), f"  {origin}" if origin else ""))
        if fields := _shown_fields(hit, filtered):
            console.print(Text(fields, style="dim"))
        for view in explanation_view(text, explained.get(hit["id"], {}), hit.get("text")):
            console.print(view)
        console.print()


def explanation_view(query: str, explained: Mapping[str, Explained], text: str | None = None) -> list[RenderableType]:
    """Render the explanations of one document: matched tokens as tables, words in a line, and the text with matches in colour.

    ``text`` is shown where no token matched. rich omits colours where the output is not a terminal, or ``NO_COLOR`` is set.
    """
    from quiver.retrieval.search.explain import Explanation

    shown: list[RenderableType] = []
    words = list[str]()
    tokens = [why for why in explained.values() if isinstance(why, Explanation) and why.matches]
    for source, why in explained.items():
        if not isinstance(why, Explanation):
            shown.append(_words_line(source, why))
            words += [word.word for word in why if word.score]
        elif not why.matches:
            shown.append(Text(f"{source}: similarity {why.score:.4f}"))
            text = text or why.text
        else:
            spans: dict[tuple[int, int], list[float]] = {}
            for match in why.matches:  # those of special and expansion tokens would colour nearly everything
                if match.query.span is not None and match.document.span is not None:
                    spans.setdefault(match.document.span, []).append(match.similarity)
            shown += [Padding(_passage(why.text or "", spans), (0, 2)), _matches_table(source, query, why)]
    if tokens or text is None:
        return shown
    met = {found.span(): [1.0] for found in re.finditer(r"\w+", text) if found.group().lower() in words}
    return [Padding(_passage(text, met), (0, 2)), *shown]


def _passage(text: str, met: Mapping[tuple[int, int], Sequence[float]]) -> Text:
    """The part of a text whose matches are the most similar, with matched spans in colour."""

    def gain(start: int) -> float:
        return sum(sum(similarities) for (begin, end), similarities in met.items() if start <= begin and end <= start + _PASSAGE)

    starts = (min(max(0, begin - _CONTEXT), len(text) - _PASSAGE) for begin, _ in sorted(met))
    first = max(starts, key=gain, default=0) if len(text) > _PASSAGE else 0
    last = min(first + _PASSAGE, len(text))
    shown = Text(NOT_SHOWN.sub(" ", text[first:last]))
    for (begin, end), similarities in met.items():
        if first <= begin and end <= last:
            shown.stylize(_shade(max(similarities)), begin - first, end - first)
    return Text.assemble("…" if first else "", shown, "…" if last < len(text) else "")


def _matches_table(source: str, query: str, why: Explanation) -> Table:
    table = Table(title=Text(source, style="table.title"), title_justify="left")
    for name, justify in (("query token", "left"), ("matched", "left"), ("similarity", "right")):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    special = [match for match in why.matches if match.query.span is None]
    for match in why.matches:
        if match.query.span is not None:
            span, shade = match.document.span, _shade(match.similarity)
            token, text = query[slice(*match.query.span)], "" if span is None else (why.text or "")[slice(*span)]
            matched = NOT_SHOWN.sub(" ", text).strip() or match.document.name
            table.add_row(Text(NOT_SHOWN.sub(" ", token)), Text(matched, shade), Text(f"{match.similarity:.4f}", shade))
    if special:
        counts = Counter(match.query.name for match in special)
        names = ", ".join(name if count == 1 else f"{count} {name}" for name, count in counts.items())
        table.add_row(Text(names, "dim"), "", Text(f"{sum(match.similarity for match in special):.4f}", "dim"))
    table.add_row("sum", "", f"{sum(match.similarity for match in why.matches):.4f}", style="bold")
    return table


def _words_line(source: str, words: Sequence[WordScore]) -> Text:
    """The words of the query with their scores, those that the text lacks last."""
    scored = [(f"{NOT_SHOWN.sub(' ', word.word)} {word.score:.4f}", "green") for word in words if word.score]
    line = Text(f"{source}: ")
    line.append_text(Text(" + ").join(Text(*each) for each in scored) if scored else Text("no word of the query"))
    if len(scored) > 1:
        line.append(f" = {sum(word.score for word in words):.4f}")
    if lacking := [NOT_SHOWN.sub(" ", word.word) for word in words if not word.score]:
        line.append(f" (not in the text: {', '.join(lacking)})", "dim")
    return line


def _shade(similarity: float) -> str:
    return next((style for least, style in _SHADES if similarity >= least), _SHADES[-1][1])
