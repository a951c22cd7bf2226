"""``quiver mine`` and ``quiver score``: hard negatives, and a teacher's scores of them."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from quiver.cli.output import (
    CacheOption,
    Int8Option,
    JsonOption,
    NoCacheOption,
    OverwriteOption,
    ProgressOption,
    command_line,
    print_json,
    print_table,
    say,
    show_progress,
    vector_cache,
)
from quiver.cli.workers import AddressOption, ExecutorOption, WorkersOption
from quiver.encoder import InputError
from quiver.encoder.config import Precision
from quiver.encoder.files import expand_home
from quiver.encoder.schema import parse
from quiver.retrieval.cluster import Executor, open_executor
from quiver.retrieval.index import Index, open_index
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.search import bm25
from quiver.retrieval.training.mining.ensemble import Ensemble, check_weights
from quiver.retrieval.training.mining.margins import MARGINS, NO_MARGIN, PERC_POS, Rules, parse_margins, parse_ranks
from quiver.retrieval.training.mining.mined import ROWS, SUSPECTS
from quiver.retrieval.training.mining.negatives import Output, System, mine_negatives
from quiver.retrieval.training.mining.positives import BeirSource, PairSource
from quiver.retrieval.training.mining.scoring import NORMALISERS, score_rows
from quiver.retrieval.training.mining.teachers import Teacher, load_teacher
from quiver.retrieval.training.sections import DataSection

DOCUMENT_FIELDS = {"texts": ["positive", "negatives"], "ids": ["document_ids"]}
"""Where rows have their documents unless told otherwise: as ``quiver mine`` writes them."""


class Choice(str, Enum):
    """Which of the candidates that are left become negatives."""

    TOP = "top"
    RANDOM = "random"


class Format(str, Enum):
    """What a row holds."""

    TEXTS = "texts"
    IDS = "ids"


def mine(
    data: Annotated[list[str], typer.Argument(help="A BEIR folder; or files of pairs (.jsonl[.gz], .parquet), folders of them, hub://.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help=f"A bi-encoder, a ColBERT, or {bm25.NAME}; by default the index's own.")
    ] = None,
    index: Annotated[Path | None, typer.Option(help="Search this index instead of encoding the corpus.")] = None,
    corpus: Annotated[Path | None, typer.Option(help="With pairs: search these documents too, a corpus.jsonl[.gz] or its folder.")] = None,
    split: Annotated[str, typer.Option(help="Judgements of a BEIR folder.")] = "train",
    query_field: Annotated[str, typer.Option(help="Field of the query in pairs.")] = "query",
    positive_field: Annotated[str, typer.Option(help="Field of the positive in pairs, or of a list of them.")] = "positive",
    negatives: Annotated[int, typer.Option("--negatives", "-n", min=1, help="Hard negatives for each query.")] = 7,
    ranks: Annotated[str, typer.Option(help="Ranks they are taken from; positives and copies are not counted.")] = "1-200",
    choose: Annotated[Choice, typer.Option(help="The best within the ranks, or any.")] = Choice.TOP,
    margins: Annotated[
        list[str] | None,
        typer.Option("--margin", help=f"{', '.join(f'{name}=VALUE' for name in MARGINS)}; may be repeated; {NO_MARGIN} for no margin."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of --choose random.")] = 42,
    ids: Annotated[bool, typer.Option("--ids", help="Write rows of ids, and the texts once beside them.")] = False,
    suspects: Annotated[int, typer.Option(min=0, help="Suspected false negatives listed for each query.")] = 5,
    limit: Annotated[int | None, typer.Option(min=1, help="Mine for the first queries only.")] = None,
    title: Annotated[bool, typer.Option("--title/--no-title", help="Put titles before the texts.")] = True,
    int8: Annotated[bool, Int8Option] = False,
    cache: Annotated[Path | None, CacheOption] = None,
    no_cache: Annotated[bool, NoCacheOption] = False,
    executor: Annotated[str, ExecutorOption] = "local",
    workers: Annotated[int | None, WorkersOption] = None,
    address: Annotated[str | None, AddressOption] = None,
    overwrite: Annotated[bool, OverwriteOption] = False,
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Mine hard negatives with a model, an index or BM25; a run that was stopped goes on when it is started again.

    Examples: quiver mine data/scifact --model MODEL --out mined; quiver mine pairs.jsonl.gz --positive-field pos -m bm25 --margin none
    --ranks 10-200 --choose random --out mined
    """
    rules = Rules(
        negatives=negatives,
        ranks=parse_ranks(ranks),
        margins=(PERC_POS,) if margins is None else parse_margins(margins),
        choice=choose.value,
        seed=seed,
    )
    source = _source(data, split=split, query_field=query_field, positive_field=positive_field, corpus=corpus, use_title=title)
    opened = None if index is None else open_index(index)
    if opened is not None and corpus is not None:
        raise InputError("--index has the documents already; leave --corpus away")
    if model == bm25.NAME and (executor, workers, address) != ("local", None, None):
        raise InputError(f"{bm25.NAME} encodes nothing that could be shared out; leave --executor, --workers and --address away")
    record = mine_negatives(
        source,
        replace(
            _system(model, opened, int8=int8, cache=vector_cache(cache, no_cache)),
            executor=open_executor(executor, workers=workers, address=address),
        ),
        out,
        rules=rules,
        output=Output(ids=ids, suspects=suspects, limit=limit),
        overwrite=overwrite,
        progress=show_progress(progress),
        command=command_line(),
    )
    if as_json:
        print_json(record)
        return
    _show_mined(record, out, negatives, ids=ids)


