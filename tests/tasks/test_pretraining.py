"""The pre-training task: its loss, its scores against their definitions, its stages, its inputs."""

import functools
import itertools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from bertjax import tasks
from bertjax.config import UserError, named_stages, stage
from bertjax.data import preparation, records
from bertjax.data.batches.pipeline import heldout_batches
from bertjax.data.records import find_records
from bertjax.data.tf import tf
from bertjax.families.bert.model import BertModel
from bertjax.families.with_heads import BertForMaskedLM, BertForPreTraining
from bertjax.interop import conversion, pretrained
from bertjax.tasks import fill_mask, finetuning_run, generation, pretraining, pretraining_run, pretraining_scores
from bertjax.tasks.hidden_states import extract
from bertjax.tasks.pretraining import Pretraining
from bertjax.tasks.pretraining_run import find_or_prepare, report
from bertjax.text import tokenizer
from bertjax.training import checkpoint
from bertjax.training.run import run
from bertjax.training.sinks.jsonl import read_metrics
from bertjax.training.step import fits_in_memory, make_program
from bertjax.training.workdir import differences, refuse
from tests import processes
from tests.conftest import make_corpus, one_device_mesh, preparing_in_process, tiny_config
from tests.tasks import test_features, test_finetuning

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module")
def task(records_folder):
    config = tiny_config(records=records_folder)
    return Pretraining(config, one_device_mesh(config), records_folder)


@pytest.fixture(scope="module")
def params(task):
    return make_program(task, task.config, task.mesh).init(jax.random.key(0)).params


def test_loss_is_the_papers(task, params):
    """sum(w ce) / (sum(w) + 1e-5) over masked words, plus the mean over pairs, from the model's own logits."""
    batch = next(task.batches(0))
    loss, metrics = jax.jit(lambda p, b: task.loss(p, task.normalize(b)))(params, batch)
    words, pairs = BertForPreTraining(task.model.config).apply(
        {"params": params},
        batch["input_ids"],
        batch["segments"],
        batch["token_types"],
        batch["word_positions"],
    )
    w, labels = batch["word_weights"], batch["word_ids"]
    ce = -np.take_along_axis(np.asarray(jax.nn.log_softmax(words)), labels[..., None], 2)[..., 0]
    nsp = -np.take_along_axis(np.asarray(jax.nn.log_softmax(pairs)), batch["pair_labels"][:, None], 1)
    np.testing.assert_allclose(loss, (w * ce).sum() / (w.sum() + 1e-5) + nsp.mean(), rtol=1e-5)
    right = (np.asarray(words).argmax(-1) == labels)[w > 0]
    np.testing.assert_allclose(metrics["mlm_accuracy"], right.mean(), rtol=1e-4)
    assert metrics["tokens"] == batch["segments"].sum()


def test_stages_follow_each_other_and_can_be_entered_anywhere(task):
    shapes = [batch["input_ids"].shape for batch in task.batches(0)]
    assert shapes == [(16, 32)] * 6 + [(16, 64)] * 4
    straight = list(task.batches(0))
    for start in (3, 6, 8):
        for a, b in itertools.zip_longest(task.batches(start), straight[start:]):
            assert all((a[name] == b[name]).all() for name in b)
    assert list(task.batches(10)) == []


def test_flops_of_steps_add_up_over_stages(task):
    assert task.flops(0, 10) == task.flops(0, 4) + task.flops(4, 8) + task.flops(8, 10)
    assert task.flops(7, 8) > 1.9 * task.flops(0, 1)


def test_the_planner_is_told_the_shapes_of_the_real_batches(task):
    for number, start in ((0, 0), (1, 6)):
        real = next(task.batches(start))
        told = task.abstract_batch(number)
        assert {n: (x.shape, x.dtype) for n, x in real.items()} == {n: (x.shape, x.dtype) for n, x in told.items()}


