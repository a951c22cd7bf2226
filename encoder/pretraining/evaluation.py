"""The held-out loss: the same tokens under the same masks every time, so that two of them can be compared.

Source: the release of ModernBERT evaluates at 15% where it trains at 30%.
"""

from __future__ import annotations

import torch

from quiver.encoder.heads import MaskedLM
from quiver.encoder.pretraining.corpus import Documents
from quiver.encoder.pretraining.masking import Masker
from quiver.encoder.pretraining.sections import PhaseSection, PretrainingRecipe
from quiver.encoder.pretraining.stream import RowMaker, held_out_rows
from quiver.encoder.tokenizer import Tokenizer
from quiver.encoder.training.processes import Processes
from quiver.encoder.training.update import casting


class HeldOut:
    """The held-out documents of a run as a phase reads them.

    Args:
        recipe: Its seed, share of asked tokens and precision.
        phase: Its context and micro-batch.
        documents: At least one.
        tokenizer: Of the model.
        processes: Each takes its part of the rows.
    """

    def __init__(
        self, recipe: PretrainingRecipe, phase: PhaseSection, documents: Documents, tokenizer: Tokenizer, processes: Processes
    ) -> None:
        training = recipe.training
        masker = Masker(tokenizer, probability=training.held_out_mask_probability, seed=training.seed)
        rows = held_out_rows(documents, phase, longest=recipe.phases[-1].context, most=recipe.data.held_out_tokens)
        make = RowMaker(documents, tokenizer, masker)
        self._rows = [make(row) for row in rows[processes.rank :: processes.size]]
        self._precision = training.precision
        self._processes = processes

    @torch.no_grad()
    def loss(self, model: MaskedLM) -> float:
        """Mean cross entropy over the asked tokens; the model is in training mode before and after."""
        model.eval()
        total, asked = 0.0, 0
        for row in self._rows:
            with casting(self._precision, model.encoder.device):
                total += float(model(row.batch, row.labels).loss) * row.asked
            asked += row.asked
        model.train()
        [total, count] = self._processes.sum([total, asked])
        return total / max(1.0, count)
