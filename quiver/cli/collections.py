"""``quiver collections list | show | fetch | missing | squad``: the published collections, which of them are here, and one made here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from quiver.cli.output import JsonOption, ProgressOption, help_alone, print_json, print_table, say, show_progress
from quiver.encoder import InputError
from quiver.eval.datasets.cache import Cache
from quiver.eval.datasets.entry import Entry
from quiver.eval.datasets.origins import Origin
from quiver.eval.datasets.registry import held, missing, registry, require, shortest
from quiver.eval.datasets.squad import read_squad, write_squad

app = typer.Typer(invoke_without_command=True, callback=help_alone, help="See and fetch published collections.")

NamesArgument = typer.Argument(help="A collection, a group or a family: beir/scifact, beir/cqadupstack, beir. All if none is given.")


@app.command("list", epilog="Example: quiver collections list beir")
def list_(
    names: Annotated[list[str] | None, NamesArgument] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """List what can be evaluated by name."""
    cache, entries = Cache.usual(), _entries(names)
    if as_json:
        print_json([_told(entry, cache) for entry in entries])
        return
    rows = [
        (
            entry.key,
            entry.split,
            _count(entry.facts.queries),
            _count(entry.facts.documents),
            "" if entry.facts.bytes is None else f"{entry.facts.bytes / 1e6:,.1f}",
            "yes" if held(entry, cache) else "",
        )
        for entry in entries
    ]
    header = ("name", "split", "queries", "documents", "MB", "here")
    print_table(f"{len(entries)} collections; those here are in {cache.root}", header, rows)


@app.command("show", epilog="Example: quiver collections show beir/webis-touche2020")
def show(
    name: Annotated[str, typer.Argument(help="A collection, such as beir/scifact.")],
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Say what a collection is, how it is scored, and where it can be had."""
    cache, entries = Cache.usual(), require(name)
    told = [_told(entry, cache) for entry in entries]
    if as_json:
        print_json(told)
        return
    for entry, facts in zip(entries, told, strict=True):
        rows = [
            ("called", entry.name),
            ("split", f"{entry.split} (of {', '.join(entry.splits)})"),
            ("queries", _count(entry.facts.queries)),
            ("documents", _count(entry.facts.documents)),
            ("counts in averages", _group(entry)),
            ("the query's own document", "dropped" if entry.exclude_self else "kept"),
            ("titles", "before the texts" if entry.use_title else "left away"),
            ("licence", entry.facts.licence or "not stated"),
            *((f"from {key}", f"{origin.url} ({origin.revision or 'no fixed revision'})") for key, origin in entry.origins.items()),
            ("download", _size(entry.facts.bytes) or "size not known"),
            ("here", f"{facts['folder']}, {facts['held']}" if facts["folder"] else f"no; quiver collections fetch {entry.key}"),
            ("note", entry.note or "none"),
        ]
        print_table(entry.key, ("", "value"), rows)


@app.command("fetch", epilog="Example: quiver collections fetch beir/scifact nanobeir")
def fetch(
    names: Annotated[list[str], typer.Argument(help="Collections, groups or families.")],
    origin: Annotated[str | None, typer.Option("--from", help="Where from, as collections show has it; by default the first.")] = None,
    progress: Annotated[bool | None, ProgressOption] = None,
) -> None:
    """Fetch collections into the cache; one that is there already is compared with its checksums."""
    cache, entries = Cache.usual(), _entries(names)
    if origin is not None and (without := [entry for entry in entries if origin not in entry.origins]):
        raise InputError(f"{without[0].key} cannot be had from {origin!r}; there is {', '.join(without[0].origins)}")
    done: set[str] = set()
    for entry in entries:
        chosen = _origin(entry, origin, cache)
        if chosen.unit in done:  # an archive of several, fetched or compared a moment ago
            continue
        done.add(chosen.unit)
        record = cache.fetch(chosen, progress=show_progress(progress))
        say(f"{entry.key}: {cache.folder(chosen)}, {_size(record.bytes)}, {record.revision}")


@app.command("missing", epilog="Example: quiver collections missing beir")
def missing_(
    names: Annotated[list[str] | None, NamesArgument] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """List what is not in the cache, with the command that fetches it."""
    cache, entries = Cache.usual(), _entries(names)
    absent = missing(entries, cache)
    if as_json:
        print_json([entry.key for entry in absent])
        return
    if not absent:
        say(f"nothing is missing: all {len(entries)} are in {cache.root}")
        return
    archives = {entry.origin.unit: entry.facts.bytes for entry in absent}
    known = sum(size for size in archives.values() if size is not None)
    rest = "" if None not in archives.values() else ", and those whose size is not known"
    say(f"{len(absent)} of {len(entries)} are not in {cache.root}: {_size(known) or '0 MB'} to download{rest}")
    say(f"quiver collections fetch {' '.join(shortest(absent))}")


@app.command("squad", epilog="Example: quiver collections squad KorQuAD_v1.0_dev.json --out data/korquad")
def squad(
    file: Annotated[Path, typer.Argument(help="Question answering data in SQuAD's JSON, such as KorQuAD.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="BEIR folder to write.")],
    qrels: Annotated[
        Path | None, typer.Option(help="Folder of <split>.tsv to take over; by default one split, test, of all questions.")
    ] = None,
) -> None:
    """Make a collection of question answering data: each question asks for the paragraph it was asked about."""
    found = read_squad(file)
    splits = write_squad(found, out, qrels=qrels)
    say(f"{out}: {len(found.documents):,} documents, {len(found.queries):,} queries; {', '.join(splits)}")


def _entries(names: Iterable[str] | None) -> list[Entry]:
    if not names:
        return list(registry().values())
    return list({entry.key: entry for name in names for entry in require(name)}.values())


def _origin(entry: Entry, asked: str | None, cache: Cache) -> Origin:
    """The origin asked for; else the one that is here already; else the first."""
    if asked is not None:
        return entry.origins[asked]
    present = held(entry, cache)
    return entry.origin if present is None else present[0]


def _told(entry: Entry, cache: Cache) -> dict[str, Any]:
    present = held(entry, cache)
    return {
        "key": entry.key,
        "name": entry.name,
        "split": entry.split,
        "splits": list(entry.splits),
        "exclude_self": entry.exclude_self,
        "use_title": entry.use_title,
        **dataclasses.asdict(entry.facts),
        "origins": {key: {"url": origin.url, "revision": origin.revision} for key, origin in entry.origins.items()},
        "folder": None if present is None else str(cache.folder(present[0])),
        "held": None if present is None else present[1].revision,
        "note": entry.note,
    }


def _group(entry: Entry) -> str:
    return "by itself" if entry.facts.group is None else f"as one of the {entry.facts.group_size} parts of {entry.facts.group}"


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _size(number: int | None) -> str:
    return "" if number is None else f"{number / 1e6:,.1f} MB"
