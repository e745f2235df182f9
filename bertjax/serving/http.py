"""The HTTP server: reads requests, computes their results, and counts them. The module `routes` has the paths."""

import asyncio
import signal
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import prometheus_client
from aiohttp import web

from bertjax.common.errors import DamagedWeights, UserError
from bertjax.common.files import parse_texts
from bertjax.library.model import Model
from bertjax.serving import access
from bertjax.serving.batches import Batches, Ended, Full
from bertjax.serving.endpoint import Endpoint, Limits, Refused, Request
from bertjax.serving.methods import request_methods_of
from bertjax.serving.openai import OpenAI
from bertjax.serving.page import key_page, page_of
from bertjax.serving.routes import DESCRIPTIONS, computations_of, describe_paths

CHARSETS = {"utf-8", "utf8", "us-ascii", "ascii", "utf-16", "iso-8859-1", "latin-1"}  # of the bodies of requests
FAULT = "the server failed; the output of the server has the error"
NOT_HTTP = "the request is not valid, unencrypted HTTP/1.1, or a line of its head has more than 8,190 bytes"
ENDED = "the server cannot compute any more; the output of the server has the error; restart the server"


class Server:
    """Answers requests about a checkpoint.

    Args:
      model: the checkpoint.
      limits: the limits of requests.
      api_key: the key that all requests need, except `GET /health`; None for no key.
    """

    def __init__(self, model: Model, limits: Limits, api_key: str | None = None):
        self._model, self._limits, self._api_key = model, limits, api_key
        self._methods = request_methods_of(model)
        self._computations = computations_of(self._methods, model)
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
        for path in DESCRIPTIONS:
            app.router.add_get(path, self._describe)
        for path in self._computations:
            app.router.add_post(path, self._compute)

        async def close(app: web.Application) -> None:
            await asyncio.to_thread(self._batches.close)

        app.on_cleanup.append(close)
        return app

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Requires the API key, answers errors in JSON, and counts requests."""
        began, path = time.perf_counter(), request.path
        is_known = request.match_info.http_exception is None or request.match_info.http_exception.status != 404
        endpoint = self._endpoint_of(path)
        try:
            response = await (handler(request) if self._is_authorized(request) else self._refuse_key(request))
        except web.HTTPMethodNotAllowed as error:
            allowed = error.headers["Allow"]
            message = f"{request.method} {path}: the HTTP method must be {allowed}"
            response = _error(endpoint, error.status, message, {"Allow": allowed})
        except web.HTTPException as error:
            message = error.reason
            if error.status == 404:
                missing = request.rel_url.raw_path  # without line breaks
                message = f"the server has no path {missing}; {describe_paths(self._methods, self._model)}"
            elif error.status == 413:
                message = f"the request is too large; expected at most {self._limits.characters:,} characters of text"
            response = _error(endpoint, error.status, message)
        except Exception:
            traceback.print_exc()
            response = _error(endpoint, 500, FAULT)
        path = path if is_known else "other"
        self._requests.labels(path, response.status).inc()
        self._seconds.labels(path).observe(time.perf_counter() - began)
        return response

    def _endpoint_of(self, path: str) -> Endpoint:
        """Returns the endpoint that writes the errors of a path if the request has not chosen a protocol."""
        unknown = OpenAI() if path.startswith("/v1/") else Endpoint()
        return DESCRIPTIONS.get(path) or next(iter(self._computations.get(path, ())), unknown)

    def _is_authorized(self, request: web.Request) -> bool:
        """Returns whether a request has the API key, or does not need the key."""
        return request.path == "/health" or access.is_authorized(
            request.headers.get("Authorization", ""), self._api_key
        )

    async def _refuse_key(self, request: web.Request) -> web.Response:
        """Answers a request without the API key. A browser gets a page that asks for the key."""
        headers = {"WWW-Authenticate": "Bearer"}
        if request.path == "/" and request.method == "GET":
            return web.Response(status=401, text=key_page(), content_type="text/html", headers=headers)
        return _error(self._endpoint_of(request.path), 401, access.MESSAGE, headers)

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=page_of(self._model, list(self._methods)), content_type="text/html")

    async def _health(self, request: web.Request) -> web.Response:
        methods = [name for name, method in self._methods.items() if not method.takes_one]
        about = {"status": "ok", "checkpoint": self._model.path, "methods": methods, "limits": self._limits._asdict()}
        if not self._batches.is_working:
            return web.json_response({**about, "status": "failed", "error": ENDED}, status=503)
        return web.json_response(about)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=prometheus_client.generate_latest(self._registry), content_type="text/plain")

    async def _describe(self, request: web.Request) -> web.Response:
        return web.json_response(DESCRIPTIONS[request.path].describe(self._model, self._limits))

    async def _compute(self, request: web.Request) -> web.Response:
        """Computes the results of a request, in the protocol whose inputs the request contains."""
        protocols = self._computations[request.path]
        content, mistake = await read_json_of(request)
        fields = content if isinstance(content, dict) else {}
        computation = next((protocol for protocol in protocols if protocol.field in fields), protocols[0])
        try:
            computation.check(self._model)
            if content is None:
                raise Refused(400, f'{mistake}, such as {{"{computation.field}": ["..."]}}')
            if computation.field not in fields:
                names = dict.fromkeys(protocol.field for protocol in protocols if protocol.supports(self._model))
                wanted = " or ".join(f'"{name}"' for name in names or [computation.field])
                raise Refused(400, f"the body must be a JSON object with {wanted}")
            if (count := computation.count(fields[computation.field])) > self._limits.texts:
                message = f"{count} {computation.field}: a request may have at most {self._limits.texts}"
                raise Refused(413, message)
            parsed = computation.read(fields, self._model)
            results = await self._results(parsed)
            self._texts.labels(request.path).inc(len(results))
            # A thread encodes the answer. The JSON encoder still holds the interpreter lock while it runs.
            body = await asyncio.to_thread(lambda: encoded(computation.answer(parsed, results, self._model)))
        except Refused as refused:
            return _error(computation, refused.status, str(refused))
        except DamagedWeights as error:
            return _error(computation, 500, str(error))
        except UserError as error:
            return _error(computation, 400, str(error))
        except Ended:
            return _error(computation, 500, ENDED)
        except Exception:
            traceback.print_exc()
            return _error(computation, 500, FAULT)
        return web.Response(body=body, content_type="application/json")

    async def _results(self, request: Request) -> list[Any]:
        """Waits for the results of a request.

        Raises:
          Refused: if the request is too large, or if too many texts wait.
          UserError: if an input is wrong.
          Ended: if the thread that computes has ended because of a fault.
        """
        rows = list(map(request.method.rows, request.inputs))
        if sum(rows) > self._limits.texts:
            raise Refused(413, f"{sum(rows)} pairs of texts: a request may have at most {self._limits.texts}")
        sizes = list(map(request.method.size, request.inputs))
        if sum(sizes) > self._limits.characters:
            raise Refused(413, f"{sum(sizes):,} characters: a request may have at most {self._limits.characters:,}")
        request.method.check(self._model, request.inputs)
        try:
            parts = self._batches.submit(request.method, request.inputs, sizes, rows)
        except Full:
            raise Refused(503, "too many texts wait; try again later") from None
        results: list[Any] = [None] * len(request.inputs)
        try:
            for places, future in parts:
                computed = await asyncio.wrap_future(future)
                for place, result in zip(places, computed):
                    results[place] = result
        finally:
            for _, future in parts:
                future.cancel()  # the parts that have not begun, if a part failed or the client is gone
        return results


async def read_json_of(request: web.Request) -> tuple[Any, str]:
    """Returns the body of a request as JSON; or None, and the beginning of a message about the mistake in the body.

    The charset of the client is not looked up among the codecs of Python: a few of them need quadratic time.
    """
    charset = (request.charset or "utf-8").lower()
    if charset not in CHARSETS:
        return None, f"the header Content-Type has the charset {charset[:40]!r}; the body must be JSON in UTF-8"
    try:
        return parse_texts((await request.read()).decode(charset)), "the body must be JSON"
    except web.RequestPayloadError:  # for example, the body is not gzip
        return None, "the body cannot be read as its headers state; the body must be JSON without Content-Encoding"
    except ValueError:
        return None, "the body must be JSON"


def _error(endpoint: Endpoint, status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    headers = {"Retry-After": "1"} if status == 503 else headers
    status = endpoint.statuses.get(status, status)
    return web.json_response(endpoint.error(status, message), status=status, headers=headers)


def encoded(answer: Any) -> bytes:
    """Returns an answer as JSON. Numbers that JSON does not have become null, and NumPy numbers become numbers."""
    return msgspec.json.encode(answer, enc_hook=lambda number: number.item())


def run(server: Server, host: str, port: int, grace: float) -> None:
    """Serves until SIGINT or SIGTERM, and then answers the accepted requests for up to `grace` seconds."""
    asyncio.run(_run(server.app(), host, port, grace))


class Connection(web.RequestHandler):
    """A connection of a client.

    aiohttp prints bytes that are not HTTP, and answers with them as plain text. They can contain the API key.
    """

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answers a request that aiohttp cannot read or answer, without its bytes, and closes the connection."""
        if status >= 500 and exc is not None:
            traceback.print_exception(exc)
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the response has been sent")
        response = _error(Endpoint(), status, FAULT if status >= 500 else NOT_HTTP)
        response.force_close()
        return response


async def listen(runner: web.AppRunner, host: str, port: int) -> asyncio.Server:
    """Sets up an application, and accepts connections. The caller closes the result, and cleans up the runner."""
    await runner.setup()
    loop, server = asyncio.get_running_loop(), runner.server
    assert server is not None
    return await loop.create_server(
        lambda: Connection(server, loop=loop, access_log=None),  # type: ignore[arg-type]
        host,
        port,
        backlog=128,
    )


async def _run(app: web.Application, host: str, port: int, grace: float) -> None:
    # The runner waits twice for `shutdown_timeout`: for the requests, and then for the handlers that it has cancelled.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=grace / 2, handler_cancellation=True)
    try:
        listener = await listen(runner, host, port)
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
    print(f"serving on http://{host or '0.0.0.0'}:{listener.sockets[0].getsockname()[1]}", flush=True)
    await stopped.wait()
    print(f"stopping: answering the accepted requests, for up to {grace} s", flush=True)
    listener.close()
    await runner.cleanup()
