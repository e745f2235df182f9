"""Vectors of your texts: an encoder is trained so that texts that belong together get vectors near each other.

Command:  bertjax train --config=embed --config.init_checkpoint=DIR --config.data.path=FOLDER
          with train.csv (.tsv, .jsonl) and dev.csv in the folder, whose columns are `anchor` and `positive`
Hardware: one Cloud TPU or GPU; small models also on a laptop
"""

import ml_collections

from bertjax.config import fine_tuning_config


def get_config():
    config = fine_tuning_config(
        "embed",
        # What an example is: pairs (of a query and its document, in two columns; more columns are documents that are
        # not the query's) | scored (pairs with a number: how similar they are) | labelled (pairs with 1 or 0) |
        # sentences (a text and itself, under another dropout: SimCSE) | squad (questions and their paragraphs) |
        # search (a folder as BEIR has it: corpus.jsonl, queries.jsonl, qrels/train.tsv).
        form="pairs",
        texts="anchor,positive",  # columns
        label="label",  # column of the score or label
        heldout_seed=0,  # if data.path is one file: chooses the tenth of it that is the dev set
        # What is written before a text: of queries, or all where there are no documents; and of documents.
        query_prompt="",
        document_prompt="",
        # The dev set; empty: as above. ignore_identical_ids, of form=search: no query finds the document with its id,
        # where queries are documents as well, as in BEIR's ArguAna.
        dev=ml_collections.ConfigDict(dict(path="", form="", texts="", label="", ignore_identical_ids=False)),
        sets=ml_collections.ConfigDict(),  # more training sets by name, see `text_set`
    ).unlock()
    # A vector is made of the states of a text: their mean | that of its first token, cls | that of the last one.
    # dense: width of a dense layer after it, 0: none; its activation: none | tanh. normalize: its length is 1.
    config.head = ml_collections.ConfigDict(dict(pooling="mean", dense=0, dense_act="none", normalize=True))
    config.loss = ml_collections.ConfigDict(
        dict(
            temperature=0.05,  # divides cosines
            symmetric=False,  # for pairs: documents also look for their queries among all of the batch
            margin=0.5,  # for labelled pairs: 1 - cosine of those that do not belong together is to be larger
            widths="",  # such as 256,64: the first so many numbers of a vector are a good vector as well (Matryoshka)
        )
    )
    # A teacher is any model with vectors, whose own are learnt (of the same width: head.dense makes it), or its scores:
    # by how much a positive's cosine is above a negative's; of two texts their cosine.
    config.distill.what = "vectors"
    config.batch_size, config.packing, config.epochs = 64, True, 1.0
    return config.lock()


def text_set(path: str, form: str = "pairs", texts: str = "anchor,positive", label: str = "label", weight: float = 1.0):
    """Returns a training set for `config.data.sets`; `weight`: how often it is used in an epoch."""
    return ml_collections.ConfigDict(dict(path=path, form=form, texts=texts, label=label, weight=weight))
