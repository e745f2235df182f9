"""The server: what each path takes and gives, and how it refuses."""

import asyncio
import collections
import json
import math
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import prometheus_client
from aiohttp import web

from bertjax.common import surrogates
from bertjax.common.errors import UserError
from bertjax.library import Model
from bertjax.serving import page
from bertjax.serving.batches import Batches, Full

MOST = 10_000  # the largest value of an option
MOST_WORDS = 100  # the largest top_k


class Limits(NamedTuple):
    """What a request may have."""

    texts: int = 256
    characters: int = 100_000  # in all texts together
    batch: int = 32  # texts that are computed together, with those of other requests
    waiting: int = 4096  # texts that may wait for others


class Asked(NamedTuple):
    """What a request asks for: inputs, their lengths in characters, and the options that all of them have."""

    inputs: list
    sizes: list[int]
    options: tuple[tuple[str, Any], ...] = ()


class Method(NamedTuple):
    """What a path does.

    Attributes:
      options: the fields beside the inputs, with their types.
      field: that of the inputs.
      read: one of them, as it stands in the request -> the input, or None for what is none.
      compute: (inputs, options) -> a result for each, which JSON can hold.
    """

    field: str
    read: Callable[[Any], Any]
    options: dict[str, type]
    compute: Callable[..., list]


def methods_of(model: Model) -> dict[str, Method]:
    """Returns what a checkpoint can do, by the names of the paths."""

    def filled(texts, top_k: int = 5):
        if top_k > MOST_WORDS:
            raise UserError(f"top_k = {top_k}: must be at most {MOST_WORDS}")
        return [
            {"text": f.text, "masks": [[{"word": w, "probability": p} for w, p in mask] for mask in f.masks]}
            for f in model.fill_mask(texts, top_k)
        ]

    def classified(texts):
        places = collections.defaultdict(list)  # by the number of parts, which the library takes to be the same
        for place, text in enumerate(texts):
            places[1 if isinstance(text, str) else len(text)].append(place)
        found = {}
        for some in places.values():
            found |= zip(some, model.classify([texts[place] for place in some]))
        return [found[place] for place in range(len(texts))]

    def embedded(texts, **options):
        return [row.tolist() for row in model.embed(texts, **options)]

    pooled = {"prompt": str, "width": int, "pool": str, "layers": str}
    every = {
        "fill_mask": Method("texts", _text, {"top_k": int}, filled),
        "classify": Method("texts", _text_or_pair, {}, classified),
        "tag": Method("texts", _text, {}, model.tag),
        "answer": Method("questions", _question, {}, model.predict),
        "embed": Method("texts", _text, pooled, embedded),
    }
    can = {*model.methods, "embed"}
    return {name: method for name, method in every.items() if name in can}


def _text(given):
    return surrogates.replaced(given) if isinstance(given, str) else None


def _text_or_pair(given):
    if isinstance(given, list) and given and all(_text(part) is not None for part in given):
        return tuple(map(_text, given))
    return _text(given)


def _question(given):
    found = (given.get("question"), given.get("context")) if isinstance(given, dict) else ()
    found = tuple(map(_text, found))
    return found if len(found) == 2 and None not in found else None


