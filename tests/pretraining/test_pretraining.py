"""The pre-training task: its loss, its scores against their definitions, its inputs; packed sequences of all tasks."""

import dataclasses
import functools
import itertools
import math
import pathlib
import random
import shutil
import types

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from bertjax.common.errors import UserError
from bertjax.config.defaults import named_stages, stage
from bertjax.config.model_config import BertConfig
from bertjax.config.resolved import ResolvedConfig
from bertjax.data.loading.evaluation import packed_evaluation
from bertjax.data.loading.examples import Examples
from bertjax.data.preprocessing import preparation
from bertjax.data.records.record_sets import find_records
from bertjax.distributed.mesh import make_mesh, put_batch
from bertjax.inference import fill_mask, heads, predictor
from bertjax.launch.validate import validate
from bertjax.models.heads import BertForMaskedLM, BertForPreTraining
from bertjax.pretraining import compute_choice
from bertjax.pretraining import run as pretraining_run
from bertjax.pretraining.data import StageData, packed_row_size
from bertjax.pretraining.records import find_or_prepare
from bertjax.pretraining.run import format_heldout_scores
from bertjax.pretraining.scores import divide_sequences
from bertjax.text import tokenizer
from bertjax.training.checkpoints.workdir import differences, raise_if_fatal
from bertjax.training.optim.schedules import make_schedule
from bertjax.training.step import Program, fits_in_memory, put_hyperparameters
from experiments import features
from tests.conftest import (
    TOPICS,
    heldout_batches,
    make_corpus,
    one_device_mesh,
    preparing_in_process,
    pretraining_task,
    tiny_config,
)
from tests.markers import slow_case


@pytest.fixture(scope="module")
def task(records_folder):
    config = tiny_config(records=records_folder)
    return pretraining_task(config, one_device_mesh(config), records_folder)


@pytest.fixture(scope="module")
def params(task):
    return nn.meta.unbox(jax.jit(task.init_params)(jax.random.key(0)))


@pytest.fixture(scope="module")
def scores(task, params):
    return task.evaluator.run(params, step=10)


def task_with(task, **fields):
    """Returns a task on the same records with changed fields; two underscores in a name stand for a dot."""
    config = task.config.copy_and_resolve_references()
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in fields.items()})
    return pretraining_task(config, task.mesh, config.data.records)


@pytest.fixture(scope="module")
def step_of(task):
    """Returns `step_of(next_sentence)`: (params, batch) -> ((loss, metrics), gradient)."""

    @functools.cache
    def step_of(next_sentence):
        task_of_objective = task_with(task, data__next_sentence=next_sentence)
        return jax.jit(
            jax.value_and_grad(
                lambda p, b: task_of_objective.loss(p, task_of_objective.loss.normalize(b)), has_aux=True
            )
        )

    return step_of


def test_unigram_baselines_work_without_masked_tokens_in_the_first_packed_stage(task, params):
    config = task.config.copy_and_resolve_references().unlock()
    config.packing, config.stages.short.objective = True, "nsp"
    packed = pretraining_task(config.lock(), task.mesh, config.data.records)
    assert "word_ids" not in packed.data[0].spec and "word_ids" in packed.data[1].spec
    scores = packed.evaluator.run(params, step=10).scores
    assert scores["unigram_loss"] == pytest.approx(task.evaluator.run(params, step=10).scores["unigram_loss"], rel=1e-5)
    assert "unigram_loss" not in packed.evaluator.run(params, step=1).scores


def test_equal_configs_share_compiled_programs(task):
    """A loss that is compared by identity would compile again without an error."""
    again = task_with(task)
    assert again.loss == task.loss and hash(again.loss) == hash(task.loss) and again.loss is not task.loss
    other = task_with(task, objective="mlm + 0.5*nsp")
    assert other.loss != task.loss
    first, second = again.losses
    assert first == second and again.evaluator.eval_step(first) is again.evaluator.eval_step(second)


