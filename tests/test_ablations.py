"""What runs the paper's comparisons: everything once and in order, and going on where it was."""

import json
import re

import flax.linen as nn
import jax
import numpy as np
import pytest

from bertjax.config import BertConfig, UserError, dropout_fields, model_size
from bertjax.families.with_heads import BertForMaskedLM
from bertjax.sharding.mesh import make_mesh
from bertjax.stages import stages_of
from bertjax.tasks import bits, validate
from bertjax.tasks.pretraining import Pretraining
from bertjax.text.tokenizer import SPECIAL_PIECES, Encoding, WordPiece
from experiments.ablations import bits as bits_command
from experiments.ablations import characters, scaled, successors, today
from experiments.ablations.suite import Suite, run_all

TRIAL = scaled.SCALES["trial"]


@pytest.fixture
def data(tmp_path):
    contents = {
        "any": "conll2003/eng.train conll2003/eng.testa glue/MRPC/train.tsv glue/MRPC/dev.tsv glue/STS-B/train.tsv "
        "glue/STS-B/dev.tsv corpora/books.txt corpora/wiki-000.txt corpora/wiki-001.txt corpora/wiki-simple-000.txt",
        "sentence\tlabel\n" + 600 * "good\t1\n": "glue/SST-2/train.tsv glue/SST-2/dev.tsv",
        json.dumps({"data": [1, 2, 3]}): "squad/train-v1.1.json squad/dev-v1.1.json",
    }
    for text, names in contents.items():
        for name in names.split():
            (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "data" / name).write_text(text)
    return tmp_path / "data"


class Recorded(Suite):
    """Notes what would be started, and leaves what it would have left."""

    started: list

    def _start(self, module, folder, config, settings, *arguments):
        self.started.append((module, folder.name, settings))
        folder.mkdir(parents=True, exist_ok=True)
        if module == "vocabulary":
            (folder / "vocab.txt").touch()
        elif module == "prepare":
            (folder / "manifest.json").touch()
        elif "sweep" in settings:
            for seed in settings["sweep"].removeprefix("seed=").split(","):
                (folder / f"runs/seed={seed}").mkdir(parents=True)
                (folder / f"runs/seed={seed}/result.json").write_text('{"failed": false, "scores": {}}')
        else:
            (folder / "report.txt").touch()


def recorded(data, tmp_path) -> Recorded:
    suite = Recorded("trial", tmp_path / "work", data)
    object.__setattr__(suite, "started", [])
    return suite


@pytest.mark.parametrize("jobs", [1, 2])
def test_everything_runs_once_after_what_it_needs(data, tmp_path, jobs):
    wanted = [cell for table in scaled.TABLES for _, cell in scaled.cells(table, TRIAL)]
    runs = [run for cell in wanted for run in (cell.model, cell)]
    suite, written = recorded(data, tmp_path), []
    run_all(suite, runs, jobs, lambda to_do: written.append(len(to_do)))
    names = [name for _, name, _ in suite.started]
    assert len(set(names)) == len(names) and set(names) == {
        "vocabulary", *(f"records-{cell.model.records}" for cell in wanted), *(run.name for run in runs)
    }  # fmt: skip
    for cell in wanted:
        assert names.index(f"records-{cell.model.records}") < names.index(cell.model.name) < names.index(cell.name)
    assert names.index("vocabulary") < names.index("records-pairs") and written[-1] == 0

    again = recorded(data, tmp_path)
    run_all(again, runs, jobs, lambda to_do: None)
    assert not again.started


def test_the_data_are_the_first_part_of_all(data, tmp_path):
    suite, cells = recorded(data, tmp_path), [scaled.Cell(scaled.BERT, task) for task in ("sst2", "squad")]
    run_all(suite, [scaled.BERT, *cells], 1, lambda to_do: None)
    settings = {name: settings for _, name, settings in suite.started}
    corpora = settings["vocabulary"]["data.corpus"].split(",")
    assert [path.rpartition("/")[2] for path in corpora] == ["books.txt", "wiki-000.txt", "wiki-simple-000.txt"]
    assert settings["bert-sst2"]["init_checkpoint"] == f"{tmp_path}/work/bert@latest"
    reviews, articles = (settings[f"bert-{task}"]["data.path"] for task in ("sst2", "squad"))
    lines = [(reviews / f"SST-2/{part}.tsv").read_text().splitlines() for part in ("train", "dev")]
    assert [len(part) for part in lines] == [1 + TRIAL.sentences, 1 + 600] and lines[0][0] == "sentence\tlabel"
    for part in ("train", "dev"):
        assert json.loads((articles / f"{part}-v1.1.json").read_text()) == {"data": [1, 2]}


