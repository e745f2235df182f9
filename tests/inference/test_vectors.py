"""`extract` with embeddings: every format, chunks, and resuming after an interruption."""

import dataclasses
import json
import os

import jax
import numpy as np
import pyarrow.parquet
import pytest

from bertjax.common.errors import UserError
from bertjax.inference import text_embedding
from bertjax.inference.hidden_states import compute_hidden_states
from bertjax.inference.quantization import Quantizer, read_ranges
from bertjax.inference.text_embedding import PooledStatesEmbedder
from bertjax.interop import conversion, pretrained
from bertjax.models.families import encoder_of
from tests.conftest import TOPICS
from tests.interop.test_golden import edit
from tests.markers import slow_case
from tests.processes import run

WORDS = [word for words in TOPICS.values() for word in words]


def texts_of(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(0, 30))) for _ in range(count)]


TEXTS = [*texts_of(38), "", "word " * 70]


@pytest.fixture(scope="module")
def source(checkpoint):
    return pretrained.read_pretrained(checkpoint)


@pytest.fixture(scope="module")
def compiled(source):
    return PooledStatesEmbedder(source, "last", "mean")


@pytest.fixture
def make(compiled, monkeypatch):
    """Embeddings in chunks of eight texts."""
    monkeypatch.setattr(text_embedding, "PORTION_TEXTS", 8)
    return compiled


@pytest.mark.parametrize("pool", ["mean", slow_case("cls"), "last"])
def test_vectors_are_pooled_hidden_states(source, pool):
    vectors, cut = PooledStatesEmbedder(source, "sum_all", pool)(TEXTS)
    model, params = encoder_of(source.config), source.params["bert"]
    states = compute_hidden_states(model, params, source.tokenizer, TEXTS, "sum_all")
    pooled = {"mean": lambda x: x.mean(0), "cls": lambda x: x[0], "last": lambda x: x[-1]}[pool]
    np.testing.assert_allclose(vectors, list(map(pooled, states)), atol=1e-5)
    assert cut[-1] and not cut[-2]


def test_mask_tokens_in_texts_are_encoded_as_mask_tokens(source, compiled):
    masked, plain = compiled(["a [MASK]", "a mask"])[0]
    (states,) = compute_hidden_states(
        encoder_of(source.config), source.params["bert"], source.tokenizer, ["a [MASK]"], "last"
    )
    assert len(states) == 4 and np.abs(masked - states.mean(0)).max() < 1e-5 < np.abs(masked - plain).max()


def contents(path):
    if path.suffix == ".parquet":
        table = pyarrow.parquet.read_table(path)
        assert table.column_names[-1] == "vector"
        return np.array(table["vector"].to_pylist(), np.float32)
    array = np.load(path)
    return array["vectors"] if path.suffix == ".npz" else array


@pytest.mark.slow
@pytest.mark.parametrize("suffix", text_embedding.SUFFIXES)
def test_all_formats_store_equal_vectors(make, suffix, tmp_path):
    path = tmp_path / f"new/v{suffix}"
    assert text_embedding.write_embeddings(path, make, iter(TEXTS), size=9) == ((40, 32), 1)
    stored = contents(path)
    assert stored.dtype == np.float32 and list(path.parent.iterdir()) == [path]
    np.testing.assert_allclose(stored, make(TEXTS)[0], atol=1e-5)


def small_contents(path):
    """Returns the small vectors of a file, and their description."""
    if path.suffix == ".parquet":
        table = pyarrow.parquet.read_table(path)
        dtype = table.schema.field("vector").type.value_type.to_pandas_dtype()
        return np.array(table["vector"].to_pylist(), dtype), json.loads(table.schema.metadata[b"description"])
    if path.suffix == ".npz":
        archive = np.load(path)
        return archive["vectors"], json.loads(str(archive["description"]))
    return np.load(path), json.loads((path.parent / f"{path.name}.json").read_text())


