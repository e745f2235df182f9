"""Hard negatives with a reranker, and the folder that keeps the parts of an interrupted computation."""

import json

import numpy as np
import pytest

from bertjax.common import lock
from bertjax.common.errors import UserError
from bertjax.embedding import mining, work_folder
from bertjax.embedding.mining import Choice
from bertjax.embedding.retrieval import Search
from bertjax.embedding.work_folder import WorkFolder

# The cosines of a query and the documents fall with the number of the document. Documents 0 and 5 are relevant.
SCORES = {0: 0.9, 1: 0.85, 2: 0.2, 3: 0.6, 4: 0.45, 5: 0.7, 6: 0.65, 7: 0.55}


class Reranker:
    """Scores by the number of the document, and counts the pairs."""

    def __init__(self, scores=SCORES, stop_at=None):
        self.pairs, self._scores, self._stop_at = [], scores, stop_at

    def scores(self, pairs):
        if self._stop_at is not None and len(self.pairs) >= self._stop_at:
            raise KeyboardInterrupt
        self.pairs += pairs
        return np.array([self._scores[int(document)] for _, document in pairs], np.float32)

    def identity(self):
        return "reranker"


def embeddings(queries=1):
    angles = np.arange(8) / 8
    return np.tile(np.float32([1, 0]), (queries, 1)), np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def search(queries=1):
    return Search([f"query {i}" for i in range(queries)], list("01234567"), [{0: 1.0, 5: 1.0}] * queries)


@pytest.mark.parametrize("choice, negatives, dropped", [
    # The lowest score of a relevant document is 0.7. Document 1 is nearer to the query than both relevant documents.
    (Choice(2, last=6, margin=0.0), [6, 3], [1, 0, 0]),
    (Choice(2, last=6, margin=0.08), [3, 7], [2, 0, 0]),
    (Choice(2, last=6, margin=0.3, is_share=True), [4, 2], [4, 0, 0]),
    (Choice(2, last=6, most=0.61), [3, 7], [0, 2, 0]),
    (Choice(3, last=6, margin=0.08, most=0.58, least=0.4), None, [2, 1, 1]),
    (Choice(2, first=2, last=4, margin=0.0), [3, 4], [0, 0, 0]),  # only documents 2, 3 and 4 are scored
])  # fmt: skip
def test_the_limits_compare_the_scores_of_the_reranker(choice, negatives, dropped):
    reranker = Reranker()
    mined = mining.mine_negatives(search(), *embeddings(), choice, reranker=reranker)
    assert mined.rows == ([(0, negatives)] if negatives else [])
    assert [mined.dropped[reason] for reason in mining.REMEDIES] == dropped
    assert [document for _, document in reranker.pairs] == ["0", "5", *"123467"[choice.first - 1 : choice.last]]
    if negatives:
        (scored,) = mined.scored
        assert scored.scores.tolist() == np.float32([SCORES[number] for number in negatives]).tolist()
        assert scored.positives.tolist() == np.float32([0.9, 0.7]).tolist()


def test_scores_of_a_reranker_without_limits_do_not_choose(tmp_path):
    reranker, choice = Reranker(), Choice(2)
    mined = mining.mine_negatives(search(), *embeddings(), choice, reranker=reranker)
    assert mined.rows == [(0, [1, 2])] and len(reranker.pairs) == 4
    lines = list(mining.write_negatives(tmp_path / "mined.jsonl", search(), mined, choice, with_scores=True))
    rows = [json.loads(line) for line in (tmp_path / "mined.jsonl").read_text().splitlines()]
    scores = {"score_negative_1": 0.85, "score_negative_2": 0.2}
    texts = {"negative_1": "1", "negative_2": "2"}
    assert rows == [
        {"anchor": "query 0", "positive": "0", **texts, "score_positive": 0.9, **scores},
        {"anchor": "query 0", "positive": "5", **texts, "score_positive": 0.7, **scores},
    ]
    assert lines[-1].startswith("mean cosines: ")


def test_the_lines_name_the_scores_of_the_reranker(tmp_path):
    choice = Choice(2, last=6, most=0.61)
    mined = mining.mine_negatives(search(), *embeddings(), choice, reranker=Reranker())
    lines = list(mining.write_negatives(tmp_path / "mined.csv", search(), mined, choice))
    assert lines[-1] == "mean reranker's scores: 0.800 of positives, 0.575 of negatives"
    assert "2 were above the highest allowed reranker's score" in lines[1]


def test_interrupted_reranking_resumes_after_finished_queries(tmp_path, monkeypatch):
    monkeypatch.setattr(mining, "RERANKED_QUERIES", 2)
    arguments = (search(5), *embeddings(5), Choice(2, margin=0.1), "cosine")
    whole = mining.mine_negatives(*arguments, Reranker())
    folder, first, second, third = WorkFolder(tmp_path), Reranker(stop_at=16), Reranker(), Reranker()
    with pytest.raises(KeyboardInterrupt):
        mining.mine_negatives(*arguments, first, folder, ("texts",))
    mined = mining.mine_negatives(*arguments, second, folder, ("texts",))
    assert len(first.pairs) == 16 and len(second.pairs) == 5 * 8 - 16
    assert mined.rows == whole.rows and mined.cosines == whole.cosines
    mining.mine_negatives(*arguments, third, folder, ("other texts",))
    assert len(third.pairs) == 5 * 8


def test_a_part_is_computed_again_if_its_file_is_damaged(tmp_path):
    folder, arrays = WorkFolder(tmp_path), [np.arange(3), np.float32([[0.5]])]
    assert folder.arrays("part", 1, lambda: arrays) is not None
    (path,) = tmp_path.iterdir()
    for content in (path.read_bytes()[:-9], b"", None):
        if content is not None:
            path.write_bytes(content)
        read = folder.arrays("part", 1, lambda: arrays)
        assert all((a == b).all() for a, b in zip(read, arrays, strict=True))
    assert folder.arrays("part", 2, lambda: []) == []


def test_the_folder_is_kept_after_an_error_and_deleted_at_the_end(tmp_path):
    with pytest.raises(UserError), work_folder.opened_for(tmp_path / "new/mined.csv") as folder:
        folder.arrays("part", 1, lambda: [np.arange(3)])
        assert lock.is_held(folder.path)
        raise UserError("no negatives")
    with work_folder.opened_for(tmp_path / "new/mined.csv") as folder:
        (array,) = folder.arrays("part", 1, lambda: [])
        assert array.tolist() == [0, 1, 2]
        busy = r"work folder=.*mined.csv.work: in use by host .*, process \d+, .*; wait for its end, or choose another"
        with pytest.raises(UserError, match=busy), work_folder.opened_for(tmp_path / "new/mined.csv"):
            pass
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "file").touch()
    message = r"--output=.*/file/mined.csv: the work folder .* cannot be created \(Not a directory\); correct the path"
    with pytest.raises(UserError, match=message), work_folder.opened_for(tmp_path / "file/mined.csv"):
        pass
