"""The reader that a test of data asks for."""

import importlib

import pytest

from bertjax.data.batches import pipeline


@pytest.fixture
def reader_name(request, monkeypatch):
    """Sets the reader of records, "plain" or "tf_data", by indirect parametrization."""
    module = importlib.import_module(f"bertjax.data.batches.readers.{request.param}")
    monkeypatch.setattr(pipeline, "reader", lambda: module)
    return request.param