@pytest.mark.parametrize("suffix", text_embedding.SUFFIXES)
@pytest.mark.parametrize("precision", ["int8", "ubinary"])
def test_small_vectors_are_written_with_their_description(make, precision, suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(text_embedding, "ROWS_AT_ONCE", 7)
    path = tmp_path / f"v{suffix}"
    text_embedding.write_embeddings(tmp_path / "full.npy", make, TEXTS)
    full = np.load(tmp_path / "full.npy")
    shape, _ = text_embedding.write_embeddings(path, make, TEXTS, precision=precision)
    small, description = small_contents(path)
    quantizer = Quantizer.calibrated(precision, full)
    assert small.dtype == quantizer.dtype and small.shape == shape == (40, 32 if precision == "int8" else 4)
    np.testing.assert_array_equal(small, quantizer(full))
    ranges = [full.min(0).tolist(), full.max(0).tolist()] if precision == "int8" else None
    assert description == {"precision": precision, "width": 32, "ranges": ranges}
    if ranges:  # The .json is a calibration of further texts.
        (tmp_path / "ranges.json").write_text(json.dumps(description))
        text_embedding.write_embeddings(
            path, make, TEXTS[:2], precision="int8", ranges=read_ranges(f"{tmp_path}/ranges.json")
        )
        np.testing.assert_array_equal(small_contents(path)[0], small[:2])
    text_embedding.write_embeddings(path, make, TEXTS)
    np.testing.assert_array_equal(contents(path), full)
    assert not (tmp_path / "v.npy.json").exists()
    (tmp_path / "full.npy.json").write_text('{"notes": "of the user"}')
    text_embedding.write_embeddings(tmp_path / "full.npy", make, TEXTS)
    assert (tmp_path / "full.npy.json").exists()


def test_an_interrupted_extraction_resumes_with_another_precision(make, tmp_path, monkeypatch):
    whole, path = tmp_path / "whole.npy", tmp_path / "v.npy"
    text_embedding.write_embeddings(whole, make, TEXTS, precision="int8")
    interrupted(path, make, 19)
    sizes = portions_of(make, monkeypatch)
    text_embedding.write_embeddings(path, make, TEXTS, precision="int8")
    assert sum(sizes) == 24 and path.read_bytes() == whole.read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == {"v.npy", "v.npy.json", "whole.npy", "whole.npy.json"}


def test_one_text_determines_no_ranges(make, tmp_path):
    message = r"^--precision=int8: 1 text determines no ranges, expected at least 2; add texts, or --calibration=FILE$"
    with pytest.raises(UserError, match=message):
        text_embedding.write_embeddings(tmp_path / "v.npy", make, ["a"], precision="int8")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name, content, message", [
    ("c.npy", b"", r"cannot be read \(.*\), expected an .npy of float embeddings, or the .json of int8 embeddings;"),
    ("c.npy", np.zeros((4, 3), np.int8), "expected an .npy of float embeddings, or the .json of int8 embeddings;"),
    ("c.npy", np.zeros((1, 3), np.float32), "has 1 embeddings, expected at least 2; name a larger file"),
    ("c.json", b'{"precision": "ubinary", "width": 3, "ranges": null}', "has no ranges, expected an .npy of float"),
])  # fmt: skip
def test_wrong_calibrations_are_named(name, content, message, tmp_path):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(UserError, match=rf"^--calibration={path}: {message}"):
        read_ranges(path)


def test_ids_are_written_with_the_vectors(make, tmp_path, monkeypatch):
    monkeypatch.setattr(text_embedding, "ROWS_AT_ONCE", 7)
    path, names = tmp_path / "v.parquet", [f"é{i}" for i in range(40)]
    text_embedding.write_embeddings(path, make, TEXTS, lambda: names, "name")
    table = pyarrow.parquet.read_table(path)
    assert table.column_names == ["name", "vector"] and table["name"].to_pylist() == names
    before = path.read_bytes()
    for wrong in (names[:-1], [*names, "x"]):
        with pytest.raises(UserError, match="--input: the file changed during the computation"):
            text_embedding.write_embeddings(path, make, TEXTS, lambda wrong=wrong: wrong, "name")
    assert path.read_bytes() == before


