"""ModernBERT: attention within windows, initial values, and the fields that fine-tuning accepts."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.cli.overrides import from_arguments
from bertjax.common.errors import UserError
from bertjax.config.model_config import Compute
from bertjax.interop import huggingface, initialization, pretrained
from bertjax.launch.validate import validate
from bertjax.models.heads import BertForMaskedLM
from bertjax.models.modernbert.config import ModernBertConfig
from bertjax.models.modernbert.family import FAMILY
from bertjax.nn.ops.plain_attention import plain_attention
from bertjax.nn.ops.tiles import Tile
from bertjax.nn.ops.window_attention import window_attention
from tests.markers import slow_case
from tests.nn.reference import attend, packed

TINY = ModernBertConfig(
    vocab_size=300, hidden_size=32, num_hidden_layers=8, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=1100,
)  # fmt: skip


def random_params(model, config, seed=0):
    """Returns params without 0 and 1, so that a missing or swapped param changes the outputs."""
    ids, rng = jnp.zeros((1, 8), jnp.int32), np.random.default_rng(seed)
    extra = (ids,) if isinstance(model, BertForMaskedLM) else ()
    shapes = nn.meta.unbox(jax.eval_shape(model.init, jax.random.key(seed), ids, ids, ids, *extra)["params"])

    def value(path, x):
        return np.float32(rng.normal(1.0 if path[-1].key == "scale" else 0.0, 0.1, x.shape))

    params = jax.tree_util.tree_map_with_path(value, shapes)
    if "bias" in params.get("masked_lm", {}):  # padding
        params["masked_lm"]["bias"][config.vocab_size :] = 0
    if "decoder" in params.get("masked_lm", {}):
        params["masked_lm"]["decoder"]["embedding"][config.vocab_size :] = 0
    params["bert"]["embeddings"]["word"]["embedding"][config.vocab_size :] = 0
    return params


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("modernbert")
    huggingface.write(made, TINY, random_params(BertForMaskedLM(TINY), TINY), None)
    return made


# Attention within a window.


@pytest.mark.parametrize("length, half, tile", [
    (1, 4, None), (65, 16, None), (37, 8, Tile(1, 1)), slow_case(5, 4, None), slow_case(30, 64, None),
    slow_case(64, 8, Tile(2, 2)),
])  # fmt: skip
def test_windowed_attention_equals_full_attention_with_a_mask(length, half, tile):
    rng = np.random.default_rng(0)
    qkv, segments = jnp.asarray(rng.normal(size=(4, length, 3, 4, 8)), jnp.float32), packed(4, length + 3)[:, :length]
    weights = rng.normal(size=(4, length, 32)).astype(np.float32)
    attentions = (
        lambda x: attend(*jnp.moveaxis(x, 2, 0), segments, window=half),
        lambda x: window_attention(x, segments, half, Compute(), tile),
        lambda x: plain_attention(x, segments, None, 0.0, Compute(), tile=tile, window=half),
    )

    @jax.jit
    def losses_and_gradients(qkv):
        def loss_of(attend):
            return lambda x: ((y := attend(x)) * weights).sum() + 0 * y.sum()

        return [jax.value_and_grad(loss_of(attend))(qkv) for attend in attentions]

    (expected, expected_gradient), *tile_results = losses_and_gradients(qkv)
    for loss, gradient in tile_results:
        np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(gradient, expected_gradient, atol=1e-5)


# Configs.


def test_a_classifier_starts_from_the_lm_head(folder, capsys):
    source = pretrained.read_pretrained(folder)
    started = FAMILY.import_params(source.params)
    assert (started["bert"]["pooler"]["dense"]["kernel"] == source.params["masked_lm"]["dense"]["kernel"]).all()
    assert FAMILY.import_params(started) is started
    initialization.initialize({"bert": jax.tree.map(jnp.zeros_like, started["bert"])}, folder, encoder_only=True)
    assert capsys.readouterr().out.endswith(" arrays loaded; not used: masked_lm/bias\n")


def test_initial_values_of_output_matrices_are_smaller():
    """Normal values of 0.02 are cut off at two standard deviations; output matrices are divided by the root of 2
    layers.
    transformers treats the dense layer of the LM head as an output matrix as well.
    """
    config = ModernBertConfig(
        vocab_size=512, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=192
    )
    ids = jnp.zeros((1, 8), jnp.int32)
    params = nn.meta.unbox(jax.jit(BertForMaskedLM(config).init)(jax.random.key(0), *[ids] * 4)["params"])
    kernels = {
        "/".join(key.key for key in path): np.asarray(x)
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if path[-1].key in ("kernel", "embedding")
    }
    assert len(kernels) == 1 + 4 * 2 + 1
    for name, kernel in kernels.items():
        expected = 0.02 / 2 if name.endswith(("output/kernel", "masked_lm/dense/kernel")) else 0.02
        # 0.8796 is the standard deviation after the cut-off.
        assert kernel.std() == pytest.approx(0.8796 * expected, rel=0.03), name
        assert 1.9 * expected < np.abs(kernel).max() <= 2 * expected, name


def test_fine_tuning_accepts_flags_for_fields_of_the_checkpoints_family(folder):
    def adopted(*flags, checkpoint=folder):
        arguments = ["--config=classify", f"--config.init_checkpoint={checkpoint}", "--config.data.path=x", *flags]
        config, _ = from_arguments(arguments)
        validate(config)
        initialization.adopt_model(config, pretrained.read_config(checkpoint), "there")
        validate(config)
        return config.model

    adopted_config = adopted("--config.model.classifier_pooling=mean", "--config.model.classifier_dropout=0.2")
    assert (
        adopted_config.classifier_pooling == "mean"
        and adopted_config.classifier_dropout == 0.2
        and adopted_config.family == "modernbert"
    )
    assert adopted_config.global_rope_theta == TINY.global_rope_theta and adopted().classifier_pooling == "cls"
    for flag, message in (
        ("rms_norm_eps=1e-6", "rms_norm_eps = 1e-06: there has model.family = 'modernbert', whose models have no such"),
        ("global_rope_theta=7.0", "config.model.global_rope_theta = 7.0: there has 160000.0; leave the field out"),
        ("hidden_act=relu", "config.model.hidden_act = relu: there has gelu; leave the field out"),
        ("glu=False", "config.model.glu = False: there has True; leave the field out"),
        ("classifier_pooling=max", "config.model.classifier_pooling = 'max': choose one of cls, mean"),
        ("classifier_poling=mean", "config.model has no field 'classifier_poling'"),
    ):
        with pytest.raises(UserError, match=message) as error:
            adopted(f"--config.model.{flag}")
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"config.model has no field 'classifier_pooling'"):  # the family is configured
        from_arguments(["--config=base", "--config.model.classifier_pooling=mean"])