def score(
    data: Annotated[list[str], typer.Argument(help="Rows: .jsonl[.gz] or .parquet files, folders of them, hub://.")],
    teachers: Annotated[
        list[str],
        typer.Option("--teacher", "-t", help="Folder or hub id of a cross-encoder, a bi-encoder or a ColBERT; may be repeated."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    form: Annotated[
        Format, typer.Option("--format", help="What rows hold: texts, or ids of texts in --queries and --documents.")
    ] = Format.TEXTS,
    query_field: Annotated[str | None, typer.Option(help="Field of the query; by default query, of ids query_id.")] = None,
    document_fields: Annotated[
        list[str] | None,
        typer.Option(
            "--document-field", help="Field of documents; may be repeated; by default positive and negatives, of ids document_ids."
        ),
    ] = None,
    queries: Annotated[str | None, typer.Option(help="With ids: source of the query texts.")] = None,
    documents: Annotated[str | None, typer.Option(help="With ids: source of the document texts.")] = None,
    query_id_field: Annotated[str, typer.Option(help="Field of the id in --queries.")] = "query_id",
    document_id_field: Annotated[str, typer.Option(help="Field of the id in --documents.")] = "document_id",
    text_field: Annotated[str, typer.Option(help="Field of the text in both.")] = "text",
    weights: Annotated[
        list[float] | None,
        typer.Option(
            "--weight",
            help="Of several teachers: what the score of each is multiplied with before they are added up, once for each. By default each "
            "teacher's scores of a row are brought to 0..1, and the mean is taken.",
        ),
    ] = None,
    normalize: Annotated[str, typer.Option(help=f"How the scores of a row are written: {' or '.join(NORMALISERS)}.")] = "none",
    int8: Annotated[bool, Int8Option] = False,
    cache: Annotated[Path | None, CacheOption] = None,
    no_cache: Annotated[bool, NoCacheOption] = False,
    executor: Annotated[str, ExecutorOption] = "local",
    workers: Annotated[int | None, WorkersOption] = None,
    address: Annotated[str | None, AddressOption] = None,
    overwrite: Annotated[bool, OverwriteOption] = False,
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Score the documents of each row by a teacher, or several; a run that was stopped goes on when it is started again.

    Examples: quiver score mined/train.jsonl.gz --teacher BAAI/bge-reranker-v2-m3 --normalize minmax --out scored;
    quiver score mined/train.jsonl.gz --teacher runs/colbert/model --teacher runs/dense/model --weight 0.5 --weight 10 --out scored;
    quiver score kd.parquet --format ids --queries queries.parquet --documents docs.parquet --teacher BAAI/bge-m3 --out scored
    """
    fields = {
        "train": tuple(data),
        "format": form.value,
        "query_field": query_field or ("query" if form is Format.TEXTS else "query_id"),
        "document_fields": tuple(document_fields or DOCUMENT_FIELDS[form.value]),
        "queries": queries,
        "documents": documents,
        "query_id_field": query_id_field,
        "document_id_field": document_id_field,
        "text_field": text_field,
    }
    section = parse(DataSection, fields, source="options")
    record = score_rows(
        section,
        _teacher(
            teachers, weights, precision="int8" if int8 else "float", executor=open_executor(executor, workers=workers, address=address)
        ),
        out,
        normalize=normalize,
        cache=vector_cache(cache, no_cache),
        overwrite=overwrite,
        progress=show_progress(progress),
        command=command_line(),
    )
    if as_json:
        print_json(record)
        return
    result = record["result"]
    rows = [
        ("rows", f"{result['rows']:,}"),
        ("pairs", f"{result['pairs']:,}"),
        ("rows whose positive scores best", f"{result['positive_first']:,}"),
        ("mean score of positives", f"{result['mean_scores']['positive']:.4f}"),
        ("mean score of the others", f"{result['mean_scores']['others']:.4f}"),
        ("lowest and highest", f"{result['lowest']:.4f} {result['highest']:.4f}"),
        ("seconds", f"{record['seconds']:,.0f}"),
    ]
    print_table(str(out), ("", "value"), rows)
    say(f"rows: {out / ROWS} (in a recipe: data.score_fields: [scores])")


def _teacher(sources: list[str], weights: list[float] | None, *, precision: Precision, executor: Executor) -> Teacher | Ensemble:
    if len(sources) == 1:
        if weights is not None:
            raise InputError("--weight is for several teachers; one is given")
        return load_teacher(sources[0], precision=precision, executor=executor)
    check_weights(len(sources), weights)  # before models are fetched and read
    return Ensemble([load_teacher(source, precision=precision, executor=executor) for source in sources], weights)


def _source(
    data: list[str], *, split: str, query_field: str, positive_field: str, corpus: Path | None, use_title: bool
) -> BeirSource | PairSource:
    folder = expand_home(data[0])
    if len(data) > 1 or not (folder / "qrels").is_dir():
        return PairSource(tuple(data), query_field, positive_field, corpus, use_title)
    if corpus is not None:
        raise InputError(f"{folder}: a BEIR folder has its own corpus; --corpus is for pairs")
    return BeirSource(folder, split, use_title)


def _system(model: str | None, index: Index | None, *, int8: bool, cache: Path | None) -> System:
    if model == bm25.NAME:
        return System(None, index, cache)
    if model is None and index is None:
        raise InputError(f"give --model (a folder, a hub id or {bm25.NAME}) or --index")
    if index is None:
        return System(load_model(str(model), precision="int8" if int8 else "float"), None, cache)
    card = index.manifest.model
    return System(load_model(model or card.source, precision=card.precision), index, cache)


def _show_mined(record: dict[str, Any], out: Path, negatives: int, *, ids: bool) -> None:
    result = record["result"]
    rows = [
        ("queries", f"{result['queries']:,}"),
        ("rows, one for each positive", f"{result['rows']:,}"),
        ("positives within the ranks", f"{result['positives_within_ranks']:,}"),
        ("documents", f"{record['data']['documents']:,}"),
        ("candidates within the ranks", f"{result['candidates']:,}"),
        *((f"dropped by {name}", f"{count:,}") for name, count in result["dropped"].items()),
        ("negatives", f"{result['negatives']:,}"),
        (f"rows with fewer than {negatives}", f"{result['rows_short']:,}"),
        ("of them with none", f"{result['rows_without_negatives']:,}"),
        ("mean score of positives", f"{result['mean_scores']['positive']:.4f}"),
        ("mean score of negatives", f"{result['mean_scores']['negative']:.4f}"),
        ("seconds", f"{record['seconds']:,.0f}"),
    ]
    print_table(str(out), ("", "value"), rows)
    say(f"suspected false negatives: {out / SUSPECTS}, {result['suspects']:,}")
    say(f"rows: {out / ROWS}; in a recipe:\n")
    fields = {"format": "ids", "query_field": "query_id", "document_fields": "[document_ids]"} if ids else {}
    fields = {"train": f"[{out / ROWS}]", **(fields or {"document_fields": "[positive, negatives]"})}
    if ids:
        fields |= {name: str(out / f"{name}.jsonl.gz") for name in ("queries", "documents")}
    fields |= {"documents_per_row": str(negatives + 1), "short_rows": "skip"}
    say("\n".join(["data:", *(f"  {name}: {value}" for name, value in fields.items())]))
