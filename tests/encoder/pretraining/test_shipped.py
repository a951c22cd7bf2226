"""The shipped small recipe on its real text: it reads the pairs of train alone, and its three phases run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from quiver.encoder.pretraining.corpus import read_documents
from quiver.encoder.pretraining.recipe import PretrainingRecipe, SourceSection, load_pretraining_recipe
from quiver.retrieval.data.docstrings import mine, split_pairs, write_collection


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> PretrainingRecipe:
    """The recipe with pairs of the standard library as its source."""
    folder = tmp_path_factory.mktemp("data") / "code"
    write_collection(split_pairs(mine()), folder)
    recipe = load_pretraining_recipe("pretrain-small")
    [source] = recipe.data.sources
    assert Path(source.path).parent == Path("data/code")
    return recipe.replace(data=recipe.data.replace(sources=(source.replace(path=str(folder / Path(source.path).name)),)))


def documents_of(folder: Path, split: str) -> set[str]:
    return {line.split("\t")[1] for line in (folder / "qrels" / f"{split}.tsv").read_text().splitlines()[1:]}


def test_the_recipe_reads_the_training_pairs_alone(small: PretrainingRecipe) -> None:
    [source] = small.data.sources
    texts = list(read_documents(source))
    splits = split_pairs(mine())
    assert texts == [f"{pair.query}\n\n{pair.code}" for pair in splits.train]
    assert not {pair.code for pair in (*splits.dev, *splits.test)} & set(texts)


@pytest.mark.data
@pytest.mark.parametrize("name", ["scifact", "designdocs_long"])
def test_no_document_of_another_split_is_read(quiver_data: Path, name: str) -> None:
    folder = quiver_data / name
    texts = Counter(read_documents(SourceSection(name=name, path=str(folder), split="train")))
    others = set().union(*(documents_of(folder, path.stem) for path in (folder / "qrels").glob("*.tsv") if path.stem != "train"))
    train = documents_of(folder, "train")
    expected: Counter[str] = Counter()
    for line in (folder / "corpus.jsonl").open(encoding="utf-8"):
        row = json.loads(line)
        if row["_id"] in train - others:
            expected["\n\n".join(part for part in (row.get("title"), row["text"]) if part and part.strip())] += 1
    assert texts == expected
    assert len(texts) > 100
