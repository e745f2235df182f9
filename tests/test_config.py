"""Configs: golden snapshots of every experiment, and one clear line for every mistake."""

import importlib.util
import json
import pathlib

import pytest

from bertjax import experiment, families
from bertjax.config import (
    UserError,
    common_config,
    fine_tuning_config,
    model_size,
    named_stages,
    pretraining_config,
    stage,
)
from bertjax.stages import stages_of
from bertjax.tasks import validate
from bertjax.validation import validate_pretraining
from experiments.ablations import scaled
from experiments.ablations.scaled import SCALES

ROOT = pathlib.Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "configs"
PRETRAINING = [
    "base", "large", "lamb", "small:tiny", "small:mini", "small:small", "small:medium", "quickstart", "bytes",
    "gpt:gpt2", "elmo", "modern:base", "adapt",
    "transformer_xl:wikitext", "transformer_xl:enwik8", "transformer_xl:cores",
    "electra:small", "electra:base", "characters:t64", "characters:cores", "transformer:base", "transformer:big",
    "xlnet:base", "xlnet:large", "xlnet:cores",
    "ablations/objective:ltr", "ablations/size:6-768-3", "ablations/masking:80-20-0", "ablations/positions:none",
]  # fmt: skip
FINE_TUNING = ["glue:mrpc", "classify", "squad:v1.1", "squad:v2.0", "ner", "tag", "swag", "features:last", "embed"]
EXPERIMENTS = PRETRAINING + FINE_TUNING


def load(experiment: str):
    name, _, argument = experiment.partition(":")
    spec = importlib.util.spec_from_file_location(name, ROOT / "experiments" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(*filter(None, [argument]))


def snapshot(config) -> str:
    return json.dumps(json.loads(config.to_json_best_effort()), indent=1, sort_keys=True) + "\n"


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_golden_snapshot(experiment, request):
    """A default that moves shows in review. Refresh with: pytest tests/test_config.py --update-golden"""
    path = GOLDEN / f"{experiment.replace(':', '-').replace('/', '-')}.json"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(snapshot(load(experiment)))
    assert snapshot(load(experiment)) == path.read_text()


def test_every_experiment_has_a_snapshot():
    ours = {experiment.partition(":")[0] for experiment in EXPERIMENTS}
    assert {path.stem for path in (ROOT / "experiments").glob("*.py")} == {name for name in ours if "/" not in name}
    not_experiments = {"__main__", "bits", "equal_time", "race", "scaled", "suite", "tables"}
    not_experiments |= {"characters", "successors", "today"}  # tables of equal time: tests/test_ablations.py
    ablations = {f"ablations/{path.stem}" for path in (ROOT / "experiments/ablations").glob("*.py")}
    assert ablations - {f"ablations/{name}" for name in not_experiments} == ours & ablations


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
def test_every_model_of_the_ablations_is_a_valid_config(scale):
    """And differs from BERT's in what its table compares, and in the records that this takes."""
    of_all_stages, of_first_stage = (snapshot(scaled.get_config(f"{scale}/{name}")) for name in ("bert", "bert_short"))
    assert of_all_stages != of_first_stage
    changed = {"no_nsp": {"next_sentence"}, "ltr": {"next_sentence", "causal"}, "masking-80-20-0": {"masked_lm_split"},
               "sinusoidal": {"positions"}, "order": {"next_sentence"}}  # fmt: skip
    sizes = {}
    for table in scaled.TABLES:
        for model in scaled.models(table, SCALES[scale]).values():
            config = scaled.get_config(f"{scale}/{model.name}")
            validate(config, with_data=False)
            sizes[model.name] = config.model
            bert = of_first_stage if model.is_short else of_all_stages
            lines = set(snapshot(config).splitlines()) - set(bert.splitlines())
            if model.name in changed and model.name != "masking-80-20-0":
                assert {line.split('"')[1] for line in lines} == changed[model.name]
        for _, cell in scaled.cells(table, SCALES[scale]):
            tuned = experiment.load(scaled.TASKS[cell.task].experiment).unlock()
            tuned.model.update(sizes[cell.model.name])  # as the checkpoint's
            tuned.update_from_flattened_dict(cell.settings(SCALES[scale]))
            validate(tuned, with_data=False)
    assert scaled.get_config(f"{scale}/masking-80-20-0").data.masked_lm_split == (0.8, 0.0, 0.2)
    with pytest.raises(UserError, match="unknown model 'x': choose one of random, bert, no_nsp, ltr"):
        scaled.get_config(f"{scale}/x")


@pytest.mark.parametrize("experiment", FINE_TUNING)
def test_fine_tuning_is_valid_with_data_and_a_checkpoint(experiment):
    config = load(experiment)
    with pytest.raises(UserError, match=r"config.data.path = '': say where"):
        validate(config)
    config.data.path = "folder"
    with pytest.raises(UserError, match=r"config.init_checkpoint = '': say what to fine-tune"):
        validate(config)
    config.init_checkpoint = "checkpoint"
    validate(config)
    assert config.is_locked
    with pytest.raises(UserError, match=r"config.task = '.*': this command is for pre-training"):
        validate_pretraining(config)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("remat", "auto", "config.remat = 'auto': choose one of none, dots, full"),
        ("epochs", 0.0, "config.epochs = 0.0: must be above 0"),
        ("epochs", float("inf"), "config.epochs = inf: must be finite"),
        ("optimizer.learning_rate", float("inf"), "config.optimizer.learning_rate = inf: must be finite"),
        ("max_seq_length", 4, "config.max_seq_length = 4: must be at least 8"),
        ("optimizer.warmup_proportion", 1.5, "config.optimizer.warmup_proportion = 1.5"),
        ("data.name", "mrcp", "config.data.name = 'mrcp': choose one of cola, sst2, mrpc"),
        ("eval.every_steps", -1, "config.eval.every_steps = -1"),
        ("head.lstm_layers", 2, "config.head.lstm_layers = 2: lstm_layers needs a BiLSTM: also set head.lstm_size"),
        (
            "restarts",
            3,
            'config.restarts = 3: applies to searches only; for a single run also set --config.sweep="seed=0"',
        ),
    ],
)
def test_mistakes_in_fine_tuning(field, value, message):
    config = load("glue:mrpc")
    config.data.path, config.init_checkpoint = "folder", "checkpoint"
    section, _, name = field.rpartition(".")
    (config[section] if section else config)[name] = value
    with pytest.raises(UserError, match=message):
        validate(config)


