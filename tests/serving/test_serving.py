"""The server: answers like the library, errors in one line, no lost requests, and a clean end on signals."""

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import os
import queue
import signal
import threading
import time
import types
import urllib.error
import urllib.request

import jax
import numpy as np
import pytest
from aiohttp import web

import bertjax
from bertjax.config import experiments
from bertjax.config.limits import POOLS
from bertjax.inference import predictor
from bertjax.interop import huggingface, sentence_transformers
from bertjax.serving import http as serving_http
from bertjax.serving.batches import Batches, Full
from bertjax.serving.methods import Method
from tests.conftest import extract_golden_workdir
from tests.interop.test_golden import GOLDEN
from tests.markers import slow_case
from tests.processes import run as command
from tests.processes import start
from tests.test_library import TAGS, made

TEXTS = [f"the [MASK] {'of a list ' * (number % 4)}{'[MASK] ' * (number % 2)}." for number in range(24)]


def post(url, content, timeout=60):
    """Returns the status and the JSON of the response."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=timeout) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    extract_golden_workdir(folder)
    return folder / "run"


@contextlib.contextmanager
def serving(checkpoint, *flags):
    """Runs the process of a server; yields its address."""
    process = start("serve", f"--checkpoint={checkpoint}", "--port=0", *flags, cwd=checkpoint.parent)
    try:
        deadline = time.monotonic() + 60
        while not (line := process.stdout).endswith("\n"):
            assert process.poll() is None and time.monotonic() < deadline, process.describe()
            time.sleep(0.02)
        yield process, line.split()[-1]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(60)


@pytest.fixture(scope="module")
def server(checkpoint):
    with serving(checkpoint, "--max_texts=40", "--max_characters=3000", "--batch=8") as (_, url):
        yield url


def metrics_of(url):
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        return answer.read().decode()


@pytest.mark.parametrize(
    "path, content, status, message",
    [
        ("fill_mask", b"\xff", 400, "must be JSON"),
        ("fill_mask", b"[" * 200_000, 413, "3,000 characters"),
        ("fill_mask", b"[" * 2000, 400, "must be JSON"),
        ("fill_mask", [], 400, 'a JSON object with "texts"'),
        ("fill_mask", {"text": "a"}, 400, 'a JSON object with "texts"'),
        ("fill_mask", {"texts": "a [MASK]", "topk": 3}, 400, "'topk': unknown field; the fields are texts, top_k"),
        ("fill_mask", {"texts": "a [MASK]", "top_k": "3"}, 400, "top_k: expected `int`, got `str`"),
        ("fill_mask", {"texts": "a [MASK]", "top_k": True}, 400, "top_k: expected `int`, got `bool`"),
        ("fill_mask", {"texts": "a [MASK]", "top_k": 0}, 400, "top_k: expected `int` >= 1"),
        ("fill_mask", {"texts": "a [MASK]", "top_k": 101}, 400, "top_k: expected `int` <= 100"),
        ("fill_mask", {"texts": ["a [MASK]", None]}, 400, "texts[1]: expected `str`, got `null`"),
        ("embed", {"texts": ["a"] * 3, "prompt": "b" * 1000}, 413, "3,003 characters"),
        ("embed", {"texts": "a", "pool": "mean", "layers": "\udfff"}, 400, "layers = '\ufffd': choose one of"),
        ("embed", {"texts": "a", "\ud800": 1}, 400, "unknown field"),
        ("fill_mask", {"texts": ["a [MASK]"] * 41}, 413, "a request may have at most 40"),
        ("fill_mask", {"texts": "[MASK] " * 500}, 413, "a request may have at most 3,000"),
        ("fill_mask", {"texts": "[MASK] " * 300}, 400, "more than the model's"),
        ("fill_mask", {"texts": ["[MASK] " * 10] * 26, "top_k": 99}, 400, "top_k = 99: the answer for 260 masks would"),
        ("embed", {"texts": "a"}, 400, "was not trained for embeddings"),
        ("embed", {"texts": "a", "pool": "most"}, 400, "choose one of"),
        ("classify", {"texts": "a"}, 400, "run@5 does not support classify; the paths are POST /fill_mask"),
        ("tag", b"\xff", 400, "does not support tag"),
        ("answer", {}, 400, "does not support answer"),
        ("a%0Ab", {"texts": "a"}, 404, "the server has no path /a%0Ab; the paths are"),
        ("attention", {"texts": ["a", "b"]}, 400, "must be one text"),
    ],
)  # fmt: skip
def test_mistakes_are_answered_in_one_line(server, path, content, status, message):
    response_status, answer = post(f"{server}/{path}", content)
    assert response_status == status and message in answer["error"] and "\n" not in answer["error"]


def test_errors_list_only_paths_that_support_the_checkpoint(server):
    message = post(f"{server}/classify", {"texts": "a"})[1]["error"]
    assert "POST /fill_mask, POST /" in message
    assert not any(path in message for path in ("/rerank", "/v1/rerank", "/v1/embeddings", "/predict"))


@pytest.mark.parametrize(
    "method, path, allowed",
    [
        *[(method, path, "POST") for method in ("GET", "PUT", "DELETE") for path in ("fill_mask", "embed", "classify")],
        *[(method, path, "GET,HEAD") for method in ("POST", "OPTIONS") for path in ("", "health", "metrics")],
    ],
)
def test_a_wrong_http_method_is_answered_with_the_allowed_methods(server, method, path, allowed):
    request = urllib.request.Request(f"{server}/{path}", b"{}", method=method)
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=60)
    message = json.load(raised.value)["error"]
    assert (raised.value.code, raised.value.headers["Allow"]) == (405, allowed)
    assert message == f"{method} /{path}: the HTTP method must be {allowed}"


def test_a_lone_surrogate_is_read_as_a_replacement_character(server):
    status, answer = post(f"{server}/fill_mask", {"texts": ["a \ud800 [MASK]", "a \ufffd [MASK]"]})
    first, second = answer["results"]
    assert status == 200 and first == second and first["text"] == "a \ufffd [MASK]"


@pytest.mark.slow
def test_concurrent_attention_requests_get_the_attention_of_their_text(server):
    texts = [f"the {'list ' * number}." for number in range(1, 9)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(lambda text: post(f"{server}/attention", {"texts": text}), texts * 3))
    pieces = [len(answer["pieces"]) for status, answer in responses if status == 200]
    assert pieces == pieces[:8] * 3 and len(set(pieces)) == 8
    np.testing.assert_allclose(np.sum(responses[0][1]["attention"], axis=-1), 1000, atol=pieces[0])


def test_accepted_requests_are_answered_after_sigterm(checkpoint):
    with serving(checkpoint) as (process, url), concurrent.futures.ThreadPoolExecutor(12) as pool:
        post(f"{url}/fill_mask", {"texts": TEXTS[:1]})
        asked = [pool.submit(post, f"{url}/fill_mask", {"texts": TEXTS * 4}) for _ in range(12)]
        deadline = time.monotonic() + 60
        while not any(
            future.done() for future in asked
        ):  # in the middle: some requests are answered, other requests wait
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        responses = [future.result() for future in asked]
        assert all(status == 200 and len(answer["results"]) == 4 * len(TEXTS) for status, answer in responses)
        assert process.wait(60) == 0 and "stopping" in process.stdout
        with pytest.raises(urllib.error.URLError):
            post(url, {})


@pytest.fixture
def ended(monkeypatch):
    """Runs a server of one path in this process until its handler has sent a signal; returns the response."""
    numbers, answers = (signal.SIGINT, signal.SIGTERM), queue.Queue()
    before = [signal.getsignal(number) for number in numbers]
    monkeypatch.setattr(serving_http, "print", lambda line, **_: answers.put(line), raising=False)

    def run(handler, grace):
        app = web.Application()
        app.router.add_post("/", handler)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            asked = pool.submit(lambda: post(answers.get(timeout=30).split()[-1], {}, timeout=30))
            serving_http.run(types.SimpleNamespace(app=lambda: app), "127.0.0.1", 0, grace)
            return asked.result()

    for number in numbers:
        # an error unless the server handles the signal
        signal.signal(number, lambda *_: asyncio.get_running_loop().stop())
    yield run
    for number, handler in zip(numbers, before):
        signal.signal(number, handler)


@pytest.mark.parametrize("system", ["posix", "windows"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_after_an_answer(ended, monkeypatch, number, system):
    def unknown(*_):
        raise NotImplementedError

    async def answer(request):
        os.kill(os.getpid(), number)
        return web.json_response("answered")

    if system == "windows":
        monkeypatch.setattr(asyncio.SelectorEventLoop, "add_signal_handler", unknown)
    assert ended(answer, 60) == (200, "answered")


def test_requests_longer_than_the_grace_period_are_disconnected(ended):
    async def hang(request):
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    with pytest.raises(http.client.RemoteDisconnected):
        ended(hang, 0.2)


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--checkpoint=missing", "missing"),
        ("--port=70000", "--port=70000"),
        ("--batch=0", "--batch=0: must be at least 1"),
        ("--max_waiting=9", "--max_waiting=9"),
        ("--grace=0", "--grace=0: must be at least 1"),
        ("--port={port}", "choose another address or port"),
    ],
)
def test_the_command_reports_mistakes_in_one_line(flag, message, checkpoint, server, tmp_path):
    flag = flag.format(port=server.rsplit(":", 1)[1])
    done = command("serve", f"--checkpoint={checkpoint}", flag, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("error: ") and message in line


# Checkpoints with other heads, each with a server in this process.

QUESTION, CONTEXT = "the ship saw .", "a captain left the whale"
LIMITS = serving_http.Limits(texts=5, waiting=5)


@contextlib.contextmanager
def serving_here(server):
    """Runs a server in a thread; yields its address."""
    loop, runner = asyncio.new_event_loop(), web.AppRunner(server.app(), handler_cancellation=True)

    async def begin():
        return await serving_http.listen(runner, "127.0.0.1", 0)

    async def end():
        listener.close()
        await runner.cleanup()

    def run(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        listener = run(begin())
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        run(end())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """For each method, a tiny checkpoint with the head of the method, and the address of its server."""
    folder, addresses = tmp_path_factory.mktemp("learnt"), {}
    heads = {
        "classify": ("BertForSequenceClassification", "classifier", 3, ("sea", "court", "none")),
        "tag": ("BertForTokenClassification", "classifier", 3, TAGS),
        "answer": ("BertForQuestionAnswering", "spans", 2, ()),
        "predict": ("BertForMultipleChoice", "classifier", 1, ()),
    }
    for method, (architecture, layer, width, labels) in heads.items():
        source = made(architecture, layer, width).source
        (folder / method).mkdir()
        source_fields = source.config, source.params, source.tokenizer, architecture, huggingface.Metadata(labels)
        huggingface.write(folder / method, *source_fields)
    source, settings = made("SentenceTransformer").source, experiments.load("embed")
    (folder / "embed").mkdir()
    source_fields = source.config, source.params, source.tokenizer, settings, 32, "BertModel"
    sentence_transformers.write(folder / "embed", *source_fields)
    with contextlib.ExitStack() as stack:
        for method in ("fill_mask", *heads, "embed"):
            model = bertjax.load(GOLDEN if method == "fill_mask" else folder / method)
            addresses[method] = model, stack.enter_context(serving_here(serving_http.Server(model, LIMITS)))
        yield addresses


def said_of(method, model):
    """Returns the request of a method, and the result of the library."""
    texts = [QUESTION, CONTEXT, "the captain saw the ship ."]
    if method == "fill_mask":
        filled = [(each.text, each.masks) for each in model.fill_mask(TEXTS[:4], top_k=3)]
        masks = [[[dict(word=word, probability=p) for word, p in mask] for mask in masks] for _, masks in filled]
        return {"texts": TEXTS[:4], "top_k": 3}, [dict(text=text, masks=x) for (text, _), x in zip(filled, masks)]
    if method == "classify":
        pair = (QUESTION, CONTEXT)  # the library has no lists of texts for this method
        return {"texts": [texts[0], pair, texts[1]]}, [model.classify([each])[0] for each in (texts[0], pair, texts[1])]
    if method == "tag":
        return {"texts": texts}, model.tag(texts)
    if method == "predict":  # a task without a method of the server
        choices = [(QUESTION, *texts[:2]), (CONTEXT, *texts)]
        return {"texts": choices}, [model.predict([choice])[0] for choice in choices]
    if method == "answer":
        pairs = [(QUESTION, CONTEXT), (CONTEXT, QUESTION)]
        return {"questions": [dict(question=q, context=c) for q, c in pairs]}, [model.answer(*pair) for pair in pairs]
    return {"texts": texts, "prompt": "whale "}, model.embed(texts, prompt="whale ").tolist()


METHODS = ["classify", "tag", "answer", "predict", "embed"]


@pytest.mark.parametrize("method", ["fill_mask", "embed", *map(slow_case, METHODS[:-1])])
def test_server_answers_equal_the_library(learnt, method):
    model, url = learnt[method]
    asked, expected = said_of(method, model)
    status, response = post(f"{url}/{method}", asked)
    assert status == 200 and response.keys() == {"results"}

    def compare(one, other):
        assert one == (pytest.approx(other, rel=1e-3, abs=1e-5) if isinstance(other, float) else other)

    jax.tree.map(compare, response["results"], json.loads(json.dumps(expected)))
    none = {key: [] if isinstance(x, list) else x for key, x in asked.items()}
    assert post(f"{url}/{method}", none) == (200, {"results": []})
    assert f'bertjax_requests_total{{path="/{method}",status="200"}} 2.0' in metrics_of(url)
    with urllib.request.urlopen(f"{url}/health") as answer:
        health = json.load(answer)
    methods, limits = list(dict.fromkeys([method, "embed"])), dict(texts=5, characters=100_000, batch=32, waiting=5)
    assert health == {"status": "ok", "checkpoint": model.path, "methods": methods, "limits": limits}


def test_non_finite_numbers_are_null_in_json():
    answer = {"null_odds": float("inf"), "probabilities": [0.5, float("nan")], "answer": "é"}
    assert json.loads(serving_http.encoded(answer)) == {"null_odds": None, "probabilities": [0.5, None], "answer": "é"}


class Panic(BaseException):
    """Like the `PanicException` of the tokenizers library."""


def test_an_error_that_is_no_exception_fails_one_request_and_the_server_stays(learnt, monkeypatch):
    class Echo(Method):
        def compute(self, model, inputs):
            if "panic" in inputs:
                raise Panic("panicked")
            if "exit" in inputs:
                raise SystemExit
            return inputs

    monkeypatch.setattr(serving_http, "request_methods_of", lambda model: {"echo": Echo})
    with serving_here(serving_http.Server(learnt["tag"][0], LIMITS)) as url:
        failed = (500, {"error": serving_http.FAULT})
        assert [post(f"{url}/echo", {"texts": [text]}) for text in ("panic", "a", "panic")] == [
            failed, (200, {"results": ["a"]}), failed,
        ]  # fmt: skip
        assert post(f"{url}/health", {})[0] == 405 and urllib.request.urlopen(f"{url}/health").status == 200
        for text in ("exit", "a"):  # the thread has ended
            assert post(f"{url}/echo", {"texts": [text]}) == (500, {"error": serving_http.ENDED})
        with pytest.raises(urllib.error.HTTPError) as unhealthy:
            urllib.request.urlopen(f"{url}/health")
        assert unhealthy.value.code == 503 and json.load(unhealthy.value)["status"] == "failed"


def test_each_ending_of_a_sentence_counts_with_the_sentence(learnt):
    url = learnt["predict"][1] + "/predict"
    status, answer = post(url, {"texts": [["a", "b", "c", "d"], ["a", "b", "c", "d"]]})
    assert status == 413 and answer["error"] == "6 pairs of texts: a request may have at most 5"
    status, answer = post(url, {"texts": [["a" * 40_000, "b", "c", "d"]]})
    assert status == 413 and answer["error"] == "120,003 characters: a request may have at most 100,000"
    status, answer = post(url, {"texts": "a"})
    assert status == 400 and "texts[0] = ['a']: this checkpoint expects \"sentence ||| ending" in answer["error"]


@pytest.mark.parametrize(
    "method, content, message",
    [
        ("classify", {"texts": ["a", ["a", " "]]}, "texts[1] = ['a', ' ']: this checkpoint expects"),
        ("classify", {"texts": ["a", ["a", "b", "c"]]}, "texts[1] = ['a', 'b', 'c']: this checkpoint expects"),
        ("tag", {"texts": ["a", ""]}, "texts[1] = ['']: this checkpoint expects"),
        ("answer", {"questions": [{"question": "a", "context": " "}]}, "questions[0].context = ' ': must not be empty"),
    ],
)
def test_a_wrong_input_is_refused_with_its_number(learnt, method, content, message):
    status, answer = post(f"{learnt[method][1]}/{method}", content)
    assert status == 400 and message in answer["error"]


def test_each_choice_of_pooled_states_is_compiled_once(learnt, monkeypatch):
    apply_model, traced = predictor.apply_model, []
    monkeypatch.setattr(predictor, "apply_model", lambda *inputs: traced.append(inputs) or apply_model(*inputs))
    choices = [
        {"pool": pool, "layers": layers} for pool in POOLS for layers in ("embeddings", "last", "sum_all")
    ]  # more than 8
    with serving_here(serving_http.Server(bertjax.load(GOLDEN), LIMITS)) as url:
        for more in [*choices, *choices]:
            assert post(f"{url}/embed", {"texts": "the whale", **more})[0] == 200
    assert len(traced) == len(choices)


def test_rows_limit_the_inputs_that_are_computed_together():
    seen: list[list[str]] = []
    batches = Batches(lambda key, inputs: seen.append(inputs) or inputs, most=4, waiting=12)
    parts = batches.submit("a", ["x", "y", "z", "w", "v"], [1] * 5, [2, 1, 1, 2, 6])
    assert [(places, future.result(10)) for places, future in parts] == [
        ([0, 1, 2], ["x", "y", "z"]),
        ([3], ["w"]),
        ([4], ["v"]),
    ]
    with pytest.raises(Full):
        batches.submit("a", ["v"], [1], [13])
    batches.close()
    assert batches.count == 0 and seen == [["x", "y", "z"], ["w"], ["v"]]


def test_inputs_of_canceled_requests_leave_the_queue():
    began, hold, seen = threading.Event(), threading.Event(), []

    def compute(key, inputs):
        began.set()
        hold.wait(60)
        seen.extend(inputs)
        return inputs

    batches = Batches(compute, most=4, waiting=4)
    first = batches.submit("a", ["first"], [5])[0][1]
    assert began.wait(60)
    left = batches.submit("a", [*"xyzw"], [1] * 4)[0][1]
    with pytest.raises(Full):
        batches.submit("a", ["v"], [1])
    assert left.cancel() and not first.cancel() and batches.count == 0
    kept = batches.submit("a", [*"stuv"], [1] * 4)[0][1]
    hold.set()
    assert first.result(60) == ["first"] and kept.result(60) == [*"stuv"]
    batches.close()
    assert batches.count == 0 and seen == ["first", *"stuv"]


@pytest.fixture
def held(monkeypatch):
    """Makes all servers answer `/echo` only after an event; returns the events (a request has begun, go on)."""
    began, hold = threading.Event(), threading.Event()

    class Echo(Method):
        def compute(self, model, inputs):
            began.set()
            hold.wait(60)
            return inputs

    monkeypatch.setattr(serving_http, "request_methods_of", lambda model: {"echo": Echo})
    return began, hold


def wait_for(url, line):
    """Waits until the metrics of a server have a line."""
    deadline = time.monotonic() + 60
    while line not in metrics_of(url):
        assert time.monotonic() < deadline


def test_a_full_queue_refuses_requests_and_answers_waiting_requests(learnt, held):
    began, hold = held
    server = serving_http.Server(learnt["tag"][0], LIMITS._replace(waiting=4))
    with serving_here(server) as url, concurrent.futures.ThreadPoolExecutor(2) as pool:
        try:
            first = pool.submit(post, f"{url}/echo", {"texts": ["now"]})
            assert began.wait(60)
            waiting = pool.submit(post, f"{url}/echo", {"texts": [*"abcd"]})
            wait_for(url, "bertjax_texts_waiting 4.0")
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"{url}/echo", b'{"texts": "e"}')
            assert refused.value.code == 503 and int(refused.value.headers["Retry-After"]) > 0
            assert json.load(refused.value) == {"error": "too many texts wait; try again later"}
        finally:
            hold.set()
        assert first.result() == (200, {"results": ["now"]})
        assert waiting.result() == (200, {"results": [*"abcd"]})


def test_texts_of_a_client_that_has_gone_wait_no_longer(learnt, held):
    began, hold = held
    with (
        serving_here(serving_http.Server(learnt["tag"][0], LIMITS)) as url,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        try:
            first = pool.submit(post, f"{url}/echo", {"texts": ["now"]})
            assert began.wait(60)
            client = http.client.HTTPConnection(url.removeprefix("http://"))
            client.request("POST", "/echo", json.dumps({"texts": [*"abcd"]}))
            wait_for(url, "bertjax_texts_waiting 4.0")
            client.close()
            wait_for(url, "bertjax_texts_waiting 0.0")
        finally:
            hold.set()
        assert first.result() == (200, {"results": ["now"]})


def test_inputs_of_similar_length_are_batched_and_answered_separately():
    seen, hold = [], threading.Event()

    def compute(options, inputs):
        hold.wait(10)
        seen.append((options, list(inputs)))
        if "bad" in inputs:
            raise ValueError("bad")
        return [f"{options} {value}" for value in inputs]

    batches = Batches(compute, most=4, waiting=12)
    first = batches.submit("a", ["now"], [3])  # keeps the server busy
    time.sleep(0.1)
    wanted = batches.submit("a", ["x" * 200, "y", "z" * 199, "w"], [200, 1, 199, 1])
    short_requests = [batches.submit("a", [value], [len(value)]) for value in ("v", "bad", "u")]
    left = batches.submit("b", ["y"], [1])
    with pytest.raises(Full):
        batches.submit("a", ["t"] * 5, [1] * 5)
    hold.set()
    results = [None] * 4
    for places, future in wanted:
        for place, result in zip(places, future.result(10)):
            results[place] = result
    assert results == ["a " + "x" * 200, "a y", "a " + "z" * 199, "a w"]
    assert [parts[0][1].result(10) for parts in (first, short_requests[0], short_requests[2], left)] == [
        ["a now"], ["a v"], ["a u"], ["b y"],
    ]  # fmt: skip
    with pytest.raises(ValueError, match="bad"):
        short_requests[1][0][1].result(10)
    batches.close()
    assert batches.count == 0 and not batches._thread.is_alive()
    sizes = [len(inputs) for _, inputs in seen]
    assert max(sizes) <= 4
    assert ("a", ["z" * 199, "x" * 200]) in seen  # separate from the short inputs
    with pytest.raises(Full):
        batches.submit("a", ["late"], [4])
