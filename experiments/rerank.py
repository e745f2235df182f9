"""A reranker of your documents: scores each candidate of a search together with the query.

Command:  bertjax train --config=rerank --config.init_checkpoint=DIR --config.data.path=FOLDER
          with train.csv (.tsv, .jsonl) and dev.csv in the folder, whose columns are `query`, `positive` and `negative`
Hardware: one Cloud TPU or GPU; small models also on a laptop
"""

import ml_collections

from bertjax.config import fine_tuning_config


def get_config():
    config = fine_tuning_config(
        "rerank",
        # The form of the lists: pairs (a query, its positive and negatives in columns, as `bertjax mine` writes them) |
        # labelled (a query, a document and a label or score in each row) | lists (a query, a list of documents and a
        # list of their grades, in JSON lines) | rerank (query, positive, and negative or documents as lists, in JSON
        # lines) | squad (questions and their paragraphs) | search (a folder in the format of BEIR: corpus.jsonl,
        # queries.jsonl, qrels/train.tsv).
        form="pairs",
        texts="query,positive,negative",  # columns
        # The column of the label, or the columns of a teacher's scores, separated by commas: one for each document, or
        # for each negative the difference between the scores of the positive and of the negative.
        label="",
        candidates="",  # for form=search: a run file of TREC with the candidates of each query; empty: judged documents
        query_prompt="",  # precedes each query, such as "query: "
        # Documents longer than max_seq_length are truncated, or read in windows with a stride of doc_stride tokens. The
        # score of the document is the max or the mean of the scores of its windows.
        windows="",
        doc_stride=64,
        heldout_seed=0,  # if data.path is one file: the seed that draws a tenth of its queries as the dev set
        # The dev set; an empty field has the value of the training set, except candidates.
        dev=ml_collections.ConfigDict(dict(path="", form="", texts="", label="", candidates="")),
    ).unlock()
    config.loss = ml_collections.ConfigDict(
        dict(
            # For lists (a batch has batch_size lists): multiple_negatives | margin_mse | list_net | list_mle |
            # position_aware_list_mle | rank_net | lambda | kl. For single pairs (a batch has batch_size pairs):
            # binary_cross_entropy | mse.
            name="list_net",
            positive_weight=1.0,  # binary_cross_entropy: the weight of positive pairs
            scale=10.0,  # multiple_negatives: multiplies the sigmoid of a score
            negatives=4,  # multiple_negatives: the number of documents of other queries of the batch for each query
            # lambda: the weights of pairs of documents: none | ndcg_loss1 | ndcg_loss2 | lambda_rank | ndcg_loss2++
            scheme="ndcg_loss2++",
            k=0,  # rank_net, lambda: compares pairs with a document in the first k ranks; 0: all pairs
            sigma=1.0,  # rank_net, lambda: multiplies the difference of two scores
            mu=10.0,  # lambda: the weight of ndcg_loss2 in ndcg_loss2++
            temperature=1.0,  # kl: divides the scores of the model and of the teacher
        )
    )
    config.max_seq_length = 256
    config.epochs = 1.0
    config.packing = True
    return config.lock()
