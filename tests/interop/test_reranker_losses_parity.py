"""Losses and metrics of rerankers compared with the CrossEncoder of sentence-transformers and with scikit-learn."""

import functools
import json
import types

import jax
import numpy as np
import pytest
from etils import epath

from bertjax.distributed.mesh import GROUPS
from bertjax.reranking import forms
from bertjax.reranking import losses as our_losses
from bertjax.reranking.evaluator import RankedLists
from bertjax.reranking.losses import SCHEMES
from bertjax.reranking.metrics import mean_metrics, ranking_metrics

torch = pytest.importorskip("torch")
losses = pytest.importorskip("sentence_transformers.cross_encoder.losses")
pytestmark = pytest.mark.extra_packages

LENGTHS = (4, 1, 7, 2, 5)
SAME_LENGTHS = (4, 4, 4)
PAIRS = 20


class Stub(torch.nn.Module):
    """A CrossEncoder whose score of the pair ("", "7") is number 7 of a tensor."""

    num_labels, device = 1, torch.device("cpu")

    def __init__(self, scores):
        super().__init__()
        self.scores = scores

    def preprocess(self, pairs, **_):
        return {"numbers": torch.tensor([int(document) for _, document in pairs])}

    def forward(self, features):
        return {"scores": self.scores[features["numbers"]][:, None]}


@pytest.fixture(autouse=True)
def accept_stubs(monkeypatch):
    for module in ("binary_cross_entropy", "mse", "multiple_negatives_ranking", "margin_mse"):
        monkeypatch.setattr(f"sentence_transformers.cross_encoder.losses.{module}.CrossEncoder", Stub)


def made(lengths=LENGTHS, kind="grades"):
    """Returns scores and grades of the documents of lists, one list after another, and the labels `[pairs, 3]`."""
    rng, count = np.random.default_rng(len(lengths)), sum(lengths)
    scores = rng.normal(size=count).astype(np.float32) * 2
    if kind == "ties":
        scores, grades = np.round(scores), rng.integers(0, 2, count)
    elif kind == "teacher":
        grades = rng.normal(size=count) * 3
    else:
        grades = rng.integers(0, 4, count) if kind == "grades" else rng.random(count)
    numbers = np.repeat(rng.permutation(len(lengths)), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    return scores, np.stack([numbers, positions, grades], 1).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def our_result(loss, scores, batch):
    def mean(scores):
        losses_of_pairs = jax.vmap(lambda s: loss(s[:, None], batch)[0], axis_name=GROUPS)(scores[None])[0]
        return (losses_of_pairs * batch["weights"]).sum() / batch["weights"].sum()

    return jax.value_and_grad(mean)(scores)


def assert_same(loss, scores, labels, their_value):
    """Compares the value of a loss and the gradient of scores; `their_value` computes a loss from a model."""
    padding = max(PAIRS - len(scores), 0)  # The shapes are equal, so that a loss is compiled once.
    batch = {"weights": np.ones(len(scores), np.float32), "labels": labels}
    padded = jax.tree.map(lambda x: np.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)), (scores, batch))
    value, gradient = our_result(loss, *padded)
    tensor = torch.tensor(scores, requires_grad=True)
    expected = their_value(Stub(tensor))
    expected.backward()
    assert abs(expected.item()) > 1e-3 and tensor.grad.abs().max() > 1e-4
    np.testing.assert_allclose(value, expected.item(), rtol=1e-4)
    np.testing.assert_allclose(
        gradient[: len(scores)], tensor.grad, atol=1e-4 * tensor.grad.abs().max().item(), rtol=1e-4
    )


def made_loss(name, **settings):
    defaults = dict(positive_weight=1.0, scale=10.0, scheme="none", k=0, sigma=1.0, mu=10.0, temperature=1.0)
    return our_losses.make_loss(our_losses.ConfigDict(defaults | settings | {"name": name}), lists=7, documents=9)


def ranges(lengths):
    return np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])


def their_list_loss(loss_class, lengths, grades, **settings):
    """Returns a function of a model: a loss of sentence-transformers for lists of any lengths."""
    documents = [[str(i) for i in numbers] for numbers in ranges(lengths)]
    labels = [torch.tensor(grades[numbers]) for numbers in ranges(lengths)]
    return lambda model: loss_class(model, **settings)([[""] * len(lengths), documents], labels)