@pytest.mark.parametrize("scale", scaled.SCALES)
@pytest.mark.parametrize("module", [today, successors, characters])
def test_every_row_is_a_valid_config_that_differs_from_the_others(module, scale):
    configs = [module.get_config(f"{scale}/{name}/3000") for name in module.TABLE.rows]
    for config in configs:
        validate(config, with_data=False)
        has_dropout = any(config.model[name] for name in dropout_fields(config.model))
        assert has_dropout == (module is today and config in configs[:2])
        assert sum(each.steps for each in stages_of(config)) == 3000
    assert len({config.to_json_best_effort() for config in configs}) == len(configs)
    sizes = ("num_attention_heads", "vocab_size", "hidden_size", "num_hidden_layers")
    assert module is today or all(len({config.model[name] for config in configs}) == 1 for name in sizes)
    assert module is not characters or len({stages_of(config)[0].tokens_per_step for config in configs}) == 1


@pytest.mark.parametrize("scale", scaled.SCALES)
def test_rows_of_today_have_equally_many_params(scale):
    def params(config) -> int:
        task = Pretraining(config, make_mesh(config, jax.devices()[:1]), None)
        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(task.init_params, jax.random.key(0))))

    counts = {name: params(today.get_config(f"{scale}/{name}/3000")) for name in ("bert", "sentences", "rotary", "glu")}
    assert max(counts.values()) < 1.04 * min(counts.values()), counts


class _Pieces:
    """A tokenizer with pieces of some letters, which begin with the space before a word or leave it out."""

    pad_id, unk_id, cls_id, sep_id, mask_id = range(5)
    begin, end, framed = (cls_id,), (sep_id,), WordPiece.framed

    def __init__(self, letters: int, takes_space: bool):
        self.pattern = re.compile(rf"\s?\S{{1,{letters}}}" if takes_space else rf"\S{{1,{letters}}}")

    def encode(self, text: str):
        found = list(self.pattern.finditer(text))
        return Encoding([9 + len(each[0].strip()) for each in found], [each.span() for each in found])


@pytest.mark.parametrize("letters, takes_space", [(1, False), (2, True), (5, False)])
@pytest.mark.parametrize("length", [8, 64])
def test_the_same_words_are_hidden_whatever_the_pieces(letters, takes_space, length):
    text = "the cat saw an old house ."
    hidden = [False, True, False, False, True, True, False]
    pieces = _Pieces(letters, takes_space)
    found = [row for part in bits.halved(text, hidden, pieces, length) for row in bits.masked(*part, pieces)]
    assert sum(piece - 9 for _, _, pieces in found for piece in pieces) == len("cat" + "old" + "house")
    for ids, positions, pieces in found:
        assert [place for place, piece in enumerate(ids) if piece == 4] == positions and len(pieces) == len(positions)
        assert (len(ids) <= length or ids.count(4) == len(ids) - 2) and (ids[0], ids[-1]) == (2, 3)


def test_windows_have_whole_words_and_a_share_of_them_is_hidden():
    lines = ["word naïve " * 40, "short", "x" * 200 + " and more words " * 8]
    texts = bits.windows(lines, 100, 48, 96)
    assert all(48 <= len(text.encode()) + 1 <= 96 for text in texts) and texts
    assert bits.windows(lines, 3, 48, 96) == bits.windows(lines, 3, 48, 96) and len(bits.windows(lines, 3, 48, 96)) == 3
    hidden = bits.hidden_words(1000 * ["word naïve"], bits_command.may_hide)
    assert not any(second for _, second in hidden) and 120 < sum(first for first, _ in hidden) < 180


@pytest.mark.parametrize("causal", [False, True])
def test_the_bits_of_a_model_that_knows_nothing(causal):
    """Each word is a piece, all 40 pieces are equally likely, and a left-to-right model names them all."""
    pieces = [*SPECIAL_PIECES, *(f"word{chr(97 + i)}" for i in range(26)), *"abcdefghi"]
    words = WordPiece(pieces, lowercase=False)
    config = BertConfig(**model_size("1-32-2"), vocab_size=40, max_position_embeddings=32, causal=causal)
    model, texts = BertForMaskedLM(config), [" ".join(pieces[5 + i : 17 + i]) for i in range(14)]
    ids = np.zeros((1, 8), np.int32)
    shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), ids, ids, ids, ids)["params"])
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    hidden = bits.hidden_words(texts, bits_command.may_hide)
    found = bits.bits_per_byte(model, params, words, texts, hidden, 20)
    size = 6 * 12 * 14 - 14 if causal else 5 * sum(map(sum, hidden))
    assert found["words"] == (12 * 14 if causal else sum(map(sum, hidden))) and found["bytes"] == size > 50
    assert found["bits_per_byte"] == pytest.approx(found["words"] * np.log2(40) / size)
    with pytest.raises(UserError, match="0 windows of text have no word that could be hidden"):
        bits.bits_per_byte(model, params, words, [], [], 20)
