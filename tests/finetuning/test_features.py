"""The feature-based approach: the hidden states that are used, and the params that are trained."""

import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig
from bertjax.finetuning import conll, metrics, sweep
from bertjax.finetuning.tasks import features
from bertjax.interop import conversion, pretrained
from bertjax.models.heads import BertForFeatureBasedTagging
from bertjax.nn.layer_pooling import TABLE_7
from experiments.features import get_config
from tests.finetuning.test_finetuning import run
from tests.finetuning.test_ner import conll_text

CONFIG = BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=6, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=16, initializer_range=0.3,
)  # fmt: skip


def test_feature_layers_follow_the_paper():
    states = np.random.default_rng(0).normal(size=(7, 2, 3, 4)).astype(np.float32)  # the embeddings and six layers

    def features(layers, weights, scale=1.0):
        model = BertForFeatureBasedTagging(CONFIG, 3, layers=layers)
        params = {"layer_weights": np.array(weights), "layer_scale": np.array([scale])}
        return model.apply({"params": params}, states, method="features")

    expected = {
        "embeddings": states[0],
        "second_to_last": states[5],
        "last": states[6],
        "weighted_sum_last_four": states[3:].mean(0),  # equal initial weights
        "concat_last_four": np.concatenate(states[3:], -1),
        "weighted_sum_all": states[1:].mean(0),
    }
    assert expected.keys() == set(TABLE_7)
    for layers, wanted in expected.items():
        mixed = features(layers, np.zeros(4 if "four" in layers else 6))
        np.testing.assert_allclose(mixed, wanted, rtol=1e-5, atol=1e-6, err_msg=layers)
    mixed = features("weighted_sum_last_four", np.log([1.0, 1, 1, 5]), scale=16.0)
    np.testing.assert_allclose(mixed, 2 * states[3:6].sum(0) + 10 * states[6], rtol=1e-5, atol=1e-5)


def config_for(folder, checkpoint, layers="last", **fields):
    (folder / "eng.train").write_text(conll_text(160, 2, apart=True))
    (folder / "eng.testa").write_text(conll_text(20, 3, apart=True))
    config = get_config(layers)
    config.data.path, config.init_checkpoint = str(folder), str(checkpoint)
    config.update(dict(batch_size=16, max_seq_length=16, log_every_steps=20), **fields)
    config.head.update(lstm_size=16, lstm_layers=1)
    config.model.hidden_dropout_prob = 0.0
    config.eval.every_steps, config.optimizer.learning_rate = 1000, 3e-2
    return config


def test_a_sweep_over_feature_layers_trains_only_the_lstm(checkpoint, tmp_path, monkeypatch):
    programs = []

    def watched(*arguments, _real=sweep.Program):
        programs.append(_real(*arguments))
        return programs[-1]

    monkeypatch.setattr(sweep, "Program", watched)
    config = config_for(tmp_path, checkpoint, epochs=12.0, sweep="layers=weighted_sum_all")
    run(config, tmp_path / "run")
    lines = (tmp_path / "run/sweep.md").read_text().splitlines()
    assert lines[0].startswith("| layers | f1, mean | best |")
    values = [line.split(" | ")[0].removeprefix("| ") for line in lines[2:] if line.startswith("|")]
    assert values == ["weighted_sum_all"]

    source, origin = pretrained.read_pretrained(tmp_path / "run"), pretrained.read_pretrained(checkpoint)
    after = pretrained.flattened(source.params["bert"])
    before = pretrained.flattened({n: p for n, p in origin.params["bert"].items() if n != "pooler"})
    assert after.keys() == before.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)
    assert source.head["layers"] == "weighted_sum_all"
    assert lines[-1].startswith("best: runs/layers=weighted_sum_all, f1")

    sentences = conll.read_conll(tmp_path / "eng.testa")
    texts = [(" ".join(s.words),) for s in sentences]
    values = [result["tags"] for result in features.TASK.predict(source, texts)]
    f1 = metrics.entity_scores([s.tags for s in sentences], values)["f1"]
    assert f1 > 0.8 and f1 == pytest.approx(source.scores["f1"])
    # The optimizer has no moments of frozen params.
    moments = str(programs[0].state.opt_state)
    assert "'lstm'" in moments and "'bert'" not in moments
    printed = conversion.convert(tmp_path / "run", tmp_path / "hf", "huggingface")
    assert "left out, because BertModel cannot store them: classifier, " in printed and "lstm" in printed
    assert pretrained.read_pretrained(tmp_path / "hf").params.keys() == {"bert"}


def test_invalid_feature_layers_are_refused(checkpoint, tmp_path):
    with pytest.raises(UserError, match=r"config.head.layers = 'first': choose one of embeddings, second_to_last"):
        run(config_for(tmp_path, checkpoint, "first"), tmp_path / "run")
    config = config_for(tmp_path, checkpoint, sweep="paper")
    with pytest.raises(UserError, match=r"config.head.layers = 'weighted_sum_last_four': the model has 1 layers only"):
        run(config, tmp_path / "run")
