"""Schedules against transformers, and the order of batches against the sampler of sentence-transformers."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn

from quiver.retrieval.training.dataloader import BatchOrder
from quiver.retrieval.training.recipe import TrainingSection
from quiver.retrieval.training.state import learning_rate_share, make_optimizer, warmup_steps

transformers = pytest.importorskip("transformers")
sentence_transformers = pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.parity


def section(scheduler: str, warmup: float) -> TrainingSection:
    return TrainingSection(
        epochs=1,
        batch_size=2,
        learning_rate=3e-4,
        warmup_ratio=warmup,
        weight_decay=0.01,
        max_grad_norm=1,
        seed=1,
        dtype="float32",
        scheduler=scheduler,  # type: ignore[arg-type]
        no_duplicates=False,
        log_every=1,
    )


@pytest.mark.parametrize("warmup", [0, 0.05, 0.1, 0.33, 1])
@pytest.mark.parametrize(("ours", "theirs"), [("linear", "linear"), ("cosine", "cosine"), ("constant", "constant_with_warmup")])
def test_schedules_are_those_of_transformers(ours: str, theirs: str, warmup: float, tmp_path: Path) -> None:
    for steps in (1, 7, 60, 140):
        training = section(ours, warmup)
        arguments = transformers.TrainingArguments(output_dir=str(tmp_path), warmup_steps=warmup if warmup < 1 else steps, use_cpu=True)
        assert arguments.get_warmup_steps(steps) == warmup_steps(training, steps)
        plain = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=3e-4)
        schedule = transformers.get_scheduler(theirs, plain, num_warmup_steps=arguments.get_warmup_steps(steps), num_training_steps=steps)
        optimizer, own = make_optimizer(training, nn.Linear(2, 2).named_parameters(), steps)
        for update in range(steps):
            assert own.get_last_lr() == pytest.approx(schedule.get_last_lr() * 2, rel=1e-12)
            assert 3e-4 * learning_rate_share(training, update, steps) == pytest.approx(schedule.get_last_lr()[0], rel=1e-12)
            for one in (plain, optimizer, schedule, own):
                one.step()


def test_batches_without_duplicates_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    from sentence_transformers.sampler import NoDuplicatesBatchSampler

    from quiver.retrieval.data.docstrings import Pair
    from quiver.retrieval.training.data import rows_of_pairs

    draw = random.Random(4)
    pairs = [Pair(str(place), f"query {draw.randrange(60)}", f"answer {draw.randrange(90)}", "", "", 1) for place in range(150)]
    rows = rows_of_pairs(pairs, tmp_path)
    ours = BatchOrder(rows, size=8, seed=5, no_duplicates=True)
    from datasets import Dataset

    theirs = NoDuplicatesBatchSampler(Dataset.from_list(list(rows)), batch_size=8, drop_last=True, generator=torch.Generator(), seed=5)
    for epoch in range(3):
        theirs.set_epoch(epoch)
        expected = [list(batch) for batch in theirs]
        assert len(expected) >= 12
        found = [batch.rows for batch in islice(ours.batches(), 60) if batch.epoch == epoch]
        assert found == expected
