"""XLNet: its published sizes, its texts that end with <cls>, and that it trains, shards, predicts and is fine-tuned."""

import dataclasses
import json
import random

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax import tasks
from bertjax.config import UserError, fine_tuning_config, model_size
from bertjax.families.with_heads import BertForMaskedLM, count_parameters, forward_flops
from bertjax.families.xlnet import FAMILY, XlnetConfig
from bertjax.interop import conversion, huggingface, pretrained, tokenizer_files
from bertjax.sharding.mesh import make_mesh
from bertjax.sharding.streams import put_batch
from bertjax.tasks import bits, classification, embed, likelihood, metrics, ner, squad, swag
from bertjax.tasks.fill_mask import fill_masks
from bertjax.tasks.launch import launch
from bertjax.tasks.pretraining import Pretraining
from bertjax.text import learning
from bertjax.text.tokenizer import XLNET
from bertjax.training.schedules import make_schedule
from bertjax.training.sinks.jsonl import read_metrics
from bertjax.training.step import make_program, put_hyperparameters
from tests.conftest import TOPICS, make_corpus
from tests.families.test_modernbert import random_params
from tests.objectives.test_plm import PIECES, TINY, config_for, records  # noqa: F401  a fixture
from tests.tasks.test_classify import write_table, write_topics
from tests.tasks.test_finetuning import config_for as fine_tuning_config_for
from tests.tasks.test_finetuning import write_sst2
from tests.tasks.test_ner import conll
from tests.tasks.test_squad import random_questions, squad_file
from tests.tasks.test_swag import write as write_endings
from tests.tasks.test_vector_losses import config_for as vectors_config
from tests.tasks.test_vector_losses import rows_of

pytestmark = pytest.mark.usefixtures("on_one_device")


@pytest.fixture(scope="module")
def pieces():
    words = learning.count_words("sentencepiece", make_corpus(80).split("\n"))
    return learning.learn("sentencepiece", words, PIECES, special=XLNET)


