"""``quiver qa``: answers as spans, trained and scored; like bench.py beside it, a file of retrieval that may import eval."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from quiver.cli.output import (
    JsonOption,
    OverwriteOption,
    ProgressOption,
    command_line,
    help_alone,
    print_json,
    print_table,
    say,
    say_error,
    show_progress,
)
from quiver.encoder import InputError
from quiver.encoder.schema import parse
from quiver.encoder.training.stopping import RunStoppedError
from quiver.eval.nlu.answer_scores import Scores
from quiver.eval.nlu.answering import answer_questions
from quiver.eval.nlu.qa_model import open_span_qa, warn_of_token_types
from quiver.eval.nlu.qa_recipe import load_qa_recipe
from quiver.eval.nlu.qa_results import RESULTS, QaResults, answer_texts, score_predictions, write_qa_results
from quiver.eval.nlu.qa_training import check_answerable, train_qa
from quiver.eval.nlu.questions import read_questions, read_split
from quiver.eval.nlu.windows import WindowSettings, check_settings
from quiver.retrieval.training.run_folder import MODEL

app = typer.Typer(help="Answer questions with spans of a text.", invoke_without_command=True, callback=help_alone)


class OfficialScores(str, Enum):
    """Whose script defines the scores."""

    SQUAD_V1 = "squad_v1"
    SQUAD_V2 = "squad_v2"
    KORQUAD_V1 = "korquad_v1"


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A .yaml file, or the name of a shipped recipe (qa_korquad_512, qa_korquad_1024).")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write: model/, run.json, results.json, predictions.json, ...")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change, as section.setting=value.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished run in --out.")] = False,
    overwrite: Annotated[bool, OverwriteOption] = False,
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Train a model that answers with spans, and answer the recipe's test.

    SIGTERM and Ctrl-C finish the update and save; --resume goes on from the last checkpoint and ends with the same weights.

    Example: quiver qa train qa_korquad_512 --out runs/qa-512 model.init=klue/bert-base
    """
    resolved, watched = load_qa_recipe(recipe, overrides or []), show_progress(progress)
    try:
        results = train_qa(resolved, out, resume=resume, overwrite=overwrite, progress=watched, command=command_line())
    except RunStoppedError as stopped:
        say_error(f"{stopped}; the same command{'' if resume else ' with --resume'} goes on")
        raise typer.Exit(1) from stopped
    if as_json:
        print_json({"model": str(out / MODEL), **asdict(results)})
        return
    _print(results, str(out))
    say(f"model: {out / MODEL}")


@app.command()
def evaluate(
    model: Annotated[str, typer.Option(help="A model that answers with spans: a folder, or a hub id.")],
    data: Annotated[Path, typer.Option(help="Questions in SQuAD's JSON: SQuAD 1.1 and 2.0, KorQuAD 1.0.")],
    official: Annotated[OfficialScores, typer.Option(help="Whose script defines the scores.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write: results.json, predictions.json.")],
    split: Annotated[Path | None, typer.Option(help="A .tsv of judgements: only its questions are asked.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens of a window; by default as many as the model has positions.")] = None,
    overlap: Annotated[int, typer.Option(help="Tokens that two windows of a paragraph share.")] = 128,
    max_question_length: Annotated[int, typer.Option(help="Tokens that questions are cut to.")] = 64,
    max_answer_length: Annotated[int, typer.Option(help="Tokens of the longest answer; no more than the overlap.")] = 30,
    no_answer_margin: Annotated[float, typer.Option(help="squad_v2: how much more than the best span no answer must score.")] = 0.0,
    overwrite: Annotated[bool, OverwriteOption] = False,
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Score a model by exact match and F1, as the official script of the data defines them.

    Example: quiver qa evaluate --model runs/qa-512/model --data KorQuAD_v1.0_dev.json --official korquad_v1 --out results/qa-512
    """
    if (out / RESULTS).exists() and not overwrite:
        raise InputError(f"{out / RESULTS}: exists; choose another --out, or --overwrite")
    questions = read_questions(data, only=None if split is None else read_split(split)).questions
    may_have_none = official is OfficialScores.SQUAD_V2
    if not may_have_none:
        check_answerable(questions, where=str(data), official=official.value)
    opened, tokenizer = open_span_qa(model, seed=None)
    warn_of_token_types(opened, tokenizer, model)
    positions = opened.encoder.config.max_positions
    settings = parse(
        WindowSettings,
        {
            "max_length": positions if max_length is None else max_length,
            "overlap": overlap,
            "max_question_length": max_question_length,
            "max_answer_length": max_answer_length,
        },
        source="options",
    )
    check_settings(settings, tokenizer, positions=positions)
    watched = show_progress(progress)
    predictions = answer_questions(
        opened, tokenizer, questions, settings, may_have_none=may_have_none, no_answer_margin=no_answer_margin, progress=watched
    )
    results = score_predictions(questions, predictions, tokenizer, official.value)
    made_with = {"model": model, "data": str(data), "split": None if split is None else str(split), "settings": settings.model_dump()}
    write_qa_results(out, results, answer_texts(questions, predictions), made_with=made_with)
    if as_json:
        print_json(asdict(results))
        return
    _print(results, model)
    say(f"results: {out / RESULTS}")


def _print(results: QaResults, title: str) -> None:
    rows = [_row("all", results.scores)]
    rows += [_row(name, part) for name, part in (("with an answer", results.answerable), ("without", results.unanswerable)) if part]
    for each in results.by_length:
        name = f"{each.above + 1:,} tokens or more" if each.up_to is None else f"{each.above + 1:,} to {each.up_to:,} tokens"
        rows.append(_row(name, each.scores))
    print_table(f"{title} ({results.official})", ("questions that are", "questions", "EM", "F1"), rows)


def _row(name: str, scores: Scores) -> tuple[str, str, str, str]:
    return name, f"{scores.questions:,}", f"{100 * scores.exact:.2f}", f"{100 * scores.f1:.2f}"
