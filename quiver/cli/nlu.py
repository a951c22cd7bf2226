"""Fine-tuning on natural language understanding: glue, and qa train | evaluate."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from quiver.cli import options
from quiver.cli.options import argument, command, group, help_alone, option, print_json, print_table, say
from quiver.encoder.errors import InputError
from quiver.retrieval.options import Dtype

if TYPE_CHECKING:
    from quiver.eval.nlu.answers import QaResults
    from quiver.eval.nlu.glue import GlueResults


qa_app = typer.Typer(
    help="Train and evaluate models that answer questions with spans of a text.", invoke_without_command=True, callback=help_alone
)


@command
def glue(
    recipe: str = argument("Recipe file, or the name of a shipped recipe: glue-base, glue-large."),
    overrides: tuple[str, ...] = options.OVERRIDES,
    *,
    out: Path = option(..., "Folder to write: a folder per task, results.json, report.md, report.html.", "-o"),
    training: options.ResumableTraining,
    task: tuple[str, ...] = option((), "Task to train: cola, sst2, mrpc, stsb, qqp, mnli, qnli or rte. Repeatable. Default: all tasks."),
    output: options.Output,
) -> None:
    """Fine-tune a model on each GLUE task and compare its scores with those of the ModernBERT paper.

    SIGTERM and Ctrl-C finish the current step and save a checkpoint; --resume continues from it.

    Example: quiver glue glue-base --out runs/glue-base --task cola --task rte --task mnli data.source=data/glue
    """
    from quiver.encoder.training.recipe_file import naming_fetch_command
    from quiver.eval.nlu.glue import train_glue
    from quiver.eval.nlu.recipes import load_glue_recipe

    resolved = load_glue_recipe(recipe, training.overrides(overrides))
    with naming_fetch_command(recipe, resolved.data):
        results = train_glue(resolved, out, tasks=task, **training.arguments(output))
    print_glue(results, out, output)


def print_glue(results: GlueResults, out: Path, output: options.Output) -> None:
    """Write the report on GLUE tasks, and print their scores."""
    from quiver.eval.nlu.glue import write_glue_report
    from quiver.eval.nlu.glue_tasks import TASKS
    from quiver.eval.nlu.glue_training import RESULTS

    report = write_glue_report(results, out)
    if output.json:
        print_json(asdict(results))
        return
    rows = []
    for name, run in results.runs.items():
        measures = ", ".join(f"{measure} {100 * value:.1f}" for measure, value in run.scores.measures.items())
        rows.append((TASKS[name].title, f"{100 * run.scores.score:.1f}", measures, f"{run.steps:,} of {run.planned_steps:,}"))
    mean = results.average
    rows.append(("average", "" if mean.value is None else f"{100 * mean.value:.1f}", f"{mean.known} of {mean.members} tasks", ""))
    print_table(str(out), ("task", "score", "measures", "updates"), rows)
    say(f"results: {out / RESULTS}\nreport: {report}")


@qa_app.command("train")
@command
def qa_train(
    recipe: str = argument("Recipe file, or the name of a shipped recipe: qa-korquad."),
    overrides: tuple[str, ...] = options.OVERRIDES,
    *,
    out: Path = option(..., "Folder to write: model/, run.json, results.json, predictions.json, ...", "-o"),
    split: str | None = option(
        None, "Parts to divide the training file into: 9:1 for training and development, 8:1:1 for test too. Sets data.split."
    ),
    training: options.ResumableTraining,
    output: options.Output,
) -> None:
    """Train a model that answers questions with spans of a text, and evaluate it on the recipe's test data.

    SIGTERM and Ctrl-C finish the current step and save a checkpoint; --resume continues from it.

    Example: quiver qa train qa-korquad --out runs/qa-512 model.init=klue/roberta-base
    """
    from quiver.encoder.training.recipe_file import naming_fetch_command
    from quiver.encoder.training.run_folder import MODEL
    from quiver.eval.nlu.qa_training import train_qa
    from quiver.eval.nlu.recipes import load_qa_recipe

    divided = [] if split is None else [f"data.split={split}"]
    resolved = load_qa_recipe(recipe, [*training.overrides(overrides), *divided])
    with naming_fetch_command(recipe, resolved.data):
        results = train_qa(resolved, out, **training.arguments(output))
    if output.json:
        print_json({"model": str(out / MODEL), **asdict(results)})
        return
    _print_qa(results, str(out))
    say(f"model: {out / MODEL}")


@dataclass(frozen=True)
@group
class _Windows:
    """How long texts are read: fields of `quiver.eval.nlu.questions.WindowSettings`."""

    paragraphs: Literal["overlap", "head", "tail", "head-tail"] = option(
        "overlap", "Treatment of long paragraphs: overlapping windows, or one window with the beginning, the end, or both."
    )

    max_length: int | None = option(None, "Length of a window, in tokens. Default: the number of positions of the model.")
    overlap: int = option(128, "Overlap of consecutive windows, in tokens.")
    max_question_length: int = option(64, "Length that questions are truncated to, in tokens.")
    max_answer_length: int = option(30, "Length of the longest answer, in tokens; at most --overlap.")


@qa_app.command("evaluate")
@command
def qa_evaluate(
    model: str = option(..., "Folder or hub id of a model that answers with spans.", "-m"),
    data: Path = option(..., "Questions in SQuAD's JSON format: SQuAD 1.1 and 2.0, KorQuAD 1.0.", "-d"),
    official: Literal["squad_v1", "squad_v2", "korquad_v1"] = option(..., "Official evaluation script that defines the scores."),
    out: Path = option(..., "Folder to write: results.json, predictions.json.", "-o"),
    only: Path | None = option(None, "Relevance judgements (.tsv): evaluate only their questions. Default: all questions."),
    *,
    windows: _Windows,
    no_answer_margin: float = option(0.0, "For squad_v2: margin by which the no-answer score must exceed the score of the best span."),
    dtype: Dtype | None = options.MODEL_DTYPE,
    device: str | None = options.DEVICE,
    overwrite: bool = options.OVERWRITE,
    output: options.Output,
) -> None:
    """Evaluate a model by exact match and F1, as the official evaluation script defines them.

    Example: quiver qa evaluate --model runs/qa-512/model --data KorQuAD_v1.0_dev.json --official korquad_v1 --out results/qa-512
    """
    import torch

    from quiver.encoder.schema import parse_options
    from quiver.eval.nlu.answers import RESULTS, answer_questions, answer_texts, score_predictions, write_qa_results
    from quiver.eval.nlu.qa_training import check_answerable, open_span_qa, warn_of_token_types
    from quiver.eval.nlu.questions import WindowSettings, check_settings, read_questions, read_split
    from quiver.retrieval.models.pretrained import check_device, default_device, default_dtype

    if (out / RESULTS).exists() and not overwrite:
        raise InputError(f"{out / RESULTS}: already exists; choose another --out, or pass --overwrite")
    if dtype == "int8":
        raise InputError("--dtype int8 is for bi-encoders and ColBERT models; use float32, bfloat16 or float16")
    device = check_device(device or default_device())
    dtype = dtype or default_dtype(device)
    questions = read_questions(data, only=None if only is None else read_split(only)).questions
    if official != "squad_v2":
        check_answerable(questions, where=str(data), official=official)
    opened, tokenizer = open_span_qa(model, seed=None)
    opened = opened.to(device, getattr(torch, dtype))
    warn_of_token_types(opened, tokenizer, model)
    positions = opened.encoder.config.max_positions
    lengths = asdict(windows) | {"max_length": positions if windows.max_length is None else windows.max_length}
    settings = parse_options(WindowSettings, lengths, source="options")
    check_settings(settings, tokenizer, positions=positions)
    predictions = answer_questions(
        opened,
        tokenizer,
        questions,
        settings,
        may_have_none=official == "squad_v2",
        no_answer_margin=no_answer_margin,
        progress=output.progress,
    )
    results = score_predictions(questions, predictions, tokenizer, official)
    where = {"model": model, "data": str(data), "split": None if only is None else str(only), "dtype": dtype}
    write_qa_results(out, results, answer_texts(questions, predictions), made_with={**where, "settings": settings.model_dump()})
    if output.json:
        print_json(asdict(results))
        return
    _print_qa(results, model)
    say(f"results: {out / RESULTS}")


def _print_qa(results: QaResults, title: str) -> None:
    scored = {"all": results.scores, "with an answer": results.answerable, "without an answer": results.unanswerable}
    for each in results.by_length:
        to = " tokens or more" if each.up_to is None else f" to {each.up_to:,} tokens"
        scored[f"{each.above + 1:,}{to}"] = each.scores
    rows = [(name, f"{one.questions:,}", f"{100 * one.exact:.2f}", f"{100 * one.f1:.2f}") for name, one in scored.items() if one]
    print_table(f"{title} ({results.official})", ("subset", "questions", "EM", "F1"), rows)
