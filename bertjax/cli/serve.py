"""Serves a checkpoint over HTTP.

    bertjax serve runs/mine

POST /METHOD with {"texts": [...]} (/answer with {"questions": [{"question": ..., "context": ...}]}) gives
{"results": [...]}. POST /v1/embeddings is for clients of OpenAI, /v1/rerank and /v2/rerank for clients of Jina and
Cohere, and /embed, /rerank and /predict with {"inputs": ...} for clients of text-embeddings-inference. GET / is a page
for trying the server, /health lists the methods of the checkpoint, and /metrics is for Prometheus. Waiting requests are
computed together. SIGTERM and Ctrl-C end the server after the accepted requests are answered, or after --grace seconds.
If the environment variable BERTJAX_API_KEY is set, all requests but GET /health need the header "Authorization: Bearer
KEY". The server does not encrypt connections: put a proxy in front of the port. Needs the extra serve.
"""

from absl import flags

from bertjax.cli.app import run_command, start_reading
from bertjax.cli.flags import define_checkpoint_flag, define_dtype_flag, group_flags, refuse_arguments
from bertjax.common.errors import UserError

_CHECKPOINT = define_checkpoint_flag()
_HOST = flags.DEFINE_string("host", "127.0.0.1", "The address to listen on; 0.0.0.0 listens on all addresses.")
_PORT = flags.DEFINE_integer("port", 8000, "The port; 0 chooses a free port.")
_DTYPE = define_dtype_flag()
_BATCH = flags.DEFINE_integer("batch", 32, "The largest number of texts of a batch.")
_MOST_TEXTS = flags.DEFINE_integer("max_texts", 256, "The largest number of texts of a request.")
_MOST_CHARACTERS = flags.DEFINE_integer("max_characters", 100_000, "The largest number of characters of a request.")
_MOST_WAITING = flags.DEFINE_integer(
    "max_waiting", 4096, "The largest number of waiting texts; further requests get status 503."
)
_GRACE = flags.DEFINE_integer("grace", 60, "Seconds for accepted requests after a signal ends the server.")
group_flags("Limits", _BATCH, _MOST_TEXTS, _MOST_CHARACTERS, _MOST_WAITING, _GRACE)


def main(arguments: list[str]) -> None:
    """Serves until a signal ends the server."""
    refuse_arguments(arguments, "settings are given as --name=value")
    _check_flags()
    try:
        from bertjax.serving import http
    except ModuleNotFoundError as error:
        if error.name not in ("aiohttp", "prometheus_client"):
            raise
        raise UserError(f"serving needs {error.name}, which is not installed: pip install 'bertjax[serve]'") from None
    from bertjax.library.model import load
    from bertjax.serving.access import read_api_key

    key = read_api_key()
    start_reading(_CHECKPOINT.value)
    limits = http.Limits(_MOST_TEXTS.value, _MOST_CHARACTERS.value, _BATCH.value, _MOST_WAITING.value)
    server = http.Server(load(_CHECKPOINT.value, _DTYPE.value), limits, key)
    http.run(server, _HOST.value, _PORT.value, _GRACE.value)


def _check_flags() -> None:
    """Raises `UserError` for a number out of range."""
    for flag in (_BATCH, _MOST_TEXTS, _MOST_CHARACTERS, _MOST_WAITING, _GRACE):
        if flag.value < 1:
            raise UserError(f"--{flag.name}={flag.value}: must be at least 1")
    if _MOST_WAITING.value < _MOST_TEXTS.value:
        raise UserError(
            f"--max_waiting={_MOST_WAITING.value}: must be at least --max_texts={_MOST_TEXTS.value}, the texts of one "
            f"request; increase --max_waiting"
        )
    if not 0 <= _PORT.value < 1 << 16:
        raise UserError(f"--port={_PORT.value}: must be from 0 to 65535")


if __name__ == "__main__":
    run_command(main)
