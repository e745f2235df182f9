"""A family from outside of the package is pre-trained, resumed, planned, fine-tuned, searched and converted."""

import numpy as np
import pytest

from bertjax import families, tasks
from bertjax.config import UserError
from bertjax.families.with_heads import BertForMaskedLM, forward_flops
from bertjax.interop import conversion, pretrained
from bertjax.planner.plan import plan
from bertjax.reporting import insight
from bertjax.sharding.topology import accelerator
from bertjax.tasks import fill_mask
from bertjax.tasks.launch import launch
from bertjax.tasks.pretraining import Pretraining
from bertjax.training import checkpoint
from bertjax.training.sinks.jsonl import read_metrics
from tests.conftest import launch_and_stop, tiny_config, without_compilation_cache
from tests.families import own_family
from tests.tasks.test_finetuning import config_for as fine_tuning_config_for
from tests.tasks.test_finetuning import write_sst2
from tests.training import own_parts
from tests.training.test_loop import leaves

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module", autouse=True)
def registered():
    families.register("mixer", own_family.FAMILY)
    yield
    del families.FAMILIES.registered["mixer"]


def config_for(records):
    config = tiny_config(records=records)
    fields = {name: value for name, value in config.model.items() if name != "family"}
    config.model = families.model_fields("mixer", **fields, mixing_act="relu")
    tasks.validate(config)
    return config


@pytest.fixture(scope="module")
def trained(records_folder, tmp_path_factory):
    """The workdirs of a straight run, and of one that was stopped after step 7 and resumed."""
    folder = tmp_path_factory.mktemp("mixer")
    launch(config_for(records_folder), folder / "straight")
    launch_and_stop(Pretraining, config_for(records_folder), folder / "run", step=7)
    launch(config_for(records_folder), folder / "run")
    return folder / "straight", folder / "run"


@pytest.mark.slow
def test_it_is_trained_and_resumed_bit_for_bit(trained):
    straight, resumed = (leaves(checkpoint.read_params(folder, 10)) for folder in trained)
    assert straight.keys() == resumed.keys() and any("mix_1" in name for name in straight)
    assert all(np.array_equal(straight[name], resumed[name]) for name in straight)
    losses = [line["train/loss"] for line in read_metrics(trained[0]) if "train/loss" in line]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_it_predicts_and_is_converted_to_our_own_format(trained, tmp_path):
    source = pretrained.read_with_tokenizer(trained[1])
    model = BertForMaskedLM(source.config)
    (filled,) = fill_mask.fill_masks(model, source.params, source.tokenizer, ["the [MASK] ."])
    assert len(filled.masks[0]) == 5
    conversion.convert(trained[1], tmp_path / "ours", "bertjax")
    again = pretrained.read(tmp_path / "ours")
    assert again.config == source.config and leaves(again.params).keys() == leaves(source.params).keys()
    with pytest.raises(UserError, match=r"a model with model.family = 'mixer' has no place in --format=huggingface"):
        conversion.convert(trained[1], tmp_path / "theirs", "huggingface")
    with pytest.raises(UserError, match=r"a model with model.family = 'mixer' has no attention"):
        insight.attention(source, "the ship")


@pytest.mark.slow
def test_it_is_fine_tuned_and_searched(trained, tmp_path):
    write_sst2(tmp_path)
    config = fine_tuning_config_for(tmp_path, trained[1], epochs=4.0, sweep="learning_rate=1e-9,3e-3")
    tasks.validate(config)
    launch(config, tmp_path / "search")
    assert (tmp_path / "search/best").read_text() == "runs/learning_rate=0.003\n"
    source = pretrained.read_with_tokenizer(tmp_path / "search")
    assert isinstance(source.config, own_family.MixerConfig) and source.config.mixing_act == "relu"
    assert source.config.hidden_dropout_prob == 0  # the run's own
    (found,) = tasks.get("glue").predict(source, [("ship sail harbour",)])
    assert found["label"] == "1"


@pytest.mark.slow
@pytest.mark.tpu_aot
def test_it_is_planned_ahead_with_an_optimizer_and_a_schedule_of_somebody_elses():
    config = config_for("unused")
    config.model.update(hidden_size=128, vocab_size=256, max_position_embeddings=128)
    with own_parts.registered(), without_compilation_cache():
        (result,) = plan(own_parts.used_in(config), accelerator("v5litepod-4"), [0])
    assert result.fits
    assert result.optimizer_bytes == result.params_bytes  # of each param one number, where Adam has two


def test_it_says_what_it_costs_and_what_it_cannot_do():
    config = config_for("unused")
    model = families.config_of(config)
    assert forward_flops(model, 3, 10, 0, pooled=0) == 3 * 2 * 2 * 32 * 100
    config.packing = True
    with pytest.raises(
        UserError, match=r"config.packing = True: model.family = 'mixer' reads whole rows, which sequences cannot"
    ):
        tasks.validate(config)
    config.packing, config.model.mixing_act = False, "tanh"
    with pytest.raises(UserError, match=r"config.model.mixing_act = 'tanh': choose one of gelu, relu"):
        tasks.validate(config)
    config.model.family = "mixr"
    with pytest.raises(
        UserError,
        match=r"'mixr': choose one of bert, distilbert, .*, modernbert, roberta, transformer_xl, xlnet, mixer",
    ):
        tasks.validate(config)
