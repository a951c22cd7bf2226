"""SQuAD and KorQuAD as retrieval collections: paragraphs are documents, questions are queries. Malformed files are reported by position.

KorQuAD may be redistributed only unchanged, so the collection is made on the user's machine. The id of a paragraph is the id of its first
question without the last part, then ``p``, then the number of the paragraph in its article: ``6548850-1p1``. Repeated paragraphs are one
document, and paragraphs without questions are left out, as in mteb's SQuADKorV1Retrieval with its 5,774 queries and 960 documents.

Source: SQuAD, arXiv:1606.05250 and arXiv:1806.03822; KorQuAD 1.0, arXiv:1909.07005; the files of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json
from quiver.retrieval.data.corpus import merged_judgements, read_judgements, write_beir
from quiver.retrieval.records import Document, Query


class RawParagraph(NamedTuple):
    """A paragraph and its questions."""

    number: int
    """Position in its article, from 0."""
    context: str
    """Text of the paragraph."""
    questions: list[object]
    """Questions as parsed from the file, unchecked."""
    where: str
    """File, article and paragraph, for errors."""


def read_paragraphs(path: Path) -> Iterator[RawParagraph]:
    """Read the paragraphs of a file, in their order."""
    for article_number, article in enumerate(list_under(read_json(path), "data", f"{path}")):
        for number, paragraph in enumerate(list_under(article, "paragraphs", f"{path}: data[{article_number}]")):
            where = f"{path}: data[{article_number}].paragraphs[{number}]"
            yield RawParagraph(number, text_under(paragraph, "context", where), list_under(paragraph, "qas", where), where)


def is_impossible(question: object) -> bool:
    """Whether a question is marked as having no answer in its paragraph (version 2 of the format)."""
    return isinstance(question, Mapping) and question.get("is_impossible") is True


def list_under(value: object, key: str, where: str) -> list[object]:
    """The list that an object holds under a key."""
    found = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(found, list):
        raise InputError(f"{where}: not SQuAD's format, '{key}' must be a list")
    return found


def text_under(value: object, key: str, where: str) -> str:
    """The text that an object holds under a key."""
    found = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(found, str) or not found.strip():
        raise InputError(f"{where}: not SQuAD's format, '{key}' must be text")
    return found


ALL = "test"
"""Name of the split with the judgements of all questions."""


@dataclass(frozen=True)
class Squad:
    """A collection read from a SQuAD file."""

    documents: dict[str, str]
    queries: dict[str, str]
    answers: dict[str, str]


def read_squad(path: Path) -> Squad:
    """Read a file in SQuAD's JSON format, version 1 or 2; questions marked as impossible in version 2 are left out."""
    squad = Squad({}, {}, {})
    first: dict[str, str] = {}
    for paragraph in read_paragraphs(path):
        questions, context = _list_answerable(paragraph), paragraph.context
        if not questions:
            continue
        key = first.setdefault(context, f"{next(iter(questions)).rpartition('-')[0] or next(iter(questions))}p{paragraph.number}")
        if squad.documents.setdefault(key, context) != context:
            raise InputError(f"{paragraph.where}: two paragraphs would have the id {key!r}")
        for question, text in questions.items():
            if question in squad.queries:
                raise InputError(f"{paragraph.where}: the question id {question!r} occurs twice")
            squad.queries[question] = text
            squad.answers[question] = key
    if not squad.queries:
        raise InputError(f"{path}: contains no answerable question")
    return squad


def write_squad(squad: Squad, out: Path, *, qrels: Path | None = None) -> list[str]:
    """Write the collection as a BEIR folder."""
    splits = (
        {ALL: [(query, document, 1) for query, document in squad.answers.items()]} if qrels is None else _read_judged_splits(squad, qrels)
    )
    documents = (Document(key, text) for key, text in squad.documents.items())
    write_beir(out, documents, (Query(key, text) for key, text in squad.queries.items()), splits)
    return list(splits)


def _list_answerable(paragraph: RawParagraph) -> dict[str, str]:
    """The answerable questions of a paragraph: id -> text."""
    found = [one for one in paragraph.questions if not is_impossible(one)]
    questions = {text_under(one, "id", paragraph.where): text_under(one, "question", paragraph.where) for one in found}
    if len(questions) < len(found):
        raise InputError(f"{paragraph.where}: a question id occurs twice")
    return questions


def _read_judged_splits(squad: Squad, qrels: Path) -> dict[str, list[tuple[str, str, int]]]:
    files = sorted(qrels.glob("*.tsv")) if qrels.is_dir() else []
    if not files:
        raise InputError(f"{qrels}: not a folder with <split>.tsv files")
    splits = {}
    for file in files:
        judgements = merged_judgements(read_judgements(file))
        for judgement in judgements:
            for kind, key, known in (("question", judgement.query, squad.queries), ("paragraph", judgement.document, squad.documents)):
                if key not in known:
                    raise InputError(f"{judgement.position}: unknown {kind} {key!r}")
        splits[file.stem] = [(judgement.query, judgement.document, judgement.grade) for judgement in judgements]
    return splits
