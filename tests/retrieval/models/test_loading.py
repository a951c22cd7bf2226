"""Model folders: supported stacks of modules, malformed settings, and the contents of a fingerprint."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quiver.encoder import Encoder, InputError, Tokenizer, init_weights
from quiver.encoder.presets import preset
from quiver.retrieval.index import build_index, open_index
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.export.export import export_model
from quiver.retrieval.models.loading import WorkerModel, load_index_model, load_model
from quiver.retrieval.models.options import ModelFolder, ModelOptions
from quiver.retrieval.models.pretrained import default_dtype, read_model_folder
from quiver.retrieval.training.state import load_trainable
from tests.retrieval.models.small import CONFIG, make_colbert, make_dense, make_tokenizer

TEXTS = ["a bird has wings", "[Q] ", "[D] "]


def tokenizer() -> Tokenizer:
    return make_tokenizer(TEXTS)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    make_dense(tokenizer(), normalize=True, projections=(Projection(32, 16),)).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


@pytest.fixture
def colbert(tmp_path: Path) -> Path:
    make_colbert(tokenizer()).save_pretrained(tmp_path / "colbert")
    return tmp_path / "colbert"


def reorder(folder: Path, order: list[int]) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    picked = [{**modules[place], "idx": idx} for idx, place in enumerate(order)]
    (folder / "modules.json").write_text(json.dumps(picked))


@pytest.mark.parametrize("order", [[], [0], [1, 0, 2, 3], [0, 2, 1, 3], [0, 1, 3, 2], [0, 1, 3, 3], [0, 0, 1]], ids=str)
def test_stacks_in_another_order_are_refused(dense: Path, order: list[int]) -> None:
    assert isinstance(load_model(dense), BiEncoder)
    reorder(dense, order)
    with pytest.raises(InputError, match="a dense model must have Transformer, Pooling, any number of Dense, and optionally Normalize"):
        load_model(dense)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", "[{", "modules.json: not a list of modules"),
        ("modules.json", '[{"idx": 0, "path": "", "type": "x.WordEmbeddings"}]', "got x.WordEmbeddings"),
        ("config.json", '{"model_type": "gpt2"}', "got 'gpt2'"),
        ("model.safetensors", "no weights", "corrupt checkpoint"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("model.safetensors", None, "model.safetensors is missing"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
    ],
)
def test_a_broken_folder_says_in_one_line_what_is_wrong(dense: Path, file: str, content: str | None, message: str) -> None:
    (dense / file).unlink()
    if content is not None:
        (dense / file).write_text(content)
    with pytest.raises(InputError) as caught:
        load_model(dense)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta"])
def test_settings_files_with_an_older_name_are_read(dense: Path, kind: str) -> None:
    path = dense / "sentence_bert_config.json"
    path.write_text(json.dumps({"max_seq_length": 17, "do_lower_case": True}))
    path.rename(dense / f"sentence_{kind}_config.json")
    settings = read_model_folder(dense)
    assert (settings.max_length, settings.lower_case) == (17, True)


@pytest.mark.parametrize(
    ("file", "key", "value", "message"),
    [
        ("sentence_bert_config.json", "max_seq_length", "64", "max_seq_length: must be a whole number, got '64'"),
        ("sentence_bert_config.json", "do_lower_case", 1, "do_lower_case: must be true or false, got 1"),
        ("sentence_bert_config.json", "max_seq_length", 0, "max_seq_length must be >= 1, got 0"),
        ("1_Pooling/config.json", "pooling_mode", ["mean"], "pooling must be one of"),
        ("config_sentence_transformers.json", "prompts", ["x"], "prompts: must be a mapping"),
        ("config_sentence_transformers.json", "prompts", {"document": 5}, "prompts.document: must be text, got 5"),
        (
            "config_sentence_transformers.json",
            "similarity_fn_name",
            "manhattan",
            "similarity_fn_name: must be one of cosine, dot; got 'manhattan'",
        ),
        ("1_Pooling/config.json", "include_prompt", "no", "include_prompt: must be true or false"),
        ("1_Pooling/config.json", "include_prompt", 0, "include_prompt: must be true or false"),
        ("2_Dense/config.json", "in_features", "x", "in_features: must be a number, got 'x'"),
        ("2_Dense/config.json", "in_features", 0, "in_features: must be >= 1, got 0"),
        ("2_Dense/config.json", "out_features", 17, "the tensors do not match config.json"),
        ("2_Dense/config.json", "activation_function", "os.system", "must be one of"),
        ("config.json", "hidden_size", "big", "hidden_size must be an integer"),
    ],
)
def test_mistyped_settings_are_named(dense: Path, file: str, key: str, value: object, message: str) -> None:
    path = dense / file
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(InputError) as caught:
        load_model(dense)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("skiplist_words", 5, "skiplist_words: must be a list"),
        ("skiplist_words", [5], "skiplist_words.0: must be text"),
        ("query_prefix", 5, "query_prefix: must be text"),
        ("query_prefix", "[X] ", "the prefix '[X] ' is not a token"),
        ("query_length", 2, "must be >= 4, got 2 and 60"),
    ],
)
def test_mistyped_colbert_settings_are_named(colbert: Path, key: str, value: object, message: str) -> None:
    path = colbert / "config_sentence_transformers.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(InputError) as caught:
        load_model(colbert)
    assert message in str(caught.value)


def test_widths_of_successive_modules_must_agree() -> None:
    settings = ModelFolder("dense", Path(), projections=(Projection(32, 16), Projection(17, 8)))
    with pytest.raises(InputError, match="Dense module 2 expects 17 features, its input has 16"):
        BiEncoder.from_parts(Encoder(CONFIG), tokenizer(), settings)


def test_loading_with_the_wrong_class_names_the_right_one(dense: Path, colbert: Path) -> None:
    with pytest.raises(InputError, match="load it with ColBERT"):
        BiEncoder(colbert)
    with pytest.raises(InputError, match="load it with BiEncoder"):
        ColBERT(dense)


def test_a_residual_module_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    settings = ModelFolder("dense", Path(), projections=(Projection(32, 16, residual=True),))
    with pytest.raises(InputError, match="residual Dense module, which the layout of sentence-transformers 5 does not support"):
        BiEncoder.from_parts(Encoder(CONFIG), tokenizer(), settings).save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_fingerprint_covers_architecture_settings_and_projections_and_nothing_else() -> None:
    words = tokenizer()

    def printed(settings: ModelFolder, **config: object) -> str:
        encoder = init_weights(Encoder(dataclasses.replace(CONFIG, **config)), seed=1)
        for projection in settings.projections:
            projection.linear.weight.data.fill_(0.5)
        return BiEncoder.from_parts(encoder, words, settings).card.fingerprint

    plain = ModelFolder("dense", Path())
    tanh = Projection(32, 16, activation="torch.nn.modules.activation.Tanh")
    prints = [
        printed(plain),
        printed(dataclasses.replace(plain, pooling="cls")),
        printed(dataclasses.replace(plain, query_prompt="query: ")),
        printed(dataclasses.replace(plain, normalize=True)),
        printed(dataclasses.replace(plain, projections=(Projection(32, 16),))),
        printed(dataclasses.replace(plain, projections=(tanh,))),
        *(printed(plain, **change) for change in ({"norm_eps": 0.1}, {"activation": "silu"}, {"num_heads": 4}, {"window": 4})),
    ]
    assert len(set(prints)) == len(prints)
    assert printed(plain, attention_dropout=0.3, pad_token_id=7) == prints[0]


def test_a_model_that_needs_prompts_and_has_none_gets_one_warning(dense: Path, caplog: pytest.LogCaptureFixture) -> None:
    named = dense.rename(dense.parent / "e5-small-v2")
    card = load_model(named).card
    (record,) = caplog.records
    assert record.getMessage().endswith("""pass --query-prompt "query: " --document-prompt "passage: \"""")
    caplog.clear()
    load_index_model(card)  # what an index was built with is not asked again
    load_model(named, options=ModelOptions(query_prompt=""))
    load_model(named.rename(named.parent / "my-model"))
    assert caplog.records == []


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **values}))


