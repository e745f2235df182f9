"""The model against transformers' BERT in PyTorch, on the same weights. Runs where these two are installed."""

import dataclasses
import itertools
import json

import flax.linen as nn
import jax
import numpy as np
import pytest
import tokenizers
from sklearn.utils.class_weight import compute_class_weight

from bertjax import families
from bertjax.config import (
    BertConfig,
    Compute,
    UserError,
    fine_tuning_config,
    model_size,
    pretraining_config,
)
from bertjax.data.batches.examples import Examples
from bertjax.data.documents import python_docs
from bertjax.families.bert.huggingface import huggingface_name, is_transposed
from bertjax.families.bert.model import BertModel
from bertjax.families.bert.variables import to_params, to_variables, variable_shapes
from bertjax.families.with_heads import (
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from bertjax.interop import conversion, huggingface, pretrained
from bertjax.reporting import insight
from bertjax.sharding.mesh import put_batch
from bertjax.tasks import classification, finetuning, likelihood, output_layers
from bertjax.tasks.generation import Sampling, generate
from bertjax.text import learning, tokenizer
from bertjax.text.tokenizer import SPECIAL_PIECES, WordPiece
from bertjax.training import checkpoint
from bertjax.training.schedules import make_schedule
from bertjax.training.step import make_program, put_hyperparameters
from bertjax.training.workdir import RunInfo, write_info
from tests.conftest import make_corpus, one_device_mesh
from tests.text.test_tokenizer import HARD, modernbert_json

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TINY = BertConfig(**model_size("tiny"), vocab_size=1000, layer_norm_eps=1e-5)
BASE = BertConfig(vocab_size=1000)  # few words: what is compared is the encoder


def random_variables(config: BertConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Nothing is 0 or 1, so that nothing can be left out or mixed up unseen."""
    rng = np.random.default_rng(seed)
    variables = {}
    for name, shape in variable_shapes(config).items():
        center = 1.0 if name.endswith("gamma") else 0.0
        variables[name] = (center + rng.normal(0, 0.02, shape)).astype(np.float32)
    return variables


def in_torch(config: BertConfig, params, folder):
    huggingface.write(folder, config, params, None)
    model, info = transformers.BertForPreTraining.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    return model.eval()


def random_batch(config: BertConfig, batch: int, length: int, predictions: int, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, length + 1, batch)
    sizes[0] = length
    real = np.arange(length) < sizes[:, None]
    return {
        "input_ids": np.where(real, rng.integers(1, config.vocab_size, (batch, length)), 0).astype(np.int32),
        "segments": real.astype(np.int32),
        "token_types": (real & (np.arange(length) >= sizes[:, None] // 2)).astype(np.int32),
        "masked_positions": rng.integers(0, sizes[:, None], (batch, predictions)).astype(np.int32),
    }


def run_torch(model, batch: dict, **kwargs):
    return model(
        input_ids=torch.tensor(batch["input_ids"], dtype=torch.long),
        attention_mask=torch.tensor(batch["segments"]),
        token_type_ids=torch.tensor(batch["token_types"], dtype=torch.long),
        **kwargs,
    )


@pytest.mark.parametrize(
    "size, length, activation",
    [
        *itertools.product([TINY], [1, 128, 512], ["gelu", "gelu_new", "relu"]),
        (BASE, 1, "gelu"),
        (BASE, 128, "gelu_new"),
        (BASE, 512, "gelu"),
    ],
)
def test_forward(size, length, activation, tmp_path):
    config = dataclasses.replace(size, hidden_act=activation)
    params = to_params(random_variables(config), config)
    batch = random_batch(config, batch=2, length=length, predictions=3)
    with torch.no_grad():
        theirs = run_torch(in_torch(config, params, tmp_path), batch, output_hidden_states=True)

    model = BertForPreTraining(config)
    words, pairs = model.apply({"params": params}, **batch)
    encoder = BertModel(config)
    inputs = [batch[name] for name in ("input_ids", "segments", "token_types")]
    layers = encoder.apply({"params": params["bert"]}, *inputs, every_layer=True, method="encode")
    real = batch["segments"][..., None]
    _, pooled = encoder.apply({"params": params["bert"]}, *inputs)
    with torch.no_grad():
        their_pooled = run_torch(in_torch(config, params, tmp_path).bert, batch).pooler_output.numpy()
    np.testing.assert_allclose(pooled, their_pooled, rtol=0, atol=1e-4)

    assert layers.shape[0] == len(theirs.hidden_states) == config.num_hidden_layers + 1
    for ours, hidden in zip(layers, theirs.hidden_states):
        np.testing.assert_allclose(ours * real, hidden.numpy() * real, rtol=0, atol=1e-4)
    np.testing.assert_allclose(pairs, theirs.seq_relationship_logits.numpy(), rtol=0, atol=1e-4)
    chosen = np.take_along_axis(theirs.prediction_logits.numpy(), batch["masked_positions"][:, :, None], axis=1)
    np.testing.assert_allclose(words[..., : config.vocab_size], chosen, rtol=0, atol=1e-4)


def test_gradients_of_every_parameter(tmp_path):
    from bertjax.config import named_stages, pretraining_config, stage
    from bertjax.sharding.mesh import make_mesh
    from bertjax.tasks.pretraining import Pretraining

    settings = pretraining_config()
    settings.model.update(dataclasses.asdict(TINY), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    settings.stages, settings.batch_size = named_stages(short=stage(1, 64, 10)), 4
    task = Pretraining(settings, make_mesh(settings, jax.devices()[:1]), None)
    config = task.model.config
    params = to_params(random_variables(config), config)
    batch = random_batch(config, batch=4, length=64, predictions=10)
    rng = np.random.default_rng(1)
    # No position twice: in PyTorch a label belongs to a position.
    positions = np.stack([rng.permutation(10) for _ in range(4)]).astype(np.int32)
    labels = rng.integers(0, config.vocab_size, (4, 10)).astype(np.int32)
    weights = (positions < batch["segments"].sum(1, keepdims=True)).astype(np.float32)
    random_next = np.array([0, 1, 1, 0], np.int32)
    records = {
        "input_ids": batch["input_ids"],
        "segments": batch["segments"],
        "token_types": batch["token_types"],
        "word_positions": positions,
        "word_ids": labels,
        "word_weights": weights,
        "pair_labels": random_next,
        "sequence_weights": np.ones(4, np.float32),
    }
    loss, ours = jax.value_and_grad(lambda p: task.loss(p, task.normalize(records))[0])(params)

    model = in_torch(config, params, tmp_path)
    by_position = np.full(batch["input_ids"].shape, -100)
    for row in range(4):
        for position, label, weight in zip(positions[row], labels[row], weights[row]):
            if weight:
                by_position[row, position] = label
    out = run_torch(
        model, batch, labels=torch.tensor(by_position), next_sentence_label=torch.tensor(random_next, dtype=torch.long)
    )
    out.loss.backward()
    np.testing.assert_allclose(loss, out.loss.item(), rtol=1e-5)

    theirs = dict(model.named_parameters())
    for name, gradient in to_variables(ours, config).items():
        expected = theirs[huggingface_name(name)].grad.numpy()
        expected = expected.T if is_transposed(name) else expected
        error = np.abs(gradient - expected).max() / max(np.abs(expected).max(), 1e-6)
        # The keys' bias adds the same to all scores of a query, which the softmax ignores: both are noise around 0.
        assert error < 1e-4 or (name.endswith("key/bias") and np.abs(expected).max() < 1e-7), (name, error)


def test_a_model_without_pairs_is_their_masked_lm(tmp_path):
    params = to_params(random_variables(TINY), TINY)
    params = {"bert": {n: x for n, x in params["bert"].items() if n != "pooler"}, "masked_lm": params["masked_lm"]}
    batch = random_batch(TINY, batch=3, length=32, predictions=4)
    huggingface.write(tmp_path, TINY, params, None)
    theirs, info = transformers.BertForMaskedLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    with torch.no_grad():
        expected = run_torch(theirs.eval(), batch).logits.numpy()
    words = BertForMaskedLM(TINY).apply({"params": params}, **batch)
    chosen = np.take_along_axis(expected, batch["masked_positions"][:, :, None], axis=1)
    np.testing.assert_allclose(words[..., : TINY.vocab_size], chosen, rtol=0, atol=1e-4)


def test_a_causal_bert_is_their_decoder(tmp_path):
    params = to_params(random_variables(TINY), TINY)
    batch = random_batch(TINY, batch=3, length=32, predictions=4)
    huggingface.write(tmp_path, TINY, params, None)
    theirs = transformers.BertLMHeadModel.from_pretrained(tmp_path, is_decoder=True, attn_implementation="eager")
    with torch.no_grad():
        expected = run_torch(theirs.eval(), batch).logits.numpy()
    words = BertForMaskedLM(dataclasses.replace(TINY, causal=True)).apply({"params": params}, **batch)
    chosen = np.take_along_axis(expected, batch["masked_positions"][:, :, None], axis=1)
    np.testing.assert_allclose(words[..., : TINY.vocab_size], chosen, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def gpt2_folder(tmp_path_factory):
    """A GPT-2 of random weights with a vocabulary of its kind, and transformers' model and tokenizer of it."""
    folder = tmp_path_factory.mktemp("gpt2")
    learnt = tokenizers.ByteLevelBPETokenizer()
    learnt.train_from_iterator([make_corpus(20)], 350, special_tokens=["<|endoftext|>"], show_progress=False)
    learnt.save_model(str(folder))
    pieces = transformers.GPT2TokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"))
    pieces.save_pretrained(folder)
    config = transformers.GPT2Config(
        vocab_size=len(pieces), n_positions=64, n_embd=32, n_layer=3, n_head=4, attn_implementation="eager",
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for parameter in theirs.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(folder)
    return folder, theirs, pieces


def test_gpt2_has_their_logits(gpt2_folder):
    folder, theirs, _ = gpt2_folder
    source = pretrained.read(folder)
    assert not source.ignored and source.predicts_words
    ids = np.random.default_rng(0).integers(0, source.config.vocab_size, (2, 64))
    every = np.broadcast_to(np.arange(64), ids.shape)
    words = BertForMaskedLM(source.config).apply(
        {"params": source.params}, ids, np.ones_like(ids), np.zeros_like(ids), masked_positions=every
    )
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(words[..., : source.config.vocab_size], expected, rtol=0, atol=1e-4)


def test_the_attention_that_a_report_draws_of_gpt2_is_theirs(gpt2_folder):
    folder, theirs, _ = gpt2_folder
    source = pretrained.read_with_tokenizer(folder)
    text, pieces = "The whale found the anchor", source.tokenizer
    shown, found = insight.attention(source, text)
    assert "".join(shown) == f"<|endoftext|>{text}<|endoftext|>"
    with torch.no_grad():
        ids = torch.tensor([[pieces.cls_id, *pieces.encode(text).ids, pieces.sep_id]])
        expected = theirs(ids, output_attentions=True).attentions
    np.testing.assert_allclose(found, np.concatenate([x.numpy() for x in expected]), atol=1e-5)


def test_gpt2_goes_on_with_their_words(gpt2_folder):
    folder, theirs, pieces = gpt2_folder
    source = pretrained.read_with_tokenizer(folder)
    assert source.tokenizer.pieces[source.tokenizer.cls_id] == "<|endoftext|>"
    for text in ("The whale found the anchor", "naïve   captains, 2 nets", "日本"):
        theirs_of_text = pieces(text, return_offsets_mapping=True)
        ids, offsets = source.tokenizer.encode(text)
        assert ids == theirs_of_text.input_ids and source.tokenizer.decode(ids) == text
        assert all(text[start:end].strip() == text[start:end] for start, end in offsets)
        assert source.tokenizer.encode_ids([text, text]) == [ids, ids]
        continued_as_theirs(source, theirs, pieces, text, ids)
    continued_as_theirs(source, theirs, pieces, "", [])


def continued_as_theirs(source, theirs, pieces, text: str, ids: list[int]):
    begin = torch.tensor([[0, *ids]])
    expected = theirs.generate(begin, do_sample=False, max_new_tokens=12, pad_token_id=0)[0, 1:].tolist()
    found = generate(BertForMaskedLM(source.config), source.params, source.tokenizer, text, 12, Sampling(temperature=0))
    assert found == pieces.decode([i for i in expected if i]) and len(expected) > begin.shape[1]


def test_gpt2_is_kept_in_a_workdir(gpt2_folder, tmp_path):
    folder, *_ = gpt2_folder
    conversion.convert(folder, tmp_path / "ours", "bertjax")
    before, after = pretrained.read(folder), pretrained.read(tmp_path / "ours")
    assert before.config == after.config and before.tokenizer.fingerprint == after.tokenizer.fingerprint
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params)
    with pytest.raises(UserError, match=r"model.norm = 'pre' has no place in --format=huggingface"):
        conversion.convert(tmp_path / "ours", tmp_path / "theirs", "huggingface")


def test_the_attention_that_a_report_draws_is_theirs(tmp_path):
    params, pieces = to_params(random_variables(TINY), TINY), [*SPECIAL_PIECES, *(f"w{i}" for i in range(995))]
    tokenizer = WordPiece(pieces, lowercase=True)
    huggingface.write(tmp_path, TINY, params, tokenizer)
    shown, found = insight.attention(pretrained.read(tmp_path), "w3 w5 [MASK] w900")
    theirs = transformers.BertModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        ids = torch.tensor([[pieces.index(piece) for piece in shown]])
        expected = theirs(input_ids=ids, output_attentions=True).attentions
    np.testing.assert_allclose(found, np.concatenate([x.numpy() for x in expected]), atol=1e-5)


@pytest.mark.parametrize(
    "model, architecture, labels",
    [
        (BertForMaskedLM(TINY), "", ()),
        (BertForSequenceClassification(TINY, 2), "BertForSequenceClassification", ("bad", "good")),
        (BertForSequenceClassification(TINY, 1), "BertForSequenceClassification", ()),
        (BertForSequenceClassification(TINY, 1), "BertForMultipleChoice", ()),
        (BertForTokenClassification(TINY, 3), "BertForTokenClassification", ("O", "B-X", "I-X")),
        (BertForQuestionAnswering(TINY), "BertForQuestionAnswering", ()),
    ],
)
def test_the_code_of_a_model_card_runs(model, architecture, labels, tmp_path, monkeypatch):
    ids = np.zeros((1, 8), np.int32)
    more = () if architecture else (ids,)
    params = jax.device_get(nn.meta.unbox(model.init(jax.random.key(0), ids, ids, ids, *more)["params"]))
    is_number = architecture == "BertForSequenceClassification" and not labels
    if is_number:
        params["classifier"]["dense"]["bias"] = np.array([3.7], np.float32)
    config = (fine_tuning_config("glue", name="sst2") if architecture else pretraining_config()).unlock()
    config.model.update(dataclasses.asdict(TINY))
    letters = "abcdefghijklmnopqrstuvwxyz.?"
    pieces = WordPiece([*SPECIAL_PIECES, *letters, *("##" + x for x in letters)], lowercase=True)
    checkpoint.write_params(tmp_path / "run", params)
    write_info(tmp_path / "run", RunInfo(config.lock(), architecture, labels or None), pieces)
    conversion.convert(tmp_path / "run", tmp_path / "card", "huggingface")
    code = (tmp_path / "card/README.md").read_text().split("```")[1].removeprefix("python\n")
    monkeypatch.chdir(tmp_path)
    scope, results = {}, []
    for line in code.strip().splitlines():
        results.append(eval(line, scope) if line.startswith(("use(", "tokenizer.", "endings[")) else exec(line, scope))
    *_, result = results
    if labels:
        assert {answer.get("label", answer.get("entity")) for answer in np.atleast_1d(result)} <= set(labels)
    elif is_number:  # not a probability
        numbers = [answer["score"] for found in results[-2:] for answer in np.atleast_1d(found)]
        assert len(numbers) == 2 and all(3 < number < 5 for number in numbers)
    elif architecture == "BertForMultipleChoice":
        assert result in scope["endings"]
    else:
        assert isinstance(result, str) if architecture else len(result) == 5


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "BertForNextSentencePrediction", "BertModel"])
def test_what_is_written_fits_each_class(architecture, tmp_path):
    params = to_params(random_variables(TINY), TINY)
    huggingface.write(tmp_path, TINY, params, None, architecture)
    auto = {"BertForMaskedLM": "AutoModelForMaskedLM", "BertModel": "AutoModel"}
    loader = getattr(transformers, auto.get(architecture, "AutoModelForNextSentencePrediction"))
    model, info = loader.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model).__name__ == architecture
    assert not any(info.values()), info


