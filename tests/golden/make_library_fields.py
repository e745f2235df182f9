"""Writes bertjax/models/library_fields/*.json: python tests/golden/make_library_fields.py [LIBRARY ...]

Reads the fields that transformers, sentence-transformers and PEFT obey, and their defaults, from the config classes of
the installed versions. Look at the difference before you commit it: each new field must be read, or stay refused.
"""

import ast
import dataclasses
import importlib
import importlib.metadata
import inspect
import json
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "bertjax/models/library_fields"

# Modules of transformers that read fields of config.json for all models.
SHARED = (
    "modeling_utils", "modeling_layers", "masking_utils", "utils.output_capturing", "pipelines.base",
    "pipelines.text_classification", "models.auto.auto_factory", "models.auto.tokenization_auto",
)  # fmt: skip
# Fields that transformers reads under names that its code does not contain as constants.
BESIDE = {"auto_map": None, "configuration_files": None, "model_type": None, "quantization_config": None}
# The classes of tokenizers that bertjax reads, and the module that chooses between classes.
TOKENIZERS = (
    "TokenizersBackend", "PythonBackend", "BertTokenizer", "RobertaTokenizer", "GPT2Tokenizer", "XLMRobertaTokenizer",
    "CamembertTokenizer", "XLNetTokenizer", "DebertaV2Tokenizer", "MPNetTokenizer", "AlbertTokenizer",
)  # fmt: skip


def transformers_fields() -> dict[str, dict]:
    """Returns {model type, or `tokenizer`: {field: default}} of transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from bertjax.models import families

    # transformers has no config class for a family whose published folder contains Python code.
    kinds = {kind: _config_fields(kind) for kind in families.by_model_type() if kind in CONFIG_MAPPING}
    return kinds | {"tokenizer": _tokenizer_fields()}


def _config_fields(model_type: str) -> dict[str, Any]:
    """Returns the fields of config.json that transformers obeys for a model type, with their defaults."""
    from transformers import GenerationConfig, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    configuration = inspect.getmodule(config_class)
    modeling = importlib.import_module(configuration.__name__.replace(".configuration_", ".modeling_"))
    fields = dict(GenerationConfig._get_default_generation_params())
    for name in SHARED:
        fields |= _fields_of_configs(importlib.import_module(f"transformers.{name}"))
    fields |= BESIDE | _fields_of_configs(modeling)
    for read_class in (config_class, PreTrainedConfig):  # `__post_init__` takes fields that are not declared
        for method in ("__post_init__", "convert_rope_params_to_dict", "standardize_rope_params"):
            if method.startswith("__") or hasattr(config_class, "rope_parameters"):
                fields |= _keywords(inspect.getsource(getattr(read_class, method)))
    for name, value in inspect.getmembers(config_class):  # assigning such a field sets another one
        if isinstance(value, property) and value.fset and not name.startswith("__"):
            fields.setdefault(name, None)
    declared = {field.name: _plain(field.default) for field in dataclasses.fields(config_class)}
    aliases = {name: declared[field] for name, field in config_class.attribute_map.items()}
    return {name: _plain(value) for name, value in (fields | aliases | declared).items()}


def _tokenizer_fields() -> dict[str, Any]:
    """Returns the fields of tokenizer_config.json that transformers obeys, with their defaults."""
    import transformers

    fields: dict[str, Any] = {}
    for name in TOKENIZERS:
        for read_class in getattr(transformers, name).__mro__:
            if read_class is not object and "__init__" in vars(read_class):
                source = inspect.getsource(read_class.__init__)
                parameters = inspect.signature(read_class.__init__).parameters.values()
                taken = {
                    parameter.name: parameter.default
                    for parameter in parameters
                    if parameter.kind != parameter.VAR_KEYWORD
                }
                fields = _keywords(source) | {key: _plain(value) for key, value in taken.items()} | fields
        fields |= dict.fromkeys(getattr(transformers, name).SPECIAL_TOKENS_ATTRIBUTES)
    for method in ("_from_pretrained", "from_pretrained"):
        fields = _keywords(inspect.getsource(getattr(transformers.TokenizersBackend, method))) | fields
    fields |= dict.fromkeys(("auto_map", "tokenizer_class"))  # models.auto.tokenization_auto reads them
    return {name: value for name, value in fields.items() if name != "self"}


def _plain(value: Any) -> Any:
    """Returns a value as JSON has it; None for a default that JSON does not have."""
    return value if isinstance(value, (str, int, float, bool, list, dict)) else None


def _fields_of_configs(module) -> dict[str, Any]:
    """Returns the fields that `getattr` and `hasattr` read from a config in a module, with their defaults."""
    fields: dict[str, Any] = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        match node:
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[owner, ast.Constant(value=str(name)), *rest]):
                if _is_config(owner):
                    default = rest[0].value if rest and isinstance(rest[0], ast.Constant) else None
                    fields[name] = fields.get(name, default)
    return fields


def _is_config(node: ast.expr) -> bool:
    """Whether an expression is a config, such as `config`, `self.config` and `effective_config`."""
    text = ast.unparse(node).removesuffix(".get_text_config()")
    return text.endswith("config") and "generation" not in text


def _keywords(source: str) -> dict[str, Any]:
    """Returns the keyword arguments that a function takes out of `kwargs`, with their defaults."""
    return dict(_taken(ast.parse(textwrap.dedent(source))))


def _taken(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="get" | "pop" | "setdefault"),
                args=[ast.Constant(value=str(field)), *rest],
            ) if name.endswith("kwargs"):
                yield field, rest[0].value if rest and isinstance(rest[0], ast.Constant) else None


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
        arguments = {"model_type": model.model_type, "prompts": {}}
        arguments |= {"similarity_fn_name": "cosine"} if "similarity_fn_name" in fields else {}
        found[model.model_type] = defaults(model.__init__, fields) | arguments
    entries = names_in(readers, "module_config")
    found["modules"] = {name: [] if name == "kwargs" else None for name in entries}
    without_file = {"self", "model_name_or_path", "backend"}  # arguments that no file has
    old = {"model_args", "tokenizer_args", "config_args"}  # names of version 5
    names = {*inspect.signature(Transformer.__init__).parameters, *Transformer.config_keys, *old} - without_file
    for task in ("feature-extraction", "sequence-classification"):
        modality, output = transformer.TRANSFORMER_TASK_DEFAULTS[task]
        arguments = {"transformer_task": task, "modality_config": modality, "module_output_name": output}
        found[task] = defaults(Transformer.__init__, names) | arguments
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
