"""Adapting a checkpoint: new tokens and positions without initial changes; rehearsal; the report."""

import dataclasses
import shutil

import flax.linen as nn
import jax
import numpy as np
import pytest

from bertjax.cli.overrides import from_arguments
from bertjax.common.errors import UserError
from bertjax.config import experiments
from bertjax.config.defaults import named_stages, stage
from bertjax.config.lists import mixture_of
from bertjax.config.stages import config_in, stages_of
from bertjax.data.records.record_sets import RecordSet, mix_sources
from bertjax.interop import pretrained
from bertjax.launch.start import launch
from bertjax.launch.validate import validate
from bertjax.models import families
from bertjax.models.heads import BertForMaskedLM
from bertjax.pretraining import adaptation, init_checkpoint
from bertjax.pretraining import run as pretraining_run
from bertjax.training.checkpoints import checkpoint as checkpoints
from bertjax.training.trackers.jsonl import read_metrics
from tests.conftest import make_corpus, one_device_mesh, preparing_in_process

PIECES, FIRST = 6, 3


def adapting(checkpoint, corpus, **fields):
    config = experiments.load("adapt")
    config.init_checkpoint, config.data.corpus = str(checkpoint), str(corpus)
    config.stages = named_stages(adapt=stage(6, 32, 5))
    config.update(dict(batch_size=8, dtype="float32", log_every_steps=1, unroll="no"))
    config.data.heldout_fraction, config.tokenizer.extend = 0.15, PIECES
    config.adapt.new_pieces_first, config.adapt.positions = FIRST, 96
    config.eval.update(every_steps=3, max_sequences=16, bits_windows=3)
    config.checkpoint.every_steps, config.optimizer.warmup_steps = 3, 0
    config.update_from_flattened_dict(fields)
    return config


@pytest.fixture(scope="module", autouse=True)
def short_windows():
    with pytest.MonkeyPatch.context() as patch, preparing_in_process():
        patch.setattr(adaptation, "WINDOW_BYTES", (60, 120))
        yield


