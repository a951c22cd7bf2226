"""Options as data, those that several commands share (one name, meaning and help text everywhere), and what commands print.

A command is a function whose parameters are options, arguments, or groups of options. An option is declared once, with `option`, as the
default of a parameter, of a field of a group (a dataclass), or as a constant that several commands share. `command` makes of it what Typer
reads, and calls the function with filled groups and parsed values. Nothing here imports torch, faiss or numba.
"""

from __future__ import annotations

import inspect
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from quiver.encoder.environment import installed_version
from quiver.encoder.errors import InputError
from quiver.retrieval.models.options import ModelOptions
from quiver.retrieval.options import Dtype as WeightsDtype
from quiver.retrieval.options import SourceOptions, parse_duration, parse_size

if TYPE_CHECKING:
    from quiver.retrieval.index import IndexReader
    from quiver.retrieval.models.biencoder import BiEncoder
    from quiver.retrieval.models.bm25 import BM25
    from quiver.retrieval.models.colbert import ColBERT
    from quiver.retrieval.models.onnx_model import OnnxModel
    from quiver.retrieval.records import Executor
    from quiver.retrieval.search.search import Fusion


# A number, also with an interval or a score in parentheses; a dash where there is none.
_NUMBER = re.compile(r"-|[-+]?[\d,]+(\.\d+)?(e[-+]?\d+)?( \([-+.\d]+\))?")
_LABELS = 2  # leading text columns that are repeated in each part of a table that is printed in several parts
_NARROWEST = 16  # width of a text column


@dataclass(frozen=True, eq=False)
class Option:
    """An option or an argument: default, help text, names, and how its text is read."""

    default: Any  # ... if it must be given
    flags: Sequence[str]  # such as -m or --verify/--no-verify; without a long one, the field's is put before them
    parse: Callable[[Any], Any] | None  # reads the text of the command line, or the texts of a repeated option
    declare: Callable[..., Any]  # typer.Option or typer.Argument
    settings: Mapping[str, Any]  # what else it takes: help, min, metavar, ...

    def with_default(self, default: Any) -> Option:
        """The option with another default."""
        return replace(self, default=default)

    def names(self, field: str) -> Sequence[str]:
        """Names on the command line of the option of a field or parameter."""
        long = any("--" in flag for flag in self.flags)
        return self.flags if long else (f"-{'-' * (len(field) > 1)}{field.replace('_', '-')}", *self.flags)

    def parameter(self, name: str, field: str, kind: Any) -> inspect.Parameter:
        """The parameter of a function that Typer reads: of the field of a group, or of the same name."""
        default, several = self.default, isinstance(self.default, tuple) or (get_origin(kind) is tuple and self.parse is None)
        if several:
            kind, default = list[str if self.parse else get_args(kind)[0]], default or None  # type: ignore[misc]
        elif self.parse is not None:
            kind = str
        declared = self.declare(*(self.names(field) if self.declare is typer.Option else ()), **self.settings)
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is ... else default,
            annotation=Annotated[kind | None if default is None else kind, declared],
        )

    def value(self, given: Any, field: str, kind: Any) -> Any:
        """The value of the field: the text of the command line is parsed; None stands for the default."""
        given = self.default if given is None else given
        if isinstance(given, float) and not math.isfinite(given):
            raise InputError(f"{self.names(field)[0]} must be a finite number, got {given}")
        if self.parse is not None:
            return None if given is None else self.parse(given)
        return tuple(given) if get_origin(kind) is tuple else given


def option(default: Any, help: str, *flags: str, parse: Callable[[Any], Any] | None = None, **settings: Any) -> Any:  # noqa: A002
    """Declare an option, see `Option`. A field of type ``tuple[T, ...]`` is one that may be repeated."""
    return Option(default, flags, parse, typer.Option, {"help": help, **settings})


def argument(help: str, default: Any = ..., **settings: Any) -> Any:  # noqa: A002
    """Declare an argument, see `Option`."""
    return Option(default, (), None, typer.Argument, {"help": help, **settings})