@pytest.mark.slow
def test_baselines_are_what_they_say(task, params, records_folder):
    scores = task.evaluate(params, step=10)
    assert scores.measured_on.endswith(" sequences of length 64") and scores.score == -scores.scores["mlm_loss"]
    text, scores = report(task.config, scores), scores.scores
    found = find_records(records_folder, 64, 10, "heldout")
    batches = list(heldout_batches(found, 64, 10, batch_size=16, max_sequences=40))
    heldout = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    weights = heldout["word_weights"] > 0
    words, labels = heldout["word_ids"][weights], heldout["pair_labels"]
    labels = labels[heldout["sequence_weights"] > 0]

    # Counted over the files themselves; the task leaves out what makes no whole batch.
    counts, train = np.ones(150), find_records(records_folder, 32, 5, "train")
    for serialized in tf.data.TFRecordDataset(list(train.paths)).as_numpy_iterator():
        feature = tf.train.Example.FromString(serialized).features.feature
        ids, weights = feature["masked_lm_ids"].int64_list.value, feature["masked_lm_weights"].float_list.value
        np.add.at(counts, [word for word, weight in zip(ids, weights) if weight], 1)
    unigram = -np.log(counts / counts.sum())[words].mean()
    assert unigram < np.log(150) - 0.5  # the corpus has frequent and rare words
    np.testing.assert_allclose(scores["unigram_loss"], unigram, rtol=2e-3)
    np.testing.assert_allclose(scores["mlm_majority"], (words == counts.argmax()).mean(), rtol=1e-5)
    np.testing.assert_allclose(scores["nsp_majority"], max(labels.mean(), 1 - labels.mean()), rtol=1e-5)
    # An untrained model knows nothing: it is near log(150) and below no baseline.
    assert abs(scores["mlm_loss"] - np.log(150)) < 0.3
    assert "unigram baseline" in text


@pytest.mark.slow
def test_evaluation_counts_every_held_out_sequence_once(task, params):
    """Whatever the batch size: the rows that fill up the last batch weigh nothing."""
    expected = task.evaluate(params, step=1).scores
    config = task.config.copy_and_resolve_references()
    config.batch_size = 7
    other = Pretraining(config, task.mesh, config.data.records)
    assert other.eval_batch_size == 7 and task.eval_batch_size == 16
    other._statistics = task._statistics
    for name, value in other.evaluate(params, step=1).scores.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5)
    # One more sequence changes the scores: every one counts.
    config.eval.max_sequences -= 1
    assert other.evaluate(params, step=1).scores["mlm_loss"] != pytest.approx(expected["mlm_loss"], rel=1e-6)


@pytest.mark.slow
def test_each_source_counts_in_evaluation_as_much_as_in_training(task, params, records_folder, tmp_path):
    sources = [str(tmp_path / name) for name in ("much.txt", "little.txt")]
    for number, source in enumerate(sources):
        pathlib.Path(source).write_text(make_corpus(150, seed=number) if number else make_corpus(150).replace(".", ""))
    config = tiny_config(",".join(sources))
    config.data.update(mixture=f"{sources[0]}=10,{sources[1]}=0.1", dupe_factor=1)
    config.tokenizer.path, config.eval.max_sequences = str(records_folder / "vocab.txt"), 10**6
    with preparing_in_process():
        manifest = preparation.prepare(config, tmp_path / "out")
    used = {source: manifest["sources"][source]["characters"] for source in sources}
    share = used[sources[0]] / sum(used.values())
    assert share > 0.97

    mixed = Pretraining(config, task.mesh, tmp_path / "out")
    scores = mixed.evaluate(params, step=10).scores
    for source in sources:
        found = find_records(tmp_path / "out", 64, 10, "heldout").by_source()[source]
        batches = heldout_batches(found, 64, 10, batch_size=64, max_sequences=10**6)
        losses, words = zip(*((task.loss(params, b)[1]["mlm_loss"], b["word_weights"].sum()) for b in batches))
        np.testing.assert_allclose(scores[f"mlm_loss ({source})"], sum(losses) / sum(words), rtol=1e-4)
    much, little = (scores[f"mlm_loss ({source})"] for source in sources)
    assert abs(much - little) > 0.002
    np.testing.assert_allclose(scores["mlm_loss"], share * much + (1 - share) * little, rtol=1e-6)
    assert f"of {sources[1]}: loss {little:.3f}, accuracy" in report(config, mixed.evaluate(params, step=10))
    assert pretraining_scores.divided(1000, {"a": 0.99, "b": 0.01}) == {"a": 990, "b": 125}


