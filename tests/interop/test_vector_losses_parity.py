"""Vectors and their losses beside sentence-transformers': the same weights and batch, all gradients."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax import families
from bertjax.config import BertConfig
from bertjax.families.with_heads import SentenceEncoder
from bertjax.interop import huggingface
from bertjax.sharding.mesh import GROUPS
from bertjax.tasks import vector_losses
from bertjax.text.tokenizer import SPECIAL_PIECES, WordPiece
from tests.families.test_modernbert import random_params

torch = pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

PIECES = [*SPECIAL_PIECES, *(f"w{i}" for i in range(195))]
BERT = BertConfig(
    vocab_size=len(PIECES), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
EXAMPLES, LENGTH, SCALE = 6, 12, 25.0
HEADS = {
    "cls": dict(pooling="cls", dense=24, dense_act="tanh"),
    "mean": dict(pooling="mean", dense=40, normalize=False),
    "last": dict(pooling="last"),
}


def batch_of(texts: int):
    """Ids of texts of many lengths, and which are tokens, `[examples, texts, length]`."""
    rng = np.random.default_rng(texts)
    sizes = rng.integers(3, LENGTH + 1, (EXAMPLES, texts, 1))
    inside = np.arange(LENGTH) < sizes
    return np.where(inside, rng.integers(5, 195, (EXAMPLES, texts, LENGTH)), 0).astype(np.int32), inside.astype(
        np.int32
    )


class Pair:
    """A model of ours and theirs with the same weights."""

    def __init__(self, config, folder, **head):
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer

        self.model = SentenceEncoder(config, **head)
        self.params = random_params(self.model, config)
        self.config, head = config, {"dense": 0, "normalize": True} | head
        huggingface.write(folder, config, self.params, WordPiece(PIECES, lowercase=True))
        modules = [Transformer(str(folder), model_kwargs={"attn_implementation": "eager"})]
        modules.append(Pooling(config.hidden_size, {"last": "lasttoken"}.get(head["pooling"], head["pooling"])))
        if head["dense"]:
            act = torch.nn.Tanh() if head.get("dense_act") == "tanh" else torch.nn.Identity()
            modules.append(Dense(config.hidden_size, head["dense"], activation_function=act))
            self.dense = modules[-1].linear
            with torch.no_grad():
                self.dense.weight.copy_(torch.tensor(np.array(self.params["projection"]["kernel"]).T))
                self.dense.bias.copy_(torch.tensor(np.array(self.params["projection"]["bias"])))
        modules += [Normalize()] if head["normalize"] else []
        self.theirs = SentenceTransformer(modules=modules, device="cpu").eval()

        def vectors(params, ids, inside):
            flat = [x.reshape(-1, LENGTH) for x in (ids, inside)]
            return self.model.apply({"params": params}, *flat, jnp.zeros_like(flat[0])).reshape(*ids.shape[:2], -1)

        self.vectors = jax.jit(vectors)
        self.pulled = jax.jit(
            lambda params, of_vectors, *batch: jax.vjp(lambda p: vectors(p, *batch), params)[1](of_vectors)[0]
        )

    def features(self, batch):
        self.theirs.zero_grad()
        ids, inside = (torch.tensor(x, dtype=torch.long) for x in batch)
        return [
            {"input_ids": ids[:, i], "attention_mask": inside[:, i], "token_type_ids": torch.zeros_like(ids[:, i])}
            for i in range(ids.shape[1])
        ]

    def assert_same(self, batch, loss, labels, expected, theirs=None):
        """Compares a loss, the mean over a batch, and its gradients; `theirs`: what a teacher says."""
        vectors = self.vectors(self.params, *batch)
        given = {"weights": np.ones(EXAMPLES, np.float32), "labels": labels}

        def of_vectors(vectors):
            if theirs is not None:
                return loss.divergence(vectors, theirs, 1.0).mean()
            return jax.vmap(lambda v: loss(v, given)[0].mean(), axis_name=GROUPS)(vectors[None]).sum()

        found, gradient = jax.jit(jax.value_and_grad(of_vectors))(vectors)
        np.testing.assert_allclose(found, expected.item(), rtol=1e-4)
        ours = self.pulled(self.params, gradient, *batch)
        expected.backward()
        layout = families.module_of(families.of(self.config))
        named, _ = layout.to_tensors(ours, self.config, "BertModel")
        for name, param in self.theirs[0].model.named_parameters():
            if param.grad is not None or "pooler" not in name:
                self._compare(named[name.removeprefix("model.")], param.grad, name)
        if "projection" in ours:
            self._compare(ours["projection"]["kernel"].T, self.dense.weight.grad, "dense")
            self._compare(ours["projection"]["bias"], self.dense.bias.grad, "dense")

    def _compare(self, ours, theirs, name):
        theirs = theirs.numpy()
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * max(1.0, np.abs(theirs).max()), err_msg=name)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return Pair(BERT, tmp_path_factory.mktemp("bert"), pooling="mean")


@pytest.mark.parametrize("head", HEADS)
def test_vectors_and_their_gradients(head, tmp_path):
    both, batch = Pair(BERT, tmp_path, **HEADS[head]), batch_of(2)
    theirs = [both.theirs(each)["sentence_embedding"] for each in both.features(batch)]
    ours = both.vectors(both.params, *batch)
    np.testing.assert_allclose(ours, torch.stack(theirs, 1).detach(), atol=1e-5)
    teacher = np.random.default_rng(0).normal(size=ours.shape).astype(np.float32)
    cosines = torch.nn.functional.cosine_similarity(torch.stack(theirs, 1), torch.tensor(teacher), dim=-1)
    both.assert_same(batch, vector_losses.ByForm, None, (1 - cosines).mean(), teacher)


def settings(widths, **fields):
    given = dict(temperature=1 / SCALE, symmetric=False, margin=0.4) | fields
    return vector_losses.of_settings(types.SimpleNamespace(**given), widths)


def numbers(texts: int):
    return np.arange(EXAMPLES * texts).reshape(EXAMPLES, texts)


SCORES = np.array([0.5, 3, 3, 0, 5, 1.5], np.float32)
LABELS = np.array([1, 0, 1, 1, 0, 0])
SYMMETRIC = dict(directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction")
CASES = {  # texts, labels, settings of ours, name and settings of theirs
    "pairs": (2, numbers(2), {}, "MultipleNegativesRankingLoss", dict(scale=SCALE)),
    "negatives": (4, numbers(4), {}, "MultipleNegativesRankingLoss", dict(scale=SCALE)),
    "symmetric": (3, numbers(3), dict(symmetric=True), "MultipleNegativesRankingLoss", dict(scale=SCALE) | SYMMETRIC),
    "scored": (2, SCORES, {}, "CoSENTLoss", dict(scale=SCALE)),
    "labelled": (2, LABELS, {}, "ContrastiveLoss", dict(margin=0.4)),
}


@pytest.mark.parametrize("case, widths", [*((case, ()) for case in CASES), ("symmetric", (8, 16)), ("scored", (8,))])
def test_losses_are_theirs(case, widths, pair):
    from sentence_transformers.sentence_transformer import losses

    texts, labels, own, name, fields = CASES[case]
    batch, theirs = batch_of(texts), getattr(losses, name)(pair.theirs, **fields)
    if widths:
        theirs = losses.MatryoshkaLoss(pair.theirs, theirs, [32, *widths])
    pair.assert_same(batch, settings(widths=widths, **own), labels, theirs(pair.features(batch), torch.tensor(labels)))


@pytest.mark.parametrize("what, widths", [("vectors", (8,)), ("scores", ()), ("scores", (8,)), ("scores of pairs", ())])
def test_a_teacher_is_learnt_as_theirs(what, widths, pair):
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.util import pairwise_cos_sim

    texts = 2 if what == "scores of pairs" else 4
    batch, teacher = batch_of(texts), np.random.default_rng(1).normal(size=(EXAMPLES, texts, 32)).astype(np.float32)
    said, query = np.asarray(vector_losses.scores_of(teacher)), torch.tensor(teacher[:, 0])
    cosines = torch.stack([pairwise_cos_sim(query, torch.tensor(teacher[:, i])) for i in range(1, texts)], 1)
    if what == "vectors":
        theirs, said, labels = losses.EmbedDistillLoss(pair.theirs), teacher, torch.tensor(teacher)
    elif what == "scores":
        theirs, labels = losses.MarginMSELoss(pair.theirs, pairwise_cos_sim), cosines
    else:
        theirs, labels = losses.CosineSimilarityLoss(pair.theirs), cosines[:, 0]
    if widths:
        theirs = losses.MatryoshkaLoss(pair.theirs, theirs, [32, *widths])
    expected = theirs(pair.features(batch), labels)
    pair.assert_same(batch, settings(widths=widths), None, expected, said)
