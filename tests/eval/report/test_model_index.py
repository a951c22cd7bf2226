"""Metadata for the Hub: read back by the Hub's own client."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import yaml
from huggingface_hub.repocard_data import model_index_to_eval_results

from quiver.encoder.errors import InputError
from quiver.eval.report.hub import is_card, render_eval_results, render_model_index
from quiver.eval.results import CollectionResult, Results

MakeScored = Callable[..., CollectionResult]
MakeResults = Callable[..., Results]


def front_matter(text: str) -> dict[str, object]:
    assert text.startswith("---\n")
    assert text.endswith("---\n")
    content = yaml.safe_load(text[4:-4])
    assert isinstance(content, dict)
    return content


def test_the_hub_client_reads_the_model_index(make_scored: MakeScored, make_results: MakeResults) -> None:
    results = make_results("out/models/alpha", make_scored("scifact", 0.657041234), make_scored("cosqa", 0.5, revision=None))
    index = front_matter(render_model_index(results))["model-index"]
    assert isinstance(index, list)
    name, entries = model_index_to_eval_results(index)
    assert name == "alpha"
    assert len(entries) == 14
    first, other = entries[0], entries[7]
    assert (first.task_type, first.dataset_type, first.dataset_name) == ("text-retrieval", "mteb/scifact", "SciFact (default)")
    assert (first.dataset_config, first.dataset_split, first.dataset_revision) == ("default", "test", None)
    assert (first.metric_type, first.metric_name, first.metric_value) == ("ndcg_at_10", "nDCG@10", 0.65704)
    assert first.dataset_args == {"data": "c" * 40}
    assert (other.dataset_type, other.dataset_name, other.dataset_config) == ("cosqa", "cosqa", None)
    assert other.dataset_args == {"data": f"sha256:{'cosqa':0<64}"}
    assert {entry.metric_type for entry in entries} == {
        *("ndcg_at_10", "map", "mrr_at_10", "recall_at_10", "recall_at_100", "recall_at_1000", "precision_at_10")
    }


def test_eval_results_name_the_task_of_the_leaderboard(make_scored: MakeScored, make_results: MakeResults) -> None:
    results = make_results(
        "alpha", make_scored("scifact", 0.657041234), make_scored("cosqa", 0.5), make_scored("mldr-ko", 0.3, split="dev")
    )
    first, second = yaml.safe_load(render_eval_results(results, source_url="https://example.org/report"))
    assert first == {
        "dataset": {"id": "mteb/scifact", "task_id": "SciFact_default_test"},
        "value": 65.70412,
        "date": "2030-01-02T03:04:05+00:00",
        "notes": f"nDCG@10, exact (similarity cosine), 5,183 documents, data {'c' * 40}; Quiver 0.1",
        "source": {"url": "https://example.org/report"},
    }
    assert second["dataset"] == {"id": "mteb/MultiLongDocRetrieval", "task_id": "MultiLongDocRetrieval_ko_dev"}


def test_only_files_with_our_metadata_are_replaced(make_scored: MakeScored, make_results: MakeResults) -> None:
    results = make_results("alpha", make_scored("scifact", 0.5))
    card = render_model_index(results)
    assert is_card(card)
    assert is_card(render_eval_results(results))
    others = [
        *(card + "# My model\n", card.replace("model-index", "license: mit\nmodel-index"), "", "{}", "[]", "- one\n", '{"schema": 1}'),
        *("a: 2030-99-99\n", "[" * 5000, "a: b: c", "\x00", card.replace("---", "")),
        *(render_eval_results(results) + "# by hand\n", card.replace("type: text-retrieval", "type:  text-retrieval", 1)),
    ]
    assert [text[:30] for text in others if is_card(text)] == []


def test_results_that_the_format_cannot_name_are_refused(make_scored: MakeScored, make_results: MakeResults) -> None:
    with pytest.raises(InputError, match="no collection"):
        render_model_index(make_results("alpha"))
    with pytest.raises(InputError, match="none of the collections is a data set on the Hub"):
        render_eval_results(make_results("alpha", make_scored("cosqa", 0.5)))
