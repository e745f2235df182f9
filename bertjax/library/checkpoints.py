"""Uses of a checkpoint that read or write files: evaluation, extraction, mining, submissions, conversion."""

from collections.abc import Callable

import numpy as np
from absl import logging

from bertjax.common.errors import UserError
from bertjax.common.files import require_file_name, require_new_folder, write_whole
from bertjax.config.limits import FLOAT32, FORMATS
from bertjax.data.corpus.text_input import TextInput
from bertjax.embedding.hard_negatives import MinedFile, check_output, check_reranker, make_choice, mine_files
from bertjax.inference.embedders import check_settings
from bertjax.inference.extraction import Extracted, write_extracted
from bertjax.inference.quantization import check_precision
from bertjax.inference.text_embedding import SUFFIXES
from bertjax.interop import pretrained
from bertjax.interop.pretrained import Pretrained
from bertjax.library.arguments import check_number, plain_texts, require_path
from bertjax.library.types import Path, Texts
from bertjax.reranking.ranking import Ranker, is_reranker
from bertjax.reranking.run_files import RerankedFile, read_candidates, rerank_run
from bertjax.reranking.task import TASK as RERANK
from bertjax.training.scores import Scores


def read_checkpoint(path: Path, dtype: str | None = None) -> Pretrained:
    """Reads a checkpoint with its tokenizer, see `load`. Meanwhile, libraries log nothing through absl."""
    path = require_path("path", path)
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.FATAL)  # The libraries also raise the errors that they log.
    try:
        return pretrained.read_with_tokenizer(path, dtype)
    finally:
        logging.set_verbosity(verbosity)


def evaluate(
    checkpoint: Path,
    data: Path,
    dtype: str | None = None,
    on_note: Callable[[str], None] = lambda note: None,
    **description: str | bool | int | None,
) -> Scores:
    """Scores a checkpoint on a labelled file, without training.

    Args:
      checkpoint: the checkpoint, as for `load`.
      data: a file of the same kind as the dev set of the run; for embeddings also a folder, such as a folder of BEIR.
      dtype: the type to compute in, as for `load`.
      on_note: a function such as `print`, which is called with lines about the examples before the scores are computed,
        and with a warning about the scores.
      **description: for embeddings, values of the flags form, texts, label, widths, ignore_identical_ids,
        precision and rescore of
        `bertjax evaluate`, which describe the data.

    Returns:
      The scores. `decided` are the thresholds that the scores depend on: the thresholds of the dev set of the run, or
      else thresholds that are tuned on this file.

    Raises:
      UserError: if the checkpoint does not determine how the file is read, or if the file is invalid.

    Examples:
      >>> bertjax.evaluate("runs/reviews", "test.csv").scores
    """
    from bertjax.finetuning.evaluation import score_file

    data = require_path("data", data)
    source = read_checkpoint(checkpoint, dtype)
    # A classifier with one label and without a run is a reranker here: its labels have no names.
    task = None if source.settings.get("task") or not is_reranker(source) else RERANK
    return score_file(source, data, on_note, task, **description)