def test_the_loss_equals_the_definition_of_the_paper(task, params, step_of):
    """sum(w ce)
    (sum(w) + 1e-5) over masked tokens, plus the mean over pairs, computed from the logits of the model.
    """
    batch = next(task.batches(0))
    (loss, metrics), _ = step_of("pairs")(params, batch)
    names = ("input_ids", "segments", "token_types", "word_positions")
    model = BertForPreTraining(task.loss.model.config)
    words, pairs = jax.jit(model.apply)({"params": params}, *(batch[name] for name in names))
    w, labels = batch["word_weights"], batch["word_ids"]
    ce = -np.take_along_axis(np.asarray(jax.nn.log_softmax(words)), labels[..., None], 2)[..., 0]
    nsp = -np.take_along_axis(np.asarray(jax.nn.log_softmax(pairs)), batch["pair_labels"][:, None], 1)
    np.testing.assert_allclose(loss, (w * ce).sum() / (w.sum() + 1e-5) + nsp.mean(), rtol=1e-5)
    right = (np.asarray(words).argmax(-1) == labels)[w > 0]
    np.testing.assert_allclose(metrics["mlm_accuracy"], right.mean(), rtol=1e-4)
    assert metrics["tokens"] == batch["segments"].sum()


def test_baselines_equal_their_definitions(task, scores, records_folder):
    assert scores.measured_on.endswith(" sequences of length 64") and scores.score == -scores.scores["mlm_loss"]
    text, scores = format_heldout_scores(task.config, scores), scores.scores
    record_set = find_records(records_folder, 64, 10, "heldout")
    batches = list(heldout_batches(record_set, 64, 10, batch_size=16, max_sequences=40))
    heldout = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    weights = heldout["word_weights"] > 0
    words, labels = heldout["word_ids"][weights], heldout["pair_labels"]
    labels = labels[heldout["sequence_weights"] > 0]

    # Counted over all sequences; the task leaves out the last batch unless the batch is full.
    counts, train = np.ones(150), find_records(records_folder, 32, 5, "train")
    for batch in heldout_batches(train, 32, 5, batch_size=16, max_sequences=10**6):
        np.add.at(counts, batch["word_ids"][batch["word_weights"] > 0], 1)
    unigram = -np.log(counts / counts.sum())[words].mean()
    assert unigram < np.log(150) - 0.5  # the corpus has frequent and rare words
    np.testing.assert_allclose(scores["unigram_loss"], unigram, rtol=2e-3)
    np.testing.assert_allclose(scores["mlm_majority"], (words == counts.argmax()).mean(), rtol=1e-5)
    np.testing.assert_allclose(scores["nsp_majority"], max(labels.mean(), 1 - labels.mean()), rtol=1e-5)
    # An untrained model has a loss near log(150) and below no baseline.
    assert abs(scores["mlm_loss"] - np.log(150)) < 0.3
    assert "unigram baseline" in text


def test_evaluation_counts_every_held_out_sequence_once(task, params, scores):
    """Scores do not depend on the batch size: rows that pad the last batch have weight 0."""
    other = task_with(task, batch_size=7)
    assert other.evaluator.batch_size == 7 and task.evaluator.batch_size == 16
    other.evaluator._statistics = task.evaluator._statistics
    assert other.evaluator.run(params, step=10).scores == pytest.approx(scores.scores, rel=1e-5)
    # One more sequence changes the scores, so every sequence counts.
    other.config.eval.max_sequences -= 1
    fewer = other.evaluator.run(params, step=10).scores["mlm_loss"]
    assert fewer != pytest.approx(scores.scores["mlm_loss"], rel=1e-6)


