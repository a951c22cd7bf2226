"""Which files of a hub repository hold the documents, the queries and the judgements.

A repository says it itself, in the ``configs`` of its card's front matter: config and split to the patterns of their files. Where it does
not, the files have the names that repositories of its kind are given. Nothing of a repository is ever run.

Source: the layouts of https://huggingface.co/BeIR, mteb, CoIR-Retrieval, zeta-alpha-ai and Shitao/MLDR;
https://huggingface.co/docs/hub/datasets-manual-configuration for ``configs``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import yaml

from quiver.encoder.errors import InputError

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
