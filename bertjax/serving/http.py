"""The HTTP server: paths, requests, answers and errors."""

import asyncio
import dataclasses
import signal
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
import prometheus_client
from aiohttp import web

from bertjax.common.errors import UserError
from bertjax.common.files import parse_texts
from bertjax.library.model import Model
from bertjax.serving.batches import Batches, Full
from bertjax.serving.methods import METHODS, Method, request_methods_of
from bertjax.serving.page import page_of


class Limits(NamedTuple):
    """The limits of requests.

    Attributes:
      texts: texts of a request.
      characters: characters of all texts of a request.
      batch: texts of any requests that are computed together.
      waiting: texts of all requests that wait.
    """

    texts: int = 256
    characters: int = 100_000
    batch: int = 32
    waiting: int = 4096


class Request(NamedTuple):
    """The content of a request: the method with its options, the inputs, and their lengths in characters."""

    method: Method
    inputs: list[Any]
    sizes: list[int]


class Refused(Exception):
    """The error with which a request is answered: an HTTP status and a message."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Server:
    """Answers requests about a checkpoint."""

    def __init__(self, model: Model, limits: Limits):
        self._model, self._limits, self._methods = model, limits, request_methods_of(model)
        self._registry = registry = prometheus_client.CollectorRegistry()
        counter, histogram = prometheus_client.Counter, prometheus_client.Histogram
        labels = ["path", "status"]
        self._requests = counter("bertjax_requests", "Requests, by path and status.", labels, registry=registry)
        self._seconds = histogram("bertjax_request_seconds", "Seconds until an answer.", ["path"], registry=registry)
        self._texts = counter("bertjax_texts", "Texts that were computed.", ["path"], registry=registry)
        sizes = [1, 2, 4, 8, 16, 32, 64, 128]
        together = histogram("bertjax_batch_texts", "Texts computed together.", buckets=sizes, registry=registry)
        self._batches = Batches(
            lambda method, inputs: method.compute(model, inputs), limits.batch, limits.waiting, together.observe
        )
        waiting = prometheus_client.Gauge("bertjax_texts_waiting", "Texts that wait.", registry=registry)
        waiting.set_function(lambda: self._batches.count)

    def app(self) -> web.Application:
        """Returns the application, which closes the server at its end."""
        app = web.Application(client_max_size=16 * self._limits.characters + (1 << 16), middlewares=[self._guarded])
        app.router.add_get("/", self._page)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        for name in METHODS | self._methods:  # A known method that the checkpoint lacks is answered with an error.
            app.router.add_post(f"/{name}", self._answer)

        async def close(app: web.Application) -> None:
            await asyncio.to_thread(self._batches.close)

        app.on_cleanup.append(close)
        return app

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answers errors in JSON, and counts requests."""
        began, path = time.perf_counter(), request.path
        try:
            response = await handler(request)
        except Refused as refused:
            response = _error(refused.status, str(refused))
        except web.HTTPMethodNotAllowed as error:
            allowed = error.headers["Allow"]
            response = _error(error.status, f"{request.method} {path}: the HTTP method must be {allowed}")
            response.headers["Allow"] = allowed
        except web.HTTPException as error:
            message = error.reason
            if error.status == 404:
                missing = request.rel_url.raw_path  # without line breaks
                message, path = f"the server has no path {missing}; {self._paths()}", "other"
            elif error.status == 413:
                message = f"the request is too large; expected at most {self._limits.characters:,} characters of text"
            response = _error(error.status, message)
        except Exception:
            traceback.print_exc()
            response = _error(500, "the server failed; the output of the server has the error")
        self._requests.labels(path, response.status).inc()
        self._seconds.labels(path).observe(time.perf_counter() - began)
        return response

    def _paths(self) -> str:
        """Returns the paths that the server answers, for error messages."""
        return f"the paths are {', '.join(f'POST /{name}' for name in self._methods)}, GET /, /health and /metrics"

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=page_of(self._model, list(self._methods)), content_type="text/html")

    async def _health(self, request: web.Request) -> web.Response:
        methods = [name for name, method in self._methods.items() if not method.takes_one]
        about = {"status": "ok", "checkpoint": self._model.path, "methods": methods, "limits": self._limits._asdict()}
        return web.json_response(about)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=prometheus_client.generate_latest(self._registry), content_type="text/plain")

    async def _answer(self, request: web.Request) -> web.Response:
        name = request.path.removeprefix("/")
        if name not in self._methods:
            raise Refused(400, f"/{name}: the checkpoint {self._model.path} does not support {name}; {self._paths()}")
        parsed = await self._read(request, self._methods[name])
        results = await self._results(parsed)
        self._texts.labels(request.path).inc(len(results))
        answer = results[0] if parsed.method.takes_one else {"results": results}
        # Long answers are encoded in a thread, so that the server can answer other requests.
        return web.Response(body=await asyncio.to_thread(encoded, answer), content_type="application/json")

    async def _read(self, request: web.Request, kind: type[Method]) -> Request:
        """Reads a request. Raises `Refused` if it is invalid or too large."""
        field = kind.field
        try:
            content: Any = parse_texts(await request.text())
        except (ValueError, LookupError):
            raise Refused(400, f'the body must be JSON, such as {{"{field}": ["..."]}}') from None
        if not isinstance(content, dict) or field not in content:
            raise Refused(400, f'the body must be a JSON object with "{field}"')
        values = content.pop(field)
        values = values if isinstance(values, list) else [values]
        if len(values) > self._limits.texts:
            raise Refused(413, f"{len(values)} {field}: a request may have at most {self._limits.texts}")
        options = [option.name for option in dataclasses.fields(kind)]
        if unknown := [name for name in content if name not in options]:
            raise Refused(400, f"{unknown[0]!r}: unknown field; the fields are {', '.join([field, *options])}")
        inputs, method = _converted(values, kind.inputs_type, field), _converted(content, kind)
        if method.takes_one and len(inputs) != 1:
            raise Refused(400, f"{field}: must be one text")
        prompt = len(content.get("prompt") or "")  # comes before each text
        sizes = [prompt + _characters(value) for value in inputs]
        if sum(sizes) > self._limits.characters:
            raise Refused(413, f"{sum(sizes):,} characters: a request may have at most {self._limits.characters:,}")
        return Request(method, inputs, sizes)

    async def _results(self, request: Request) -> list[Any]:
        """Waits for the results of a request. Raises `Refused`."""
        try:
            parts = self._batches.submit(*request)
        except Full:
            raise Refused(503, "too many texts wait; try again later") from None
        results: list[Any] = [None] * len(request.inputs)
        try:
            for places, future in parts:
                computed = await asyncio.wrap_future(future)
                for place, result in zip(places, computed):
                    results[place] = result
        except UserError as error:
            raise Refused(400, str(error)) from None
        finally:
            for _, future in parts:
                future.cancel()  # the parts that have not begun, if a part failed or the client is gone
        return results


