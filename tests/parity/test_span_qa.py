"""Span QA against transformers: windows with their offsets, and SQuAD's exact match and F1 on random answers."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quiver.encoder import Encoder, SpanQA, Tokenizer, init_head, init_weights, pack_ids, preset
from quiver.eval.nlu.answers import score_answer, squad_text
from quiver.eval.nlu.qa_training import save_qa_model
from quiver.eval.nlu.questions import Question, WindowSettings, make_windows

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

TEXT = "임종석은 1989년 2월 15일 여의도 농민 폭력 시위를 주도했다. The bird has two wings, ünïcode and  spaces; the sea is deep! "


@pytest.mark.parametrize("kind", ["minilm", "bytes"])
@pytest.mark.parametrize(("repeats", "max_length", "overlap"), [(1, 256, 30), (6, 64, 17), (9, 128, 64), (12, 48, 30)])
def test_windows_are_transformers(minilm: Path, tmp_path: Path, kind: str, repeats: int, max_length: int, overlap: int) -> None:
    folder = minilm
    if kind == "bytes":
        folder = tmp_path
        Tokenizer.train([TEXT] * 2, vocab_size=400, max_length=512).save(folder)
    question, context = "언제 was it?", (TEXT * repeats).strip()
    settings = WindowSettings(max_length=max_length, overlap=overlap, max_question_length=64)
    ours = list(make_windows([Question("q", question, context, ())], Tokenizer.from_pretrained(folder), settings))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)(
        question,
        context,
        truncation="only_second",
        max_length=max_length,
        stride=overlap,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    assert [window.ids for window in ours] == theirs["input_ids"]
    for place, window in enumerate(ours):
        parts = theirs.sequence_ids(place)
        spans = [tuple(span) for span, part in zip(theirs["offset_mapping"][place], parts, strict=True) if part == 1]
        assert window.first == parts.index(1)
        # Ours leave out the white space at a token's ends.
        assert [context[low:high].strip() for low, high in spans] == [context[low:high].strip() for low, high in window.spans]


def test_a_saved_model_gives_the_same_logits(tmp_path: Path) -> None:
    """A BERT, which transformers would hand two token types to by default."""
    tokenizer = Tokenizer.train([TEXT] * 2, vocab_size=400, max_length=128)
    config = replace(
        preset("bert-base"),
        vocab_size=400,
        hidden_size=32,
        num_heads=2,
        intermediate_size=48,
        layer_types=("global",) * 2,
        max_positions=128,
    )
    model = SpanQA(init_weights(Encoder(config), seed=1)).eval()
    init_head(model, seed=2)
    with torch.no_grad():
        for parameter in model.parameters():  # initial weights are too small to show a mistake
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.05)
    save_qa_model(model, tokenizer, tmp_path)
    theirs = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path).eval()
    encoded = transformers.AutoTokenizer.from_pretrained(tmp_path)("언제 was it?", TEXT, return_tensors="pt")
    settings = WindowSettings(max_length=128, overlap=30, max_question_length=64)
    [window] = make_windows([Question("q", "언제 was it?", TEXT, ())], tokenizer, settings)
    with torch.no_grad():
        expected = theirs(**encoded)
        start, end = model(pack_ids([window.ids]))
    torch.testing.assert_close(start, expected.start_logits[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(end, expected.end_logits[0], atol=1e-5, rtol=0)


def test_scores_are_transformers() -> None:
    metrics = pytest.importorskip("transformers.data.metrics.squad_metrics")
    generator = random.Random(3)
    words = ["a", "The", "an", "bird", "Bird's", "wing-s", "...", "sea,", "서울은", "24\u201310", "", "U.S.", "the-end", "\tdeep "]
    seen = 0
    for _ in range(3000):
        prediction, answer = (" ".join(generator.choices(words, k=generator.randint(0, 5))) for _ in range(2))
        assert squad_text(answer) == metrics.normalize_answer(answer)
        if not squad_text(answer):
            continue
        found = score_answer(prediction, [answer], "squad_v2")
        assert found.exact == metrics.compute_exact(answer, prediction)
        assert found.f1 == pytest.approx(metrics.compute_f1(answer, prediction), abs=1e-12)
        seen += 0 < found.f1 < 1
    assert seen > 500
