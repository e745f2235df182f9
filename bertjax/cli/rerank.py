"""Ranks documents for a query with a reranker.

    bertjax rerank runs/reranker --query="how old is the ship ?" --input=documents.txt --top_k=5

Scores each document together with the query, and prints the documents with the highest scores: the score, the number of
the document from 0, and the text. Documents are the lines of --input, or the arguments after the checkpoint. The
checkpoint is the workdir of a run of `rerank`, a folder of a CrossEncoder, or a classifier with one label.
With --data=FOLDER in the format of BEIR and a run file of TREC as --candidates, scores the first candidates of each
query, and writes the new ranking to the run file --output. bertjax search --run=FILE writes such candidates.
"""

import json

from absl import flags

from bertjax.cli.app import run_command, start_reading
from bertjax.cli.flags import define_checkpoint_flag, define_dtype_flag, define_input_flag, group_flags
from bertjax.common.errors import UserError
from bertjax.training.signals import exit_on_signal

_CHECKPOINT = define_checkpoint_flag()
_DTYPE = define_dtype_flag()
_QUERY = flags.DEFINE_string("query", None, "The query.")
_INPUT = define_input_flag()
_TOP_K = flags.DEFINE_integer(
    "top_k", None, "Number of documents to print, by default 10; with --candidates, number of candidates to score, by "
    "default 100.", lower_bound=1,
)  # fmt: skip
_DATA = flags.DEFINE_string("data", None, "A folder of BEIR with queries.jsonl and corpus.jsonl.")
_CANDIDATES = flags.DEFINE_string("candidates", None, "A run file of TREC with the candidates of each query.")
_OUTPUT = flags.DEFINE_string("output", None, "The run file of TREC to write.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object per document.")
group_flags("Run files", _DATA, _CANDIDATES, _OUTPUT)


@exit_on_signal()
def main(documents: list[str]) -> None:
    """Prints or writes the ranking."""
    from bertjax.data.corpus.text_input import TextInput, missing_text

    files = (_DATA, _CANDIDATES, _OUTPUT)
    if any(flag.value for flag in files):
        _rerank_run(documents)
        return
    if not (query := (_QUERY.value or "").strip()):
        raise UserError('--query: is missing or blank; give --query="a query", or --data, --candidates and --output')
    texts = documents + [line for line in TextInput(path=_INPUT.value or "") if line.strip()]
    if not texts:
        raise missing_text(_CHECKPOINT.value, _INPUT.value or "")
    start_reading(_CHECKPOINT.value)
    from bertjax.library.model import load

    for ranked in load(_CHECKPOINT.value, _DTYPE.value).rank(query, texts, _TOP_K.value or 10):
        if _JSON.value:
            row = {"index": ranked.index, "score": ranked.score, "text": ranked.text}
            print(json.dumps(row, ensure_ascii=False), flush=True)
        else:
            print(f"  {ranked.score:.3f}  {ranked.index}: {' '.join(ranked.text.split())}", flush=True)


def _rerank_run(documents: list[str]) -> None:
    paths = []
    for flag in (_DATA, _CANDIDATES, _OUTPUT):
        if not flag.value:
            raise UserError(f"--{flag.name}: is missing; run files need --data, --candidates and --output")
        paths.append(flag.value)
    for unused in (_QUERY, _INPUT, _JSON):
        if unused.value:
            raise UserError(f"--{unused.name}={unused.value}: is for one query; leave the flag out with --candidates")
    if documents:
        raise UserError(f"unexpected argument {documents[0]!r}; --data has the documents")
    start_reading(_CHECKPOINT.value)
    from bertjax.library.checkpoints import rerank

    result = rerank(_CHECKPOINT.value, paths[0], paths[1], paths[2], _TOP_K.value or 100, _DTYPE.value)
    print(f"{result.documents:,} documents of {result.queries:,} queries in {_OUTPUT.value}", flush=True)


if __name__ == "__main__":
    run_command(main)
