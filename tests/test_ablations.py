"""The configs of the ablations, and bits per byte, which compares models with different vocabularies."""

import re

import flax.linen as nn
import jax
import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.config.model_config import BertConfig, dropout_fields, model_size
from bertjax.config.stages import stages_of
from bertjax.inference import bits_per_byte
from bertjax.launch.validate import validate
from bertjax.models.heads import BertForMaskedLM
from bertjax.text.tokenizer import SPECIAL_TOKENS, Encoding, WordPiece
from experiments.ablations import bits as bits_command
from experiments.ablations import characters, scaled, successors, today


@pytest.mark.parametrize("scale", scaled.SCALES)
@pytest.mark.parametrize("module", [today, successors, characters])
def test_all_rows_are_distinct_valid_configs(module, scale):
    configs = [module.get_config(f"{scale}/{name}/3000") for name in module.TABLE.rows]
    for config in configs:
        validate(config, with_data=False)
        has_dropout = any(config.model[name] for name in dropout_fields(config.model))
        assert has_dropout == (module is today and config in configs[:2])
        assert sum(stage.steps for stage in stages_of(config)) == 3000
    assert len({config.to_json_best_effort() for config in configs}) == len(configs)
    sizes = ("num_attention_heads", "vocab_size", "hidden_size", "num_hidden_layers")
    assert module is today or all(len({config.model[name] for config in configs}) == 1 for name in sizes)
    assert module is not characters or len({stages_of(config)[0].tokens_per_step for config in configs}) == 1


class _Pieces:
    """A tokenizer with tokens of some letters, with or without the space before a word."""

    pad_id, unk_id, cls_id, sep_id, mask_id = range(5)
    begin, end, framed = (cls_id,), (sep_id,), WordPiece.framed

    def __init__(self, letters: int, takes_space: bool):
        self.pattern = re.compile(rf"\s?\S{{1,{letters}}}" if takes_space else rf"\S{{1,{letters}}}")

    def encode(self, text: str):
        matches = list(self.pattern.finditer(text))
        return Encoding([9 + len(match[0].strip()) for match in matches], [match.span() for match in matches])


@pytest.mark.parametrize("letters, takes_space", [(1, False), (2, True), (5, False)])
@pytest.mark.parametrize("length", [8, 64])
def test_hidden_words_do_not_depend_on_the_tokenizer(letters, takes_space, length):
    text = "the cat saw an old house ."
    hidden = [False, True, False, False, True, True, False]
    pieces = _Pieces(letters, takes_space)
    windows = [
        row
        for part in bits_per_byte.halved(text, hidden, pieces, length)
        for row in bits_per_byte.masked(*part, pieces)
    ]
    assert sum(piece - 9 for _, _, pieces in windows for piece in pieces) == len("cat" + "old" + "house")
    for ids, positions, pieces in windows:
        assert [place for place, piece in enumerate(ids) if piece == 4] == positions and len(pieces) == len(positions)
        assert (len(ids) <= length or ids.count(4) == len(ids) - 2) and (ids[0], ids[-1]) == (2, 3)


def test_windows_have_whole_words_and_a_share_is_masked():
    lines = ["word naïve " * 40, "short", "x" * 200 + " and more words " * 8]
    texts = bits_per_byte.windows(lines, 100, 48, 96)
    assert all(48 <= len(text.encode()) + 1 <= 96 for text in texts) and texts
    assert (
        bits_per_byte.windows(lines, 3, 48, 96) == bits_per_byte.windows(lines, 3, 48, 96)
        and len(bits_per_byte.windows(lines, 3, 48, 96)) == 3
    )
    hidden = bits_per_byte.hidden_words(1000 * ["word naïve"], bits_command.may_hide)
    assert not any(second for _, second in hidden) and 120 < sum(first for first, _ in hidden) < 180


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_bits_per_byte_of_a_uniform_model(causal):
    """Every word is a token, all 40 tokens are equally likely, and a left-to-right model predicts all of them."""
    pieces = [*SPECIAL_TOKENS, *(f"word{chr(97 + i)}" for i in range(26)), *"abcdefghi"]
    words = WordPiece(pieces, lowercase=False)
    config = BertConfig(**model_size("1-32-2"), vocab_size=40, max_position_embeddings=32, causal=causal)
    model, texts = BertForMaskedLM(config), [" ".join(pieces[5 + i : 17 + i]) for i in range(14)]
    ids = np.zeros((1, 8), np.int32)
    shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), ids, ids, ids, ids)["params"])
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    hidden = bits_per_byte.hidden_words(texts, bits_command.may_hide)
    result = bits_per_byte.bits_per_byte(model, params, words, texts, hidden, 20)
    size = 6 * 12 * 14 - 14 if causal else 5 * sum(map(sum, hidden))
    assert result["words"] == (12 * 14 if causal else sum(map(sum, hidden))) and result["bytes"] == size > 50
    assert result["bits_per_byte"] == pytest.approx(result["words"] * np.log2(40) / size)
    with pytest.raises(UserError, match="0 windows of text have no word to mask"):
        bits_per_byte.bits_per_byte(model, params, words, [], [], 20)
