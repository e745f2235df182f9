"""Model uses compared with PyTorch: GPT-2, fine-tuning, likelihoods, the code of a model card."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest
import tokenizers

from bertjax.common.errors import UserError
from bertjax.config.defaults import fine_tuning_config, pretraining_config
from bertjax.config.model_config import BertConfig
from bertjax.data.loading.examples import Examples
from bertjax.distributed.mesh import put_batch
from bertjax.finetuning.task import FineTuning
from bertjax.finetuning.tasks import classify
from bertjax.inference import heads
from bertjax.inference.generation import Sampling, generate
from bertjax.inference.task import TaskData
from bertjax.interop import conversion, huggingface, pretrained
from bertjax.models import families
from bertjax.models.bert.huggingface import huggingface_name, is_transposed
from bertjax.models.bert.tf1_names import to_variables
from bertjax.models.heads import (
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
)
from bertjax.reporting import insight
from bertjax.text.tokenizer import SPECIAL_TOKENS, WordPiece
from bertjax.training.checkpoints import checkpoint
from bertjax.training.checkpoints.workdir import RunInfo, write_info
from bertjax.training.optim.schedules import make_schedule
from bertjax.training.step import Program, put_hyperparameters
from tests.conftest import make_corpus, one_device_mesh

torch = pytest.importorskip("torch")
class_weight = pytest.importorskip("sklearn.utils.class_weight")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extra_packages

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
TINY = BertConfig(**SIZES, vocab_size=150, hidden_act="gelu", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
LETTERS = "abcdefghijklmnopqrstuvwxyz.?"
PIECES = WordPiece([*SPECIAL_TOKENS, *LETTERS, *("##" + x for x in LETTERS)], lowercase=True)


def gpt2(folder):
    """Writes a random GPT-2 with a byte-level vocabulary; returns the transformers model and tokenizer."""
    learnt = tokenizers.ByteLevelBPETokenizer()
    learnt.train_from_iterator([make_corpus(20)], 350, special_tokens=["<|endoftext|>"], show_progress=False)
    folder.mkdir()
    learnt.save_model(str(folder))
    pieces = transformers.GPT2TokenizerFast(str(folder / "vocab.json"), str(folder / "merges.txt"))
    pieces.save_pretrained(folder)
    config = transformers.GPT2Config(
        vocab_size=len(pieces), n_positions=64, n_embd=32, n_layer=2, n_head=4, attn_implementation="eager",
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    their_model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in their_model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    their_model.save_pretrained(folder)
    return their_model, pieces


def test_gpt2_equals_transformers_and_round_trips_through_a_workdir(tmp_path):
    their_model, pieces = gpt2(folder := tmp_path / "gpt2")
    source = pretrained.read_with_tokenizer(folder)
    assert not source.ignored and source.predicts_words
    ids = np.random.default_rng(0).integers(0, source.config.vocab_size, (2, 64))
    apply, every = jax.jit(BertForMaskedLM(source.config).apply), np.broadcast_to(np.arange(64), ids.shape)
    words = apply({"params": source.params}, ids, np.ones_like(ids), np.zeros_like(ids), every)
    text = "The whale found the anchor"
    shown, attention = insight.attention(source, text)
    assert "".join(shown) == f"<|endoftext|>{text}<|endoftext|>"
    with torch.no_grad():
        expected = their_model(torch.tensor(ids)).logits.numpy()
        framed = torch.tensor([[0, *pieces(text).input_ids, 0]])
        theirs_of_text = their_model(framed, output_attentions=True).attentions
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(words[..., : source.config.vocab_size], expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(attention, np.concatenate([x.numpy() for x in theirs_of_text]), atol=1e-5)

    for text in ("The whale found the anchor", "naïve   captains, 2 nets", "日本", ""):
        ids = source.tokenizer.encode(text).ids
        assert ids == pieces(text).input_ids and source.tokenizer.decode(ids) == text
        begin = torch.tensor([[0, *ids]])
        expected = their_model.generate(begin, do_sample=False, max_new_tokens=12, pad_token_id=0)[0, 1:].tolist()
        arguments = source.params, source.tokenizer, text, 12, Sampling(temperature=0)
        generated = generate(BertForMaskedLM(source.config), *arguments)
        assert generated == pieces.decode([i for i in expected if i]) and len(expected) > begin.shape[1]

    conversion.convert(folder, tmp_path / "ours", "bertjax")
    after = pretrained.read_pretrained(tmp_path / "ours")
    assert source.config == after.config and source.tokenizer.fingerprint == after.tokenizer.fingerprint
    jax.tree.map(np.testing.assert_array_equal, source.params, after.params)
    with pytest.raises(UserError, match=r"--format=huggingface does not support a model with model.norm = 'pre'"):
        conversion.convert(tmp_path / "ours", tmp_path / "theirs", "huggingface")


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
    shapes = jax.eval_shape(model.init, jax.random.key(0), *[ids] * (3 if architecture else 4))["params"]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(0, 0.02, x.shape).astype(np.float32), nn.meta.unbox(shapes))
    is_number = architecture == "BertForSequenceClassification" and not labels
    if is_number:
        params["classifier"]["dense"]["bias"] = np.array([3.7], np.float32)
    config = (fine_tuning_config("glue", name="sst2") if architecture else pretraining_config()).unlock()
    config.model.update(dataclasses.asdict(TINY))
    checkpoint.write_params(tmp_path / "run", params)
    write_info(tmp_path / "run", RunInfo(config.lock(), architecture, labels or None), PIECES)
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
        numbers = [answer["score"] for answers in results[-2:] for answer in np.atleast_1d(answers)]
        assert len(numbers) == 2 and all(3 < number < 5 for number in numbers)
    elif architecture == "BertForMultipleChoice":
        assert result in scope["endings"]
    else:
        assert isinstance(result, str) if architecture else len(result) == 5


def test_multi_label_probabilities_equal_transformers(tmp_path):
    """Compares with a transformers pipeline, from a bertjax folder and from a transformers folder."""
    config = transformers.BertConfig(
        **SIZES, vocab_size=150, initializer_range=0.5, problem_type="multi_label_classification",
        id2label={0: "toxic", 1: "insult", 2: "threat"},
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "theirs")
    PIECES.save(tmp_path / "theirs")
    conversion.convert(tmp_path / "theirs", tmp_path / "bertjax", "bertjax")
    conversion.convert(tmp_path / "bertjax", tmp_path / "ours", "huggingface")
    texts = ["ab cd", "xyz", "hello there"]
    use = transformers.pipeline("text-classification", model=str(tmp_path / "ours"), top_k=None)
    expected = [{answer["label"]: answer["score"] for answer in answers} for answers in use(texts)]
    for name in ("theirs", "bertjax", "ours"):
        predictions = classify.TASK.predict(pretrained.read_pretrained(tmp_path / name), [(text,) for text in texts])
        for prediction, scores in zip(predictions, expected, strict=True):
            assert prediction["probabilities"] == pytest.approx(scores, abs=1e-4)
            assert set(prediction["labels"]) == {name for name, score in scores.items() if score > 0.5}


def random_examples(kind: str) -> Examples:
    """48 examples of 9 to 16 tokens; 16 tokens for spans, because transformers computes losses on padding there."""
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


def weighted_loss(kind: str, head: dict, examples: Examples):
    """Returns torch's loss of logits and targets, with the class weights of `config.head`."""
    labels = np.concatenate(examples.labels) if kind == "tagging" else np.array(examples.labels)
    if kind == "multi_label":
        loss = torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor((1 - labels).sum(0) / labels.sum(0)))
        return lambda logits, targets: loss(logits, targets)
    balanced = class_weight.compute_class_weight("balanced", classes=np.arange(3), y=labels[labels >= 0])
    weight = torch.tensor([0.2, 1, 3] if kind == "classification" else balanced, dtype=torch.float32)
    loss = torch.nn.CrossEntropyLoss(weight, label_smoothing=head.get("label_smoothing", 0.0))
    return lambda logits, targets: loss(logits.reshape(-1, 3), targets.reshape(-1))