@pytest.fixture(scope="module")
def adapted(checkpoint, corpus_file, tmp_path_factory):
    """The workdir of a run on domain text and on general text."""
    folder = tmp_path_factory.mktemp("adapted")
    (folder / "general.txt").write_text(make_corpus(40, seed=5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretraining_run, "make_mesh", one_device_mesh)
        launch(two_sources(checkpoint, corpus_file, folder), folder / "run")
    return folder / "run"


def two_sources(checkpoint, corpus_file, folder):
    general = folder / "general.txt"
    config = adapting(checkpoint, f"{corpus_file},{general}", **{"data.mixture": f"{general}=25%"})
    validate(config)
    return config


@pytest.mark.slow
def test_a_run_reports_changes_of_the_checkpoint(checkpoint, corpus_file, adapted):
    """The run starts with the score of the checkpoint: the bits per byte of the same words with the checkpoint's
    vocabulary.
    """
    sources = str(corpus_file), str(adapted.parent / "general.txt")
    text = adaptation.read_heldout_text(adapted)
    assert text.windows.keys() == text.before.keys() == set(sources)
    assert all(len(each) == 3 for each in text.windows.values())
    assert any(window["hidden"] for window in text.windows[sources[0]])
    runs = map(pretrained.read_pretrained, (checkpoint, adapted))
    before, after = (text.score(BertForMaskedLM(each.config), each.params, each.tokenizer) for each in runs)
    assert text.before == {source: pytest.approx(scores) for source, scores in before.items()}
    report, lines = (adapted / "report.txt").read_text(), read_metrics(adapted)
    for source in sources:
        assert after[source]["tokens_per_word"] < 0.8 * before[source]["tokens_per_word"]
        numbers = [each[source][name] for name in ("bits_per_byte", "tokens_per_word") for each in (before, after)]
        line = "bits per byte {:.3f} before, {:.3f} after; tokens per word {:.3f} before, {:.3f} after"
        assert f"held-out text of {source}: {line.format(*numbers)}" in report
        name = f"eval/bits_per_byte ({source})"
        during = {line["step"]: line[name] for line in lines if name in line}
        assert list(during) == [3, 6] and during[6] == pytest.approx(numbers[1], rel=1e-4)
    for line in lines:
        if "train/loss" in line:
            share = line["train/tokens_per_step"] / (8 * 32)
            assert line["train/real_tokens_share"] == pytest.approx(share)


@pytest.mark.slow
def test_only_new_tokens_are_trained_at_first(checkpoint, adapted):
    before, table = pretrained.read_pretrained(checkpoint), "bert/embeddings/word/embedding"
    old, size = pretrained.flattened(before.params), before.tokenizer.vocab_size
    first, last = (pretrained.flattened(checkpoints.read_params(adapted, step)) for step in (3, 6))
    for name in old.keys() & first.keys():
        rows = size if name in (table, "masked_lm/bias") else len(old[name])  # positions are repeated
        np.testing.assert_array_equal(first[name][:rows], old[name][:rows])
    parts = [before.tokenizer.parts(piece) for piece in pretrained.read_pretrained(adapted).tokenizer.pieces[size:]]
    for name in (table, "masked_lm/bias"):
        assert len(first[name]) == pretrained.read_config(adapted).padded_vocab_size
        assert (first[name][size + PIECES :] == 0).all()
        change = np.abs(first[name][size : size + PIECES] - [old[name][subtokens].mean(0) for subtokens in parts])
        assert (change.reshape(PIECES, -1) > 0).any(axis=1).all() and change.max() < 2e-3  # three steps away
    assert (last["bert/encoder/layers/output/kernel"] != old["bert/encoder/layers/output/kernel"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["repeat", "interpolate"])
def test_initial_outputs_for_old_text_are_unchanged(how, checkpoint, corpus_file, tmp_path):
    config = adapting(checkpoint, corpus_file, **{"adapt.positions_from": how, "eval.bits_windows": 0})
    config, _ = pretraining_run.KIND.resolve(config, None)
    opened = pretraining_run.KIND.open(config, tmp_path, None)
    new = jax.device_get(opened.initial_params(nn.meta.unbox(jax.jit(opened.task.init_params)(jax.random.key(0)))))
    before = pretrained.read_pretrained(checkpoint)
    ids = np.random.default_rng(0).integers(0, before.tokenizer.vocab_size, (2, 40))
    inputs = (ids, np.ones_like(ids), np.zeros_like(ids), np.tile(np.arange(40), (2, 1)))
    new_logits, old_logits = (
        jax.jit(BertForMaskedLM(config).apply)({"params": params}, *inputs)
        for config, params in ((opened.task.loss.model.config, new), (before.config, before.params))
    )
    size = before.tokenizer.vocab_size
    if how == "repeat":
        np.testing.assert_allclose(new_logits[..., :size], old_logits[..., :size], atol=1e-5)
    positions, old = (tree["bert"]["embeddings"]["position"]["embedding"] for tree in (new, before.params))
    if how == "interpolate":  # stretched: both ends stay, and linear tables stay linear
        places = np.arange(96) * 63 / 95
        expected = [np.interp(places, np.arange(64), column) for column in old.T]
        np.testing.assert_allclose(positions.T, expected, atol=1e-6)


@pytest.mark.slow
def test_resume_gives_identical_params(checkpoint, corpus_file, adapted, tmp_path):
    workdir = shutil.copytree(adapted, tmp_path / "run")
    shutil.rmtree(workdir / checkpoints.FOLDER / "6")
    launch(two_sources(checkpoint, corpus_file, adapted.parent), workdir)
    resumed, uninterrupted = (
        pretrained.flattened(checkpoints.read_params(run_folder, 6)) for run_folder in (workdir, adapted)
    )
    assert all((resumed[name] == uninterrupted[name]).all() for name in uninterrupted)
    assert (workdir / "report.txt").read_text() == (adapted / "report.txt").read_text()


@pytest.mark.slow
def test_stages_may_have_different_objectives(checkpoint, corpus_file, tmp_path):
    """A causal stage predicts next tokens, then a stage predicts masked tokens with the same head."""
    fields = {"tokenizer.extend": 0, "adapt.new_pieces_first": 0, "adapt.positions": 0, "eval.bits_windows": 0}
    config = adapting(checkpoint, corpus_file, **fields)
    first = stage(3, 16, 3, objective="lm", model=dict(causal=True))
    config.stages = named_stages(first=first, second=stage(3, 32, 5), third=stage(1, 32, 5, objective="2*mlm"))
    validate(config)
    launch(config, tmp_path)
    metrics = {m["step"]: m for m in read_metrics(tmp_path) if "train/loss" in m}
    assert ["train/lm_loss" in metrics[step] for step in (1, 3, 4, 6)] == [True, True, False, False]
    assert ["train/mlm_loss" in metrics[step] for step in (1, 3, 4, 6)] == [False, False, True, True]
    assert metrics[7]["train/loss"] == pytest.approx(2 * metrics[7]["train/mlm_loss"])
    assert "held-out masked words" in (tmp_path / "report.txt").read_text()
    assert checkpoints.read_params(tmp_path, 7).keys() == {"bert", "masked_lm"}
    assert not pretrained.read_config(tmp_path).causal and pretrained.read_config(f"{tmp_path}@3").causal
    with pytest.raises(UserError, match=r"config.objective = 'lm': the objective needs a causal language model"):
        config.stages.first.model.causal = False
        validate(config, is_adopted=True)


@pytest.mark.slow
def test_a_stage_may_change_fields_of_the_checkpoints_family(request, checkpoint, corpus_file):
    """For example, the base of rotary angles. The family is read from the checkpoint."""
    modern = request.getfixturevalue("pretrained")("modernbert")
    angles = "--config.stages.adapt.model.global_rope_theta=5e5"
    dropout = "--config.model.attention_output_dropout_prob=0.25"

    def adopted(source, *flags):
        flags = [*flags, f"--config.data.corpus={corpus_file}", f"--config.init_checkpoint={source}"]
        config, _ = from_arguments(["--config=adapt", "--config.adapt.positions=9000", *flags])
        validate(config)
        config, _ = init_checkpoint.resolve_checkpoint(config)
        return families.config_of(config_in(config, stages_of(config)[0]))

    before = pretrained.read_config(modern)
    assert adopted(modern, angles, dropout) == dataclasses.replace(
        before, vocab_size=before.vocab_size + 1000, max_position_embeddings=9000, global_rope_theta=5e5,
        attention_output_dropout_prob=0.25,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"config.model.attention_output_dropout_prob = 0.25: .* no such field"):
        adopted(checkpoint, angles, dropout)
    with pytest.raises(UserError, match=r"stages.adapt.model.global_rope_theta: the family 'bert' of .* has no field"):
        adopted(checkpoint, angles)


def test_the_rehearsal_share_is_independent_of_corpus_sizes():
    config = experiments.load("adapt")
    config.data.corpus = "domain,general"
    sizes = {"domain": 100, "general": 5000}
    for mixture, share in (("general=20%", 0.2), ("general=70%,domain=30%", 0.7), ("domain=80%,general=2", 0.2)):
        config.data.mixture = mixture
        weights = mixture_of(config, sizes=sizes)
        read = {source: weights[source] * size for source, size in sizes.items()}
        assert read["general"] / sum(read.values()) == pytest.approx(share)
    config.data.mixture = "general=20%"
    files = RecordSet(("a", "b", "c"), (100, 2500, 2500), sources=("domain", "general", "general"))
    assert files.sizes == sizes
    mixed_sizes = mix_sources(files, mixture_of(config, sizes=files.sizes)).sizes
    assert (
        mixed_sizes["general"] / sum(mixed_sizes.values()) == pytest.approx(0.2, rel=0.02)
        and mixed_sizes["general"] == 5000
    )


@pytest.mark.parametrize("fields, message", [
    ({"data.mixture": "x.txt=120%"}, r"config.data.mixture = 'x.txt=120%': 'x.txt' is not a source"),
    ({"data.mixture": "{corpus}=100%", "data.corpus": "{corpus},b"}, r"the sum of the shares must be"),
    ({"data.mixture": "{corpus}=50%", "data.mix_when": "prepared"}, r"shares are .*mix_when=read"),
    ({"tokenizer.extend": 100_000}, r"config.tokenizer.extend = 100000: this corpus gives \d+ new tokens"),
    ({"tokenizer.extend": 0}, r"config.adapt.new_pieces_first = 3: must be 0 without new tokens"),
    ({"adapt.model": False}, r"only the model of init_checkpoint can grow; set adapt.model=True"),
    ({"adapt.positions": 40}, r"config.adapt.positions = 40: must be at least 64, .* or 0; set a larger"),
    ({"adapt.positions_from": "x"}, r"config.adapt.positions_from = 'x': choose one of repeat, interpolate"),
    ({"stages.adapt.length": 128, "stages.adapt.max_predictions_per_seq": 20}, r"length = 128: .* has 96 positions; s"),
    ({"tokenizer.kind": "bytes"}, r"tokenizer.extend = .*tokenizer.kind = 'bytes', whose vocabulary is fixed"),
    ({"data.heldout_fraction": 0.0}, r"config.data.heldout_fraction = 0.0: must hold out text"),
    ({"init_checkpoint": ""}, r"needs a checkpoint to adapt; set init_checkpoint"),
])  # fmt: skip
def test_mistakes_raise_errors_of_one_line(fields, message, checkpoint, corpus_file, tmp_path):
    values = {name: x.format(corpus=corpus_file) if isinstance(x, str) else x for name, x in fields.items()}
    config = adapting(checkpoint, corpus_file, **values)
    with pytest.raises(UserError, match=message):
        validate(config)
        launch(config, tmp_path)