@pytest.mark.slow
def test_sources_have_equal_weights_in_training_and_evaluation(task, params, records_folder, tmp_path):
    sources = [str(tmp_path / name) for name in ("much.txt", "little.txt")]
    for number, source in enumerate(sources):
        pathlib.Path(source).write_text(make_corpus(60, seed=number) if number else make_corpus(60).replace(".", ""))
    config = tiny_config(",".join(sources))
    config.stages = named_stages(long=config.stages.long)
    config.data.update(mixture=f"{sources[0]}=10,{sources[1]}=0.1", dupe_factor=1)
    config.tokenizer.path, config.eval.max_sequences = str(records_folder / "vocab.txt"), 10**6
    with preparing_in_process():
        manifest = preparation.prepare(config, tmp_path / "out")
    used = {source: manifest["sources"][source]["characters"] for source in sources}
    share = used[sources[0]] / sum(used.values())
    assert share > 0.97

    mixed = pretraining_task(config, task.mesh, tmp_path / "out")
    evaluation, loss = mixed.evaluator.run(params, step=10), jax.jit(lambda *arguments: task.loss(*arguments))
    scores = evaluation.scores
    for source in sources:
        files = find_records(tmp_path / "out", 64, 10, "heldout").by_source()[source]
        batches = heldout_batches(files, 64, 10, batch_size=64, max_sequences=10**6)
        losses, words = zip(*((loss(params, b)[1]["mlm_loss"], b["word_weights"].sum()) for b in batches))
        np.testing.assert_allclose(scores[f"mlm_loss ({source})"], sum(losses) / sum(words), rtol=1e-4)
    much, little = (scores[f"mlm_loss ({source})"] for source in sources)
    assert abs(much - little) > 0.002
    np.testing.assert_allclose(scores["mlm_loss"], share * much + (1 - share) * little, rtol=1e-6)
    assert f"of {sources[1]}: loss {little:.3f}, accuracy" in format_heldout_scores(config, evaluation)
    assert divide_sequences(1000, {"a": 0.99, "b": 0.01}) == {"a": 990, "b": 125}


def test_masks_are_filled_best_first(task, params, records_folder):
    pieces = tokenizer.load_tokenizer("wordpiece", records_folder / "vocab.txt")
    texts = ["the [MASK] saw the [MASK] near a ship .", "[MASK]"]
    model = BertForMaskedLM(task.loss.model.config)
    filled = list(fill_mask.fill_masks(model, params, pieces, texts, top_k=4))
    assert [f.text for f in filled] == texts and [len(f.masks) for f in filled] == [2, 1]
    for mask in filled[0].masks:
        probabilities = [p for _, p in mask]
        assert len(mask) == 4 and probabilities == sorted(probabilities, reverse=True)
        assert all(word in pieces.pieces for word, _ in mask)
    everything = next(fill_mask.fill_masks(model, params, pieces, ["[MASK]"], top_k=10_000))
    assert abs(sum(p for _, p in everything.masks[0]) - 1) < 1e-4
    # Padding to a power of two changes nothing: a text alone and in a batch with a longer text gives equal results.
    ids = np.array([[pieces.cls_id, pieces.mask_id, pieces.sep_id]])
    exact = jax.jit(model.apply)({"params": params}, ids, np.ones_like(ids), np.zeros_like(ids), np.array([[1]]))
    np.testing.assert_allclose(everything.masks[0][0][1], jax.nn.softmax(exact).max(), rtol=1e-4)
    with pytest.raises(UserError, match=r"no \[MASK\] in 'nothing to fill'"):
        list(fill_mask.fill_masks(model, params, pieces, ["nothing to fill"]))
    with pytest.raises(UserError, match=r"more than the model's 64 positions"):
        list(fill_mask.fill_masks(model, params, pieces, ["ship " * 70 + "[MASK]"]))


@pytest.mark.parametrize("next_sentence", ["pairs", "none"])
def test_empty_rows_do_not_change_loss_and_gradient(task, params, step_of, next_sentence):
    """Empty rows replace the records of a damaged file: some rows of a batch, or all rows."""
    step, whole = step_of(next_sentence), next(task.batches(0))
    halves = {name: (x[:8], np.zeros_like(x[:8])) for name, x in whole.items()}
    (loss, _), gradients = step(params, {name: np.concatenate(half) for name, half in halves.items()})
    (expected, _), twice = step(params, {name: np.concatenate([x, x]) for name, (x, _) in halves.items()})
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), gradients, twice)
    (loss, _), gradients = step(params, {name: np.zeros_like(x) for name, x in whole.items()})
    assert loss == 0 and all((np.asarray(x) == 0).all() for x in jax.tree.leaves(gradients))


def test_held_out_files_without_a_readable_record_give_no_scores(task, params, monkeypatch):
    heldout = StageData.heldout_batches

    def empty(*arguments):
        for batch in heldout(*arguments):
            yield {name: np.zeros_like(x) for name, x in batch.items()}

    monkeypatch.setattr(StageData, "heldout_batches", empty)
    assert task.evaluator.run(params, step=1) is None


