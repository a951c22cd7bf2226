"""Where training rows lie: files, folders of files, and data sets of the Hugging Face hub; streamed, each row with its place.

A source is a ``.jsonl``, ``.jsonl.gz`` or ``.parquet`` file; a folder with such files, read in the order of their names; or
``hub://OWNER/NAME[@REVISION]/CONFIG/SPLIT`` or ``hub://OWNER/NAME[@REVISION]/path/to/file``. Where ``QUIVER_HUB`` names a folder, a
data set that lies in it as ``OWNER/NAME`` is read there and not fetched: what ``hf download --repo-type dataset OWNER/NAME --local-dir
$QUIVER_HUB/OWNER/NAME`` makes, for machines without a network. What a row's fields mean is not known here.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, NamedTuple

from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home, read_json_lines

HUB = "hub://"
"""How a source on the hub begins."""

LOCAL_HUB = "QUIVER_HUB"
"""The environment variable with the folder of local copies."""

_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")

# Rows of Parquet held at a time: few enough for documents of a megabyte.
_BATCH = 256

# Bytes of a file from which its lines are estimated, and what they may become when they are unpacked.
_SAMPLE, _UNPACKED = 1 << 20, 1 << 26


class HubSource(NamedTuple):
    """A source on the hub, taken apart.

    Attributes:
        repository: ``OWNER/NAME``.
        revision: Branch, tag or commit; None for the main branch as it is.
        inside: A file's path, or config and split.
    """

    repository: str
    revision: str | None
    inside: tuple[str, ...]

    @property
    def is_file(self) -> bool:
        """It is one file, not a split."""
        return self.inside[-1].endswith(_SUFFIXES)

    @property
    def local(self) -> Path | None:
        """The data set's local copy; None where there is none."""
        root = os.environ.get(LOCAL_HUB)
        folder = expand_home(root) / self.repository if root else None
        return folder if folder is not None and folder.is_dir() else None


def iter_source(source: str, fields: Sequence[str] = ()) -> Iterator[tuple[str, Mapping[str, object]]]:
    """The rows of a source in their order.

    Args:
        source: See the module's docstring.
        fields: Dotted paths that will be read; other keys of a row are left out where that saves reading them, which it does in Parquet.
            None named, all are read.

    Yields:
        The place of a row, such as ``rows.jsonl:7``, and the row. In Parquet and on the hub the number is that of the row.

    Raises:
        InputError: A file is missing, empty, damaged or of another kind, or the hub does not give the data set.
    """
    if source.startswith(HUB):
        yield from _hub_rows(source, fields)
    else:
        for file in source_files(source):
            yield from _file_rows(file, fields)


def source_files(source: str) -> list[Path]:
    """The files that a source is read from, in their order; none for what is fetched from the hub.

    Raises:
        InputError: There is no such file or folder, or it holds nothing that can be read.
    """
    if source.startswith(HUB):
        hub = parse_hub(source)
        if hub.local is None:
            return []
        return [hub.local.joinpath(*hub.inside)] if hub.is_file else _visible_files(hub.local)
    path = expand_home(source)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES) and file.is_file())
        if not files:
            raise InputError(f"{path}: no {', '.join(_SUFFIXES)} in this folder")
        return files
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if not path.name.endswith(_SUFFIXES):
        raise InputError(f"{path}: rows are read from {', '.join(_SUFFIXES)}, a folder of them, or {HUB}OWNER/NAME/CONFIG/SPLIT")
    return [path]


def count_rows(sources: Sequence[str]) -> int:
    """Rows of the sources that are files, for a bar: of Parquet their number; of lines an estimate from the first megabyte.

    The hub's count as none.

    Raises:
        InputError: A file is missing, or no Parquet.
    """
    files = (file for source in sources if not source.startswith(HUB) for file in source_files(source))
    return sum(_parquet_count(file) if file.suffix == ".parquet" else _line_count(file) for file in files)


def parse_hub(source: str) -> HubSource:
    """Take a source on the hub apart.

    Raises:
        InputError: It does not read ``hub://OWNER/NAME[@REVISION]/...``.

    Example:
        >>> parse_hub("hub://lightonai/ms-marco-en-bge@main/train/train")
        HubSource(repository='lightonai/ms-marco-en-bge', revision='main', inside=('train', 'train'))
    """
    owner, *rest = source.removeprefix(HUB).split("/")
    name, at, revision = (rest[0] if rest else "").partition("@")
    inside = tuple(rest[1:])
    proper = all((owner, name, *inside, revision or not at)) and ".." not in (owner, name, *inside)
    if not proper or not inside or (len(inside) != 2 and not inside[-1].endswith(_SUFFIXES)):
        raise InputError(
            f"{source}: must read {HUB}OWNER/NAME[@REVISION]/CONFIG/SPLIT, or {HUB}OWNER/NAME[@REVISION]/path/to/file with one of the "
            f"suffixes {', '.join(_SUFFIXES)}"
        )
    return HubSource(f"{owner}/{name}", revision or None, inside)


def _file_rows(file: Path, fields: Sequence[str]) -> Iterator[tuple[str, Mapping[str, object]]]:
    if file.suffix == ".parquet":
        yield from _parquet_rows(file, fields)
    else:
        for number, row in read_json_lines(file):
            yield f"{file}:{number}", row


