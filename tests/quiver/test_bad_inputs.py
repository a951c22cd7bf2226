"""Several hundred mistakes in commands and Python: one line that names the mistake, no traceback, and no file written or changed.

The commands run in the folder that `world` makes; each line is what a user types after ``quiver``.
"""

from __future__ import annotations

import gzip
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiver import BiEncoder, ColBERT, Document, InputError, build_index, evaluate, open_index
from quiver.encoder import Encoder, init_weights
from quiver.retrieval.index import BuildOptions
from tests.retrieval.models.small import CONFIG, make_colbert, make_dense, make_tokenizer

TEXTS = {"d1": "a bird has wings and feathers", "d2": "the window of a local layer is narrow", "d3": "", "d4": "find what was asked for"}
FILES: dict[str, str | bytes] = {
    "oops.jsonl": '{"_id": "a", "text": "x"}\n{oops\n',
    "notext.jsonl": '{"_id": "a", "name": "x"}\n',
    "dup.jsonl": '{"_id": "a", "text": "x"}\n{"_id": "a", "text": "y"}\n',
    "nul.jsonl": '{"_id": "", "text": "x"}\n',
    "surrogate.jsonl": '{"_id": "a", "text": "\\ud800"}\n',
    "cut.jsonl.gz": gzip.compress(b'{"_id": "a", "text": "x"}\n' * 50)[:30],
    "bad.parquet": b"PAR1 no",
    "header.csv": "id,text\n",
    "quote.csv": 'id,text\na,"never closed\n',
    "good.csv": "sku,words\na,some words\nb,more words\n",
    "list.json": '{"a": 1}',
    "oops.json": '{"a": ',
    "q-blank.jsonl": '{"_id": "q", "text": " "}\n',
    "rows.jsonl": "".join(json.dumps({"query": f"number {n}", "positive": f"def number_{n}(): return {n}"}) + "\n" for n in range(8)),
    "rows-bad.jsonl": '{"query": "a"}\n',
    "rows-oops.jsonl": '{"query": "a", "positive": "b"}\n{oops\n',
    "squad.json": '{"data": 3}',
    "empty-token": "",
    "tab.yaml": "kind:\tdense\n a: [",
    "unsafe.yaml": "kind: !!python/object/apply:os.system ['true']\n",
}

