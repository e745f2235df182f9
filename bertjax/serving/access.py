"""The API key: if the environment variable `BERTJAX_API_KEY` is set, requests need this key."""

import hmac
import os

from bertjax.common.errors import UserError

VARIABLE = "BERTJAX_API_KEY"
SCHEME = "bearer"
MESSAGE = "the header Authorization must be 'Bearer KEY' with the API key of the server"


def read_api_key() -> str | None:
    """Returns the value of the variable; None if the variable is not set.

    Raises:
      UserError: if the value is empty or cannot be sent in a header. The message does not contain the value.
    """
    key = os.environ.get(VARIABLE)
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise UserError(
            f"{VARIABLE}: must be one or more printable ASCII characters without spaces; correct the key, or unset the "
            f"variable to serve without a key"
        )
    return key


def is_authorized(header: str, key: str | None) -> bool:
    """Returns whether the header Authorization contains the key. Without a key, all requests are authorized."""
    if key is None:
        return True
    scheme, _, token = header.partition(" ")
    is_equal = hmac.compare_digest(token.strip().encode(errors="surrogateescape"), key.encode())
    return is_equal and scheme.lower() == SCHEME