def interrupted(path, make, after: int) -> None:
    """Writes until `after` texts have been read, then is interrupted."""

    def given():
        yield from TEXTS[:after]
        raise InterruptedError

    with pytest.raises(InterruptedError):
        text_embedding.write_embeddings(path, make, given())


def portions_of(make, monkeypatch) -> list[int]:
    """Returns a list that receives the sizes of the computed chunks."""
    sizes, encode = [], make.encode
    monkeypatch.setitem(make.__dict__, "encode", lambda texts: [sizes.append(len(texts)), encode(texts)][1])
    return sizes


TEARS = {
    "nothing": (lambda file, journal: None, 16),
    "a row that is not whole": (lambda file, journal: file.write_bytes(file.read_bytes() + b"torn"), 16),
    "rows without a line": (lambda file, journal: file.write_bytes(file.read_bytes() + bytes(4 * 32 * 8)), 16),
    "a line that is not whole": (lambda file, journal: journal.write_text(journal.read_text()[:-9]), 8),
    "lines without their rows": (lambda file, journal: file.write_bytes(file.read_bytes()[:-1]), 8),
    "no lines": (lambda file, journal: journal.unlink(), 0),
    "no header": (lambda file, journal: file.write_bytes(file.read_bytes()[:20]), 0),
}


@pytest.mark.parametrize("torn", TEARS)
def test_extraction_resumes_after_finished_chunks(make, torn, tmp_path, monkeypatch, capsys):
    whole, path = tmp_path / "whole.npy", tmp_path / "v.npy"
    text_embedding.write_embeddings(whole, make, TEXTS)
    interrupted(path, make, 19)  # in a third chunk, which is not computed
    assert not path.exists()
    tear, kept = TEARS[torn]
    tear(path.with_name("v.npy.partial"), path.with_name("v.npy.partial.jsonl"))
    sizes = portions_of(make, monkeypatch)
    assert text_embedding.write_embeddings(path, make, TEXTS) == ((40, 32), 1)
    assert sum(sizes) == 40 - kept and path.read_bytes() == whole.read_bytes()
    assert (f"resuming after {kept} texts" in capsys.readouterr().out) == bool(kept)
    assert sorted(tmp_path.iterdir()) == sorted([whole, path])


def changed(source):
    """Changes one number."""
    params = jax.tree.map(np.array, source.params)
    params["bert"]["embeddings"]["norm"]["bias"][3] += 1e-3
    return dataclasses.replace(source, params=params)


OTHERS = {
    "layers": (lambda source: PooledStatesEmbedder(source, "embeddings", "mean"), TEXTS, "another --layers"),
    "pool": (lambda source: PooledStatesEmbedder(source, "last", "cls"), TEXTS, "another --pool"),
    "checkpoint": (
        lambda source: PooledStatesEmbedder(changed(source), "last", "mean"),
        TEXTS,
        "another checkpoint",
    ),
    "texts": (None, ["x", *TEXTS[1:]], "other texts"),
    "fewer texts": (None, TEXTS[:9], "other texts"),
    "no texts": (None, [], "other texts"),
}


@pytest.mark.parametrize("make_others, texts, message", OTHERS.values(), ids=OTHERS)
def test_partial_files_of_other_inputs_are_refused(make, source, make_others, texts, message, tmp_path):
    path = tmp_path / "v.npy"
    interrupted(path, make, 19)
    before = (tmp_path / "v.npy.partial").read_bytes()
    with pytest.raises(UserError, match=f"v.npy.partial: was written with {message}; delete this file, or name"):
        text_embedding.write_embeddings(path, make_others(source) if make_others else make, texts)
    assert (tmp_path / "v.npy.partial").read_bytes() == before
    text_embedding.write_embeddings(path, make, TEXTS)
    assert len(np.load(path)) == 40


