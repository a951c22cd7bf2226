"""The tokenized corpus on disk: stored tokens, disjoint training and held-out texts, refusal of damage and of other sources."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quiver.encoder import InputError, Tokenizer
from quiver.encoder.pretraining.corpus import BLOCK_CHARACTERS, Corpus, open_corpus, prepare_corpus, side_of, train_texts
from quiver.encoder.pretraining.recipe import DataSection, SourceSection

TEXTS = [f"text number {number} of a body of text" for number in range(300)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, vocab_size=320)


def write(path: Path, texts: list[str]) -> SourceSection:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return SourceSection(name=path.stem, path=str(path))


def prepared(data: DataSection, tokenizer: Tokenizer, folder: Path, block_characters: int = BLOCK_CHARACTERS) -> Corpus:
    prepare_corpus(data, tokenizer, folder, block_characters=block_characters)
    return open_corpus(folder)


def stored(corpus: Corpus, side: str) -> list[list[int]]:
    documents = corpus.train if side == "train" else corpus.held_out
    return [ids.tolist() for ids in np.split(documents.ids, documents.ends[:-1])] if len(documents) else []


def test_every_document_is_whole_on_one_side(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = DataSection(
        sources=(write(tmp_path / "a.jsonl", TEXTS[:200]), write(tmp_path / "b.jsonl", TEXTS[200:] + TEXTS[:20])), held_out=0.1
    )
    corpus = prepared(data, tokenizer, tmp_path / "corpus", block_characters=1000)  # several calls of the tokenizer
    given = TEXTS + TEXTS[:20]
    for side in ("train", "held_out"):
        assert stored(corpus, side) == tokenizer.encode_bare([text for text in given if side_of(text, 0.1) == side])
    assert 10 < len(corpus.held_out) < 60
    assert len(corpus.train) + len(corpus.held_out) == len(given)
    assert corpus.train.sources == {
        "a": sum(side_of(text, 0.1) == "train" for text in TEXTS[:200]),
        "b": sum(side_of(text, 0.1) == "train" for text in given[200:]),
    }
    assert corpus.train.ids.dtype == np.uint16
    for mapped in (corpus.train.ids, corpus.train.ends, corpus.held_out.ids, corpus.held_out.ends):
        assert isinstance(mapped, np.memmap)
    assert list(train_texts(data, share=1.0)) == [text for text in given if side_of(text, 0.1) == "train"]


def test_an_existing_corpus_is_reused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)
    data = DataSection(sources=(source,), held_out=0.1)
    first = prepared(data, tokenizer, tmp_path / "corpus")
    (tmp_path / "a.jsonl").unlink()
    again = prepared(data, tokenizer, tmp_path / "corpus")
    assert again.identity == first.identity
    assert stored(again, "train") == stored(first, "train")


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(TEXTS, vocab_size=65_600)
    corpus = prepared(DataSection(sources=(write(tmp_path / "a.jsonl", TEXTS),), held_out=0.0), tokenizer, tmp_path / "corpus")
    assert corpus.train.ids.dtype == np.uint32
    assert stored(corpus, "train") == tokenizer.encode_bare(TEXTS)


@pytest.mark.parametrize("name", ["train.ids", "train.ends", "held_out.ids"])
def test_a_damaged_corpus_is_made_again(tokenizer: Tokenizer, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    data = DataSection(sources=(write(tmp_path / "a.jsonl", TEXTS),), held_out=0.1)
    prepare_corpus(data, tokenizer, tmp_path / "corpus")
    path = tmp_path / "corpus" / name
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    content[7] ^= 1
    with caplog.at_level("WARNING"):
        prepare_corpus(data, tokenizer, tmp_path / "corpus")
    assert caplog.messages == [f"{tmp_path / 'corpus'}: {name} is damaged; tokenizing the sources again"]
    assert path.read_bytes() == content


def test_another_vocabulary_or_source_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", TEXTS)
    prepare_corpus(DataSection(sources=(source,), held_out=0.1), tokenizer, tmp_path / "corpus")
    with pytest.raises(InputError, match=r"was made with other settings \(held_out\); delete it"):
        prepare_corpus(DataSection(sources=(source,), held_out=0.2), tokenizer, tmp_path / "corpus")
    with pytest.raises(InputError, match=r"was made with other settings \(tokenizer\); delete it"):
        prepare_corpus(DataSection(sources=(source,), held_out=0.1), Tokenizer.train(TEXTS, vocab_size=384), tmp_path / "corpus")


def test_an_empty_corpus_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "blank.txt"
    path.write_text("  \n")
    data = DataSection(sources=(SourceSection(name="blank", path=str(path)),), held_out=0.0)
    for attempt in (lambda: prepare_corpus(data, tokenizer, tmp_path / "corpus"), lambda: list(train_texts(data, share=1.0))):
        with pytest.raises(InputError, match=r"the corpus is empty, there is no text to train on in .*blank\.txt"):
            attempt()
    assert not (tmp_path / "corpus").exists()


def test_a_source_without_training_text_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Otherwise a phase that reads only this source would fail days later."""
    blank = write(tmp_path / "blank.jsonl", ["", " "])
    data = DataSection(sources=(write(tmp_path / "a.jsonl", TEXTS), blank), held_out=0.1)
    with pytest.raises(InputError, match=r"data\.sources: blank has no text to train on \(.*blank\.jsonl\); remove it"):
        prepare_corpus(data, tokenizer, tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()


def test_a_vocabulary_can_be_trained_on_a_share_of_the_documents(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = DataSection(sources=(write(tmp_path / "a.jsonl", TEXTS[:150]), write(tmp_path / "b.jsonl", TEXTS[150:])), held_out=0.1)
    train = list(train_texts(data, share=1.0))
    some = list(train_texts(data, share=0.3))
    assert some == list(train_texts(data, share=0.3))
    assert set(some) < set(train)
    for place, half in enumerate((TEXTS[:150], TEXTS[150:])):
        share = len(set(some) & set(half)) / len(set(train) & set(half))
        assert 0.15 < share < 0.45, place
    with pytest.raises(InputError, match=r"model\.vocabulary\.share: a share of 1e-09 selects none of the \d+ documents; raise it"):
        list(train_texts(data, share=1e-9))


def test_a_missing_file_is_reported(tokenizer: Tokenizer, tmp_path: Path) -> None:
    prepare_corpus(DataSection(sources=(write(tmp_path / "a.jsonl", TEXTS),), held_out=0.1), tokenizer, tmp_path / "corpus")
    (tmp_path / "corpus" / "train.ends").unlink()
    with pytest.raises(InputError, match=r"corpus: the train files cannot be read \(No such file or directory\); delete the folder"):
        open_corpus(tmp_path / "corpus")


def test_a_share_that_holds_out_no_document_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    data = DataSection(sources=(write(tmp_path / "a.jsonl", ["one", "two"]),), held_out=1e-6)
    with pytest.raises(InputError, match=r"data\.held_out: a share of 1e-06 holds out none of the 2 documents; raise it"):
        prepare_corpus(data, tokenizer, tmp_path / "corpus")


def test_the_held_out_share_is_as_requested() -> None:
    sides = [side_of(f"text {number}", 0.25) for number in range(4000)]
    assert abs(sides.count("held_out") - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5
    assert {side_of(f"text {number}", 0.0) for number in range(100)} == {"train"}