THEIRS = {"data.records": "theirs", "tokenizer.path": "theirs/vocab.txt"}


@pytest.mark.parametrize("fields, message", [
    ({"tokenizer.path": "other.txt"}, r"made with another tokenizer \(wordpiece, lowercase = True, 150 tokens\)"),
    ({"model.vocab_size": 200}, r"vocab_size = 200: the tokenizer .*vocab.txt has 150 tokens"),
    ({"data.records": "theirs"}, "config.tokenizer.path = '': the records in .*theirs have no manifest"),
    (THEIRS | {"data.next_sentence": "none"}, "config.data.next_sentence = 'none': .*theirs have no manifest"),
    ({"tokenizer.lowercase": False}, "config.tokenizer.lowercase = False: has no effect, since the tokenizer of the"),
    ({"tokenizer.kind": "sentencepiece"}, "config.tokenizer.kind = 'sentencepiece': has no effect, since the"),
    ({"data.seed": 5}, "config.data.seed = 5: .* prepared with 0; set --config.data.seed=0, or"),
    ({"data.masked_lm_prob": 0.1}, "prob = 0.1: .* prepared with 0.15; set --config.data.masked_lm_prob=0.15, or"),
    ({"data.corpus": "other.txt"}, r"config.data.corpus = \['.*other.txt'\]: the records in"),
])  # fmt: skip
def test_records_of_another_config_are_refused(records_folder, tmp_path, fields, message):
    (tmp_path / "other.txt").write_text("\n".join([*tokenizer.SPECIAL_TOKENS, *"abcdefgh"]))
    shutil.copytree(records_folder, tmp_path / "theirs", ignore=shutil.ignore_patterns("manifest.json"))
    config, paths = tiny_config(records=records_folder), ("other.txt", "theirs", "theirs/vocab.txt")
    values = {name: str(tmp_path / value) if value in paths else value for name, value in fields.items()}
    config.update_from_flattened_dict(values)
    with pytest.raises(UserError, match=message):
        find_or_prepare(config, tmp_path)


def test_records_are_reused_with_another_training_seed(records_folder, corpus_file, tmp_path):
    config = tiny_config(corpus_file, records_folder)
    config.seed = 7
    assert find_or_prepare(config, tmp_path)[0] == records_folder


def test_a_changed_corpus_is_reported(tmp_path, capsys):
    """A new run refuses records of an old corpus; a resumed run continues with its records."""
    corpus = tmp_path / "text.txt"
    corpus.write_text(make_corpus(60))
    config = tiny_config(corpus)
    with preparing_in_process():
        folder, pieces = find_or_prepare(config, tmp_path)
    assert folder == tmp_path / "records" and find_or_prepare(config, tmp_path)[1].fingerprint == pieces.fingerprint
    info = pretraining_run.KIND.open(ResolvedConfig.copy_of(config), tmp_path, None).info
    assert pretraining_run.KIND.changes_of_data(config, tmp_path, info) == []
    corpus.write_text(make_corpus(61))
    with pytest.raises(
        UserError, match=rf"since .* were prepared \({corpus} has changed \(1 files of .*; delete the fold"
    ):
        find_or_prepare(config, tmp_path)
    capsys.readouterr()
    assert find_or_prepare(config, tmp_path, is_new=False)[0] == folder
    assert "training continues on the old records" in capsys.readouterr().out
    (change,) = pretraining_run.KIND.changes_of_data(config, tmp_path, info)
    assert change.startswith(f"{corpus} has changed")
    corpus.unlink()
    assert find_or_prepare(config, tmp_path)[0] == folder and "has changed" not in capsys.readouterr().out
    config.data.records = str(folder)
    assert find_or_prepare(config, tmp_path)[0] == folder

    # Other records in place of the records of a run are refused.
    corpus.write_text(make_corpus(61))
    config.data.records = ""
    shutil.rmtree(folder)
    with preparing_in_process():
        now = pretraining_run.KIND.open(ResolvedConfig.copy_of(config), tmp_path, info).info
    with pytest.raises(UserError, match=r"holds a run on other data \(records changed\)"):
        raise_if_fatal("RUN", [d for d in differences(info, now) if d.field == "fingerprints"])
    # Another objective on the same data is refused.
    config.data.next_sentence, identity = "order", pretraining_run.KIND.identity(config)
    with pytest.raises(UserError, match=r"config.data.next_sentence = 'order': RUN holds a run with 'pairs'; choose"):
        raise_if_fatal("RUN", differences(info, dataclasses.replace(info, config=config), identity))