def test_masks_are_filled_best_first(task, params, records_folder):
    pieces = tokenizer.load("wordpiece", records_folder / "vocab.txt")
    texts = ["the [MASK] saw the [MASK] near a ship .", "[MASK]"]
    model = BertForMaskedLM(task.model.config)
    filled = list(fill_mask.fill_masks(model, params, pieces, texts, top_k=4))
    assert [f.text for f in filled] == texts and [len(f.masks) for f in filled] == [2, 1]
    for mask in filled[0].masks:
        probabilities = [p for _, p in mask]
        assert len(mask) == 4 and probabilities == sorted(probabilities, reverse=True)
        assert all(word in pieces.pieces for word, _ in mask)
    everything = next(fill_mask.fill_masks(model, params, pieces, ["[MASK]"], top_k=10_000))
    assert abs(sum(p for _, p in everything.masks[0]) - 1) < 1e-4
    # Padding to a power of two changes nothing: the same text, alone and beside a longer one.
    ids = np.array([[pieces.cls_id, pieces.mask_id, pieces.sep_id]])
    exact, _ = BertForPreTraining(task.model.config).apply(
        {"params": params}, ids, np.ones_like(ids), np.zeros_like(ids), np.array([[1]])
    )
    np.testing.assert_allclose(everything.masks[0][0][1], jax.nn.softmax(exact).max(), rtol=1e-4)
    with pytest.raises(UserError, match=r"no \[MASK\] in 'nothing to fill'"):
        list(fill_mask.fill_masks(model, params, pieces, ["nothing to fill"]))
    with pytest.raises(UserError, match=r"more than the model's 64 positions"):
        list(fill_mask.fill_masks(model, params, pieces, ["ship " * 70 + "[MASK]"]))


def files_of(task):
    return [*(order.files for order in task.orders), *(files for found in task._heldout for files in found.values())]


def config_with(next_sentence, **where):
    config = tiny_config(**where)
    config.data.next_sentence = next_sentence
    return config


@pytest.mark.slow
@pytest.mark.parametrize("next_sentence", ["pairs", "none"])
def test_empty_rows_teach_nothing(task, params, records_folder, next_sentence):
    """They stand in for the records of a damaged file: some in a batch, or all."""
    task = Pretraining(config_with(next_sentence, records=records_folder), task.mesh, records_folder)
    step = jax.jit(jax.value_and_grad(lambda p, b: task.loss(p, task.normalize(b)), has_aux=True))
    whole = next(task.batches(0))
    halves = {name: (x[:8], np.zeros_like(x[:8])) for name, x in whole.items()}
    (loss, _), gradients = step(params, {name: np.concatenate(half) for name, half in halves.items()})
    (expected, _), twice = step(params, {name: np.concatenate([x, x]) for name, (x, _) in halves.items()})
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), gradients, twice)
    (loss, _), gradients = step(params, {name: np.zeros_like(x) for name, x in whole.items()})
    assert loss == 0 and all((x == 0).all() for x in jax.tree.leaves(gradients))


def test_held_out_files_without_a_readable_record_give_no_scores(task, params, monkeypatch):
    def empty(*arguments, **settings):
        for batch in heldout_batches(*arguments, **settings):
            yield {name: np.zeros_like(x) for name, x in batch.items()}

    monkeypatch.setattr(pretraining.pipeline, "heldout_batches", empty)
    assert task.evaluate(params, step=1) is None


