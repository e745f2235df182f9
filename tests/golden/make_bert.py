"""Makes tests/golden/bert: a small random BERT as transformers writes it, and what transformers computes with it.

Command: python tests/golden/make_bert.py (needs torch and transformers)
"""

import pathlib

import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / "bert"
WORDS = "the a ship sail harbour wave captain saw found left near and stayed whale storm ##s ##ed ##ing . , é ##é"


def main():
    torch.manual_seed(0)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = transformers.BertConfig(vocab_size=len(vocabulary), max_position_embeddings=24, **sizes, **dropout)
    model = transformers.BertForPreTraining(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # no param is 0 or 1, so that a test notices a missing param
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.set_attn_implementation("eager")
    model.save_pretrained(FOLDER)
    (FOLDER / "vocab.txt").write_text("".join(f"{word}\n" for word in vocabulary))
    (FOLDER / "tokenizer_config.json").write_text('{"do_lower_case": true}\n')

    rng = np.random.default_rng(0)
    lengths = np.array([[16], [9], [1]])
    real = np.arange(16) < lengths
    ids = np.where(real, rng.integers(5, len(vocabulary), real.shape), 0)
    types = (real & (np.arange(16) >= lengths // 2)).astype(np.int64)
    positions = np.array([[1, 4, 9], [2, 8, 0], [0, 0, 0]])
    labels = rng.integers(5, len(vocabulary), positions.shape)
    weights = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0]], np.float32)
    random_next = np.array([0, 1, 1])
    by_position = np.full(ids.shape, -100)
    for row, column in zip(*np.nonzero(weights)):
        by_position[row, positions[row, column]] = labels[row, column]

    inputs = dict(input_ids=ids, attention_mask=real.astype(np.int64), token_type_ids=types, labels=by_position)
    inputs |= dict(next_sentence_label=random_next)
    out = model(**{name: torch.tensor(x) for name, x in inputs.items()}, output_hidden_states=True)
    out.loss.backward()
    gradients = {f"gradient {name}": parameter.grad.numpy() for name, parameter in model.named_parameters()}
    features = dict(
        input_ids=ids, input_mask=real, segment_ids=types, masked_lm_positions=positions, masked_lm_ids=labels,
        next_sentence_labels=random_next,
    )  # fmt: skip
    np.savez_compressed(
        FOLDER / "expected.npz",
        **{name: x.astype(np.int32) for name, x in features.items()},
        masked_lm_weights=weights,
        hidden_states=torch.stack(out.hidden_states).detach().numpy(),
        masked_lm_logits=np.take_along_axis(out.prediction_logits.detach().numpy(), positions[:, :, None], axis=1),
        next_sentence_logits=out.seq_relationship_logits.detach().numpy(),
        loss=out.loss.item(),
        **gradients,
    )


if __name__ == "__main__":
    main()