def test_remat_auto_takes_the_first_policy_that_fits(task, monkeypatch):
    """Only the largest stage is compiled in the trial."""
    way, tried, fitting = task_with(task, remat="auto"), [], {}
    config = way.config

    def fits(lowered, limit):
        tried.append(lowered)
        return fitting[lowered[0]]

    def stubbed(way, config, mesh):
        def lower(state, batch, hyperparameters):
            return config.remat, batch["input_ids"].shape

        return types.SimpleNamespace(state=None, step_of=lambda *_: types.SimpleNamespace(lower=lower))

    def chosen(platform="gpu", **fits):
        fitting.update(fits)
        return compute_choice.fastest_that_fits(config, way.mesh, way.data, platform).remat

    monkeypatch.setattr(compute_choice, "fits_in_memory", fits)
    monkeypatch.setattr(compute_choice, "Program", stubbed)
    assert chosen("cpu") == "none" and not tried
    assert chosen(none=False, dots=True) == "dots" and tried == [("none", (16, 64)), ("dots", (16, 64))]
    assert chosen(none=False, dots=False) == "full" and len(tried) == 4  # the last policy needs no trial
    monkeypatch.setattr(
        compute_choice.hosts, "as_on_first", lambda fits: False
    )  # the first host decides, not this host
    assert chosen(none=True, dots=True) == "full"
    assert config.remat == "auto"


def test_long_runs_on_chips_with_kernels_unroll_their_layers_if_that_fits():
    def ways(platform, chip, steps=1_000_000, **fields):
        config = tiny_config()
        config.unroll, config.stages.short.steps = "auto", steps
        config.update(fields)
        return [(way.remat, way.unroll) for way in compute_choice.compute_candidates(config, platform, chip)]

    assert ways("tpu", "TPU v4") == [("none", "yes"), ("none", "auto")]
    assert ways("tpu", "TPU v4", remat="auto")[:3] == [("none", "yes"), ("none", "auto"), ("dots", "auto")]
    assert ways("tpu", "TPU v4", remat="auto", unroll="no") == [("none", "no"), ("dots", "no"), ("full", "no")]
    assert ways("tpu", "TPU v4", remat="full") == [("full", "auto")]
    assert ways("gpu", "NVIDIA H100 80GB HBM3", steps=5_000) == [("none", "yes"), ("none", "auto")]
    assert ways("tpu", "TPU v4", steps=5_000) == [("none", "auto")]
    assert ways("tpu", "TPU v4", steps=1000) == ways("gpu", "Tesla V100") == ways("cpu", "cpu") == [("none", "auto")]
    assert ways("tpu", "TPU v3", remat="auto") == [("full", "auto")]  # has no kernels
    assert ways("tpu", "TPU v4", model=dict(family="xlnet")) == [("none", "auto")]  # the family has no kernels


def test_a_program_fits_within_the_device_memory():
    lowered = jax.jit(lambda x: (x @ x).sum()).lower(jax.ShapeDtypeStruct((512, 512), np.float32))
    assert fits_in_memory(lowered, None) and fits_in_memory(lowered, 1 << 23)
    assert not fits_in_memory(lowered, (1 << 20) - 1)  # less than the argument


# Packed sequences compared with padded sequences: losses, gradients, and independence of sequences in a row.


BERT = BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
    max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip


def assert_close(one, other, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), one, other)


@pytest.fixture(scope="module")
def short_records(tmp_path_factory):
    """Documents so short that few pairs have the maximum length."""
    folder, rng = tmp_path_factory.mktemp("short"), random.Random(0)
    words = [word for topic in TOPICS.values() for word in topic]
    lines = (f"A {rng.choice(words)}." for _ in range(800))
    documents = iter(lambda: list(itertools.islice(lines, rng.randint(2, 6))), [])
    (folder / "text.txt").write_text("\n\n".join(map("\n".join, documents)))
    with preparing_in_process():
        preparation.prepare(config_of("", False, folder / "text.txt"), folder / "records")
    return folder / "records"