GROUPS: dict[type, Mapping[str, Option]] = {}
"""Groups -> options of their fields. A dataclass of the library is a group if it is entered here; its other fields keep their defaults."""

Group = TypeVar("Group", bound=type)


def group(found: Group) -> Group:
    """Make a group of a class that will be a dataclass: write ``@dataclass`` above it."""
    own = {name: value for name, value in vars(found).items() if isinstance(value, Option)}
    for name, value in own.items():
        delattr(found, name) if value.default is ... else setattr(found, name, value.default)
    GROUPS[found] = {
        name: each for base in reversed(found.__mro__) for name, each in GROUPS.get(base, own if base is found else {}).items()
    }
    return found


class _Slot(NamedTuple):
    """An option in the signature that Typer reads, for a parameter of the command or a field of its group."""

    name: str
    field: str
    option: Option
    kind: Any


def _find_slots(name: str, kind: Any, default: Any) -> list[_Slot]:
    """The slots of a parameter; none for the context."""
    if kind not in GROUPS:
        return [_Slot(name, name, default, kind)] if isinstance(default, Option) else []
    kinds, slots = get_type_hints(kind), []
    for field, each in GROUPS[kind].items():
        unique = field if each.declare is typer.Argument else f"{name}_{field}"  # the help shows the name of an argument
        slots.append(_Slot(unique, field, each.with_default(getattr(default, field, each.default)), kinds[field]))
    return slots


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function whose parameters are options, arguments, groups, or the context.

    A default of a group, such as ``encoding: Encoding = Encoding(executor="ray")``, replaces defaults of its options in this command.
    """
    hints, found = get_type_hints(function), list[inspect.Parameter]()
    plan: dict[str, list[_Slot]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        plan[name] = _find_slots(name, hints[name], parameter.default)
        context = parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        found += [slot.option.parameter(slot.name, slot.field, slot.kind) for slot in plan[name]] or [context]

    def call(**given: Any) -> None:
        values = {}
        for name, slots in plan.items():
            read = {slot.field: slot.option.value(given[slot.name], slot.field, slot.kind) for slot in slots}
            if hints[name] in GROUPS:  # where nothing was given, the default of the group counts
                values[name] = hints[name](**{field: value for field, value in read.items() if value is not None})
            else:
                values[name] = read[name] if slots else given[name]
        function(**values)

    call.__name__, call.__doc__, call.__module__ = function.__name__, function.__doc__, function.__module__
    call.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in found}
    return call


_LEAST_MEMORY = 16 << 20


def parse_memory(text: str) -> int:
    """Parse the memory for building an index, such as ``2GB``, in bytes; a small number is one whose unit was forgotten."""
    size = parse_size(text)
    if size < _LEAST_MEMORY:
        raise InputError(f"--memory {text} is {size:,} bytes; building an index needs at least 16 MB: write 500MB or 2GB")
    return size


def parse_names(texts: Sequence[str]) -> dict[str, str]:
    """Read ``FIELD=NAME,FIELD=NAME``: field -> name that it is read by.

    Example:
        >>> parse_names(["search=query,sku=document", "clicks=grade"])
        {'search': 'query', 'sku': 'document', 'clicks': 'grade'}
    """
    parts = [part.partition("=") for text in texts for part in text.split(",")]
    if wrong := next(("".join(part) for part in parts if not (part[0].strip() and part[2].strip())), None):
        raise InputError(f"--rename {wrong!r}: expected FIELD=NAME,FIELD=NAME such as search=query,sku=document")
    return {field.strip(): name.strip() for field, _, name in parts}


def parse_weights(text: str) -> tuple[float, ...]:
    """Read the weights of a fusion, such as ``1,0.5``."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"--weights {text!r}: expected numbers separated by commas, such as 1,0.5") from error


def at_revision(model: str, revision: str | None) -> str:
    """The model of a command with the revision of ``--revision``, as ``OWNER/NAME@REVISION``."""
    if revision is None:
        return model
    if "/" not in model or "@" in model or Path(model).expanduser().exists():
        raise InputError(f"--revision is one of a model OWNER/NAME on the Hugging Face Hub, and the model is {model}")
    return f"{model}@{revision}"


