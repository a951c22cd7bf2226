"""Training: steps of Quiver beside sentence-transformers (MNRL), PyLate (ColBERT) and transformers (masked language model).

A step is tokenizing, forward, backward, clipping and update. All backends start from the same weights and run the same batches with the
same optimizer in turns; the largest difference of their losses is part of the result.

Synthetic texts have exactly the drawn number of tokens. Their lengths are uniform, so padding costs little; MS MARCO's passages are mostly
short (56 words on average, BEIR, arXiv:2104.08663, Table 1), and padding costs more on them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from quiver.encoder import Encoder, PackedBatch, Tokenizer, init_weights, load_encoder, pack_ids, save_encoder
from quiver.encoder.checkpoints.checkpoint import local_folder
from quiver.encoder.checkpoints.head_checkpoint import load_head, save_head
from quiver.encoder.config import DROPOUTS
from quiver.encoder.errors import InputError
from quiver.encoder.heads import IGNORE_INDEX, MaskedLM, init_head
from quiver.encoder.presets import preset
from quiver.encoder.pretraining.stream import Masker
from quiver.encoder.training.optimization import autocast, training_dtype
from quiver.retrieval.data.corpus import load_collection
from quiver.retrieval.models.pretrained import default_device, read_model_folder
from quiver.retrieval.training.dataloader import TEXTS, Collator
from quiver.retrieval.training.losses import LOSSES as LIBRARY_LOSSES
from quiver.retrieval.training.losses import RetrievalLoss
from quiver.retrieval.training.model import build_model, require_extra
from quiver.retrieval.training.recipe import LOSSES_BY_KIND, ColBERTSection, DataSection, LossSection, ModelSection, Recipe, TrainingSection
from quiver.retrieval.training.state import make_optimizer

import encoder as encoder_script
import harness
from harness import BACKEND, MEMORY, OWN, RATIO, Column, Results, Row

LIBRARIES = {"dense": "sentence-transformers", "colbert": "pylate", "mlm": "transformers"}
LOSSES = {**LOSSES_BY_KIND, "mlm": ("masked_lm",)}
SCORED = ("margin_mse", "kl", "distillation")
MASKED = 0.3  # ModernBERT, arXiv:2412.13663, section 2.2.2
PRESET_VOCABULARY = 1_024  # trained for a preset, which has no tokenizer; the embedding keeps its size
ENGLISH = (
    "time year people way day man thing woman life child world school state family student group country problem hand part place case "
    "week company system program question work government number night point home water room mother area money story fact month lot "
    "right study book eye job word business issue side kind head house service friend father power hour game line end member law car "
    "city community name president team minute idea body information back parent face others level office door health person art war "
    "history party result change morning reason research girl guy moment air teacher force education"
)
COLUMNS = (
    BACKEND,
    Column("ms/step", "seconds", scale=1000),
    Column("tokens/s", "tokens_per_second"),
    RATIO,
    Column("max loss difference", "loss_difference", ".1e"),
    MEMORY,
)


class Workload(NamedTuple):
    """Batches of a case: lengths in tokens (special tokens included), documents per row, rows per batch."""

    name: str
    queries: tuple[int, int]
    documents: tuple[int, int]
    max_length: int
    per_row: int
    rows: int


WORKLOADS = {
    # Triplets, as in the paper's recipe; the longest document has PyLate's default length.
    "msmarco": Workload("msmarco", (8, 20), (20, 180), 180, 2, 32),
    "long": Workload("long", (8, 20), (1_600, 2_048), 2_048, 1, 4),
}


# Texts.


def text_writer(tokenizer: Tokenizer, generator: random.Random) -> Callable[[int], str]:
    """A function that makes a text with a given number of tokens, but at least those of one word."""
    first, *others = ENGLISH.split()
    alone, *pairs = tokenizer.encode([first, *(f"{first} {word}" for word in others)], max_length=64).ids
    words = [word for word, ids in zip(others, pairs, strict=True) if len(ids) == len(alone) + 1]
    if len(words) < 50:
        raise InputError(f"the model's tokenizer has only {len(words)} common English words as single tokens; give texts with --data")
    return lambda tokens: " ".join([first, *generator.choices(words, k=max(0, tokens - len(alone)))])


def synthetic_texts(workload: Workload, tokenizer: Tokenizer, generator: random.Random) -> Iterator[tuple[str, list[str]]]:
    write = text_writer(tokenizer, generator)
    while True:
        documents = [write(generator.randint(*workload.documents)) for _ in range(workload.per_row)]
        yield write(generator.randint(*workload.queries)), documents


def collection_texts(folder: Path, split: str) -> Callable[..., Iterator[tuple[str, list[str]]]]:
    collection = load_collection(folder, split)
    relevant = {query: [document for document, grade in judged.items() if grade > 0] for query, judged in collection.qrels.items()}
    queries = [query for query in collection.queries if relevant[query.id]]

    def rows(workload: Workload, tokenizer: Tokenizer, generator: random.Random) -> Iterator[tuple[str, list[str]]]:
        contents = {document.id: document.content() for document in collection.documents}
        everything = list(contents)
        for query in generator.sample(queries, len(queries)):
            drawn = generator.sample(everything, min(len(everything), workload.per_row + len(relevant[query.id])))
            others = [document for document in drawn if document not in relevant[query.id]]
            yield query.text, [contents[each] for each in [generator.choice(relevant[query.id]), *others][: workload.per_row]]

    return rows


def make_batches(
    workload: Workload, source: Callable[..., Iterator[Any]], tokenizer: Tokenizer, *, count: int, scored: bool, seed: int
) -> Any:
    """Batches of rows ``query``, ``document_1``, ..., and random teacher ``scores`` if the loss needs them."""
    generator = random.Random(seed)
    found = list(islice(source(workload, tokenizer, generator), count * workload.rows))
    if len(found) < count * workload.rows or min(len(documents) for _, documents in found) < workload.per_row:
        raise InputError(f"{workload.name}: {count} batches of {workload.rows} rows need more queries or documents; reduce --rounds")
    rows = []
    for query, documents in found:
        row: dict[str, Any] = {"query": query} | {f"document_{place}": text for place, text in enumerate(documents, start=1)}
        rows.append(row | ({"scores": [generator.uniform(-3, 9) for _ in documents]} if scored else {}))
    return encoder_script.split_batches(rows, workload.rows)


# Backends.


class Backend:
    """A model that is trained one step at a time; ``on_host`` names the tensors of a batch that stay on the host."""

    def __init__(
        self, model: nn.Module, loss: Any, collate: Any, training: TrainingSection, steps: int, on_host: Sequence[str] = ()
    ) -> None:
        self._model, self._loss, self._collate = model.train(), loss, collate
        self._training, self._on_host = training, on_host
        self._device = next(model.parameters()).device
        model.forward = self._in_dtype(model.forward)
        self._optimizer, self._schedule = make_optimizer(training, model.named_parameters(), steps)

    def _in_dtype(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward pass in the dtype of training with float32 results, as the libraries' trainers have it; losses are float32."""

        def run(*args: Any, **settings: Any) -> Any:
            with autocast(self._training.dtype, self._device):
                output = forward(*args, **settings)
            widen = lambda value: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value  # noqa: E731
            return output if self._training.dtype == "float32" else tree_map(widen, output)

        return run

    def step(self, rows: Sequence[Any]) -> float:
        """Train on a batch; returns its loss when the device has finished."""
        batch = {
            key: value.to(self._device) if isinstance(value, Tensor | PackedBatch) and key not in self._on_host else value
            for key, value in self._collate(rows).items()
        }
        loss = self._loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), self._training.max_grad_norm)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        return float(loss.detach())

    def lengths(self, rows: Sequence[Any]) -> list[int]:
        packed = self._collate(rows)[TEXTS]
        return list(packed.key_lengths or packed.lengths)

    def masked_tokens(self, rows: Sequence[Any]) -> int:
        return int((self._collate(rows)["labels"] != IGNORE_INDEX).sum())


