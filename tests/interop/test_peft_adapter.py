"""PEFT adapters that are read, refused and written, without PEFT: test_peft_parity.py compares with PEFT."""

import dataclasses
import json

import flax.linen as nn
import jax
import numpy as np
import pytest
import safetensors.numpy
from flax.traverse_util import flatten_dict, unflatten_dict

from bertjax.common.errors import UserError
from bertjax.config.defaults import fine_tuning_config
from bertjax.config.model_config import Compute, Lora
from bertjax.interop import conversion, huggingface, pretrained
from bertjax.models.heads import BertForSequenceClassification
from bertjax.training.checkpoints import checkpoint
from bertjax.training.checkpoints.workdir import RunInfo, write_info
from tests.interop.test_golden import GOLDEN

QUERY = "base_model.model.bert.encoder.layer.0.attention.self.query"
UPDATE = {
    f"{QUERY}.lora_A.weight": np.ones((2, 32), np.float32),
    f"{QUERY}.lora_B.weight": np.ones((32, 2), np.float32),
}


def made_adapter(folder, tensors=UPDATE, base=GOLDEN, **fields):
    folder.mkdir(exist_ok=True)
    fields = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 2, "lora_alpha": 6} | fields
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_an_adapter_is_merged_into_the_base(tmp_path):
    """The base is a path, or a run in a folder beside the adapter. The params of the base get alpha
    r * B A added.
    """
    conversion.convert(GOLDEN, tmp_path / "run", "bertjax")
    golden = pretrained.read_pretrained(GOLDEN)
    for base in (GOLDEN, "run"):
        source = pretrained.read_pretrained(made_adapter(tmp_path / "adapter", base=base))
        assert source.tokenizer.fingerprint == golden.tokenizer.fingerprint and source.config == golden.config
        kernels = (
            x.params["bert"]["encoder"]["layers"]["attention"]["query_key_value"]["kernel"] for x in (source, golden)
        )
        difference = np.subtract(*kernels)
        assert (
            np.allclose(difference[0, :, 0], 6, atol=1e-5)
            and not difference[1:].any()
            and not difference[:, :, 1:].any()
        )


@pytest.mark.parametrize("fields, tensors, message", [
    ({"peft_type": "IA3"}, {}, "peft_type 'IA3' is not supported; supported: 'LORA'; with PEFT, merge the adapter"),
    ({"use_dora": True}, {}, "use_dora True is not supported; supported: False; with PEFT, merge"),
    ({"layer_replication": [[0, 2]]}, {}, "layer_replication .* is not supported"),
    ({"init_lora_weights": "pissa"}, {}, "init_lora_weights 'pissa' is not supported"),
    ({"r": "two"}, {}, "adapter_config.json: damaged, or not in the expected format"),
    ({"rank_pattern": {"(": 3}}, {}, "adapter_config.json: damaged, or not in the expected format"),
    ({"base_model_name_or_path": None}, {}, "base_model_name_or_path is None; set it to the folder"),
    ({"base_model_name_or_path": "/no/such/folder"}, {}, "base_model_name_or_path '/no/such/folder', does not exist"),
    ({"base_model_name_or_path": "."}, {}, "base_model_name_or_path '.'.*no checkpoint in '.'"),
    ({"base_model_name_or_path": "adapter"}, {}, "base_model_name_or_path 'adapter'"),
    ({"r": 3}, UPDATE, r"query.lora_A has shape \(2, 32\), expected \(3, 32\) for the base and r = 3"),
    ({}, {name.replace("query", "quarry"): x for name, x in UPDATE.items()}, "quarry.lora_A fits no layer of the base"),
    ({}, UPDATE | {"base_model.model.scorer.weight": np.ones(3)}, "scorer.weight fits no layer of the base"),
    ({"task_type": "SEQ_CLS"}, UPDATE, "neither the adapter nor its base has the classifier"),
])  # fmt: skip
def test_unsupported_adapters_are_refused_in_one_line(fields, tensors, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        pretrained.read_pretrained(made_adapter(tmp_path / "adapter", tensors, **fields))
    assert str(tmp_path / "adapter") in str(error.value) and "\n" not in str(error.value)


def test_an_adapter_without_weights_is_refused(tmp_path):
    (made_adapter(tmp_path / "adapter") / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no adapter_model.safetensors and no adapter_model.bin"):
        pretrained.read_pretrained(tmp_path / "adapter")


@pytest.mark.slow
@pytest.mark.parametrize("has_new_pieces", [False, True])
def test_a_written_adapter_round_trips(has_new_pieces, tmp_path):
    """The params are equal, also with added tokens that the base lacks; no local path is written."""
    golden, lora = pretrained.read_pretrained(GOLDEN), Lora(2, 6.0, 0.0, ("query", "output"))
    run, adapter = tmp_path / "run", tmp_path / "adapter"
    huggingface.write(tmp_path / "base", golden.config, golden.params, golden.tokenizer)
    tokenizer, config = golden.tokenizer, golden.config
    if has_new_pieces:
        tokenizer = type(tokenizer)([*tokenizer.pieces, "kraken", "##zz"], tokenizer.lowercase)
        config = dataclasses.replace(config, vocab_size=tokenizer.vocab_size)
    model, ids = BertForSequenceClassification(config, 3, Compute(lora=lora)), np.ones((1, 4), np.int32)
    shapes = flatten_dict(nn.meta.unbox(jax.eval_shape(model.init, jax.random.key(0), ids, ids, ids)["params"]))
    rng, kept = np.random.default_rng(0), flatten_dict(golden.params)
    params = {path: kept.get(path, np.float32(rng.normal(size=x.shape))) for path, x in shapes.items()}
    words = "bert", "embeddings", "word", "embedding"
    params[words] = np.pad(kept[words][: config.vocab_size], ((0, len(kept[words]) - config.vocab_size), (0, 0)))
    params[words][golden.config.vocab_size : config.vocab_size] = 3
    settings = fine_tuning_config("classify").unlock()
    settings.model.update(dataclasses.asdict(config))
    settings.lora.update(rank=2, alpha=6.0, targets="query,output")
    settings.init_checkpoint = str(tmp_path / "base")
    checkpoint.write_params(run, unflatten_dict(params))
    write_info(run, RunInfo(settings.lock(), "BertForSequenceClassification", ("a", "b", "c")), tokenizer)
    printed = conversion.convert(run, adapter, "peft")
    assert "base_model_name_or_path is 'base'" in printed and "left out: labels a, b, c" in printed
    with pytest.raises(UserError, match=r"--push=me/mine: .* has no name on the hub; push the base first"):
        conversion._write_adapter(tmp_path / "other", pretrained.read_pretrained(run), "me/mine", "")
    assert not any(str(tmp_path) in path.read_text() for path in adapter.glob("*.json"))
    before, after = pretrained.read_pretrained(run), pretrained.read_pretrained(adapter)
    assert after.architecture == "BertForSequenceClassification" and after.config == before.config
    assert after.tokenizer.fingerprint == tokenizer.fingerprint
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), before.params, after.params)
    tensors = safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    assert has_new_pieces == any("word_embeddings" in name for name in tensors)
    conversion.convert(run, tmp_path / "named", "peft", base="me/base@main")
    fields = json.loads((tmp_path / "named/adapter_config.json").read_text())
    assert (fields["base_model_name_or_path"], fields["revision"]) == ("me/base", "main")
