"""The words of BM25 in other writing systems, and queries without words."""

# ruff: noqa: RUF001
from __future__ import annotations

import json
import logging
import unicodedata
from pathlib import Path
from typing import Any

import pytest

import quiver
from quiver.encoder.errors import InputError
from quiver.retrieval.index import build_index, open_index
from quiver.retrieval.models import bm25
from quiver.retrieval.models.bm25 import BM25, query_words
from quiver.retrieval.records import Document
from quiver.retrieval.search.bm25 import word_index

OTHER = Document("other", "another document of other words")


def finds(text: str, query: str) -> bool:
    return [hit.id for hit in build_index([Document("d", text), OTHER], "bm25").search(query)] == ["d"]


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("हिन्दी भाषा का व्याकरण", "भाषा"),
        ("বাংলা সাহিত্যের ইতিহাস", "ইতিহাস"),
        ("தமிழ் இலக்கியம்", "தமிழ்"),
        ("తెలుగు భాష", "తెలుగు"),
        ("ภาษา ที่นี่", "ที่นี่"),
        ("བོད་ཡིག", "ཡིག"),
        ("မြန်မာ ဘာသာ", "မြန်မာ"),
        ("كِتَابٌ جَدِيدٌ", "جَدِيدٌ"),
        ("שָׁלוֹם עוֹלָם", "עוֹלָם"),
        ("𞤀𞤣𞤤𞤢𞤥𞥆 𞤨𞤵𞤤𞤢𞤪", "𞤀𞤣𞤤𞤢𞤥𞥆"),
        ("x̄y the mean of x̂", "x̄y"),
    ],
)
def test_marks_belong_to_the_letters_before_them(text: str, query: str) -> None:
    assert finds(text, query)
    assert query_words(query) == [unicodedata.normalize("NFC", query).casefold()]


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("İstanbul is large", "istanbul"),
        ("DİYARBAKIR", "diyarbakir"),
        ("Große Straße", "STRASSE"),
        ("ΟΔΥΣΣΕΥΣ", "Οδυσσευς"),
        ("the ﬁrst ﬂoor of the eﬃcient oﬃce", "efficient"),
        ("Ｑｕｉｖｅｒ ２０２４ で", "quiver"),
        ("ｶﾞﾗｽ の", "ガラス"),
        ("نمی\u200cخواهم", "نمیخواهم"),
        ("Donau\u00addampf\u00adschiff", "donaudampfschiff"),
        ("ﻛﺘﺎﺏ", "كتاب"),
        ("क्\u200dष त्र", "क्ष"),
    ],
)
def test_words_are_found_in_another_case_shape_or_form(text: str, query: str) -> None:
    assert finds(text, query)
    assert finds(query, text)


@pytest.mark.parametrize("text", ["résumé of Müller", "Việt Nam", "한국어 문서", "ガラス", "ΐ ᾀδης", "Ǻngström ǰ", "क़लम", "İzmir"])
def test_composed_and_decomposed_texts_have_the_same_words(text: str) -> None:
    words = query_words(text)
    assert words
    assert {tuple(query_words(unicodedata.normalize(form, text))) for form in ("NFC", "NFD")} == {tuple(words)}


def test_symbols_and_apostrophes_still_end_words() -> None:
    assert query_words("don’t Quiver™ x² 10µm ❤️ red-owl naïve‑test") == ["don", "quiver", "x²", "10μm", "red", "owl", "naïve", "test"]


@pytest.mark.parametrize("query", ["R", "C++", "the of", "?"])
def test_a_query_without_a_word_that_counts_is_said_in_python(query: str, caplog: pytest.LogCaptureFixture) -> None:
    index = quiver.build_index([Document("d", "R and C++ for statisticians"), OTHER], "bm25")
    with caplog.at_level(logging.WARNING, logger="quiver.retrieval"):
        assert len(index.search("statisticians")) == 1
        assert not caplog.records
        assert not index.search(query)
    (record,) = caplog.records
    assert record.message.startswith("no word of the query counts: BM25 leaves out single letters")
    caplog.clear()
    index.search([query, "statisticians"])
    assert f"no word of 1 of 2 queries, such as {query!r}, counts" in caplog.text


def test_tables_and_indexes_of_other_rules_are_not_mixed(tmp_path: Path, word_sum: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [Document("d", "Straße"), OTHER]
    monkeypatch.setattr(bm25, "WORD_RULES", 1)
    former = BM25().card.fingerprint
    monkeypatch.undo()
    assert BM25().card.fingerprint != former
    build_index(documents, "bm25", tmp_path / "words")
    codec = next((tmp_path / "words").glob("codec/*/codec.json"))
    assert json.loads(codec.read_bytes())["words"] == bm25.WORD_RULES
    monkeypatch.setattr("quiver.retrieval.index.words._CONTENT", json.dumps({**bm25.PARAMETERS, "words": bm25.WORD_RULES + 1}).encode())
    with pytest.raises(InputError, match=r"another version of Quiver split the words of this BM25 index; build the index again"):
        open_index(tmp_path / "words")
    index = build_index(documents, word_sum, tmp_path / "dense")
    for rules, folders in ((2, 1), (3, 2)):
        monkeypatch.setattr("quiver.retrieval.search.bm25.WORD_RULES", rules)
        word_index(index, cache=tmp_path / "cache")
        assert len(list((tmp_path / "cache").iterdir())) == folders