@pytest.mark.parametrize("experiment", PRETRAINING)
def test_every_experiment_is_valid_with_a_corpus(experiment):
    config = load(experiment)
    config.data.corpus = "text.txt"
    if config.adapt.model:
        with pytest.raises(UserError, match=r"there is nothing to adapt: set init_checkpoint"):
            validate(config)
        config.init_checkpoint = "checkpoint"
    validate(config)
    assert config.is_locked
    # What is stored in a workdir is the same config.
    again = pretraining_config().unlock()
    del again.model
    again.update(json.loads(config.to_json_best_effort()))
    assert families.config_of(again) == families.config_of(config)


def test_stages_run_from_short_to_long_whatever_their_names():
    config = pretraining_config()
    config.stages = named_stages(a=stage(1, 512, 77), b=stage(2, 64, 10), c=stage(3, 128, 20))
    assert [s.length for s in stages_of(config)] == [64, 128, 512]


def test_the_kinds_of_config_share_what_is_common():
    """Neither kind has fields of the other."""
    ours, theirs = (set(json.loads(c.to_json_best_effort())) for c in (pretraining_config(), fine_tuning_config("ner")))
    assert ours - theirs == {"objective", "stages", "z_loss", "branch_from", "adapt"}
    assert theirs - ours == {"distill", "epochs", "head", "keep_layers", "lora", "max_seq_length", "restarts", "sweep"}
    common = common_config().to_dict()
    for config in (pretraining_config(), fine_tuning_config("ner")):
        assert set(common) <= set(config) and set(common["optimizer"]) < set(config.optimizer)


