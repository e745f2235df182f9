"""The contract of every family: each cell of the table of family and ability is one test.

A family that lacks an ability raises one line. The families are the families of the registry, so that a new family is
tested without changes here. `tests/models/test_families.py` has the sizes of the tiny models.
"""

import json

import jax
import numpy as np
import pytest

from bertjax import library
from bertjax.common.errors import UserError
from bertjax.config.defaults import named_stages, stage
from bertjax.distributed.topology import accelerator
from bertjax.export import stablehlo
from bertjax.interop import conversion, pretrained
from bertjax.launch.start import launch
from bertjax.launch.validate import validate
from bertjax.models import families
from bertjax.models.elmo.family import ElmoFamily
from bertjax.models.family import HuggingFaceFamily
from bertjax.nn.ops.low_rank import ALL
from bertjax.objectives.parsing import OBJECTIVE_OF_LM_TYPE, learn
from bertjax.planner.plan import plan
from bertjax.training.trackers.jsonl import read_metrics
from experiments import classify, embed, rerank
from tests.conftest import TOPICS, make_corpus, preparing_in_process
from tests.finetuning.test_classify import write_table
from tests.models.test_families import FAMILIES, config_for, registered, run_of  # noqa: F401

pytestmark = [pytest.mark.usefixtures("on_one_device"), pytest.mark.slow]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder with labelled texts, pairs of texts, and a corpus."""
    folder, rng = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    (folder / "corpus").mkdir()
    (folder / "corpus/text.txt").write_text(make_corpus(40))

    def text(topic):
        return " ".join(rng.choice(TOPICS[topic], 4))

    for name in ("train", "dev"):
        labelled = [{"text": text(topic), "label": topic} for topic in ("sea", "court") for _ in range(8)]
        pairs = [{"query": text("sea"), "positive": text("sea"), "negative": text("court")} for _ in range(16)]
        for form, rows in (("labelled", labelled), ("pairs", pairs)):
            (folder / form).mkdir(exist_ok=True)
            write_table(folder / form / f"{name}.jsonl", rows)
    return folder


def short(config, folder, run, **fields):
    """Returns a config of two steps in float32 that starts from a run."""
    config.data.path, config.init_checkpoint = str(folder), str(run)
    config.update(dict(batch_size=8, max_seq_length=32, epochs=1.0, dtype="float32", unroll="no", log_every_steps=1))
    config.update_from_flattened_dict(fields)
    return config


def losses_of(config, workdir):
    """Trains a run, and returns the finite losses of its steps."""
    validate(config)
    launch(config, workdir)
    losses = [line["train/loss"] for line in read_metrics(workdir) if "train/loss" in line]
    assert losses and np.isfinite(losses).all()
    return losses


def writes(family, run, texts, folder):
    assert "left out" not in conversion.convert(run, folder / "written", "huggingface")
    fields = json.loads((folder / "written/config.json").read_text())
    assert fields["model_type"] in families.FAMILIES.get(family).model_types


def reads(family, run, texts, folder):
    conversion.convert(run, folder / "written", "huggingface")
    read, source = pretrained.read_with_tokenizer(folder / "written"), pretrained.read_with_tokenizer(run)
    jax.tree.map(np.testing.assert_array_equal, read.params, source.params)
    assert read.predicts_words and read.config.family == family
    assert read.tokenizer.encode_ids(["the ship saw"]) == source.tokenizer.encode_ids(["the ship saw"])


def packs(family, run, texts, folder):
    """Compares the states of texts in a packed row with the states of each text in a row of its own."""
    if not families.FAMILIES.get(family).supports_packing:
        validate(config_for(family, packing=True))
    source, rng, lengths = pretrained.read_pretrained(run), np.random.default_rng(0), (11, 17, 1)
    encoder, ids = families.encoder_of(source.config), rng.integers(5, 80, (1, 40))
    segments = np.repeat([1, 2, 3, 0], [*lengths, 40 - sum(lengths)])[None]
    positions = np.concatenate([np.arange(length) for length in (*lengths, 40 - sum(lengths))])[None]

    @jax.jit
    def states(ids, segments, positions):
        params = {"params": source.params["bert"]}
        return encoder.apply(params, ids, segments, 0 * ids, positions, method="encode")

    together = states(ids, segments, positions)[0]
    for number, length in enumerate(lengths, 1):
        alone, inside = np.zeros_like(ids), segments[0] == number
        alone[0, :length] = ids[0, inside]
        expected = states(alone, (np.arange(40) < length)[None].astype(np.int32), np.arange(40)[None])
        np.testing.assert_allclose(together[inside], expected[0, :length], atol=2e-5)


def pretrains(family, run, texts, folder):
    config = config_for(family, records="")
    config.data.update(corpus=str(texts / "corpus"), dupe_factor=1)
    config.update(dict(batch_size=8, unroll="no", log_every_steps=1))
    learn(config, OBJECTIVE_OF_LM_TYPE[families.lm_type_of(config)])
    config.stages, config.optimizer.learning_rate = named_stages(only=stage(2, 32, 5)), 1e-3
    config.eval.update(every_steps=2, max_sequences=8)
    with preparing_in_process():
        assert len(losses_of(config, folder / "run")) == 2
    assert library.load(folder / "run").source.step == 2


def fine_tunes(family, run, texts, folder):
    config = short(classify.get_config(), texts / "labelled", run)
    losses_of(config, folder / "run")
    (prediction,) = library.load(folder / "run").predict(["the ship"])
    assert prediction["label"] in ("sea", "court")


def embeds(family, run, texts, folder):
    config = short(embed.get_config(), texts / "pairs", run, packing=False, **{"data.texts": "query,positive"})
    config.data.dev.update(form="pairs", texts="query,positive")
    losses_of(config, folder / "run")
    vectors = library.load(folder / "run").embed(["the ship", "a judge"])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def reranks(family, run, texts, folder):
    config = short(rerank.get_config(), texts / "pairs", run, packing=False)
    losses_of(config, folder / "run")
    ranked = library.load(folder / "run").rank("the ship", ["a judge", "the ship"])
    assert len(ranked) == 2


def tunes_low_rank(family, run, texts, folder):
    """Only the low-rank updates and the head are trained."""
    config = short(classify.get_config(), texts / "labelled", run)
    config.lora.update(rank=2, alpha=4.0, targets=ALL)
    config.optimizer.learning_rate = 1e-2
    losses_of(config, folder / "run")
    tuned, source = pretrained.read_pretrained(folder / "run"), pretrained.read_pretrained(run)
    changed = {path for path, update in tuned.updates.items() if np.abs(update).max() > 0}
    assert changed and all(path[-1] == "kernel" for path in changed)
    kept, words = (model.params["bert"]["embeddings"]["word"]["embedding"] for model in (tuned, source))
    np.testing.assert_array_equal(kept, words)


def exports(family, run, texts, folder):
    stablehlo.write(folder / "exported", library.load(run).source)
    assert (folder / "exported/load.py").exists()


def plans(family, run, texts, folder):
    config = config_for(family, packing=False)
    learn(config, OBJECTIVE_OF_LM_TYPE[families.lm_type_of(config)])
    config.update(dict(batch_size=16, kernels="no"))
    (result,) = plan(config, accelerator("v5litepod-4"))
    assert result.fits and 0 < result.estimated_mfu < 1


CELLS = {
    "write": writes,
    "read": reads,
    "packed": packs,
    "pre-train": pretrains,
    "fine-tune": fine_tunes,
    "embed": embeds,
    "rerank": reranks,
    "LoRA": tunes_low_rank,
    "export": exports,
    "plan": plans,
}
LACKS = {
    "write": lambda family: not isinstance(family, HuggingFaceFamily),
    "read": lambda family: not isinstance(family, HuggingFaceFamily),
    "packed": lambda family: not family.supports_packing,
    "LoRA": lambda family: isinstance(family, ElmoFamily),  # LSTMs have no dense kernels
}


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, marks=pytest.mark.tpu_aot) if cell == "plan" else cell for cell in CELLS]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_ability_or_raises_one_line(family, cell, run_of, texts, tmp_path):  # noqa: F811
    use = CELLS[cell]
    if LACKS.get(cell, lambda _: False)(families.FAMILIES.get(family)):
        with pytest.raises(UserError) as error:
            use(family, run_of(family), texts, tmp_path)
        assert "\n" not in str(error.value) and (f"'{family}'" in str(error.value) or cell == "LoRA")
    else:
        use(family, run_of(family), texts, tmp_path)