@pytest.mark.parametrize("length", [65, 66, 9999])
def test_a_folders_lengths_beyond_the_positions_are_limited_with_a_warning(
    dense: Path, colbert: Path, length: int, caplog: pytest.LogCaptureFixture
) -> None:
    change(dense / "sentence_bert_config.json", max_seq_length=length)
    change(colbert / "config_sentence_transformers.json", query_length=length, document_length=length)
    model, late = BiEncoder(dense), ColBERT(colbert)
    assert [record.getMessage() for record in caplog.records] == [
        f"{dense}: limited max_seq_length {length} to the encoder's 64 positions",
        f"{colbert}: limited query_length {length}, document_length {length} to the encoder's 64 positions",
    ]
    assert (model.max_seq_length, late.card.query_length, late.card.document_length) == (64, 64, 64)
    assert model.encode(["bird " * 500]).shape == (1, 16)
    assert len(late.encode_query("bird " * 500)) == 64
    for load in (
        lambda: BiEncoder(dense, max_seq_length=65),
        lambda: ColBERT(colbert, document_length=65),
    ):  # what the caller says is wrong
        with pytest.raises(InputError, match="65 exceeds the encoder's 64 positions"):
            load()
    with pytest.raises(InputError, match="65 exceeds the encoder's 64 positions"):
        model.max_seq_length = 65
    model.save_pretrained(dense.parent / "again")
    assert json.loads((dense.parent / "again" / "sentence_bert_config.json").read_text())["max_seq_length"] == 64
    index = build_index(["a bird", "wings"], model, dense.parent / "index")
    assert open_index(dense.parent / "index").search("bird", 2)[0].id == index.search("bird", 2)[0].id


