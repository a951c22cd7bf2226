"""Compares two recordings of ``record.py``, one line for each item.

    python compare.py golden.json NEW.json [--only ITEM]

Exit status 1 if an item differs, or is missing in the second.

Kinds of values and what counts as equal:

    exact                  equal JSON
    cards                  equal text (model cards, descriptions in a schema); a difference is told and does not count: prose may change
    bits                   equal, if both recordings are from equal machines, see ``about.machine``; else not compared
    measures, values       1e-4 in absolute terms
    losses                 1e-4 of the value, or 1e-6 in absolute terms; from another machine 3e-4 (AVX2 beside AVX-512: up to 0.7e-4 after
                           20 updates), gradient norms 1 %: of a loss of minima and maxima they jump where two scores are nearly equal
    rankings               scores 1e-4; a document may be missing, or stand elsewhere, where scores differ by less than that
    measures_approximate   of approximate search and int8: as measures; from another machine 0.01
    rankings_approximate   as rankings; from another machine nine tenths of the documents are the same, their scores to 0.02: k-means and
                           graphs follow the last bits of vectors
"""

# ruff: noqa: T201 - scripts that print

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

SCORE, LOSS, SMALL = 1e-4, 1e-4, 1e-6
MEASURE_ELSEWHERE, SCORE_ELSEWHERE, SHARED_ELSEWHERE = 0.01, 0.02, 0.9
LOSS_ELSEWHERE, NORM_ELSEWHERE = 3e-4, 0.01
# Scores are recorded with five decimals.
ROUNDING = 1.1e-5

Differences = Iterator[str]


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 90 else f"{text[:87]}..."


def differing(golden: Any, new: Any, where: str) -> Differences:
    """Where two JSON values differ."""
    if isinstance(golden, dict) and isinstance(new, dict):
        for key in [*golden, *(key for key in new if key not in golden)]:
            if key not in new or key not in golden:
                yield f"{where}.{key} is {'missing' if key not in new else 'new'}"
            else:
                yield from differing(golden[key], new[key], f"{where}.{key}")
    elif isinstance(golden, list) and isinstance(new, list) and len(golden) == len(new):
        for place, (one, other) in enumerate(zip(golden, new, strict=True)):
            yield from differing(one, other, f"{where}.{place}")
    elif isinstance(golden, str) and isinstance(new, str) and golden != new and "\n" in golden + new:
        lines = zip_longest(golden.splitlines(), new.splitlines())
        number, one, other = next((number, *pair) for number, pair in enumerate(lines, start=1) if pair[0] != pair[1])
        yield f"{where}, line {number}: was {_short(one)}, is {_short(other)}"
    elif golden != new:
        yield f"{where} was {_short(golden)}, is {_short(new)}"


def near(golden: Any, new: Any, where: str, *, absolute: float, relative: float = 0.0) -> Differences:
    """Where numbers, in equal lists and mappings, differ by more than is allowed."""
    if isinstance(golden, list) and isinstance(new, list) and len(golden) == len(new):
        for place, (one, other) in enumerate(zip(golden, new, strict=True)):
            yield from near(one, other, f"{where}.{place}", absolute=absolute, relative=relative)
    elif isinstance(golden, int | float) and isinstance(new, int | float):
        if not (math.isclose(golden, new, abs_tol=absolute, rel_tol=relative) or (math.isnan(golden) and math.isnan(new))):
            yield f"{where} was {golden}, is {new}"
    elif golden != new:
        yield f"{where} was {_short(golden)}, is {_short(new)}"


def _ranking(text: str) -> dict[str, float]:
    words = text.split()
    return {document: float(score) for document, score in zip(words[::2], words[1::2], strict=True)}


def _same_ranking(golden: dict[str, float], new: dict[str, float], where: str) -> Differences:
    allowed = SCORE + ROUNDING
    if len(golden) != len(new):
        yield f"{where} had {len(golden)} documents, has {len(new)}"
        return
    for rank, (one, other) in enumerate(zip(golden.values(), new.values(), strict=True), start=1):
        if abs(one - other) > allowed:
            yield f"{where}, rank {rank}: the score was {one}, is {other}"
            return
    last = min(golden.values(), default=0.0)
    for document in golden.keys() | new.keys():
        one, other = golden.get(document, last), new.get(document, last)
        if abs(one - other) > allowed:
            yield f"{where}, document {document}: was {golden.get(document, 'absent')}, is {new.get(document, 'absent')}"
            return


