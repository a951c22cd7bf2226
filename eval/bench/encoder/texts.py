"""Texts through a bi-encoder, tokenising included: Quiver beside sentence-transformers on its backends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quiver.encoder.errors import InputError
from quiver.eval.bench.encoder.benchmark import add_memory, check_settings, choose, load_average, origin, processor
from quiver.eval.bench.encoder.children import ChildModel
from quiver.eval.bench.encoder.results import OWN, EncoderBenchmark, SetTimes, Settings, library_times
from quiver.eval.bench.encoder.rounds import Pass, naming_who_ran_out, time_in_turns, torch_threads
from quiver.eval.bench.encoder.text_libraries import TEXT_LIBRARIES, TEXT_PEERS, Encode, open_biencoder, own_encode
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.encoding import clean
from quiver.retrieval.progress import progress_bar


def bench_texts(
    model: str,
    texts: Sequence[str],
    settings: Settings,
    *,
    name: str = "texts",
    peers: Sequence[str] | None = None,
    command: str | None = None,
    progress: bool = False,
) -> EncoderBenchmark:
    """Time the encoding of documents by Quiver and by its peers, each at its own default batch size.

    Args:
        model: Folder or hub id of a bi-encoder.
        texts: Documents.
        settings: How to run.
        name: What the set of texts is called.
        peers: Names in `TEXT_LIBRARIES`; None for every peer that can run.
        command: The command line to record.
        progress: Show bars on standard error.

    Returns:
        What was found, in one set; Quiver is its first library.

    Raises:
        InputError: No texts, settings that are for token ids, an unknown peer or one that cannot run, or a model that is no bi-encoder.
    """
    check_settings(settings)
    _check(texts, settings)
    load = load_average()
    batch = list(texts)
    with torch_threads(settings.threads):
        own = open_biencoder(model, settings)
        names, not_run = choose(peers, TEXT_LIBRARIES, TEXT_PEERS, lambda peer: TEXT_LIBRARIES[peer].unsupported_reason(settings))
        encoders = {each: own_encode(own) if each == OWN else TEXT_LIBRARIES[each].load(model, settings, batch) for each in names}
        times = _time_texts(name, own, encoders, batch, settings, progress=progress)
        provenance, config, parameters = origin(command), own.encoder.config, own.encoder.num_parameters
        del own, encoders
        if settings.memory:
            (times,), failed = add_memory(
                [times], [{"texts": batch}], lambda each: ChildModel("texts", each, model, settings, batch), progress=progress
            )
            not_run += failed
    return EncoderBenchmark(
        model=model,
        family=config.family,
        parameters=parameters,
        settings=settings,
        sets=(times,),
        largest_batches=(),
        not_run=tuple(not_run),
        processor=processor(settings.device),
        load_average=load,
        provenance=provenance,
    )


def _check(texts: Sequence[str], settings: Settings) -> None:
    if not texts:
        raise InputError("there is nothing to encode: the list of texts is empty")
    for option, given in (
        ("--train", settings.train),
        ("--largest-batch", settings.largest_batch),
        ("--batch-size", settings.batch_size),
        ("--batch-tokens", settings.batch_tokens),
    ):
        if given:
            raise InputError(
                f"{option} is for sets of token ids; with texts every library forms its own batches; leave --data or {option} away"
            )


def _time_texts(
    name: str, own: BiEncoder, encoders: dict[str, Encode], batch: list[str], settings: Settings, *, progress: bool
) -> SetTimes:
    prompt = own.settings.document_prompt
    lengths = [
        len(ids)
        for ids in own.tokenizer.encode(clean(batch, prompt=prompt, lower_case=own.settings.lower_case), max_length=own.max_length).ids
    ]
    with progress_bar("timing", len(encoders) * (settings.rounds + 1), enabled=progress) as advance:
        # Everyone's first round warms up and gives the vectors.
        vectors = {}
        for library, encode in encoders.items():
            with naming_who_ran_out(library, name):
                vectors[library] = encode(batch)
            advance(1)
        seconds = time_in_turns(
            {library: _pass(encode, batch) for library, encode in encoders.items()}, rounds=settings.rounds, advance=advance
        )
    differences = {library: float(np.abs(each - vectors[OWN]).max()) for library, each in vectors.items()}
    return SetTimes(
        name=name,
        documents=len(batch),
        tokens=sum(lengths),
        shortest=min(lengths),
        longest=max(lengths),
        batch_documents=None,
        libraries=library_times(seconds, sum(lengths), differences=differences, gradients=None),
    )


def _pass(encode: Encode, batch: list[str]) -> Pass:
    def run() -> None:
        encode(batch)

    return run
