"""Configs: golden snapshots of every experiment, and one clear line for every mistake."""

import functools
import importlib
import json

import pytest

from bertjax.common.errors import UserError
from bertjax.config.defaults import named_stages, pretraining_config, stage
from bertjax.launch.validate import validate
from bertjax.models import families
from bertjax.pretraining.validate import validate_pretraining
from tests.processes import ROOT

GOLDEN = ROOT / "tests" / "golden" / "configs"
PRETRAINING = [
    "base", "large", "lamb", "small:tiny", "small:mini", "small:small", "small:medium", "quickstart", "bytes",
    "gpt:gpt2", "elmo", "modern:base", "adapt", "text", "text:bert",
    "transformer_xl:wikitext", "transformer_xl:enwik8", "transformer_xl:cores",
    "electra:small", "electra:base", "deberta:base", "deberta:xsmall",
    "characters:t64", "characters:cores", "transformer:base", "transformer:big",
    "xlnet:base", "xlnet:large", "xlnet:cores",
    "ablations/objective:ltr", "ablations/size:6-768-3", "ablations/masking:80-20-0", "ablations/positions:none",
]  # fmt: skip
FINE_TUNING = [
    "glue:mrpc", "classify", "squad:v1.1", "squad:v2.0", "ner", "tag", "swag", "features:last", "embed", "rerank",
]  # fmt: skip
EXPERIMENTS = PRETRAINING + FINE_TUNING


def load(experiment: str):
    name, _, argument = experiment.partition(":")
    module = importlib.import_module(f"experiments.{name.replace('/', '.')}")
    return module.get_config(*filter(None, [argument]))


def snapshot(config) -> str:
    return json.dumps(json.loads(config.to_json_best_effort()), indent=1, sort_keys=True) + "\n"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_config_equals_its_golden_snapshot(experiment, request):
    """Review shows changed defaults. Refresh with: pytest tests/config/test_config.py --update-golden"""
    path = GOLDEN / f"{experiment.replace(':', '-').replace('/', '-')}.json"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(snapshot(load(experiment)))
    assert snapshot(load(experiment)) == path.read_text()


def test_every_experiment_has_a_snapshot():
    experiment_names = {experiment.partition(":")[0] for experiment in EXPERIMENTS}
    assert {path.stem for path in (ROOT / "experiments").glob("*.py")} == {
        name for name in experiment_names if "/" not in name
    }
    not_experiments = {"__main__", "bits", "equal_time", "race", "scaled", "suite", "tables"}
    not_experiments |= {"characters", "successors", "today"}  # tests/test_ablations.py tests the tables of equal time
    ablations = {f"ablations/{path.stem}" for path in (ROOT / "experiments/ablations").glob("*.py")}
    assert ablations - {f"ablations/{name}" for name in not_experiments} == experiment_names & ablations


@pytest.mark.parametrize("experiment", FINE_TUNING)
def test_fine_tuning_is_valid_with_data_and_a_checkpoint(experiment):
    config = load(experiment)
    with pytest.raises(UserError, match=r"config.data.path = '': must name the data"):
        validate(config)
    config.data.path = "folder"
    with pytest.raises(UserError, match=r"config.init_checkpoint = '': must be a checkpoint"):
        validate(config)
    config.init_checkpoint = "checkpoint"
    validate(config)
    assert config.is_locked
    with pytest.raises(UserError, match=r"config.task = '.*': must be 'pretraining' for this command"):
        validate_pretraining(config)


@pytest.mark.parametrize("experiment", PRETRAINING)
def test_every_experiment_is_valid_with_a_corpus(experiment):
    config = load(experiment)
    config.data.corpus = "text.txt"
    if config.adapt.model:
        with pytest.raises(UserError, match=r"needs a checkpoint to adapt; set init_checkpoint"):
            validate(config)
        config.init_checkpoint = "checkpoint"
    validate(config)
    assert config.is_locked
    # A workdir stores the same config.
    again = pretraining_config().unlock()
    del again.model
    again.update(json.loads(config.to_json_best_effort()))
    assert families.config_of(again) == families.config_of(config)


CHOICES = {
    "task": "pretraining", "model.hidden_act": "gelu, gelu_new, relu", "tokenizer.kind": "wordpiece, sentencep",
    "remat": "none, dots, full, auto", "unroll": "auto, yes, no", "model.positions": "learned, sinusoidal, none",
    "model.norm": "post, pre", "model.attention": "auto, xla, fused", "dtype": ".*bfloat16",
}  # fmt: skip
UNMASKED = "config.data.masking = 'static': the objective for next .* supports no masks; set dynamic"
LATER_BUT_SHORTER = named_stages(pretraining=stage(5, 128, 20), long=stage(5, 512, 77), decay=stage(5, 128, 20))


