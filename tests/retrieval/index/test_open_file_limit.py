"""Limits on open files: 256 on macOS, 1,024 on most Linux systems. Every test is a process of its own with such a limit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.processes import imported_python

pytest.importorskip("resource")
REPOSITORY = Path(__file__).resolve().parents[3]
MODELS = """
import resource, sys
from pathlib import Path

resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights
from quiver.encoder.errors import InputError
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.index import BuildOptions, DamagedIndexError, check_index, open_index
from quiver.retrieval.index import add_documents, build_index, compact_index, delete_documents
from quiver.retrieval.index.pieces import PieceSizes
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.records import Document

tokenizer = Tokenizer.train(["the sea is deep", "a bird has wings"], vocab_size=300)
for prefix in ("[Q] ", "[D] "):
    tokenizer.add_token(prefix)
config = EncoderConfig.modernbert(
    vocab_size=384, hidden_size=16, num_heads=2, intermediate_size=24, layer_types=["global"], max_positions=32
)
encoder = init_weights(Encoder(config), seed=3)
folder = Path(sys.argv[2])
if sys.argv[1] == "dense":
    model = BiEncoder.from_parts(encoder, tokenizer, ModelFolder("dense", Path(), max_length=16))
else:
    lengths = ColBERTSettings(query_length=8, document_length=16)
    settings = ModelFolder("colbert", Path(), projections=(Projection(16, 8),), similarity="maxsim", colbert=lengths)
    model = ColBERT.from_parts(encoder, tokenizer, settings)
model.save_pretrained(folder / "model")
model = type(model)(folder / "model")


def documents(count, prefix="d"):
    return [Document(f"{prefix}{number}", f"{number:x}") for number in range(count)]


def first(index, text):
    vectors = model.encode_texts([text], "query").vectors
    return index.search(vectors, 1, effort="exact")
"""
BUILD = """
count = int(sys.argv[3])
if count == 60_000:
    options = BuildOptions()
else:  # more pieces than those have, of few documents, by the engines that they get
    engines = {"dense": "pq-dense", "colbert": "ivf-tokens"}
    options = BuildOptions(engine=engines[sys.argv[1]], pieces=PieceSizes(chunk_documents=64, least_documents=64))
index = build_index(documents(count), model, folder / "index", options=options)
assert (len(index), index.ids[count - 1], len(index.manifest.segments)) == (count, f"d{count - 1}", 1)
assert len(first(index, "1a2b").ids[0]) == 1
print("built")
"""
SEGMENTS = """
options = BuildOptions(engine="exact", memory=1 << 18)
index = build_index(documents(12_000), model, folder / "index", options=options)
print(len(index.manifest.segments), "segments")
wanted = first(index, "1a2b")
add_documents(folder / "index", documents(3, "new"), model)
delete_documents(folder / "index", ["new0", "new1", "new2"])
index = compact_index(folder / "index")
assert (len(index), len(index.manifest.segments)) == (12_000, 1)
found = first(index, "1a2b")
assert found.ids == wanted.ids and abs(found.scores[0] - wanted.scores[0]).max() < 1e-6
assert not check_index(folder / "index").problems
"""
EXHAUSTED = """
build_index(documents(2000), model, folder / "index")
opened = failed = 0
for left in range(4):
    for action in (open_index, check_index):
        held = []
        try:
            while True:
                held.append(open("/dev/null"))
        except OSError:
            pass
        for file in held[:left]:
            file.close()
        try:
            action(folder / "index")
            opened += 1
        except InputError as error:
            failed += 1
            assert "ulimit -n" in str(error) and not isinstance(error, DamagedIndexError), error
        finally:
            for file in held:
                file.close()
print(opened, failed)
"""


def run(script: str, kind: str, folder: Path, *arguments: object) -> str:
    """What a script prints that may have 256 files open."""
    command = [imported_python(), "-c", MODELS + script, kind, str(folder), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["dense", "colbert"])
@pytest.mark.parametrize("count", [10_000, pytest.param(60_000, marks=pytest.mark.exhaustive)])
@pytest.mark.slow
def test_a_build_of_many_pieces_needs_few_open_files(kind: str, count: int, tmp_path: Path) -> None:
    assert run(BUILD, kind, tmp_path, count) == "built\n"


@pytest.mark.parametrize("kind", ["dense", pytest.param("colbert", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_an_index_of_many_segments_is_opened_changed_and_compacted_with_few_open_files(kind: str, tmp_path: Path) -> None:
    segments, _ = run(SEGMENTS, kind, tmp_path).split()
    assert int(segments) >= 23  # a dozen files each are more than 256


def test_too_many_open_files_are_no_damage(tmp_path: Path) -> None:
    opened, failed = map(int, run(EXHAUSTED, "dense", tmp_path).split())
    assert opened >= 2  # one file at a time is enough
    assert failed >= 2
