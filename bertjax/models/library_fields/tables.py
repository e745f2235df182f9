"""Fields of JSON files that other libraries write: config.json of transformers, modules of sentence-transformers, PEFT.

Each library has a table, `LIBRARY.json`, of the fields that the library obeys, with their defaults. The script
tests/golden/make_library_fields.py derives the tables from the config classes of the installed libraries.
"""

import functools
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from bertjax.common.errors import UserError
from bertjax.common.files import note


@functools.cache
def _table(library: str) -> dict[str, dict[str, Any]]:
    return json.loads((Path(__file__).parent / f"{library}.json").read_text())


def defaults_of(library: str, kind: str) -> dict[str, Any]:
    """Returns the fields that a library obeys in one kind of file, with their defaults.

    Args:
      library: `transformers`, `sentence_transformers` or `peft`.
      kind: a key of the table of this library, such as the model type `modernbert`. A kind that is in no table, such as
        the model type of a family of the user, has no fields.
    """
    return _table(library)["kinds"].get(kind, {})


def check_fields(
    path: epath.Path, fields: Mapping[str, Any], library: str, kind: str, read: Collection[str], remedy: str = ""
) -> None:
    """Checks that no field of a file is skipped in silence.

    A field is in one of three groups. Fields in `read` pass. A field that only the library obeys passes if its value is
    the default of the library. A field that the library does not obey either is named in a note, once for each file.

    Args:
      path: the file, for messages.
      fields: the content of the file.
      library: `transformers`, `sentence_transformers` or `peft`.
      kind: a key of the table of this library, such as the model type `modernbert`.
      read: names of the fields that bertjax obeys, and of fields that change no prediction.
      remedy: the end of the error message: how the user gets a file that is supported.

    Raises:
      UserError: if the library obeys a field and bertjax does not, and the value is not the default of the library.
    """
    defaults = defaults_of(library, kind)
    for name, value in fields.items():
        if name not in read and name in defaults and value != defaults[name]:
            end = f"; {remedy}" if remedy else ""
            raise UserError(f"{path}: {name} {value!r} is not supported; supported: {defaults[name]!r}{end}")
    if unknown := sorted(fields.keys() - defaults.keys() - set(read)):
        note(path, f"not read here, nor by {library}: {', '.join(unknown)}")
