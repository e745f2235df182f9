"""A fine-tuning task of somebody else's: does a text have a word that begins with a letter? One file says it all."""

import numpy as np

from bertjax.config.limits import require
from bertjax.data.loading.examples import Examples
from bertjax.finetuning.encoding import encode_pairs
from bertjax.finetuning.task import Dataset, FineTuningTask, InputForm, Split
from bertjax.inference import output_layers
from tests.conftest import TOPICS

WORDS = sorted(word for words in TOPICS.values() for word in words)


def examples(count, seed, letter, tokenizer):
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, 3)) for _ in range(count)]
    input_ids, token_types, _ = encode_pairs(tokenizer, texts, None, 16)
    labels = [int(any(word.startswith(letter) for word in text.split())) for text in texts]
    return Examples(input_ids, token_types, np.array(labels))


def load(config, tokenizer):
    train, dev = (examples(count, seed, config.data.letter, tokenizer) for count, seed in ((240, 0), (64, 1)))

    def score(logits):
        return {"accuracy": float((np.stack(logits).argmax(-1) == dev.labels).mean())}

    split = Split(dev, score, decide=lambda logits: {"margin": 0.25})
    return Dataset(output_layers.classification(2), ("without", "with"), train, (split,), "accuracy", ("three words",))


def predict(source, texts):
    input_ids, token_types, _ = encode_pairs(source.tokenizer, [text for (text,) in texts], None, source.max_seq_length)
    for logits in output_layers.predict(output_layers.classification(2), source, Examples(input_ids, token_types)):
        letter, margin = source.settings.data.letter, source.decided["margin"]
        yield {"label": source.labels[int(logits.argmax())], "letter": letter, "margin": margin}


TASK = FineTuningTask(
    architecture="BertForSequenceClassification",
    inputs=InputForm(range(1, 2), "texts of a few words"),
    load=load,
    predict=predict,
    validate=lambda config: require(len(config.data.letter) == 1, "data.letter", config.data.letter, "one letter"),
    identity=("data.letter",),
    paper_sweep="learning_rate=1e-8,3e-3",
)