@pytest.mark.parametrize("kind", ["grades", "probabilities"])
@pytest.mark.parametrize("name, weight", [("binary_cross_entropy", 1.0), ("binary_cross_entropy", 3.0), ("mse", 1.0)])
def test_pointwise_losses_equal_sentence_transformers(name, weight, kind):
    scores, labels = made(kind=kind)
    if name == "binary_cross_entropy":
        labels[:, 2] = np.minimum(labels[:, 2], 1)

    def expected(model):
        settings = dict(pos_weight=torch.tensor(weight)) if name != "mse" else {}
        loss = (losses.MSELoss if name == "mse" else losses.BinaryCrossEntropyLoss)(model, **settings)
        return loss([[""] * len(scores), [str(i) for i in range(len(scores))]], torch.tensor(labels[:, 2]))

    assert_same(made_loss(name, positive_weight=weight), scores, labels, expected)


@pytest.mark.parametrize("lengths", [LENGTHS, SAME_LENGTHS])
@pytest.mark.parametrize("scale", [10.0, 2.0])
def test_multiple_negatives_equals_sentence_transformers(scale, lengths):
    scores, labels = made(lengths)

    def expected(model):
        loss = losses.MultipleNegativesRankingLoss(model, scale=scale)
        # One list at a time, which has no in-batch negatives.
        values = [loss([[""], *([str(i)] for i in numbers)], None) for numbers in ranges(lengths)]
        return torch.stack(values).mean()

    assert_same(made_loss("multiple_negatives", scale=scale), scores, labels, expected)


def test_margin_mse_equals_sentence_transformers():
    scores, labels = made(SAME_LENGTHS, "teacher")
    columns = [[str(i) for i in column] for column in np.arange(12).reshape(3, 4).T]

    def expected(model):
        return losses.MarginMSELoss(model)([[""] * 3, *columns], torch.tensor(labels[:, 2].reshape(3, 4)))

    assert_same(made_loss("margin_mse"), scores, labels, expected)


@pytest.mark.parametrize("kind", ["grades", "ties", "teacher"])
@pytest.mark.parametrize("lengths", [LENGTHS, SAME_LENGTHS, (3, 1)])
def test_list_net_equals_sentence_transformers(lengths, kind):
    scores, labels = made(lengths, kind)
    expected = their_list_loss(losses.ListNetLoss, lengths, labels[:, 2])
    assert_same(made_loss("list_net"), scores, labels, expected)


@pytest.mark.parametrize("respect_input_order", [False, True])
@pytest.mark.parametrize("kind", ["grades", "ties", "teacher"])
@pytest.mark.parametrize("lengths", [LENGTHS, SAME_LENGTHS, (3, 1)])
@pytest.mark.parametrize("name, their_name", [("list_mle", "ListMLELoss"), ("position_aware_list_mle", "PListMLELoss")])
def test_list_mle_equals_sentence_transformers(name, their_name, lengths, kind, respect_input_order):
    scores, labels = made(lengths, kind)
    settings = dict(respect_input_order=respect_input_order)
    expected = their_list_loss(getattr(losses, their_name), lengths, labels[:, 2], **settings)
    assert_same(made_loss(name, **settings), scores, labels, expected)


def test_position_aware_weights_of_long_lists_equal_sentence_transformers():
    lengths = (300, 140, 100)
    scores, labels = made(lengths, "teacher")  # PyTorch changes the order of equal grades in a long list.
    expected = their_list_loss(losses.PListMLELoss, lengths, labels[:, 2], respect_input_order=False)
    loss = our_losses.PositionAwareListMLE(lists=3, documents=300)
    assert_same(loss, scores, labels, expected)


@pytest.mark.parametrize("kind", ["grades", "ties", "teacher"])
@pytest.mark.parametrize("lengths", [LENGTHS, SAME_LENGTHS, (3, 1)])
@pytest.mark.parametrize("k, sigma", [(0, 1.0), (2, 0.5), (100, 3.0)])
def test_rank_net_equals_sentence_transformers(k, sigma, lengths, kind):
    scores, labels = made(lengths, kind)
    expected = their_list_loss(losses.RankNetLoss, lengths, labels[:, 2], k=k or None, sigma=sigma)
    assert_same(made_loss("rank_net", k=k, sigma=sigma), scores, labels, expected)


def their_scheme(scheme, mu):
    names = ("NoWeightingScheme", "NDCGLoss1Scheme", "NDCGLoss2Scheme", "LambdaRankScheme", "NDCGLoss2PPScheme")
    settings = dict(mu=mu) if scheme == SCHEMES[-1] else {}
    return getattr(losses, dict(zip(SCHEMES, names))[scheme])(**settings)


