"""Fine-tuning a model to answer with spans, by recipe: AdamW, a rise and a fall in a line, windows in packed batches.

The folder of a run:
  model/                weights with their head, tokenizer
  run.json              the recipe, the data's hashes, counts, losses, time
  results.json          the scores of its test, see `eval.nlu.qa_results`
  predictions.json      its answers

Shapes: B windows, N tokens in the batch.
Source: BERT, arXiv:1810.04805, section 4.2 and appendix A.3.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from encoder.data_files import file_sha256
from encoder.errors import InputError
from encoder.files import write_json
from encoder.head_checkpoint import load_span_qa, save_span_qa
from encoder.heads import SpanQA
from encoder.hub import local_folder
from encoder.packing import pack_ids
from encoder.position_extension import extend_positions
from encoder.running.bar import training_bar
from encoder.running.lock import alone
from encoder.running.random_state import seed_random
from encoder.tokens import Tokenizer
from eval.nlu.answering import answer_questions
from eval.nlu.qa_recipe import QaDataSection, QaRecipe, QaTrainingSection
from eval.nlu.qa_results import QaResults, answer_texts, score_predictions, write_qa_results
from eval.nlu.questions import Question, read_questions, read_split
from eval.nlu.windows import NOWHERE, LabelledWindow, check_settings, labelled_windows
from retrieval.model_folder import read_model_folder
from retrieval.versions import installed_version

logger = logging.getLogger(__name__)

SCHEMA = "quiver-qa-run/1"
RUN, MODEL = "run.json", "model"

TYPES = "token_type_ids"
INPUTS = ["input_ids", "attention_mask"]
"""What transformers hands to a model; by default it hands `TYPES` too."""


@dataclass(frozen=True)
class Trained:
    """What `train_windows` did.

    Attributes:
        steps: Updates.
        losses: (update, mean loss since the one before), every so many updates.
        tokens: That went through the model.
        seconds: It took.
    """

    steps: int
    losses: list[tuple[int, float]]
    tokens: int
    seconds: float


def train_qa(recipe: QaRecipe, out: Path, *, overwrite: bool = False, progress: bool = False) -> QaResults:
    """Follow a recipe: train, save the model, answer the test, write the scores.

    Args:
        recipe: What to do.
        out: Folder of the run; made if it is not there.
        overwrite: Train anew where a run has been.
        progress: Show bars on standard error.

    Raises:
        InputError: Data or model cannot be read, do not fit the recipe or each other, ``out`` holds something, or a loss is not finite.
    """
    _check_target(out, overwrite=overwrite)
    train, test = read_sets(recipe.data)
    seed_random(recipe.training.seed)
    model, tokenizer = open_span_qa(recipe.model.init, seed=recipe.training.seed, extend=recipe.model.extend_positions)
    check_settings(recipe.windows, tokenizer, positions=model.encoder.config.max_positions)
    windows = list(labelled_windows(train, tokenizer, recipe.windows))
    if not any(one.start != NOWHERE for one in windows):
        raise InputError(f"{recipe.data.train}: no question has an answer that stands in a window; there is nothing to learn")
    if torch.cuda.is_available():
        model.to("cuda")
    with alone(out):
        trained = train_windows(model, windows, recipe.training, progress=progress)
        save_qa_model(model, tokenizer, out / MODEL)
        may_have_none = recipe.data.official == "squad_v2"
        predictions = answer_questions(model, tokenizer, test, recipe.windows, may_have_none=may_have_none, progress=progress)
        results = score_predictions(test, predictions, tokenizer, recipe.data.official)
        made_with = {"model": str(out / MODEL), "data": asdict(recipe.data), "settings": asdict(recipe.windows)}
        write_qa_results(out, results, answer_texts(test, predictions), made_with=made_with)
        counts = {"questions": len(train), "windows": len(windows), "with_answer": sum(one.start != NOWHERE for one in windows)}
        write_json(out / RUN, _record(recipe) | {"train": counts, "result": asdict(trained)})
    return results


def _record(recipe: QaRecipe) -> dict[str, Any]:
    """What a run was made with."""
    files = dict.fromkeys((recipe.data.train, recipe.data.test))
    return {
        "schema": SCHEMA,
        "recipe": asdict(recipe),
        "sha256": {path: file_sha256(Path(path)) for path in files},
        "versions": {name: installed_version(name) for name in ("quiver-retrieval", "torch", "tokenizers")},
    }


def _check_target(out: Path, *, overwrite: bool) -> None:
    if out.is_dir() and any(out.iterdir()):
        if not (out / RUN).is_file():
            raise InputError(f"{out}: not empty, and not a finished run of quiver qa train; choose another --out")
        if not overwrite:
            raise InputError(f"{out}: holds a run; choose another --out, or --overwrite")


def read_sets(data: QaDataSection) -> tuple[list[Question], list[Question]]:
    """The questions to train on and those of the test.

    Raises:
        InputError: A file is malformed, a question is in both, or one has no answer where the scores know no such questions.
    """
    train, test = (_read(path, split, data) for path, split in ((data.train, data.train_split), (data.test, data.test_split)))
    train = train[: data.limit]
    if shared := {question.id for question in train} & {question.id for question in test}:
        raise InputError(f"{data.test}: {len(shared)} questions of the test are trained on too, {min(shared)!r} among them")
    return train, test


def _read(path: str, split: str | None, data: QaDataSection) -> list[Question]:
    found = read_questions(Path(path), only=None if split is None else read_split(Path(split)))
    if found.misplaced:
        logger.warning("%s: %d answers do not stand where the file says; nothing is trained on those", path, found.misplaced)
    if data.official != "squad_v2":
        check_answerable(found.questions, where=path, official=data.official)
    return found.questions


def check_answerable(questions: Sequence[Question], *, where: str, official: str) -> None:
    """Raise where a question has no answer and the official scores know no such questions.

    Raises:
        InputError: Names the question.
    """
    without = next((question.id for question in questions if not question.answers), None)
    if without is not None:
        raise InputError(f"{where}: question {without!r} has no answer, which {official} does not know; take squad_v2")


def open_span_qa(source: str | Path, *, seed: int | None, extend: int = 1) -> tuple[SpanQA, Tokenizer]:
    """Open a model that answers with spans, or an encoder with a head drawn anew.

    Args:
        source: Folder or hub id; of a model of sentence-transformers the encoder is taken.
        seed: Of what the folder lacks of the head; None: nothing may lack.
        extend: How many times as many absolute positions it gets.

    Raises:
        InputError: It is no model, has no tokenizer, lacks a head, or its positions cannot be extended.
    """
    folder = local_folder(source)
    if (folder / "modules.json").is_file():
        folder = read_model_folder(folder).encoder_folder
    tokenizer = Tokenizer.from_pretrained(folder)
    model = load_span_qa(folder, new_head_seed=seed)
    if extend == 1:
        return model, tokenizer
    longer = SpanQA(
        extend_positions(model.encoder, extend),
        dropout=model.dropout.p,
        transform=None if model.transform is None else model.transform.config,
    )
    head = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("encoder.")}
    longer.load_state_dict(longer.state_dict() | head)
    tokenizer.settings["model_max_length"] = longer.encoder.config.max_positions
    return longer.eval(), tokenizer


def save_qa_model(model: SpanQA, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a model with its tokenizer so that transformers gives the same logits.

    Args:
        model: Its weights are on any device.
        tokenizer: Told that a question and its paragraph have no token types: here all tokens are of the first.
        folder: Made if it is not there.

    Raises:
        InputError: The family's config.json has no words for the head.
    """
    save_span_qa(model, folder)
    tokenizer.settings["model_input_names"] = INPUTS
    tokenizer.save(folder)