@pytest.mark.parametrize("padding", [1, 3])
def test_robertas_positions_are_less_than_the_rows_of_their_table(tmp_path: Path, padding: int) -> None:
    words = tokenizer()
    positions = {"max_positions": 66 - padding - 1, "position_offset": padding + 1, "pad_token_id": padding}
    config = dataclasses.replace(
        preset("roberta-base"), vocab_size=320, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=("global",), **positions
    )
    folder = tmp_path / "model"
    BiEncoder.from_parts(init_weights(Encoder(config), seed=1), words, ModelFolder("dense", folder)).save_pretrained(folder)
    change(folder / "sentence_bert_config.json", max_seq_length=66)  # max_position_embeddings
    assert BiEncoder(folder).max_seq_length == 66 - padding - 1
    change(folder / "sentence_bert_config.json", max_seq_length=None)
    change(folder / "tokenizer_config.json", model_max_length=66)
    model = BiEncoder(folder)
    assert model.max_seq_length == 66 - padding - 1
    assert model.encode(["wings " * 100]).shape == (1, 32)


def test_an_adapter_beside_a_models_settings_changes_vectors_and_fingerprint(dense: Path, tmp_path: Path) -> None:
    """What sentence-transformers saves after add_adapter: its modules and the adapter, without weights."""
    module, folder = "layers.0.attn.Wqkv", tmp_path / "adapted"
    shutil.copytree(dense, folder, ignore=shutil.ignore_patterns("config.json", "model.safetensors", "tokenizer*"))
    shutil.copytree(dense / "1_Pooling", folder / "1_Pooling", dirs_exist_ok=True)
    shutil.copytree(dense / "2_Dense", folder / "2_Dense", dirs_exist_ok=True)
    a, b = torch.randn(2, 32, generator=torch.Generator().manual_seed(1)), torch.randn(96, 2, generator=torch.Generator().manual_seed(2))
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["Wqkv"], "base_model_name_or_path": "../dense"}
    change(folder / "adapter_config.json", **settings)
    save_file({f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b},
              folder / "adapter_model.safetensors")  # fmt: skip
    model, plain = BiEncoder(folder), BiEncoder(dense)
    assert model.card.fingerprint != plain.card.fingerprint
    model.save_pretrained(tmp_path / "merged")
    state, own = (load_file(each / "model.safetensors")[f"{module}.weight"] for each in (tmp_path / "merged", dense))
    torch.testing.assert_close(state, own + 2 * b @ a)
    saved = BiEncoder(tmp_path / "merged")
    np.testing.assert_array_equal(saved.encode(TEXTS), model.encode(TEXTS))
    assert saved.card.fingerprint == model.card.fingerprint
    assert np.abs(model.encode(TEXTS) - plain.encode(TEXTS)).max() > 1e-3
    model.save_pretrained(folder)  # over the adapter
    assert BiEncoder(folder).card.fingerprint == model.card.fingerprint