def test_the_papers_recipe():
    for name in ("base", "large"):
        config = load(name)
        assert config.batch_size == 256
        assert [(s.steps, s.length) for s in stages_of(config)] == [(900_000, 128), (100_000, 512)]
        assert config.stages.short.max_predictions_per_seq == 20
        assert 76 <= config.stages.long.max_predictions_per_seq <= 80
        optimizer = config.optimizer
        assert (optimizer.learning_rate, optimizer.warmup_steps, optimizer.epsilon) == (1e-4, 10_000, 1e-6)
        assert (optimizer.weight_decay, optimizer.max_grad_norm, optimizer.bias_correction) == (0.01, 1.0, False)
    assert model_size("large")["num_hidden_layers"] == load("large").model.num_hidden_layers == 24


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("task", "translation", "config.task = 'translation': choose one of pretraining"),
        ("model.hidden_size", 100, "config.model.hidden_size = 100: must be a multiple of .*num_attention_heads = 12"),
        ("model.hidden_act", "swish", "config.model.hidden_act = 'swish': choose one of gelu, gelu_new, relu"),
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
            "config.stages.only.length = 1024: longer than sequences may be.* = 512",
        ),
        (
            "stages",
            named_stages(only=stage(5, 128, 10)),
            "config.stages.only.max_predictions_per_seq = 10: too small .* at least 19",
        ),
        ("stages", named_stages(only=stage(5, 128, 129)), "more than the sequence's 128 tokens"),
        ("stages", named_stages(only=stage(0, 128, 20)), "config.stages.only.steps = 0"),
        (
            "stages",
            named_stages(pretraining=stage(5, 128, 20), long=stage(5, 512, 77), decay=stage(5, 128, 20)),
            "config.stages = 'decay': would be trained before 'pretraining', though it is written after",
        ),
        ("stages", named_stages(a=stage(5, 128, 20), b=stage(5, 128, 21)), "a.max_predictions_per_seq = 20: stages of"),
        ("data.masked_lm_prob", 0.0, "config.data.masked_lm_prob = 0.0"),
        ("data.heldout_fraction", 1.5, "config.data.heldout_fraction = 1.5"),
        ("data.corpus", None, "config.data.corpus = None: say where the text is"),
        ("data.corpus", [], "config.data.corpus = .*: say where the text is"),
        ("eval.fill_masks", ("no mask",), "config.eval.fill_masks = 'no mask': each text needs a"),
        ("tokenizer.kind", "unigrams", "config.tokenizer.kind = 'unigrams': choose one of wordpiece, sentencep"),
        ("optimizer.learning_rate", -1.0, "config.optimizer.learning_rate = -1.0: must be above 0"),
        ("mesh.data", 0, "config.mesh.data = 0"),
        ("mesh.fsdp", -1, "only one axis can be -1"),
        ("remat", "some", "config.remat = 'some': choose one of none, dots, full, auto"),
        ("unroll", "some", "config.unroll = 'some': choose one of auto, yes, no"),
        ("model.positions", "rotary", "config.model.positions = 'rotary': choose one of learned, sinusoidal, none"),
        ("model.norm", "rms", "config.model.norm = 'rms': choose one of post, pre"),
        (
            "model.causal",
            True,
            "config.data.masking = 'static': nothing is masked where next words are learnt.*set dynamic",
        ),
        (
            "model.family",
            "lstms",
            "config.data.masking = 'static': nothing is masked where next and previous words are .*set dynamic",
        ),
        ("checkpoint.keep_every", 7, "config.checkpoint.keep_every = 7: must be a multiple of every_steps = 5000"),
        ("model.attention", "flash", "config.model.attention = 'flash': choose one of auto, xla, fused"),
        ("dtype", "float16", "config.dtype = 'float16'"),
        ("profile", "5:3", "config.profile = '5:3': write START:STOP, such as 20:24"),
        ("profile", "0:3", "config.profile = '0:3': write START:STOP.* the first step is 1"),
        ("profile", "5", "config.profile = '5': write START:STOP"),
        ("profile", "5:-3", "config.profile = '5:-3': write START:STOP"),
        ("data.language", "german", "config.data.language = 'german': must be an ISO 639 code, such as 'en' or 'de'"),
    ],
)
def test_mistakes_name_field_value_and_remedy(field, value, message):
    config = pretraining_config()
    config.data.corpus = "text.txt"
    *sections, name = field.split(".")
    target = config
    for section in sections:
        target = target[section]
    target[name] = value
    with pytest.raises(UserError, match=message) as caught:
        validate(config)
    assert "\n" not in str(caught.value)


def test_kernels_are_not_asked_for_and_forbidden():
    config = pretraining_config()
    config.kernels, config.model.attention = "no", "fused"
    with pytest.raises(UserError, match=r"config.kernels = 'no': model.attention = 'fused' asks for one"):
        validate(config, with_data=False)


def test_a_misspelt_field_is_an_error():
    config = pretraining_config()
    with pytest.raises((AttributeError, KeyError), match="batch_size"):
        config.batchsize = 3


def test_recomputed_layers_cannot_be_unrolled():
    config = load("base")
    config.data.records, config.unroll, config.remat = "records", "yes", "dots"
    with pytest.raises(UserError, match=r"config.unroll = 'yes': layers that are recomputed must stay in a scan"):
        validate(config)
    config.remat = "auto"
    validate(config)
