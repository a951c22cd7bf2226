"""Sources of collections: an archive in BEIR's layout, or tables in repositories of the Hugging Face Hub.

A source downloads its files into a folder and loads a collection from it. Nothing of a repository is executed: loading scripts are not
downloaded. A branch is resolved to a commit, and the commit is recorded.

A repository names its files in the ``configs`` of its card's front matter: config and split -> file patterns. Otherwise the files have the
names that are usual in repositories of their kind.

Source: the layouts of https://huggingface.co/BeIR, mteb, CoIR-Retrieval, zeta-alpha-ai and Shitao/MLDR;
https://huggingface.co/docs/hub/datasets-manual-configuration for ``configs``.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Protocol

import yaml

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json_lines
from quiver.eval.datasets.cache import check_room, download, reason, unpack
from quiver.retrieval.data.corpus import (
    BEIR_COLUMNS,
    Collection,
    Columns,
    Judgement,
    Place,
    assemble,
    key_of,
    load_collection,
    read_judgements,
    to_document,
    to_judgement,
    to_query,
)
from quiver.retrieval.progress import progress_bar
from quiver.retrieval.records import Document, Query

QUERY_COLUMNS = ("query-id", "query_id")
"""What a table of judgements calls the query: mteb's, BEIR's and NanoBEIR's name, and CoIR's."""

DOCUMENT_COLUMNS = ("corpus-id", "corpus_id")
"""What it calls the document."""

GRADE_COLUMN = "score"
"""What it calls the grade."""

# Rows of Parquet held at a time: few enough for documents of a megabyte.
_BATCH = 256


def read_rows(files: Sequence[Path], columns: Sequence[str]) -> Iterator[tuple[Place, Mapping[str, object]]]:
    """The rows of a table in the order of its files.

    Args:
        files: ``.jsonl``, ``.jsonl.gz`` or ``.parquet``.
        columns: What is read of a Parquet row, as far as it is there.

    Raises:
        InputError: A file is missing, empty, damaged or of another kind.
    """
    for file in files:
        if file.suffix == ".parquet":
            yield from _parquet_rows(file, columns)
        elif file.name.endswith((".jsonl", ".jsonl.gz")):
            for number, row in read_json_lines(file):
                yield Place(file, number), row
        else:
            raise InputError(f"{file}: a table is read from .jsonl, .jsonl.gz or .parquet")


def table_documents(files: Sequence[Path], columns: Columns) -> Iterator[tuple[Place, Document]]:
    """The documents of a table.

    Raises:
        InputError: As `read_rows`; or a row is no document, names file and row.
    """
    for place, row in read_rows(files, (*columns.id, columns.text, columns.title)):
        yield place, to_document(place, row, columns)


def table_queries(files: Sequence[Path], columns: Columns) -> Iterator[tuple[Place, Query]]:
    """The queries of a table.

    Raises:
        InputError: As `read_rows`; or a row is no query, names file and row.
    """
    for place, row in read_rows(files, (*columns.id, columns.text)):
        yield place, to_query(place, row, columns)


def table_judgements(files: Sequence[Path], *, graded: bool = True) -> Iterator[Judgement]:
    """The judgements of a table, or of BEIR's and TREC's ``.tsv`` files.

    Args:
        files: The table's files.
        graded: False where a table lists the relevant documents and has no grades, as NanoBEIR's: each is 1.

    Raises:
        InputError: A file cannot be read, or a row is no judgement; names file and row.
    """
    for file in files:
        if file.name.endswith((".tsv", ".tsv.gz")):
            yield from read_judgements(file)
            continue
        for place, row in read_rows([file], (*QUERY_COLUMNS, *DOCUMENT_COLUMNS, GRADE_COLUMN)):
            grade = row.get(GRADE_COLUMN) if graded else 1
            yield to_judgement(place, _key(place, row, QUERY_COLUMNS), _key(place, row, DOCUMENT_COLUMNS), grade)


def _key(place: Place, row: Mapping[str, object], names: Sequence[str]) -> str:
    key = key_of(next((row[name] for name in names if name in row), None))
    if key is None:
        raise InputError(f"{place}: '{names[0]}' (or '{names[1]}') must be a string or an integer")
    return key


def _parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[Place, Mapping[str, object]]]:
    arrow, parquet = _pyarrow()
    if not file.is_file():
        raise InputError(f"{file}: cannot be read (no such file)")
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            there = [name for name in columns if name in table.schema_arrow.names]
            for batch in table.iter_batches(batch_size=_BATCH, columns=there):
                for row in batch.to_pylist():
                    number += 1
                    yield Place(file, number), row
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: damaged Parquet after row {number} ({_first_line(error)}); fetch the file again") from error
    if number == 0:
        raise InputError(f"{file}: the file is empty")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _pyarrow() -> tuple[ModuleType, ModuleType]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError as error:
        raise InputError("reading Parquet needs pyarrow: pip install 'quiver-retrieval[eval]'") from error


CARD = "README.md"
"""The file whose front matter says where the tables are."""

_FRONT_MATTER = re.compile(r"\A\ufeff?---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
_READABLE = (".parquet", ".jsonl", ".jsonl.gz", ".tsv", ".tsv.gz")

# The same judgements, as BEIR's archives and as the hub call them.
_OTHER_NAMES: Mapping[str, str] = {"dev": "validation", "valid": "validation", "validation": "dev"}


@dataclass(frozen=True)
class HubTable:
    """Where one table is.

    Attributes:
        repository: A dataset on the hub, ``owner/name``.
        configs: What the card may call the table, in order of preference.
        split: Which split of it; ``{split}`` stands for the benchmark's.
        files: Patterns of its files where the card does not speak of it, in order of preference; ``{split}`` as above.
        any_split: Where the table has but one split, take that, whatever it is called: a corpus has no parts.
    """

    repository: str
    configs: tuple[str, ...]
    split: str
    files: tuple[str, ...] = ()
    any_split: bool = False

    def of_split(self, split: str) -> HubTable:
        """The table of one split of the benchmark.

        Example:
            >>> HubTable("BeIR/scifact-qrels", ("default",), "{split}", ("{split}.tsv",)).of_split("test").files
            ('test.tsv',)
        """
        files = tuple(pattern.replace("{split}", split) for pattern in self.files)
        return replace(self, split=self.split.replace("{split}", split), files=files)


def table_files(table: HubTable, card: str, names: Sequence[str], *, required: bool = True) -> list[str]:
    """The files of a table, in the order of their names, which is that of their rows.

    Args:
        table: Which table; its split must be a real one.
        card: Text of the repository's card; empty if there is none.
        names: All files of the repository, as paths from its root.
        required: It is an error if there are none.

    Raises:
        InputError: There are none, or they are of a kind that is not read.
    """
    patterns = [_declared(table, card), *([pattern] for pattern in _with_other_names(table))]
    found = next(filter(None, ([name for name in sorted(names) if _matches_any(name, each)] for each in patterns)), [])
    if required and not found:
        wanted = f"{' or '.join(table.configs or table.files)}, split {table.split}"
        raise InputError(f"{table.repository}: no files for {wanted}; the repository has {_shown(names)}")
    if unread := [name for name in found if not name.endswith(_READABLE)]:
        raise InputError(f"{table.repository}: {unread[0]} is none of {', '.join(_READABLE)}")
    return found


def _declared(table: HubTable, card: str) -> list[str]:
    """The patterns that the card gives; none where it does not speak of the table."""
    match = _FRONT_MATTER.match(card)
    try:
        front = yaml.safe_load(match.group(1)) if match else None
    except yaml.YAMLError as error:
        raise InputError(f"{table.repository}: the front matter of {CARD} is not YAML") from error
    configs = front.get("configs") if isinstance(front, dict) else None
    declared = {config.get("config_name"): config.get("data_files") for config in _mappings(configs)}
    files = next((declared[name] for name in table.configs if declared.get(name)), None)
    if isinstance(files, str):
        return [files]
    if isinstance(files, list) and all(isinstance(each, str) for each in files):
        return files
    splits = {entry.get("split"): entry.get("path") for entry in _mappings(files)}
    path = splits.get(table.split, splits.get(_OTHER_NAMES.get(table.split)))
    if path is None and table.any_split and len(splits) == 1:
        path = next(iter(splits.values()))
    paths = path if isinstance(path, list) else [path]
    return [each for each in paths if isinstance(each, str)]


def _with_other_names(table: HubTable) -> Iterable[str]:
    yield from table.files
    other = _OTHER_NAMES.get(table.split)
    if other is not None:
        yield from (pattern.replace(table.split, other) for pattern in table.files)


def _mappings(value: object) -> list[Mapping[str, object]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(_matches(name, pattern) for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    """Whether a path fits a pattern: ``*`` and ``?`` stay inside a folder, ``**`` does not.

    ``fnmatch`` lets a star cross folders: ``corpus/*`` would take ``corpus/old/a.parquet`` as well.
    """
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.fullmatch("".join(wild.get(part, re.escape(part)) for part in parts), name) is not None


def _shown(names: Sequence[str]) -> str:
    shown = sorted(names)[:8]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "") or "none at all"


Choose = Callable[[str, Sequence[str]], Sequence[str]]
"""The text of a card and the names of all files to the names of those that are wanted."""


def fetch_files(repository: str, revision: str | None, folder: Path, choose: Choose, *, progress: bool) -> str:
    """Fetch the card of a repository, and the files that it leads to.

    Args:
        repository: ``owner/name`` of a dataset.
        revision: A commit or a branch; None for the main branch as it is now.
        folder: Where the files go, under their own names; what an earlier call that was stopped has left there is used.
        choose: Which files are wanted.
        progress: Show the hub client's own bars.

    Returns:
        The commit.

    Raises:
        InputError: There is no such repository or revision, the hub cannot be reached, or the disk is full.
    """
    # Imported late: whoever has the data does not pay for the client.
    from huggingface_hub import HfApi, hf_hub_download

    endpoint = os.environ.get("HF_ENDPOINT")  # a mirror; the client reads it at import, a program may set it later
    errors = _client_errors()
    shown = f"{repository}@{revision[:12]}" if revision else repository
    try:
        with _bars(progress):
            info = HfApi(endpoint=endpoint).dataset_info(repository, revision=revision, files_metadata=True)
            sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if _inside(file.rfilename)}
            card = ""
            if CARD in sizes:
                path = hf_hub_download(repository, CARD, repo_type="dataset", revision=info.sha, local_dir=folder, endpoint=endpoint)
                card = Path(path).read_text(encoding="utf-8", errors="replace")
            wanted = choose(card, list(sizes))
            check_room(folder, sum(sizes[name] for name in wanted))
            for name in wanted:
                hf_hub_download(repository, name, repo_type="dataset", revision=info.sha, local_dir=folder, endpoint=endpoint)
    except errors as error:
        raise reason(error, shown, folder) from error
    if info.sha is None:
        raise InputError(f"{repository}: the hub does not say which commit this is; fetch it again")
    _prune(folder, {CARD, *wanted})
    return info.sha


def _prune(folder: Path, wanted: Container[str]) -> None:
    """Drop the client's notes on what it was doing, and what an earlier call may have left there of another commit."""
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in wanted:
            path.unlink()


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name and ":" not in name


def _client_errors() -> tuple[type[Exception], ...]:
    """What the client raises when it cannot fetch.

    Up to 0.x it spoke through requests, whose errors are OSErrors; from 1.0 on through httpx, whose are not. Large files come through
    hf_xet, which raises RuntimeErrors, and in later versions an error of its own.
    """
    modules = (sys.modules.get("httpx"), importlib.import_module("huggingface_hub.errors"))
    names = ("HTTPError", "XetDownloadError", "RevisionResolutionError", "EntryNotFoundError")
    found = (getattr(module, name, None) for module in modules for name in names)
    return (OSError, RuntimeError, *(each for each in found if isinstance(each, type) and issubclass(each, Exception)))


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """The client's bars are on or off for the whole process; leave them as they were."""
    bars = importlib.import_module("huggingface_hub.utils")
    if shown or bars.are_progress_bars_disabled():
        yield
        return
    bars.disable_progress_bars()
    try:
        yield
    finally:
        bars.enable_progress_bars()


class Source(Protocol):
    """A place that a collection can be had from."""

    @property
    def unit(self) -> str:
        """What is fetched at once, as a path in the cache; several collections may be in one archive."""

    @property
    def url(self) -> str:
        """Where people can look at it."""

    @property
    def revision(self) -> str | None:
        """The version that is fetched; None where it is whatever is there."""

    def fetch(self, folder: Path, scratch: Path, *, progress: bool) -> str:
        """Fetch into a folder, which exists and may hold what an earlier attempt has left; the version that it was.

        Raises:
            InputError: It cannot be had.
        """

    def load(self, folder: Path, name: str, split: str) -> Collection:
        """Read and check the collection from the folder that `fetch` has filled.

        Raises:
            InputError: A file is missing or malformed; names file and line or row.
        """


@dataclass(frozen=True)
class ZipArchive:
    """An archive of folders in BEIR's layout.

    Attributes:
        unit: What is fetched at once, as a path in the cache.
        url: Of the archive.
        md5: Its checksum.
        bytes: Its size, for the bar.
        folder: The collection's folder inside.
    """

    unit: str
    url: str
    md5: str
    bytes: int
    folder: str

    @property
    def revision(self) -> str:
        """The checksum, which is all the version that an archive has."""
        return f"md5:{self.md5}"

    def fetch(self, folder: Path, scratch: Path, *, progress: bool) -> str:
        """Download, compare the checksum, unpack.

        Args:
            folder: Where it is unpacked; emptied first.
            scratch: Where the archive lies meanwhile, and what there is of it if the download is stopped.
            progress: Show bars.

        Raises:
            InputError: It cannot be had, or its checksum is another.
        """
        archive = scratch / self.url.rpartition("/")[2]
        if not archive.exists():
            check_room(scratch, self.bytes)
            with progress_bar(f"{archive.name}: downloading (bytes)", self.bytes, enabled=progress) as advance:
                download(self.url, archive, md5=self.md5, advance=advance)
        shutil.rmtree(folder)
        folder.mkdir()
        unpack(archive, folder, progress=progress)
        archive.unlink()
        return self.revision

    def load(self, folder: Path, name: str, split: str) -> Collection:
        """Read and check the collection.

        Raises:
            InputError: A file is missing or malformed; names file and line.
        """
        del name  # a folder has its own
        return load_collection(folder / self.folder, split)


@dataclass(frozen=True)
class HubTables:
    """Three tables in one or more repositories of the hub.

    Attributes:
        unit: What is fetched at once, as a path in the cache.
        documents: The corpus.
        queries: The queries; those the split does not judge are dropped at loading.
        judgements: The judgements.
        splits: The splits there may be, the benchmark's own first: that one has to be there.
        revisions: Repository -> commit; one that is not named is fetched as it is and its commit recorded.
        document_columns: What the fields of the corpus are called.
        query_columns: What those of the queries are called.
        graded: The judgements have grades; otherwise each says that a document is relevant.
    """

    unit: str
    documents: HubTable
    queries: HubTable
    judgements: HubTable
    splits: tuple[str, ...]
    revisions: Mapping[str, str] = field(default_factory=dict)
    document_columns: Columns = BEIR_COLUMNS
    query_columns: Columns = BEIR_COLUMNS
    graded: bool = True

    @property
    def url(self) -> str:
        """The repository of the documents."""
        return f"https://huggingface.co/datasets/{self.documents.repository}"

    @property
    def revision(self) -> str | None:
        """The commits, that of the documents' repository first; None where one is not fixed."""
        known = [self.revisions.get(repository) for repository in self._repositories()]
        return None if None in known else "+".join(filter(None, known))

    def fetch(self, folder: Path, scratch: Path, *, progress: bool) -> str:
        """Fetch the files of the three tables from the hub.

        Args:
            folder: Gets a folder for each repository; what an earlier call has left there is used.
            scratch: Not needed: the hub's client keeps what it has in ``folder``.
            progress: Show bars.

        Raises:
            InputError: A repository, a revision or a table is not there, or the hub cannot be reached.
        """
        del scratch
        commits = []
        for repository in self._repositories():
            place = folder / _folder(repository)
            place.mkdir(parents=True, exist_ok=True)
            choose = partial(self._choose, repository)
            commits.append(fetch_files(repository, self.revisions.get(repository), place, choose, progress=progress))
        return "+".join(commits)

    def load(self, folder: Path, name: str, split: str) -> Collection:
        """Read and check the collection.

        Raises:
            InputError: A file is missing or malformed; names file and row.
        """
        if split not in self.splits:
            raise InputError(f"{name}: no split '{split}'; existing splits: {', '.join(self.splits)}")
        files = {table: _local_files(folder, table.of_split(split)) for table in (self.documents, self.queries, self.judgements)}
        return assemble(
            name,
            split,
            documents=partial(table_documents, files[self.documents], self.document_columns),
            queries=partial(table_queries, files[self.queries], self.query_columns),
            judgements=table_judgements(files[self.judgements], graded=self.graded),
        )

    def _repositories(self) -> list[str]:
        return list(dict.fromkeys(table.repository for table in (self.documents, self.queries, self.judgements)))

    def _choose(self, repository: str, card: str, names: Sequence[str]) -> list[str]:
        """The files of the tables that are in a repository, for every split that it has."""
        found: dict[str, None] = {}
        for table in (self.documents, self.queries, self.judgements):
            for split in self.splits if table.repository == repository else ():
                found |= dict.fromkeys(table_files(table.of_split(split), card, names, required=split == self.splits[0]))
        return list(found)


def _local_files(folder: Path, table: HubTable) -> list[Path]:
    root = folder / _folder(table.repository)
    card = (root / CARD).read_text(encoding="utf-8", errors="replace") if (root / CARD).is_file() else ""
    return [root / name for name in table_files(table, card, list(_names(root)))]


def _names(root: Path) -> Iterator[str]:
    return (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def _folder(repository: str) -> str:
    return repository.replace("/", "--")
