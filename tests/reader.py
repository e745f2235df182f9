"""Runs the commands of README and docs/ with small models, in a folder with the files that the pages expect."""

import collections
import contextlib
import csv
import gzip
import io
import json
import lzma
import os
import pathlib
import random
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from bertjax.cli.overrides import from_arguments
from bertjax.config.defaults import pretraining_config
from bertjax.interop import huggingface
from bertjax.models.albert.config import AlbertConfig
from bertjax.models.deberta_v2.config import DebertaV2Config
from bertjax.models.distilbert.config import DistilBertConfig
from bertjax.models.eurobert.config import EuroBertConfig
from bertjax.models.heads import BertForMaskedLM
from bertjax.models.mpnet.config import MPNetConfig
from bertjax.models.neobert.config import NeoBertConfig
from bertjax.models.ultrabert.config import UltraBertConfig
from bertjax.text import tokenizer
from tests.conftest import TOPICS, make_corpus
from tests.models.test_modernbert import random_params
from tests.pages import OTHERS, PAGES, ROOT, blocks_of, module_of, split_redirection
from tests.processes import QUICK, run
from tests.text.test_tokenizer import of_mpnet

SIZES = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
PIECES = {"wordpiece": 150, "bpe": 300, "sentencepiece": 80}  # the vocabulary size of bytes


class Reader:
    """Runs commands. The commands that write the inputs of a command run first, whichever page has them."""

    def __init__(self, folder: pathlib.Path, trained: set[str] | None = None):
        """`trained`: workdirs of the runs that train; other runs end where training would begin.

        None: all runs train.
        """
        self.folder, self._trained = folder, trained
        self.printed: dict[tuple[str, ...], str] = {}  # output by command
        self._environment: dict[str, str] = {}

    def follow(self, page: pathlib.Path) -> int:
        """Runs all commands and examples of a page, in the folder of the reader; returns the number of commands."""
        count = 0
        for block, commands in _to_do(page):
            if "file" in block.notes:
                (self.folder / block.notes["file"]).write_text(block.text)
            if "run" in block.notes:
                with contextlib.redirect_stdout(io.StringIO()) as printed:
                    exec(compile(block.text, page, "exec"), {})
                assert printed.getvalue() and block.notes.get("says", "") in printed.getvalue()
            for words, tiny in commands:
                count += 1
                assert block.notes.get("says", "") in self.type(words, tiny)
        return count

    def type(self, words: list[str], tiny: list[str]) -> str:
        """Returns the output of a command. Runs each command once."""
        if tuple(words) not in self.printed:
            for needed in _needs(words):
                if not (self.folder / needed).exists():
                    self.type(*MAKERS[needed])
            self.printed[tuple(words)] = self._run(words, tiny)
        return self.printed[tuple(words)]

    def _run(self, words: list[str], tiny: list[str]) -> str:
        if words[0] == "export":
            self._environment = dict(word.split("=", 1) for word in words[1:])
            return ""
        if words[0] in OTHERS:
            return ""
        if words[0].startswith("tpu/"):
            shown = [ROOT / words[0], "--dry-run", *words[1:]]
            environment = os.environ | self._environment
            result = subprocess.run(shown, env=environment, capture_output=True, text=True, cwd=ROOT)
            assert result.returncode == 0 and "gcloud" in result.stdout, result.stderr
            return result.stdout
        module, arguments = module_of(words)
        arguments, output = split_redirection(arguments)
        if any(argument.startswith("--config=") for argument in arguments):
            arguments = [*arguments, *made_small(arguments, self.folder), *tiny]
        trains = module != "main" or self._trained is None or self._trained.intersection(_makes(words))
        result = run(module, *arguments, cwd=self.folder, timeout=600, **{QUICK: "yes" if trains else "untrained"})
        assert result.returncode == 0, (arguments, result.stdout[-1000:], result.stderr)
        if output:
            (self.folder / output).write_text(result.stdout)
        return result.stdout


def _to_do(page: pathlib.Path) -> Iterator:
    """Yields the blocks of a page, with their commands and the flags that shorten each command."""
    tiny: list[str] = []
    for block in blocks_of(page):
        tiny = [*tiny, *shlex.split(block.notes.get("tiny", ""))]
        yield block, [(words, tiny) for words in block.to_run()]


def _makes(words: list[str]) -> list[str]:
    """Returns the paths that a command writes."""
    values = [word.split("=", 1)[1] for word in words if word.startswith(("--workdir=", "--output="))]
    return [value.rstrip("/") for value in [*values, split_redirection(words)[1]] if value]


def _needs(words: list[str]) -> Iterator[str]:
    """Yields the paths in the arguments of a command that other commands write."""
    made = _makes(words)
    for word in words:
        path = pathlib.PurePath(word.rsplit("=", 1)[-1].partition("@")[0])
        for folder_or_file in map(str, (path, *path.parents)):
            if folder_or_file in MAKERS and folder_or_file not in made:
                yield folder_or_file