def test_without_pairs_the_loss_is_that_of_the_words(task, params, records_folder):
    config = config_with("none", records=records_folder)
    words = Pretraining(config, task.mesh, records_folder)
    batch = next(task.batches(0))
    loss, metrics = jax.jit(words.loss)(params, words.normalize(batch))  # which leaves pooler and head alone
    _, expected = jax.jit(task.loss)(params, task.normalize(batch))
    assert loss == metrics["mlm_loss"] == expected["mlm_loss"]
    assert metrics.keys() == {"mlm_loss", "mlm_accuracy", "tokens", "padding"}
    assert task.flops(0, 1) - words.flops(0, 1) == 3 * 2 * 16 * (32 * 32 + 2 * 32)  # pooler and head


def train(next_sentence, corpus_file, workdir):
    """Ten steps on records of its own."""
    config = config_with(next_sentence, corpus=corpus_file)
    config.stages = named_stages(short=stage(10, 32, 5))
    with preparing_in_process():
        run(pretraining_run.KIND, config, workdir)


@pytest.fixture(scope="module")
def trained(corpus_file, tmp_path_factory):
    """(next_sentence) -> the workdir of a finished run."""

    @functools.cache
    def trained(next_sentence):
        workdir = tmp_path_factory.mktemp(next_sentence)
        train(next_sentence, corpus_file, workdir)
        return workdir

    return trained


@pytest.mark.slow
@pytest.mark.parametrize("next_sentence, metrics, said", [("none", None, None), ("order", "sop", "sentence order")])
def test_what_pairs_teach_is_called_by_its_name(trained, next_sentence, metrics, said):
    lines = read_metrics(trained(next_sentence))
    names = {name for line in lines for name in line if "nsp_" in name or "sop_" in name}
    expected = {"train/loss", "train/accuracy", "eval/loss", "eval/accuracy", "eval/majority"}
    assert names == {name.replace("/", f"/{metrics}_") for name in expected if metrics}
    assert all("eval/mlm_loss" in line or "train/mlm_loss" in line for line in lines if line["step"] == 5)
    filled = "the [MASK] saw the [MASK] ."
    report, filling, _ = (trained(next_sentence) / "report.txt").read_text().partition(filled)
    assert filling and [line.split(":")[0] for line in report.splitlines() if line.startswith("held-out")] == [
        "held-out masked words", *([f"held-out {said}"] if said else ())
    ]  # fmt: skip


@pytest.mark.slow
def test_a_run_without_pairs_resumes_bit_for_bit(trained, corpus_file, tmp_path):
    workdir = shutil.copytree(trained("none"), tmp_path / "run")
    shutil.rmtree(workdir / checkpoint.FOLDER / "10")
    train("none", corpus_file, workdir)
    resumed, straight = (pretrained.flattened(pretrained.read(path).params) for path in (workdir, trained("none")))
    assert resumed.keys() == straight.keys()
    assert all((resumed[name] == straight[name]).all() for name in straight)


@pytest.mark.slow
@pytest.mark.parametrize("before, now", [("none", "pairs"), ("order", "none"), ("order", "pairs")])
def test_a_workdir_keeps_its_objective(trained, before, now):
    message = rf"config.data.next_sentence = '{now}': .* holds a run with '{before}'; choose another --workdir"
    with pytest.raises(UserError, match=message):
        run(pretraining_run.KIND, config_with(now, records="elsewhere"), trained(before))


