"""The generator of ELECTRA: a smaller masked language model, whose samples replace the masked tokens of the encoder.

The objective `replaced` detects the replaced tokens (Clark et al. 2020, section 2). Both are trained together: write
"50*replaced + generator".
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from bertjax.common.errors import UserError
from bertjax.config.limits import require
from bertjax.config.model_config import BertConfig, Compute, field
from bertjax.data.batch import RowSize
from bertjax.models import families
from bertjax.models.family import ProjectsEmbeddings
from bertjax.objectives.mlm import MaskedWords
from bertjax.objectives.objective import JointModel, Metrics
from bertjax.objectives.parsing import parse_objective
from bertjax.objectives.parts.words import WordMetrics

if TYPE_CHECKING:
    import flax.linen as nn
    import jax
    from ml_collections import ConfigDict

    from bertjax.objectives.encoded_batch import EncodedBatch

NAME = "generator"  # among the parameters too
# {field of the generator's config: the setting that gives its share of the encoder's field}
SHARES = {
    "num_attention_heads": "width",
    "hidden_size": "width",
    "intermediate_size": "width",
    "num_hidden_layers": "layers",
}
DISENTANGLED = (
    "from whose embeddings those of the model differ; have it learn both, or set objectives.generator.embeddings=shared"
)


@dataclasses.dataclass(frozen=True)
class Generator(MaskedWords, JointModel):
    """Predicts masked tokens with a smaller model, and replaces the masked tokens of the encoder by samples.

    Attributes:
      width: the share of the encoder's attention heads, hidden size and intermediate size.
      layers: the share of the encoder's layers.
      embeddings: whether the generator shares the embeddings of the encoder, see `parts.generator.GeneratorModel`.
    """

    width: float = field(0.25, above=0, most=1)
    layers: float = field(1.0, above=0, most=1)
    embeddings: str = field("shared", choices=("shared", "apart", "disentangled"))

    fills_masks = False
    metrics = WordMetrics("masked words by the generator")

    def model_config(self, config: BertConfig) -> BertConfig:
        """Returns the config of the generator beside an encoder with this config.

        Raises:
          UserError: if a size would not be a whole number, or if the family of the encoder cannot share its embeddings
            with a narrower model.
        """
        names = {entry.name for entry in dataclasses.fields(config)}
        sizes: dict[str, Any] = {
            name: self._size(config, name, setting) for name, setting in SHARES.items() if name in names
        }
        generator, size = dataclasses.replace(config, **sizes), config.embedding_size
        if self.embeddings == "apart" or generator.embedding_size == size:
            return generator
        family = families.family_of(config)
        if not isinstance(family, ProjectsEmbeddings):
            raise UserError(
                f"config.objectives.generator.embeddings = {self.embeddings!r}: a model with model.family = "
                f"{config.family!r} shares no embeddings with a narrower one; set apart, or width=1"
            )
        return family.with_embedding_size(generator, size)

    def _size(self, config: BertConfig, name: str, setting: str) -> int:
        """Returns a size of the generator."""
        share = getattr(self, setting)
        exact = share * getattr(config, name)
        size = round(exact)
        remedy = (
            f"makes {exact:g} of model.{name} = {getattr(config, name)}; choose one that gives a whole number, above 0"
        )
        require(size > 0 and abs(exact - size) < 1e-2, f"objectives.generator.{setting}", share, remedy)
        return size

    def models(self, config: BertConfig) -> dict[str, BertConfig]:
        """Returns the config of the generator."""
        return {NAME: self.model_config(config)}

    def heads(self, config: BertConfig, compute: Compute) -> "dict[str, nn.Module]":
        """Returns the module that holds the parameters of the generator."""
        from bertjax.objectives.parts.generator import GeneratorModel

        return {NAME: GeneratorModel(self.model_config(config), compute, self.embeddings)}

    def rewrite(self, encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array") -> "EncodedBatch":
        """Returns the batch with sampled tokens in place of the masked ones, see `JointModel.rewrite`."""
        from bertjax.objectives.parts.generator import rewrite

        return rewrite(encoded, weights, keys)

    def loss(self, encoded: "EncodedBatch", weights: "jax.Array", keys: "jax.Array") -> tuple["jax.Array", Metrics]:
        """Returns the cross-entropy and the accuracy of the generator, which `rewrite` has computed."""
        assert encoded.joint_loss is not None
        return encoded.joint_loss

    def export_params(self, params: dict) -> dict:
        """Returns the encoder with the embeddings that it computes with, and all parameters of the generator."""
        from bertjax.objectives.parts.generator import separate_params

        if NAME not in params:
            return params
        encoder, generator = separate_params(params["bert"], params[NAME])
        return params | {"bert": encoder, NAME: generator}

    def import_params(self, params: dict) -> dict:
        """Returns the parameters with shared embeddings.

        Raises:
          UserError: if the generator of the checkpoint does not share the embeddings that the settings share.
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
        """Returns the embeddings of the encoder for the difference from them."""
        return ("bert", "embeddings", *path[2:]) if path[:2] == (NAME, "difference") else None

    def reason_for_all_stages(self) -> str:
        """Returns the reason for disentangled embeddings, which the encoder reads through the generator."""
        return DISENTANGLED if self.embeddings == "disentangled" else ""

    def flops(self, config: BertConfig, row: RowSize) -> int:
        """Returns the FLOPs of the generator."""
        from bertjax.nn.heads import word_flops

        generator = self.model_config(config)
        return families.family_of(generator).forward_flops(generator, row.tokens) + word_flops(
            generator, row.predictions
        )

    def validate(self, config: "ConfigDict") -> None:
        """Checks that `replaced` reads the samples, and that the family allows the generator."""
        super().validate(config)
        names = [term.name for term in parse_objective(config)]
        remedy = "nothing would read the words of the generator: write '50*replaced + generator'"
        require("replaced" in names, "objective", config.objective, remedy)
        self._validate_model(config)
        windows = config.eval.bits_windows
        require(not windows, "eval.bits_windows", windows, "a model that tells replaced words predicts none; set 0")

    def _validate_model(self, config: "ConfigDict") -> None:
        """Raises `UserError` for a generator that the family does not allow."""
        model = families.config_of(config)
        generator, narrow = self.model_config(model), config.copy_and_resolve_references().unlock()
        sizes = {name: value for name, value in vars(generator).items() if name in narrow.model and name != "family"}
        narrow.model.update(sizes)
        try:
            families.family_of(model).validate(narrow)
        except UserError as error:
            reason = str(error).removeprefix("config.")
            raise UserError(
                f"config.objectives.generator.width = {self.width}: the generator would have {reason}"
            ) from None


OBJECTIVE = Generator()
