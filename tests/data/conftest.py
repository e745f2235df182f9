"""The reader that the tests of data use: the one without TensorFlow, which starts faster."""

import importlib

import pytest

from bertjax.data.batches import pipeline


@pytest.fixture(autouse=True)
def reader_name(request, monkeypatch):
    """Sets the reader of records: "plain", unless a test asks for another. `test_readers` compares both readers."""
    name = getattr(request, "param", "plain")
    module = importlib.import_module(f"bertjax.data.batches.readers.{name}")
    monkeypatch.setattr(pipeline, "reader", lambda: module)
    return name