def extract(
    checkpoint: Path,
    texts: Texts | TextInput,
    output: Path,
    *,
    prompt: str | None = None,
    width: int = 0,
    pool: str = "",
    layers: str = "",
    dtype: str | None = None,
    precision: str = FLOAT32,
    calibration: Path | None = None,
) -> Extracted:
    """Writes one embedding per text, or the hidden states of all tokens, to a file.

    With `pool`, the embeddings are pooled hidden states. Without `pool` and `layers`, the function writes the
    embeddings that the checkpoint was trained for. If the checkpoint was not trained for embeddings, or if only
    `layers` is set, the function writes the hidden states of all tokens. After an interruption, the same call resumes
    the computation of embeddings.

    Args:
      checkpoint: the checkpoint, as for `load`.
      texts: one text, or several; a `TextInput` reads texts from a file.
      output: the .npy, .npz or .parquet file; hidden states of tokens need an .npz.
      prompt: the prompt, which precedes each text, as for `Model.embed`.
      width: the number of dimensions of embeddings, as for `Model.embed`.
      pool: "mean", "cls" or "last", as for `Model.embed`; "" for no pooling.
      layers: the layers whose hidden states are written or pooled, such as "last". "" with `pool`: the last layer. ""
        without `pool`: the concatenation of the last four layers, or the last layer of a model with fewer layers.
      dtype: the type to compute in, as for `load`.
      precision: the type of the written embeddings: float32, int8, or ubinary with one bit per dimension, as in
        `quantize_embeddings` of sentence-transformers.
      calibration: for int8, an .npy of float embeddings, or the .json of an .npy of int8 embeddings, which determines
        the range of each dimension; None for the ranges of the embeddings.

    Returns:
      The shape of the array, and the number of truncated texts.

    Raises:
      UserError: for an invalid argument, or if there is no text.
    """
    checkpoint, output = require_path("checkpoint", checkpoint), require_path("output", output)
    if not output.endswith(SUFFIXES):
        raise UserError(f"--output={output}: must end in one of {', '.join(SUFFIXES)}")
    check_settings(prompt, width, pool, layers)
    ranges_file = "" if calibration is None else require_path("calibration", calibration)
    check_precision(precision, ranges_file)
    text_input = texts if isinstance(texts, TextInput) else TextInput(plain_texts(texts))
    text_input.check(checkpoint)
    source = read_checkpoint(checkpoint, dtype)
    return write_extracted(source, text_input, output, prompt, width, pool, layers, precision, ranges_file)


def mine(
    checkpoint: Path,
    data: Path,
    output: Path,
    *,
    corpus: Path | None = None,
    form: str = "pairs",
    texts: str = "anchor,positive",
    negatives: int = 1,
    first: int = 1,
    last: int = 100,
    margin: str | float = "-inf",
    min_score: float = -np.inf,
    max_score: float = np.inf,
    seed: int | None = None,
    dtype: str | None = None,
    reranker: Path | None = None,
    scores: bool = False,
) -> MinedFile:
    """Mines hard negatives with the embeddings of a checkpoint, and writes them to a table.

    For each query, finds the nearest documents that are not relevant to the query. The table has the columns anchor,
    positive, negative_1, ..., which the experiment `embed` trains on. The same call resumes after an interruption.

    Args:
      checkpoint: the checkpoint, as for `load`.
      data: a file of queries and documents, or a folder with such a train file.
      output: the .jsonl, .csv or .tsv file to write.
      corpus: a file with more documents.
      form: the form of the examples of `data`, as `config.data.form`.
      texts: the columns of the texts of `data`, as `config.data.texts`.
      negatives: the number of negatives of a query.
      first: the rank of the first document that can be a negative; 1 is the nearest document.
      last: the rank of the last document that can be a negative.
      margin: the minimum difference between the cosine of the positive and the cosine of a negative: a number such as
        0.1, or a share of the cosine of the positive such as "5%".
      min_score: the minimum cosine of a negative.
      max_score: the maximum cosine of a negative.
      seed: the seed of a random choice among the documents with these ranks; None takes the nearest documents.
      dtype: the type to compute in, as for `load`.
      reranker: a checkpoint that computes one score for a pair of texts. `margin`, `min_score` and `max_score` then
        compare its scores, and the documents with its highest scores are the nearest documents.
      scores: whether to write the columns score_positive, score_negative_1, ...: the scores of the reranker if there is
        one, otherwise the cosines.

    Returns:
      The number of queries, the number of queries with enough negatives, and lines with the numbers of dropped
      candidates and queries.

    Raises:
      UserError: for an invalid file or choice, or a checkpoint without embeddings.
    """
    choice = make_choice(negatives, first, last, margin, min_score, max_score, seed)
    corpus_path = None if corpus is None else require_path("corpus", corpus)
    paths = (require_path("checkpoint", checkpoint), require_path("data", data), require_path("output", output))
    check_output(paths[2])
    scorer = None
    if reranker is not None:
        reranker = require_path("reranker", reranker)
        check_reranker(reranker, choice, scores)
        scorer = Ranker(read_checkpoint(reranker, dtype))
    return mine_files(*paths, choice, corpus_path, form, texts, dtype, scorer, scores)