@pytest.mark.parametrize(
    "kind, head",
    [
        ("classification", {}),
        ("classification", dict(class_weights="a=0.2,c=3", label_smoothing=0.1)),
        ("tagging", dict(class_weights="balanced")),
        ("multi_label", dict(class_weights="balanced")),
        ("regression", {}),
        ("spans", {}),
    ],
)
def test_fine_tuning_equals_pytorch_step_by_step(kind, head, tmp_path):
    """Compares loss, gradient norm, clipping, warm-up, rate decay and weight decay with torch's AdamW.

    The weight decay is so strong that a missing or misplaced decay is visible. With class weights, microbatches have
    different total weights.
    """
    config = fine_tuning_config("classify")
    config.update(dict(batch_size=8, epochs=2.0, max_seq_length=16, microbatches=4 if head else 1))
    config.head.update(head)
    config.optimizer.update(learning_rate=1e-3, weight_decay=10.0, max_grad_norm=0.05)
    config.model.update(dataclasses.asdict(TINY))
    labels = () if kind in ("regression", "spans") else ("a", "b", "c")
    head_class = {
        "classification": heads.ClassificationHead,
        "multi_label": heads.MultiLabelHead,
        "tagging": heads.TaggingHead,
        "spans": heads.SpanHead,
    }
    task_head = head_class.get(kind, heads.RegressionHead)(*[3] * bool(labels))
    examples = random_examples(kind)
    task = FineTuning(config, one_device_mesh(config), TaskData(task_head, labels, examples, (), ""))
    program = Program(task, config, task.mesh)
    state = program.init(jax.random.key(0))
    arguments = TINY, jax.device_get(state.params), None, task_head.architecture
    huggingface.write(tmp_path, *arguments, metadata=huggingface.Metadata(labels, task_head.problem_type))
    loader = getattr(transformers, task_head.architecture.replace("BertFor", "AutoModelFor"))
    model = loader.from_pretrained(tmp_path, attn_implementation="eager").train()
    first = {name: x.detach().clone() for name, x in model.named_parameters()}
    is_decayed = {name: not name.endswith("bias") and "LayerNorm" not in name for name in first}
    groups = [
        {"params": [x for name, x in model.named_parameters() if is_decayed[name] == decays], "weight_decay": decay}
        for decays, decay in ((True, 10.0), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=1e-6)
    loss_of = weighted_loss(kind, head, examples) if head else None

    recipe = put_hyperparameters(0, make_schedule(config.optimizer, task.total_steps), task.mesh)
    for step, batch in enumerate(task.batches(0)):
        state, metrics = program.train_step(state, put_batch(batch, task.mesh), recipe)
        names = dict(input_ids="input_ids", attention_mask="segments", token_type_ids="token_types")
        targets = their_targets(kind, batch)
        out = model(
            **{name: torch.tensor(batch[our_name], dtype=torch.long) for name, our_name in names.items()}, **targets
        )
        loss = loss_of(out.logits, targets["labels"]) if head else out.loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        assert norm > 0.05  # without clipping, a wrong norm would not show
        closeness = 0.1 if step == 0 else 1  # the weights are still equal
        np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=2e-4 * closeness, err_msg=f"step {step}")
        np.testing.assert_allclose(metrics["grad_norm"], norm.item(), rtol=2e-3 * closeness, err_msg=f"step {step}")
        if kind in ("classification", "tagging") and step == 0:  # transformers does not weight the classes
            right = out.logits.argmax(-1).numpy() == batch["labels"]
            expected = (right * batch["weights"]).sum() / batch["weights"].sum()
            np.testing.assert_allclose(metrics["accuracy"], expected, rtol=1e-5)
        for group in optimizer.param_groups:
            # The warm-up over the first tenth of the steps, then a linear decay to 0 (optimization.create_optimizer).
            group["lr"] = 1e-3 * (step if step < 1 else 12 - step) / (1 if step < 1 else 12)
        optimizer.step()
    assert step == 11

    their_params = dict(model.named_parameters())
    for name, x in to_variables(jax.device_get(state.params), families.config_of(config)).items():
        place = huggingface_name(name)
        our_name = torch.tensor(x.T if is_transposed(name) else x)
        moved, off = (their_params[place] - first[place]).norm(), (their_params[place] - our_name).norm()
        # The absolute tolerance covers params that the softmax ignores, such as the bias of keys: their gradients are
        # rounding errors.
        assert off < 0.01 * moved + 1e-4, (name, off.item(), moved.item())
