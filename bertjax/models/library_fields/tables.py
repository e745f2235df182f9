"""Fields of JSON files that other libraries write: config.json of transformers, modules of sentence-transformers, PEFT.

The table `LIBRARY.json` contains the fields that the library reads, with their defaults. The script
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
    """Returns {field: default} of the fields that a library reads in one kind of file.

    Args:
      library: `transformers`, `sentence_transformers` or `peft`.
      kind: a key of the table of this library, such as the model type `modernbert`. A kind without an entry, such
        as the model type of a user's family, has no fields.
    """
    return _table(library)["kinds"].get(kind, {})


def check_fields(
    path: epath.Path, fields: Mapping[str, Any], library: str, kind: str, read: Collection[str], remedy: str = ""
) -> None:
    """Checks that bertjax does not ignore a field that the library reads.

    Fields in `read` are accepted. A field that only the library reads is accepted if its value is the default of the
    library. A field that the library does not read is listed in a note, which is printed once per file.

    Args:
      path: the file, for messages.
      fields: the content of the file.
      library: `transformers`, `sentence_transformers` or `peft`.
      kind: a key of the table of this library, such as the model type `modernbert`.
      read: names of the fields that bertjax reads, and of fields that do not affect predictions.
      remedy: the end of the error message: how to get a supported file.

    Raises:
      UserError: if the library reads a field that bertjax does not read, and the value is not the library's default.
    """
    defaults = defaults_of(library, kind)
    for name, value in fields.items():
        if name not in read and name in defaults and value != defaults[name]:
            end = f"; {remedy}" if remedy else ""
            raise UserError(f"{path}: {name} {value!r} is not supported; supported: {defaults[name]!r}{end}")
    if unknown := sorted(fields.keys() - defaults.keys() - set(read)):
        note(path, f"ignored fields, which {library} does not read either: {', '.join(unknown)}")
