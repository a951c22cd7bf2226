"""Sources of collections: an archive in BEIR's layout, or tables in repositories of the Hugging Face Hub.

A source downloads its files into a folder and loads a collection from it. Nothing of a repository is executed: loading scripts are not
downloaded. A branch is resolved to a commit, and the commit is recorded.

A repository names its files in the ``configs`` of its card's front matter: config and split -> file patterns. Otherwise the files have the
names that are usual in repositories of their kind.

Source: the layouts of https://huggingface.co/BeIR, mteb, CoIR-Retrieval, zeta-alpha-ai and Shitao/MLDR;
https://huggingface.co/docs/hub/datasets-manual-configuration for ``configs``.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import importlib
import logging
import os
import re
import shutil
import stat
import zipfile
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Protocol
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pyarrow
import pyarrow.parquet as parquet
import yaml

from quiver.encoder.environment import installed_version
from quiver.encoder.errors import InputError, download_errors, first_line
from quiver.encoder.files import read_json_lines
from quiver.encoder.progress import Advance, progress_bar, shows_bars
from quiver.retrieval.data.corpus import (
    Collection,
    DuplicateJudgements,
    Judgement,
    assemble,
    load_collection,
    merged_judgements,
    read_judgements,
    to_judgement,
    to_query,
)
from quiver.retrieval.data.entries import BEIR_FIELDS, EntryPosition, FieldNames, key_of, to_document
from quiver.retrieval.data.hub import HubSource
from quiver.retrieval.records import Document, Query

logger = logging.getLogger(__name__)

QUERY_COLUMNS = ("query-id", "query_id")
"""Column names for the query id in a table of judgements: ``query-id`` in mteb, BEIR and NanoBEIR, ``query_id`` in CoIR."""

DOCUMENT_COLUMNS = ("corpus-id", "corpus_id")
"""Column names for the document id."""

GRADE_COLUMN = "score"
"""Column name for the grade."""

# Parquet rows per batch: few enough that documents of a megabyte fit in memory.
_BATCH = 256


def read_rows(files: Sequence[Path], columns: Sequence[str]) -> Iterator[tuple[EntryPosition, Mapping[str, object]]]:
    """Read the rows of a table, in the order of its files."""
    for file in files:
        if file.suffix == ".parquet":
            yield from _parquet_rows(file, columns)
        elif file.name.endswith((".jsonl", ".jsonl.gz")):
            for number, row in read_json_lines(file):
                yield EntryPosition(file, number), row
        else:
            raise InputError(f"{file}: unsupported table format; use .jsonl, .jsonl.gz or .parquet")


def table_documents(files: Sequence[Path], columns: FieldNames) -> Iterator[tuple[EntryPosition, Document]]:
    """Read the documents of a table, each with its file and row."""
    for position, row in read_rows(files, (*columns.id, columns.text, columns.title)):
        yield position, to_document(position, row, columns)


def table_queries(files: Sequence[Path], columns: FieldNames) -> Iterator[tuple[EntryPosition, Query]]:
    """Read the queries of a table, with their places."""
    for position, row in read_rows(files, (*columns.id, columns.text)):
        yield position, to_query(position, row, columns)


def table_judgements(files: Sequence[Path], *, graded: bool = True) -> Iterator[Judgement]:
    """Read the judgements of a table, or of ``.tsv`` files in BEIR's or TREC's format."""
    for file in files:
        if file.name.endswith((".tsv", ".tsv.gz")):
            yield from read_judgements(file)
            continue
        for position, row in read_rows([file], (*QUERY_COLUMNS, *DOCUMENT_COLUMNS, GRADE_COLUMN)):
            grade = row.get(GRADE_COLUMN) if graded else 1
            yield to_judgement(position, _read_key(position, row, QUERY_COLUMNS), _read_key(position, row, DOCUMENT_COLUMNS), grade)


def _read_key(position: EntryPosition, row: Mapping[str, object], names: Sequence[str]) -> str:
    key = key_of(next((row[name] for name in names if name in row), None))
    if key is None:
        raise InputError(f"{position}: '{names[0]}' (or '{names[1]}') must be a string or an integer")
    return key


def _parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[EntryPosition, Mapping[str, object]]]:
    if not file.is_file():
        raise InputError(f"{file}: cannot be read (no such file)")
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            there = [name for name in columns if name in table.schema_arrow.names]
            for batch in table.iter_batches(batch_size=_BATCH, columns=there):
                for row in batch.to_pylist():
                    number += 1
                    yield EntryPosition(file, number), row
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: damaged Parquet after row {number} ({first_line(error)}); download the file again") from error
    if number == 0:
        raise InputError(f"{file}: the file is empty")


ATTEMPTS = 5
"""Maximum number of connection attempts per call; each resumes where the previous one broke off."""

_BLOCK = 1 << 20
_TIMEOUT = 30.0  # seconds without receiving a byte


def download(url: str, target: Path, *, md5: str, advance: Advance) -> None:
    """Download a file; it gets its final name only when it is complete and its checksum is right.

    Received bytes are kept beside the target as ``.part``. They remain if the connection breaks or the process is killed, and the next
    call resumes from there.

    Raises:
        InputError: The server cannot be reached or lacks the file, the connection broke repeatedly, the disk is full, or the checksum is
            wrong (then the received bytes are deleted).
    """
    part = target.with_name(f"{target.name}.part")
    advance(_part_size(part))
    try:
        for attempt in range(1, ATTEMPTS + 1):
            if _receive(url, part, advance):
                break
            logger.info("%s: the connection broke at %d bytes (attempt %d)", url, _part_size(part), attempt)
        else:
            raise InputError(
                f"{url}: the connection broke {ATTEMPTS} times, last at {_part_size(part):,} bytes; run the same command again to resume"
            )
    except OSError as error:
        raise reason(error, url, part.parent) from error
    found = _file_md5(part)
    if found != md5:
        part.unlink()
        raise InputError(f"{url}: corrupt download: md5 is {found}, expected {md5}. The file was deleted; download it again")
    part.replace(target)


def unpack(archive: Path, folder: Path, *, progress: bool) -> None:
    """Unpack a zip archive into a folder."""
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [(member, folder / _member_path(archive, member)) for member in opened.infolist() if not member.is_dir()]
            total = sum(member.file_size for member, _ in members)
            check_room(folder, total)
            with progress_bar(f"{archive.name}: unpacking (bytes)", total, enabled=progress) as advance:
                for member, path in members:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with opened.open(member) as source, path.open("xb") as target:
                        while block := source.read(_BLOCK):
                            target.write(block)
                            advance(len(block))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        archive.unlink(missing_ok=True)
        raise InputError(f"{archive.name}: not a valid zip archive ({error}); download it again") from error
    except OSError as error:
        raise reason(error, archive.name, folder) from error


def check_room(folder: Path, wanted: int) -> None:
    """Check that a disk has enough free space."""
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise InputError(f"{folder}: {wanted / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free; set QUIVER_CACHE to a larger disk")


def reason(error: Exception, source: str, folder: Path) -> InputError:
    """Convert a download failure to an error with a one-line explanation."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return InputError(f"{folder}: the disk is full; make room, or set QUIVER_CACHE to a larger disk, and run the same command again")
    if isinstance(error, HTTPError):
        return InputError(f"{source}: the server answered {error.code} {error.reason}")
    if isinstance(error, PermissionError):
        return InputError(f"{folder}: cannot be written (no permission); set QUIVER_CACHE to another folder")
    cause = error.reason if isinstance(error, URLError) else error
    return InputError(
        f"{source}: download failed ({first_line(cause)}); check the network, or download on another machine and copy the cache"
    )


