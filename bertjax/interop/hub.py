"""Models on the Hugging Face hub: downloads `hub:NAME[@REVISION]`, and pushes folders.

The cache (HF_HOME), the login and the settings of huggingface_hub apply, such as HF_HUB_OFFLINE.
"""

import contextlib
import functools
import pathlib
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

from etils import epath

from bertjax.common.errors import UserError
from bertjax.interop import hf_tokenizer, huggingface, peft_adapter, sentence_transformers
from bertjax.text.tokenizer import BPE, Bytes, SentencePiece, Unigram, WordPiece

PREFIX = "hub:"
WEIGHTS = "*.safetensors"
# The files that are downloaded from the top of a repository and from folders of modules such as 1_Pooling. Pickles and
# weights for other libraries are not downloaded.
_FILES = (
    huggingface.CONFIG, huggingface.WEIGHTS, "model-*-of-*.safetensors", f"{huggingface.WEIGHTS}.index.json",
    hf_tokenizer.JSON, hf_tokenizer.SETTINGS, hf_tokenizer.SPECIAL, hf_tokenizer.ADDED,
    WordPiece.filename, SentencePiece.filename, Bytes.filename, *BPE.legacy_names, "merges.txt", *Unigram.legacy_names,
    sentence_transformers.ENCODER.format("*"), peft_adapter.CONFIG, peft_adapter.WEIGHTS,
)  # fmt: skip
FILES = [
    sentence_transformers.MODULES,
    sentence_transformers.SETTINGS,
    *_FILES,
    *(f"[0-9]*_[A-Z]*/{name}" for name in _FILES),
]


class Repository(NamedTuple):
    """A repository of the hub, or a folder in a repository.

    Attributes:
      name: the name, such as "google-bert/bert-base-uncased".
      revision: a branch, a tag or a commit; "" is the newest commit.
      folder: a folder in the repository, such as the folder of an adapter; "" is the repository itself.
    """

    name: str
    revision: str
    folder: str = ""

    def __str__(self) -> str:
        path = f"{self.name}/{self.folder}" if self.folder else self.name
        return f"{PREFIX}{path}@{self.revision}" if self.revision else f"{PREFIX}{path}"


def repository(path: epath.PathLike) -> Repository | None:
    """Returns the repository of a path `hub:NAME` or `hub:USER/NAME/FOLDER`; None for the path of a file."""
    if not str(path).startswith(PREFIX):
        return None
    name, _, revision = str(path).removeprefix(PREFIX).partition("@")
    user, *rest = name.split("/", 2)
    return Repository("/".join([user, *rest[:1]]), revision, *rest[1:])


@functools.cache
def download_repository(repository: Repository) -> epath.Path:
    """Downloads a repository once per process; returns the folder in the cache.

    With a folder in the repository, the folder is downloaded together with the model in the repository, which is the
    base if the folder is an adapter. Raises `UserError` if the download fails, or if the repository or its folder
    contains no model in safetensors.
    """
    shown, (name, revision, inner) = str(repository), repository
    hub, patterns = _library(shown), [*FILES]
    if inner:
        patterns += [*(f"{inner}/{file}" for file in FILES), f"*/{peft_adapter.CONFIG}"]
    with _user_errors(hub, shown):
        top = epath.Path(
            hub.snapshot_download(name, revision=revision or None, allow_patterns=patterns, library_name="bertjax")
        )
    folder = top / inner
    configs = huggingface.CONFIG, sentence_transformers.MODULES, peft_adapter.CONFIG
    if not any((folder / name).exists() for name in configs):
        if adapters := peft_adapter.adapters_in(top) if inner else []:
            raise UserError(f"{shown}: the repository has no folder {inner!r}; its adapters are {', '.join(adapters)}")
        raise UserError(f"{shown}: has no {huggingface.CONFIG}; choose a model of transformers")
    if not any(pathlib.Path(folder).rglob(WEIGHTS)):
        raise UserError(
            f"{shown}: has no {huggingface.WEIGHTS}; download other weights with hf download {name} "
            f"--local-dir=DIR, and use the checkpoint DIR"
        )
    return folder


def check_push(name: str) -> None:
    """Raises `UserError` if the name of a repository is invalid, or if the user is not logged in."""
    shown = f"--push={name}"
    hub = _library(shown)
    if name.count("/") != 1:
        raise UserError(f"{shown}: must be USER/NAME, where USER is a user or an organization")
    with _user_errors(hub, shown):
        hub.utils.validate_repo_id(name)
        hub.HfApi(library_name="bertjax").whoami()


def push(folder: epath.PathLike, name: str, is_private: bool) -> str:
    """Pushes the files of a folder to a repository, and creates a missing repository; returns the URL."""
    shown = f"--push={name}"
    hub = _library(shown)
    api = hub.HfApi(library_name="bertjax")
    with _user_errors(hub, shown, f"; push the written folder with hf upload {name} {folder}"):
        address = api.create_repo(name, private=is_private or None, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(folder), commit_message="From bertjax")
    return str(address)


def _library(shown: str) -> ModuleType:
    """Imports huggingface_hub. Raises `UserError` if it is not installed. `shown` begins the message."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise UserError(f"{shown}: needs huggingface_hub: pip install 'bertjax[hub]'") from None
    return huggingface_hub


@contextlib.contextmanager
def _user_errors(hub: ModuleType, shown: str, remedy: str = "") -> Iterator[None]:
    """Converts exceptions of the block to `UserError`. `shown` begins the message, and `remedy` ends it."""
    errors, constants = hub.errors, hub.constants
    place, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    cause = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{place} cannot be reached"
    reasons = {
        errors.GatedRepoError: f"accept the terms of the model on its page on {place}, and run hf auth login",
        errors.RepositoryNotFoundError: f"not on {place}, or private; correct the name, or run hf auth login",
        errors.RevisionNotFoundError: f"{place} has the model, but not this revision; choose another revision",
        errors.HFValidationError: "",
        errors.LocalTokenNotFoundError: "no user is logged in; run hf auth login, or set HF_TOKEN",
        errors.LocalEntryNotFoundError: f"incomplete in {cache}, and {cause}",
        errors.OfflineModeIsEnabled: f"incomplete in {cache}, and {cause}",
    }
    try:
        yield
    except Exception as error:
        unknown = f"{type(error).__name__}: {error}"
        reason = next((text or str(error) for kind, text in reasons.items() if isinstance(error, kind)), unknown)
        raise UserError(" ".join(f"{shown}: {reason}{remedy}".split())) from None