@pytest.mark.parametrize("kind", ["grades", "ties", "teacher"])
@pytest.mark.parametrize("lengths", [LENGTHS, SAME_LENGTHS, (3, 1)])
@pytest.mark.parametrize("k, sigma, mu", [(0, 1.0, 10.0), (2, 0.5, 3.0), (100, 3.0, 10.0)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_lambda_loss_equals_sentence_transformers(scheme, k, sigma, mu, lengths, kind):
    scores, labels = made(lengths, kind)
    settings = dict(weighting_scheme=their_scheme(scheme, mu), k=k or None, sigma=sigma)
    expected = their_list_loss(losses.LambdaLoss, lengths, labels[:, 2], **settings)
    assert_same(made_loss("lambda", scheme=scheme, k=k, sigma=sigma, mu=mu), scores, labels, expected)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_kl_divergence_equals_sentence_transformers(temperature):
    their_losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    scores, labels = made(SAME_LENGTHS, "teacher")

    def expected(model):
        # The dot product of a query vector of ones and a document vector of width 1 is the score of a pair.
        columns = model.scores.reshape(3, 4).T[:, :, None]
        loss = their_losses.DistillKLDivLoss(types.SimpleNamespace(), temperature=temperature)
        return loss.compute_loss_from_embeddings([torch.ones(3, 1), *columns], torch.tensor(labels[:, 2].reshape(3, 4)))

    assert_same(made_loss("kl", temperature=temperature), scores, labels, expected)


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("k", [1, 3, 10, 50])
def test_metrics_equal_the_reranking_evaluator(k, has_ties, monkeypatch):
    evaluation = pytest.importorskip("sentence_transformers.cross_encoder.evaluation")
    # The order of equal scores in the evaluator otherwise depends on the processor.
    monkeypatch.setattr(np, "argsort", functools.partial(np.argsort, kind="stable"))
    rng, samples, all_scores, all_grades = np.random.default_rng(k), [], [], []
    for _ in range(60):
        length = rng.integers(2, 60)
        scores = rng.normal(size=length).astype(np.float32)
        all_scores.append(np.round(scores) if has_ties else scores)
        all_grades.append(np.arange(length) < rng.integers(0, min(length, 4)))
        end = sum(map(len, all_scores))
        documents = [str(number) for number in range(end - length, end)]
        positives = int(all_grades[-1].sum())
        samples.append({"query": "", "positive": documents[:positives], "negative": documents[positives:]})
    model = types.SimpleNamespace(
        predict=lambda pairs, **_: np.concatenate(all_scores)[[int(document) for _, document in pairs]],
        model_card_data=types.SimpleNamespace(set_evaluation_metrics=lambda *_: None),
    )
    evaluator = evaluation.CrossEncoderRerankingEvaluator(samples, at_k=k)
    scores, expected = mean_metrics(all_scores, all_grades, k), evaluator(model)
    if has_ties:  # The order of equal scores, which MRR depends on, is not defined in the evaluator.
        del scores[f"mrr@{k}"], expected[f"mrr@{k}"]
    assert scores == pytest.approx(expected, abs=1e-6)


def test_metrics_of_candidates_equal_the_reranking_evaluator(tmp_path):
    """Samples with a first stage, which finds all, some or none of the relevant documents."""
    evaluation = pytest.importorskip("sentence_transformers.cross_encoder.evaluation")
    rng, samples = np.random.default_rng(0), []
    for number in range(40):
        texts = [f"{number}-{i}" for i in range(rng.integers(3, 30))]
        positives = rng.choice(texts, rng.integers(1, 4), replace=False).tolist()
        documents = [text for text in rng.permutation(texts).tolist() if text not in positives or rng.random() < 0.5]
        samples.append({"query": f"q{number}", "positive": positives, "documents": documents or texts[:1]})
    scores_of = {text: rng.normal() for sample in samples for text in (*sample["positive"], *sample["documents"])}
    model = types.SimpleNamespace(
        predict=lambda pairs, **_: np.array([scores_of[document] for _, document in pairs]),
        model_card_data=types.SimpleNamespace(set_evaluation_metrics=lambda *_: None),
    )
    expected = evaluation.CrossEncoderRerankingEvaluator(samples, write_csv=False)(model)
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    lists = forms.FORMS["rerank"].read(epath.Path(tmp_path / "dev.jsonl"), (), "", "")
    split = RankedLists(None, lists, None, None)
    scores = split.score([np.array([scores_of[text] for text in ranking.documents]) for ranking in lists.lists])
    assert 0 < scores["base_map"] < scores["map"] and scores == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("k", [1, 5, 30])
def test_ndcg_of_grades_equals_scikit_learn(k, has_ties):
    sklearn = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(k)
    for length in range(2, 40):
        scores, grades = rng.normal(size=length), rng.integers(0, 4, length)
        scores = np.round(scores) if has_ties else scores
        ours = ranking_metrics(scores, grades, k)
        assert ours[f"ndcg@{k}"] == pytest.approx(sklearn.ndcg_score([grades], [scores], k=k), abs=1e-9)
        if grades.any():
            assert ours["map"] == pytest.approx(sklearn.average_precision_score(grades > 0, scores), abs=1e-9)