def _converted(value: Any, kind: Any, field: str = "") -> Any:
    """Converts JSON to a type. Raises `Refused` with the path of the wrong value, below `field`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at ")
        raise Refused(400, f"{field}{path.strip('`$.')}: {problem[0].lower()}{problem[1:]}") from None


def _characters(value: Any) -> int:
    """Returns the number of characters of a text, or of all texts of a tuple or dict."""
    if isinstance(value, str):
        return len(value)
    return sum(map(_characters, value.values() if isinstance(value, dict) else value))


def _error(status: int, message: str) -> web.Response:
    headers = {"Retry-After": "1"} if status == 503 else {}
    return web.json_response({"error": message}, status=status, headers=headers)


def encoded(answer: Any) -> bytes:
    """Returns an answer as JSON. Numbers that JSON does not have become null, and NumPy numbers become numbers."""
    return msgspec.json.encode(answer, enc_hook=lambda number: number.item())


def run(server: Server, host: str, port: int, grace: float) -> None:
    """Serves until SIGINT or SIGTERM, and then answers the accepted requests for up to `grace` seconds."""
    asyncio.run(_run(server.app(), host, port, grace))


async def _run(app: web.Application, host: str, port: int, grace: float) -> None:
    # The runner waits twice for `shutdown_timeout`: for the requests, and then for the handlers that it has cancelled.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=grace / 2, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise UserError(
            f"--host={host} --port={port}: {error.strerror or error}; choose another address or port"
        ) from None
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, stopped.set)
        except NotImplementedError:  # on Windows
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(stopped.set))
    print(f"serving on http://{host or '0.0.0.0'}:{runner.addresses[0][1]}", flush=True)
    await stopped.wait()
    print(f"stopping: answering the accepted requests, for up to {grace} s", flush=True)
    await runner.cleanup()
