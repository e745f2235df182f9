"""The protocols of OpenAI, Jina, Cohere and text-embeddings-inference: requests, answers, errors, and the API key."""

import asyncio
import base64
import concurrent.futures
import contextlib
import dataclasses
import gzip
import json
import socket
import threading
import time
import urllib.error
import urllib.request

import jax
import numpy as np
import pytest

import bertjax
from bertjax.common.errors import UserError
from bertjax.config import experiments
from bertjax.finetuning.metrics import l2_normalize
from bertjax.interop import sentence_transformers
from bertjax.reranking.ranking import Ranker
from bertjax.serving import access, endpoint, rerank, text_embeddings_inference
from bertjax.serving import http as serving_http
from bertjax.serving import openai as openai_protocol
from bertjax.serving.methods import EmbedMethod, TextScores
from tests.interop.test_golden import GOLDEN
from tests.processes import ROOT
from tests.processes import run as command
from tests.serving.test_serving import metrics_of, post, serving, serving_here
from tests.test_library import TEXTS, made

LIMITS = serving_http.Limits(texts=8, characters=2000, batch=8, waiting=64)
QUERY, DOCUMENTS = "the ship saw .", ["a captain left the whale", "the ship", "the captain saw the ship ."]
LONG = "the ship " * 40  # longer than the 24 tokens of the model
KEY = "sk-not-a-real-key"
LABELS = ("sea", "court", "none")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny checkpoints by kind: a run with a Matryoshka loss, a folder with prompts, and models with other heads."""
    settings, folder = experiments.load("embed"), tmp_path_factory.mktemp("clients") / "folder"
    with settings.unlocked():
        settings.data.query_prompt, settings.data.document_prompt = "the ", "a "
        settings.loss.widths, settings.max_seq_length = "16,8", 24
    run = made("SentenceTransformer", settings=settings)
    folder.mkdir()
    source = run.source
    sentence_transformers.write(folder, source.config, source.params, source.tokenizer, settings, 24, "BertModel")
    return {
        "run": run,
        "folder": bertjax.load(folder),
        "reranker": made("BertForSequenceClassification", "classifier", 1),
        "classifier": made("BertForSequenceClassification", "classifier", 3, labels=LABELS),
        "fill_mask": bertjax.load(GOLDEN),
    }


@pytest.fixture(scope="module")
def servers(models):
    """{kind: address of the server of the checkpoint}."""
    with contextlib.ExitStack() as stack:
        yield {
            kind: stack.enter_context(serving_here(serving_http.Server(model, LIMITS)))
            for kind, model in models.items()
        }


def get(url, path, key=""):
    """Returns the status, the text and the headers of the response to GET."""
    request = urllib.request.Request(url + path, headers={"Authorization": key} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def exchange(url, request):
    """Sends text over a connection; returns the text that the server sends until it closes the connection."""
    with socket.create_connection(url.removeprefix("http://").split(":"), timeout=60) as connection:
        connection.sendall(request.encode())
        return b"".join(iter(lambda: connection.recv(4096), b"")).decode()


def ids_of(model, text):
    """Returns the token ids of a text with special tokens, as a tokenizer of transformers returns them."""
    return model.tokenizer.framed(model.tokenizer.encode(text).ids)


# OpenAI.


@pytest.mark.parametrize("kind", ["run", "folder"])
def test_embeddings_have_the_default_prompt_and_equal_the_library(models, servers, kind):
    model, url = models[kind], f"{servers[kind]}/v1/embeddings"
    status, answer = post(url, {"input": TEXTS, "model": "any-name", "user": "ignored", "unknown": [1]})
    assert status == 200 and (answer["object"], answer["model"]) == ("list", "any-name")
    assert [(item["object"], item["index"]) for item in answer["data"]] == [("embedding", 0), ("embedding", 1)]
    expected = model.embed(TEXTS)
    np.testing.assert_allclose([item["embedding"] for item in answer["data"]], expected, atol=1e-5)
    assert np.abs(expected - model.embed(TEXTS, prompt="")).max() > 0.01
    tokens = sum(len(ids_of(model, "the " + text)) for text in TEXTS)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    status, one = post(url, {"input": TEXTS[1]})
    assert status == 200 and len(one["data"]) == 1 and one["model"] == model.path
    np.testing.assert_allclose(one["data"][0]["embedding"], expected[1], atol=1e-5)


def test_token_ids_are_embedded_without_a_prompt(models, servers):
    model, url = models["run"], f"{servers['run']}/v1/embeddings"
    encoded, expected = [ids_of(model, text) for text in TEXTS], model.embed(TEXTS, prompt="")
    status, answer = post(url, {"input": encoded})
    np.testing.assert_allclose([item["embedding"] for item in answer["data"]], expected, atol=1e-5)
    assert status == 200 and answer["usage"]["prompt_tokens"] == sum(map(len, encoded))
    _, one = post(url, {"input": encoded[0]})
    np.testing.assert_allclose(one["data"][0]["embedding"], expected[0], atol=1e-5)
    _, mixed = post(url, {"input": ["the whale", encoded[1]]})
    np.testing.assert_allclose(mixed["data"][1]["embedding"], expected[1], atol=1e-5)
    _, cut = post(url, {"input": [ids_of(model, LONG)]})
    np.testing.assert_allclose(cut["data"][0]["embedding"], model.embed(LONG, prompt="")[0], atol=1e-5)
    assert cut["usage"]["total_tokens"] == 24


def test_base64_contains_the_same_numbers(servers):
    url = f"{servers['run']}/v1/embeddings"
    _, floats = post(url, {"input": TEXTS, "encoding_format": "float"})
    _, encoded = post(url, {"input": TEXTS, "encoding_format": "base64"})
    for plain, packed in zip(floats["data"], encoded["data"]):
        numbers = np.frombuffer(base64.b64decode(packed["embedding"]), "<f4")
        assert numbers.tolist() == pytest.approx(plain["embedding"], abs=1e-6) and len(numbers) == 32


def test_dimensions_must_be_widths_of_the_training(models, servers):
    for kind, width in (("run", 16), ("run", 8), ("run", 32), ("folder", 5), ("folder", 32)):
        status, answer = post(f"{servers[kind]}/v1/embeddings", {"input": TEXTS[0], "dimensions": width})
        expected = models[kind].embed(TEXTS[0], width=width)[0]
        assert status == 200 and len(expected) == width
        np.testing.assert_allclose(answer["data"][0]["embedding"], expected, atol=1e-5)
    for kind, width, allowed in (("run", 5, "8 or 16 or 32"), ("run", 64, "8 or 16"), ("folder", 33, "from 1 to 32")):
        status, answer = post(f"{servers[kind]}/v1/embeddings", {"input": TEXTS[0], "dimensions": width})
        assert status == 400 and f"dimensions = {width}: " in answer["error"]["message"]
        assert f"embeddings of {allowed}" in answer["error"]["message"]


def test_usage_counts_tokens_after_the_truncation(models, servers):
    _, answer = post(f"{servers['run']}/v1/embeddings", {"input": [LONG, "", "ship"]})
    assert answer["usage"]["prompt_tokens"] == 24 + len(ids_of(models["run"], "the ")) + 4
    _, answer = post(f"{servers['reranker']}/v1/rerank", {"query": "ship", "documents": [LONG, "the ship"]})
    assert answer["usage"]["total_tokens"] == 24 + len(models["reranker"].tokenizer.framed([5], [5, 6]))


# Jina, Cohere and the rankings of text-embeddings-inference.


def test_rankings_of_all_protocols_agree_with_the_library(models, servers):
    model, url = models["reranker"], servers["reranker"]
    ranking = Ranker(model.source).rank(QUERY, DOCUMENTS)
    order, scores = [ranked.index for ranked in ranking], [ranked.score for ranked in ranking]
    content = {"query": QUERY, "documents": [*DOCUMENTS[:2], {"text": DOCUMENTS[2], "id": 7}], "model": "m", "x": 1}
    for path, returns_documents in (("v1", True), ("v2", False)):
        status, answer = post(f"{url}/{path}/rerank", content)
        assert status == 200 and [result["index"] for result in answer["results"]] == order
        assert [result["relevance_score"] for result in answer["results"]] == pytest.approx(scores, abs=1e-5)
        texts = [result.get("document") for result in answer["results"]]
        assert texts == [{"text": DOCUMENTS[index]} if returns_documents else None for index in order]
        tokens = sum(len(model.tokenizer.framed(*pair)) for pair in _encoded_pairs(model))
        assert answer["model"] == "m" and answer["id"] and answer["usage"]["total_tokens"] == tokens
        assert answer["meta"]["api_version"] == {"version": path[1:]}
        assert answer["meta"]["tokens"] == {"input_tokens": tokens, "output_tokens": 0}
        _, short = post(f"{url}/{path}/rerank", {**content, "top_n": 1, "return_documents": not returns_documents})
        assert [result["index"] for result in short["results"]] == order[:1]
        assert ("document" in short["results"][0]) is not returns_documents
    status, answer = post(f"{url}/rerank", {"query": QUERY, "texts": DOCUMENTS, "return_text": True, "truncate": True})
    assert status == 200 and [(each["index"], each["text"]) for each in answer] == [(i, DOCUMENTS[i]) for i in order]
    assert [each["score"] for each in answer] == pytest.approx(scores, abs=1e-5)
    _, raw = post(f"{url}/rerank", {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True})
    assert raw[0].keys() == {"index", "score"} and [each["index"] for each in raw] == order
    assert [1 / (1 + np.exp(-each["score"])) for each in raw] == pytest.approx(scores, abs=1e-5)


def test_documents_and_labels_are_sorted_by_the_logit(models):
    """The sigmoid and the softmax of large logits are equal to 1.0."""
    logits = [50.0, 40.0, 60.0]
    results = [TextScores(np.array([logit], np.float32), 3, False) for logit in logits]
    for protocol in (rerank.Rerank(version=1), text_embeddings_inference.Rerank()):
        request = protocol.read({"query": "a", protocol.field: ["b", "c", "d"]}, models["reranker"])
        answer = protocol.answer(request, results, models["reranker"])
        ranking = answer["results"] if isinstance(answer, dict) else answer
        assert [ranked["index"] for ranked in ranking] == [2, 0, 1]
        assert {ranked.get("relevance_score", ranked.get("score")) for ranked in ranking} == {1.0}
    request = text_embeddings_inference.Predict().read({"inputs": "a"}, models["classifier"])
    scores = [TextScores(np.array([-900, 0, -800], np.float32), 3, False)]
    labels = text_embeddings_inference.Predict().answer(request, scores, models["classifier"])
    assert [label["label"] for label in labels] == ["court", "none", "sea"]


def _encoded_pairs(model):
    encode = model.tokenizer.encode
    return [(encode(QUERY).ids, encode(document).ids) for document in DOCUMENTS]


# text-embeddings-inference.


def test_embed_of_text_embeddings_inference(models, servers):
    model, url = models["folder"], f"{servers['folder']}/embed"
    status, answer = post(url, {"inputs": TEXTS, "truncate": True, "unknown": 1})
    assert status == 200
    np.testing.assert_allclose(answer, model.embed(TEXTS), atol=1e-5)
    np.testing.assert_allclose(post(url, {"inputs": TEXTS[0]})[1], model.embed(TEXTS[:1]), atol=1e-5)
    named = post(url, {"inputs": TEXTS, "prompt_name": "document"})[1]
    np.testing.assert_allclose(named, model.embed(TEXTS, prompt="document"), atol=1e-5)
    assert len(post(url, {"inputs": TEXTS[0], "dimensions": 4})[1][0]) == 4
    assert post(url, {"texts": TEXTS})[1].keys() == {"results"}  # the form of bertjax
    assert post(url, {"text": TEXTS})[1] == {"error": 'the body must be a JSON object with "texts" or "inputs"'}
    assert post(url, {"texts": TEXTS, "width": 0}) == post(url, {"texts": TEXTS})


def test_normalize_of_text_embeddings_inference(models):
    source = models["run"].source
    settings = source.settings.copy_and_resolve_references()
    settings.head.normalize = False
    model = bertjax.Model(dataclasses.replace(source, settings=settings))
    with serving_here(serving_http.Server(model, LIMITS)) as url:
        plain = np.array(post(f"{url}/embed", {"inputs": TEXTS, "normalize": False})[1])
        np.testing.assert_allclose(plain, model.embed(TEXTS), atol=1e-4)
        assert abs(np.linalg.norm(plain[0]) - 1) > 0.1
        normalized = post(f"{url}/embed", {"inputs": TEXTS})[1]
        np.testing.assert_allclose(normalized, l2_normalize(plain), atol=1e-5)


def test_predict_of_text_embeddings_inference(models, servers):
    model, url = models["classifier"], f"{servers['classifier']}/predict"
    pair = [QUERY, DOCUMENTS[0]]
    expected = [model.classify([text])[0]["probabilities"] for text in (TEXTS[0], tuple(pair))]
    status, one = post(url, {"inputs": TEXTS[0]})
    assert status == 200 and [label["score"] for label in one] == sorted(expected[0].values(), reverse=True)
    assert {label["label"]: label["score"] for label in one} == pytest.approx(expected[0], abs=1e-5)
    of_pair = {label["label"]: label["score"] for label in post(url, {"inputs": pair})[1]}
    assert of_pair == pytest.approx(expected[1], abs=1e-5)
    _, batch = post(url, {"inputs": [TEXTS[:1], pair]})
    assert [{label["label"]: label["score"] for label in labels} for labels in batch] == [
        pytest.approx(probabilities, abs=1e-5) for probabilities in expected
    ]
    raw = {label["label"]: label["score"] for label in post(url, {"inputs": TEXTS[0], "raw_scores": True})[1]}
    ratio = np.exp(raw["sea"] - raw["court"])
    assert ratio == pytest.approx(expected[0]["sea"] / expected[0]["court"], rel=1e-4)
    (score,) = post(f"{servers['reranker']}/predict", {"inputs": pair})[1]
    assert score == {"label": "LABEL_0", "score": pytest.approx(Ranker(models["reranker"].source).scores([pair])[0])}


@pytest.mark.parametrize(
    "kind, model_type",
    [
        ("folder", {"embedding": {"pooling": "mean"}}),
        ("reranker", {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}),
        ("classifier", {"classifier": {"id2label": dict(zip("012", LABELS)), "label2id": dict(zip(LABELS, range(3)))}}),
        ("fill_mask", None),
    ],
)
def test_info_and_models_describe_the_checkpoint(models, servers, kind, model_type):
    status, text, _ = get(servers[kind], "/info")
    info = json.loads(text)
    assert status == 200 and info["model_type"] == model_type and info["model_id"] == models[kind].path
    assert (info["max_input_length"], info["max_client_batch_size"], info["auto_truncate"]) == (24, 8, True)
    assert info["model_dtype"] in ("float32", "bfloat16") and info["version"] == bertjax.__version__
    (model,) = json.loads(get(servers[kind], "/v1/models")[1])["data"]
    assert model["object"] == "model" and model["id"] == models[kind].path and model["created"] > 0


# Errors.


@pytest.mark.parametrize(
    "kind, path, content, status, message",
    [
        ("run", "v1/embeddings", b"\xff", 400, "must be JSON"),
        ("run", "v1/embeddings", [], 400, 'a JSON object with "input"'),
        ("run", "v1/embeddings", {"input": []}, 400, "input = []: must contain one text or more"),
        ("run", "v1/embeddings", {"input": None}, 400, "input: expected `str | array`, got `null`"),
        ("run", "v1/embeddings", {"input": ["a", 1.5]}, 400, "input[1]: expected"),
        ("run", "v1/embeddings", {"input": ["a", 1]}, 400, "input[1] = 1: must be a text or a list"),
        ("run", "v1/embeddings", {"input": [-1]}, 400, "input[0]: expected `int` >= 0"),
        ("run", "v1/embeddings", {"input": [5, 6]}, 400, "in LangChain with check_embedding_ctx_length=False"),
        ("run", "v1/embeddings", {"input": [2, 99, 3]}, 400, "ids of the checkpoint's tokenizer below 27"),
        ("run", "v1/embeddings", {"input": [[]]}, 400, "from [2] to [3]"),
        ("run", "v1/embeddings", {"input": [2]}, 400, "from [2] to [3]"),
        ("run", "v1/embeddings", {"input": "a", "encoding_format": "int8"}, 400, "encoding_format: invalid enum"),
        ("run", "v1/embeddings", {"input": "a", "dimensions": 0}, 400, "dimensions: expected `int` >= 1"),
        ("run", "v1/embeddings", {"input": "a", "model": 3}, 400, "model: expected `str | null`, got `int`"),
        ("run", "v1/embeddings", {"input": ["a"] * 9}, 413, "9 input: a request may have at most 8"),
        ("run", "v1/embeddings", {"input": [*[5] * 9, "a"]}, 400, "input[0] = 5: must be a text or a list"),
        ("run", "v1/embeddings", {"input": [2, *[5] * 600, 3]}, 413, "2,408 characters: a request may have at most"),
        ("run", "v1/embeddings", {"input": "a" * 200_000}, 413, "at most 2,000 characters"),
        ("reranker", "v1/embeddings", {"input": "a"}, 400, "cannot compute embeddings"),
        ("reranker", "v1/rerank", {"documents": ["a"]}, 400, "missing required field `query`"),
        ("reranker", "v1/rerank", {"query": "a", "documents": []}, 400, "documents = []: must contain one document"),
        ("reranker", "v2/rerank", {"query": "a", "documents": [{"title": "b"}]}, 400, "missing required field `text`"),
        ("reranker", "v2/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, 400, "top_n: expected `int` >= 1"),
        ("run", "v2/rerank", {"query": "a", "documents": ["b"]}, 400, "cannot rank documents"),
        ("classifier", "v1/rerank", {"query": "a", "documents": ["b"]}, 400, "cannot rank documents"),
        ("reranker", "rerank", {"query": "a", "texts": []}, 400, "texts = []: must contain one document"),
        ("reranker", "rerank", {"query": "a", "texts": [LONG], "truncate": False}, 422, "at most 24 tokens"),
        ("classifier", "rerank", {"query": "a", "texts": ["b"]}, 424, "cannot rank documents"),
        ("folder", "embed", {"inputs": [LONG], "truncate": False}, 422, "at most 24 tokens"),
        ("folder", "embed", {"inputs": ["a"], "prompt_name": "b"}, 400, "has the prompts query, document"),
        ("folder", "embed", {"inputs": ["a"], "normalize": "no"}, 400, "normalize: expected `bool`, got `str`"),
        ("folder", "embed", {"inputs": ["a"], "truncation_direction": "left"}, 400, "truncation_direction: invalid"),
        ("classifier", "embed", {"inputs": ["a"]}, 424, "cannot compute embeddings"),
        ("classifier", "predict", {"inputs": ["a", "b", "c"]}, 400, "must be a text, a pair of texts"),
        ("classifier", "predict", {"inputs": [["a"], "b"]}, 400, "must be a text, a pair of texts"),
        ("classifier", "predict", {"inputs": []}, 400, "must be a text, a pair of texts"),
        ("classifier", "predict", {}, 400, 'a JSON object with "inputs"'),
        ("classifier", "predict", {"input": "a"}, 400, 'a JSON object with "inputs"'),
        ("classifier", "predict", {"texts": ["a"]}, 400, 'a JSON object with "inputs"'),
        ("reranker", "predict", b"{", 400, 'must be JSON, such as {"inputs"'),
        ("run", "predict", {"inputs": "a"}, 424, "cannot classify texts"),
    ],
)  # fmt: skip
def test_errors_have_the_form_of_the_protocol(servers, kind, path, content, status, message):
    response_status, answer = post(f"{servers[kind]}/{path}", content)
    if path == "v1/embeddings":
        error = answer["error"]
        assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
        text = error["message"]
    elif path in ("v1/rerank", "v2/rerank"):
        text = answer["message"]
        assert answer == {"message": text, "detail": text}
    else:
        text = answer["error"]
        assert answer == {"error": text, "error_type": "Backend" if status == 424 else "Validation"}
    assert response_status == status and message in text and "\n" not in text


BODY = json.dumps({"input": "the ship"})


@pytest.mark.parametrize(
    "headers, body, status, message",
    [
        ({"Content-Type": "application/json; charset=punycode"}, b"a" * 20_000, 400, "the charset 'punycode'"),
        ({"Content-Type": "application/json; charset=idna"}, b"a" * 20_000, 400, "must be JSON in UTF-8"),
        ({"Content-Type": "application/json; charset=UTF-8"}, BODY.encode(), 200, ""),
        ({"Content-Type": "application/json; charset=utf-16"}, BODY.encode("utf-16"), 200, ""),
        ({"Content-Encoding": "gzip"}, gzip.compress(BODY.encode(), mtime=0), 200, ""),
        ({"Content-Encoding": "gzip"}, BODY.encode(), 400, "without Content-Encoding"),
        ({"Content-Encoding": "deflate"}, BODY.encode(), 400, "without Content-Encoding"),
        ({"Content-Encoding": "gzip"}, gzip.compress(BODY.encode(), mtime=0)[:-12], 400, "must be JSON"),
    ],
)
def test_bodies_are_read_in_utf_8_and_decompressed(servers, capfd, headers, body, status, message):
    request = urllib.request.Request(f"{servers['run']}/v1/embeddings", body, headers)
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        response = error
    answer = json.load(response)
    assert response.status == status and message in answer.get("error", {}).get("message", "")
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "kind, requests",
    [
        ("run", {"v1/embeddings": {"input": "a"}, "embed": {"inputs": "a"}}),
        ("reranker", {"v2/rerank": {"query": "a", "documents": ["b"]}, "rerank": {"query": "a", "texts": ["b"]}}),
        ("classifier", {"predict": {"inputs": "a"}, "classify": {"texts": "a"}}),
        ("fill_mask", {"fill_mask": {"texts": "[MASK]"}, "attention": {"texts": "a"}}),
    ],
)
def test_damaged_weights_are_an_error_of_the_server(models, kind, requests):
    source = models[kind].source
    damaged = dataclasses.replace(source, params=jax.tree.map(lambda x: np.full_like(x, np.nan), source.params))
    with serving_here(serving_http.Server(bertjax.Model(damaged), LIMITS)) as url:
        answers = [post(f"{url}/{path}", content) for path, content in requests.items()]
    assert [status for status, _ in answers] == [500, 500]
    assert all("outputs are NaN" in json.dumps(answer) for _, answer in answers)
    if kind == "classifier":
        assert answers[0][1]["error_type"] == "Backend"


@pytest.mark.parametrize(
    "kind, path, field, value",
    [
        ("run", "v1/embeddings", "input", [[2, 3]]),
        ("run", "embed", "inputs", [[2, 3]]),
        ("run", "embed", "texts", ["a"]),
        ("classifier", "predict", "inputs", [["a", "b"]]),
        ("reranker", "v1/rerank", "documents", ["a"]),
        ("reranker", "rerank", "texts", ["a"]),
    ],
)
def test_too_many_inputs_are_refused_before_their_conversion(servers, monkeypatch, kind, path, field, value):
    for module in (endpoint, openai_protocol, rerank, text_embeddings_inference):
        monkeypatch.setattr(module, "convert", None)
    status, answer = post(f"{servers[kind]}/{path}", {"query": "a", field: value * 2000})
    assert status == 413 and f"2000 {field}: a request may have at most 8" in json.dumps(answer)


def test_a_wrong_http_method_has_the_form_of_the_protocol(servers):
    status, text, headers = get(servers["run"], "/v1/embeddings")
    assert (status, headers["Allow"]) == (405, "POST")
    assert json.loads(text)["error"]["message"] == "GET /v1/embeddings: the HTTP method must be POST"
    assert post(f"{servers['run']}/info", {})[1]["error_type"] == "Validation"


def test_requests_of_several_protocols_are_computed_together(models, monkeypatch):
    compute, began, hold, sizes = EmbedMethod.compute, threading.Event(), threading.Event(), []

    def held(method, model, inputs):
        began.set()
        hold.wait(60)
        sizes.append(len(inputs))
        return compute(method, model, inputs)

    monkeypatch.setattr(EmbedMethod, "compute", held)
    limits = LIMITS._replace(waiting=8)
    with (
        serving_here(serving_http.Server(models["run"], limits)) as url,
        concurrent.futures.ThreadPoolExecutor(9) as pool,
    ):
        try:
            first = pool.submit(post, f"{url}/v1/embeddings", {"input": "the ship"})
            assert began.wait(60)
            waiting = [pool.submit(post, f"{url}/v1/embeddings", {"input": f"the {'ship ' * i}"}) for i in range(4)]
            waiting += [pool.submit(post, f"{url}/embed", {"inputs": f"a {'whale ' * i}"}) for i in range(2)]
            waiting += [pool.submit(post, f"{url}/embed", {"texts": f"a {'whale ' * i}"}) for i in range(2)]
            deadline = time.monotonic() + 60
            while "bertjax_texts_waiting 8.0" not in metrics_of(url):
                assert time.monotonic() < deadline
            refused = [post(f"{url}/{path}", {field: "a"}) for path, field in (("embed", "inputs"), ("embed", "texts"))]
            refused.append(post(f"{url}/v1/embeddings", {"input": "a"}))
        finally:
            hold.set()
        assert all(future.result()[0] == 200 for future in [first, *waiting])
    assert sizes == [1, 8] and [status for status, _ in refused] == [429, 503, 503]
    assert refused[0][1] == {"error": "too many texts wait; try again later", "error_type": "Overloaded"}
    assert refused[2][1]["error"]["type"] == "server_error"


def test_a_request_does_not_search_the_task_of_the_checkpoint(servers, monkeypatch):
    """The search takes several milliseconds in the thread that answers all clients."""
    content = {"input": "the ship"}
    assert post(f"{servers['run']}/v1/embeddings", content)[0] == 200
    for module in ("bertjax.library.model", "bertjax.inference.embedders"):
        monkeypatch.setattr(f"{module}.find_embedding_task", None)
    assert post(f"{servers['run']}/v1/embeddings", content)[0] == 200


# The API key.


def test_all_requests_but_health_need_the_key(models):
    paths = ["/", "/metrics", "/info", "/v1/models", "/missing", "/embed", "/v1/embeddings"]
    with serving_here(serving_http.Server(models["run"], LIMITS, KEY)) as url:
        for key in ("", "Bearer", f"Bearer {KEY}x", f"Basic {KEY}", KEY, "Bearer \u00e9", f"Bearer {KEY[:-1]}"):
            for path in paths:
                status, text, headers = get(url, path, key)
                assert (status, headers["WWW-Authenticate"]) == (401, "Bearer") and KEY not in text, (key, path)
            assert get(url, "/health", key)[0] == 200
        allowed = {path: get(url, path, f"Bearer {KEY}")[0] for path in paths}
        assert allowed == {**dict.fromkeys(paths, 200), "/missing": 404, "/embed": 405, "/v1/embeddings": 405}
        assert get(url, "/", f"bearer {KEY}")[0] == 200
        status, answer = post(f"{url}/v1/embeddings", {"input": "a"})
        assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        assert post(f"{url}/v1/rerank", {})[1]["detail"] == access.MESSAGE
        assert post(f"{url}/embed", {"texts": "a"}) == (401, {"error": access.MESSAGE})
        assert "API key of the server" in get(url, "/")[1]  # a form, for browsers
        metrics = get(url, "/metrics", f"Bearer {KEY}")[1]
        assert 'path="other",status="401"' in metrics and "missing" not in metrics


def test_the_key_of_the_environment_is_not_printed(monkeypatch):
    monkeypatch.setenv(access.VARIABLE, KEY)
    with serving(GOLDEN) as (process, url):
        content = json.dumps({"texts": "the [MASK]"}).encode()
        assert post(f"{url}/fill_mask", content)[0] == 401
        request = urllib.request.Request(f"{url}/fill_mask", content, {"Authorization": f"Bearer {KEY}"})
        assert urllib.request.urlopen(request, timeout=60).status == 200
        wrong = urllib.request.Request(f"{url}/embed", b"{", {"Authorization": f"Bearer {KEY}"})
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(wrong, timeout=60)
        assert raised.value.code == 400 and KEY not in raised.value.read().decode()
        for line in (f"Authorization: Bearer {KEY}\0", f"Authorization Bearer {KEY}", f"X: {KEY}{'x' * 9000}"):
            answer = exchange(url, f"GET /info HTTP/1.1\r\nHost: a\r\n{line}\r\n\r\n")
            assert " 400 " in answer and serving_http.NOT_HTTP in answer and KEY not in answer
        assert KEY not in process.stdout + process.stderr


@pytest.mark.parametrize("key", ["", " ", "a b", "key\n", "k\u00e9y"])
def test_an_unusable_key_is_refused_in_one_line(key, monkeypatch):
    monkeypatch.setenv(access.VARIABLE, key)
    with pytest.raises(UserError, match="BERTJAX_API_KEY: must be one or more printable ASCII characters") as raised:
        access.read_api_key()
    assert not key.strip() or key not in str(raised.value)
    assert access.VARIABLE in (ROOT / "bertjax/cli/serve.py").read_text()


def test_the_command_refuses_an_unusable_key(tmp_path):
    done = command("serve", f"--checkpoint={GOLDEN}", cwd=tmp_path, BERTJAX_API_KEY="a b")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("error: BERTJAX_API_KEY") and "a b" not in line


# Clients of other packages.


@pytest.fixture(scope="module")
def guarded(models):
    """{kind: address of a server that needs `KEY`}."""
    with contextlib.ExitStack() as stack:
        yield {
            kind: stack.enter_context(serving_here(serving_http.Server(models[kind], LIMITS, KEY)))
            for kind in ("folder", "run", "reranker")
        }


@pytest.mark.extra_packages
def test_openai_client(models, guarded):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{guarded['run']}/v1", api_key=KEY, max_retries=0)
    expected = models["run"].embed(TEXTS)
    for more in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):  # the default is base64
        response = client.embeddings.create(model="mine", input=TEXTS, **more)
        vectors = [item.embedding for item in response.data]
        if more.get("encoding_format") == "base64":
            vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
        assert response.model == "mine" and response.usage.prompt_tokens == response.usage.total_tokens > 4
    ids = [ids_of(models["run"], text) for text in TEXTS]
    vectors = [item.embedding for item in client.embeddings.create(model="mine", input=ids, dimensions=8).data]
    np.testing.assert_allclose(vectors, models["run"].embed(TEXTS, prompt="", width=8), atol=1e-5)
    assert [model.id for model in client.models.list()] == [models["run"].path]
    with pytest.raises(openai.NotFoundError, match="the server has no path /v1/models/mine"):
        client.models.retrieve("mine")
    with pytest.raises(openai.BadRequestError, match="dimensions = 5") as raised:
        client.embeddings.create(model="mine", input=TEXTS, dimensions=5)
    assert raised.value.type == "invalid_request_error"
    wrong = openai.OpenAI(base_url=f"{guarded['run']}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as raised:
        wrong.embeddings.create(model="mine", input=TEXTS)
    assert raised.value.code == "invalid_api_key"


@pytest.mark.extra_packages
def test_asynchronous_openai_client(models, guarded):
    openai = pytest.importorskip("openai")
    texts = [f"the ship {'saw ' * number}" for number in range(8)]

    async def embed():
        async with openai.AsyncOpenAI(base_url=f"{guarded['run']}/v1", api_key=KEY, max_retries=0) as client:
            requests = [client.embeddings.create(model="mine", input=texts[i : i + 3]) for i in range(6)]
            return await asyncio.gather(*requests)

    expected = models["run"].embed(texts)
    for first, response in enumerate(asyncio.run(embed())):
        vectors = [item.embedding for item in response.data]
        np.testing.assert_allclose(vectors, expected[first : first + 3], atol=1e-5)


@pytest.mark.extra_packages
def test_langchain_openai_client(models, guarded, monkeypatch):
    pytest.importorskip("langchain_openai")
    import openai
    import tiktoken
    from langchain_openai import OpenAIEmbeddings

    settings = dict(base_url=f"{guarded['run']}/v1", api_key=KEY, model="mine", max_retries=0)
    client = OpenAIEmbeddings(**settings, check_embedding_ctx_length=False)
    expected = models["run"].embed(TEXTS)
    np.testing.assert_allclose(client.embed_documents(TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(client.embed_query(TEXTS[0]), expected[0], atol=1e-5)
    # By default, LangChain sends token ids of tiktoken, which downloads its vocabulary. This one consists of bytes.
    ranks = {bytes([number]): number for number in range(256)}
    encoding = tiktoken.Encoding("bytes", pat_str=r".", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    with pytest.raises(openai.BadRequestError, match="in LangChain with check_embedding_ctx_length=False"):
        OpenAIEmbeddings(**settings).embed_documents(TEXTS)


@pytest.mark.extra_packages
def test_cohere_client(guarded):
    cohere = pytest.importorskip("cohere")
    for kind, path in ((cohere.Client, "v1"), (cohere.ClientV2, "v2")):
        client = kind(api_key=KEY, base_url=guarded["reranker"])
        response = client.rerank(model="mine", query=QUERY, documents=DOCUMENTS, top_n=2)
        scores = [result.relevance_score for result in response.results]
        assert len(scores) == 2 and scores == sorted(scores, reverse=True)
        assert response.meta.api_version.version == path[1:] and response.meta.billed_units.search_units == 1
        with pytest.raises(cohere.BadRequestError) as raised:
            client.rerank(model="mine", query=QUERY, documents=[])
        assert "documents = []" in raised.value.body["message"]


@pytest.mark.extra_packages
def test_langchain_jina_client(guarded, monkeypatch):
    jina = pytest.importorskip("langchain_community.document_compressors.jina_rerank")
    monkeypatch.setattr(jina, "JINA_API_URL", f"{guarded['reranker']}/v1/rerank")
    client = jina.JinaRerank(jina_api_key=KEY, top_n=2)
    assert len(client.rerank(DOCUMENTS, QUERY)) == 2
    with pytest.raises(RuntimeError, match="cannot rank documents"):
        monkeypatch.setattr(jina, "JINA_API_URL", f"{guarded['run']}/v1/rerank")
        client.rerank(DOCUMENTS, QUERY)


def test_the_client_of_the_hugging_face_hub(models, guarded):
    hub = pytest.importorskip("huggingface_hub")
    client = hub.InferenceClient(f"{guarded['folder']}/embed", token=KEY)
    vectors = client.feature_extraction(TEXTS, normalize=True, prompt_name="document")
    np.testing.assert_allclose(vectors, models["folder"].embed(TEXTS, prompt="document"), atol=1e-5)