def rerank(
    checkpoint: Path,
    data: Path,
    candidates: Path,
    output: Path,
    top_k: int = 100,
    dtype: str | None = None,
) -> RerankedFile:
    """Reranks the candidates of queries, and writes the new ranking as a run file of TREC.

    Args:
      checkpoint: a reranker, as for `load`.
      data: a folder in the format of BEIR, with queries.jsonl and corpus.jsonl.
      candidates: a run file of TREC with the candidates of each query.
      output: the run file to write.
      top_k: the number of first candidates of a query that are scored; the others are left out.
      dtype: the type to compute in, as for `load`.

    Returns:
      The numbers of queries and of scored documents.

    Raises:
      UserError: for a missing or invalid file, an unknown id, or a checkpoint that is no reranker.

    Examples:
      >>> bertjax.rerank("runs/reranker", "beir", "candidates.trec", "reranked.trec")
    """
    check_number("top_k", top_k, 1)
    paths = require_path("data", data), require_path("candidates", candidates)
    output = require_path("output", output)
    require_file_name(output)
    first_candidates = read_candidates(*paths, top_k)
    return rerank_run(read_checkpoint(checkpoint, dtype), first_candidates, output)


def submit(checkpoint: Path, test_file: Path, output: Path) -> str:
    """Predicts the test set of a benchmark, and writes the file that the benchmark's server expects.

    Args:
      checkpoint: the workdir of a run on the benchmark's training set.
      test_file: the test file, as the benchmark distributes it.
      output: the file to write.

    Returns:
      A line about the predictions.

    Raises:
      UserError: if the task of the checkpoint takes no submissions, or if the test file is invalid.
    """
    from bertjax.inference.abilities import require_ability
    from bertjax.inference.task import HasSubmission

    test_file, output = require_path("test_file", test_file), require_path("output", output)
    source = read_checkpoint(checkpoint)
    content, note = require_ability(source, HasSubmission).submission(source, test_file)
    write_whole(output, content)
    return f"{note} in {output}"


def convert(
    source: Path,
    output: Path,
    format: str,
    *,
    architecture: str = "",
    license: str = "",
    part: str = "",
    base: str = "",
    push: str = "",
    private: bool = False,
    int8: bool = False,
) -> str:
    """Converts a checkpoint to another format.

    Args:
      source: the checkpoint, as for `load`.
      output: the folder to write; it must be new or empty.
      format: bertjax, huggingface, sentence-transformers, tf1, peft, stablehlo or onnx.
      architecture: for huggingface, the transformers class; "" for the class that keeps most weights.
      license: the license in the model card, such as apache-2.0.
      part: the second model of a run, such as the generator, to write instead of the first model.
      base: for peft, the name of the base on the hub, USER/NAME[@REVISION].
      push: USER/NAME of a repository on the hub, to which the folder is pushed.
      private: whether a new repository is private.
      int8: for onnx, writes a model with 8-bit weights as well.

    Returns:
      A summary in one line.

    Raises:
      UserError: if the format cannot contain the model, if an option does not apply to the format, or if the push
        fails.

    Examples:
      >>> bertjax.convert("runs/reviews", "reviews-hf", "huggingface")
    """
    source, output = require_path("source", source), require_path("output", output)
    if format not in FORMATS:
        raise UserError(f"format = {format!r}: choose one of {', '.join(FORMATS)}")
    if int8 and format != "onnx":
        raise UserError("--int8: only for --format=onnx")
    require_new_folder(output)  # before the model is read, which can take minutes
    if format not in ("stablehlo", "onnx"):
        from bertjax.interop import conversion

        return conversion.convert(source, output, format, architecture, license, part, push, private, base)
    options = dict(architecture=architecture, license=license, part=part, base=base, push=push, private=private)
    if wrong := next((name for name, value in options.items() if value), None):
        raise UserError(f"--{wrong}: not for --format={format}")
    from bertjax.export import onnx, stablehlo

    checkpoint = read_checkpoint(source)
    return onnx.write(output, checkpoint, int8) if format == "onnx" else stablehlo.write(output, checkpoint)