def bare(folder: Path) -> Path:
    """A plain Hugging Face folder."""
    for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        (folder / name).unlink()
    return folder


OTHER_TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "classifier": ({"architectures": ["BertForSequenceClassification"]}, "a cross-encoder or classifier, which scores pairs of texts"),
    "own classifier": ({"architectures": ["QuiverForSequenceClassification"]}, "it can be a teacher .quiver teacher-scores."),
    "saved by sentence-transformers 5": ({"architectures": None, "sentence_transformers": {"version": "5.3.0"}}, "a cross-encoder of"),
    "saved by sentence-transformers 3": ({"sbert_ce_default_activation_function": "torch.nn.Identity"}, "a cross-encoder of"),
    "tokens": ({"architectures": ["ModernBertForTokenClassification"]}, "with the head of another task, which has no vectors"),
    "answers": ({"architectures": ["RobertaForQuestionAnswering"]}, "the head of another task"),
    "choices": ({"architectures": ["XLMRobertaForMultipleChoice"]}, "the head of another task"),
    "next sentence": ({"architectures": ["BertForNextSentencePrediction"]}, "the head of another task"),
    "decoder": ({"architectures": ["BertLMHeadModel"]}, "a text generation model"),
    "causal": ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "a text generation model"),
    "sequence to sequence": ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "a text generation model"),
}


@pytest.mark.parametrize("name", OTHER_TASKS)
def test_a_model_for_another_task_is_no_retriever(dense: Path, name: str) -> None:
    config, message = OTHER_TASKS[name]
    change(bare(dense) / "config.json", **config)
    for load in (load_model, BiEncoder, ColBERT, load_index_model, load_trainable):
        with pytest.raises(InputError, match=message) as refused:
            load(str(dense))  # type: ignore[operator]
        assert str(refused.value).startswith(f"{dense}: ")
        assert "\n" not in str(refused.value)
    with pytest.raises(InputError, match=message):
        export_model(dense, dense.parent / "out", layout="hf")


TRANSFORMER = "sentence_transformers.base.modules.transformer.Transformer"
SPARSE = "sentence_transformers.sparse_encoder.models."


@pytest.mark.parametrize(
    ("written", "types", "message"),
    [
        ("CrossEncoder", [TRANSFORMER], "a cross-encoder of sentence-transformers"),
        (None, [TRANSFORMER, "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"], "a cross-encoder of"),
        ("SparseEncoder", [TRANSFORMER], "a sparse encoder of sentence-transformers, which is not supported"),
        (None, [f"{SPARSE}MLMTransformer", f"{SPARSE}SpladePooling"], "a sparse encoder"),
    ],
)
def test_other_models_of_sentence_transformers_are_named(dense: Path, written: str | None, types: list[str], message: str) -> None:
    (dense / "modules.json").write_text(json.dumps([{"idx": number, "path": "", "type": each} for number, each in enumerate(types)]))
    change(dense / "config_sentence_transformers.json", model_type=written)
    with pytest.raises(InputError, match=message):
        load_model(dense)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", torch.bfloat16])
def test_the_dtype_is_in_the_card_and_in_the_fingerprint(dense: Path, colbert: Path, dtype: Any) -> None:
    name = str(dtype).removeprefix("torch.")
    for folder in (dense, colbert):
        plain, model = load_model(folder), load_model(folder, dtype=dtype)
        assert model.card.dtype == name
        assert (model.card.fingerprint == plain.card.fingerprint) == (name == "float32")
        assert load_index_model(model.card).card == model.card == WorkerModel.of(model).load().card


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float16"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_a_gpu_has_half_precision_by_default(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {"cuda": capability, "cuda:1": (7, 0)}[device])
    assert [default_dtype(device) for device in ("cuda", "cuda:1", "cpu")] == [dtype, "float16", "float32"]


