"""``quiver bench``: speed and memory, against peers in the same run. With evaluation.py, what in retrieval may import eval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from quiver.cli.bench_index import index
from quiver.cli.output import (
    JsonOption,
    OverwriteOption,
    ProgressOption,
    command_line,
    help_alone,
    print_json,
    print_table,
    say,
    show_progress,
)
from quiver.encoder import InputError
from quiver.eval.bench.encoder import (
    BATCH_TOKENS,
    CPU_TABLE,
    PAPER_DOCUMENTS,
    PAPER_SETS,
    EncoderBenchmark,
    Settings,
    Workload,
    bench_sets,
    bench_texts,
    default_documents,
    paper_workload,
    parse_lengths,
    to_json,
    write_benchmark,
)
from quiver.eval.bench.encoder.libraries import LIBRARIES
from quiver.eval.bench.encoder.results import LibraryTimes, NotRun, PeakMemory, SetTimes, Spread
from quiver.eval.bench.encoder.text_libraries import TEXT_LIBRARIES
from quiver.eval.bench.training import (
    WORKLOADS,
    TrainingSettings,
    bench_training,
    synthetic_source,
    texts_of_collection,
    write_training_benchmark,
)
from quiver.eval.bench.training import to_json as training_json
from quiver.eval.bench.training.results import SideTimes, WorkloadTimes
from quiver.eval.published import ENCODER_EFFICIENCY
from quiver.eval.report.efficiency import MEBIBYTE, has_paper_sets, largest_table, paper_table, set_title, write_efficiency_report
from quiver.eval.report.efficiency_plot import check_out, write_efficiency_plot
from quiver.eval.report.training_speed import workload_title, write_training_speed_plot, write_training_speed_report
from quiver.retrieval.data.corpus import read_documents
from quiver.retrieval.models.loading import default_device
from quiver.retrieval.training.rules import LOSSES

app = typer.Typer(invoke_without_command=True, callback=help_alone, help="Measure speed and memory, against peers in the same run.")

app.command("index")(index)

RESULTS = "results.json"
# The first library of each kind is our encoder as it is.
PEERS_HELP = f"Time beside ours: {', '.join(list(LIBRARIES)[1:])}; with --data {', '.join(list(TEXT_LIBRARIES)[1:])}."
TEXTS = 500
"""Documents of --data that are encoded where --docs does not say."""


@app.command("encoder")
def encoder(
    model: Annotated[str, typer.Option("--model", "-m", help="A preset (modernbert-base, ...; random weights), a folder or a hub id.")],
    data: Annotated[
        Path | None,
        typer.Option("--data", "-d", help="Encode texts with a bi-encoder instead of token ids: a BEIR folder or a .jsonl[.gz] file."),
    ] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help=f"One of {', '.join(PAPER_SETS)}; may be repeated.")] = None,
    lengths: Annotated[
        list[str] | None, typer.Option("--lengths", help="Lengths, as in 512x8, 512x2+32x14, 4096+2500; may be repeated.")
    ] = None,
    table: Annotated[
        str, typer.Option(help="Where no set and no lengths are given: paper (the four sets) or cpu (six small ones).")
    ] = "paper",
    docs: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Documents of each --set (the paper has {PAPER_DOCUMENTS:,}; by default one batch) or of --data ({TEXTS})."
        ),
    ] = None,
    peers: Annotated[
        list[str] | None, typer.Option("--peers", help=f"{PEERS_HELP} May be repeated; by default all other projects' that can run.")
    ] = None,
    alone: Annotated[bool, typer.Option("--no-peers", help="Time Quiver alone.")] = False,
    train: Annotated[bool, typer.Option("--train", help="Forward and backward instead of inference.")] = False,
    dtype: Annotated[str, typer.Option(help="Of the weights: float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads on a CPU; by default torch's.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of random weights and token ids.")] = 42,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Documents of a batch, the same for every library.")] = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Or tokens of an average batch; by default {BATCH_TOKENS['cpu']:,}, on a GPU {BATCH_TOKENS['cuda']:,}."),
    ] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Measure peak memory too, in a fresh process for each library and set.")] = False,
    largest_batch: Annotated[
        bool, typer.Option("--largest-batch", help="Search for the largest batch that fits, for fixed lengths.")
    ] = False,
    memory_gib: Annotated[float | None, typer.Option(min=0.001, help="What the largest batch has to fit into; on a GPU all of it.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help=f"Folder for {RESULTS}, report.md, plot.png and plot.svg.")] = None,
    overwrite: Annotated[bool, OverwriteOption] = False,
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Time the encoder in turn with other libraries that run the same weights: tokens a second, memory, largest batch.

    Examples: quiver bench encoder --model modernbert-base --table cpu --threads 2 --memory --out bench;
    quiver bench encoder --model MODEL --data data/scifact --docs 500
    """
    settings = Settings(
        device=device or default_device(),
        dtype=dtype,
        threads=threads,
        rounds=rounds,
        seed=seed,
        train=train,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
        memory=memory,
        largest_batch=largest_batch,
        memory_gib=memory_gib,
    )
    if out is not None:
        check_out(out, RESULTS, overwrite=overwrite)
    chosen = [] if alone else peers
    if data is not None:
        if sets or lengths:
            raise InputError("--data is for texts, --set and --lengths are for token ids; give one of them")
        result = bench_texts(
            model,
            _texts(data, docs or TEXTS),
            settings,
            name=data.name,
            peers=chosen,
            command=command_line(),
            progress=show_progress(progress),
        )
    else:
        workloads = _workloads(sets or [], lengths or [], table, docs, settings)
        result = bench_sets(model, workloads, settings, peers=chosen, command=command_line(), progress=show_progress(progress))
    if out is not None:
        _write(result, out)
    if as_json:
        print_json(to_json(result))
    else:
        _print(result)
        if out is not None:
            say(f"results: {out / RESULTS}\nreport: {out / 'report.md'}\nplot: {out / 'plot.png'}")