@pytest.mark.slow
def test_a_model_without_pairs_is_used_like_any_other(trained, tmp_path, capsys):
    source = pretrained.read(trained("none"))
    assert source.params.keys() == {"bert", "masked_lm"} and "pooler" not in source.params["bert"]
    (hidden,) = extract(BertModel(source.config), source.params["bert"], source.tokenizer, ["a ship"], "last")
    assert hidden.shape[-1] == 32 and np.isfinite(hidden).all()

    test_finetuning.write_sst2(tmp_path, train=32, dev=16)
    capsys.readouterr()
    config = test_finetuning.config_for(tmp_path, trained("none"), epochs=1.0)
    test_finetuning.run(config, tmp_path / "tuned")
    said = capsys.readouterr().out
    left = "bert/pooler/dense/bias, bert/pooler/dense/kernel, classifier/dense/bias, classifier/dense/kernel"
    assert f"left fresh: {left}; not used: masked_lm/bias" in said
    assert "pooler" in pretrained.read(tmp_path / "tuned").params["bert"]


@pytest.mark.parametrize("next_sentence", ["none", "order"])
def test_records_without_a_manifest_are_pairs(records_folder, tmp_path, next_sentence):
    shutil.copytree(records_folder, tmp_path / "theirs")
    (tmp_path / "theirs/manifest.json").unlink()
    config = config_with(next_sentence, records=tmp_path / "theirs")
    config.tokenizer.path = str(records_folder / "vocab.txt")
    with pytest.raises(UserError, match=f"config.data.next_sentence = '{next_sentence}': .*theirs have no manifest"):
        find_or_prepare(config, tmp_path)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("tokenizer.path", "other.txt", r"made with another tokenizer \(wordpiece, lowercase = True, 150 pieces\)"),
        ("model.vocab_size", 200, r"vocab_size = 200: the tokenizer .*vocab.txt has 150 pieces"),
        ("data.records", "elsewhere", "config.tokenizer.path = '': the records in .*elsewhere have no manifest"),
    ],
)
def test_records_of_another_tokenizer_are_refused(records_folder, tmp_path, field, value, message):
    other = [*tokenizer.SPECIAL_PIECES, *"abcdefgh"]
    (tmp_path / "other.txt").write_text("\n".join(other))
    config = tiny_config(records=records_folder)
    (tmp_path / "elsewhere").mkdir()
    value = str(tmp_path / value) if value in ("other.txt", "elsewhere") else value
    config.update_from_flattened_dict({field: value})
    with pytest.raises(UserError, match=message):
        find_or_prepare(config, tmp_path)


@pytest.mark.slow
def test_records_in_the_workdir_must_have_the_configs_recipe(corpus_file, tmp_path):
    config = tiny_config(corpus_file)
    folder, pieces = find_or_prepare(config, tmp_path)
    assert folder == tmp_path / "records" and pieces.vocab_size == 150
    assert find_or_prepare(config, tmp_path)[1].fingerprint == pieces.fingerprint
    config.data.dupe_factor = 9
    with pytest.raises(UserError, match=r"config.data.dupe_factor = 9: .* were prepared with 3; set --config"):
        find_or_prepare(config, tmp_path)


def test_a_corpus_that_has_grown_is_told(tmp_path, capsys):
    """A new run refuses records of before, one that is resumed goes on with them."""
    corpus = tmp_path / "text.txt"
    corpus.write_text(make_corpus(60))
    config = tiny_config(corpus)
    with preparing_in_process():
        folder, _ = find_or_prepare(config, tmp_path)
    info = pretraining_run.KIND.open(config, tmp_path, None).info
    assert pretraining_run.KIND.changes_of_data(config, tmp_path, info) == []
    corpus.write_text(make_corpus(61))
    with pytest.raises(
        UserError, match=rf"since .* were prepared, {corpus} has changed \(1 files of .*; delete the fold"
    ):
        find_or_prepare(config, tmp_path)
    capsys.readouterr()
    assert find_or_prepare(config, tmp_path, is_new=False)[0] == folder
    assert "going on with the records of before" in capsys.readouterr().out
    (change,) = pretraining_run.KIND.changes_of_data(config, tmp_path, info)
    assert change.startswith(f"{corpus} has changed")
    corpus.unlink()
    assert find_or_prepare(config, tmp_path)[0] == folder and "has changed" not in capsys.readouterr().out
    config.data.records = str(folder)
    assert find_or_prepare(config, tmp_path)[0] == folder

    # Other records in the place of a run's: refused.
    corpus.write_text(make_corpus(61))
    config.data.records = ""
    shutil.rmtree(folder)
    with preparing_in_process():
        now = pretraining_run.KIND.open(config, tmp_path, info).info
    with pytest.raises(UserError, match=r"holds a run on other data \(records changed\)"):
        refuse("RUN", [d for d in differences(info, now) if d.field == "fingerprints"])


