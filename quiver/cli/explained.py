"""Explanations in the terminal: what met what as tables, and the text with the words that were met in colour.

Colour says how similar two tokens are, and the numbers beside them say it too: without colour nothing is lost. rich leaves colours away
where the output is no terminal, or ``NO_COLOR`` is set.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quiver.cli.sources import Explained
from quiver.retrieval.search.bm25_index import WordScore
from quiver.retrieval.search.explain import Explanation, TokenMatch

# From which similarity on which style; the lowest has no limit.
_SHADES = ((0.8, "bold green"), (0.6, "green"), (0.4, "yellow"), (-1.0, "dim"))
# Characters of a text that are shown, and those before the first token that was met.
_WINDOW = 480
_BEFORE = 24
# What a terminal would take for a command, and white space of any kind: one space for each, so that spans stay where they are.
_NOT_SHOWN = re.compile(r"[\s\x00-\x1f\x7f-\x9f]")


def explanation_view(query: str, explained: Mapping[str, Explained]) -> list[RenderableType]:
    """What a terminal shows of the explanations of one document.

    Args:
        query: The query's text.
        explained: Source -> why it gives the document its score.
    """
    shown: list[RenderableType] = []
    for source, why in explained.items():
        if not isinstance(why, Explanation):
            shown.append(_words_table(source, why))
        elif not why.matches:
            shown.append(Text(f"{source}: similarity {why.score:.4f}"))
            if why.text is not None:
                shown.append(Padding(_passage(why.text, ()), (0, 2)))
        else:
            shown += [Padding(_passage(why.text or "", why.matches), (0, 2)), _matches_table(source, query, why)]
    return shown


def explanation_json(explained: Mapping[str, Explained]) -> dict[str, object]:
    """The explanations of one document for machines; spans are characters of the query and of the hit's text."""
    content: dict[str, object] = {}
    for source, why in explained.items():
        if isinstance(why, Explanation):
            score = why.score if math.isfinite(why.score) else None  # JSON knows no infinity, which is the score of a text without a vector
            content[source] = {"score": score, "matches": [_match_json(match) for match in why.matches]}
        else:
            content[source] = {"score": sum(word.score for word in why), "words": [word._asdict() for word in why]}
    return content


def _match_json(match: TokenMatch) -> dict[str, object]:
    return {
        "query_token": match.query.name,
        "query_span": match.query.span,
        "document_token": match.document.name,
        "document_span": match.document.span,
        "similarity": match.similarity,
    }


def _passage(text: str, matches: Sequence[TokenMatch]) -> Text:
    """The part of a text where most was met, with what was met in colour."""
    # What special tokens and expansion meet is counted in the table; in the text it would colour nearly everything.
    met: dict[tuple[int, int], list[float]] = {}
    for match in matches:
        if match.query.span is not None and match.document.span is not None:
            met.setdefault(match.document.span, []).append(match.similarity)
    first = _window(met, len(text))
    last = min(first + _WINDOW, len(text))
    shown = Text(_NOT_SHOWN.sub(" ", text[first:last]))
    for (begin, end), similarities in met.items():
        if first <= begin and end <= last:
            shown.stylize(_shade(max(similarities)), begin - first, end - first)
    return Text.assemble("…" if first else "", shown, "…" if last < len(text) else "")


def _window(met: Mapping[tuple[int, int], Sequence[float]], length: int) -> int:
    """The first character of the part that is shown."""
    if length <= _WINDOW:
        return 0
    starts = [min(max(0, begin - _BEFORE), length - _WINDOW) for begin, _ in sorted(met)]
    return max(starts, key=lambda start: _gain(met, start), default=0)


def _gain(met: Mapping[tuple[int, int], Sequence[float]], start: int) -> float:
    return sum(sum(similarities) for (begin, end), similarities in met.items() if start <= begin and end <= start + _WINDOW)


def _matches_table(source: str, query: str, why: Explanation) -> Table:
    table = _table(source, ("query token", "met", "similarity"))
    others: list[TokenMatch] = []
    for match in why.matches:
        if match.query.span is None:
            others.append(match)
            continue
        shade = _shade(match.similarity)
        table.add_row(
            _clean(query[slice(*match.query.span)]), Text(_met(match, why.text or ""), shade), Text(f"{match.similarity:.4f}", shade)
        )
    if others:
        counts = Counter(match.query.name for match in others)
        names = ", ".join(name if count == 1 else f"{count} {name}" for name, count in counts.items())
        table.add_row(Text(names, "dim"), "", Text(f"{sum(match.similarity for match in others):.4f}", "dim"))
    table.add_row("sum", "", f"{sum(match.similarity for match in why.matches):.4f}", style="bold")
    return table


def _met(match: TokenMatch, text: str) -> str:
    """The token that was met as it stands in the text, or by its name."""
    span = match.document.span
    return match.document.name if span is None else _NOT_SHOWN.sub(" ", text[slice(*span)]).strip() or match.document.name


def _words_table(source: str, words: Sequence[WordScore]) -> Table:
    table = _table(source, ("query word", "score"))
    for word in words:
        table.add_row(_clean(word.word), Text(f"{word.score:.4f}", "green" if word.score else "dim"))
    table.add_row("sum", f"{sum(word.score for word in words):.4f}", style="bold")
    return table


def _table(source: str, header: Sequence[str]) -> Table:
    table = Table(title=Text(source, style="table.title"), title_justify="left")
    for name in header:
        table.add_column(name, justify="right" if name == header[-1] else "left", overflow="fold")
    return table


def _clean(text: str) -> Text:
    return Text(_NOT_SHOWN.sub(" ", text))


def _shade(similarity: float) -> str:
    return next((style for least, style in _SHADES if similarity >= least), _SHADES[-1][1])
