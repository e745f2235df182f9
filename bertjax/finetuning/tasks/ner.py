"""Named entities and other tags of words in CoNLL files, such as CoNLL-2003 (Devlin et al. 2019, section 5.3)."""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from bertjax.data.corpus.tables import TFDS
from bertjax.finetuning import conll, tagging
from bertjax.finetuning.tagging import TaggedSentences, TaggingTask
from bertjax.inference.task import TaskData
from bertjax.interop.pretrained import Pretrained
from bertjax.text.tokenizer import Tokenizer
from bertjax.text.words import join_of


class Ner(TaggingTask):
    """Tagging of the words in CoNLL files."""

    def load(self, config: ConfigDict, tokenizer: Tokenizer) -> TaskData:
        """Reads the training and dev files of the folder. Raises `UserError` for missing or invalid files."""
        path, with_context = config.data.path, config.data.document_context
        if path.startswith(TFDS):
            train, dev = (conll.read_tfds_conll(path, split) for split in ("train", "dev"))
        else:
            train, dev = (conll.read_conll(conll.find_conll_file(path, name)) for name in ("train", "dev"))
        labels = conll.tag_names(train)
        data = tagging.make_tagging_data(
            train,
            dev,
            labels,
            self.head_for(len(labels)),
            tokenizer,
            config.max_seq_length,
            with_context,
            join_of(config),
        )
        notes = [
            f"no {conll.DOCUMENT} lines: no document context for the {name} sentences"
            for name, sentences in (("training", train), ("dev", dev))
            if with_context and sentences[-1].document == len(sentences) - 1
        ]
        return dataclasses.replace(data, notes=(*data.notes, *notes))

    def read_labelled(self, source: Pretrained, path: str, **flags: Any) -> TaggedSentences:
        """Returns the sentences in a CoNLL file."""
        return self.labelled_sentences(source, conll.read_conll(path), source.settings.data.document_context)


TASK = Ner()