@pytest.mark.parametrize(
    "architecture, model, output",
    [
        ("BertForSequenceClassification", BertForSequenceClassification(TINY, 3), "logits"),
        ("BertForTokenClassification", BertForTokenClassification(TINY, 3), "logits"),
        ("BertForQuestionAnswering", BertForQuestionAnswering(TINY), "start_logits"),
        ("BertForMultipleChoice", BertForSequenceClassification(TINY, 1), "logits"),
    ],
)
def test_fine_tuned_models_are_the_same_there(architecture, model, output, tmp_path):
    batch = random_batch(TINY, batch=4, length=32, predictions=1)
    inputs = {name: batch[name] for name in ("input_ids", "segments", "token_types")}
    params = nn.meta.unbox(model.init(jax.random.key(0), **inputs)["params"])
    params = jax.tree.map(lambda x: np.asarray(x + 0.02 * jax.random.normal(jax.random.key(x.size), x.shape)), params)
    huggingface.write(
        tmp_path, TINY, params, None, architecture, labels=("a", "b", "c") if "ication" in architecture else ()
    )
    loader = getattr(transformers, architecture.replace("BertFor", "AutoModelFor"))
    theirs, info = loader.from_pretrained(tmp_path, output_loading_info=True, attn_implementation="eager")
    assert type(theirs).__name__ == architecture and not any(info.values()), info
    with torch.no_grad():
        choices = {name: x.reshape(2, 2, 32) for name, x in inputs.items()}
        expected = run_torch(theirs.eval(), choices if architecture == "BertForMultipleChoice" else inputs)[
            output
        ].numpy()
    ours = model.apply({"params": params}, **inputs)
    if architecture == "BertForMultipleChoice":
        ours = ours.reshape(2, 2)
    if architecture == "BertForQuestionAnswering":
        ours = ours[..., 0]
    if architecture in ("BertForQuestionAnswering", "BertForTokenClassification"):
        real = inputs["segments"].reshape(4, 32, *[1] * (ours.ndim - 2))
        ours, expected = ours * real, expected * real
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)

    read = pretrained.read(tmp_path)
    before, after = to_variables(params, TINY), to_variables(read.params, TINY)
    assert before.keys() == after.keys() and all((before[name] == after[name]).all() for name in before)
    assert read.architecture == architecture
    if "ication" in architecture:
        assert read.labels == ("a", "b", "c")
    # Which class it is, and its labels, outlive our own format.
    conversion.convert(tmp_path, tmp_path / "bertjax", "bertjax")
    conversion.convert(tmp_path / "bertjax", tmp_path / "back", "huggingface")
    again = loader.from_pretrained(tmp_path / "back")
    assert type(again) is type(theirs) and again.config.id2label == theirs.config.id2label
    assert all(torch.equal(a, b) for a, b in zip(theirs.state_dict().values(), again.state_dict().values()))


