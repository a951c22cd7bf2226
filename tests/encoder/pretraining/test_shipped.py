"""The shipped small recipe on its real text: it reads only train splits, and its three phases run."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from quiver.encoder.pretraining.corpus import read_documents
from quiver.encoder.pretraining.recipe import PretrainingRecipe, SourceSection, load_pretraining_recipe
from quiver.encoder.pretraining.run import pretrain


def small(folder: Path) -> PretrainingRecipe:
    """The recipe with the test data as sources."""
    recipe = load_pretraining_recipe("pretrain_small")
    parent = Path("../shared/data")
    sources = tuple(source.replace(path=str(folder / Path(source.path).relative_to(parent))) for source in recipe.data.sources)
    return recipe.replace(data=recipe.data.replace(sources=sources))


def documents_of(folder: Path, split: str) -> set[str]:
    return {line.split("\t")[1] for line in (folder / "qrels" / f"{split}.tsv").read_text().splitlines()[1:]}


@pytest.mark.data
def test_the_sources_of_the_recipe_exist(quiver_data: Path) -> None:
    found = {source.name: list(islice(read_documents(source), 20)) for source in small(quiver_data).data.sources}
    assert {name: len(texts) for name, texts in found.items()} == dict.fromkeys(("code", "commands", "claims", "designs"), 20)
    assert "def " in found["code"][0]
    assert min(len(text) for texts in found.values() for text in texts) > 10


@pytest.mark.data
@pytest.mark.parametrize("name", ["scifact", "designdocs_long"])
def test_no_document_of_another_split_is_read(quiver_data: Path, name: str) -> None:
    folder = quiver_data / name
    [source] = [source for source in small(quiver_data).data.sources if Path(source.path) == folder]
    texts = Counter(read_documents(source))
    others = set().union(*(documents_of(folder, path.stem) for path in (folder / "qrels").glob("*.tsv") if path.stem != "train"))
    train = documents_of(folder, "train")
    expected: Counter[str] = Counter()
    for line in (folder / "corpus.jsonl").open(encoding="utf-8"):
        row = json.loads(line)
        if row["_id"] in train - others:
            expected["\n\n".join(part for part in (row.get("title"), row["text"]) if part and part.strip())] += 1
    assert texts == expected
    assert len(texts) > 100


@pytest.mark.data
@pytest.mark.exhaustive
def test_the_phases_run_with_rows_more_than_99_percent_full(quiver_data: Path, tmp_path: Path) -> None:
    """Runs a few steps of each phase on two of the sources."""
    recipe = small(quiver_data)
    kept: list[SourceSection] = [source for source in recipe.data.sources if source.name in ("claims", "commands")]
    phases = tuple(
        phase.replace(
            tokens=24_576,
            decay_tokens=24_576 if phase.decay_tokens else 0,
            warmup_tokens=8_192 if phase.warmup_tokens else 0,
            batch_warmup_tokens=8_192 if phase.batch_warmup_tokens else 0,
            mix=tuple(part for part in phase.mix if part.source in ("claims", "commands")),
        )
        for phase in recipe.phases
    )
    recipe = recipe.replace(phases=phases, data=recipe.data.replace(sources=tuple(kept)))
    result = pretrain(recipe, tmp_path / "out")["result"]
    assert [phase["name"] for phase in result["phases"]] == ["pretraining", "longer context", "decay"]
    assert result["packing"] > 0.99
    held_out = [loss for _, loss in result["curves"]["held_out_loss"]]
    assert held_out[-1] < held_out[0] < 9.1
