"""The tables of library fields agree with the installed libraries, and bertjax has a group for each field."""

import json

import pytest
from etils import epath

from bertjax.interop import hf_tokenizer, huggingface
from bertjax.models import families
from bertjax.models.library_fields import tables
from tests.golden import make_library_fields


@pytest.mark.slow
@pytest.mark.extra_packages
def test_the_table_matches_the_installed_transformers():
    pytest.importorskip("transformers")
    stored = json.loads((make_library_fields.FOLDER / "transformers.json").read_text())["kinds"]
    assert make_library_fields.transformers_fields() == stored, "run: python tests/golden/make_library_fields.py"


@pytest.mark.extra_packages
@pytest.mark.parametrize("kind", sorted(families.by_model_type()))
def test_the_class_of_a_tokenizer_equals_transformers(kind):
    auto = pytest.importorskip("transformers.models.auto.tokenization_auto")
    name = auto.TOKENIZER_MAPPING_NAMES.get(kind)
    assert hf_tokenizer.BY_MODEL_TYPE.get(kind) == (None if name in hf_tokenizer.GENERAL else name)


@pytest.mark.parametrize("kind", sorted(families.by_model_type()))
def test_every_field_of_transformers_is_in_a_group(kind, tmp_path, monkeypatch):
    """A new field must be read, or be listed as harmless or refused."""
    groups = []
    monkeypatch.setattr(tables, "check_fields", lambda path, fields, library, kind, read: groups.append(read))
    table = tables.defaults_of("transformers", kind)
    aliases = families.by_model_type()[kind].huggingface.aliases
    fields = {name: value for name, value in table.items() if value is not None and name not in aliases}
    if kind == "gpt2":
        fields = {name: value for name, value in fields.items() if name != "hidden_size" and "num_" not in name}
        fields.pop("max_position_embeddings")
    fields |= {"model_type": kind} | ({"rope_theta": 1e4} if kind == "eurobert" else {})
    (tmp_path / "config.json").write_text(json.dumps(fields))
    huggingface.read_config(epath.Path(tmp_path / "config.json"))
    assert not table.keys() - groups[0]


def test_every_field_of_a_tokenizer_is_in_a_group():
    read = {*hf_tokenizer.SUPPORTED_VALUES, *hf_tokenizer.UNUSED_FIELDS, *hf_tokenizer.FIELD_TYPES}
    assert not tables.defaults_of("transformers", "tokenizer").keys() - read