def parse_devices(text: str) -> list[str]:
    """Parse ``--devices``: names of devices of this machine, separated by commas; a number is that of a GPU.

    Example:
        >>> parse_devices("cpu, cpu")
        ['cpu', 'cpu']
    """
    from quiver.retrieval.models.pretrained import check_device

    names = [name.strip() for name in text.split(",")]
    return [check_device(f"cuda:{name}" if name.isdecimal() else name) for name in names]


# Arguments.
INDEX_FOLDER = argument("Index folder.")
SOURCE = argument(
    "Corpus: a folder of files (Markdown, text, HTML, PDF, office and e-mail files, e-books, notebooks, source code); a table"
    " (.jsonl, .json, .csv, .tsv, .parquet, .arrow) or a folder of tables; a BEIR folder (corpus.jsonl);"
    " hub://OWNER/NAME/CONFIG:SPLIT; ir:NAME (ir_datasets); or - for JSON lines from standard input.",
    metavar="SOURCE",
)
RESULTS_FOLDER = argument("Results folder of quiver evaluate.")
RESULTS_FOLDERS = argument("Results folders of quiver evaluate.")
COLLECTION_NAMES = argument("Collections, groups or families: beir/scifact, beir/cqadupstack, beir. Default: all.", ())
OVERRIDES = argument("Recipe settings to change, written section.setting=value.", ())

# Options.
PACKAGES = option((), "Further installed package to take functions from. Repeatable.", "--package")
REVISION = option(None, "Branch, tag or commit of the model on the Hugging Face Hub, as OWNER/NAME@REVISION. Default: the main branch.")
MODEL_DTYPE = option(
    None,
    "Dtype of the model's weights. int8 is for CPUs: about 2x faster than float32 on those with VNNI, 1.5x on others. Default: bfloat16 on"
    " a GPU (float16 on a GPU without it), float32 on a CPU.",
    "--dtype",
)
DEVICE = option(None, "Device of the model: cpu, cuda or cuda:1. Default: cuda if there is a GPU.")
BATCH_TOKENS = option(
    None, "Tokens per batch of the model. Default: 4,096 on a CPU; on a GPU what half of its free memory holds, up to 65,536.", min=1
)
USE_TITLE = option(True, "Do not prepend the title to the text of each document.", " /--no-title", show_default=False)
STORE_TEXT = option(
    True, "Store no texts: the index shows none and cannot be refreshed, grouped or fused with BM25.", " /--no-text", show_default=False
)
DOCUMENT_IDS = option(None, "File of document ids, one per line: delete or search these documents.", "--ids")
ENGINE = option("auto", "Index engine with settings: auto, exact, or NAME:key=value,key=value such as ivf-dense:nlist=1024,bits=16.")
EXACT_ENGINE = ENGINE.with_default("exact")
MEMORY = option("2GB", "Memory for building the index, in addition to the model, such as 2GB.", parse=parse_memory)
WAIT = option("0s", "Time to wait until another process has finished writing to the index, such as 30s or 5m.", parse=parse_duration)
VERIFY = option(True, "Verify the checksum of each block of an index when it is first read.", "--verify/--no-verify")
GENERATION = option(None, "Number of the index generation to open. Default: the newest.")
EFFORT = option(
    None,
    "Search effort: exact (exhaustive), balanced (fastest search parameters with a measured recall of 0.95), fast (0.90), or search"
    " parameters such as nprobe=8,k_factor=2. Default: balanced.",
    autocompletion=lambda: ["exact", "balanced", "fast"],
)
SPLIT = option("train", "Split of the relevance judgements: train, dev or test.")
QUERY_FILE = option(
    None, "File of queries with fields id and text: .jsonl, .json, .csv, .tsv (header optional), .parquet or .arrow.", "--queries"
)
RENAME = option(
    (),
    "Fields of --queries and --qrels that have other names than query_id, query, document and grade: FIELD=NAME, FIELD=NAME, such as"
    " answer_file=document. Repeatable.",
    parse=parse_names,
)
SEARCHED_INDEX = option(None, "Index of the documents, searched with its own model instead of encoding them.", "--index")
ADDRESS = option(None, "Address of the Ray cluster: HOST:PORT, ray://HOST:PORT or auto. Default: start Ray on this machine.")
OUT = option(..., "Folder to write.", "-o")
BEIR_OUT = option(..., "BEIR folder to write.", "--out", "-o")
MODEL_OUT = option(..., "Model folder to write.", "--out", "-o")
RUN_OUT = option(
    None, "Run folder to write: model/, run.json, log.jsonl, checkpoints/, report.md. Needed without --dry-run.", "--out", "-o"
)
ENCODER = option(None, "Row of the recipe's table of encoders, such as bert-base; quiver recipes lists them.")
RESUME = option(False, "Resume the unfinished run in --out. The final weights equal those of an uninterrupted run.")
OVERWRITE = option(False, "Overwrite the output if it exists.")
DRY_RUN = option(False, "Only report what would be done.")
SEED = option(0, "Random seed.", min=0)
REPORT_TITLE = option("", "Title of the report. Default: one that says what it reports.")
PROGRESS = option(True, "Show progress on standard error: bars on a terminal, elsewhere a line a minute.", "--progress/--no-progress")
JSON = option(False, "Print JSON instead of tables.", "--json")