COMMANDS = r"""
index bild
index build
index build data --model model
index build --model model --out o
index build nowhere --model model --out o
index build data --model model --revision main --out o
index build f/x.xyz --model model --out o
index build emptydir --model model --out o
index build onlybin --model model --out o
index build f/oops.jsonl --model model --out o
index build f/notext.jsonl --model model --out o
index build f/dup.jsonl --model model --out o
index build f/nul.jsonl --model model --out o
index build f/surrogate.jsonl --model model --out o
index build f/cut.jsonl.gz --model model --out o
index build f/bad.parquet --model model --out o
index build f/quote.csv --model model --out o
index build f/good.csv --text wrds --model model --out o
index build f/good.csv --text words --field nothing --model model --out o
index build data --columns id,text --model model --out o
index build data --passages bogus --model model --out o
index build data --passages tokens:8,overlap:9 --model model --out o
index build data --include '*.md' --model model --out o
index build data --model nowhere --out o
index build data --model badconfig --out o
index build data --model noweights --out o
index build data --model cutweights --out o
index build data --model model --out taken
index build data --model model --out index
index build data --model model --out o --engine exact:nlist=4
index build data --model model --out o --engine ivf-dense:nlist=x,bits=99
index build data --model model --out o --engine faiss-dense:factory=Nonsense
index build data --model model --out o --engine ivf-tokens
index build data --model colbert --out o --engine ivf-dense
index build data --model model --out o --memory nanGB
index build data --model model --out o --wait soon
index build data --model model --out o --seed -1
index build data --model model --out o --device tpu
index build data --model model --out o --devices cpu,cpu --workers 2
index build data --model model --out o --executor slurm
index build data --model model --out o --address 1.2.3.4:1
index build data --model model --out o --workers 0
index build data --model model --out o --field nothing
index add nowhere data
index add index data
index add index f/good.csv --text words --model other
index add damaged nowhere
index delete index
index delete index d99
index delete index --ids nowhere.txt
index delete index d1 --wait x
index refresh index data --model other
index calibrate index -k 0
index calibrate index --model other
index calibrate index --queries data/queries.jsonl --model other
index repair nowhere
index info nowhere
index info index --generation 99
index export nowhere --out o
index export index --out taken
index export index --out o --vectors csv
search index
search index words -k 0
search index --queries data/queries.jsonl
search index words --run o.trec
search index --queries f/q-blank.jsonl --run o.trec
search index --queries data/queries.jsonl --run nowhere/o.trec
search index words --filter 'nofield=3'
search index words --filter 'year >= '
search index words --ids nowhere.txt
search index words --effort frantic
search index words --effort nprobe=8
search index words --target-recall 0.9 --effort exact
search index words --fuse nowhere
search index words --fuse bm25 --fuse bm25
search index words --fuse bm25 --weights a,b
search index words --weights 1,2
search index words --fusion rrf
search index words --fuse bm25 --normalize min-max
search index words --rerank model
search index words --group-by nofield
search index --queries data/queries.jsonl --run o.trec --explain
search index words --model other
search index words --generation 99
search index words --replicas 2
search index words --shards 0
search index words --generation 1 --shards 1
search
search nowhere words
search plain words --fuse bm25
search plain words --rerank colbert
search plain words --group-by file
search damaged words
mine data --model model --split test --index index --corpus data --out o
mine data --model other --index index --split test --out o
mine data --model model --out o
mine data --model model --split test --out taken
mine data --model model --split test --margin bogus --out o
mine data --model model --split test -n 0 --out o
mine data --model bm25 --dtype int8 --split test --out o
mine data --model bm25 --workers 2 --split test --out o
mine f/rows.jsonl --positive-field nothing --model bm25 --out o
mine f/rows-oops.jsonl --model bm25 --out o
mine data --model model --corpus data --split test --out o
serve =index
serve index index
serve index --port 99999
serve index --token-file nowhere
serve index --token-file f/empty-token
serve index --allow-origin nonsense
serve index --allow-host 'a b'
serve index --max-body 0
serve index --model other
serve
serve a=nowhere
evaluate
evaluate --model model --data nowhere --out o
evaluate --model model --data badqrels --out o
evaluate --model model --data noqrels --out o
evaluate --model model --out o
evaluate --model model --queries data/queries.jsonl --qrels data/qrels/test.tsv --out o
evaluate --model bm25 --queries data/queries.jsonl --qrels f/header.csv --out o
evaluate --index index --queries data/queries.jsonl --qrels f/good.csv --out o
evaluate --index index --data data --qrels data/qrels/test.tsv --split test --out o
evaluate --index index --data data --group-by page --out o
evaluate --model model --data data --group-by file --out o
evaluate --model model --data data --split ../x --out o
evaluate --model model --data data --out results
evaluate --model bm25 --data data --out o --engine ivf-dense
evaluate --model model --data data --out o --cache c --no-cache
evaluate --model model --data data --out o --in-domain nowhere
evaluate --model model --data beir/scifact --out o --offline
report nowhere --out o.md
report results --out o.docx
report badresults --out o.md
report results --layout paper --against Nobody --out o.md
report results --against ModernBERT-base --out o.md
report compare results
report card nowhere --out o.yaml
report mteb nowhere --out o
report training nowhere
collections show nothing
collections fetch nothing
collections fetch beir/scifact --from nowhere
collections squad f/squad.json --out o
train
train nowhere --out o
train f/tab.yaml --out o
train f/unsafe.yaml --out o
train quickstart --out o training.batchsize=3
train quickstart --out o training.learning_rate=nan
train quickstart --out o data.train=f/rows-bad.jsonl
train quickstart --out o data.train=f/rows.jsonl model.source=nowhere
train quickstart --out o data.train=f/rows.jsonl --resume
train quickstart --out o --dtype int8
train glue-base --out o
train pretrain-small --out o
validate nowhere
sweep quickstart --out o training.bogus=1,2
pretrain nowhere --out o
pretrain quickstart --out o
pretrain pretrain-small --out o phases.0.tokens=0
pretrain pretrain-small --out o --resume
average-checkpoints model colbert --out o
average-checkpoints model other --out taken
teacher-scores f/rows.jsonl --out o
teacher-scores f/rows-bad.jsonl -t model --out o
teacher-scores f/rows.jsonl -t model --weight 1 --out o
teacher-scores f/rows.jsonl -t model -t other --weight 1 --out o
teacher-scores f/rows.jsonl -t model -t other --weight 0 --weight 0 --out o
teacher-scores f/rows.jsonl -t model --format ids --out o
teacher-scores f/rows.jsonl -t model --document-field nothing --out o
export model --layout pylate --out o
export colbert --layout sentence-transformers --out file.txt
export model --layout hf --out model
export model --layout hf --out o --run-folder nowhere
export badconfig --layout hf --out o
enlarge model --to bogus --out o
enlarge model --to f/list.json --out o
enlarge model --to modernbert-base --out taken
extend-positions nowhere --factor 2 --out o
extend-positions model --factor 2 --out o --plot x.docx
estimate --model modernbert-base
estimate --model modernbert-base --docs inf
estimate --model modernbert-base --docs 10 --preset-collection msmarco
estimate --model modernbert-base --docs 10 --engine bogus
estimate --model modernbert-base --docs 10 --gpu gtx
estimate --model modernbert-base --docs 10 --rates nowhere.json
estimate --model model --sample nowhere
estimate --model modernbert-base --docs 10 --words nan
glue quickstart --out o
glue glue-base --out o --task bogus
glue glue-base --out o data.source=nowhere model.source=model
qa train qa-korquad --out o data.train=nowhere model.source=model
qa evaluate --model nowhere --data f/squad.json --official squad_v1 --out o
qa evaluate --model model --data f/squad.json --official squad_v1 --out o
cache prune --size x
doctor extra
quickstart --out o training.batchsize=3
quickstart --out file.txt
""".strip().splitlines()


