"""Files on storage with transient errors or on a full disk; JSON and paths from untrusted input."""

import errno
import io
import os
import types

import pytest
from etils.epath import gpath

from bertjax.common import files
from bertjax.common.errors import UserError
from bertjax.data.corpus import reading, tables
from bertjax.data.preprocessing.preparation import prepare
from bertjax.training.monitoring.logging import MetricsWriter
from bertjax.training.trackers.jsonl import read_metrics
from tests.conftest import tiny_config


@pytest.fixture
def faulty(monkeypatch):
    """Returns `install(every, number)`: every `every`-th opening or renaming of a file fails with error `number`;
    counts calls.
    """
    counts = {"calls": 0, "failed": 0}
    monkeypatch.setattr("tenacity.nap.time", types.SimpleNamespace(sleep=lambda seconds: None))

    def install(every, number):
        def failing(method):
            def call(self, *arguments, **more):
                counts["calls"] += 1
                if counts["calls"] % every == 0:
                    counts["failed"] += 1
                    raise OSError(number, "the storage fails", str(self))
                return method(self, *arguments, **more)

            return call

        for name in ("open", "replace"):
            monkeypatch.setattr(gpath.PosixGPath, name, failing(getattr(gpath.PosixGPath, name)))
        return counts

    return install


def test_transient_storage_errors_lose_no_data(corpus_file, records_folder, tmp_path, faulty, in_process):
    counts = faulty(5, errno.EIO)
    prepare(tiny_config(corpus_file), tmp_path / "out")
    for path in records_folder.rglob("*"):
        if path.is_file():
            assert (tmp_path / "out" / path.relative_to(records_folder)).read_bytes() == path.read_bytes()
    assert counts["failed"] > 10


def failing_reads(monkeypatch, every, number):
    """Makes every `every`-th opening or reading of a file fail with the error; returns the counts."""
    counts = {"calls": 0, "failed": 0}
    monkeypatch.setattr("tenacity.nap.time", types.SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setattr(files, "READ_BYTES", 64)

    def count():
        counts["calls"] += 1
        if counts["calls"] % every == 0:
            counts["failed"] += 1
            raise OSError(number, "the storage fails")

    class Failing(io.FileIO):
        def __init__(self, *arguments):
            count()
            super().__init__(*arguments)

        def read(self, size=-1):
            count()
            return super().read(size)

    monkeypatch.setattr(gpath.PosixGPath, "open", lambda path, mode: Failing(str(path), mode))
    return counts


@pytest.mark.parametrize("every", [3, 5, 7])
def test_a_table_and_a_corpus_are_read_despite_transient_errors(tmp_path, monkeypatch, every):
    path, text = tmp_path / "a.tsv", tmp_path / "a.txt"
    path.write_text("a\tb\n" + "".join(f"text {number}\t{number}\n" for number in range(200)))
    text.write_text("".join(f"text {number}\n\n" for number in range(200)))
    expected = [*tables.read_table(path)[0]], [*reading.read_corpus_file(str(text))]
    counts = failing_reads(monkeypatch, every, errno.EIO)
    assert ([*tables.read_table(path)[0]], [*reading.read_corpus_file(str(text))]) == expected
    assert len(expected[0]) == len(expected[1]) == 200 and counts["failed"] > 10


def test_an_unreadable_table_is_retried_a_few_times(tmp_path, monkeypatch):
    (tmp_path / "a.tsv").write_text("a\tb\n1\t2\n")
    counts = failing_reads(monkeypatch, 1, errno.EIO)
    with pytest.raises(OSError, match="the storage fails"):
        tables.read_table(tmp_path / "a.tsv")
    assert counts["failed"] == files.ATTEMPTS


@pytest.mark.parametrize("before", range(5))  # calls that fail
def test_no_line_of_metrics_is_lost_or_duplicated(tmp_path, faulty, before):
    counts = faulty(5, errno.EIO)
    counts["calls"] = before
    for step in range(20):
        writer = MetricsWriter(tmp_path / "run", step, tiny_config())
        writer.write(step + 1, {"train/loss": float(step)})
    assert [line["train/loss"] for line in read_metrics(tmp_path / "run")] == list(range(20))
    assert counts["failed"] > 10


@pytest.mark.parametrize("number, tries", [(errno.EIO, files.ATTEMPTS), (errno.ENOSPC, 1)])
def test_permanent_errors_raise_one_line_with_the_file(tmp_path, faulty, number, tries):
    counts = faulty(1, number)
    with pytest.raises(UserError, match=r"/a.txt: cannot be written \(the storage fails\)$"):
        files.write_whole(tmp_path / "a.txt", "content")
    assert counts["failed"] == tries and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "gs://bucket/x", "", "a\\..\\x"])
def test_file_names_cannot_leave_the_folder(tmp_path, name):
    with pytest.raises(UserError, match=r"manifest.json: the file name .* must be the name of a file in"):
        files.inside(tmp_path, name, tmp_path / "manifest.json")
    assert files.inside(tmp_path, "length32/a.tfrecord", "") == tmp_path / "length32/a.tfrecord"


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '{"a": NaN}', '{"a": "\\ud800"}', "\xff"])
def test_json_of_a_wrong_type_raises_one_line(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(UserError, match=r"^\S+/a.json: damaged, or not in the expected format \(.*\); copy it again$"):
        files.read_json(tmp_path / "a.json", dict[str, int])


def test_a_pipe_is_read_without_retries():
    reading, writing = os.pipe()
    os.write(writing, b"one\ntwo\n")
    os.close(writing)
    with files.open_to_read(f"/dev/fd/{reading}") as file:
        assert [*file] == [b"one\n", b"two\n"]
    os.close(reading)