def _receive(url: str, part: Path, advance: Advance) -> bool:
    """Receive bytes over one connection; return whether the file is complete afterwards."""
    have = _part_size(part)
    headers = {"User-Agent": f"quiver/{installed_version('quiver-retrieval') or '0'}"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with urlopen(Request(url, headers=headers), timeout=_TIMEOUT) as response:
            if response.status != http.client.PARTIAL_CONTENT and have:
                advance(-have)  # the server ignored the range and sends the whole file again
                have = 0
            total = _whole_size(response.headers, have)
            with part.open("ab" if have else "wb") as file:
                while block := response.read(_BLOCK):
                    file.write(block)
                    advance(len(block))
    except HTTPError as error:
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return True  # no bytes are left to send; the checksum decides whether the file is right
        raise
    except (http.client.HTTPException, ConnectionError, TimeoutError):
        return False
    return total is None or _part_size(part) >= total


def _part_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _whole_size(headers: http.client.HTTPMessage, have: int) -> int | None:
    """Size of the complete file; it must be known because http.client does not report a body that was cut off."""
    length = headers.get("Content-Length")
    return have + int(length) if length is not None else None


def _member_path(archive: Path, member: zipfile.ZipInfo) -> Path:
    name = PurePosixPath(member.filename)
    linked = stat.S_ISLNK(member.external_attr >> 16)
    if name.is_absolute() or ".." in name.parts or "\\" in member.filename or ":" in member.filename or linked:
        raise InputError(f"{archive.name}: member {member.filename!r} would be written outside the target folder; nothing was unpacked")
    return Path(*name.parts)


def _file_md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)  # the publishers provide md5 checksums
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def is_offline() -> bool:
    """Whether the environment forbids network access by ``HF_HUB_OFFLINE``."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


CARD = "README.md"
"""File of a repository whose front matter names the files of the tables."""

_FRONT_MATTER = re.compile(r"\A\ufeff?---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
_READABLE = (".parquet", ".jsonl", ".jsonl.gz", ".tsv", ".tsv.gz")

# Split of the judgements -> its other name: BEIR's archives and the Hugging Face Hub use different ones.
_OTHER_NAMES: Mapping[str, str] = {"dev": "validation", "valid": "validation", "validation": "dev"}


@dataclass(frozen=True)
class HubTable:
    """Location of one table on the Hugging Face Hub.

    Attributes:
        repository: Dataset repository, ``owner/name``.
        configs: Names of the table's config in the card, in order of preference.
        split: Split of the config; ``{split}`` stands for the benchmark's split.
        files: File patterns to use if the card does not name the table, in order of preference; they may contain ``{split}``.
        any_split: If the config has a single split, use it whatever its name, as for a corpus.
    """

    repository: str
    configs: tuple[str, ...]
    split: str
    files: tuple[str, ...] = ()
    any_split: bool = False

    def of_split(self, split: str) -> HubTable:
        """The table with the benchmark's split filled in for ``{split}``.

        Example:
            >>> HubTable("BeIR/scifact-qrels", ("default",), "{split}", ("{split}.tsv",)).of_split("test").files
            ('test.tsv',)
        """
        files = tuple(pattern.replace("{split}", split) for pattern in self.files)
        return replace(self, split=self.split.replace("{split}", split), files=files)


def table_files(table: HubTable, card: str, names: Sequence[str], *, required: bool = True) -> list[str]:
    """Files of a table, sorted by name, which is the order of their rows.

    Args:
        table: The table, with ``{split}`` filled in.
        card: Text of the repository's card; empty if there is none.
        names: All files of the repository, as paths relative to its root.
        required: Raise an error if the table has no files.
    """
    patterns = [_find_declared(table, card), *([pattern] for pattern in _with_other_names(table))]
    found = next(filter(None, ([name for name in sorted(names) if _matches_any(name, each)] for each in patterns)), [])
    if required and not found:
        wanted = f"{' or '.join(table.configs or table.files)}, split {table.split}"
        raise InputError(f"{table.repository}: no files for {wanted}; files in the repository: {_list_some(names)}")
    if unread := [name for name in found if not name.endswith(_READABLE)]:
        raise InputError(f"{table.repository}: unsupported file {unread[0]}; supported formats: {', '.join(_READABLE)}")
    return found


def _find_declared(table: HubTable, card: str) -> list[str]:
    """File patterns that the card gives for a table; empty if it gives none."""
    match = _FRONT_MATTER.match(card)
    try:
        front = yaml.safe_load(match.group(1)) if match else None
    except yaml.YAMLError as error:
        raise InputError(f"{table.repository}: the front matter of {CARD} is not YAML") from error
    configs = front.get("configs") if isinstance(front, dict) else None
    declared = {config.get("config_name"): config.get("data_files") for config in _keep_mappings(configs)}
    files = next((declared[name] for name in table.configs if declared.get(name)), None)
    if isinstance(files, str):
        return [files]
    if isinstance(files, list) and all(isinstance(each, str) for each in files):
        return files
    splits = {entry.get("split"): entry.get("path") for entry in _keep_mappings(files)}
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


def _keep_mappings(value: object) -> list[Mapping[str, object]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(_matches(name, pattern) for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    """Whether a path matches a pattern: ``*`` and ``?`` match within a folder, ``**`` across folders.

    ``fnmatch`` is not suitable: its star crosses folders, so ``corpus/*`` would match ``corpus/old/a.parquet`` too.
    """
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", pattern)
    wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.fullmatch("".join(wild.get(part, re.escape(part)) for part in parts), name) is not None


def _list_some(names: Sequence[str]) -> str:
    shown = sorted(names)[:8]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "") or "(none)"


Choose = Callable[[str, Sequence[str]], Sequence[str]]
"""Function that selects files: (text of the card, names of all files) -> names of the files to download."""


def fetch_files(repository: str, revision: str | None, folder: Path, choose: Choose, *, progress: bool) -> str:
    """Download the card of a repository and the files that ``choose`` selects."""
    # Imported here so that runs on cached collections do not load the client.
    from huggingface_hub import HfApi, hf_hub_download

    endpoint = os.environ.get("HF_ENDPOINT")  # a mirror; the client reads it at import only, but a program may set it later
    errors = download_errors()
    shown = f"{repository}@{revision[:12]}" if revision else repository
    try:
        with _switch_bars(progress and shows_bars()):
            info = HfApi(endpoint=endpoint).dataset_info(repository, revision=revision, files_metadata=True)
            sizes = {file.rfilename: file.size or 0 for file in info.siblings or () if _is_inside(file.rfilename)}
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
        raise InputError(f"{repository}: the Hugging Face Hub returned no commit; download it again")
    _prune_folder(folder, {CARD, *wanted})
    return info.sha


def _prune_folder(folder: Path, wanted: Container[str]) -> None:
    """Delete the client's bookkeeping files, and files that an earlier call left from another commit."""
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    for path in folder.rglob("*"):
        if path.is_file() and path.relative_to(folder).as_posix() not in wanted:
            path.unlink()


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name and ":" not in name


@contextmanager
def _switch_bars(shown: bool) -> Iterator[None]:
    """Switch the client's progress bars off if ``shown`` is false; the switch is global, so its state is restored on exit."""
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
    """A place from which a collection can be downloaded."""

    @property
    def unit(self) -> str:
        """Path in the cache of the files that are downloaded together; one archive may hold several collections."""

    @property
    def url(self) -> str:
        """Web address of the source."""

    @property
    def revision(self) -> str | None:
        """Revision that is downloaded; None for the current one."""

    @property
    def is_local(self) -> bool:
        """Whether all repositories are in the folder ``QUIVER_HUB``, from where they are then read."""

    def fetch(self, folder: Path, scratch: Path, *, progress: bool) -> str:
        """Download into an existing folder, which may hold files of an interrupted attempt; return the revision."""

    def load(self, folder: Path, name: str, split: str, *, duplicates: DuplicateJudgements = "error") -> Collection:
        """Read and check the collection from the folder that `fetch` has filled."""


@dataclass(frozen=True)
class ZipArchive:
    """A zip archive of folders in BEIR's layout."""

    unit: str
    url: str
    md5: str
    bytes: int
    folder: str
    is_local = False

    @property
    def revision(self) -> str:
        """The checksum: archives have no other revision."""
        return f"md5:{self.md5}"

    def fetch(self, folder: Path, scratch: Path, *, progress: bool) -> str:
        """Download the archive, verify its checksum and unpack it."""
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

    def load(self, folder: Path, name: str, split: str, *, duplicates: DuplicateJudgements = "error") -> Collection:
        """Read and check the collection."""
        del name  # the folder's own name is used
        return load_collection(folder / self.folder, split, duplicates=duplicates)


@dataclass(frozen=True)
class HubTables:
    """Three tables in one or more repositories of the Hugging Face Hub.

    Attributes:
        unit: Path of the files in the cache.
        documents: Table of the corpus.
        queries: Table of the queries; queries without judgements in the split are dropped at loading.
        judgements: Table of the judgements.
        splits: Possible splits; the first, the benchmark's default, must exist.
        revisions: Repository -> commit. Other repositories are downloaded at their current commit, which is recorded.
        document_columns: Field names in the corpus.
        query_columns: Field names in the queries.
        graded: Whether the judgements have grades; otherwise each one marks a relevant document.
    """

    unit: str
    documents: HubTable
    queries: HubTable
    judgements: HubTable
    splits: tuple[str, ...]
    revisions: Mapping[str, str] = field(default_factory=dict)
    document_columns: FieldNames = BEIR_FIELDS
    query_columns: FieldNames = BEIR_FIELDS
    graded: bool = True

    @property
    def url(self) -> str:
        """Web address of the documents' repository."""
        return f"https://huggingface.co/datasets/{self.documents.repository}"

    @property
    def revision(self) -> str | None:
        """Commits joined by ``+``, that of the documents' repository first; None if a commit is not fixed."""
        known = [self.revisions.get(repository) for repository in self._repositories()]
        return None if None in known else "+".join(filter(None, known))

    @property
    def is_local(self) -> bool:
        """Whether all repositories are in the folder ``QUIVER_HUB``, from where they are then read."""
        return all(HubSource(repository).local for repository in self._repositories())

    def fetch(self, folder: Path, scratch: Path, *, progress: bool) -> str:
        """Download the files of the three tables from the hub."""
        del scratch
        commits = []
        for repository in self._repositories():
            target = folder / _folder(repository)
            target.mkdir(parents=True, exist_ok=True)
            choose = partial(self._choose, repository)
            commits.append(fetch_files(repository, self.revisions.get(repository), target, choose, progress=progress))
        return "+".join(commits)

    def load(self, folder: Path, name: str, split: str, *, duplicates: DuplicateJudgements = "error") -> Collection:
        """Read and check the collection."""
        if split not in self.splits:
            raise InputError(f"{name}: no split '{split}'; existing splits: {', '.join(self.splits)}")
        files = {table: _local_files(folder, table.of_split(split)) for table in (self.documents, self.queries, self.judgements)}
        return assemble(
            name,
            split,
            documents=partial(table_documents, files[self.documents], self.document_columns),
            queries=partial(table_queries, files[self.queries], self.query_columns),
            judgements=merged_judgements(table_judgements(files[self.judgements], graded=self.graded), duplicates),
        )

    def _repositories(self) -> list[str]:
        return list(dict.fromkeys(table.repository for table in (self.documents, self.queries, self.judgements)))

    def _choose(self, repository: str, card: str, names: Sequence[str]) -> list[str]:
        """Files of the tables in a repository, for every split."""
        found: dict[str, None] = {}
        for table in (self.documents, self.queries, self.judgements):
            for split in self.splits if table.repository == repository else ():
                found |= dict.fromkeys(table_files(table.of_split(split), card, names, required=split == self.splits[0]))
        return list(found)


def _local_files(folder: Path, table: HubTable) -> list[Path]:
    root = HubSource(table.repository).local or folder / _folder(table.repository)
    card = (root / CARD).read_text(encoding="utf-8", errors="replace") if (root / CARD).is_file() else ""
    return [root / name for name in table_files(table, card, list(_list_files(root)))]


def _list_files(root: Path) -> Iterator[str]:
    names = (path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    return (name for name in names if not name.startswith("."))  # the Hub's client keeps metadata in ``.cache``


def _folder(repository: str) -> str:
    return repository.replace("/", "--")