def warn_of_token_types(model: SpanQA, tokenizer: Tokenizer, source: str) -> None:
    """Say that a model was trained elsewhere with paragraphs of BERT's second token type, which there is none of here."""
    names = tokenizer.settings.get("model_input_names", [TYPES])
    if model.encoder.config.type_vocab_size > 1 and TYPES in names:
        logger.warning("%s: was trained with two token types, of which the first is used here; its answers may be worse", source)


def train_windows(model: SpanQA, windows: Sequence[LabelledWindow], training: QaTrainingSection, *, progress: bool = False) -> Trained:
    """Train a model on windows, in place.

    Args:
        model: Left in evaluation mode.
        windows: At least one.
        training: Updates, learning rate, order.
        progress: Show a bar on standard error.

    Raises:
        InputError: A loss or gradient is not finite.
    """
    per_epoch = math.ceil(len(windows) / training.batch_size)
    steps = max(1, round(per_epoch * training.epochs))
    warmup = math.ceil(steps * training.warmup_ratio)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = AdamW(
        [
            {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": training.weight_decay},
            {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
        ],
        lr=training.learning_rate,
    )
    schedule = LambdaLR(optimizer, lambda step: (step + 1) / warmup if step < warmup else (steps - step) / max(1, steps - warmup))
    losses: list[tuple[int, float]] = []
    recent: list[float] = []
    tokens, began = 0, time.perf_counter()
    model.train()
    with training_bar(0, steps, enabled=progress) as show:
        for step, members in zip(range(1, steps + 1), _batches(windows, training), strict=False):
            recent.append(_step(model, members, optimizer, training))
            schedule.step()
            tokens += sum(len(one.window.ids) for one in members)
            if step % training.log_every == 0 or step == steps:
                losses.append((step, sum(recent) / len(recent)))
                recent = []
                show(step, {"loss": losses[-1][1], "tokens_per_second": tokens / (time.perf_counter() - began)})
    model.eval()
    return Trained(steps, losses, tokens, time.perf_counter() - began)


def _batches(windows: Sequence[LabelledWindow], training: QaTrainingSection) -> Iterator[list[LabelledWindow]]:
    """Batches without end: every window once an epoch, in an order drawn by seed and epoch."""
    epoch = 0
    while True:
        order = np.random.default_rng([training.seed, epoch]).permutation(len(windows))
        for low in range(0, len(order), training.batch_size):
            yield [windows[place] for place in order[low : low + training.batch_size]]
        epoch += 1


def _step(model: SpanQA, members: Sequence[LabelledWindow], optimizer: AdamW, training: QaTrainingSection) -> float:
    """One update; its loss."""
    batch = pack_ids([one.window.ids for one in members]).to(model.encoder.device)
    starts, ends = torch.tensor([one.start for one in members]), torch.tensor([one.end for one in members])
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(model.encoder.device.type, torch.bfloat16, enabled=training.precision == "bf16"):
        logits = model(batch)
    loss = model.loss(logits, batch, starts, ends)
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm))
    value = loss.item()
    if not math.isfinite(value) or not math.isfinite(norm):
        raise InputError(f"training.learning_rate: loss {value} and gradient norm {norm} are not finite; lower it")
    optimizer.step()
    return value
