"""The tables of library fields agree with the installed libraries, and bertjax has a group for each field."""

import json

import pytest
from etils import epath

from bertjax.common.errors import UserError
from bertjax.interop import hf_tokenizer, huggingface
from bertjax.models import families, json_config
from bertjax.models.library_fields import tables
from tests.golden import make_library_fields


def base_fields(kind: str) -> dict:
    """Returns the content of a config.json with the defaults of transformers."""
    aliases = families.by_model_type()[kind].huggingface.aliases
    table = tables.defaults_of("transformers", kind)
    fields = {name: value for name, value in table.items() if value is not None and name not in aliases}
    if kind == "gpt2":
        fields = {name: value for name, value in fields.items() if name != "hidden_size" and "num_" not in name}
        fields.pop("max_position_embeddings")
    return fields | {"model_type": kind} | ({"rope_theta": 1e4} if kind == "eurobert" else {})


def other_value(value):
    """Returns another value of the same type."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else "other" if value is None or isinstance(value, str) else [1]


@pytest.mark.slow
@pytest.mark.extra_packages
def test_the_table_matches_the_installed_transformers():
    pytest.importorskip("transformers")
    stored = json.loads((make_library_fields.FOLDER / "transformers.json").read_text())["kinds"]
    assert make_library_fields.transformers_fields() == stored, "run: python tests/golden/make_library_fields.py"


OF_CODE = {"neobert"}  # types of models whose published folder contains Python code


@pytest.mark.extra_packages
@pytest.mark.parametrize("kind", sorted(families.by_model_type().keys() - OF_CODE))
def test_the_class_of_a_tokenizer_equals_transformers(kind):
    auto = pytest.importorskip("transformers.models.auto.tokenization_auto")
    name = auto.TOKENIZER_MAPPING_NAMES.get(kind)
    assert hf_tokenizer.BY_MODEL_TYPE.get(kind) == (None if name in hf_tokenizer.GENERAL else name)


@pytest.mark.parametrize("kind", sorted(families.by_model_type().keys() - OF_CODE))
def test_every_field_of_transformers_is_in_a_group(kind, tmp_path, monkeypatch):
    """A new field must be read, or be listed as harmless or refused."""
    groups = []
    monkeypatch.setattr(tables, "check_fields", lambda path, fields, library, kind, read: groups.append(read))
    table, fields = tables.defaults_of("transformers", kind), base_fields(kind)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    huggingface.read_config(epath.Path(tmp_path / "config.json"))
    assert not table.keys() - groups[0]


def test_every_field_of_a_tokenizer_is_in_a_group():
    read = {*hf_tokenizer.SUPPORTED_VALUES, *hf_tokenizer.UNUSED_FIELDS, *hf_tokenizer.FIELD_TYPES}
    assert not tables.defaults_of("transformers", "tokenizer").keys() - read


@pytest.mark.parametrize("kind", sorted(families.by_model_type().keys() - OF_CODE))
def test_fields_that_the_family_does_not_read_are_refused_or_named(kind, tmp_path, monkeypatch, capfd):
    """A field of transformers is refused by its name and value, any other field is named in a note."""
    path, fields, supported = epath.Path(tmp_path / "config.json"), base_fields(kind), {}

    def record(path, fields, expected):
        supported.update(expected)
        require_supported(path, fields, expected)

    def read(**changes):
        path.write_text(json.dumps(fields | changes))
        huggingface.read_config(path)

    table, require_supported = tables.defaults_of("transformers", kind), json_config.require_supported
    monkeypatch.setattr(json_config, "require_supported", record)
    monkeypatch.setattr(tables, "defaults_of", lambda *_: table | {"a_new_field": 0})
    read(a_new_field=0, unknown_field=5)
    assert "ignored fields, which transformers does not read either: unknown_field\n" in capfd.readouterr().err
    supported.pop("norm_bias", None)  # ModernBERT reads this field, and the other biases must have its value
    for name, only in {**supported, "a_new_field": 0}.items():
        value = other_value(only)
        with pytest.raises(UserError) as error:
            read(**{name: value})
        assert f"{name} {value!r} is not supported; supported: {only!r}" in str(error.value)
    assert len(supported) > 5
