"""The run itself: sentence-transformers' trainer with the native first module.

Importing this module imports sentence-transformers, transformers and datasets (extra ``train``).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Normalize, Pooling
from sentence_transformers.training_args import BatchSamplers
from sentence_transformers.util import cos_sim, dot_score
from torch import nn
from transformers import PrinterCallback, TrainerCallback

from encoder import InputError
from retrieval.biencoder import BiEncoder
from retrieval.progress import progress_bar
from retrieval.training.data import column_prompts
from retrieval.training.native import NativeTransformer
from retrieval.training.recipe import LossSection, Recipe

logger = logging.getLogger(__name__)

SIMILARITIES = {"cosine": cos_sim, "dot": dot_score}
"""Name in a checkpoint -> the function that a loss compares vectors by; it must be the one they are searched by."""

LOSSES: dict[str, Callable[[SentenceTransformer, LossSection], nn.Module]] = {
    "mnrl": lambda model, section: MultipleNegativesRankingLoss(
        model, scale=section.scale, similarity_fct=SIMILARITIES[model.similarity_fn_name]
    ),
}
"""The losses a recipe may name."""


class Watch(TrainerCallback):  # type: ignore[misc]  # the library is untyped
    """Collects the logged losses, moves the bar, and stops at the first loss that is not finite."""

    def __init__(self, losses: list[tuple[int, float]], advance: Callable[[int], None]) -> None:
        self.losses = losses
        self.advance = advance

    def on_step_end(self, args: object, state: object, control: object, **others: object) -> None:
        """One step more."""
        del args, state, control, others
        self.advance(1)

    def on_log(self, args: object, state: Any, control: object, logs: dict[str, float] | None = None, **others: object) -> None:
        """Keep the loss, or stop."""
        del args, control, others
        loss = (logs or {}).get("loss")
        if loss is None:
            return
        if not math.isfinite(loss):
            raise InputError(f"the loss is {loss} at step {state.global_step}: lower training.learning_rate or check the data")
        self.losses.append((state.global_step, float(loss)))


def sentence_transformer(model: BiEncoder) -> SentenceTransformer:
    """The same weights as a sentence-transformers model whose first module is native."""
    first = NativeTransformer(model.encoder, model.tokenizer, max_seq_length=model.max_length, do_lower_case=model.settings.lower_case)
    pooling = Pooling(
        first.get_word_embedding_dimension(), pooling_mode=model.settings.pooling, include_prompt=model.settings.include_prompt
    )
    modules = [first, pooling, *([Normalize()] if model.settings.normalize else [])]
    prompts = {"query": model.settings.query_prompt, "document": model.settings.document_prompt}
    return SentenceTransformer(
        modules=modules, prompts=prompts, similarity_fn_name=model.settings.similarity, device=str(model.encoder.device)
    )


def run(
    recipe: Recipe,
    rows: Sequence[dict[str, str]],
    model: BiEncoder,
    work: Path,
    *,
    steps: int,
    history: list[tuple[int, float]],
    progress: bool,
) -> int:
    """Train ``model``'s encoder in place; the number of steps done.

    Args:
        recipe: Loss and optimisation.
        rows: Training texts.
        model: Whose encoder is trained.
        work: Folder the trainer may write to.
        steps: Optimiser steps.
        history: Takes (step, loss).
        progress: Show a bar with the remaining time.

    Raises:
        InputError: Not one batch could be filled, or the loss is not finite.
    """
    settings = recipe.training
    student = sentence_transformer(model)
    prompts = column_prompts(query=model.settings.query_prompt, document=model.settings.document_prompt)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(work),
        max_steps=steps,
        per_device_train_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        warmup_steps=math.ceil(steps * settings.warmup_ratio),
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        lr_scheduler_type=settings.scheduler,
        bf16=settings.precision == "bf16",
        seed=settings.seed,
        data_seed=settings.seed,
        batch_sampler=BatchSamplers.NO_DUPLICATES if settings.no_duplicates else BatchSamplers.BATCH_SAMPLER,
        prompts={name: prompt for name, prompt in prompts.items() if prompt and name in rows[0]} or None,
        dataloader_drop_last=True,  # a short last batch would have fewer negatives
        logging_steps=settings.log_every,
        save_strategy="no",
        report_to="none",
        logging_nan_inf_filter=False,  # by default the trainer logs a plausible number in place of NaN
        disable_tqdm=True,
        use_cpu=model.encoder.device.type == "cpu",
    )
    # DataParallel would give every device a batch of its own, and the run would not be the one that its record describes.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    # A card that has examples is not given any: the library would draw a bar of its own to choose them.
    student.model_card_data.widget = [{"text": ""}]
    with progress_bar("training steps", steps, enabled=progress) as advance:
        trainer = SentenceTransformerTrainer(
            model=student,
            args=arguments,
            train_dataset=Dataset.from_list(list(rows)),
            loss=LOSSES[recipe.loss.name](student, recipe.loss),
            callbacks=[Watch(history, advance)],
        )
        trainer.remove_callback(PrinterCallback)  # standard output is the command's
        # The collator does not count a closing special token as part of a prompt, and asks a transformers tokenizer for them.
        trainer.data_collator.all_special_ids = {model.tokenizer.special_id("sep")}
        trainer.train()
    return _checked(int(trainer.state.global_step), steps, recipe, len(rows))


def _checked(done: int, planned: int, recipe: Recipe, rows: int) -> int:
    """The steps done, unless there were none; batches without duplicates may run out before the rows do."""
    remedy = "lower training.batch_size, remove repeated rows, or set training.no_duplicates to false"
    if done == 0:
        raise InputError(f"data.train: {rows} rows do not fill one batch of {recipe.training.batch_size} without a repeated text; {remedy}")
    if done < planned:
        logger.warning("%d of %d planned steps were done: too many rows repeat a text of their batch; %s", done, planned, remedy)
    return done
