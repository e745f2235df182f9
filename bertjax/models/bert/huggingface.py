"""BERT in Hugging Face's folders: fields of config.json, names of tensors, classes of transformers."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from etils import epath

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig, fields_of
from bertjax.models import json_config
from bertjax.models.bert import gpt2
from bertjax.models.bert.tf1_names import PARTS, WORDS, check_variables, to_params, to_variables, variable_shapes
from bertjax.models.tensors import WRAPPERS, check_parts, untied
from bertjax.models.tensors import classifier_rows as rows_of_classifier

REQUIRED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings",
)  # fmt: skip
CLASSES = {"Bert": "BERT"}  # how the names of its classes begin, and how people write it
INPUTS = ("input_ids", "token_type_ids", "attention_mask")
SPECIAL_IDS = {"pad_token_id": "pad"}  # fields of config.json that are ids of special pieces

# Parts of each kind of class besides the encoder, as prefixes of Google's variables. A kind is how a class's name ends.
KINDS = {
    "Model": ("bert/pooler/",),
    "ForMaskedLM": ("cls/predictions/",),
    "ForNextSentencePrediction": ("bert/pooler/", "cls/seq_relationship/"),
    "ForPreTraining": ("bert/pooler/", "cls/predictions/", "cls/seq_relationship/"),
    "ForQuestionAnswering": ("cls/squad/",),
    "ForSequenceClassification": ("bert/pooler/", "output_"),
    "ForMultipleChoice": ("bert/pooler/", "output_"),
    "ForTokenClassification": ("output_",),
}
KINDS_WITHOUT_PAIRS = {kind: parts for kind, parts in KINDS.items() if "cls/seq_relationship/" not in parts}
ARCHITECTURES = tuple(f"Bert{kind}" for kind in KINDS)
HEADS = tuple(sorted({part for parts in KINDS.values() for part in parts}))
FINE_TUNED_HEADS = ("output_", "cls/squad/")
FINE_TUNED_NAMES = {
    "output_weights": "classifier.weight",
    "output_bias": "classifier.bias",
    "cls/squad/output_weights": "qa_outputs.weight",
    "cls/squad/output_bias": "qa_outputs.bias",
}
OUTPUT_BIAS = "cls/predictions/output_bias"
# Copies of the word embeddings and of `OUTPUT_BIAS`, which some files have.
DECODER = {"weight": "cls/predictions/decoder/kernel", "bias": "cls/predictions/decoder/bias"}

# Fields of config.json with the only value that is supported.
ONLY = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}

# The fields that Google's and Hugging Face's configs do not have.
OWN_FIELDS = (*fields_of(BertConfig, "form", "choice"), "attention")


def read_config(path: epath.Path, fields: Mapping) -> BertConfig:
    """Returns the config of a config.json with these fields. Raises `UserError` for a variant that we do not have."""
    if fields.get("model_type") == "gpt2":
        return dataclasses.replace(bert_config(path, gpt2.read_fields(path, fields)), **gpt2.FORM)
    names = json_config.field_names(BertConfig, OWN_FIELDS)
    known = json_config.read_fields(path, fields, "bert", names, ONLY, required=REQUIRED)
    return bert_config(path, known | {"hidden_act": json_config.activation(path, fields, "hidden_act")})


def bert_config(path: epath.Path, fields: Mapping) -> BertConfig:
    """Builds a `BertConfig` from a JSON object. Raises `UserError` if a field is missing or has an invalid value."""
    return json_config.build(path, BertConfig, fields, REQUIRED, OWN_FIELDS)


def huggingface_name(variable: str) -> str:
    """Maps Google's variable to its tensor name in transformers' classes with a head."""
    if variable in FINE_TUNED_NAMES:
        return FINE_TUNED_NAMES[variable]
    name = variable.replace("layer_", "layer.").replace("/", ".")
    for end, theirs in (
        ("_embeddings", "_embeddings.weight"),
        (".kernel", ".weight"),  # also transposed, see `is_transposed`
        (".gamma", ".weight"),
        (".beta", ".bias"),
        (".output_weights", ".weight"),
        (".output_bias", ".bias"),
    ):
        if name.endswith(end):
            return name.removesuffix(end) + theirs
    return name


def is_transposed(variable: str) -> bool:
    """True for dense kernels: Google stores `[inputs, outputs]`, PyTorch `[outputs, inputs]`."""
    return variable.endswith("/kernel")


def kind_of(architecture: str) -> str:
    """Returns the kind of a class, of any family."""
    return architecture[architecture.index("For") :] if "For" in architecture else "Model"


@dataclasses.dataclass(frozen=True)
class FolderLayout:
    """How folders hold the tensors of BERT, or of a family that has its modules under names of its own.

    Args:
      prefix: config -> how the names of its classes begin.
      kinds: as `KINDS`.
      names: {part of a tensor's name in BERT: what it is called}, replaced one after the other.
      names_in: such names of a kind of class, which are replaced first.
    """

    prefix: Callable[[BertConfig], str]
    kinds: Mapping[str, tuple[str, ...]]
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    names_in: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)

    @property
    def encoder(self) -> str:
        """How the names of the encoder's tensors begin, unless a folder holds nothing else."""
        return self.names.get("bert.", "bert.")

    def name_of(self, variable: str, kind: str) -> str:
        """Returns the name of Google's variable in the classes of a kind."""
        name = huggingface_name(variable)
        for berts, own in (*self.names_in.get(kind, {}).items(), *self.names.items()):
            name = name.replace(berts, own)
        return name

    def read_params(
        self, tensors: Iterable[tuple[str, np.ndarray]], fields: Mapping, config: BertConfig, source: str
    ) -> tuple[dict, list[str], str]:
        """Returns our params from named tensors, the names of ignored tensors, and why they predict no words.

        The ignored ones are not part of the family. A decoder of its own, which BERT has not, is left out with all that
        predicts words; otherwise the reason is "". Accepts encoders with and without their prefix, the prefixes
        of PyTorch's wrappers, LayerNorms with `gamma` and `beta`, weights in half precision, and redundant copies of
        the tied decoder. Raises `UserError` if tensors are missing or contradict each other.
        """
        names = (*variable_shapes(config), *FINE_TUNED_NAMES)
        known = {self.name_of(variable, kind): variable for kind in self.kinds for variable in names}
        decoder = {part: self.name_of(variable, "ForMaskedLM") for part, variable in DECODER.items()}
        parts, variables, ignored, stored = {name: part for part, name in decoder.items()}, {}, [], {}
        for name, tensor in tensors:
            plain = (
                WRAPPERS.sub("", name)
                .replace("LayerNorm.gamma", "LayerNorm.weight")
                .replace("LayerNorm.beta", "LayerNorm.bias")
            )
            variable = known.get(plain) or known.get(self.encoder + plain)
            if variable in variables:
                raise UserError(f"{source}: {name} occurs twice, under two names")
            if variable and tensor.dtype.kind in "iub":
                raise UserError(f"{source}: {name} is of type {tensor.dtype}; quantized weights are not supported")
            if variable:
                tensor = tensor.astype(np.float32)
                variables[variable] = tensor.T if is_transposed(variable) else tensor
            elif plain in parts:
                stored[parts[plain]] = tensor.astype(np.float32)
            elif not plain.endswith("embeddings.position_ids"):  # a constant: 0, 1, 2, ...
                ignored.append(name)
        if "bias" in stored:
            if fields.get("tie_word_embeddings") is False:  # Then transformers does not read the other bias.
                variables[OUTPUT_BIAS] = stored["bias"]
            variables.setdefault(OUTPUT_BIAS, stored["bias"])
            if not np.array_equal(stored["bias"], variables[OUTPUT_BIAS]):
                own = self.name_of(OUTPUT_BIAS, "ForMaskedLM")
                raise UserError(f"{source}: {decoder['bias']} differs from {own}; there is one bias")
        decoders, wordless = {decoder[part]: tensor for part, tensor in stored.items()}, ""
        left_out = [name for name in variables if name.startswith("cls/predictions/")]
        if (left_out or "weight" in stored) and WORDS in variables:
            wordless = untied(decoders, decoder["weight"], variables[WORDS], fields, source)
        if wordless:
            ignored += decoders.keys() & {decoder["weight"]}
            ignored += [self.name_of(variable, "ForMaskedLM") for variable in left_out]
            variables = {name: x for name, x in variables.items() if name not in left_out}
        check_variables(variables, config, source)
        return to_params(variables, config), ignored, wordless

    def choose_architecture(self, params: dict, config: BertConfig, stated: str = "") -> str:
        """Chooses the transformers class for these params: that of a fine-tuned head, or the one that keeps the most.

        `stated`: the class that the checkpoint states, of this family or of BERT. It decides between classes with the
        same fine-tuned head, but not otherwise: bert-base-uncased states `BertForMaskedLM` although it has all weights
        of `BertForPreTraining`.
        """
        variables, prefix = to_variables(params, config), self.prefix(config)
        present = {part for part in HEADS if any(name.startswith(part) for name in variables)}
        if present & set(self.kinds.get(kind_of(stated), ())) & set(FINE_TUNED_HEADS):
            return prefix + kind_of(stated)
        kept = {
            kind: (bool(set(FINE_TUNED_HEADS) & set(parts)), len(parts))
            for kind, parts in self.kinds.items()
            if present >= set(parts)
        }
        return prefix + max(kept, key=kept.get, default="Model")  # the first one in a tie

    def to_tensors(
        self, params: dict, config: BertConfig, architecture: str
    ) -> tuple[dict[str, np.ndarray], list[str]]:
        """Returns the tensors of a class of transformers, and the names of variables and parts that it does not have.

        Raises `UserError` if the class has parts that the params lack.
        """
        kind = kind_of(architecture)
        variables, wanted = to_variables(params, config), self.kinds[kind]
        needed = wanted if kind != "Model" else ()  # transformers accepts it without a pooler
        present = [part for part in needed if any(name.startswith(part) for name in variables)]
        parts = ([part.rstrip("/_") for part in each] for each in (needed, present))
        check_parts(architecture, *parts, self.choose_architecture(params, config))
        tensors, left_out = {}, sorted(params.keys() - PARTS)
        for variable, array in variables.items():
            if variable.startswith(HEADS) and not variable.startswith(wanted):
                left_out.append(variable)
            else:
                name = self.name_of(variable, kind)
                name = name.removeprefix(self.encoder) if kind == "Model" else name
                tensors[name] = np.ascontiguousarray(array.T if is_transposed(variable) else array)
        return tensors, left_out

    def classifier_rows(self, params: dict, architecture: str) -> int:
        """Returns the rows of a classifier whose labels config.json names; 0 if the class has none."""
        has_classifier = "output_" in self.kinds[kind_of(architecture)]
        return rows_of_classifier(params, architecture, ["classifier"] if has_classifier else [])


LAYOUT = FolderLayout(lambda config: "Bert", KINDS)
choose_architecture, to_tensors = LAYOUT.choose_architecture, LAYOUT.to_tensors
classifier_rows = LAYOUT.classifier_rows


def read_params(
    tensors: Iterable[tuple[str, np.ndarray]], fields: Mapping, config: BertConfig, source: str
) -> tuple[dict, list[str], str]:
    """As `FolderLayout.read_params`, also of a GPT-2."""
    if fields.get("model_type") == "gpt2":
        return *gpt2.to_params(dict(tensors), fields, config, source), ""
    return LAYOUT.read_params(tensors, fields, config, source)


def to_fields(config: BertConfig) -> dict:
    """Returns what config.json says of the encoder."""
    names = (name for name in dataclasses.asdict(config) if name not in OWN_FIELDS)
    fields = {name: getattr(config, name) for name in names}
    return {"model_type": "bert", **fields, "position_embedding_type": "absolute"}


def check_form(config: BertConfig) -> None:
    """Raises `UserError` if no class of transformers, and no checkpoint of Google's, has this form of BERT, or of a
    family whose config is made of BERT's."""
    for name in fields_of(BertConfig, "form", "choice"):
        if (value := getattr(config, name)) != getattr(type(config), name):
            raise UserError(f"model.{name} = {value!r}")
