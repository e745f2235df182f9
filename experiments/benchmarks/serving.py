"""A server under load: texts per second against other methods, and ten thousand good and bad requests.

Command:  python -m experiments.benchmarks.serving --model=FOLDER
          (a Hugging Face folder that fills masks, or a folder of sentence-transformers)
Measures: texts/s of 16 and of 128 tokens: --clients clients of `bertjax serve` with one text per request; the library
          with a list and with one text per call; transformers' pipeline in batches of 32 and with one text per call.
          Then --requests mixed requests (masks, embeddings, attention if the model has it, mistakes): the number of
          correct answers, and the server's memory before and after. For a folder of sentence-transformers: texts/s of
          POST /v1/embeddings with one text per request, of the library, and of SentenceTransformer.encode in batches
Needs:    for the comparison, pip install torch transformers sentence-transformers
Results:  RESULTS.md
"""

import argparse
import concurrent.futures
import functools
import http.client
import importlib.util
import json
import pathlib
import random
import re
import subprocess
import sys

from experiments.benchmarks.timing import in_turns, seconds_of, spread, table_row

TEXTS, BATCH = 512, 32
BAD = ("fill_mask", {"texts": "no mask"}, 400), ("fill_mask", {"text": 1}, 400), ("nothing", {}, 404)
BAD += ("fill_mask", {"texts": ["a [MASK]"] * 300}, 413), ("embed", {"texts": "a", "prompt": 1}, 400)
POOLED = {"pool": "mean", "layers": "last"}


def texts_of(tokens: int, first: str = "[MASK]") -> list[str]:
    """Returns texts of common words after the word `first`, `tokens` tokens long with [CLS] and [SEP]."""
    words, draw = "the man went to a house and it was there for you in all of his years".split(), random.Random(0)
    return [" ".join([first, *draw.choices(words, k=tokens - 3)]) for _ in range(TEXTS)]


class Client:
    """Sends requests over one connection."""

    def __init__(self, port: int):
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def __call__(self, path: str, content) -> tuple[int, dict]:
        self._connection.request("POST", f"/{path}", json.dumps(content))
        answer = self._connection.getresponse()
        return answer.status, json.load(answer)


def in_parallel(port: int, clients: int, requests: list) -> list:
    """Divides requests among `clients` clients, and returns the answers."""

    def work(number: int) -> list:
        client = Client(port)
        return [client(*request[:2]) for request in requests[number::clients]]

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        parts = list(pool.map(work, range(clients)))
    return [parts[number % clients][number // clients] for number in range(len(requests))]


def mixed(count: int, has_attention: bool) -> list:
    """Returns good and bad requests with the expected status of each; half of them fill masks."""
    draw, texts = random.Random(1), [*texts_of(16), *texts_of(128)[:64]]
    found = []
    for _ in range(count):
        some = draw.choices(texts, k=draw.randint(1, 4))
        kinds = [("fill_mask", {"texts": some}, 200), ("embed", {"texts": some} | POOLED, 200), draw.choice(BAD)]
        weights = [5, 2, 2]
        if has_attention:
            kinds.append(("attention", {"texts": draw.choice(texts)}, 200))
            weights.append(1)
        found += draw.choices(kinds, weights)
    return found


def is_right(request: tuple, answer: tuple[int, dict]) -> bool:
    (path, content, wanted), (status, found) = request, answer
    if status != wanted or status != 200:
        return status == wanted and found.keys() == {"error"}
    if path == "attention":
        return len(found["attention"][0][0]) == len(found["pieces"])
    return len(found["results"]) == len(content["texts"])


def resident(process: int) -> float:
    """Returns the resident memory of a process in MiB."""
    return int(re.search(r"VmRSS:\s+(\d+)", pathlib.Path(f"/proc/{process}/status").read_text())[1]) / 1024


def ways_to_fill_masks(model, folder: str, port: int, clients: int):
    """Yields names and functions that fill the masks of texts."""
    yield (
        f"server, {clients} clients",
        lambda texts: in_parallel(port, clients, [("fill_mask", {"texts": t}) for t in texts]),
    )
    yield "library, a list", lambda texts: model.fill_mask(texts)
    yield "library, one text per call", lambda texts: [model.fill_mask(text) for text in texts]
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        import transformers

        pipeline = transformers.pipeline("fill-mask", model=folder, tokenizer=folder)
        yield "transformers, batches", lambda texts: pipeline(texts, batch_size=BATCH)
        yield "transformers, one text per call", lambda texts: [pipeline(text) for text in texts]


def ways_to_embed(model, folder: str, port: int, clients: int):
    """Yields names and functions that embed texts."""

    def request(text: str) -> tuple[str, dict]:
        return "v1/embeddings", {"input": text, "encoding_format": "base64"}

    yield f"/v1/embeddings, {clients} clients", lambda texts: in_parallel(port, clients, list(map(request, texts)))
    yield "library, a list", lambda texts: model.embed(texts)
    if importlib.util.find_spec("sentence_transformers"):
        from sentence_transformers import SentenceTransformer

        encoder = SentenceTransformer(folder, device="cpu")
        batches = range(0, TEXTS, BATCH)
        yield (
            "SentenceTransformer.encode",
            lambda texts: [encoder.encode(texts[start : start + BATCH], batch_size=BATCH) for start in batches],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3, help="0: the mixed requests only")
    options = parser.parse_args()
    command = [sys.executable, "-m", "bertjax.serve", f"--checkpoint={options.model}", "--port=0", "--dtype=float32"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        port = int(server.stdout.readline().rsplit(":", 1)[1])
        import bertjax

        model = bertjax.load(options.model, dtype="float32")
        ways = ways_to_embed if model.makes_vectors else ways_to_fill_masks
        first = "the" if model.makes_vectors else "[MASK]"  # A tokenizer divides [MASK], except to fill masks.
        sides = dict(ways(model, options.model, port, options.clients)) if options.rounds else {}
        for tokens in (16, 128) if options.rounds else ():
            timed = {name: functools.partial(way, texts_of(tokens, first)) for name, way in sides.items()}
            for run in timed.values():
                run()  # compiles
            timed = {name: functools.partial(seconds_of, run) for name, run in timed.items()}
            for name, seconds in in_turns(timed, options.rounds).items():
                rates = [TEXTS / value for value in seconds]
                print(table_row([f"{tokens} tokens", name, spread(rates)]), flush=True)
        if model.makes_vectors:
            return
        requests = mixed(options.requests, has_attention=Client(port)("attention", {"texts": "a"})[0] == 200)
        in_parallel(port, options.clients, requests[: len(requests) // 10])  # compiles
        before = resident(server.pid)
        answers: list = []
        seconds = seconds_of(lambda: answers.extend(in_parallel(port, options.clients, requests)))
        right = sum(map(is_right, requests, answers))
        print(f"{len(requests):,} requests in {seconds:.0f} s, {right:,} answered correctly")
        print(f"memory of the server: {before:.0f} MiB before, {resident(server.pid):.0f} MiB after")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