def _parquet_rows(file: Path, fields: Sequence[str]) -> Iterator[tuple[str, Mapping[str, object]]]:
    parquet = _imported("pyarrow.parquet")
    number = 0
    # Buffered ahead, pyarrow would hold on to all that has been read until the file is closed.
    with _parquet_errors(file), parquet.ParquetFile(file, pre_buffer=False) as table:
        for batch in table.iter_batches(batch_size=_BATCH, columns=_keys(table.schema_arrow.names, fields)):
            for row in batch.to_pylist():
                number += 1
                yield f"{file}:{number}", row
    if number == 0:
        raise InputError(f"{file}: the file is empty")


def _parquet_count(file: Path) -> int:
    parquet = _imported("pyarrow.parquet")
    with _parquet_errors(file), parquet.ParquetFile(file) as table:
        return int(table.metadata.num_rows)


def _line_count(file: Path) -> int:
    """About how many lines a file has; exactly, where the sample is all of it. A damaged one has as many as its sound beginning."""
    try:
        with file.open("rb") as raw:
            sample, size = raw.read(_SAMPLE), file.stat().st_size
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    text, used = sample, len(sample)
    if file.suffix == ".gz":
        unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # gzip's header
        try:
            text = unpacker.decompress(sample, _UNPACKED)
        except zlib.error:
            return 0
        used -= len(unpacker.unconsumed_tail) + len(unpacker.unused_data)
    last = used == size and not text.endswith(b"\n")
    return round((text.count(b"\n") + last) * size / used) if used else 0


def _visible_files(folder: Path) -> list[Path]:
    """All files in and below a folder but the hidden ones: the hub's client keeps its own notes in ``.cache`` there."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts))


@contextmanager
def _parquet_errors(file: Path) -> Iterator[None]:
    """What pyarrow raises becomes one line."""
    try:
        yield
    except (_imported("pyarrow").ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: damaged Parquet ({_first_line(error)}); fetch the file again") from error


def _keys(names: Sequence[str], fields: Sequence[str]) -> list[str] | None:
    """The keys that fields begin with; None, for all of them, where one is not there: whoever misses it can say what is."""
    keys = [field if field in names else field.partition(".")[0] for field in fields]
    return [name for name in names if name in keys] if keys and set(keys) <= set(names) else None


def _hub_rows(source: str, fields: Sequence[str]) -> Iterator[tuple[str, Mapping[str, object]]]:
    hub = parse_hub(source)
    if hub.is_file:
        yield from _file_rows(_hub_file(source, hub), fields)
        return
    config, split = hub.inside
    number = 0
    with _hub_errors(source):
        where, revision = (str(hub.local), None) if hub.local else (hub.repository, hub.revision)
        datasets = _imported("datasets")
        with _silent("datasets"):  # it warns of every entry of a card that it does not know
            builder = datasets.load_dataset_builder(where, config, revision=revision)
        _read_as_stored(builder)
        rows = builder.as_streaming_dataset(split=split)
        if (keys := _keys(rows.column_names or (), fields)) is not None:
            rows = rows.select_columns(keys)
        for number, row in enumerate(rows, start=1):
            yield f"{source} row {number}", row
    if number == 0:
        raise InputError(f"{source}: the split is empty")


def _read_as_stored(builder: Any) -> None:
    """Make the library's reader of Parquet, if it is that, take columns as the files hold them, and a little at a time.

    It would cast them to the types that the data set's card declares, which is an error where the card has lists and the files have lists
    as text; and it would buffer a gigabyte ahead.
    """
    config = builder.config
    if hasattr(config, "fragment_scan_options") and hasattr(config, "batch_size"):
        builder.info.features = None
        config.fragment_scan_options = _imported("pyarrow.dataset").ParquetFragmentScanOptions(pre_buffer=False)
        config.batch_size = _BATCH


@contextmanager
def _silent(name: str) -> Iterator[None]:
    """Without a library's warnings."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _hub_file(source: str, hub: HubSource) -> Path:
    if hub.local is not None:
        return hub.local.joinpath(*hub.inside)
    with _hub_errors(source):
        name = str(PurePosixPath(*hub.inside))
        return Path(_imported("huggingface_hub").hf_hub_download(hub.repository, name, repo_type="dataset", revision=hub.revision))


@contextmanager
def _hub_errors(source: str) -> Iterator[None]:
    """What the hub's clients raise becomes one line."""
    try:
        yield
    except _client_errors() as error:
        remedy = f"check the name and the network, or name a folder of local copies in {LOCAL_HUB}"
        raise InputError(f"{source}: the hub did not give it ({_first_line(error)}); {remedy}") from error


def _client_errors() -> tuple[type[Exception], ...]:
    """What a fetch may end in.

    Errors of the system and of values (an unknown config or split, damaged Parquet), of types (a file whose columns are not those of the
    first one), of hf_xet, and of the web clients that are loaded, whose errors have nothing in common.
    """
    clients = (("httpx", "HTTPError"), ("aiohttp", "ClientError"), ("datasets", "DatasetsError"))
    found = (getattr(sys.modules.get(module), name, None) for module, name in clients)
    return (
        OSError,
        ValueError,
        TypeError,
        RuntimeError,
        EOFError,
        *(one for one in found if isinstance(one, type) and issubclass(one, Exception)),
    )


def _imported(name: str) -> ModuleType:
    """A module of the extra ``train``."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(f"this data needs {name.partition('.')[0]}: pip install 'quiver-retrieval[train]'") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