MISTAKES = {
    "glue:mrpc": [
        ("remat", "auto", "config.remat = 'auto': choose one of none, dots, full"),
        ("epochs", 0.0, "config.epochs = 0.0: must be above 0"),
        ("epochs", float("inf"), "config.epochs = inf: must be finite"),
        ("optimizer.learning_rate", float("inf"), "config.optimizer.learning_rate = inf: must be finite"),
        ("max_seq_length", 4, "config.max_seq_length = 4: must be at least 8"),
        ("optimizer.warmup_proportion", 1.5, "config.optimizer.warmup_proportion = 1.5"),
        ("data.name", "mrcp", "config.data.name = 'mrcp': choose one of cola, sst2, mrpc"),
        ("eval.every_steps", -1, "config.eval.every_steps = -1"),
        ("head.lstm_layers", 2, "config.head.lstm_layers = 2: lstm_layers needs a BiLSTM: also set head.lstm_size"),
        ("budget", "200M", "config.budget = '200M': fine-tuning takes a time, such as 20min"),
        ("restarts", 3, 'config.restarts = 3: applies to sweeps only; .* also set --config.sweep="seed=0"'),
    ],
    "base": [
        *((field, "odd", f"config.{field} = 'odd': choose one of {choices}") for field, choices in CHOICES.items()),
        ("model.hidden_size", 100, "config.model.hidden_size = 100: must be a multiple of .*num_attention_heads = 12"),
        ("model.vocab_size", 0, "config.model.vocab_size = 0: must be at least 1"),
        ("model.hidden_dropout_prob", 1.0, "config.model.hidden_dropout_prob = 1.0"),
        ("batch_size", 0, "config.batch_size = 0: must be at least 1"),
        ("microbatches", 3, "config.batch_size = 256: must be a multiple of microbatches = 3"),
        ("stages", named_stages(), "config.stages = .*must be one or more named stages"),
        ("stages", named_stages(short=3), r"config.stages = .*must be one or more named stages"),
        ("seed", 2**64, "config.seed = 18446744073709551616: must be at least 0 and below 2"),
        ("data.seed", -1, "config.data.seed = -1: must be at least 0"),
        ("data.corpus", 5, "config.data.corpus = 5: must be a string"),
        (
            "stages",
            named_stages(only=stage(5, 1024, 160)),
            "only.length = 1024: must be at most model.max_position_embeddings = 512",
        ),
        ("stages", named_stages(only=stage(5, 128, 10)), "only.max_predictions_per_seq = 10: must be at least 19 for"),
        ("stages", named_stages(only=stage(5, 128, 129)), "must be at most the length of 128 tokens"),
        ("stages", named_stages(only=stage(0, 128, 20)), "config.stages.only.steps = 0"),
        ("stages", LATER_BUT_SHORTER, "'decay': must follow 'pretraining' alphabetically"),
        (
            "stages",
            named_stages(a=stage(5, 128, 20), b=stage(5, 128, 21)),
            "a.max_predictions_per_seq = 20: must be 21, because stages of",
        ),
        ("data.masked_lm_prob", 0.0, "config.data.masked_lm_prob = 0.0"),
        ("data.heldout_fraction", 1.5, "config.data.heldout_fraction = 1.5"),
        ("data.corpus", None, "config.data.corpus = None: must name the text"),
        ("data.corpus", [], "config.data.corpus = .*: must name the text"),
        ("eval.fill_masks", ("no mask",), "config.eval.fill_masks = 'no mask': each text must contain"),
        ("optimizer.learning_rate", -1.0, "config.optimizer.learning_rate = -1.0: must be above 0"),
        ("mesh.data", 0, "config.mesh.data = 0"),
        ("mesh.fsdp", -1, "must have at most one -1"),
        ("model.causal", True, UNMASKED),
        ("model.family", "lstms", UNMASKED),
        ("checkpoint.keep_every", 7, "config.checkpoint.keep_every = 7: must be a multiple of every_steps = 5000"),
        ("budget", "soon", "config.budget = 'soon': must be a time or a number of tokens, such as 20min, 8h"),
        ("budget", "0min", "config.budget = '0min': must be a time"),
        ("recipe", "modern", "config.budget = '': must be set for a recipe, such as 20min"),
        ("profile", "5:3", "config.profile = '5:3': write START:STOP, such as 20:24"),
        ("profile", "0:3", "config.profile = '0:3': write START:STOP.* the first step is 1"),
        ("profile", "5:-3", "config.profile = '5:-3': write START:STOP"),
        ("data.language", "german", "config.data.language = 'german': must be an ISO 639 code, such as 'en' or 'de'"),
    ],
}


@pytest.mark.parametrize("experiment, mistake", [(name, row) for name, rows in MISTAKES.items() for row in rows])
def test_mistakes_name_field_value_and_fix(experiment, mistake):
    config, (field, value, message) = load(experiment), mistake
    data = {"init_checkpoint": "checkpoint", "data.path": "folder"}
    config.update_from_flattened_dict(data if experiment == "glue:mrpc" else {"data.corpus": "text.txt"})
    *sections, name = field.split(".")
    functools.reduce(lambda section, key: section[key], sections, config)[name] = value
    with pytest.raises(UserError, match=message) as error:
        validate(config)
    assert "\n" not in str(error.value)


def test_incompatible_settings_are_refused():
    for fields, message in (
        ({"kernels": "no", "model.attention": "fused"}, "kernels = 'no': must be auto with model.attention ="),
        ({"unroll": "yes", "remat": "dots"}, "unroll = 'yes': must be auto or no with remat = 'dots'"),
    ):
        config = pretraining_config()
        config.update_from_flattened_dict(fields)
        with pytest.raises(UserError, match=f"^config.{message}"):
            validate(config, with_data=False)
