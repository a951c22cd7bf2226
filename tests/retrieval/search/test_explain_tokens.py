"""Token matches: compared with a naive computation and MaxSim's sum; skiplist; readable tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights
from quiver.retrieval.index import index_vectors
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.records import Role
from quiver.retrieval.search.explain import text_tokens, token_matches
from tests.retrieval.models.small import make_colbert

QUERY = "which bird has wings?"
DOCUMENT = "A bird, any bird: it has wings. " * 3
CONFIG = EncoderConfig.modernbert(
    vocab_size=448, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global", "local"], max_positions=64
)

MakeModel = Callable[..., ColBERT]


def names(model: ColBERT, text: str, role: Role) -> list[str]:
    return [token.name for token in text_tokens(model, text, role)]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer.train([QUERY, DOCUMENT, "wings and birds\n\n", "über"] * 3, vocab_size=384)
    for prefix in ("[Q] ", "[D] "):
        tokenizer.add_token(prefix)
    return tokenizer


def word_piece() -> Tokenizer:
    words = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "which", "bird", "##s", "has", "wings", "a", ",", "?", ".", "[Q] ", "[D] "]
    backend = tokenizers.Tokenizer(models.WordPiece({word: row for row, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    backend.add_special_tokens([AddedToken(word, normalized=False) for word in words if word.startswith("[")])
    return Tokenizer(backend, {})


@pytest.fixture
def make_model() -> MakeModel:
    def make(tokenizer: Tokenizer | None = None, **settings: object) -> ColBERT:
        chosen = {"query_length": 16, "document_length": 40, **settings}
        return make_colbert(tokenizer or byte_level(), init_weights(Encoder(CONFIG), seed=1), projections=(Projection(32, 16),), **chosen)

    return make


SETTINGS = [
    {},
    {"query_expansion": False},
    {"attend_to_expansion": True},
    {"query_prefix": "", "document_prefix": "", "skiplist": ()},
    {"query_length": 4, "document_length": 9, "skiplist": (".", "not a token")},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ",".join(settings) or "defaults")
def test_matches_are_the_best_tokens_and_sum_to_the_score(make_model: MakeModel, settings: dict[str, object]) -> None:
    model = make_model(**settings)
    matches = token_matches(model, QUERY, DOCUMENT)
    queries, documents = model.encode_query([QUERY])[0], model.encode_document([DOCUMENT])[0]
    asked, answers = text_tokens(model, QUERY, "query"), text_tokens(model, DOCUMENT, "document")
    assert (len(asked), len(answers)) == (len(queries), len(documents))
    assert [match.query for match in matches] == asked
    for match, vector in zip(matches, queries, strict=True):
        similarities = [sum(float(a) * float(b) for a, b in zip(vector, other, strict=True)) for other in documents]
        best = max(range(len(similarities)), key=similarities.__getitem__)
        assert match.similarity == pytest.approx(similarities[best], abs=1e-6)
        assert match.document in answers
        assert match.document.name == answers[best].name  # equal words at other places may be as similar to the last bit
    index = index_vectors(["d"], documents, model.card, lengths=[len(documents)])
    assert sum(match.similarity for match in matches) == pytest.approx(float(index.search([queries], 1).scores[0][0]), abs=1e-5)


def test_byte_level_tokens_are_words_and_specials_have_names(make_model: MakeModel) -> None:
    model = make_model()
    query = names(model, "bird has wings", "query")
    assert query[:2] == ["[CLS]", "[Q]"]
    assert "".join(query[2 : query.index("[SEP]")]) == "birdhaswings"
    assert query[query.index("[SEP]") + 1 :] == ["[MASK]"] * (16 - query.index("[SEP]") - 1)
    assert not any("\u0120" in token for token in query)
    document = names(model, "bird\n\nhas wings", "document")
    assert document[:2] == ["[CLS]", "[D]"]
    assert any(token.startswith("'\\n") for token in document), document


def test_word_pieces_keep_their_hashes(make_model: MakeModel) -> None:
    model = make_model(word_piece(), skiplist=(",", "?"))
    assert names(model, "Birds, a zebra?", "document") == ["[CLS]", "[D]", "bird", "##s", "a", "[UNK]", "[SEP]"]
    assert names(model, "birds?", "query")[:6] == ["[CLS]", "[Q]", "bird", "##s", "?", "[SEP]"]
    unknown = make_model(word_piece(), skiplist=("no single token",))  # stands for [UNK], as in the model
    assert names(unknown, "a zebra", "document") == ["[CLS]", "[D]", "a", "[SEP]"]
    assert len(unknown.encode_document(["a zebra"])[0]) == 4


def test_a_document_without_vectors_matches_nothing(make_model: MakeModel) -> None:
    model = make_model(skiplist=("[CLS]", "[SEP]", "."), document_prefix="")
    assert model.encode_document(["."])[0].shape == (0, 16)
    assert token_matches(model, QUERY, ".") == []


def spans(model: ColBERT, text: str, role: Role) -> list[str | None]:
    return [None if token.span is None else text[slice(*token.span)] for token in text_tokens(model, text, role)]


def test_spans_refer_to_the_original_text(make_model: MakeModel) -> None:
    model = make_model()
    text = "  A bird\n\n has\twings \u20ac "
    found = spans(model, text, "document")
    assert found[:2] == [None, None]
    assert found[-1] is None
    assert "".join(part for part in found[2:-4] if part and part.strip()) == "Abirdhaswings"
    assert found[-4:-1] == ["\u20ac"] * 3  # three bytes, one character
    assert {"\n\n", "\n"} & {*found}  # white space alone stays what it is
    query = spans(model, "bird", "query")
    assert (query[0], query[1], "".join(filter(None, query))) == (None, None, "bird")
    assert query[-1] is None
    assert spans(model, "", "document") == [None, None, None]


def test_spans_exclude_the_prompt(make_model: MakeModel) -> None:
    model = make_model()
    model.settings = replace(model.settings, document_prompt="search_document: ", query_prompt="  find ")
    for role in ("document", "query"):
        found = spans(model, " wings\n", role)
        assert "".join(filter(None, found)).strip() == "wings"
        assert len(found) == len(names(model, " wings\n", role))
    assert spans(model, " ", "document")[2:] == [None] * (len(names(model, "", "document")) - 2)


def test_spans_are_right_if_lower_case_is_longer(make_model: MakeModel) -> None:
    model = make_model(word_piece(), skiplist=())
    model.settings = replace(model.settings, lower_case=True)
    text = "\u0130\u0130 BIRDS, A zebra?"  # the letter's lower case is two characters
    assert [part for part in spans(model, text, "document") if part] == ["\u0130\u0130", "BIRD", "S", ",", "A", "zebra", "?"]


@pytest.mark.parametrize("side", ["right", "left"])
def test_spans_of_a_truncated_text_are_right(make_model: MakeModel, side: str) -> None:
    model = make_model(word_piece(), document_length=6, skiplist=())
    model.tokenizer.settings["truncation_side"] = side
    text = "a bird has wings a bird"
    assert [part for part in spans(model, text, "document") if part] == (
        ["a", "bird", "has"] if side == "right" else ["wings", "a", "bird"]
    )
    assert len(text_tokens(model, text, "document")) == len(model.encode_document([text])[0])


def test_sentence_pieces_are_shown_without_their_space_mark(make_model: MakeModel) -> None:
    pieces = [("[UNK]", 0.0), ("[CLS]", 0.0), ("[SEP]", 0.0), ("[MASK]", 0.0), ("\u2581bird", -1.0), ("s", -2.0), ("\u2581", -3.0)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name, _ in pieces[:4]])
    model = make_model(Tokenizer(backend, {}), query_prefix="", document_prefix="", skiplist=(), query_expansion=False)
    assert names(model, "bird birds", "query") == ["bird", "bird", "s"]
    assert [part for part in spans(model, "bird  birds", "query") if part and part.strip()] == ["bird", "bird", "s"]
