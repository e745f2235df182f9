"""Embedding losses compared with sentence-transformers, and distillation with PyTorch: values and gradients.

`test_sentence_transformers.py` compares the embeddings of the encoder.
"""

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from bertjax.distributed.mesh import GROUPS
from bertjax.embedding import loss_settings, teacher_targets
from bertjax.inference.losses import CrossEntropy, Distilled, SigmoidCrossEntropy, SquaredError

torch = pytest.importorskip("torch")
tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
pytestmark = pytest.mark.extra_packages

EXAMPLES, WIDTH, SCALE, HEAT = 6, 32, 25.0, 0.25


class Stub(torch.nn.Module):
    """A model of sentence-transformers that returns its input vectors."""

    def forward(self, features):
        return features

    def get_embedding_dimension(self):
        return WIDTH


def vectors_of(texts: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(EXAMPLES, texts, WIDTH)).astype(np.float32)


class GuideStub(Stub):
    """A guide that returns the vectors `guide` of its input."""

    def forward(self, features):
        return {"sentence_embedding": features["guide"]}


def assert_same(texts: int, loss, labels, their_loss, their_labels, widths=(), teacher=None, guide=None):
    """Compares a loss, the mean over a batch, and its gradient.

    `teacher`: vectors or scores of the teacher; `guide`: vectors of the guide.
    """
    vectors = vectors_of(texts)
    batch = {"weights": np.ones(EXAMPLES, np.float32), "labels": labels}
    if guide is not None:
        batch["guide_embeddings"] = guide

    def of_vectors(vectors):
        if teacher is not None:
            return loss.divergence(vectors, teacher, HEAT).mean()
        return jax.vmap(lambda v: loss(v, batch)[0].mean(), axis_name=GROUPS)(vectors[None]).sum()

    value, gradient = jax.jit(jax.value_and_grad(of_vectors))(vectors)
    if widths:
        their_loss = losses.MatryoshkaLoss(their_loss.model, their_loss, [WIDTH, *widths])
    tensor = torch.tensor(vectors, requires_grad=True)
    columns = [{"sentence_embedding": tensor[:, i]} for i in range(texts)]
    if guide is not None:
        columns = [column | {"guide": torch.tensor(guide[:, i])} for i, column in enumerate(columns)]
    expected = their_loss(columns, their_labels)
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-4)
    np.testing.assert_allclose(gradient, tensor.grad, atol=1e-5 * tensor.grad.abs().max().item(), rtol=1e-4)


def settings(widths, distill=None, **fields):
    fields_of_loss = dict(temperature=1 / SCALE, symmetric=False, margin=0.4, widths="") | fields
    return loss_settings.make_loss(ConfigDict(fields_of_loss), widths, distill)


def numbers(texts: int):
    return np.arange(EXAMPLES * texts).reshape(EXAMPLES, texts)


SCORES = np.array([0.5, 3, 3, 0, 5, 1.5], np.float32)
LABELS = np.array([1, 0, 1, 1, 0, 0])
SYMMETRIC = dict(directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction")
CASES = {  # texts, labels, bertjax settings, sentence-transformers' name and settings
    "pairs": (2, numbers(2), {}, "MultipleNegativesRankingLoss", dict(scale=SCALE)),
    "negatives": (4, numbers(4), {}, "MultipleNegativesRankingLoss", dict(scale=SCALE)),
    "symmetric": (3, numbers(3), dict(symmetric=True), "MultipleNegativesRankingLoss", dict(scale=SCALE) | SYMMETRIC),
    "scored": (2, SCORES, {}, "CoSENTLoss", dict(scale=SCALE)),
    "labelled": (2, LABELS, {}, "ContrastiveLoss", dict(margin=0.4)),
    "angle": (2, SCORES, dict(name="angle"), "AnglELoss", dict(scale=SCALE)),
    "online": (2, LABELS, dict(name="online_contrastive", margin=1.1), "OnlineContrastiveLoss", dict(margin=1.1)),
    "online, equal": (2, np.ones(EXAMPLES, int), dict(name="online_contrastive"), "OnlineContrastiveLoss", {}),
    "online, different": (
        2, np.zeros(EXAMPLES, int), dict(name="online_contrastive", margin=1.1), "OnlineContrastiveLoss",
        dict(margin=1.1),
    ),
}  # fmt: skip
for metric, margin in (("cosine", 0.1), ("euclidean", 0.5), ("manhattan", 3.0)):
    metric_of_triplet = getattr(losses.TripletDistanceMetric, metric.upper())
    their_fields = dict(distance_metric=metric_of_triplet, triplet_margin=margin)
    our_fields = dict(name="triplet", distance_metric=metric, triplet_margin=margin)
    CASES[metric] = (3, numbers(3), our_fields, "TripletLoss", their_fields)
WIDE_CASES = [
    ("symmetric", (8, 16)), ("scored", (8,)), ("euclidean", (8,)), ("angle", (7,)), ("online", (8, 16)),
]  # fmt: skip


@pytest.mark.parametrize("case, widths", [*((case, ()) for case in CASES), *WIDE_CASES])
def test_losses_equal_sentence_transformers(case, widths):
    texts, labels, settings_of_case, name, fields = CASES[case]
    their_loss = getattr(losses, name)(Stub(), **fields)
    assert_same(texts, settings(widths, **settings_of_case), labels, their_loss, torch.tensor(labels), widths)


@pytest.mark.parametrize("texts, margin, widths", [(2, 0.0, ()), (3, 0.0, ()), (3, 0.2, ()), (3, 0.0, (8,))])
def test_the_guided_loss_equals_sentence_transformers(texts, margin, widths):
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()))
    model, guide = Stub(), GuideStub()
    for stub in (model, guide):
        stub.tokenizer, stub.max_seq_length = tokenizer, 8
    their_loss = losses.GISTEmbedLoss(model, guide, temperature=1 / SCALE, margin=margin)
    loss = settings(widths, guide="a checkpoint", guide_margin=margin)
    assert_same(texts, loss, numbers(texts), their_loss, None, widths, guide=vectors_of(texts, seed=3))