def test_labels_that_do_not_exclude_each_other_have_their_probabilities(tmp_path):
    """Those of a pipeline, from a folder of ours and from one of theirs."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = WordPiece([*SPECIAL_PIECES, *letters, *("##" + x for x in letters)], lowercase=True)
    names = {0: "toxic", 1: "insult", 2: "threat"}
    config = transformers.BertConfig(
        vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512,
        initializer_range=0.5, id2label=names, problem_type="multi_label_classification",
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "theirs")
    pieces.save(tmp_path / "theirs")
    conversion.convert(tmp_path / "theirs", tmp_path / "bertjax", "bertjax")
    conversion.convert(tmp_path / "bertjax", tmp_path / "ours", "huggingface")
    texts = ["ab cd", "xyz", "hello there"]
    use = transformers.pipeline("text-classification", model=str(tmp_path / "ours"), top_k=None)
    for theirs, *ours in zip(
        use(texts),
        *(classification.predict(pretrained.read(tmp_path / name), [(text,) for text in texts])
          for name in ("theirs", "bertjax", "ours")),
    ):  # fmt: skip
        scores = {answer["label"]: answer["score"] for answer in theirs}
        for found in ours:
            assert found["probabilities"] == pytest.approx(scores, abs=1e-4)
            assert set(found["labels"]) == {name for name, score in scores.items() if score > 0.5}


def random_examples(kind: str) -> Examples:
    """48 examples of 9 to 16 tokens; where there are spans all of 16, since transformers learns from padding there."""
    rng = np.random.default_rng(0)
    lengths = np.full(48, 16) if kind == "spans" else rng.integers(9, 17, 48)
    ids = [rng.integers(1, TINY.vocab_size, n).astype(np.int32) for n in lengths]
    labels = {
        "classification": lambda n: rng.integers(3),
        "regression": lambda n: np.float32(rng.normal()),
        "multi_label": lambda n: rng.integers(0, 2, 3),
        "tagging": lambda n: rng.integers(-1, 3, n),
        "spans": lambda n: rng.integers(0, n, 2),
    }[kind]
    types = [(np.arange(n) > 5).astype(np.int32) for n in lengths]
    return Examples(ids, types, [labels(n) for n in lengths], per_token=kind == "tagging")


def their_targets(kind: str, batch: dict) -> dict:
    labels = torch.from_numpy(batch["labels"])
    if kind == "spans":
        return {"start_positions": labels[:, 0].long(), "end_positions": labels[:, 1].long()}
    if kind == "tagging":
        return {"labels": torch.where(torch.from_numpy(batch["weights"]) > 0, labels.long(), -100)}
    return {"labels": labels.float() if kind in ("regression", "multi_label") else labels.long()}


@pytest.mark.parametrize(
    "kind, head",
    [
        ("classification", dict(class_weights="a=0.2,c=3", label_smoothing=0.1)),
        ("tagging", dict(class_weights="balanced")),
        ("multi_label", dict(class_weights="balanced")),
    ],
)
def test_weighted_losses_are_those_of_torch(kind, head, tmp_path):
    """Loss and gradient of a batch in four parts, whose classes weigh differently: the mean is that of the whole."""
    config = fine_tuning_config("classify")
    config.update(dict(batch_size=8, microbatches=4))
    config.head.update(head)
    config.model.update(dataclasses.asdict(TINY), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    examples, output_layer = random_examples(kind), getattr(output_layers, kind)(3)
    dataset = finetuning.Dataset(output_layer, ("a", "b", "c"), examples, (), "")
    task = finetuning.FineTuning(config, one_device_mesh(config), dataset)
    program = make_program(task, config, task.mesh)
    state = program.init(jax.random.key(0))
    params = jax.device_get(state.params)
    batch = next(task.batches(0))
    recipe = put_hyperparameters(0, make_schedule(config.optimizer, task.total_steps), task.mesh)
    _, metrics = program.train_step(state, put_batch(batch, task.mesh), recipe)

    labels = np.concatenate(examples.labels) if kind == "tagging" else np.array(examples.labels)
    if kind == "multi_label":
        weight = (1 - labels).sum(0) / labels.sum(0)
        loss_of = torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor(weight))
    else:
        known = labels[labels >= 0]
        weight = compute_class_weight("balanced", classes=np.arange(3), y=known)
        weight = torch.tensor([0.2, 1, 3] if kind == "classification" else weight, dtype=torch.float32)
        loss_of = torch.nn.CrossEntropyLoss(weight, label_smoothing=head.get("label_smoothing", 0.0))
    family_config = families.config_of(config)
    huggingface.write(tmp_path, family_config, params, None, output_layer.architecture, ("a", "b", "c"))
    loader = getattr(transformers, output_layer.architecture.replace("BertFor", "AutoModelFor"))
    model = loader.from_pretrained(tmp_path, attn_implementation="eager").train()
    logits, targets = run_torch(model, batch).logits, their_targets(kind, batch)["labels"]
    loss = loss_of(logits.reshape(-1, 3), targets.reshape(-1, 3) if kind == "multi_label" else targets.reshape(-1))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=2e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norm.item(), rtol=2e-4)
    right = logits.argmax(-1).numpy() == batch["labels"] if kind != "multi_label" else None
    if right is not None:  # which does not weigh the classes
        expected = (right * batch["weights"]).sum() / batch["weights"].sum()
        np.testing.assert_allclose(metrics["accuracy"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    "kind, output_layer",
    [
        ("classification", output_layers.classification(3)),
        ("regression", output_layers.regression()),
        ("multi_label", output_layers.multi_label(3)),
        ("tagging", output_layers.tagging(3)),
        ("spans", output_layers.spans()),
    ],
)
def test_fine_tuning_goes_the_same_way_step_by_step(kind, output_layer, tmp_path):
    """Loss, norm of the gradients, clipping, warm-up, decay of the rate and of the weights: beside torch's own AdamW.

    The decay of the weights is so strong here that leaving it out, or applying it elsewhere, cannot hide.
    """
    config = fine_tuning_config("classify")
    config.update(dict(batch_size=8, epochs=2.0, max_seq_length=16))
    config.optimizer.update(learning_rate=1e-3, weight_decay=10.0, max_grad_norm=0.3)
    config.model.update(dataclasses.asdict(TINY), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config.model.hidden_act = "gelu"
    labels = ("a", "b", "c") if kind in ("classification", "multi_label", "tagging") else ()
    dataset = finetuning.Dataset(output_layer, labels, random_examples(kind), (), "")
    task = finetuning.FineTuning(config, one_device_mesh(config), dataset)
    program = make_program(task, config, task.mesh)
    state = program.init(jax.random.key(0))
    huggingface.write(
        tmp_path,
        families.config_of(config),
        jax.device_get(state.params),
        None,
        output_layer.architecture,
        labels=labels,
        problem_type=output_layer.problem_type,
    )
    loader = getattr(transformers, output_layer.architecture.replace("BertFor", "AutoModelFor"))
    model = loader.from_pretrained(tmp_path, attn_implementation="eager").train()
    first = {name: x.detach().clone() for name, x in model.named_parameters()}
    is_decayed = {name: not name.endswith("bias") and "LayerNorm" not in name for name in first}
    groups = [
        {"params": [x for name, x in model.named_parameters() if is_decayed[name]], "weight_decay": 10.0},
        {"params": [x for name, x in model.named_parameters() if not is_decayed[name]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-6)

    schedule = make_schedule(config.optimizer, task.total_steps)
    recipe = put_hyperparameters(0, schedule, task.mesh)
    for step, batch in enumerate(task.batches(0)):
        state, metrics = program.train_step(state, put_batch(batch, task.mesh), recipe)
        loss = run_torch(model, {**batch, "segments": batch["segments"]}, **their_targets(kind, batch)).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        assert norm > 0.3  # what is not clipped would not show
        np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=2e-4, err_msg=f"step {step}")
        np.testing.assert_allclose(metrics["grad_norm"], norm.item(), rtol=2e-3, err_msg=f"step {step}")
        for group in optimizer.param_groups:
            # The warm-up over the first tenth of the steps, then straight to 0 (optimization.create_optimizer).
            group["lr"] = 1e-3 * (step if step < 1 else 12 - step) / (1 if step < 1 else 12)
        optimizer.step()
    assert step == 11

    theirs = dict(model.named_parameters())
    for name, x in to_variables(jax.device_get(state.params), families.config_of(config)).items():
        place = huggingface_name(name)
        ours = torch.tensor(x.T if is_transposed(name) else x)
        moved, off = (theirs[place] - first[place]).norm(), (theirs[place] - ours).norm()
        # The little besides is for what the softmax ignores, whose gradients are rounding errors: the keys' bias, say.
        assert off < 0.01 * moved + 1e-4, (name, off.item(), moved.item())


def saved_by_transformers(folder, change=lambda tensors: tensors, **settings):
    """A folder as transformers writes it, its tensors changed by `change`; returns the params that it should give."""
    import safetensors.numpy

    config = dataclasses.replace(TINY, hidden_act="gelu")
    params = to_params(random_variables(config), config)
    in_torch(config, params, folder / "ours").save_pretrained(folder / "theirs", **settings)
    if not settings:
        path = folder / "theirs" / "model.safetensors"
        safetensors.numpy.save_file(change(safetensors.numpy.load_file(path)), path)
    return params, folder / "theirs"


def renamed(old: str, new: str):
    return lambda tensors: {name.replace(old, new): x for name, x in tensors.items()}


@pytest.mark.parametrize(
    "change, lacks",
    [
        (lambda tensors: tensors, ()),
        (renamed("bert.", ""), ()),
        (lambda t: {n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
                    for n, x in t.items()}, ()),
        (lambda t: {n: x for n, x in t.items() if "pooler" not in n}, ("bert/pooler",)),
        (lambda t: {n: x for n, x in t.items() if "seq_relationship" not in n}, ("next_sentence",)),
        (lambda t: {n.removeprefix("bert."): x for n, x in t.items() if n.startswith("bert.")},
         ("masked_lm", "next_sentence")),
        (lambda t: t | {"cls.predictions.decoder.weight": t["bert.embeddings.word_embeddings.weight"],
                        "cls.predictions.decoder.bias": t["cls.predictions.bias"],
                        "bert.embeddings.position_ids": np.arange(512)[None]}, ()),
    ],
    ids=["as it is", "no prefix", "gamma and beta", "no pooler", "no NSP head", "bare encoder", "stored decoder"],
)  # fmt: skip
def test_variants_in_the_wild(tmp_path, change, lacks):
    params, folder = saved_by_transformers(tmp_path, change)
    read = pretrained.read(folder)
    expected = to_variables(params, TINY)
    got = to_variables(read.params, read.config)
    google = {"bert/pooler": "bert/pooler/", "masked_lm": "cls/predictions/", "next_sentence": "cls/seq_relationship/"}
    missing = tuple(google[part] for part in lacks)
    assert got.keys() == {n for n in expected if not (missing and n.startswith(missing))}
    assert all((got[n] == expected[n]).all() for n in got)
    assert read.config.hidden_act == "gelu" and read.ignored == []


def test_several_shards_are_one_checkpoint(tmp_path):
    params, folder = saved_by_transformers(tmp_path, max_shard_size="500KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    read = pretrained.read(folder)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), params, read.params))
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(Exception, match="missing, but listed in"):
        pretrained.read(folder)


def test_bfloat16_is_close_to_float32():
    config = BASE
    params = to_params(random_variables(config), config)
    batch = random_batch(config, batch=2, length=128, predictions=3)
    exact, _ = BertForPreTraining(config).apply({"params": params}, **batch)
    rough, _ = BertForPreTraining(config, Compute("bfloat16", "bfloat16")).apply({"params": params}, **batch)
    words = slice(0, config.vocab_size)
    error = np.linalg.norm(rough[..., words] - exact[..., words]) / np.linalg.norm(exact[..., words])
    assert error < 3e-2


HALF_WIDTH = "ｶﾞ ﾊﾟ"
PROBE = [
    "",
    "  two  spaces\tand\na line ",
    "Straße GROSSE ẞ İstanbul ıI ñandú naïve Ångström ﬁnance",  # noqa: RUF001
    "ΑΣΟΦΟΣ ὀδός Привет, Ёлка й",
    "مُحَمَّد سلام שָׁלוֹם עולם",
    "नमस्ते दुनिया क़ สวัสดีครับ",
    "我们在北京。東京タワー ガギ 한국어 문장 각",
    HALF_WIDTH,
    "e\u0301 é o\u0308",
    "zero\u200bwidth soft\u00adhyphen nbsp\u00a0x \ufeffbom",
    "bell\x07 null\x00 \ufffd end",
    "x" * 101 + " " + "y" * 100,
    "don't (stop) re-use: a/b_c#d@e $5.00 50% «quoted» “curly” … \u2014 \u2013",
    "😀 👨\u200d👩\u200d👧 🇩🇪 ½ ² Ⅷ \uff11\uff12",
    "[MASK] [SEP] [CLS] [UNK] [PAD] [E1] ##ing UPPER lower MiXeD",
]


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("form", ["vocab.txt", "tokenizer.json", "general class", "written"])
def test_pieces_of_every_wordpiece_folder_that_is_read_are_transformers(form, lowercase, tmp_path):
    letters = sorted(
        {c for text in PROBE for c in text + text.lower() if not c.isspace()} | set("abcdefghijklmnopqrstuvwxyz")
    )
    pieces = [
        *SPECIAL_PIECES,
        *letters,
        *(f"##{c}" for c in letters),
        "straße",
        "strasse",
        "grosse",
        "don",
        "##ing",
        "use",
    ]
    ours = WordPiece(list(dict.fromkeys(pieces)), lowercase)
    config = dataclasses.replace(TINY, vocab_size=ours.vocab_size)
    huggingface.write(tmp_path, config, to_params(random_variables(config), config), ours)
    settings = {"do_lower_case": lowercase}
    if form == "vocab.txt":
        (tmp_path / "tokenizer.json").unlink()
    if form == "tokenizer.json":
        settings["tokenizer_class"] = "BertTokenizerFast"
    if form == "general class":
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        settings |= {f"{n}_token": f"[{n.upper()}]" for n in ("pad", "unk", "cls", "sep", "mask")}
    if form != "written":
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    found, theirs = pretrained.read_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs(PROBE, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert [found.encode(text).ids for text in PROBE] == expected == found.encode_ids(PROBE)
    flat, sizes = found.encode_flat(PROBE)
    assert flat.tolist() == list(itertools.chain(*expected)) and sizes.tolist() == list(map(len, expected))


@pytest.mark.parametrize("kind", ["bytes", "bpe", "sentencepiece", "modernbert", "learnt bpe"])
def test_pieces_of_other_kinds_that_are_read_are_transformers(kind, tmp_path):
    if kind == "bpe":
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
        made.decoder = tokenizers.decoders.ByteLevel()
        letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=500, initial_alphabet=letters, special_tokens=["<|endoftext|>"], show_progress=False
        )
        made.train_from_iterator(PROBE, trainer)
        made.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        found = tokenizer.load("bpe", tmp_path / "tokenizer.json")
    elif kind == "modernbert":
        (tmp_path / "tokenizer.json").write_text(json.dumps(modernbert_json()))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        settings |= {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "cls", "sep", "pad", "mask")}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "modernbert"}))
        found = pretrained.read_tokenizer(tmp_path)
    else:
        lines = [text for text in PROBE for _ in range(20) if text.strip()]
        kind, size = ("bpe", 400) if kind == "learnt bpe" else (kind, 150)
        found = tokenizer.Bytes() if kind == "bytes" else learning.learn(kind, learning.count_words(kind, lines), size)
        config = dataclasses.replace(TINY, vocab_size=found.vocab_size)
        huggingface.write(tmp_path, config, to_params(random_variables(config), config), found)
        assert pretrained.read_tokenizer(tmp_path).fingerprint == found.fingerprint
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs(PROBE, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    different = [text for text, ids in zip(PROBE, expected) if found.encode(text).ids != ids]
    if kind == "modernbert":
        offsets = theirs(
            PROBE, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True
        ).offset_mapping
        for text, expected_of_text in zip(PROBE, offsets):  # ours are without the spaces before a word
            places = found.encode(text).offsets
            assert [end for _, end in places] == [end for _, end in expected_of_text]
            assert [start for start, _ in places] == [
                start + len(text[start:end]) - len(text[start:end].lstrip(" ")) for start, end in expected_of_text
            ]
    if "[MASK]" in found.pieces:
        masked = "the [MASK] saw un[MASK] [MASK]. a"
        assert found.encode_with_masks(masked) == theirs(masked, add_special_tokens=False)["input_ids"]
    # The tokenizers library applies a model's normalization character by character, sentencepiece to both at once.
    assert different == ([HALF_WIDTH] if kind == "sentencepiece" else [])


@pytest.mark.parametrize("lowercase", [True, False])
def test_tokenizer_gives_the_same_ids_and_offsets(lowercase, tmp_path):
    lines = [line for document in python_docs.read_documents() for line in document.lines][:10_000]
    ours = learning.learn("wordpiece", learning.count_words("wordpiece", lines, lowercase), 5000, lowercase)
    config = dataclasses.replace(TINY, vocab_size=5000)
    huggingface.write(tmp_path, config, to_params(random_variables(config), config), ours)
    written = transformers.AutoTokenizer.from_pretrained(tmp_path)
    reference = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"), do_lower_case=lowercase)
    assert len(lines) == 10_000
    found = [ours.encode(line) for line in lines + HARD]
    for other in (written, reference):
        # Theirs reads "[MASK]" in a text as the special piece, unless told not to; ours has encode_with_masks for that.
        expected = other(lines + HARD, return_offsets_mapping=True, split_special_tokens=True)
        assert [[ours.cls_id, *x.ids, ours.sep_id] for x in found] == expected["input_ids"]
        assert [x.offsets for x in found] == [x[1:-1] for x in expected["offset_mapping"]]


def test_sentencepiece_becomes_a_tokenizer_json_with_the_same_ids(tmp_path):
    lines = [line for document in python_docs.read_documents() for line in document.lines][:3000]
    ours = learning.learn("sentencepiece", learning.count_words("sentencepiece", lines), 1000)
    huggingface.write(tmp_path, TINY, to_params(random_variables(TINY), TINY), ours)
    written = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = written(lines)["input_ids"]
    same = [[ours.cls_id, *ours.encode(line).ids, ours.sep_id] == ids for line, ids in zip(lines, expected)]
    assert np.mean(same) > 0.999
    assert pretrained.read_tokenizer(tmp_path).fingerprint == ours.fingerprint


SENTENCES = ["the captain found the onion .", "captain the found onion the .", "a whale stayed near", "the the the the"]


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_pseudo_log_likelihoods_are_those_of_a_loop_in_pytorch(family, tmp_path):
    """Of random weights of MiniLM's size, one masked token after the other."""
    pieces = WordPiece([*SPECIAL_PIECES, *sorted({word for text in SENTENCES for word in text.split()})], True)
    sizes = dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    torch.manual_seed(0)
    if family == "bert":
        theirs = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=pieces.vocab_size, **sizes))
    else:
        special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
        config = transformers.ModernBertConfig(vocab_size=pieces.vocab_size, **sizes, **special)
        theirs = transformers.ModernBertForMaskedLM(config)
    for parameter in theirs.eval().parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path)
    pieces.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    source = pretrained.read_with_tokenizer(tmp_path)
    ours = list(likelihood.log_likelihoods(BertForMaskedLM(source.config), source.params, source.tokenizer, SENTENCES))
    for text, found in zip(SENTENCES, ours):
        ids, total = torch.tensor([[pieces.cls_id, *pieces.encode(text).ids, pieces.sep_id]]), 0.0
        for place in range(1, ids.shape[1] - 1):
            masked = ids.clone()
            masked[0, place] = pieces.mask_id
            with torch.no_grad():
                total += theirs(masked).logits[0, place].log_softmax(-1)[ids[0, place]].item()
        assert found == pytest.approx(total, rel=1e-4)
    assert len(set(np.round(ours, 3))) == len(SENTENCES)