def test_int8_runs_on_the_cpu_of_a_machine_with_a_gpu(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert load_model(dense, dtype="int8").encoder.device.type == "cpu"
    with pytest.raises(InputError, match="dtype int8 is for CPUs, and the device is cuda"):
        load_model(dense, dtype="int8", device="cuda")


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "device must be cpu, cuda or cuda:NUMBER, got 'gpu'"),
        ("cpu:1", "device must be"),
        ("cuda:x", "device must be"),
        ("cuda:2", "device cuda:2 is not available: PyTorch finds 2 GPUs here"),
    ],
)
def test_a_device_that_is_not_there_is_refused(dense: Path, monkeypatch: pytest.MonkeyPatch, device: str, message: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match=message):
        load_model(dense, device=device)


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_the_batch_size_is_that_of_the_device_or_the_one_asked_for(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    assert load_model(folder, device="cpu").batch_size.tokens == 4096
    model = load_model(folder, device="cpu", batch_tokens=70)
    assert model.batch_size.tokens == 70
    assert type(model)(folder, batch_tokens=9, device="cpu").batch_size.tokens == 9
    assert load_index_model(model.card, device="cpu", batch_tokens=9).batch_size.tokens == 9
    # Workers encode with the same batches, and no caller loses the size that is left after memory ran out.
    assert WorkerModel.of(model).load().batch_size.tokens == 70
    model.batch_size.halve(60)
    assert model.batch_size.tokens == 30


DENSE = ModelOptions(document_length=9, query_prompt="question: ", document_prompt="text: ", truncate_dim=4)
LATE = ModelOptions(query_length=12, document_length=20, query_prompt="question: ", document_prompt="text: ")


@pytest.mark.parametrize("kind", ["dense", "colbert"])
def test_an_index_is_searched_with_the_settings_that_it_was_built_with(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder, options = request.getfixturevalue(kind), DENSE if kind == "dense" else LATE
    plain, model = load_model(folder), load_model(folder, options=options)
    texts = ["a bird has wings " * 9, "wings"]
    assert model.card.fingerprint != plain.card.fingerprint
    assert model.card.document_length == options.document_length
    index = build_index(texts, model, tmp_path / "index")
    assert index.manifest.model.dim == (4 if kind == "dense" else 8)
    again = load_index_model(open_index(tmp_path / "index").manifest.model)
    assert again.card.fingerprint == model.card.fingerprint == WorkerModel.of(model).load().card.fingerprint
    for role in ("query", "document"):
        wanted, found = model.encode_texts(texts, cast(Any, role)), again.encode_texts(texts, cast(Any, role))
        assert (
            wanted.tokens.tokens.tolist()
            == found.tokens.tokens.tolist()
            != plain.encode_texts(texts, cast(Any, role)).tokens.tokens.tolist()
        )
        np.testing.assert_array_equal(np.concatenate(list(wanted.vectors)), np.concatenate(list(found.vectors)))
    hits = open_index(tmp_path / "index").search("bird", 2)
    assert [(hit.id, hit.score) for hit in hits] == [(hit.id, hit.score) for hit in index.search("bird", 2)]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("dense", ModelOptions(query_length=9), "one maximum length for queries and documents; pass document_length"),
        ("dense", ModelOptions(document_length=1), "must be >= 3, .* got 1"),
        ("dense", ModelOptions(truncate_dim=1000), "fewer than truncate_dim"),
        ("dense", ModelOptions(document_length=65), "exceeds the encoder's 64 positions"),
        ("colbert", ModelOptions(document_length=65), "exceeds the encoder's 64 positions"),
        ("colbert", ModelOptions(query_length=3), "must be >= 4"),
        ("colbert", ModelOptions(truncate_dim=3), "applies to bi-encoders"),
    ],
)
def test_settings_that_do_not_fit_are_refused(kind: str, options: ModelOptions, message: str, request: pytest.FixtureRequest) -> None:
    with pytest.raises(InputError, match=message):
        load_model(request.getfixturevalue(kind), options=options)


def test_the_fingerprint_of_a_model_stays_what_indexes_have_stored(minilm: Path) -> None:
    """A new field of `EncoderConfig` must not invalidate the indexes of all models: it counts only where it has an effect."""
    assert load_model(minilm).card.fingerprint == "37f60918b04abbadbc6678ef7e611b266f327056c213a65c34e4e8da02da6602"
