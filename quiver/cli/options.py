"""Options and arguments that several commands share, each declared once: a name has one meaning and one help text everywhere.

Use them as annotations, such as ``overwrite: options.Overwrite = False``. Nothing here imports torch, faiss or numba.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from quiver.encoder.errors import InputError

if TYPE_CHECKING:
    from quiver.retrieval.data.source import SourceOptions

# Arguments.
IndexFolder: TypeAlias = Annotated[Path, typer.Argument(help="Index folder.")]
CorpusSource: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Corpus: a folder of files (Markdown, text, HTML, PDF, office and e-mail files, e-books, notebooks, source code); a table"
        " (.jsonl, .json, .csv, .tsv, .parquet, .arrow) or a folder of tables; a BEIR folder (corpus.jsonl);"
        " hub://OWNER/NAME/CONFIG:SPLIT; ir:NAME (ir_datasets); or - for JSON lines from standard input.",
    ),
]
ResultsFolder: TypeAlias = Annotated[Path, typer.Argument(help="Results folder of quiver evaluate.")]
ResultsFolders: TypeAlias = Annotated[list[Path], typer.Argument(help="Results folders of quiver evaluate.")]
CollectionNames: TypeAlias = Annotated[
    list[str] | None, typer.Argument(help="Collections, groups or families: beir/scifact, beir/cqadupstack, beir. Default: all.")
]
Packages: TypeAlias = Annotated[
    list[str] | None, typer.Option("--package", help="Further installed package to take functions from. Repeatable.")
]
Overrides: TypeAlias = Annotated[list[str] | None, typer.Argument(help="Recipe settings to change, written section.setting=value.")]

# Models.
IndexModel: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Folder or hub id of the model, or folder of its ONNX export, which searches without PyTorch."
        " Default: the model that built the index.",
    ),
]
Dtype: TypeAlias = Annotated[
    Literal["float32", "bfloat16", "float16", "int8"] | None,
    typer.Option(
        "--dtype",
        help="Dtype of the model's weights. int8 is for CPUs: about 2x faster than float32 on those with VNNI, 1.5x on others."
        " Default: bfloat16 on a GPU (float16 on a GPU without it), float32 on a CPU.",
    ),
]
TrainingDtype: TypeAlias = Annotated[
    Literal["float32", "bfloat16"] | None,
    typer.Option(
        "--dtype",
        help="Dtype of the forward and backward pass (bfloat16: autocast); weights and optimizer state are float32. Default: training.dtype"
        " of the recipe, by default bfloat16 on a GPU (float32 on a GPU without it), float32 on a CPU.",
    ),
]
Device: TypeAlias = Annotated[
    str | None, typer.Option("--device", help="Device of the model: cpu, cuda or cuda:1. Default: cuda if there is a GPU.")
]
BatchTokens: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--batch-tokens",
        min=1,
        help="Tokens that the model encodes at once. Default: 4,096 on a CPU; on a GPU what half of its free memory holds, up to 65,536.",
    ),
]
Devices: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--devices",
        help="Devices to encode on, with one worker process each: GPU numbers such as 0,1, or cpu,cpu for two CPU workers. Queries are"
        " encoded on the first.",
    ),
]
QueryLength: TypeAlias = Annotated[
    int | None, typer.Option("--query-length", min=1, help="Maximum tokens of a query of a ColBERT model. Default: the model's.")
]
DocumentLength: TypeAlias = Annotated[
    int | None,
    typer.Option("--document-length", min=1, help="Maximum tokens of a document; of a bi-encoder's queries too. Default: the model's."),
]
QueryPrompt: TypeAlias = Annotated[
    str | None, typer.Option("--query-prompt", help="Text put before every query, such as 'query: '. Default: the model's.")
]
DocumentPrompt: TypeAlias = Annotated[
    str | None, typer.Option("--document-prompt", help="Text put before every document, such as 'passage: '. Default: the model's.")
]
TruncateDim: TypeAlias = Annotated[
    int | None,
    typer.Option("--truncate-dim", min=1, help="Width to which the vectors of a bi-encoder are cut (Matryoshka). Default: the full width."),
]
Revision: TypeAlias = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit on the Hugging Face Hub. Default: the main branch.")
]

# Documents and vectors.
Title: TypeAlias = Annotated[
    bool, typer.Option(" /--no-title", help="Do not prepend the title to the text of each document.", show_default=False)
]
StoreText: TypeAlias = Annotated[
    bool,
    typer.Option(
        " /--no-text",
        help="Do not store the texts in the index. It then shows no texts, and cannot be refreshed, grouped or fused with BM25.",
        show_default=False,
    ),
]
IdField: TypeAlias = Annotated[
    str | None,
    typer.Option("--id", help="Field of a table that holds the id. Default: _id, id, doc_id, docid or document_id, or a running number."),
]
TitleField: TypeAlias = Annotated[str | None, typer.Option("--title", help="Field of a table that holds the title. Default: title.")]
TextFields: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        help="Field of a table that holds the text. Repeatable: the texts are joined. Default: text, contents, content, body, passage or"
        " document.",
    ),
]
ListFields: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--list",
        help="Field of a table whose texts hold several values, such as tags separated by commas, semicolons or vertical bars. Repeatable.",
    ),
]
ColumnNames: TypeAlias = Annotated[
    str | None, typer.Option("--columns", help="Column names of a CSV or TSV file without a header, such as id,text.")
]
DocumentIds: TypeAlias = Annotated[
    Path | None, typer.Option("--ids", help="File of document ids, one per line: delete or search these documents.")
]
Passages: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--passages",
        help="Where texts are cut: headings, functions, tokens:256 (maximum of a passage), overlap:32 (tokens), separated by commas; or"
        " whole. Default: headings,functions for files; tables are not cut.",
    ),
]
Include: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        help="Files of a folder to read, such as '*.md' or 'docs/**'; hidden ones and node_modules must be named. Repeatable.",
    ),
]
Exclude: TypeAlias = Annotated[
    list[str] | None, typer.Option("--exclude", help="Files or folders to leave out, such as tests or '*.min.js'. Repeatable.")
]
Cache: TypeAlias = Annotated[
    Path | None, typer.Option("--cache", help="Cache folder for vectors. Default: the user's cache folder (quiver cache info shows it).")
]
NoCache: TypeAlias = Annotated[bool, typer.Option("--no-cache", help="Do not cache vectors.")]

# Indexes.
ENGINE = "Index engine with settings: auto, exact, or NAME:key=value,key=value such as ivf-dense:nlist=1024,bits=16."
Engine: TypeAlias = Annotated[str, typer.Option("--engine", help=ENGINE)]
BuildMemory: TypeAlias = Annotated[
    str, typer.Option("--memory", help="Memory for building the index, in addition to the model, such as 2GB.")
]
Verify: TypeAlias = Annotated[
    bool, typer.Option("--verify/--no-verify", help="Verify the checksum of each block of an index when it is first read.")
]
Generation: TypeAlias = Annotated[
    int | None, typer.Option("--generation", help="Number of the index generation to open. Default: the newest.")
]
Wait: TypeAlias = Annotated[
    str, typer.Option("--wait", help="Time to wait until another process has finished writing to the index, such as 30s or 5m.")
]
EFFORT = "exact (exhaustive), balanced (fastest search parameters with a measured recall of 0.95), fast (0.90), or search parameters"
Effort: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--effort",
        help=f"Search effort: {EFFORT} such as nprobe=8,k_factor=2. Default: balanced.",
        autocompletion=lambda: ["exact", "balanced", "fast"],
    ),
]
Split: TypeAlias = Annotated[str, typer.Option("--split", help="Split of the relevance judgements: train, dev or test.")]

# Fusion and re-ranking.
Fuse: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--fuse", help="Ranking to fuse with: bm25, or another index of the same documents; in evaluate also a model or a run. Repeatable."
    ),
]
FusionMethod: TypeAlias = Annotated[
    Literal["rrf", "weighted"] | None,
    typer.Option("--fusion", help="Fusion by reciprocal ranks (rrf) or by scores (weighted). Default: rrf."),
]
Weights: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--weights",
        help="Fusion weights, such as 1,0.5: that of the index or model, then one per --fuse. A weight of 0 skips that ranking.",
    ),
]
Normalize: TypeAlias = Annotated[
    Literal["min-max", "z-score"] | None,
    typer.Option("--normalize", help="Normalization of scores for --fusion weighted. Default: min-max."),
]
Rerank: TypeAlias = Annotated[
    str | None, typer.Option("--rerank", help="Re-rank the candidates with a ColBERT model, or with the index of one.")
]
Candidates: TypeAlias = Annotated[
    int | None,
    typer.Option("--candidates", min=1, help="Candidates that each ranking contributes to fusion and re-ranking. Default: 100."),
]

GroupBy: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--group-by",
        help="Group passages by this field of the index, such as file: its values are ranked, each by its best passage, and -k counts"
        " values.",
    ),
]

# Where encoding runs.
Executor: TypeAlias = Annotated[
    str, typer.Option("--executor", help="Where texts are encoded: local (this machine) or ray (a Ray cluster).")
]
Workers: TypeAlias = Annotated[
    int | None,
    typer.Option("--workers", min=1, help="Number of worker processes. Default: local: this process only; ray: as many as fit."),
]
Threads: TypeAlias = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="CPU threads; with several workers, those of each. Default: all, divided among the workers."),
]
Address: TypeAlias = Annotated[
    str | None,
    typer.Option("--address", help="Address of the Ray cluster: HOST:PORT, ray://HOST:PORT or auto. Default: start Ray on this machine."),
]

# Runs and output.
Rename: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--rename",
        help="Fields of --queries and --qrels that have other names than query_id, query, document and grade: FIELD=NAME, FIELD=NAME,"
        " such as answer_file=document. Repeatable.",
    ),
]
QueryFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--queries",
        help="File of queries with the fields id and text: .jsonl, .json, .csv, .tsv (also without a header), .parquet or .arrow.",
    ),
]
Out: TypeAlias = Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")]
ModelOut: TypeAlias = Annotated[Path, typer.Option("--out", "-o", help="Model folder to write.")]
RunOut: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", help="Run folder to write: model/, run.json, log.jsonl, checkpoints/, report.md. Required without --dry-run."
    ),
]
Resume: TypeAlias = Annotated[
    bool, typer.Option("--resume", help="Resume the unfinished run in --out. The final weights equal those of an uninterrupted run.")
]
Overwrite: TypeAlias = Annotated[bool, typer.Option("--overwrite", help="Overwrite the output if it exists.")]
SearchedIndex: TypeAlias = Annotated[
    Path | None, typer.Option("--index", help="Index of the documents, searched with its own model instead of encoding them.")
]
DryRun: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Only report what would be done.")]
ReportTitle: TypeAlias = Annotated[str, typer.Option("--title", help="Title of the report. Default: one that says what it reports.")]
Seed: TypeAlias = Annotated[int, typer.Option("--seed", min=0, help="Random seed.")]
Progress: TypeAlias = Annotated[
    bool, typer.Option("--progress/--no-progress", help="Show progress on standard error: bars on a terminal, elsewhere a line a minute.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def names_of(rename: list[str] | None) -> dict[str, str]:
    """Read ``FIELD=NAME,FIELD=NAME``: field -> name that it is read by.

    Raises:
        InputError: A part has another form.

    Example:
        >>> names_of(["search=query,sku=document", "clicks=grade"])
        {'search': 'query', 'sku': 'document', 'clicks': 'grade'}
    """
    parts = [part.partition("=") for given in rename or () for part in given.split(",")]
    if wrong := next(("".join(part) for part in parts if not (part[0].strip() and part[2].strip())), None):
        raise InputError(f"--rename {wrong!r}: expected FIELD=NAME,FIELD=NAME such as search=query,sku=document")
    return {field.strip(): name.strip() for field, _, name in parts}


def source_options(
    id_field: str | None,
    title_field: str | None,
    text_fields: list[str] | None,
    lists: list[str] | None,
    columns: str | None,
    passages: str | None,
    include: list[str] | None,
    exclude: list[str] | None,
) -> SourceOptions:
    """The options of a source as one value."""
    from quiver.retrieval.data.source import SourceOptions

    names = tuple(name.strip() for name in columns.split(",")) if columns else ()
    texts, kept, left_out = (tuple(each or ()) for each in (text_fields, include, exclude))
    return SourceOptions(id_field, title_field, texts, names, passages or "", kept, left_out, tuple(lists or ()))
