"""Tiny pre-training runs that cover every family and every objective, and the curves of their 60 steps.

`tests/golden/curves/NAME.json` stores the curves of a run. `tests/test_curves.py` compares them;
`tests/golden/make_curves.py` rewrites the files.
"""

import json
import pathlib

from bertjax.config.defaults import named_stages, stage
from bertjax.launch.start import launch
from bertjax.models import families
from bertjax.objectives.parsing import learn
from bertjax.training.trackers.jsonl import read_metrics
from tests.conftest import make_corpus, preparing_in_process, tiny_config

FOLDER = pathlib.Path(__file__).parent / "golden" / "curves"
STEPS = 60
CURVES = ("loss", "grad_norm", "learning_rate")
TOLERANCE = 2e-3  # relative; another processor or compiler rounds differently
SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)


def _config(family: str, model: dict, stages=None, **fields):
    config = tiny_config()
    config.model = families.model_fields(family, **{"vocab_size": 150, **SIZES, **model})
    config.stages = stages or named_stages(only=stage(STEPS, 32, 5))
    config.batch_size, config.log_every_steps, config.unroll = 8, 1, "no"
    config.data.update(dupe_factor=2, next_sentence="none")
    config.optimizer.update(learning_rate=5e-3, warmup_steps=10)
    config.eval.update(every_steps=STEPS, max_sequences=8, fill_masks=())
    config.checkpoint.every_steps = STEPS
    config.update_from_flattened_dict(fields)
    return config


def _with_objective(config, objective: str, **settings):
    learn(config, objective, **settings)
    return config


def configs() -> dict:
    """Returns the config of each run by the name of its golden file."""
    dynamic = {"data.masking": "dynamic"}
    stream = {"data.stream": True, "data.dupe_factor": 1, "data.short_seq_prob": 0.0}
    byte_pieces = {"tokenizer.kind": "bytes", **dynamic}
    return {
        # The recipe of the paper: static masks, pairs of segments, two lengths, Adam without bias correction.
        "bert": _config(
            "bert", {}, named_stages(short=stage(STEPS // 2, 32, 5), long=stage(STEPS // 2, 48, 8)),
            **{"data.next_sentence": "pairs"},
        ),
        "roberta": _config("roberta", {}, **{"packing": True, **dynamic}),
        "distilbert": _config(
            "distilbert", dict(num_hidden_layers=2),
            **{"data.next_sentence": "order", "data.do_whole_word_mask": True, "optimizer.name": "lamb",
               "microbatches": 2, "remat": "full"},
        ),
        "electra": _with_objective(
            _config("electra", dict(embedding_size=8), **dynamic),
            "50*replaced + generator",
            generator=dict(width=0.5),
        ),
        "albert": _config(
            "albert", dict(embedding_size=8, num_hidden_layers=2),
            **{"data.next_sentence": "order", "optimizer.name": "lamb", "remat": "full"},
        ),
        "xlm-roberta-xl": _config("xlm_roberta_xl", {}, **{"packing": True, **dynamic}),
        "modernbert": _config(
            "modernbert",
            dict(num_hidden_layers=2, local_attention=16, global_attn_every_n_layers=2, local_rope_theta=20.0),
            **{"packing": True, "optimizer.name": "stable_adamw", "optimizer.schedule": "trapezoid", **dynamic},
        ),
        "eurobert": _config("eurobert", dict(num_key_value_heads=1, head_dim=8), **{"optimizer.name": "muon"}),
        "neobert": _config("neobert", {}, **{"packing": True, **dynamic}),
        "ultrabert": _config(
            "ultrabert",
            dict(
                num_hidden_layers=3, num_key_value_heads=1, head_dim=8, prediction_head_size=24, sliding_window=8,
                layer_types="sliding,full",
            ),
            **{"packing": True, **dynamic},
        ),
        "deberta-v2": _config(
            "deberta_v2", dict(position_buckets=8, conv_kernel_size=3), **{"packing": True, **dynamic}
        ),
        "deberta-v3": _with_objective(
            _config("deberta_v2", dict(position_buckets=8, num_hidden_layers=2), **{"packing": True, **dynamic}),
            "50*replaced + generator",
            generator=dict(width=1.0, layers=0.5, embeddings="disentangled"),
        ),
        "mpnet": _config("mpnet", {}, **{"packing": True, **dynamic}),
        "nomic-bert": _config("nomic_bert", {}, **{"packing": True, **dynamic}),
        "gte": _config("gte", dict(attention_probs_dropout_prob=0.1), **{"packing": True, **dynamic}),
        "jina-embeddings-v3": _config("jina_embeddings_v3", {}, **dynamic),
        "mpnet-permuted": _with_objective(
            _config("mpnet", {}, **{"packing": True, "data.do_whole_word_mask": True, **dynamic}), "mplm"
        ),
        "megatron-bert": _config("megatron_bert", {}, **{"data.next_sentence": "pairs"}),
        "lstms": _config("lstms", {}, **dynamic),
        "transformer-auxiliary": _with_objective(
            _config("bert", dict(causal=True, num_hidden_layers=2, vocab_size=261), **byte_pieces),
            "lm + auxiliary",
        ),
        "transformer-xl": _config("transformer_xl", dict(vocab_size=261, memory_length=40), **byte_pieces, **stream),
        "xlnet": _with_objective(
            _config("xlnet", dict(vocab_size=83), **{"tokenizer.kind": "sentencepiece", **dynamic}),
            "plm", plm=dict(k=4, max_span_words=2),
        ),
    }  # fmt: skip


def train(config, folder: pathlib.Path) -> dict[str, list[float]]:
    """Trains in `folder`, from text to the scores of the last step; returns the curves and these scores."""
    (folder / "text.txt").write_text(make_corpus(40))
    config.data.corpus = str(folder / "text.txt")
    with preparing_in_process():
        launch(config, folder / "run")
    lines = read_metrics(folder / "run")
    curves = {name: [line[f"train/{name}"] for line in lines if f"train/{name}" in line] for name in CURVES}
    scores = {name: x for line in lines for name, x in line.items() if name.startswith("eval/")}
    return {**curves, **{name: [x] for name, x in sorted(scores.items())}}


def path_of(name: str) -> pathlib.Path:
    """Returns the golden file of a run."""
    return FOLDER / f"{name}.json"


def read(name: str) -> dict[str, list[float]]:
    return json.loads(path_of(name).read_text())


def write(name: str, curves: dict[str, list[float]]) -> None:
    FOLDER.mkdir(exist_ok=True)
    rounded = {label: [float(f"{x:.6g}") for x in values] for label, values in curves.items()}
    lines = [f" {json.dumps(label)}: {json.dumps(values)}" for label, values in rounded.items()]
    path_of(name).write_text("{\n" + ",\n".join(lines) + "\n}\n")