def config_of(records, packing, corpus="", **mesh):
    config = tiny_config(corpus, records)
    config.packing = packing
    config.model.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config.mesh.update(mesh)
    return config


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["masked words and pairs", "next words"])
def test_packed_and_padded_pretraining_have_equal_loss_and_gradient(objective, short_records, tmp_path):
    """No sequence sees another sequence, or predicts the first token of the next sequence in its row."""
    fields, records = {}, short_records
    if objective == "next words":
        fields, records = {"data.masking": "dynamic", "data.next_sentence": "none"}, tmp_path
        config = config_of("", False, short_records.parent / "text.txt")
        config.update_from_flattened_dict(fields | {"data.short_seq_prob": 0.9})
        with preparing_in_process():
            preparation.prepare(config, records)
    pieces, token_sequences, params = tokenizer.load_tokenizer("wordpiece", records / "vocab.txt"), [], None
    for packing in (False, True):
        config = config_of(records, packing)
        config.update_from_flattened_dict(fields)
        config.model.causal = bool(fields)
        task = pretraining_task(config, one_device_mesh(config), records, tokenizer=pieces)
        params = params or nn.meta.unbox(jax.jit(task.init_params)(jax.random.key(0)))
        batch, planned = next(task.batches(3)), task.data[0].abstract_batch()
        assert {n: (x.shape, x.dtype) for n, x in batch.items()} == {n: (x.shape, x.dtype) for n, x in planned.items()}
        step = jax.value_and_grad(lambda p, b, task=task: task.loss(p, task.loss.normalize(b)), has_aux=True)
        token_sequences.append((len(batch["input_ids"]), *jax.jit(step)(params, batch)))
        if fields:  # all tokens except [CLS]; the last [SEP] of a sequence predicts nothing
            assert batch["word_weights"].sum() == (batch["segments"] > 0).sum() - 2 * batch["sequence_weights"].sum()
    (rows, (loss, metrics), gradient), (fewer, (packed_loss, packed_metrics), packed_gradient) = token_sequences
    assert fewer < 16 == rows and packed_metrics.pop("padding") < metrics.pop("padding") / 2
    assert_close((packed_loss, packed_metrics, packed_gradient), (loss, metrics, gradient))