@pytest.mark.parametrize("field, value", [("lowercase", False), ("kind", "sentencepiece")])
def test_a_flag_of_a_tokenizer_that_the_records_do_not_have_is_refused(records_folder, tmp_path, field, value):
    config = tiny_config(records=records_folder)
    config.tokenizer[field] = value
    with pytest.raises(
        UserError, match=rf"config.tokenizer.{field} = {value!r}: has no effect, since the tokenizer of the"
    ):
        find_or_prepare(config, tmp_path)


@pytest.mark.parametrize(
    "field, value, before", [("seed", 5, 0), ("language", "de", "'en'"), ("masked_lm_prob", 0.1, 0.15)]
)
def test_given_records_must_have_the_configs_recipe(records_folder, tmp_path, field, value, before):
    config = tiny_config(records=records_folder)
    find_or_prepare(config, tmp_path)  # whatever the seed of the training
    config.seed, config.data[field] = 7, value
    flag = f"set --config.data.{field}={before}".replace("'", "")
    with pytest.raises(UserError, match=rf"config.data.{field} = {value!r}: .* prepared with {before}; {flag}, or"):
        find_or_prepare(config, tmp_path)


def test_records_without_a_manifest_are_counted_once(records_folder, tmp_path, monkeypatch):
    """By the first host; later runs, and the other hosts, read the counts from the workdir."""
    shutil.copytree(records_folder, tmp_path / "theirs")
    (tmp_path / "theirs/manifest.json").unlink()
    config, counted = tiny_config(records=tmp_path / "theirs"), []
    config.tokenizer.path = str(records_folder / "vocab.txt")

    def count(path, _real=records.count_records):
        counted.append(path)
        return _real(path)

    monkeypatch.setattr(records, "count_records", count)
    totals = []
    for _ in range(2):
        opened = pretraining_run.KIND.open(config, tmp_path / "run", None)
        totals.append([files.total for files in files_of(opened.task)])
    files = list((tmp_path / "theirs").rglob("*.tfrecord"))
    assert sorted(counted) == sorted(map(str, files))  # each once
    own = Pretraining(tiny_config(records=records_folder), opened.mesh, records_folder)
    assert totals == 2 * [[files.total for files in files_of(own)]]


def test_a_corpus_need_not_be_named_with_records_but_must_be_theirs(records_folder, corpus_file, tmp_path):
    config = tiny_config(corpus_file, records_folder)
    find_or_prepare(config, tmp_path)
    config.data.corpus = "other.txt"
    with pytest.raises(UserError, match=r"config.data.corpus = \['other.txt'\]: the records in"):
        find_or_prepare(config, tmp_path)