class Refused(Exception):
    """A request that is answered with an error: its status, and what is wrong."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Server:
    """Answers requests about a checkpoint."""

    def __init__(self, model: Model, limits: Limits):
        self._model, self._limits, self._methods = model, limits, methods_of(model)
        self._registry = registry = prometheus_client.CollectorRegistry()
        self._requests = prometheus_client.Counter(
            "bertjax_requests", "Requests, by path and status.", ["path", "status"], registry=registry
        )
        self._seconds = prometheus_client.Histogram(
            "bertjax_request_seconds", "Seconds until an answer.", ["path"], registry=registry
        )
        self._texts = prometheus_client.Counter(
            "bertjax_texts", "Texts that were computed.", ["path"], registry=registry
        )
        self._together = prometheus_client.Histogram(
            "bertjax_batch_texts", "Texts computed together.", buckets=[1, 2, 4, 8, 16, 32, 64, 128], registry=registry
        )
        self._batches = Batches(self._compute, limits.batch, limits.waiting, self._together.observe)
        waiting = prometheus_client.Gauge("bertjax_texts_waiting", "Texts that wait.", registry=registry)
        waiting.set_function(lambda: self._batches.count)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=16 * self._limits.characters + (1 << 16), middlewares=[self._guarded])
        app.router.add_get("/", self._page)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/attention", self._attention)
        for name in self._methods:
            app.router.add_post(f"/{name}", self._answer)

        async def close(app):
            await asyncio.to_thread(self._batches.close)

        app.on_cleanup.append(close)
        return app

    @web.middleware
    async def _guarded(self, request: web.Request, handler):
        """Answers mistakes in JSON, and counts."""
        began, path = time.perf_counter(), request.path
        try:
            response = await handler(request)
        except Refused as refused:
            response = _error(refused.status, str(refused))
        except web.HTTPException as error:
            if error.status == 404:
                paths = ", ".join(f"POST /{name}" for name in [*self._methods, *["attention"] * self._has_attention])
                asked = request.rel_url.raw_path  # without line breaks
                response = _error(404, f"there is no {asked}; there are {paths}, GET /, /health and /metrics")
                path = "other"
            elif error.status == 413:
                response = _error(413, f"a request may have {self._limits.characters:,} characters of text")
            else:
                response = _error(error.status, error.reason)
        except Exception:
            traceback.print_exc()
            response = _error(500, "the server failed; its output says where")
        self._requests.labels(path, response.status).inc()
        self._seconds.labels(path).observe(time.perf_counter() - began)
        return response

    async def _page(self, request: web.Request) -> web.Response:
        del request
        content = page.of(self._model, list(self._methods), self._has_attention)
        return web.Response(text=content, content_type="text/html")

    async def _health(self, request: web.Request) -> web.Response:
        del request
        about = {"status": "ok", "checkpoint": self._model.path, "methods": list(self._methods)}
        return web.json_response(about | {"limits": self._limits._asdict()})

    async def _metrics(self, request: web.Request) -> web.Response:
        del request
        return web.Response(body=prometheus_client.generate_latest(self._registry), content_type="text/plain")

    async def _answer(self, request: web.Request) -> web.Response:
        name = request.path.removeprefix("/")
        asked = await self._read(request, self._methods[name])
        results = await self._results((name, asked.options), asked)
        self._texts.labels(request.path).inc(len(results))
        return await _json({"results": results})

    async def _results(self, what: tuple, asked: Asked) -> list:
        """Waits for the results of what is asked for. Raises `Refused`."""
        try:
            parts = self._batches.submit(what, asked.inputs, asked.sizes)
        except Full:
            raise Refused(503, "too many texts wait; try again") from None
        results = [None] * len(asked.inputs)
        try:
            for places, future in parts:
                for place, result in zip(places, await asyncio.wrap_future(future)):
                    results[place] = result
        except UserError as error:
            raise Refused(400, str(error)) from None
        finally:
            for _, future in parts:
                future.cancel()  # what has not begun, if one of them failed or the client is gone
        return results

    async def _attention(self, request: web.Request) -> web.Response:
        if not self._has_attention:
            raise Refused(400, f"{self._model.path} has no attention to show")
        asked = await self._read(request, Method("texts", _text, {}, list))
        if len(asked.inputs) != 1:
            raise Refused(400, "texts: one text, please")
        # Its text is a part of what is asked for, so that no other is computed with it.
        (found,) = await self._results(("attention", tuple(asked.inputs)), asked)
        return await _json(found)

    @property
    def _has_attention(self) -> bool:
        from bertjax.models import families
        from bertjax.models.family import ExposesAttention

        return isinstance(families.family_of(self._model.config), ExposesAttention)

    async def _read(self, request: web.Request, method: Method) -> Asked:
        """Reads a request. Raises `Refused`."""
        try:
            content = json.loads(await request.text())
        except (ValueError, LookupError, RecursionError):
            raise Refused(400, f'the body must be JSON, such as {{"{method.field}": ["..."]}}') from None
        if not isinstance(content, dict) or method.field not in content:
            raise Refused(400, f'the body must be a JSON object with "{method.field}"')
        if unknown := [name for name in content if name != method.field and name not in method.options]:
            known = ", ".join([method.field, *method.options])
            raise Refused(400, f"{unknown[0]!r}: there is no such field; there are {known}")
        for name, kind in method.options.items():
            if name in content and (not isinstance(content[name], kind) or isinstance(content[name], bool)):
                raise Refused(400, f"{name} = {content[name]!r}: must be of type {kind.__name__}")
            if kind is str and name in content:
                content[name] = surrogates.replaced(content[name])
            if kind is int and not 1 <= content.get(name, 1) <= MOST:
                raise Refused(400, f"{name} = {content[name]}: must be from 1 to {MOST:,}")
        given = content[method.field]
        given = given if isinstance(given, list) else [given]
        if len(given) > self._limits.texts:
            raise Refused(413, f"{len(given)} {method.field}: a request may have {self._limits.texts}")
        inputs = [method.read(each) for each in given]
        if None in inputs:
            raise Refused(400, f"{method.field}[{inputs.index(None)}]: is not of the right form")
        before = len(content.get("prompt", ""))  # every text
        sizes = [before + (len(each) if isinstance(each, str) else sum(map(len, each))) for each in inputs]
        if sum(sizes) > self._limits.characters:
            raise Refused(413, f"{sum(sizes):,} characters: a request may have {self._limits.characters:,}")
        return Asked(inputs, sizes, tuple((name, content[name]) for name in method.options if name in content))

    def _compute(self, what, inputs: list) -> list:
        name, options = what
        if name == "attention":
            return [page.attention(self._model, inputs[0])] * len(inputs)
        return self._methods[name].compute(inputs, **dict(options))


def _error(status: int, message: str) -> web.Response:
    headers = {"Retry-After": "1"} if status == 503 else {}
    return web.json_response({"error": message}, status=status, headers=headers)


async def _json(found) -> web.Response:
    """Writes what may be long in a thread, while others are answered."""
    return web.Response(text=await asyncio.to_thread(_dumped, found), content_type="application/json")


def _dumped(found) -> str:
    """Writes numbers that JSON does not have as null."""
    try:
        return json.dumps(found, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(found), ensure_ascii=False)


def _finite(found):
    if isinstance(found, dict):
        return {name: _finite(value) for name, value in found.items()}
    if isinstance(found, list | tuple):
        return [_finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def run(server: Server, host: str, port: int, grace: float) -> None:
    """Serves until SIGINT or SIGTERM, and then answers what it has accepted, as far as `grace` seconds suffice."""
    asyncio.run(_run(server.app(), host, port, grace))


async def _run(app: web.Application, host: str, port: int, grace: float) -> None:
    # It waits for so long twice: for requests, and then for those whose bodies it has ended.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=grace / 2, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise UserError(f"--host={host} --port={port}: {error.strerror or error}; choose others") from None
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, stopped.set)
        except NotImplementedError:  # on Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stopped.set))
    print(f"serving on http://{host or '0.0.0.0'}:{runner.addresses[0][1]}", flush=True)
    await stopped.wait()
    print(f"stopping: answering what has been accepted, for up to {grace} s", flush=True)
    await runner.cleanup()