def test_a_deleted_partial_file_no_longer_blocks_other_flags(make, source, tmp_path):
    """The user follows the message: "delete this file"."""
    path = tmp_path / "v.npy"
    interrupted(path, make, 19)
    (tmp_path / "v.npy.partial").unlink()
    other = PooledStatesEmbedder(source, "last", "cls")
    assert text_embedding.write_embeddings(path, other, TEXTS).shape == (40, 32)
    np.testing.assert_allclose(np.load(path), other(TEXTS)[0], atol=1e-5)


def test_two_processes_cannot_write_one_file(make, tmp_path):
    def given():
        yield from TEXTS[:9]
        with pytest.raises(UserError, match=r"partial: in use by another process; wait for it, or name another"):
            text_embedding.write_embeddings(tmp_path / "v.npy", make, TEXTS)
        yield from TEXTS[9:]

    assert text_embedding.write_embeddings(tmp_path / "v.npy", make, given()) == ((40, 32), 1)


def test_long_texts_are_a_separate_chunk(make, tmp_path, monkeypatch):
    monkeypatch.setattr(text_embedding, "PORTION_CHARACTERS", 100)
    sizes = portions_of(make, monkeypatch)
    text_embedding.write_embeddings(tmp_path / "v.npy", make, ["word " * 70, "a", "b", "word " * 70, "c"])
    assert sizes == [1, 3, 1]


def test_the_command_writes_vectors_of_a_table(checkpoint, compiled, tmp_path):
    texts = [text or "a" for text in texts_of(20, seed=1)]
    rows = "".join(f"{i}\t{text}\n" for i, text in enumerate(texts))
    (tmp_path / "t.tsv").write_text("name\tsentence\n" + rows)
    flags = "--texts=sentence", "--pool=mean", "--output=v.parquet", "--id=name", "--dtype=float32"
    result = run("extract", f"--checkpoint={checkpoint}", "--input=t.tsv", *flags, cwd=tmp_path)
    assert result.stdout.endswith("vectors [20, 32] of 20 texts in v.parquet\n"), result.stderr
    np.testing.assert_allclose(contents(tmp_path / "v.parquet"), compiled(texts)[0], atol=1e-4)


def test_a_run_of_an_unregistered_task_has_hidden_states(checkpoint, tmp_path):
    conversion.convert(checkpoint, tmp_path / "run", "bertjax")
    edit(tmp_path / "run/config.json", task="mine")
    result = run("extract", "--checkpoint=run", "--output=v.npz", "a ship", cwd=tmp_path)
    assert result.stdout.startswith("hidden [4, 32] of 1 texts in v.npz; --layers=last"), result.stderr


@pytest.mark.parametrize("arguments, message", [
    (["--output=v.npy", "a"], "--output=v.npy: hidden states of tokens are written to an .npz;"),
    (["--output=v.npy", "--pool=mean", "--width=3", "a"], "width = 3: is for embeddings, and this checkpoint"),
    (["--output=v.npz", "--precision=int8", "a"], "--precision=int8: is for one embedding per text, not for"),
    (["--output=v.npy", "--pool=mean", "--calibration=c.npy", "a"], "--calibration=c.npy: is for --precision=int8;"),
    (["--output=v.npy", "--precision=int8", "--calibration=c.npy", "a"], "--calibration=c.npy: no such file; correct"),
    (["--output=v.npy", "--pool=mean", "--id=x", "a"], "--id=x: is for a table; give --input=FILE that ends in"),
    (["--output=v.npy", "--pool=mean", "--id=x", "--input=t.csv"], "--id=x: only a .parquet has columns"),
    (["--output=v.npy", "--pool=mean", "--input=t.csv"], "t.csv:2: no column 'text'; set --texts to one of a, b"),
    (["--output=v.npy", "--pool=mean", "--input=t.csv", "x"], "unexpected argument 'x'; with a table as --input"),
])  # fmt: skip
def test_unsupported_extractions_are_refused_in_one_line(arguments, message, checkpoint, tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    result = run("extract", f"--checkpoint={checkpoint}", *arguments, cwd=tmp_path)
    assert result.returncode == 1 and result.stderr.startswith(f"error: {message}"), result.stderr
    assert result.stderr.count("\n") == 1 and os.listdir(tmp_path) == ["t.csv"]