# Groups.
GROUPS[SourceOptions] = {
    "id": option(None, "Field of a table that holds the id. Default: _id, id, doc_id, docid or document_id, or a running number."),
    "title": option(None, "Field of a table that holds the title. Default: title."),
    "text": option(
        (), "Field with the text. Repeatable: the texts are joined. Default: text, contents, content, body, passage or document."
    ),
    "lists": option(
        (), "Field of a table whose texts hold several values, separated by commas, semicolons or vertical bars. Repeatable.", "--list"
    ),
    "columns": option(
        None,
        "Column names of a CSV or TSV file without a header, such as id,text.",
        parse=lambda names: [name.strip() for name in names.split(",")] if names else [],
    ),
    "passages": option(
        None,
        "Where texts are cut: headings, functions, tokens:256 (maximum of a passage), overlap:32 (tokens), separated by commas; or whole."
        " Default: headings,functions for files; tables are not cut.",
    ),
    "include": option((), "Files of a folder to read, such as '*.md' or 'docs/**'; hidden ones and node_modules by name. Repeatable."),
    "exclude": option((), "Files or folders to leave out, such as tests or '*.min.js'. Repeatable."),
}
GROUPS[ModelOptions] = {
    "query_length": option(None, "Maximum tokens of a query of a ColBERT model. Default: the model's.", min=1),
    "document_length": option(None, "Maximum tokens of a document; of a bi-encoder's queries too. Default: the model's.", min=1),
    "query_prompt": option(None, "Text put before every query, such as 'query: '. Default: the model's."),
    "document_prompt": option(None, "Text put before every document, such as 'passage: '. Default: the model's."),
    "truncate_dim": option(None, "Width to which the vectors of a bi-encoder are cut (Matryoshka). Default: the full width.", min=1),
}


@dataclass(frozen=True)
@group
class Output:
    """What is printed."""

    progress: bool = PROGRESS
    json: bool = JSON


@dataclass(frozen=True)
@group
class FieldTypes:
    """Types of fields."""

    types: tuple[str, ...] = option(
        (),
        "Type of a field: string, integer, number, boolean, date, timestamp, or a list of one such as 'string[]'; as created=date."
        " Repeatable. Default: found from all values.",
        "--type",
    )
    on_type_error: Literal["error", "null"] = option(
        "error", "A value that does not fit its field's type: an error, or null, which no filter finds."
    )

    def arguments(self) -> dict[str, Any]:
        """Arguments of `build_index`, `add_documents` and `refresh_index`."""
        pairs = [each.rpartition("=") for each in self.types]
        if wrong := next((text for text, (field, _, kind) in zip(self.types, pairs, strict=True) if not (field and kind)), None):
            raise InputError(f"--type {wrong}: a type is given as FIELD=TYPE, such as created=date")
        return {"types": {field: kind for field, _, kind in pairs}, "on_type_error": self.on_type_error}


