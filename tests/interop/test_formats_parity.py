"""Folders with contradictory files compared with transformers: equal numbers, or a refusal in one line."""

import functools
import itertools
import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from bertjax.common.errors import UserError
from bertjax.interop import pretrained
from bertjax.models import families
from bertjax.models.heads import BertForMaskedLM, word_logits
from tests.interop.test_families_parity import MODELS, batch_of, save_theirs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.extra_packages

WEIGHTS = "model.safetensors"
MASKED_LM = {"xlnet": "LMHeadModel"}  # the suffixes of other classes with a masked-LM head than ForMaskedLM


def edited(path, **changes):
    """Writes a JSON file with changed fields; a field of `...` is removed."""
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))


@functools.cache
def folder_of(name: str, make):
    """Returns a folder with a masked-LM head of transformers."""
    folder = make(name)
    save_theirs(folder, name, MASKED_LM.get(name, "ForMaskedLM"))
    return folder


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    return tmp_path_factory.mktemp


def logits_of_both(folder, name: str, their_class):
    """Returns the logits of transformers, and of bertjax; an error or a reason of bertjax in place of its logits."""
    their_model, loaded = their_class.from_pretrained(folder, output_loading_info=True)
    batch, arguments = batch_of(name, 9)
    with torch.no_grad():
        theirs = None if loaded["missing_keys"] else their_model.eval()(**arguments).logits.numpy()
    try:
        source = pretrained.read_pretrained(folder)
    except UserError as error:
        return theirs, str(error)
    if not source.predicts_words:
        return theirs, source.no_words_reason

    def predict(model):
        return word_logits(model.bert, model.masked_lm, model.bert.encode(*batch), np.tile(np.arange(9), (2, 1)))

    apply = functools.partial(BertForMaskedLM(source.config).apply, method=predict)
    ours = jax.jit(apply)({"params": source.params})[..., :150]
    return theirs * batch[1][..., None], ours * batch[1][..., None]


def test_every_model_type_with_a_masked_lm_head_is_compared():
    assert {*families.by_model_type()} - {"gpt2"} == {*MODELS}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stated", [..., True, False], ids=["absent", "true", "false"])
def test_tied_and_untied_decoders_equal_transformers_or_are_refused(name, stated, make, tmp_path):
    folder, their_class = (
        folder_of(name, make),
        getattr(transformers, f"{MODELS[name][0]}{MASKED_LM.get(name, 'ForMaskedLM')}"),
    )
    tensors = safetensors.numpy.load_file(folder / WEIGHTS)
    tied = their_class._tied_weights_keys
    (weight,) = (key for key in tied if key.endswith(".weight"))
    bias = next((key for key in tied if key.endswith(".bias")), None)
    default = MODELS[name][2].tie_word_embeddings
    others = {key: tensor for key, tensor in tensors.items() if key not in tied}
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    edited(tmp_path / "config.json", tie_word_embeddings=stated)
    for decoder, second_bias in itertools.product(
        ("absent", "equal", "different"), ("absent", "equal", "different") if bias else ("absent",)
    ):
        words = others[tied[weight]]
        more = {"absent": {}, "equal": {weight: words}, "different": {weight: words[::-1].copy()}}[decoder]
        if second_bias != "absent":
            more[bias] = others[tied[bias]] + (second_bias == "different")
        safetensors.numpy.save_file(others | more, tmp_path / WEIGHTS, {"format": "pt"})
        theirs, ours = logits_of_both(tmp_path, name, their_class)
        case = stated, decoder, second_bias
        print(name, case, ours if isinstance(ours, str) else "read", "theirs random" if theirs is None else "")
        is_tied = default if stated is ... else stated
        if isinstance(ours, str):
            assert "\n" not in ours and ours, case
            must_read = (
                decoder == "equal"
                and (second_bias == "equal" or not bias)
                or (is_tied and decoder == "absent" and second_bias != "different")
                or (decoder == "different" and not is_tied and not default)
            )
            assert not must_read, case
        else:
            np.testing.assert_allclose(ours, theirs, atol=1e-4, err_msg=str(case))