@pytest.mark.slow
def test_remat_auto_takes_the_first_policy_that_fits(records_folder, monkeypatch):
    config = tiny_config(records=records_folder)
    config.remat = "auto"
    task = Pretraining(config, one_device_mesh(config), records_folder)
    assert pretraining_run.fastest_that_fits(task, platform="cpu").config.remat == "none"
    fitting = iter([False, True])
    monkeypatch.setattr(pretraining_run, "fits_in_memory", lambda lowered, limit: next(fitting))
    assert pretraining_run.fastest_that_fits(task, platform="gpu").config.remat == "dots"
    fitting = iter([False, False])  # nothing is left to try after the last
    assert pretraining_run.fastest_that_fits(task, platform="gpu").config.remat == "full"
    monkeypatch.setattr(pretraining_run, "fits_in_memory", lambda lowered, limit: True)
    monkeypatch.setattr(pretraining_run.hosts, "as_on_first", lambda fits: False)  # whatever this host finds
    assert pretraining_run.fastest_that_fits(task, platform="gpu").config.remat == "full"
    assert config.remat == task.config.remat == "auto"


def test_long_runs_on_chips_with_kernels_unroll_their_layers_if_that_fits():
    def ways(platform, chip, steps=1_000_000, **fields):
        config = tiny_config()
        config.stages.short.steps = steps
        config.update(fields)
        return [(way.remat, way.unroll) for way in pretraining_run.ways_to_compute(config, platform, chip)]

    assert ways("tpu", "TPU v4") == [("none", "yes"), ("none", "auto")]
    assert ways("tpu", "TPU v4", remat="auto")[:3] == [("none", "yes"), ("none", "auto"), ("dots", "auto")]
    assert ways("tpu", "TPU v4", remat="auto", unroll="no") == [("none", "no"), ("dots", "no"), ("full", "no")]
    assert ways("tpu", "TPU v4", remat="full") == [("full", "auto")]
    assert ways("gpu", "NVIDIA H100 80GB HBM3", steps=5_000) == [("none", "yes"), ("none", "auto")]
    assert ways("tpu", "TPU v4", steps=5_000) == [("none", "auto")]
    assert ways("tpu", "TPU v4", steps=1000) == ways("gpu", "Tesla V100") == ways("cpu", "cpu") == [("none", "auto")]
    assert ways("tpu", "TPU v3", remat="auto") == [("full", "auto")]  # has no kernels
    assert ways("tpu", "TPU v4", model=dict(family="xlnet")) == [("none", "auto")]  # nor has the family


def test_a_program_fits_if_it_leaves_the_devices_memory_in_bounds():
    lowered = jax.jit(lambda x: (x @ x).sum()).lower(jax.ShapeDtypeStruct((512, 512), np.float32))
    assert fits_in_memory(lowered, None) and fits_in_memory(lowered, 1 << 23)
    assert not fits_in_memory(lowered, (1 << 20) - 1)  # less than the argument