def make_models(folder: Path) -> None:
    words = make_tokenizer([*TEXTS.values()], max_length=64)
    for seed, name in ((1, "model"), (2, "other")):
        make_dense(words, init_weights(Encoder(CONFIG), seed=seed), max_length=12, normalize=True).save_pretrained(folder / name)
    make_colbert(words).save_pretrained(folder / "colbert")


def make_collection(folder: Path) -> None:
    (folder / "qrels").mkdir(parents=True)
    rows = [{"_id": key, "title": "", "text": text, "year": 2000 + n} for n, (key, text) in enumerate(TEXTS.items())]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "queries.jsonl").write_text('{"_id": "q1", "text": "which animal has wings"}\n{"_id": "q2", "text": "search"}\n')
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\nq2\td4\t2\n")


def damaged_copy(source: Path, name: str, file: str, change: Callable[[Path], object]) -> None:
    copy = source.with_name(name)
    shutil.copytree(source, copy)
    change(next(copy.rglob(file)))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection, models, indexes, results, and damaged copies of them."""
    root = tmp_path_factory.mktemp("world")
    make_models(root)
    make_collection(root / "data")
    for name, model, stored in (("index", BiEncoder, True), ("colindex", ColBERT, True), ("plain", BiEncoder, False)):
        opened = model(root / ("colbert" if model is ColBERT else "model"))
        build_index(root / "data", opened, root / name, options=BuildOptions(store_text=stored, calibrate=False))
    evaluate("bm25", root / "data", out=root / "results")
    (root / "f").mkdir()
    for name, content in FILES.items():
        (root / "f" / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (root / "emptydir").mkdir()
    (root / "onlybin").mkdir()
    (root / "onlybin" / "a.bin").write_bytes(b"\0\1")
    (root / "taken").mkdir()
    (root / "taken" / "mine.txt").write_text("my own file")
    (root / "file.txt").write_text("a file")
    damaged_copy(root / "index", "damaged", "vectors.json", cut)
    damaged_copy(root / "model", "badconfig", "config.json", lambda path: path.write_text("{oops"))
    damaged_copy(root / "model", "noweights", "model.safetensors", Path.unlink)
    damaged_copy(root / "model", "cutweights", "model.safetensors", cut)
    damaged_copy(root / "model", "notokenizer", "tokenizer.json", Path.unlink)
    damaged_copy(root / "results", "badresults", "results.json", lambda path: path.write_text("{"))
    damaged_copy(root / "data", "badqrels", "test.tsv", lambda path: path.write_text("query-id\tcorpus-id\tscore\nq1\td1\n"))
    damaged_copy(root / "data", "noqrels", "qrels", shutil.rmtree)
    return root


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file; 0 for folders, and without the lock of an index, which holds no data."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else (0, 0)
        for path in folder.rglob("*")
        if path.name != "LOCK"
    }


@pytest.fixture
def unchanged(world: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Work in the folder, and compare it before and after."""
    monkeypatch.chdir(world)
    before = listing(world)
    yield world
    assert listing(world) == before