@pytest.mark.parametrize("name, encoder", [("base", 116_718_336), ("large", 360_268_800)])
def test_published_sizes_and_their_flops(name, encoder):
    config = XlnetConfig(**model_size(name))
    ids = jnp.zeros((1, 8), jnp.int32)
    params = nn.meta.unbox(jax.eval_shape(BertForMaskedLM(config).init, jax.random.key(0), *[ids] * 4)["params"])
    assert count_parameters(params, config) == encoder + 32_000  # and the output layer's bias
    products = {path: leaf.size for path, leaf in jax.tree_util.tree_leaves_with_path(params["bert"]["encoder"])}
    matrices = sum(size for path, size in products.items() if path[-1].key == "kernel")
    position = config.num_hidden_layers * config.hidden_size**2  # distances are not each row's own
    of_scores = 4 * 512 * 512 * config.hidden_size * config.num_hidden_layers  # keys, and twice as many distances
    head, pooled = 85 * config.hidden_size * 32_000, config.hidden_size**2 + 2 * config.hidden_size
    plain = 2 * (512 * (matrices - position) + of_scores + head + pooled)
    assert forward_flops(config, 3, 512, 85) == 3 * plain
    queries = FAMILY.query_flops(config, 512, 85)
    keys_and_values = 2 * config.num_hidden_layers * config.hidden_size**2
    assert queries == 2 * 85 * (matrices - position - keys_and_values + of_scores // 512)


@pytest.mark.slow
def test_a_sharded_step_is_that_of_one_device(records, pieces):  # noqa: F811
    losses = []
    for devices, axes in ((1, dict(data=1, fsdp=1, tensor=1)), (4, dict(data=1, fsdp=2, tensor=2))):
        config = config_for(records=records)
        config.model.update(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
        config.mesh.update(axes)
        config.microbatches, config.remat = (2, "full") if devices > 1 else (1, "none")
        task = Pretraining(config, make_mesh(config, jax.devices()[:devices]), records, tokenizer=pieces)
        program = make_program(task, config, task.mesh)
        state = program.init(jax.random.key(0))
        recipe = put_hyperparameters(0, make_schedule(config.optimizer, 10), task.mesh)
        for step in (0, 1):
            state, metrics = program.train_step(state, put_batch(next(task.batches(step)), task.mesh), recipe)
        losses.append(jax.device_get(metrics))
    for name in losses[0]:
        np.testing.assert_allclose(losses[0][name], losses[1][name], rtol=2e-4)


# Texts that end with <cls>.


def test_labels_of_answers_and_tags_are_where_their_words_are(pieces):
    questions = random_questions(60)
    sizes = dict(max_seq_length=60, doc_stride=20, max_query_length=12)
    examples, windows, *_ = squad.encode(questions, pieces, **sizes, with_labels=True)
    found = 0
    for ids, types, (first, last), window in zip(examples.input_ids, examples.token_types, examples.labels, windows):
        assert ids[-1] == pieces.cls_id and window.none == len(ids) - 1 and types[-1] == 2
        assert types[window.first - 1 :].tolist() == [0, *[1] * (len(ids) - window.first - 1), 2]
        if first != window.none:
            offsets = window.offsets[[first - window.first, last - window.first]]
            question, found = questions[window.question], found + 1
            assert question.answers[0] in question.context[offsets[0, 0] : offsets[1, 1]]
    assert found > 30
    null = np.zeros((len(windows[0].offsets) + windows[0].first + 2, 2))
    null[windows[0].none] = 3.0
    ((_, odds),) = squad.answers(questions[:1], windows[:1], [null]).values()
    assert odds == 6.0  # those of "no answer", at <cls>

    sentences = [ner.Sentence(("ship", "saw"), ("B-SHIP", "O"), 0)]
    tagged = ner.encode(sentences, ["O", "B-SHIP"], pieces, 32, with_context=False)
    assert tagged.labels[0][0] == 1 and tagged.labels[0][-2:].tolist() == [-1, -1]
    assert tagged.token_types[0].tolist() == [0] * (len(tagged.input_ids[0]) - 1) + [2]


@pytest.mark.slow
def test_words_are_predicted_from_all_others_and_never_from_themselves(pieces):
    model = BertForMaskedLM(dataclasses.replace(TINY, max_position_embeddings=32))
    params = random_params(model, TINY)
    ids, _ = pieces.encode("the ship found the anchor")
    framed = pieces.framed(ids)

    def scores(ids):
        rows = [likelihood.PredictedRow(0, ids, [place], [framed[place]]) for place in range(len(framed) - 2)]
        return [likelihood.log_likelihoods_of_rows(model, params, pieces, [row], 1)[0] for row in rows]

    alone = scores(framed)
    changed = scores([*framed[:3], 7 + framed[3] % 70, *framed[4:]])
    differs = [not np.isclose(a, b, atol=1e-6) for a, b in zip(alone, changed)]
    assert differs == [place != 3 for place in range(len(framed) - 2)]
    whole = next(likelihood.log_likelihoods(model, params, pieces, ["the ship found the anchor"]))
    np.testing.assert_allclose(whole, sum(alone), rtol=1e-5)

    text = "the [MASK] found [MASK] anchor"
    (filled,) = fill_masks(model, params, pieces, [text], top_k=PIECES)
    assert len(filled.masks) == 2
    np.testing.assert_allclose([sum(p for _, p in mask) for mask in filled.masks], 1, rtol=1e-4)
    measured = bits.bits_per_byte(model, params, pieces, ["the ship found"], [[False, True, False]], 32)
    assert measured["words"] == 1 and measured["bits_per_byte"] > 0


@pytest.fixture(scope="module")
def trained(records, tmp_path_factory):  # noqa: F811
    """The workdir of a few steps of pre-training."""
    config = config_for(records=records)
    config.eval.fill_masks = ()
    launch(config, folder := tmp_path_factory.mktemp("xlnet") / "run")
    return folder


@pytest.mark.slow
def test_its_folder_reads_texts_as_its_run_does(trained, tmp_path):
    lines = [line["train/loss"] for line in read_metrics(trained) if "train/loss" in line]
    assert lines[-1] < lines[0]
    source = pretrained.read_with_tokenizer(trained)
    assert source.predicts_words and {*source.params} == {"bert", "masked_lm"}

    conversion.convert(trained, tmp_path / "folder", "huggingface")
    assert pretrained.read(tmp_path / "folder").architecture == "BertForMaskedLM"
    settings = json.loads((tmp_path / "folder/tokenizer_config.json").read_text())
    assert settings["padding_side"] == "left"  # or transformers would pool padding
    (tmp_path / "folder/tokenizer.model").unlink()
    again = tokenizer_files.read(tmp_path / "folder")  # read from its tokenizer.json
    assert again.kind == "unigram" and again.special_ids == source.tokenizer.special_ids
    for text in ("the ship", "An anchor near the harbour."):
        (ids,), (others,) = again.encode_ids([text]), source.tokenizer.encode_ids([text])
        assert again.framed(ids, ids) == source.tokenizer.framed(others, others)


@pytest.mark.slow
def test_texts_are_classified(trained, tmp_path):
    write_sst2(tmp_path, train=150, dev=20)
    config = fine_tuning_config_for(tmp_path, trained, epochs=8.0, packing=True, unroll="no")
    tuned = fine_tuned(config, tmp_path)
    (found,) = tasks.get("glue").predict(tuned, [("ship sail harbour",)])
    assert found["label"] == "1"
    conversion.convert(tmp_path / "tuned", tmp_path / "out", "huggingface")
    card = (tmp_path / "out/README.md").read_text()
    assert "\nXLNet of " in card and "text-classification" in card


def fine_tuned(config, folder):
    config.eval.every_steps = 1000
    tasks.validate(config)
    launch(config, folder / "tuned")
    return pretrained.read_with_tokenizer(folder / "tuned")


def config_to_tune(name, folder, checkpoint, epochs, **settings):
    config = fine_tuning_config(name, **settings)
    config.data.path, config.init_checkpoint = str(folder), str(checkpoint)
    config.update(dict(batch_size=16, max_seq_length=48, log_every_steps=20, epochs=epochs, unroll="no"))
    config.optimizer.learning_rate = 5e-3
    config.model.update(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return config


def sought(count, seed):
    """Questions for the one word about the sea in a text about the court."""
    rng = random.Random(seed)
    for number in range(count):
        words = rng.choices(TOPICS["court"], k=rng.randint(1, 9))
        place = rng.randrange(len(words))
        words[place] = rng.choice(TOPICS["sea"])
        start = len(" ".join([*words[:place], ""]))
        yield squad.Question(f"q{number}", "the sea?", " ".join(words), (words[place],), (start,))


@pytest.mark.slow
def test_answers_are_found(trained, tmp_path):
    for name, count in (("train", 320), ("dev", 30)):
        (tmp_path / f"{name}-v1.1.json").write_text(squad_file(list(sought(count, count)), "v1.1"))
    config = config_to_tune("squad", tmp_path, trained, epochs=6.0, version="v1.1", doc_stride=8, max_query_length=10)
    tuned = fine_tuned(config, tmp_path)
    scores = read_metrics(tmp_path / "tuned")[-2]
    assert scores["eval/f1"] > 0.8
    questions = list(sought(30, 30))
    found = list(squad.predict(tuned, [(q.text, q.context) for q in questions]))
    assert {q.name: a["answer"] for q, a in zip(questions, found)} == json.loads(
        (tmp_path / "tuned/predictions.json").read_text()
    )
    for question, answer in zip(questions, found):
        assert question.context[answer["start"] : answer["end"]] == answer["answer"]


@pytest.mark.slow
def test_words_are_tagged(trained, tmp_path):
    (tmp_path / "eng.train").write_text(conll(300, 2, apart=True))
    (tmp_path / "eng.testa").write_text(conll(60, 3, apart=True))
    tuned = fine_tuned(config_to_tune("ner", tmp_path, trained, epochs=8.0, document_context=True), tmp_path)
    assert read_metrics(tmp_path / "tuned")[-2]["eval/f1"] > 0.9
    sentences = ner.read(tmp_path / "eng.testa")
    found = [result["tags"] for result in ner.predict(tuned, [(" ".join(s.words),) for s in sentences])]
    assert metrics.entity_scores([s.tags for s in sentences], found)["f1"] > 0.9


@pytest.mark.slow
def test_endings_are_chosen(trained, tmp_path):
    write_endings(tmp_path / "train.csv", 300, 0)
    write_endings(tmp_path / "val.csv", 40, 1)
    tuned = fine_tuned(config_to_tune("swag", tmp_path, trained, epochs=6.0), tmp_path)
    assert read_metrics(tmp_path / "tuned")[-2]["eval/accuracy"] > 0.5
    sea = " ".join(TOPICS["sea"][:4])
    others = [" ".join(TOPICS["court"][i : i + 4]) for i in range(3)]
    (found,) = swag.predict(tuned, [(" ".join(TOPICS["sea"][3:8]), *others[:2], sea, others[2])])
    assert found["choice"] == 2


@pytest.mark.slow
def test_texts_have_labels_and_are_read_in_windows(trained, tmp_path):
    write_topics(tmp_path, 300, 40)
    own = dict(text="text", second_text="", label="topics", multi_label="list", is_number=False)
    config = config_to_tune("classify", tmp_path, trained, epochs=8.0, windows="mean", doc_stride=16, **own)
    config.max_seq_length = 24  # a text about two topics does not fit
    tuned = fine_tuned(config, tmp_path)
    assert read_metrics(tmp_path / "tuned")[-2]["eval/micro_f1"] > 0.8
    found = classification.predict(tuned, [(" ".join(TOPICS["sea"][:4]),), (" ".join(TOPICS["court"][:4]),)])
    assert [each["labels"] for each in found] == [["sea"], ["court"]]


@pytest.mark.slow
def test_words_of_a_table_are_tagged(trained, tmp_path):
    for name, count, seed in (("train", 300, 2), ("dev", 60, 3)):
        (tmp_path / "conll").write_text(conll(count, seed, apart=True))
        rows = [{"w": s.words, "t": s.tags} for s in ner.read(tmp_path / "conll")]
        write_table(tmp_path / f"{name}.jsonl", rows)
    tuned = fine_tuned(config_to_tune("tag", tmp_path, trained, epochs=8.0, words="w", tags="t", sentence=""), tmp_path)
    found = [result["tags"] for result in ner.predict(tuned, [(" ".join(row["w"]),) for row in rows])]
    assert metrics.entity_scores([row["t"] for row in rows], found)["f1"] > 0.9


@pytest.mark.slow
def test_vectors_tell_topics_apart(trained, tmp_path):
    """The last token of a text is its <cls>."""
    for name, count in (("train", 320), ("dev", 60)):
        write_table(tmp_path / f"{name}.jsonl", rows_of(count, count))
    own = {"keep_layers": 0, "epochs": 8.0, "unroll": "no", "head.pooling": "last", "optimizer.learning_rate": 5e-3}
    config = vectors_config(tmp_path, trained, log_every_steps=20, **own)
    tuned = fine_tuned(config, tmp_path)
    assert read_metrics(tmp_path / "tuned")[-2]["eval/spearman"] > 0.6
    one, same, other = (" ".join(words) for words in (TOPICS["sea"][:4], TOPICS["sea"][4:8], TOPICS["court"][:4]))
    near, far = (found["cosine"] for found in embed.predict(tuned, [(one, same), (one, other)]))
    assert near > far


# Its config.


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(attn_type="uni"), "attn_type 'uni' is not supported; supported: 'bi'"),
        (dict(clamp_len=64), "clamp_len 64 is not supported; supported: -1"),
        (dict(d_head=8), "d_head 8 is not supported; supported: d_model / n_head"),
        (dict(n_layer=0), "n_layer = 0: must be at least 1"),
        (dict(d_inner=None), "d_inner is None, which is not a valid int"),
        (dict(architectures=["XLNetForSequenceClassification"], summary_type="mean"), "summary_type 'mean' is not"),
    ],
)
def test_what_we_do_not_have_is_named(changed, message, tmp_path):
    fields = huggingface.families.module_of(FAMILY).to_fields(TINY) | changed
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=message) as error:
        huggingface.read_config(tmp_path / "config.json")
    assert "\n" not in str(error.value)
