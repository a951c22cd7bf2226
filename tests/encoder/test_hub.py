"""Which files of a hub's repository are fetched: safetensors, and pickled weights only where a folder has none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from quiver.encoder import InputError, load_encoder
from quiver.encoder.checkpoints.checkpoint import local_folder

Fetched = Callable[..., list[str]]

BGE_M3 = (
    "README.md 1_Pooling/config.json colbert_linear.pt config.json config_sentence_transformers.json modules.json onnx/config.json "
    "onnx/model.onnx onnx/tokenizer.json openvino/openvino_model.bin pytorch_model.bin sentence_bert_config.json sentencepiece.bpe.model "
    "sparse_linear.pt special_tokens_map.json tokenizer.json tokenizer_config.json training_args.bin"
)
ENCODER, DENSE, POOLING = '{"model_type": "xlm-roberta"}', '{"in_features": 8}', '{"pooling_mode_cls_token": true}'


class Repository:
    """A repository as `huggingface_hub.snapshot_download` gives it: files go into one cache folder."""

    def __init__(self, files: dict[str, bytes], cache: Path) -> None:
        self.files, self.cache, self.calls = files, cache, 0

    def snapshot_download(
        self, repo_id: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str], local_files_only: bool
    ) -> str:
        assert (repo_id, revision) == ("owner/name", "v1")
        self.calls += 1
        for name in self.matching(allow_patterns, ignore_patterns):
            path = self.cache / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.files[name])
        return str(self.cache)

    def matching(self, allow: list[str], ignore: list[str] | None) -> Iterable[str]:
        return filter_repo_objects(self.files, allow_patterns=allow, ignore_patterns=ignore)


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fetched:
    """What is fetched of a repository with these files."""

    def fetch(files: dict[str, str], *, calls: int | None = None) -> list[str]:
        repository = Repository({name: text.encode() for name, text in files.items()}, tmp_path)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", repository.snapshot_download)
        assert local_folder("owner/name", revision="v1") == tmp_path
        assert calls in (None, repository.calls)
        return sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())

    return fetch


def test_a_repository_without_safetensors_gives_its_pickled_weights_and_nothing_else(fetched: Fetched) -> None:
    files = dict.fromkeys(BGE_M3.split(), "{}") | {"config.json": ENCODER, "1_Pooling/config.json": POOLING, "onnx/config.json": ENCODER}
    found = fetched(files)
    assert "pytorch_model.bin" in found
    assert [name for name in found if not name.endswith(".json")] == ["pytorch_model.bin"]
    assert not any(name.startswith(("onnx", "openvino")) for name in found)
    assert {"config.json", "1_Pooling/config.json", "modules.json", "tokenizer.json"} <= set(found)


def test_pickled_weights_beside_safetensors_are_not_fetched_and_the_rest_in_one_call(fetched: Fetched) -> None:
    files = {"config.json": ENCODER, "model.safetensors": "", "pytorch_model.bin": "", "1_Pooling/config.json": POOLING}
    assert fetched(files, calls=1) == ["1_Pooling/config.json", "config.json", "model.safetensors"]


def test_pickled_shards_are_fetched_by_their_index(fetched: Fetched) -> None:
    shards = [f"pytorch_model-{number:05}-of-00002.bin" for number in (1, 2)]
    index = json.dumps({"weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}})
    files = {"config.json": ENCODER, "pytorch_model.bin.index.json": index, **dict.fromkeys(shards, ""), "pytorch_model.old.bin": ""}
    assert fetched(files) == sorted(["config.json", "pytorch_model.bin.index.json", *shards])


def test_a_dense_module_without_safetensors_gives_its_pickled_weights(fetched: Fetched) -> None:
    files = {"config.json": ENCODER, "model.safetensors": "", "pytorch_model.bin": "", "1_Pooling/config.json": POOLING}
    wanted = {"config.json", "model.safetensors", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/pytorch_model.bin"}
    assert set(fetched(files | {"2_Dense/config.json": DENSE, "2_Dense/pytorch_model.bin": ""})) == wanted


def test_an_adapter_is_fetched_as_safetensors_or_pickled(fetched: Fetched) -> None:
    config, base = '{"base_model_name_or_path": "owner/base"}', {"config.json": ENCODER, "model.safetensors": ""}
    found = fetched({**base, "adapter_config.json": config, "adapter_model.safetensors": "", "adapter_model.bin": ""})
    assert found == ["adapter_config.json", "adapter_model.safetensors", "config.json", "model.safetensors"]


def test_weights_that_the_cache_lacks_offline_are_an_input_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(ENCODER)

    def offline(repo_id: str, *, allow_patterns: list[str], **options: object) -> str:
        if "pytorch_model.bin" in allow_patterns:
            raise LocalEntryNotFoundError("The cached snapshot is incomplete")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(InputError, match="The cached snapshot is incomplete"):
        load_encoder("owner/name")


def test_an_unknown_name_offline_is_one_plain_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError) as raised:
        local_folder("no-such-model")
    assert str(raised.value) == (
        "no-such-model: no such folder, and the Hugging Face Hub cannot be asked because HF_HUB_OFFLINE is set; pass the folder of a model,"
        " or unset HF_HUB_OFFLINE"
    )
