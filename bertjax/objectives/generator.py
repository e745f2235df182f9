"""The generator of ELECTRA: a smaller masked language model, whose samples replace the masked tokens of the encoder.

The objective `replaced` detects the replaced tokens (Clark et al. 2020, section 2). Both objectives are trained
together: set `config.objective` to "50*replaced + generator".
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from bertjax.common.errors import UserError
from bertjax.config.limits import require
from bertjax.config.model_config import BertConfig, Compute, field
from bertjax.data.batch import RowSize
from bertjax.models import families
from bertjax.models.family import ProjectsEmbeddings
from bertjax.objectives.mlm import MaskedLM
from bertjax.objectives.objective import JointModel, Metrics
from bertjax.objectives.parsing import parse_objective
from bertjax.objectives.parts.words import WordMetrics

if TYPE_CHECKING:
    import flax.linen as nn
    import jax
    from ml_collections import ConfigDict

    from bertjax.objectives.encoded_batch import EncodedBatch

NAME = "generator"  # of the objective, and of the generator's parameters
# {field of the model config: the setting of `Generator` by which the field of the encoder is multiplied}
SETTING_OF_SIZE = {
    "num_attention_heads": "width",
    "hidden_size": "width",
    "intermediate_size": "width",
    "num_hidden_layers": "layers",
}
DISENTANGLED_IN_ALL_STAGES = (
    "with disentangled embeddings all stages must train the generator; add generator to the objective of the stage, or "
    "set objectives.generator.embeddings=shared"
)


@dataclasses.dataclass(frozen=True)
class Generator(MaskedLM, JointModel):
    """Predicts masked tokens with a smaller model, and replaces the masked tokens in the encoder's input by samples.

    Attributes:
      width: the ratio of the generator's to the encoder's attention heads, hidden size and intermediate size.
      layers: the ratio of the generator's to the encoder's number of layers.
      embeddings: how the generator shares the embeddings of the encoder, see `parts.generator.GeneratorModel`.
    """

    width: float = field(0.25, above=0, most=1)
    layers: float = field(1.0, above=0, most=1)
    embeddings: str = field("shared", choices=("shared", "apart", "disentangled"))

    fills_masks = False
    metrics = WordMetrics("masked words by the generator")

    def model_config(self, config: BertConfig) -> BertConfig:
        """Returns the config of the generator, from the config of the encoder.

        Raises:
          UserError: if a size would not be a whole number, or if the family of the encoder cannot share its embeddings
            with a narrower model.
        """
        names = {entry.name for entry in dataclasses.fields(config)}
        sizes: dict[str, Any] = {
            name: self._size(config, name, setting) for name, setting in SETTING_OF_SIZE.items() if name in names
        }
        generator, embedding_size = dataclasses.replace(config, **sizes), config.embedding_size
        if self.embeddings == "apart" or generator.embedding_size == embedding_size:
            return generator
        family = families.family_of(config)
        if not isinstance(family, ProjectsEmbeddings):
            raise UserError(
                f"config.objectives.generator.embeddings = {self.embeddings!r}: models with model.family = "
                f"{config.family!r} cannot share embeddings with a narrower generator; set apart, or width=1"
            )
        return family.with_embedding_size(generator, embedding_size)

    def _size(self, config: BertConfig, name: str, setting: str) -> int:
        """Returns a size of the generator: the field `name` of the encoder, multiplied by a setting."""
        ratio = getattr(self, setting)
        exact = ratio * getattr(config, name)
        size = round(exact)
        remedy = (
            f"the generator would have model.{name} = {exact:g}, which must be a whole number above 0; choose another "
            f"ratio to model.{name} = {getattr(config, name)}"
        )
        require(size > 0 and abs(exact - size) < 1e-2, f"objectives.generator.{setting}", ratio, remedy)
        return size

    def models(self, config: BertConfig) -> dict[str, BertConfig]:
        """Returns the config of the generator."""
        return {NAME: self.model_config(config)}

    def heads(self, config: BertConfig, compute: Compute) -> "dict[str, nn.Module]":
        """Returns the module that holds the parameters of the generator."""
        from bertjax.objectives.parts.generator import GeneratorModel

        return {NAME: GeneratorModel(self.model_config(config), compute, self.embeddings)}

    def rewrite(self, encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array") -> "EncodedBatch":
        """Replaces the masked tokens by samples of the generator, see `JointModel.rewrite`."""
        from bertjax.objectives.parts.generator import rewrite

        return rewrite(encoded, weights, keys)

    def loss(self, encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array") -> tuple["jax.Array", Metrics]:
        """Returns the cross-entropy and the accuracy of the generator, which `rewrite` has computed."""
        assert encoded.joint_loss is not None
        return encoded.joint_loss

    def export_params(self, params: dict) -> dict:
        """Returns an encoder and a generator that share no parameters."""
        from bertjax.objectives.parts.generator import separate_params

        if NAME not in params:
            return params
        encoder, generator = separate_params(params["bert"], params[NAME])
        return params | {"bert": encoder, NAME: generator}

    def import_params(self, params: dict) -> dict:
        """Returns an encoder and a generator that share embeddings as `embeddings` sets.

        Raises:
          UserError: if the checkpoint's generator and encoder have different embeddings, and `embeddings` is "shared".
        """
        from bertjax.objectives.parts.generator import share_params

        if NAME not in params:
            return params
        try:
            encoder, generator = share_params(params["bert"], params[NAME], self.embeddings)
        except ValueError as error:
            raise UserError(
                f"config.objectives.generator.embeddings = {self.embeddings!r}: the generator of init_checkpoint "
                f"has {error}"
            ) from None
        return params | {"bert": encoder, NAME: generator}

    def delta_target(self, path: tuple[str, ...]) -> tuple[str, ...] | None:
        """Returns the path of the encoder's embeddings for the `difference` of disentangled embeddings."""
        return ("bert", "embeddings", *path[2:]) if path[:2] == (NAME, "difference") else None

    def stage_omission_error(self) -> str:
        """Returns an error message for disentangled embeddings, which the encoder reads from the generator."""
        return DISENTANGLED_IN_ALL_STAGES if self.embeddings == "disentangled" else ""

    def flops(self, config: BertConfig, row: RowSize) -> int:
        """Returns the FLOPs of the generator."""
        generator = self.model_config(config)
        family = families.family_of(generator)
        words = family.word_head(generator).flops(generator, row.predictions)
        return family.forward_flops(generator, row.tokens) + words

    def validate(self, config: "ConfigDict") -> None:
        """Checks that the sum contains `replaced`, and that the family supports a model of the generator's sizes."""
        super().validate(config)
        names = [term.name for term in parse_objective(config)]
        remedy = "generator needs the objective replaced; set '50*replaced + generator'"
        require("replaced" in names, "objective", config.objective, remedy)
        self._validate_model(config)
        windows = config.eval.bits_windows
        require(
            not windows,
            "eval.bits_windows",
            windows,
            "an encoder that detects replaced tokens predicts no tokens; set 0",
        )

    def _validate_model(self, config: "ConfigDict") -> None:
        """Raises `UserError` if the family does not support a model of the generator's sizes."""
        model = families.config_of(config)
        generator, generator_config = self.model_config(model), config.copy_and_resolve_references().unlock()
        fields = vars(generator).items()
        sizes = {name: value for name, value in fields if name in generator_config.model and name != "family"}
        generator_config.model.update(sizes)
        try:
            families.family_of(model).validate(generator_config)
        except UserError as error:
            reason = str(error).removeprefix("config.")
            raise UserError(
                f"config.objectives.generator.width = {self.width}: the generator would have {reason}"
            ) from None


OBJECTIVE = Generator()