def made_small(arguments: list[str], folder: pathlib.Path) -> list[str]:
    """Returns flags that shorten the run of these arguments to seconds. Stages of one step do not run, see `QUICK`."""
    config, _ = from_arguments(arguments)
    microbatches = min(config.microbatches, 2)
    small = dict(batch_size=16 * microbatches, microbatches=microbatches, log_every_steps=1, kernels="no")
    if config.sinks == pretraining_config().sinks:
        small["sinks"] = "()"
    if "stages" not in config:
        small.update({"epochs": 1, "max_seq_length": 32, "data.doc_stride": 16})
    else:
        small.update({"eval.max_sequences": 16, "eval.bits_windows": min(config.eval.bits_windows, 4)})
        small["tokenizer.extend"] = min(config.tokenizer.extend, 5)
        small.update({"data.heldout_fraction": 0.15, "checkpoint.every_steps": 2})
        small["eval.fill_masks"] = "()"
        lengths = [stage.length for stage in config.stages.values()]
        for name, stage in config.stages.items():
            length, steps = (32, 4 // lengths.count(min(lengths))) if stage.length == min(lengths) else (64, 1)
            predicted = -(-stage.max_predictions_per_seq * length // stage.length)
            fields = dict(steps=steps, length=length, max_predictions_per_seq=predicted)
            small.update({f"stages.{name}.{field}": value for field, value in fields.items()})
        small.update({f"model.{name}": value for name, value in _small_model(config, folder).items()})
    return [f"--config.{name}={value}" for name, value in small.items() if _has(config, name)]


def _small_model(config, folder: pathlib.Path) -> dict[str, int]:
    if config.adapt.model:
        return {}
    if config.init_checkpoint:
        model_json = json.loads((folder / config.init_checkpoint / "config.json").read_text())
        return {name: value for name, value in model_json.items() if name in config.model and isinstance(value, int)}
    pieces = PIECES.get(config.tokenizer.kind, config.model.vocab_size)
    return SIZES | dict(vocab_size=pieces, embedding_size=32, memory_length=32)


def _has(config, name: str) -> bool:
    *sections, field = name.split(".")
    for section in sections:
        config = config[section]
    return field in config


def write_inputs(folder: pathlib.Path, checkpoint: pathlib.Path) -> None:
    """Writes the input files that the pages expect."""
    rng = random.Random(0)
    (folder / "experiments").symlink_to(ROOT / "experiments")
    for name in ("bert-base-uncased", "small-bert", "all-MiniLM-L6-v2", "path/to/bert-base-uncased"):
        shutil.copytree(checkpoint, folder / name)
    for name in (
        "tekstit/wikipedia-000.txt", "tekstit/lehdet/1998.txt", "rulings/1.txt", "domain.txt", "general.txt",
        "texts.txt", "texts/1.txt", "texte/1.txt",
    ):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(make_corpus(30, seed=rng.randrange(1000)))

    def sentence(topic):
        return " ".join(rng.choices(TOPICS[topic], k=5))

    def table(name, columns, rows, delimiter=","):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("w", newline="") as file:
            csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL).writerows([columns, *rows])

    for split, size in (("train", 24), ("dev", 12), ("test", 12)):
        kinds = [rng.choice(["kitchen", "court"]) for _ in range(size)]
        labels = ["good" if kind == "kitchen" else "bad" for kind in kinds]
        table(f"reviews/{split}.csv", ["review", "stars"], zip(map(sentence, kinds), labels))
        table(f"grades/{split}.csv", ["review", "grade"], ((sentence(kind), rng.randrange(5)) for kind in kinds))
        table(f"reports/{split}.csv", ["text", "label"], zip(map(sentence, kinds), labels))
        ones = ((sentence(kind), *(int(kind == other) for other in ("court", "kitchen", "sea"))) for kind in kinds)
        table(f"comments/{split}.csv", ["text", "toxic", "insult", "threat"], ones)
        table(f"pairs/{split}.csv", ["anchor", "positive"], ((sentence(kind), sentence(kind)) for kind in kinds))
        similar = ((sentence("sea"), sentence(kind), rng.random() * 5) for kind in kinds)
        table(f"STS-B/{split}.tsv", ["sentence1", "sentence2", "score"], similar, "\t")
        same = [(int(kind == "court"), 1, 2, sentence("court"), sentence(kind)) for kind in kinds]
        columns = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
        if split == "test":
            columns[0], same = "index", [(number, *row[1:]) for number, row in enumerate(same)]
        table(f"GLUE/MRPC/{split}.tsv", columns, same, "\t")
    shutil.copy(folder / "reviews/test.csv", folder / "test.csv")
    shutil.copy(folder / "pairs/train.csv", folder / "pairs.csv")
    table("texts.csv", ["number", "review", "body"], ((i, sentence("sea"), sentence("court")) for i in range(9)))
    documents = [sentence(topic) for topic in TOPICS for _ in range(5)]
    (folder / "documents.txt").write_text("".join(f"{document}\n" for document in documents))
    (folder / "sentences.txt").write_text("".join(f"{document}\n" for document in documents))
    good_and_bad = [json.dumps(dict(sentence_good=x, sentence_bad=x[::-1], UID="order")) for x in documents[:4]]
    (folder / "blimp.jsonl.xz").write_bytes(lzma.compress("\n".join(good_and_bad).encode()))
    write_search(folder / "BEIR/scifact", documents)
    write_search(folder / "collection", documents, {"dev": 0, "test": 1})
    for split, size in (("train", 24), ("dev", 12)):
        triples = [(sentence("court"), sentence("court"), sentence("sea")) for _ in range(size)]
        table(f"questions/{split}.csv", ["query", "positive", "negative"], triples)
    (folder / "texts/1.txt.gz").write_bytes(gzip.compress((folder / "texts/1.txt").read_bytes()))
    (folder / "letters.docx").write_bytes(b"PK")
    (folder / "latin-1.txt").write_bytes("Un caf\xe9 .\n".encode("latin-1"))
    (folder / "t5").mkdir()
    (folder / "t5" / "config.json").write_text('{"model_type": "t5"}')


def write_published(folder: pathlib.Path, checkpoint: pathlib.Path) -> None:
    """Writes random models in place of the checkpoints of other families that the how-to pages download."""
    pieces = tokenizer.load_tokenizer("wordpiece", checkpoint / "vocab.txt")
    sizes = SIZES | dict(vocab_size=len(pieces.pieces), max_position_embeddings=64)
    fairseq_pieces = of_mpnet(pieces)
    for name, config, tokens in (
        ("distilbert-base-uncased", DistilBertConfig(**sizes), pieces),
        ("albert-base-v2", AlbertConfig(**sizes, embedding_size=8), pieces),
        ("deberta-v3-base", DebertaV2Config(**sizes), pieces),
        ("EuroBERT-210m", EuroBertConfig(**sizes, num_key_value_heads=1, head_dim=8), pieces),
        ("UltraBERT", UltraBertConfig(**sizes, num_key_value_heads=1, head_dim=8, prediction_head_size=8), pieces),
        ("NeoBERT", NeoBertConfig(**sizes), pieces),
        ("mpnet-base", MPNetConfig(**sizes | dict(vocab_size=fairseq_pieces.vocab_size), position_offset=2),
         fairseq_pieces),
    ):  # fmt: skip
        huggingface.write(folder / "path/to" / name, config, random_params(BertForMaskedLM(config), config), tokens)


def write_search(folder: pathlib.Path, documents: list[str], splits: Mapping[str, int] | None = None) -> None:
    """Writes a folder in the format of BEIR.

    Args:
      folder: the folder.
      documents: the documents.
      splits: for each set of queries, the number of the first document with a query; by default {"test": 0}. Each
        fourth document has a query.
    """
    (folder / "qrels").mkdir(parents=True)
    rows = [dict(_id=str(number), title="", text=text) for number, text in enumerate(documents)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    names = {split: [row["_id"] for row in rows[first::4]] for split, first in (splits or {"test": 0}).items()}
    used = {name for split_names in names.values() for name in split_names}
    queries = [dict(_id=row["_id"], text=row["text"].split()[0]) for row in rows if row["_id"] in used]
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    for split, split_names in names.items():
        relevant = "".join(f"{name}\t{name}\t1\n" for name in split_names)
        (folder / "qrels" / f"{split}.tsv").write_text(f"query-id\tcorpus-id\tscore\n{relevant}")


# Tutorials begin with an empty folder, and the pages on extending with their example files.
HOW_TO = [page for page in PAGES if page.parent.name not in ("tutorials", "extending")]


def read_by_others() -> set[str]:
    """Returns the paths that one command of the how-to pages writes and another command reads."""
    blocks = (commands for page in HOW_TO for _, commands in _to_do(page))
    return {path for commands in blocks for words, _ in commands for path in _needs(words)}


def writers() -> dict[str, list[tuple[list[str], list[str]]]]:
    """Returns the commands of the how-to pages, with their added flags, by the path that each command writes."""
    commands_by_path = collections.defaultdict(list)
    for page in HOW_TO:
        for _, commands in _to_do(page):
            for words, tiny in commands:
                for path in _makes(words):
                    commands_by_path[path].append((words, tiny))
    return commands_by_path


MAKERS = {path: commands[0] for path, commands in writers().items()}