def rankings(golden: dict[str, str], new: dict[str, str], where: str, *, elsewhere: bool) -> Differences:
    """Where the rankings of queries differ."""
    if golden.keys() != new.keys():
        yield f"{where}: other queries"
        return
    shared = whole = 0
    for query, text in golden.items():
        one, other = _ranking(text), _ranking(new[query])
        if not elsewhere:
            yield from _same_ranking(one, other, f"{where}, query {query}")
            continue
        common = one.keys() & other.keys()
        shared, whole = shared + len(common), whole + len(one)
        if far := [
            document for document in common if abs(one[document] - other[document]) > SCORE_ELSEWHERE * max(1.0, abs(one[document]))
        ]:
            yield f"{where}, query {query}, document {far[0]}: was {one[far[0]]}, is {other[far[0]]}"
    if whole and shared < SHARED_ELSEWHERE * whole:
        yield f"{where}: {shared} of {whole} documents are the same"


def _all(values: Callable[..., Differences], **settings: Any) -> Callable[[Any, Any, bool], Differences]:
    def compared(golden: Any, new: Any, elsewhere: bool) -> Differences:
        del elsewhere
        for key in [*golden, *(key for key in new if key not in golden)]:
            if key not in new or key not in golden:
                yield f"{key} is {'missing' if key not in new else 'new'}"
            else:
                yield from values(golden[key], new[key], key, **settings)

    return compared


def _losses(golden: Any, new: Any, elsewhere: bool) -> Differences:
    for norms, allowed in ((False, LOSS_ELSEWHERE if elsewhere else LOSS), (True, NORM_ELSEWHERE if elsewhere else LOSS)):
        parts = ({key: each for key, each in side.items() if key.endswith("grad_norm") is norms} for side in (golden, new))
        yield from _all(near, absolute=SMALL, relative=allowed)(*parts, elsewhere)


def _bits(golden: Any, new: Any, elsewhere: bool) -> Differences:
    if not elsewhere:
        yield from _all(differing)(golden, new, False)


def _approximate_measures(golden: Any, new: Any, elsewhere: bool) -> Differences:
    yield from _all(near, absolute=MEASURE_ELSEWHERE if elsewhere else SCORE)(golden, new, elsewhere)


def _rankings(golden: Any, new: Any, elsewhere: bool) -> Differences:
    del elsewhere
    yield from _all(rankings, elsewhere=False)(golden, new, False)


def _approximate_rankings(golden: Any, new: Any, elsewhere: bool) -> Differences:
    yield from _all(rankings, elsewhere=elsewhere)(golden, new, elsewhere)


KINDS: dict[str, Callable[[Any, Any, bool], Differences]] = {
    "exact": _all(differing),
    "cards": _all(differing),
    "bits": _bits,
    "measures": _all(near, absolute=SCORE),
    "values": _all(near, absolute=SCORE),
    "losses": _losses,
    "rankings": _rankings,
    "measures_approximate": _approximate_measures,
    "rankings_approximate": _approximate_rankings,
}
"""Kind of value -> what tells the differences; the third argument says whether the recordings are from different machines."""

TOLD_ONLY = ("cards",)


def differences(golden: dict[str, Any], new: dict[str, Any], item: str) -> tuple[list[str], list[str]]:
    """What differs in an item: what counts, and what is only told."""
    if item not in golden["items"]:
        return [], ["not in the golden recording"]
    if item not in new["items"]:
        return ["not recorded"], []
    elsewhere = golden["about"]["machine"] != new["about"]["machine"]
    one, other = golden["items"][item], new["items"][item]
    counting: list[str] = [f"{kind}: {'missing' if kind in one else 'new'}" for kind in one.keys() ^ other.keys()]
    told: list[str] = []
    for kind in one.keys() & other.keys():
        found = [f"{kind}: {each}" for each in KINDS[kind](one[kind], other[kind], elsewhere)]
        (told if kind in TOLD_ONLY else counting).extend(found)
    return counting, told


def report(golden: dict[str, Any], new: dict[str, Any], items: list[str]) -> int:
    """Print a line for each item; 1 if one differs, else 0."""
    failed = 0
    for item in items:
        counting, told = differences(golden, new, item)
        failed += bool(counting)
        more = f" (and {len(counting) - 1} more)" if len(counting) > 1 else ""
        note = f"  [told only: {told[0]}]" if told else ""
        print(f"{item}: {f'DIFFERS: {counting[0]}{more}' if counting else 'same'}{note}", flush=True)
    print(f"{len(items) - failed} of {len(items)} items are the same")
    return int(failed > 0)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("golden", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", action="append", default=[], help="An item, or what stands before the dot of several; repeatable.")
    given = parser.parse_args()
    golden, new = (json.loads(path.read_text(encoding="utf-8")) for path in (given.golden, given.new))
    items = [
        item for item in golden["items"] if not given.only or any(item == wanted or item.startswith(f"{wanted}.") for wanted in given.only)
    ]
    return report(golden, new, items)


if __name__ == "__main__":
    sys.exit(main())
