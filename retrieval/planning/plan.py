"""A plan: the figures of an index before it is built, each by a formula of `FORMULAS`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from quiver.encoder import EncoderConfig
from quiver.retrieval.index.engines import Setting
from quiver.retrieval.planning.corpora import Corpus
from quiver.retrieval.planning.footprint import Footprint, footprint
from quiver.retrieval.planning.rates import Rates
from quiver.retrieval.records import ModelCard

FORMULAS = {
    "tokens": "documents x tokens of a document after truncation. From a sample: counted by the model's tokenizer. From words: "
    "E[min(X, L)] for a log-normal X of mean 1.35 words + 2 and deviation 0.5 of its logarithm, cut at the model's length L",
    "vectors": "documents (bi-encoder); tokens x share that is no punctuation / pool_factor (ColBERT)",
    "encoding hours": "tokens / tokens a second / 3600 / devices; the rate is that of texts of this length",
    "indexing hours": "(vectors x seconds a vector + training) / 3600 on one machine; "
    "training = seconds a vector and list x sample x lists",
    "disk": "codes or vectors + codec + ids (28 bytes and the id a document) + texts (8 bytes and the line a document). A vector takes "
    "4d (exact), d/dsub/2 + d bits/8 + 4 [+ 2] (pq-dense, [ivf-dense]), d/8 + 2 + d bits/8 + 2 (ivf-tokens); see "
    "quiver.retrieval.planning.footprint",
    "memory to build": "model + the larger of the training sample twice over and a merge (256 bytes + 12 ids a document + 3 codecs + "
    "8 blocks), which the budget cuts into segments",
    "memory to search": "model + lists made in memory (codes + 8 bytes a vector, 16 places a list unused) + codes in mapped files + ids; "
    "less is enough where the disk is fast, the lists must fit",
    "shards": "ceil((lists + codes + ids) / (0.9 memory of a machine - model))",
    "cost": "tokens / tokens a second / 3600 x price of a device hour",
}
"""Figure -> its formula."""

# Of a machine's memory the system takes so much.
_SYSTEM = 0.1


@dataclass(frozen=True)
class ModelSize:
    """The model as a plan sees it.

    Attributes:
        name: Folder, hub id or preset.
        card: Kind, width, lengths.
        parameters: Weights of its encoder.
        bytes: Of them in memory.
    """

    name: str
    card: ModelCard
    parameters: int
    bytes: int


@dataclass(frozen=True)
class Machine:
    """What the index is built and searched on.

    Attributes:
        memory: Bytes of one that searches.
        build_memory: Budget of a build beside the model.
        devices: That encode side by side.
        price: Of a device's hour; None where nobody pays.
    """

    memory: int = 64 << 30
    build_memory: int = 2 << 30
    devices: int = 1
    price: float | None = None


@dataclass(frozen=True)
class Plan:
    """What an index will take.

    Attributes:
        corpus: The documents.
        model: The model.
        tokens: Of all documents.
        index: Bytes by part.
        rates: What hours are computed from.
        encoding_hours: Wall clock of encoding; None where no rate is known.
        indexing_hours: Of training and writing; None where no rate is known.
        build_memory: Bytes of the building process, model included.
        search_memory: Bytes of all searching processes, the model once.
        shards: Machines that hold the index in memory.
        cost: Of encoding; None without a price or a rate.
    """

    corpus: Corpus
    model: ModelSize
    tokens: int
    index: Footprint
    rates: Rates
    encoding_hours: float | None
    indexing_hours: float | None
    build_memory: float
    search_memory: float
    shards: int
    cost: float | None

    def to_json(self) -> dict[str, Any]:
        """All fields, with the sums of the index's parts."""
        content = asdict(self)
        content["index"] |= {"disk": self.index.disk, "search": self.index.search}
        return content


def matrix_weights(config: EncoderConfig) -> int:
    """Weights of an encoder of which there is only the architecture: embeddings and matrices, norms and biases left out.

    Example:
        >>> from quiver.encoder import preset
        >>> round(matrix_weights(preset("modernbert-base")) / 1e6)
        149
    """
    width, inner = config.hidden_size, config.intermediate_size
    block = 4 * width * width + (3 if config.mlp == "gated" else 2) * width * inner
    rows = config.vocab_size + (config.max_positions if config.positions == "absolute" else 0)
    return rows * width + config.num_layers * block


def make_plan(
    corpus: Corpus,
    model: ModelSize,
    machine: Machine,
    rates: Rates,
    *,
    engine: str = "auto",
    settings: Mapping[str, Setting] | None = None,
    texts: bool = True,
) -> Plan:
    """The figures of an index.

    Args:
        corpus: The documents.
        model: Encodes them.
        machine: Where.
        rates: How fast.
        engine: How vectors are kept.
        settings: Of the engine.
        texts: Texts are stored.

    Raises:
        InputError: The engine or a setting is wrong.
    """
    index = footprint(corpus, model.card, name=engine, settings=settings, memory=machine.build_memory, texts=texts)
    tokens = round(corpus.documents * corpus.tokens)
    device_hours = None if rates.tokens_per_second is None else tokens / rates.tokens_per_second / 3600
    indexing = None
    if rates.index_seconds is not None:
        training = (rates.train_seconds or 0) * index.sample * max(1, index.lists)
        indexing = (index.vectors * rates.index_seconds + training) / 3600
    room = max(1.0, (1 - _SYSTEM) * machine.memory - model.bytes)
    return Plan(
        corpus=corpus,
        model=model,
        tokens=tokens,
        index=index,
        rates=rates,
        encoding_hours=None if device_hours is None else device_hours / machine.devices,
        indexing_hours=indexing,
        build_memory=model.bytes + index.build_peak,
        search_memory=model.bytes + index.search,
        shards=max(1, math.ceil(index.search / room)),
        cost=None if device_hours is None or machine.price is None else device_hours * machine.price,
    )
