"""The page about runs: its curves are the logged numbers, and its attention is the attention of the checkpoint."""

import base64
import json
import re
import shutil
import sys
import urllib.parse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bertjax.common.errors import UserError
from bertjax.config.defaults import fine_tuning_config, pretraining_config
from bertjax.config.model_config import BertConfig, Compute
from bertjax.interop.pretrained import Pretrained
from bertjax.models import families
from bertjax.reporting import curves, insight, page
from bertjax.reporting.history import read_history
from bertjax.text.tokenizer import SPECIAL_TOKENS, WordPiece
from bertjax.training.checkpoints import checkpoint, workdir
from bertjax.training.checkpoints.workdir import RunInfo, write_info
from bertjax.training.scores import Scores
from tests.markers import slow_case

PIECES = [*SPECIAL_TOKENS, "ship", "boat", "the", "whale", "saw", "."]
TINY = BertConfig(
    vocab_size=len(PIECES), hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=24, initializer_range=0.5,
)  # fmt: skip


def made_run(folder, losses, batch_size=8, seconds=36.0):
    """Logs every 10 steps: 2 seconds a sequence, 50 tokens a sequence in the first half, 100 in the other."""
    folder.mkdir(parents=True)
    config = pretraining_config()
    config.batch_size = batch_size
    write_info(folder, RunInfo(config), None)
    lines = []
    for number, loss in enumerate(losses, 1):
        tokens = 25 if number <= len(losses) / 2 else 50
        train = {"mlm_loss": loss, "mlm_accuracy": 1 / loss, "sequences_per_second": 0.5, "tokens_per_second": tokens}
        train = {f"train/{name}": value for name, value in (train | {"grad_norm": 1.0}).items()}
        lines.append(train | {"wall/steps": seconds})
        lines.append({"eval/mlm_loss": loss + 0.5, "eval/unigram_loss": 7.0})
    steps = [10 * (i // 2 + 1) for i in range(len(lines))]
    text = "".join(json.dumps({"step": step, **line}) + "\n" for step, line in zip(steps, lines))
    (folder / "metrics.jsonl").write_text(text)
    return folder


def made_trial(folder, score):
    (made_run(folder, [5.0]) / "result.json").write_text(json.dumps({"scores": {"f1": score}, "failed": False}))


@pytest.fixture
def figures(monkeypatch):
    """Collects the figures of the written pages, without rendering them."""
    draw, drawn = curves.draw_curves, []
    monkeypatch.setattr(curves, "draw_curves", lambda histories: drawn.append(draw(histories)) or drawn[-1])
    monkeypatch.setattr(page, "_png", lambda *_: b"")
    return drawn


def test_tokens_and_hours_are_added_up(tmp_path):
    history = read_history(made_run(tmp_path / "run", [5.0, 4.0, 3.0, 2.0]))
    steps, losses = history.values_of("train/mlm_loss")
    assert steps.tolist() == [10, 20, 30, 40] and losses.tolist() == [5, 4, 3, 2]
    np.testing.assert_allclose(history.tokens(steps), 10 * 8 * np.cumsum([50, 50, 100, 100]))
    np.testing.assert_allclose(history.hours(steps), [0.01, 0.02, 0.03, 0.04])


def test_tokens_follow_changes_of_the_batch_size(tmp_path):
    # resumed with batch size 16 after step 10, with 8 before
    run = made_run(tmp_path / "run", [5.0, 4.0, 3.0], batch_size=16)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "train/mlm_loss" in line:
            line["train/tokens_per_step"] = 400 if line["step"] == 10 else 1600
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_history(run).tokens(np.array([5, 10, 20, 30])).tolist() == [2000, 4000, 20_000, 36_000]


def test_drawn_curves_equal_logged_metrics(tmp_path):
    histories = [read_history(made_run(tmp_path / name, losses)) for name, losses in (("a", [5.0, 4.0]), ("b", [6.0]))]
    figure = curves.draw_curves(histories)
    shown = [axis for axis in figure.axes if axis.get_title()]
    titles = [(axis.get_title(), axis.get_xlabel()) for axis in shown]
    assert titles == [
        *((f"{what} of words", against) for what in ("loss", "accuracy") for against in ("steps", "tokens", "hours")),
        ("gradient norm", "steps"), ("tokens a second, without padding", "steps"),
    ]  # fmt: skip
    by_tokens = [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in shown[1].lines]
    assert by_tokens == [
        ([4000, 12000], [5, 4]), ([4000, 12000], [5.5, 4.5]), ([4000, 12000], [7, 7]),
        ([8000], [6]), ([8000], [6.5]), ([8000], [7]),
    ]  # fmt: skip
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_matryoshka_dimensions_are_drawn_as_one_curve(tmp_path):
    with_widths = {"spearman": 0.8, "spearman_256": 0.8, "spearman_64": 0.7}
    for name, scores in (("some", with_widths), ("none", {"spearman": 0.6})):
        (tmp_path / name).mkdir()
        write_info(tmp_path / name, RunInfo(fine_tuning_config("embed")), None)
        evaluations = [{f"eval/{metric}": share * x for metric, x in scores.items()} for share in (0.5, 1)]
        lines = [json.dumps({"step": step, **metrics}) + "\n" for step, metrics in zip((10, 20), evaluations)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    figure = curves.draw_curves([read_history(tmp_path / name) for name in ("some", "none")])
    by_width = [axis for axis in figure.axes if axis.get_xlabel() == curves.WIDTH]
    assert [axis.get_title() for axis in by_width] == ["spearman, dev set"]
    (line,) = by_width[0].lines
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([64, 256], [0.7, 0.8])
    steps = [axis.get_title() for axis in figure.axes if axis.get_xlabel() == "steps"]
    assert steps == ["spearman, dev set"]  # scores by dimension have no curves over the steps
    figure = curves.draw_curves(
        [read_history(folder) for folder in (made_run(tmp_path / "words", [5.0]), tmp_path / "none")]
    )
    assert legend(figure) == ["words", "none"]  # runs of different types
    assert {axis.get_title() for axis in figure.axes} >= {"loss of words", "spearman, dev set"}


def test_a_long_curve_is_thinned(tmp_path):
    history = read_history(made_run(tmp_path / "run", np.linspace(9, 1, 2500).tolist()))
    line = curves.draw_curves([history]).axes[0].lines[0]
    assert len(line.get_ydata()) <= 1000
    np.testing.assert_allclose(
        line.get_ydata(), np.interp(line.get_xdata(), *history.values_of("train/mlm_loss")), atol=1e-9
    )


@pytest.mark.slow
def test_the_page_embeds_the_pictures(tmp_path):
    runs = [made_run(tmp_path / "runs-of" / name, [5.0, 4.0]) for name in ("one", "<two>")]
    written = page.write_page(tmp_path / "out", runs).read_text()
    inside = re.findall(r'src="data:image/png;base64,([^"]+)"', written)
    assert [base64.b64decode(picture) for picture in inside] == [(tmp_path / "out/report.png").read_bytes()]
    assert (tmp_path / "out/report.png").read_bytes().startswith(b"\x89PNG")
    assert "&lt;two&gt;" in written and "<two>" not in written and "<td>12,000</td>" in written
    assert "http" not in written


@pytest.mark.usefixtures("figures")
def test_the_page_of_one_run_has_config_and_predictions(tmp_path, monkeypatch):
    run, other = (made_run(tmp_path / name, [5.0], batch_size=4) for name in ("run", "other"))
    monkeypatch.setattr(sys, "argv", ["main.py", "--config=small", "--config.data.corpus=<my> text"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    workdir.append_command(run)
    monkeypatch.setattr(sys, "argv", ["main.py", "--again"])
    workdir.append_command(run)
    workdir.write_report_text(run, "held-out <words>: loss 4.5")
    ((name, content),) = workdir.samples_file([("a < b", "good", "bad"), ("x" * 9999, "", "")]).items()
    (run / name).write_text(content)
    written = page.write_page(tmp_path / "out", [run]).read_text()
    assert "<pre>held-out &lt;words&gt;: loss 4.5</pre>" in written
    assert "<td>a &lt; b</td><td>good</td><td>bad</td>" in written and f"<td>{'x' * 500}</td>" in written
    starts = re.findall(r"<td>(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC)</td><td>(.*?)</td>", written)
    quoted = "main.py --config=small &#39;--config.data.corpus=&lt;my&gt; text&#39;"
    assert [command for _, command in starts] == [quoted, "main.py --again"]
    assert "<tr><td>batch_size</td><td>4</td><td>256</td></tr>" in written and "optimizer." not in written
    both = page.write_page(tmp_path / "out", [run, other]).read_text()
    assert not any(title in both for title in ("Commands", "Report", "Config", "Examples"))


@pytest.mark.usefixtures("figures")
def test_checkpoints_are_linked_relative_to_the_page(tmp_path, monkeypatch):
    runs = [made_run(tmp_path / "runs" / name, [5.0, 4.0]) for name in ("a", "b c")]
    checkpoint.write_params(runs[1], {"x": np.ones(3, np.float32)})
    for step, loss in ((20, 4.0), (10, 5.0)):
        shutil.copytree(runs[1] / "checkpoints/0", runs[1] / f"checkpoints/{step}")
        checkpoint.write_scores(runs[1], step, Scores({"mlm_loss": loss, "mlm_accuracy": None}))
    monkeypatch.chdir(tmp_path)
    written = page.write_page("pages/out", ["runs/a", "runs/b c"])
    cells = re.findall(r'<td><a href="([^"]+)">([^<]+)</a></td><td>([^<]*)</td>', written.read_text())
    scores = {0: "", 10: "mlm_loss 5.000", 20: "mlm_loss 4.000"}
    assert [row[1:] for row in cells] == [(f"runs/b c@{step}", score) for step, score in scores.items()]
    for step, (target, *_) in zip(scores, cells):
        place = written.parent / urllib.parse.unquote(target)
        assert place.resolve() == (runs[1] / f"checkpoints/{step}").resolve() and place.is_dir()
    assert "Checkpoints" not in page.write_page(tmp_path / "none", [runs[0]]).read_text()


@pytest.mark.usefixtures("figures")
def test_a_sweep_has_mean_deviation_and_baseline(tmp_path):
    for seed, score in ((0, 0.7), (1, 0.8), (2, None)):
        trial = made_run(tmp_path / f"search/runs/seed={seed}", [5.0])
        result = {"scores": {"accuracy": score}, "failed": score is None, "baseline": 0.5, "metric": "accuracy"}
        (trial / "result.json").write_text(json.dumps(result))
    written = page.write_page(tmp_path, [tmp_path / "search"]).read_text()
    assert "<td>50.0 ± 43.6</td><td>accuracy 50.0</td><td>3</td><td>1</td>" in written
    with pytest.raises(UserError, match=r"no .*config.json: .*nowhere' is not the workdir of a run"):
        page.write_page(tmp_path, [tmp_path / "nowhere"])


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_runs_and_sweeps_with_equal_names_have_distinct_labels(tmp_path, figures, monkeypatch):
    for owner, score in (("mine", 0.5), ("yours", 0.8)):
        made_run(tmp_path / owner / "bert", [5.0])
        made_trial(tmp_path / owner / "sst2/runs/seed=0", score)
    monkeypatch.chdir(tmp_path / "mine")
    written = page.write_page(
        tmp_path, ["bert", ".//bert", "../yours/bert", "sst2", tmp_path / "yours/sst2"]
    ).read_text()
    assert legend(figures[0]) == ["mine/bert", "yours/bert", "mine/sst2", "yours/sst2"]
    assert "<td>mine/sst2</td><td>50.0</td>" in written and "<td>yours/sst2</td><td>80.0</td>" in written
    monkeypatch.chdir("bert")
    assert "<h1>bert</h1>" in page.write_page(tmp_path, ["."]).read_text()


def test_seeds_have_separate_colours_only_in_a_sweep_over_seeds(tmp_path, figures):
    for trial in ("both/runs/epochs=2,seed=0", "both/runs/epochs=2,seed=1", "both/runs/epochs=3,seed=0",
                  "one/runs/seed=0", "one/runs/seed=1"):  # fmt: skip
        made_trial(tmp_path / trial, 0.5)
    rows = [page.write_page(tmp_path, [tmp_path / search]).read_text() for search in ("both", "one")]
    assert "<td>both/epochs=2</td><td>50.0 ± 0.0</td><td></td><td>2</td>" in rows[0]
    assert "<td>both/epochs=3</td><td>50.0</td><td></td><td>1</td>" in rows[0]
    assert [legend(figure) for figure in figures] == [["both/epochs=2", "both/epochs=3"], ["seed=0", "seed=1"]]
    trained = [[line.get_color() for line in figure.axes[0].lines[::3]] for figure in figures]
    assert trained == [["C0", "C0", "C1"], ["C0", "C1"]]


def checkpoint_of(config):
    ids, model = jnp.zeros((1, 8), jnp.int32), families.family_of(config).build(config, Compute())
    shapes = nn.meta.unbox(jax.eval_shape(model.init, jax.random.key(0), ids, ids, ids)["params"])
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(scale=0.5, size=x.shape).astype(x.dtype), shapes)
    return Pretrained("x", "bertjax", config, {"bert": params}, WordPiece(PIECES, lowercase=True), [])


@pytest.mark.parametrize("family, family_fields", [
    ("bert", {}),
    slow_case("bert", dict(causal=True, norm="pre", positions="each_layer")),
    slow_case("modernbert", dict(local_attention=4, num_hidden_layers=2, global_attn_every_n_layers=2)),
    slow_case("eurobert", dict(num_key_value_heads=1, head_dim=8)),
    slow_case("deberta_v2", dict(position_buckets=8, conv_kernel_size=3)),
    ("xlnet", {}),
    slow_case("nomic_bert", {}),
    slow_case("mpnet", {}),
    slow_case("transformer_xl", dict(clamp_length=5)),
])  # fmt: skip
def test_attention_is_compiled_for_few_lengths_and_padding_does_not_change_it(family, family_fields, monkeypatch):
    sizes = {"vocab_size": len(PIECES), "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "max_position_embeddings": 24}
    source = checkpoint_of(families.FAMILIES.get(family).config_class(**sizes | family_fields))
    known, traced = families.family_of(source.config).attention_probabilities, []

    def counted(config, params, ids, segments, types):
        traced.append(ids.shape[1])
        return known(config, params, ids, segments, types)

    monkeypatch.setattr(families.family_of(source.config), "attention_probabilities", counted)
    insight._probabilities.clear_cache()
    lengths = (
        {5: 16, 13: 16, 14: 16, 22: 24, 9: 16, 15: 24} if (family, family_fields) == ("bert", {}) else {22: 24, 15: 24}
    )
    for words in lengths:
        pieces, probabilities = insight.attention(source, " ".join((PIECES[5:] * 4)[:words]))
        assert len(pieces) == words + 2 and probabilities.shape == (len(probabilities), 2, words + 2, words + 2)
    assert traced == sorted(set(lengths.values()))
    ids = np.array([[PIECES.index(piece) for piece in pieces]])
    inputs = source.params["bert"], ids, np.ones_like(ids), np.zeros_like(ids)
    expected = jax.jit(known, static_argnums=0)(source.config, *inputs)
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)


def test_neighbours_are_the_closest_embeddings_and_mistakes_are_named():
    source = checkpoint_of(TINY)
    table = np.array(source.params["bert"]["embeddings"]["word"]["embedding"])
    table[PIECES.index("boat")] = 3 * table[PIECES.index("ship")]
    table[PIECES.index("whale")] = -table[PIECES.index("ship")]
    source.params["bert"]["embeddings"]["word"]["embedding"] = table
    closest = insight.neighbours(source, insight.word_ids(source, "ship . Ship !"))
    assert closest.keys() == {"ship"} and closest["ship"][0] == ("boat", pytest.approx(1.0))
    assert [word for word, _ in closest["ship"]].count("ship") == 0 and len(closest["ship"]) == insight.NEIGHBOURS
    assert insight.token_id_of(source, "Whale") == PIECES.index("whale")
    with pytest.raises(UserError, match="--words: 'whale ship' has 2 tokens; name words that are one token"):
        insight.token_id_of(source, "whale ship")
    with pytest.raises(UserError, match="--words: '☃' is unknown to the vocabulary"):
        insight.token_id_of(source, "☃")
    with pytest.raises(UserError, match="has 26 tokens, more than the model's positions"):
        insight.attention(source, "ship " * 24)


@pytest.mark.usefixtures("figures")
def test_a_damaged_line_is_skipped(tmp_path):
    run = made_run(tmp_path / "run", [5.0, 4.0, 3.0])
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | {"train/tokens_per_second": None})
    (run / "metrics.jsonl").write_text("\n".join([*lines[:4], "{", *lines[4:]]) + "\n")
    history = read_history(run)
    np.testing.assert_allclose(history.tokens(np.array([10, 30])), [4000, 4000 + 20 * 8 * 100])
    page.write_page(tmp_path / "out", [run])
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"run: no metrics yet"):
        page.write_page(tmp_path / "out", [run])


def test_a_page_that_cannot_be_drawn_does_not_fail_a_run(tmp_path, capsys):
    page.draw(tmp_path)
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"drawing {tmp_path}/report.html"
    assert second.startswith(f"{tmp_path}/report.html: not drawn (no {tmp_path}/config.json")