@dataclass(frozen=True)
@group
class IndexModel:
    """The model that searches an index."""

    model: str | None = option(None, "Folder or hub id of the model, or of its ONNX export (no PyTorch). Default: that of the index.", "-m")
    device: str | None = DEVICE

    def load(self, index: IndexReader, batch_tokens: int | None = None) -> BiEncoder | ColBERT | OnnxModel | BM25:
        """Load it; it must fit the index."""
        from quiver.retrieval.models.loading import load_index_model

        return load_index_model(index.manifest.model, self.model, device=self.device, batch_tokens=batch_tokens)


@dataclass(frozen=True)
@group
class Encoding:
    """How texts are encoded, and where."""

    dtype: WeightsDtype | None = MODEL_DTYPE
    device: str | None = DEVICE
    devices: Sequence[str] | None = option(
        None,
        "Devices to encode on, with one worker process each: GPU numbers such as 0,1, or cpu,cpu for two CPU workers. Queries are encoded"
        " on the first.",
        parse=parse_devices,
    )
    batch_tokens: int | None = BATCH_TOKENS
    executor: str = option("local", "Where texts are encoded: local (this machine) or ray (a Ray cluster).")
    workers: int | None = option(None, "Number of worker processes. Default: local: this process only; ray: as many as fit.", min=1)
    address: str | None = ADDRESS

    @property
    def first_device(self) -> str | None:
        """Device of the model in this process, which encodes the queries."""
        return self.devices[0] if self.devices else self.device

    def model_arguments(self) -> dict[str, Any]:
        """What the loaders of models take of it, by name."""
        return {"dtype": self.dtype, "device": self.first_device, "batch_tokens": self.batch_tokens}

    def open_executor(self) -> Executor:
        """Make the executor; options may exclude each other."""
        local = self.devices is None and self.workers in (None, 1)
        if self.executor not in ("local", "ray"):
            raise InputError(f"unknown executor {self.executor!r}; choose one of local, ray")
        if self.devices is not None:
            others = {"--workers": self.workers, "--address": self.address, "--device": self.device}
            others["--executor ray"] = self.executor == "ray"
            if given := [name for name, value in others.items() if value]:
                raise InputError(f"--devices starts one worker per device and excludes {given[0]}; remove one of the two")
        elif self.device is not None and (self.executor == "ray" or not local):
            raise InputError("--device is for encoding without workers; pass --devices 0,1 for workers on the GPUs 0 and 1, or remove it")
        if self.executor == "ray":
            from quiver.retrieval.cluster.ray_backend import RayCluster

            return RayCluster(self.workers, self.address)
        if self.address is not None:
            raise InputError("--address is the address of a Ray cluster; add --executor ray, or remove --address")
        if local:
            from quiver.retrieval.records import IN_PROCESS

            return IN_PROCESS
        from quiver.retrieval.cluster import LocalProcesses

        return LocalProcesses(self.devices or self.workers or 0)


@dataclass(frozen=True)
@group
class VectorCache:
    """Where vectors are kept for a later run."""

    cache: Path | None = option(None, "Cache folder for vectors. Default: the user's cache folder (quiver cache info shows it).")
    no_cache: bool = option(False, "Do not cache vectors.")

    def folder(self) -> Path | None:
        """The folder; None for no cache, or where the user's cannot be written."""
        from quiver.retrieval.cache import VECTORS, folder_if_writable

        if self.no_cache and self.cache is not None:
            raise InputError("--cache and --no-cache exclude each other; pass only one of them")
        return None if self.no_cache else self.cache or folder_if_writable(VECTORS)


