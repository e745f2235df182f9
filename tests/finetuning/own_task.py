"""A user-defined fine-tuning task in one file: does a text have a word that begins with a letter?"""

import dataclasses

import numpy as np

from bertjax.config.limits import require
from bertjax.data.loading.examples import Examples
from bertjax.finetuning import FineTuningTask, InputForm, Split, TaskData
from bertjax.finetuning.encoding import encode_pairs
from bertjax.inference import predictor
from bertjax.inference.heads import ClassificationHead
from tests.conftest import TOPICS

WORDS = sorted(word for words in TOPICS.values() for word in words)
HEAD = ClassificationHead(2)


def examples(count, seed, letter, tokenizer):
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, 3)) for _ in range(count)]
    input_ids, token_types, _ = encode_pairs(tokenizer, texts, None, 16)
    labels = [int(any(word.startswith(letter) for word in text.split())) for text in texts]
    return Examples(input_ids, token_types, np.array(labels))


@dataclasses.dataclass(frozen=True)
class LetterSplit(Split):
    def score(self, predictions):
        return {"accuracy": float((np.stack(predictions).argmax(-1) == self.examples.labels).mean())}

    def decide(self, predictions):
        return {"margin": 0.25}


class Letter(FineTuningTask):
    architecture = "BertForSequenceClassification"
    inputs = InputForm(range(1, 2), "texts of a few words")
    identity = ("data.letter",)
    paper_sweep = "learning_rate=1e-8,3e-3"

    def load(self, config, tokenizer):
        train, dev = (examples(count, seed, config.data.letter, tokenizer) for count, seed in ((240, 0), (64, 1)))
        return TaskData(HEAD, ("without", "with"), train, (LetterSplit(dev),), "accuracy", ("three words",))

    def head(self, source):
        return HEAD

    def validate(self, config):
        require(len(config.data.letter) == 1, "data.letter", config.data.letter, "one letter")

    def predict(self, source, texts):
        plain_texts = [text for (text,) in texts]
        input_ids, token_types, _ = encode_pairs(source.tokenizer, plain_texts, None, source.max_seq_length)
        for logits in predictor.predict(HEAD, source, Examples(input_ids, token_types)):
            letter, margin = source.settings.data.letter, source.decided["margin"]
            yield {"label": source.labels[int(logits.argmax())], "letter": letter, "margin": margin}


TASK = Letter()
