"""Writes bertjax/library_fields/*.json: python tests/golden/make_library_fields.py [LIBRARY ...]

Reads the fields that transformers, sentence-transformers and PEFT obey, and their defaults, from the config classes of
the installed versions. Look at the difference before you commit it: each new field must be read, or stay refused.
"""

import importlib.metadata
import inspect
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "bertjax/library_fields"


def transformers_fields() -> dict[str, dict]:
    """Returns {model type, or `tokenizer`: {field: default}} of transformers."""
    return {}


def sentence_transformers_fields() -> dict[str, dict]:
    """Returns {kind of file: {field: default}} of sentence-transformers.

    `SentenceTransformer` and `CrossEncoder` are the model types of config_sentence_transformers.json, `modules` the
    entries of modules.json, `feature-extraction` and `sequence-classification` the tasks of sentence_bert_config.json,
    and `Pooling`, `Dense`, `Normalize` and `Dropout` the modules with a config.json.
    """
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from sentence_transformers.base.model import BaseModel
    from sentence_transformers.base.modules import Dense, Normalize, Transformer, transformer
    from sentence_transformers.sentence_transformer.modules import Dropout, Pooling, pooling

    def names_in(functions: list, name: str) -> set[str]:
        """Returns the keys that the source of some functions reads from a dict of this name."""
        source = "".join(map(inspect.getsource, functions))
        return set(re.findall(rf'\b{name}(?:\.get\(|\[)"(\w+)"', source))

    def defaults(function, names) -> dict:
        """Returns the defaults of parameters; None for a name that is no parameter, or has no default."""
        known = inspect.signature(function).parameters
        found = {name: known[name].default if name in known else None for name in names}
        return {name: None if value is inspect.Parameter.empty else value for name, value in found.items()}

    found = {}
    readers = [BaseModel._load_config_modules, BaseModel._parse_model_config]
    for model in (SentenceTransformer, CrossEncoder):
        fields = names_in([*readers, model._parse_model_config], "model_config")
        # The library itself reads an absent dict of prompts as an empty one, and compares by cosines unless told.
        told = {"model_type": model.model_type, "prompts": {}}
        told |= {"similarity_fn_name": "cosine"} if "similarity_fn_name" in fields else {}
        found[model.model_type] = defaults(model.__init__, fields) | told
    entries = names_in(readers, "module_config")
    found["modules"] = {name: [] if name == "kwargs" else None for name in entries}
    own = {"self", "model_name_or_path", "backend"}  # arguments that no file has
    old = {"model_args", "tokenizer_args", "config_args"}  # names of version 5
    names = {*inspect.signature(Transformer.__init__).parameters, *Transformer.config_keys, *old} - own
    for task in ("feature-extraction", "sequence-classification"):
        modality, output = transformer.TRANSFORMER_TASK_DEFAULTS[task]
        told = {"transformer_task": task, "modality_config": modality, "module_output_name": output}
        found[task] = defaults(Transformer.__init__, names) | told
    old = {*pooling._LEGACY_POOLING_MODE_KWARGS, *Pooling.config_key_renames}
    for module, more in ((Pooling, old), (Dense, set()), (Normalize, set()), (Dropout, set())):
        names = {*inspect.signature(module).parameters, *module.config_keys, *more}
        found[module.__name__] = defaults(module, names)
    found["Dense"]["activation_function"] = "torch.nn.modules.activation.Tanh"
    return found


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