@dataclass(frozen=True)
@group
class Combination:
    """Fusion, re-ranking and grouping of rankings."""

    fuse: tuple[str, ...] = option(
        (), "Ranking to fuse with: bm25 or an index of the same documents; in evaluate a model or a run. Repeatable."
    )
    fusion: Literal["rrf", "weighted"] | None = option(None, "Fusion by reciprocal ranks (rrf) or by scores (weighted). Default: rrf.")
    weights: tuple[float, ...] | None = option(
        None,
        "Fusion weights, such as 1,0.5: that of the index or model, then one per --fuse. A weight of 0 skips that ranking.",
        parse=parse_weights,
    )
    normalize: Literal["min-max", "z-score"] | None = option(None, "Normalization of scores for --fusion weighted. Default: min-max.")
    rerank: str | None = option(None, "Re-rank the candidates with a ColBERT model, or with the index of one.")
    candidates: int | None = option(None, "Candidates that each ranking contributes to fusion and re-ranking. Default: 100.", min=1)
    group_by: str | None = option(
        None, "Group passages by a field, such as file: its values are ranked by their best passages, and -k counts them."
    )

    def make_fusion(self, searched: Sequence[str]) -> Fusion | None:
        """Check the options before anything is opened, and make the fusion with the rankings of ``--fuse``; None for a single ranking."""
        rankings = len(searched) + len(self.fuse)
        if rankings < 2 and (self.fusion or self.weights is not None or self.normalize):
            raise InputError("--fusion, --weights and --normalize need a second ranking; add --fuse bm25 or --fuse INDEX")
        if self.candidates is not None and rankings < 2 and self.rerank is None:
            raise InputError("--candidates needs --fuse or --rerank, whose candidates it counts")
        if len(set(self.fuse)) < len(self.fuse):
            raise InputError(f"--fuse {max(self.fuse, key=self.fuse.count)} is repeated; set its weight with --weights instead")
        if self.normalize and self.fusion != "weighted":
            raise InputError("--normalize applies only to --fusion weighted")
        if rankings < 2:
            return None
        from quiver.retrieval.search.search import Fusion

        fusion = Fusion(self.fusion or "rrf", self.weights, normalise=self.normalize or "min-max")
        fusion.weights_of(rankings)
        return fusion


@dataclass(frozen=True)
@group
class Training:
    """How a model is trained, by a recipe."""

    encoder: str | None = ENCODER
    dtype: Literal["float32", "bfloat16"] | None = option(
        None,
        "Dtype of the forward and backward pass (bfloat16: autocast); weights and optimizer state are float32. Default: training.dtype of"
        " the recipe, by default bfloat16 on a GPU (float32 on a GPU without it), float32 on a CPU.",
    )
    device: str | None = DEVICE

    def overrides(self, given: Sequence[str]) -> list[str]:
        """Overrides of a recipe, and those of the options."""
        chosen = {"encoder": self.encoder, "training.dtype": self.dtype}
        return [*given, *(f"{path}={value}" for path, value in chosen.items() if value is not None)]


@dataclass(frozen=True)
@group
class ResumableTraining(Training):
    """Training into a folder that is resumed or replaced."""

    resume: bool = RESUME
    overwrite: bool = OVERWRITE

    def arguments(self, output: Output) -> dict[str, Any]:
        """What functions that train take, by name."""
        shared = {"progress": output.progress, "command": command_line(), "device": self.device}
        return {"resume": self.resume, "overwrite": self.overwrite, **shared}


def read_ids(path: Path) -> list[str]:
    """Read document ids from a file, one per line."""
    from quiver.encoder.files import read_lines

    return [line.strip(" \t") for _, line in read_lines(path)]  # an id may begin or end with other white space


def say_error(message: str) -> None:
    """Print an error on standard error: one line, for recipes followed by one indented line per problem."""
    typer.echo(f"quiver: error: {message}", err=True)


def say(message: str) -> None:
    """Print a line on standard output."""
    typer.echo(message)


def print_json(value: object) -> None:
    """Print JSON on standard output."""
    typer.echo(dumps(value, indent=2, ensure_ascii=False))