@pytest.mark.slow
def test_a_left_to_right_model_of_bytes_from_text_to_text(tmp_path, corpus_file, capsys):
    """Two things at once, because each costs a run: its pieces are bytes, and it learns the next one."""
    config = config_with("none", corpus=corpus_file)
    config.tokenizer.kind, config.data.masking = "bytes", "dynamic"
    config.model.update(causal=True, output="plain", vocab_size=261)
    config.eval.fill_masks = ()
    config.stages = named_stages(short=stage(10, 32, 5))
    with preparing_in_process():
        run(pretraining_run.KIND, config, tmp_path / "run")
    lines = read_metrics(tmp_path / "run")
    (scores,) = [line for line in lines if "eval/lm_loss" in line and line["step"] == 10]
    assert (
        scores.keys() >= {"eval/unigram_loss", "eval/lm_accuracy", "eval/lm_majority"} and "eval/mlm_loss" not in scores
    )
    assert scores["eval/lm_loss"] < 5.3 < np.log(261)  # of bytes that are equally likely
    assert (tmp_path / "run/report.txt").read_text().startswith("held-out next words: loss")

    source = pretrained.read(tmp_path / "run")
    assert source.tokenizer.kind == "bytes" and source.config.causal
    model, said = BertForMaskedLM(source.config), "The ship"
    found = generation.generate(model, source.params, source.tokenizer, said, 20, generation.Sampling(), seed=1)
    assert found.startswith(said) and len(said) < len(found) <= len(said) + 20
    assert generation.generate(model, source.params, source.tokenizer, said, 20, generation.Sampling(), seed=1) == found
    for text in (said, "a [MASK]"):
        refused = r"only a model that was trained with masks fills a .*; --generate=N continues a text"
        with pytest.raises(UserError, match=refused):
            next(fill_mask.fill_masks(model, source.params, source.tokenizer, [text]))
    flags = ("--generate=20", "--temperature=0.8", "--top_k=50", "--top_p=0.9", "--seed=3", "--json")
    predicted = processes.run("predict", "--checkpoint=run", *flags, said, cwd=tmp_path)
    sampling = generation.Sampling(0.8, 50, 0.9)
    expected = generation.generate(model, source.params, source.tokenizer, said, 20, sampling, seed=3)
    assert json.loads(predicted.stdout) == {"text": said, "continued": expected}, predicted.stderr

    test_finetuning.write_sst2(tmp_path, train=32, dev=16)
    config = test_finetuning.config_for(tmp_path, tmp_path / "run", epochs=1.0)
    config.head.lstm_size = 8
    test_finetuning.run(config, tmp_path / "tuned")
    tuned = pretrained.read(tmp_path / "tuned")
    assert tuned.config.causal and tuned.params["lstm"]["forward_0"]["hi"]["kernel"].shape == (8, 8)
    (prediction,) = tasks.get("glue").predict(tuned, [("a fine ship",)])
    assert sum(prediction["probabilities"].values()) == pytest.approx(1)
    message = r"model.output = 'plain' has no place in --format=huggingface; only --format=bertjax keeps it"
    with pytest.raises(UserError, match=message):
        conversion.convert(tmp_path / "tuned", tmp_path / "out", "huggingface")
    conversion.convert(tmp_path / "tuned", tmp_path / "copy", "bertjax")
    assert pretrained.read(tmp_path / "copy").config == tuned.config


@pytest.mark.slow
def test_two_lstms_from_text_to_features(tmp_path, corpus_file):
    config = config_with("none", corpus=corpus_file)
    config.data.masking, config.eval.fill_masks = "dynamic", ()
    config.model.update(family="lstms", positions="none")
    config.stages = named_stages(short=stage(10, 32, 5))
    with preparing_in_process():
        run(pretraining_run.KIND, config, tmp_path / "run")
    assert (tmp_path / "run/report.txt").read_text().startswith("held-out next and previous words: loss")
    source = pretrained.read(tmp_path / "run")
    assert source.config.family == "lstms" and source.params["bert"]["encoder"].keys() == {
        f"{way}_{layer}" for way in ("forward", "backward") for layer in range(2)
    }
    (line,) = [line for line in read_metrics(tmp_path / "run") if "eval/bilm_loss" in line and line["step"] == 10]
    assert line["eval/bilm_loss"] < np.log(150)  # of pieces that are equally likely

    model = BertForMaskedLM(source.config)
    with pytest.raises(UserError, match="only a model that was trained with masks fills a"):
        next(fill_mask.fill_masks(model, source.params, source.tokenizer, ["a [MASK]"]))
    with pytest.raises(UserError, match="continues a text; this one reads in both directions"):
        generation.generate(model, source.params, source.tokenizer, "a", 5, generation.Sampling())

    features = test_features.config_for(tmp_path, tmp_path / "run", "weighted_sum_with_embeddings", epochs=1.0)
    tasks.validate(features)
    run(finetuning_run.KIND, features, tmp_path / "tuned")
    tuned = pretrained.read(tmp_path / "tuned")
    assert tuned.params["layer_weights"].shape == (3,) and (tuned.params["layer_weights"] != 0).all()
    before, after = (pretrained.flattened(each.params["bert"]) for each in (source, tuned))
    frozen = [name for name in before if name.startswith("e")]  # all but the pooler, which is new
    assert frozen and all((before[name] == after[name]).all() for name in frozen)
