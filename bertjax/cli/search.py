"""Searches documents by meaning.

    bertjax search runs/vectors --corpus=docs.txt "a query"

Embeds the documents and the queries, and prints the documents with the highest similarity to each query: the score,
the id or the number of the line, and the text. The search is exact. --index=FOLDER keeps the documents and their
embeddings: the first command writes the folder, and resumes after an interruption; later commands with the same folder
need no --corpus. --queries=FILE and --run=FILE write the results of many queries to a run file of TREC, which
bertjax rerank reads. --checkpoint is the workdir of a run of `embed`, or a folder of sentence-transformers; with
--pool=mean, any checkpoint that bertjax extract takes.
"""

import contextlib
import json
import sys

from absl import flags

from bertjax.cli.app import run_command, start_reading
from bertjax.cli.flags import define_checkpoint_flag, define_dtype_flag
from bertjax.cli.next_commands import command, print_next
from bertjax.common.errors import UserError
from bertjax.common.files import require_file_name
from bertjax.config.limits import POOLS
from bertjax.training.signals import exit_on_signal

_CHECKPOINT = define_checkpoint_flag()
_DTYPE = define_dtype_flag()
_CORPUS = flags.DEFINE_string(
    "corpus",
    None,
    "The documents: a .txt with one per line; or a .jsonl, .csv, .tsv or .parquet with the column `text`, and "
    "optionally "
    "`title` and `id`.",
)
_INDEX = flags.DEFINE_string(
    "index", None, "Folder with the documents and their embeddings; by default a temporary folder."
)
_POOL = flags.DEFINE_enum(
    "pool",
    None,
    [*POOLS],
    "Embeds with the mean of the last hidden states, or with the last hidden state of one token.",
)
_TOP_K = flags.DEFINE_integer("top_k", 5, "Number of documents for each query.", lower_bound=1)
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object per query.")
_QUERIES = flags.DEFINE_string("queries", None, "A .jsonl, .csv or .tsv with the queries, in the columns _id and text.")
_RUN = flags.DEFINE_string("run", None, "The run file of TREC to write, with the documents of each query of --queries.")
_IGNORE_IDENTICAL_IDS = flags.DEFINE_bool(
    "ignore_identical_ids", False, "With --run: leaves out the document that has the id of the query, as for ArguAna."
)


@exit_on_signal()
def main(queries: list[str]) -> None:
    """Builds or opens the index, and prints the documents of each query."""
    from bertjax.embedding.index import SearchIndex, check_inputs
    from bertjax.library.model import load
    from bertjax.reranking.run_files import read_queries, write_run

    _check_flags(queries)
    folder = _INDEX.value or None
    check_inputs(_CORPUS.value, folder)
    queries_by_id = read_queries(_QUERIES.value) if _QUERIES.value else {}
    start_reading(_CHECKPOINT.value)
    with contextlib.redirect_stdout(sys.stderr):  # the progress; stdout has the results only
        model = load(_CHECKPOINT.value, _DTYPE.value)
        if _CORPUS.value is None:
            index = SearchIndex.open(model, folder, _POOL.value or "")
        else:
            index = SearchIndex.build(model, _CORPUS.value, folder, _POOL.value or "")
    if _RUN.value:
        print(write_run(index, queries_by_id, _RUN.value, _TOP_K.value, _IGNORE_IDENTICAL_IDS.value), flush=True)
        return
    for query, hits in zip(queries, index.search(queries, _TOP_K.value)):
        if _JSON.value:
            print(json.dumps({"query": query, "hits": [hit._asdict() for hit in hits]}, ensure_ascii=False), flush=True)
        else:
            lines = (f"  {hit.score:.3f}  {hit.id}: {' '.join(hit.text.split())}" for hit in hits)
            print(query, *lines, sep="\n", flush=True)
    if _CORPUS.value and folder and not _JSON.value:
        print_next(command("search", _CHECKPOINT.value, f"--index={folder}", "a query"))


def _check_flags(queries: list[str]) -> None:
    """Raises `UserError` for flags and arguments that do not fit together."""
    if bool(_QUERIES.value) != bool(_RUN.value):
        raise UserError("--queries, --run: set both, to write a run file, or none")
    if _QUERIES.value and queries:
        raise UserError(f"unexpected argument {queries[0]!r}; --queries has the queries")
    if _IGNORE_IDENTICAL_IDS.value and not _RUN.value:
        raise UserError("--ignore_identical_ids: queries have ids only with --queries and --run; leave the flag out")
    if not queries and not _QUERIES.value:
        raise UserError(
            f"no query for the checkpoint {_CHECKPOINT.value!r}: give one or more on the command line, as in bertjax "
            f'search {_CHECKPOINT.value} "a query"'
        )
    if _RUN.value:
        if _JSON.value:
            raise UserError("--json: is for queries on the command line; leave the flag out with --run")
        require_file_name(_RUN.value)


if __name__ == "__main__":
    run_command(main)