@app.command("train")
def train(
    model: Annotated[str, typer.Option("--model", "-m", help="A folder or hub id, or a preset (ettin-17m, ...; random weights).")],
    workloads: Annotated[
        list[str] | None, typer.Option("--workload", help=f"One of {', '.join(WORKLOADS)}; may be repeated; by default msmarco.")
    ] = None,
    kinds: Annotated[
        list[str] | None, typer.Option("--kind", help=f"One of {', '.join(LOSSES)}; may be repeated; by default both.")
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="For a single --kind, as a recipe names it; by default mnrl, and contrastive for a ColBERT.")
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", "-d", help="Texts of this BEIR folder instead of made-up ones.")] = None,
    split: Annotated[str, typer.Option(help="Its judgements.")] = "train",
    alone: Annotated[bool, typer.Option("--no-peers", help="Time Quiver alone.")] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads on a CPU; by default torch's.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each side.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of texts, rows and new weights.")] = 42,
    batch_size: Annotated[int | None, typer.Option(min=2, help="Rows of a batch; by default 32, of long texts 4.")] = None,
    dropout: Annotated[bool, typer.Option("--dropout", help="Drop out as the checkpoint says; losses are not compared then.")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Measure peak memory too, in a fresh process for each side.")] = False,
    out: Annotated[Path | None, typer.Option("--out", "-o", help=f"Folder for {RESULTS}, report.md, plot.png and plot.svg.")] = None,
    overwrite: Annotated[bool, OverwriteOption] = False,
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Time training steps in turn with plain sentence-transformers and PyLate: same weights, same batches, losses beside each other.

    Examples: quiver bench train --model sentence-transformers/all-MiniLM-L6-v2 --threads 2 --memory --out bench-train;
    quiver bench train --model ettin-17m --workload long --data data/designdocs_long
    """
    settings = TrainingSettings(
        losses=_losses(kinds or list(LOSSES), loss),
        threads=threads,
        rounds=rounds,
        seed=seed,
        batch_size=batch_size,
        dropout=dropout,
        peers=not alone,
        memory=memory,
    )
    names = list(dict.fromkeys(workloads or ["msmarco"]))
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise InputError(f"unknown workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    if out is not None:
        check_out(out, RESULTS, overwrite=overwrite)
    result = bench_training(
        model,
        [WORKLOADS[name] for name in names],
        settings,
        source=synthetic_source if data is None else texts_of_collection(data, split),
        command=command_line(),
        progress=show_progress(progress),
    )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_training_speed_report(result, out / "report.md")
        write_training_speed_plot(result, out)
        write_training_benchmark(result, out / RESULTS)
    if as_json:
        print_json(training_json(result))
        return
    for times in result.workloads:
        rows = [_side_row(each, times) for each in times.sides]
        print_table(workload_title(times), list(rows[0]), [list(row.values()) for row in rows])
    _print_not_run(result.not_run)
    if out is not None:
        say(f"results: {out / RESULTS}\nreport: {out / 'report.md'}\nplot: {out / 'plot.png'}")


def _losses(kinds: list[str], loss: str | None) -> dict[str, str]:
    """Kind -> loss, the first of each kind unless one is named."""
    if unknown := [kind for kind in kinds if kind not in LOSSES]:
        raise InputError(f"--kind must be one of {', '.join(LOSSES)}, got {unknown[0]!r}")
    if loss is None:
        return {kind: LOSSES[kind][0] for kind in kinds}
    if len(set(kinds)) > 1:
        raise InputError("--loss is for a single kind of model; give --kind dense or --kind colbert")
    return {kinds[0]: loss}


def _side_row(side: SideTimes, times: WorkloadTimes) -> dict[str, str]:
    """Columns of a terminal of 80 characters, medians of the steps; "x time" is seconds divided by Quiver's, "x cpu" processor time."""
    row = {"": side.name, "s/step": f"{median(side.seconds):.2f}", "tokens/s": f"{side.tokens_per_second.median:,.0f}"}
    row |= _ratio_cells(side.ratio)
    row["x cpu"] = f"{side.processor_ratio.median:.2f}"
    if side.max_loss_difference is not None:
        row["loss diff"] = f"{side.max_loss_difference:.1e}"
    if any(each.memory for each in times.sides):
        row["MiB"] = _memory_cell(side.memory)
    return row


def _texts(data: Path, docs: int) -> list[str]:
    """Documents spread evenly over the corpus."""
    contents = [document.content() for document in read_documents(data)]
    if not contents:
        raise InputError(f"{data}: no documents")
    count = min(docs, len(contents))
    return [contents[place * len(contents) // count] for place in range(count)]


def _workloads(sets: list[str], lengths: list[str], table: str, docs: int | None, settings: Settings) -> list[Workload]:
    if table not in ("paper", "cpu"):
        raise InputError(f"--table must be paper or cpu, got {table!r}")
    if not sets and not lengths:
        if table == "cpu":
            lengths = list(CPU_TABLE)
        else:
            sets = list(PAPER_SETS)
    if docs is not None and not sets:
        raise InputError("--docs is for the paper's sets and for --data; lengths name their documents themselves, as in 512x8")
    named = [paper_workload(name, documents=docs or default_documents(name, settings)) for name in sets]
    return [*named, *map(parse_lengths, lengths)]


def _write(result: EncoderBenchmark, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_efficiency_report(result, out / "report.md")
    write_efficiency_plot(result, out)
    write_benchmark(result, out / RESULTS)


def _print(result: EncoderBenchmark) -> None:
    for times in result.sets:
        rows = [_row(each, times) for each in times.libraries]
        print_table(f"{set_title(times)}", list(rows[0]), [list(row.values()) for row in rows])
    if result.largest_batches:
        print_table("Largest batch", *largest_table(result))
    if has_paper_sets(result):
        ours = [each for each in ENCODER_EFFICIENCY if each.model == "ModernBERT"]
        _, table = paper_table(result, ours)
        header = ("", "BS 512", "512", "~256", "BS 8k", "8,192", "~4,096")
        print_table("Thousand tokens/s (means) and largest batch (BS); the paper's are an RTX 4090's", header, table)
    _print_not_run(result.not_run)


def _ratio_cells(ratio: Spread) -> dict[str, str]:
    return {"x time": f"{ratio.median:.2f}", "low": f"{ratio.lowest:.2f}", "high": f"{ratio.highest:.2f}"}


def _memory_cell(memory: PeakMemory | None) -> str:
    return "-" if memory is None else f"{memory.above / MEBIBYTE:,.0f}"


def _print_not_run(not_run: Sequence[NotRun]) -> None:
    if not_run:
        print_table("Not run", ("", "why"), [(each.what, each.reason) for each in not_run])


def _row(library: LibraryTimes, times: SetTimes) -> dict[str, str]:
    """Columns of a terminal of 80 characters, medians of the rounds; "x time" is seconds divided by Quiver's."""
    speed = library.tokens_per_second
    row = {"": library.name, "tokens/s": f"{speed.median:,.0f}"}
    if times.batch_documents is None:
        row["texts/s"] = f"{speed.median * times.documents / times.tokens:,.1f}"
    row |= _ratio_cells(library.ratio)
    row["max diff"] = f"{library.max_difference:.1e}"
    if library.gradient_difference is not None:
        row["grad diff"] = f"{library.gradient_difference:.1e}"
    if any(each.memory for each in times.libraries):
        row["MiB"] = _memory_cell(library.memory)
    return row