def print_result(value: object, *lines: str, json: bool) -> None:
    """Print what a command did: the value as JSON, or the lines."""
    if json:
        print_json(value)
    for line in () if json else lines:
        say(line)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on standard output. Numbers are right-aligned and never broken; text is folded.

    A table that is wider than the terminal is printed in several parts, each with the leading text columns.
    """
    console, cells = Console(), list(zip(header, *rows, strict=True))
    longest = [max(map(cell_len, column)) for column in cells]
    numbers = [all(_NUMBER.fullmatch(cell) for cell in column[1:]) for column in cells]
    narrowest = min(_NARROWEST, console.width // 4)
    least = [
        whole if number else max(cell_len(column[0]), min(whole, narrowest))
        for column, whole, number in zip(cells, longest, numbers, strict=True)
    ]
    for position, part in enumerate(_split_columns(least, numbers, console.width)):
        # A word, such as a path, is broken only where the columns right of it cannot be narrower; what is left goes to the longest texts.
        room, widths = console.width - 1 - sum(least[column] + 3 for column in part), {column: least[column] for column in part}
        for column in part:
            word = max((cell_len(word) for cell in cells[column] for word in cell.split()), default=0)
            if 0 < word - widths[column] <= room:
                room, widths[column] = room - word + widths[column], word
        for column in sorted(part, key=lambda each: longest[each]):
            more = max(0, min(longest[column] - widths[column], room))
            room, widths[column] = room - more, widths[column] + more
        # Titles and cells are Text: in plain strings rich would interpret [bold] and :smile: as markup.
        table = Table(title=Text(title, style="table.title") if position == 0 else None, title_justify="left")
        for column in part:
            justify: Literal["right", "left"] = "right" if numbers[column] else "left"
            table.add_column(Text(header[column]), justify=justify, no_wrap=numbers[column], overflow="fold", width=widths[column])
        for row in rows:
            table.add_row(*(Text(row[column]) for column in part))
        console.print(table)


def _split_columns(widths: Sequence[int], numbers: Sequence[bool], room: int) -> list[list[int]]:
    """Columns of each part of a table: all, if they fit."""
    labels = next((count for count, number in enumerate(numbers[:_LABELS]) if number), min(_LABELS, len(widths) - 1))
    parts = [list(range(labels))]
    for column in range(labels, len(widths)):
        if 1 + sum(widths[each] + 3 for each in [*parts[-1], column]) > room and len(parts[-1]) > labels:
            parts.append(list(range(labels)))
        parts[-1].append(column)
    return parts


def print_values(title: str, values: Mapping[str, object]) -> None:
    """Print names and values as a table of two columns; None is left out, and a mapping in it is printed by its own names."""
    rows = list[tuple[str, str]]()
    for name, value in values.items():
        inner = {f"{name} {key}": each for key, each in value.items()} if isinstance(value, Mapping) else {name: value}
        for key, each in inner.items():
            number = isinstance(each, int | float) and not isinstance(each, bool)
            shown = f"{each:,.4f}" if isinstance(each, float) else f"{each:,}" if number else str(each)
            rows += [] if each is None else [(key.replace("_", " "), shown)]
    print_table(title, ("", "value"), rows)


def help_alone(context: typer.Context) -> None:
    """Print the help of a command group that was called without a command; exit status 2.

    A callback for ``invoke_without_command``, because ``no_args_is_help`` behaves differently in different versions of Click.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def group_with_default(name: str) -> type[TyperGroup]:
    """A group whose first argument need not be a command: ``quiver report FOLDER`` means ``quiver report write FOLDER``."""

    class DefaultGroup(TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
                args = [name, *args]
            parsed: list[str] = super().parse_args(ctx, args)
            return parsed

    return DefaultGroup


def command_line() -> str:
    """Return the command line, to be recorded with the results."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def quiver_version() -> str:
    """Return the installed version of Quiver."""
    return installed_version("quiver-retrieval") or "unknown (not installed)"
