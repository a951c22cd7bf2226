"""How fast a machine encodes and indexes: as it was measured, or as a device's arithmetic lets expect.

Measured rates come from ``quiver bench encoder --json`` (tokens a second by length) and ``quiver bench index --json`` (seconds of a build),
or from this machine (`quiver.retrieval.planning.measuring`). Their files are read here by their fields: who wrote them is not imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quiver.encoder import EncoderConfig
from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json

SCHEMA = "quiver-benchmark/1"
"""``schema`` of the files that rates are read from."""

OWN = "quiver"

DEVICES = {"h200": 989.0, "h100": 989.0, "a100": 312.0, "l40s": 362.0, "l4": 121.0, "rtx4090": 165.0}
"""GPU -> tera floating-point operations a second in bfloat16, dense, with float32 sums.

Source: NVIDIA's data sheets (H100 and H200 SXM, A100, L40S, L4) and the Ada architecture's white paper (RTX 4090).
"""

UTILISATION = 0.3
"""Share of that which an encoder reaches with full batches, where nothing was measured: the guess of this file."""


@dataclass(frozen=True)
class Rates:
    """What is known of a machine's speed.

    Attributes:
        tokens_per_second: Of the encoder on texts of the corpus's length; None where unknown.
        index_seconds: Of writing a vector into the index; None where unknown.
        train_seconds: Of training the codec, for each of its sample's vectors and each list; None where unknown.
        measured: False where the encoder's rate is an estimate.
        source: Where they are from.
    """

    tokens_per_second: float | None = None
    index_seconds: float | None = None
    train_seconds: float | None = None
    measured: bool = True
    source: str = ""

    def filled(self, other: Rates) -> Rates:
        """What this one does not know, from another."""
        known = self.tokens_per_second is not None
        return Rates(
            self.tokens_per_second if known else other.tokens_per_second,
            self.index_seconds if self.index_seconds is not None else other.index_seconds,
            self.train_seconds if self.train_seconds is not None else other.train_seconds,
            self.measured if known else other.measured,
            "; ".join(filter(None, dict.fromkeys((self.source, other.source)))),
        )


def read_rates(paths: Sequence[Path], *, tokens: float, kind: str) -> Rates:
    """Rates from files of benchmarks.

    Args:
        paths: Files of ``quiver bench encoder --json`` and ``quiver bench index --json``, or their results.json.
        tokens: Of a document on average: the set of texts of the nearest length is taken.
        kind: ``dense`` or ``colbert``: builds of the other kind say nothing.

    Raises:
        InputError: A file cannot be read, or is neither.
    """
    rates = Rates()
    for path in paths:
        content = read_json(path)
        try:
            if content["schema"] != SCHEMA:
                raise ValueError(f"the schema is {content['schema']!r}, not {SCHEMA!r}")
            found = READERS[content["subject"]](content, tokens, kind)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise InputError(f"{path}: not what quiver bench encoder --json or quiver bench index --json writes ({error!r})") from error
        rates = rates.filled(replace(found, source=f"{path.name}: {found.source}"))
    return rates


def _encoder(content: dict[str, Any], tokens: float, kind: str) -> Rates:
    del kind
    speeds = {
        case["name"]: row["series"].get("tokens_per_second") for case in content["cases"] for row in case["rows"] if row["backend"] == OWN
    }
    lengths = {case["name"]: case["facts"]["tokens"] / case["facts"]["documents"] for case in content["cases"] if speeds.get(case["name"])}
    chosen = min(lengths, key=lambda name: abs(lengths[name] - tokens))
    source = f"{content['name']} on {content['processor']}, {chosen}, {lengths[chosen]:.0f} tokens per document"
    return Rates(tokens_per_second=float(speeds[chosen]["median"]), source=source)


def _index(content: dict[str, Any], tokens: float, kind: str) -> Rates:
    del tokens
    builds = next(case["rows"] for case in content["cases"] if case["name"] == "build")
    ours = [row for row in builds if row["values"]["library"] == OWN]
    if content["facts"]["kind"] != kind or not ours:
        raise ValueError(f"no build of an index of {kind} vectors")
    # A build with a codec says more of large ones than an exact one, which only copies.
    slowest = max(ours, key=lambda row: float(row["values"]["seconds"]))
    vectors = int(content["facts"]["vectors"])
    source = f"{slowest['backend']} of {vectors:,} vectors on {content['processor']}"
    return Rates(index_seconds=float(slowest["values"]["seconds"]) / vectors, source=source)


READERS = {"encoder": _encoder, "index": _index}
"""Subject of a benchmark -> function that reads its rates."""


def estimated(config: EncoderConfig, device: str, *, tokens: float) -> Rates:
    """What a GPU should reach: its arithmetic, the share of it that encoders reach, the operations of a token.

    Args:
        config: The encoder's architecture.
        device: A key of `DEVICES`.
        tokens: Of a document on average; attention grows with it.

    Raises:
        InputError: There is no such device.
    """
    if device not in DEVICES:
        raise InputError(f"--gpu must be one of {', '.join(DEVICES)}, got {device!r}; or measure, with --measure or --rates")
    speed = DEVICES[device] * 1e12 * UTILISATION / operations(config, tokens)
    return Rates(tokens_per_second=speed, measured=False, source=f"{device}: {DEVICES[device]:.0f} TFLOP/s, {UTILISATION:.0%} of it")


def operations(config: EncoderConfig, tokens: float) -> float:
    """Floating-point operations of a token's way through an encoder: two a weight of its matrices, and attention's two products.

    Example:
        >>> from quiver.encoder import preset
        >>> round(operations(preset("bert-base"), 128) / 1e6)
        175
    """
    width, inner = config.hidden_size, config.intermediate_size
    matrices = 4 * width * width + (3 if config.mlp == "gated" else 2) * width * inner
    seen = [tokens if window is None else min(tokens, window + 1) for window in map(config.layer_window, range(config.num_layers))]
    return sum(2 * matrices + 4 * width * each for each in seen)