@pytest.mark.parametrize(
    "target, widths",
    [("vectors", (8,)), ("scores", ()), ("scores", (8,)), ("scores of pairs", ()), ("kl", ()), ("kl", (8,))],
)
def test_distillation_losses_equal_sentence_transformers(target, widths):
    texts, cosine = 2 if target == "scores of pairs" else 4, torch.nn.functional.cosine_similarity
    teacher = vectors_of(texts, seed=1)
    scores, cosines = (
        teacher_targets.example_scores(teacher),
        cosine(*map(torch.tensor, (teacher[:, :1], teacher[:, 1:])), -1),
    )
    if target == "vectors":
        their_loss, scores, labels = losses.EmbedDistillLoss(Stub()), teacher, torch.tensor(teacher)
    elif target == "kl":
        heats = dict(student_temperature=0.5, teacher_temperature=0.25)
        their_loss, scores, labels = losses.DistillKLDivLoss(Stub(), cosine, **heats), cosines, cosines
    elif target == "scores":
        their_loss, labels = losses.MarginMSELoss(Stub(), cosine), cosines
    else:
        their_loss, labels = losses.CosineSimilarityLoss(Stub()), cosines[:, 0]
    distill = ConfigDict(dict(what=target, student_temperature=0.5)) if target == "kl" else None
    ours = settings(widths, distill, temperature=1.0)  # the KL divergence is in units of InfoNCE with this temperature
    assert_same(texts, ours, None, their_loss, labels, widths, np.asarray(scores))


def test_scores_of_all_documents_are_targets_of_margin_mse():
    """A column for each document: sentence-transformers converts the scores to margins in the same way."""
    scores, cosine = np.random.default_rng(2).uniform(size=(EXAMPLES, 3)), torch.nn.functional.cosine_similarity
    their_loss, labels = losses.MarginMSELoss(Stub(), cosine), torch.tensor(scores, dtype=torch.float32)
    assert_same(4, settings(()), None, their_loss, labels, teacher=teacher_targets.margins(scores))


@pytest.mark.parametrize("kind", ["classes", "labels", "number"])
def test_the_loss_of_teacher_logits_equals_pytorch(kind):
    F = torch.nn.functional
    rng, heat, weight = np.random.default_rng(0), 3.0, 0.7
    logits, teacher_logits = rng.normal(size=(2, 6, 1 if kind == "number" else 4)).astype(np.float32)
    student, teacher = torch.tensor(logits, requires_grad=True), torch.tensor(teacher_logits)
    if kind == "classes":
        labels, loss = rng.integers(0, 4, 6), CrossEntropy(label_smoothing=0.1)
        hard = F.cross_entropy(student, torch.tensor(labels), label_smoothing=0.1)
        soft = F.kl_div(torch.log_softmax(student / heat, -1), torch.softmax(teacher / heat, -1), reduction="batchmean")
    elif kind == "labels":
        labels, loss = rng.integers(0, 2, (6, 4)), SigmoidCrossEntropy()
        hard = F.binary_cross_entropy_with_logits(student, torch.tensor(labels).float())
        chances, shares = torch.sigmoid(student / heat), torch.sigmoid(teacher / heat)
        soft = (shares * (shares / chances).log() + (1 - shares) * ((1 - shares) / (1 - chances)).log()).mean()
    else:
        labels, loss = rng.normal(size=6).astype(np.float32), SquaredError()
        hard, soft = F.mse_loss(student[:, 0], torch.tensor(labels)), F.mse_loss(student, teacher) / heat**2
    expected = (1 - weight) * hard + weight * heat**2 * soft
    expected.backward()

    def distilled(logits):
        return Distilled(loss, heat, weight)(logits, {"labels": labels, "teacher_logits": teacher_logits})[0].mean()

    value, gradient = jax.jit(jax.value_and_grad(distilled))(logits)
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, student.grad.numpy(), atol=1e-6)