def is_named(arguments: list[str], message: str) -> bool:
    """Whether the message names an option, an argument or a part of an argument."""
    parts = [part for each in arguments for part in [each.removeprefix("--"), *each.replace(":", "=").replace(",", "=").split("=")] if part]
    return any(part in message for part in [*parts, "--", " blank", " empty"])


def test_there_are_at_least_two_hundred_commands() -> None:
    assert len(set(COMMANDS)) == len(COMMANDS) >= 200


@pytest.mark.parametrize("line", COMMANDS)
def test_a_mistake_in_a_command_is_one_line(quiver: Callable[..., Any], unchanged: Path, line: str) -> None:
    arguments = shlex.split(line)
    done = quiver(*arguments)
    assert (done.code, done.out) == (2, ""), (done.out, done.err)
    [message] = [said for said in done.err.splitlines() if not said.startswith("opening ")]  # quiver serve says first what it opens
    assert message.startswith("quiver: error: ")
    assert is_named(arguments, message.removeprefix("quiver: error: ")), message


PYTHON: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing model": (lambda world: BiEncoder("./nowhere"), "neither an existing folder nor a hub id"),
    "a ColBERT model as a bi-encoder": (lambda world: BiEncoder(world / "colbert"), "ColBERT"),
    "a bi-encoder as a ColBERT model": (lambda world: ColBERT(world / "model"), "not a ColBERT checkpoint"),
    "an unknown dtype": (lambda world: BiEncoder(world / "model", dtype="float64"), "float64"),
    "an unknown device": (lambda world: BiEncoder(world / "model", device="tpu"), "tpu"),
    "a damaged model": (lambda world: BiEncoder(world / "cutweights"), "corrupt checkpoint"),
    "a missing index": (lambda world: open_index(world / "nowhere"), "no such folder"),
    "a file as an index": (lambda world: open_index(world / "file.txt"), "a file, not an index folder"),
    "a damaged index": (lambda world: open_index(world / "damaged"), "quiver index repair"),
    "a missing generation": (lambda world: open_index(world / "index", generation=99), "99"),
    "a missing corpus": (lambda world: build_index(world / "nowhere", BiEncoder(world / "model")), "no such file or folder"),
    "no documents": (lambda world: build_index([], BiEncoder(world / "model")), "no documents"),
    "two documents of one id": (
        lambda world: build_index([Document("a", "x"), Document("a", "y")], BiEncoder(world / "model"), world / "o"),
        "'a'",
    ),
    "a mapping without a text": (lambda world: build_index([{"id": "a"}], BiEncoder(world / "model"), world / "o"), "text"),
    "an index that exists": (
        lambda world: build_index(world / "data", BiEncoder(world / "model"), world / "index"),
        "--overwrite (overwrite=True in Python)",
    ),
    "a folder of other files": (lambda world: build_index(world / "data", BiEncoder(world / "model"), world / "taken"), "neither empty"),
    "a filter without a value": (lambda world: open_index(world / "index").search("wings", filter="year"), "year"),
    "a filter of an unknown field": (lambda world: open_index(world / "index").search("wings", filter="nofield=3"), "nofield"),
    "groups of an unknown field": (lambda world: open_index(world / "index").search("wings", group_by="nofield"), "nofield"),
    "groups of an index without texts": (lambda world: open_index(world / "plain").search("wings", group_by="file"), "--no-text"),
    "an unknown effort": (lambda world: open_index(world / "index").search("wings", effort="frantic"), "frantic"),
    "a missing collection": (lambda world: evaluate("bm25", world / "nowhere", out=world / "o"), "nowhere"),
    "a missing split": (lambda world: evaluate("bm25", world / "data", split="train", out=world / "o"), "train"),
    "results that exist": (lambda world: evaluate("bm25", world / "data", out=world / "results"), "overwrite"),
    "judgements with two columns": (lambda world: evaluate("bm25", world / "badqrels", out=world / "o"), "test.tsv:2"),
}


@pytest.mark.parametrize("mistake", PYTHON)
def test_a_mistake_in_python_is_an_input_error_of_one_line(unchanged: Path, mistake: str) -> None:
    call, fragment = PYTHON[mistake]
    with pytest.raises(InputError) as caught:
        call(unchanged)
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)