def after_a_step(records, microbatches=1, **mesh):
    """Returns the number of rows of 48 packed sequences, and the params and metrics after a step with much dropout."""
    config = config_of(records, True, **mesh)
    config.batch_size, config.microbatches = 48, microbatches
    config.model.update(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3)
    devices = jax.devices()[: math.prod(mesh.values())]
    task = pretraining_task(config, make_mesh(config, devices), records)
    assert task.data[0].rows % (microbatches * len(devices) // mesh.get("tensor", 1)) == 0
    program = Program(task, config, task.mesh)
    hyperparameters = put_hyperparameters(0, make_schedule(config.optimizer, 10), task.mesh)
    batch = put_batch(next(task.batches(0)), task.mesh)
    state, metrics = program.train_step(program.init(jax.random.key(0)), batch, hyperparameters)
    return task.data[0].rows, jax.device_get(state.params), jax.device_get(metrics)


@pytest.fixture(scope="module")
def on_one(short_records):
    return after_a_step(short_records)


@pytest.mark.slow
def test_a_packed_step_is_equal_on_any_mesh(short_records, on_one):
    """Dropout is equal too, although the number of rows, including empty rows, differs."""
    (rows, expected, other_metrics), (its_rows, params, metrics) = (
        on_one,
        after_a_step(short_records, 3, data=4, fsdp=2),
    )
    assert rows < its_rows
    assert_close(metrics["loss"], other_metrics["loss"])
    assert_close(metrics["grad_norm"], other_metrics["grad_norm"], 1e-4)
    assert_close(params, expected, 2e-5)


@pytest.mark.parametrize("prob", [0.02, 0.15, 0.5])
def test_packed_rows_have_room_for_all_masked_tokens(prob):
    rng = random.Random(0)
    for length in (16, 128, 512):
        config = config_of("", True)
        config.data.masked_lm_prob = prob
        row = packed_row_size(config, stage(1, length, length))
        for _ in range(1000):
            left, sizes = length, []
            while left >= 3 and len(sizes) < row.sequences:
                sizes.append(rng.choice([3, 4, 5, 10, left, rng.randint(3, left)]))
                sizes[-1] = min(sizes[-1], left)
                left -= sizes[-1]
            assert sum(max(1, round(prob * size)) for size in sizes) <= row.predictions, (prob, length, sizes)


# Packed sequences of fine-tuning.


def examples_of(kind, count=20, seed=0):
    rng = np.random.default_rng(seed)
    choices = 3 if kind == "choice" else 0
    ids = [rng.integers(1, 50, rng.integers(4, 13)) for _ in range(count * max(1, choices))]
    types = [(np.arange(len(x)) > 2).astype(int) for x in ids]
    labels = {
        "classification": rng.integers(0, 4, count),
        "regression": rng.random(count),
        "multi_label": rng.integers(0, 2, (count, 4)),
        "choice": rng.integers(0, 3, count),
        "tagging": [np.where(rng.random(len(x)) < 0.3, -1, rng.integers(0, 4, len(x))) for x in ids],
        "spans": [np.sort(rng.integers(0, len(x), 2)) for x in ids],
    }[kind]
    return Examples(ids, types, labels, choices, per_token=kind == "tagging")


HEADS = {
    "classification": heads.ClassificationHead(4),
    "regression": heads.RegressionHead(),
    "multi_label": heads.MultiLabelHead(4),
    "choice": heads.ChoiceHead(),
    "tagging": heads.TaggingHead(4),
    "spans": heads.SpanHead(),
}


@pytest.fixture(scope="module", params=["choice", *map(slow_case, sorted(HEADS.keys() - {"choice"}))])
def fine_tuning(request):
    head, examples = HEADS[request.param], examples_of(request.param)
    model = head.make_model(BERT)
    ids = np.zeros((1, 8), np.int32)
    params = nn.meta.unbox(jax.jit(model.init)(jax.random.key(1), ids, ids, ids)["params"])
    params = jax.tree.map(lambda x: x + 0.1 * np.random.default_rng(x.size).normal(size=x.shape).astype("f4"), params)

    return head, model, params, examples


def test_packed_and_padded_fine_tuning_have_equal_loss(fine_tuning):
    """So no example depends on another example."""
    head, model, params, examples = fine_tuning

    @jax.jit
    def compute(batch):
        losses, correct = head.loss(None)(predictor.apply_model(model, head.pooled, params, batch), batch)
        weights = batch["weights"] / batch["weights"].sum()
        return (weights * losses).sum(), (weights * correct).sum()

    packed = examples.packed(*next(packed_evaluation(examples, 1000, 64, 1)))
    assert packed["segments"].max() > max(1, examples.choices)
    assert_close(compute(examples.batch(np.arange(len(examples)), 12)), compute(packed))


@pytest.mark.parametrize("devices, rows", [(1, 1), (4, 4)])
def test_one_example_is_not_padded_to_the_batch_size(fine_tuning, devices, rows):
    head, model, _, examples = fine_tuning
    texts = max(1, examples.choices)
    one = dataclasses.replace(
        examples, input_ids=examples.input_ids[:texts], token_types=examples.token_types[:texts], labels=None
    )
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1, 1), ("data", "fsdp", "tensor"))
    _, batch = predictor.Predictor(model, head.pooled, mesh, 8, packs=False).first(one)
    assert len(batch["input_ids"]) == rows


def test_packed_and_padded_predictions_are_equal(fine_tuning):
    """Packed examples run on four devices, padded examples on one."""
    head, model, params, examples = fine_tuning

    def predicted(devices, packs):
        mesh = Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1, 1), ("data", "fsdp", "tensor"))
        return predictor.Predictor(model, head.pooled, mesh, 8, packs)(params, examples)

    packed, padded = predicted(4, True), predicted(1, False)
    assert len(packed) == len(padded) == len(examples)
    for one, other in zip(packed, padded):
        assert one.shape == other.shape
        assert_close(one, other)


def test_unsupported_packing_is_refused():
    config = features.get_config()
    config.packing = True
    with pytest.raises(UserError, match=r"config.packing = True: sequences cannot share a row with a BiLSTM"):
        validate(config, with_data=False)
