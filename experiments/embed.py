"""Embeddings of your texts: trains an encoder so that related texts get similar embeddings.

Command:  bertjax train --config=embed --config.init_checkpoint=DIR --config.data.path=FOLDER
          with train.csv (.tsv, .jsonl) and dev.csv in the folder, whose columns are `anchor` and `positive`
Hardware: one Cloud TPU or GPU; small models also on a laptop
"""

import ml_collections

from bertjax.config import fine_tuning_config


def get_config():
    config = fine_tuning_config(
        "embed",
        # The form of the examples: pairs (a query and its document in two columns; further columns: hard negatives) |
        # scored (pairs with a similarity score) | labelled (pairs with 1 or 0) | sentences (single texts, each encoded
        # twice with different dropout: SimCSE) | squad (questions and their paragraphs) | search (a folder in
        # the format of BEIR: corpus.jsonl, queries.jsonl, qrels/train.tsv).
        form="pairs",
        texts="anchor,positive",  # columns
        # The column of the score or label. For pairs: the columns of the scores of all documents by a teacher, such as
        # score_positive,score_negative, for distill.what=scores and kl.
        label="label",
        heldout_seed=0,  # if data.path is one file: the seed that draws a tenth of it as the dev set
        # The prompts of queries (of all texts, if there are no documents) and of documents.
        query_prompt="",
        document_prompt="",
        # The dev set; an empty field has the value of the training set. ignore_identical_ids (for form=search): ignores
        # the document with the id of the query, for data whose queries are also documents, such as BEIR's ArguAna.
        dev=ml_collections.ConfigDict(dict(path="", form="", texts="", label="", ignore_identical_ids=False)),
        sets=ml_collections.ConfigDict(),  # more training sets by name, see `text_set`
        # The share of a training set in the batches of an epoch: weights (its size times its weight) | proportional (to
        # its size) | temperature (to its size ** (1 / temperature): above 1, small sets get larger shares).
        sampling="weights",
        temperature=1.0,
    ).unlock()
    # pooling selects the hidden states: mean (over all tokens) | cls (the first token) | last (the last token).
    # dense is the width of a dense layer after pooling (0: no layer), dense_act its activation: none | tanh.
    # normalize scales each embedding to length 1.
    config.head = ml_collections.ConfigDict(dict(pooling="mean", dense=0, dense_act="none", normalize=True))
    config.loss = ml_collections.ConfigDict(
        dict(
            # The losses of the forms, separated by commas. pairs, sentences, squad, search: infonce | triplet (pairs
            # with negatives). scored: cosent | angle. labelled: contrastive | online_contrastive. Empty: the first.
            name="",
            temperature=0.05,  # divides cosines, in infonce, cosent and angle
            symmetric=False,  # for pairs: also scores each document against all queries of the batch
            margin=0.5,  # for labelled pairs: the minimum 1 - cosine of unrelated texts
            distance_metric="cosine",  # of triplet: cosine (1 - cosine) | euclidean | manhattan
            triplet_margin=0.5,  # of triplet: the minimum difference of the distances of a negative and the positive
            # An embedding checkpoint that excludes false negatives from infonce (GISTEmbed): candidates whose cosine by
            # the guide is above the cosine of query and positive by the guide, minus guide_margin.
            guide="",
            guide_margin=0.0,
            widths="",  # Matryoshka dimensions, such as 256,64
        )
    )
    # vectors (the teacher's embeddings, which must have the same width: set head.dense) | scores (the teacher's
    # difference between the cosines of a positive and a negative, or the cosine of two texts) | kl (the teacher's
    # distribution over the documents of a query).
    config.distill.what = "vectors"
    # For kl: divide the scores of the student and of the teacher; 0: the value of distill.temperature.
    with config.distill.unlocked():
        config.distill.student_temperature = config.distill.teacher_temperature = 0.0
    config.batch_size, config.packing, config.epochs = 64, True, 1.0
    # examples (a batch has batch_size examples) | tokens (all batches have about the same number of tokens, and a batch
    # of short texts has more examples; batch_size is the mean number of examples).
    config.batch_by = "examples"
    return config.lock()


def text_set(
    path: str,
    form: str = "pairs",
    texts: str = "anchor,positive",
    label: str = "label",
    weight: float = 1.0,
    query_prompt: str = "",
    document_prompt: str = "",
):
    """Returns a training set for `config.data.sets`.

    Args:
      path: the file or the folder.
      form: the form of the examples, as `config.data.form`.
      texts: the columns of the texts.
      label: the column of the label.
      weight: the number of times that the set is used in an epoch.
      query_prompt: the prompt of the queries of this set; empty: the prompt of `config.data`; "none": no prompt.
      document_prompt: the prompt of the documents of this set, in the same way.
    """
    fields = dict(path=path, form=form, texts=texts, label=label, weight=weight)
    prompts = dict(query_prompt=query_prompt, document_prompt=document_prompt)
    return ml_collections.ConfigDict(fields | {name: prompt for name, prompt in prompts.items() if prompt})
