"""How an index is built."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from quiver.encoder.errors import InputError
from quiver.retrieval.index.engines import Setting


@dataclass(frozen=True)
class BuildOptions:
    """How an index is built.

    Attributes:
        engine: ``auto``, which suits the number of documents, ``exact``, or an engine by name, with settings as in ``ivf-dense:nlist=64``;
            see `quiver.retrieval.index.engine_table.parse_engine`.
        settings: The engine's settings; what is not named is chosen from the size of the corpus.
        seed: Of all that is random: equal documents, model, options and seed give equal segments, byte by byte.
        memory: Bytes that building may hold beside the model and one chunk of documents.
        use_title: Whether titles are put before the texts.
        store_text: Whether the texts are kept in the index, so that hits can be shown.
        fields: The fields of the metadata that can be filtered by, each of which a document must have; None for all. A field of a nested
            object has the names of both with a dot between.
        calibrate: Whether the recall and latency of its search are measured in the end (`retrieval.index.calibration`), where its engine
            is not exact; see `quiver.retrieval.index.calibration.allowed_seconds` for the time it takes.
        threads: Threads that each worker encodes with; None for those of this process, shared out among the workers that run on its
            machine. A build that goes on keeps the number that it was begun with. Vectors made with another number may differ in the
            last bit where a library adds up in another order.
    """

    engine: str = "auto"
    settings: Mapping[str, Setting] = field(default_factory=dict)
    seed: int = 0
    memory: int = 2 << 30
    use_title: bool = True
    store_text: bool = True
    fields: Sequence[str] | None = None
    calibrate: bool = True
    threads: int | None = None

    def check_fields(self, there: Collection[str]) -> None:
        """Refuse fields to filter by that no document has.

        Args:
            there: Names of all fields of the documents.

        Raises:
            InputError: A field is not among them.
        """
        missing = [name for name in self.fields or () if name not in there]
        if missing:
            known = f"the documents have {', '.join(sorted(there))}" if there else "they have none"
            raise InputError(f"no document has the field {', '.join(map(repr, missing))} to filter by; {known}")


DEFAULTS = BuildOptions()
"""How an index is built if nobody says otherwise."""
