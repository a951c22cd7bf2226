"""All columns of a batch through the encoder in one pass: queries, positives and negatives side by side.

The libraries' losses call the model once a column. Packed, a column costs its tokens whatever else is in the batch, so one pass
over all of them gives the same vectors, and lays out each matrix and sums its gradient once instead of once a column.

Importing this module imports sentence-transformers (extra ``train``).

Shapes: N packed tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from quiver.encoder import Encoder, PackedBatch
from quiver.encoder.packing import concatenate
from quiver.retrieval.training.student.native import COLUMNS, pack_features


class Columns:
    """Some batches of texts that are encoded together when the first of them is asked for.

    Args:
        batches: One a column.
    """

    def __init__(self, batches: Sequence[PackedBatch]) -> None:
        self._batches = batches
        self._hidden: Sequence[Tensor] = ()

    def encoded(self, place: int, encoder: Encoder) -> tuple[Tensor, PackedBatch]:
        """A column's hidden states, (N, D), and their batch."""
        if not self._hidden:
            self._hidden = encoder(concatenate(self._batches)).split([batch.num_tokens for batch in self._batches])
        return self._hidden[place], self._batches[place]


class OnePass(nn.Module):
    """A loss whose columns are encoded together; only for losses that call the model exactly once a column, in their order.

    Args:
        model: The library's, whose first module is a `quiver.retrieval.training.student.native.NativeTransformer`.
        loss: Around ``model``.
    """

    def __init__(self, model: SentenceTransformer, loss: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, sentence_features: Sequence[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch; arguments as the trainer gives them."""
        batches = [pack_features(features) for features in sentence_features]
        # On a GPU tokens that only read would take the others' fast attention away.
        together = batches[0].ids.device.type == "cpu" or all(batch.key_lengths is None for batch in batches)
        if len(batches) > 1 and together:
            columns = Columns(batches)
            sentence_features = [{**features, COLUMNS: partial(columns.encoded, place)} for place, features in enumerate(sentence_features)]
        loss: Tensor = self.loss(sentence_features, labels)
        return loss