def columns_of(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split a library's batch into the features of each column, as its trainer passes them to the loss."""
    prefixes = [name.removesuffix("input_ids") for name in batch if name.endswith("_input_ids")]
    return [{name.removeprefix(prefix): value for name, value in batch.items() if name.startswith(prefix)} for prefix in prefixes]


def load_backend(name: str, kind: str, loss: str, workload: Workload, folder: Path, options: Mapping[str, Any], steps: int) -> Backend:
    """Load ``quiver`` or the library of a kind of model from the folders of `write_models`."""
    # AdamW with linear decay, for all backends.
    fixed = {"epochs": 1, "learning_rate": 2e-5, "warmup_ratio": 0.0, "weight_decay": 0.01, "max_grad_norm": 1.0, "scheduler": "linear"}
    varied = {"batch_size": workload.rows, "seed": options["seed"], "dtype": options["dtype"]}
    training = TrainingSection(**fixed, **varied, no_duplicates=False, log_every=1)
    if kind == "mlm":
        return (load_own_mlm if name == OWN else load_transformers_mlm)(folder, workload, training, steps)
    if kind == "dense":
        options = {"pooling": "mean", "normalize": True, "max_length": workload.max_length}
    else:
        options = {"colbert": ColBERTSection(document_length=workload.max_length)}
    section, data = ModelSection(init=str(folder / "encoder"), **options), DataSection(train=(workload.name,))
    recipe = Recipe(kind=kind, model=section, data=data, loss=LossSection(name=loss), training=training, name="benchmark")
    model = build_model(recipe, [])
    if name == OWN:
        own_loss = RetrievalLoss(recipe, model)
        return Backend(own_loss.model, own_loss, Collator(model, merge_documents=loss == "distillation"), training, steps)
    model.save_pretrained(folder / kind)
    library, collate = (load_sentence_transformers if kind == "dense" else load_pylate)(folder / kind, loss)
    library_loss = LIBRARY_LOSSES[loss](library, recipe.loss)
    return Backend(library, lambda batch: library_loss(columns_of(batch), batch.get("label")), collate, training, steps)


def load_sentence_transformers(folder: Path, loss: str) -> tuple[nn.Module, Any]:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.data_collator import SentenceTransformerDataCollator

    model = SentenceTransformer(str(folder), device=default_device(), model_kwargs={"attn_implementation": "sdpa"})
    name = "preprocess" if hasattr(model, "preprocess") else "tokenize"  # version 6 calls tokenizing preprocessing
    return model, SentenceTransformerDataCollator(**{f"{name}_fn": getattr(model, name)})


def load_pylate(folder: Path, loss: str) -> tuple[nn.Module, Any]:
    from pylate.models import ColBERT
    from pylate.utils import ColBERTCollator

    model = ColBERT(str(folder), device=default_device(), model_kwargs={"attn_implementation": "sdpa"})
    collator = ColBERTCollator(tokenize_fn=model.tokenize)

    def in_lists(row: Mapping[str, Any]) -> dict[str, Any]:
        texts = [text for name, text in row.items() if name.startswith("document_")]
        return {"query": row["query"], "documents": texts, "scores": row["scores"]}

    return model, (lambda rows: collator([in_lists(row) for row in rows])) if loss == "distillation" else collator


def mask_texts(folder: Path, workload: Workload, training: TrainingSection) -> Callable[[Sequence[Any]], tuple[list[Tensor], list[Tensor]]]:
    """A function that tokenizes and masks the documents of rows, the same tokens for every backend."""
    tokenizer = Tokenizer.from_pretrained(folder / "encoder")
    masker = Masker(tokenizer, probability=MASKED, seed=training.seed)

    def mask(rows: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
        texts = [text for row in rows for name, text in row.items() if name.startswith("document_")]
        masked = [masker(np.array(ids), serial) for serial, ids in enumerate(tokenizer.encode(texts, max_length=workload.max_length).ids)]
        return [torch.from_numpy(ids) for ids, _ in masked], [torch.from_numpy(labels) for _, labels in masked]

    return mask


def load_own_mlm(folder: Path, workload: Workload, training: TrainingSection, steps: int) -> Backend:
    mask = mask_texts(folder, workload, training)
    model = load_head(MaskedLM, folder / "mlm", device=default_device())

    def collate(rows: Sequence[Any]) -> dict[str, Any]:
        ids, labels = mask(rows)
        return {TEXTS: pack_ids([each.tolist() for each in ids]), "labels": torch.cat(labels)}

    return Backend(model, lambda batch: model(batch[TEXTS], batch["labels"]).loss, collate, training, steps, on_host=("labels",))


def load_transformers_mlm(folder: Path, workload: Workload, training: TrainingSection, steps: int) -> Backend:
    from transformers import AutoModelForMaskedLM

    mask = mask_texts(folder, workload, training)
    model = AutoModelForMaskedLM.from_pretrained(str(folder / "mlm"), attn_implementation="sdpa").to(default_device())

    def collate(rows: Sequence[Any]) -> dict[str, Any]:
        ids, labels = mask(rows)
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
        return {
            "input_ids": pad(ids, padding_value=model.config.pad_token_id),
            "attention_mask": pad([torch.ones_like(each) for each in ids], padding_value=0),
            "labels": pad(labels, padding_value=IGNORE_INDEX),
        }

    return Backend(model, lambda batch: model(**batch).loss, collate, training, steps)


def open_model(model: str, seed: int) -> tuple[Encoder, Tokenizer]:
    """An encoder and its tokenizer; for a preset random weights, and a small vocabulary for synthetic texts."""
    if "/" in model or Path(model).is_dir():
        folder = read_model_folder(local_folder(model)).encoder_folder
        return load_encoder(folder), Tokenizer.from_pretrained(folder)
    config = preset(model)
    tokenizer = Tokenizer.train([ENGLISH] * 2, vocab_size=min(PRESET_VOCABULARY, config.vocab_size), max_length=config.max_positions)
    ids: dict[str, Any] = {f"{name}_token_id": tokenizer.special_id(name) for name in ("cls", "sep")}
    if config.position_offset == 0:  # RoBERTa counts positions from its padding token
        ids["pad_token_id"] = tokenizer.special_id("pad")
    return init_weights(Encoder(replace(config, **ids)), seed=seed), tokenizer


def write_models(folder: Path, encoder: Encoder, tokenizer: Tokenizer, *, seed: int, mlm: bool = False, dropout: bool = False) -> None:
    """Write the folders that all backends start from: ``encoder``, and ``mlm``, which has a head for masked tokens."""
    if not dropout:
        encoder.config = replace(encoder.config, **dict.fromkeys(DROPOUTS, 0.0))
    save_encoder(encoder, folder / "encoder")
    tokenizer.save(folder / "encoder")
    if mlm:
        model = MaskedLM(encoder)
        init_head(model, seed=seed)
        save_head(model, folder / "mlm")


# Measuring.


def bench_training(
    results: Results,
    model: str,
    workloads: Sequence[Workload],
    losses: Mapping[str, str],
    options: Mapping[str, Any],
    source: Callable[..., Iterator[Any]] = synthetic_texts,
) -> None:
    """Time training steps, one case per workload and kind of model; ``losses`` has the loss of each kind."""
    for kind in losses:
        require_extra(kind)
    with TemporaryDirectory(prefix="quiver-bench-") as temporary:
        folder = Path(temporary)
        encoder, tokenizer = open_model(model, options["seed"])
        reason = encoder_script.refusal("transformers-sdpa", encoder.config, device="cpu", dtype="float32")
        compared = options["baselines"] and reason is None
        if reason is not None:
            results.notes.append(f"other libraries: {reason}")
        longest = encoder.config.max_positions
        write_models(folder, encoder, tokenizer, seed=options["seed"], mlm="mlm" in losses, dropout=options["dropout"])
        del encoder
        for workload, (kind, loss) in product(workloads, losses.items()):
            case, steps = f"{workload.name}, {kind}", options["rounds"] + 1
            if workload.max_length > longest:
                raise InputError(f"{model}: texts of {workload.max_length:,} tokens, the model has {longest:,} positions")
            if case in results.cases:
                continue
            batches = make_batches(workload, source, tokenizer, count=steps, scored=loss in SCORED, seed=options["seed"])
            names = [OWN, LIBRARIES[kind]] if compared else [OWN]
            backends = {name: load_backend(name, kind, loss, workload, folder, options, steps) for name in names}
            rows, tokens = time_steps(case, backends, batches, options)
            documents = "one document" if workload.per_row == 1 else f"{workload.per_row} documents"
            content = documents if kind == "mlm" else f"a query and {documents}"
            title = f"{case} ({loss}): {workload.rows} rows of {content}, {tokens:,.0f} tokens per step"
            results.add(case, title, COLUMNS, rows)


def time_steps(case: str, backends: Mapping[str, Backend], batches: Sequence[Any], options: Mapping[str, Any]) -> tuple[list[Row], float]:
    """Rows of the backends, and the median number of tokens per step; the first batch is the warm-up."""
    found: dict[str, list[float]] = {name: [] for name in backends}
    remaining = {name: iter(batches) for name in backends}
    passes = {name: (lambda name=name, each=each: found[name].append(each.step(next(remaining[name])))) for name, each in backends.items()}
    for warm_up in passes.values():
        warm_up()
    seconds = harness.time_rounds(passes, rounds=options["rounds"], seconds=options.get("seconds"), label=case)
    timed = batches[1 : len(found[OWN])]
    tokens = [sum(backends[OWN].lengths(batch)) for batch in timed]
    rows = []
    for name, taken in seconds.items():
        speed = [count / each for count, each in zip(tokens, taken, strict=True)]
        row: Row = {"backend": name, "seconds": taken, "tokens_per_second": speed, "losses": found[name]}
        if not options["dropout"]:
            row["loss_difference"] = max(abs(one - own) for one, own in zip(found[name], found[OWN], strict=True))
        if options["memory"] and default_device() == "cuda":
            row["memory"] = harness.peak_memory(partial(backends[name].step, timed[-1]), on_cuda=True)["above"]
        rows.append(row)
    return harness.with_ratios(rows), median(tokens)


def main() -> None:
    parser = harness.parser(__doc__, "python benchmarks/training.py --model ettin-17m --threads 2 --out bench", rounds=5)
    parser.add_argument("--model", "-m", required=True, help="Folder or hub id, or a preset with random weights, such as ettin-17m.")
    parser.add_argument("--workload", action="append", choices=tuple(WORKLOADS), help="Lengths of texts (default: msmarco). Repeatable.")
    parser.add_argument("--kind", action="append", choices=tuple(LIBRARIES), help="Kind of model (default: dense and colbert). Repeatable.")
    parser.add_argument("--data", "-d", type=Path, help="BEIR folder whose texts are used instead of synthetic ones.")
    parser.add_argument("--split", default="train", help="Split of its judgements (default: %(default)s).")
    parser.add_argument("--no-baselines", action="store_true", help="Measure Quiver alone.")
    parser.add_argument("--batch-size", type=int, help="Rows per batch. Default: 32, and 4 for long texts.")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="bfloat16 is autocast.")
    parser.add_argument("--dropout", action="store_true", help="Use the checkpoint's dropout; losses are then not compared.")
    parser.add_argument("--peak-memory", action="store_true", help="Measure peak memory on a GPU.")
    given = parser.parse_args()
    kinds = given.kind or ["dense", "colbert"]
    torch.set_num_threads(given.threads or torch.get_num_threads())
    options = {
        "dtype": training_dtype(given.dtype, default_device()), "seed": given.seed, "rounds": given.rounds, "dropout": given.dropout,
        "baselines": not given.no_baselines, "memory": given.peak_memory,
    }  # fmt: skip
    workloads = [WORKLOADS[name] for name in given.workload or ["msmarco"]]
    workloads = [each._replace(rows=given.batch_size or each.rows) for each in workloads]
    settings = {**options, "model": given.model, "data": given.data, "rows": given.batch_size, "threads": torch.get_num_threads()}
    results = Results(f"Training: {given.model}", settings, given.out, overwrite=given.overwrite)
    source = synthetic_texts if given.data is None else collection_texts(given.data, given.split)
    bench_training(results, given.model, workloads, {kind: LOSSES[kind][0] for kind in kinds}, options, source)


if __name__ == "__main__":
    harness.run_script(main)
