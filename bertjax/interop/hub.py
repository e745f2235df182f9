"""Models on the Hugging Face hub: `hub:NAME[@REVISION]` in the place of a path, and folders that are pushed there.

huggingface_hub does the work, with its cache (HF_HOME), its login and its settings, such as HF_HUB_OFFLINE.
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
# What is downloaded, from the top of a repository and from folders of modules such as 1_Pooling; not pickles, nor
# copies of the weights for other libraries.
_FILES = (
    huggingface.CONFIG, huggingface.WEIGHTS, "model-*-of-*.safetensors", f"{huggingface.WEIGHTS}.index.json",
    hf_tokenizer.JSON, hf_tokenizer.SETTINGS, hf_tokenizer.SPECIAL, hf_tokenizer.ADDED,
    WordPiece.filename, SentencePiece.filename, Bytes.filename, BPE.legacy_names, "merges.txt", Unigram.legacy_names,
    sentence_transformers.ENCODER.format("*"), peft_adapter.CONFIG, peft_adapter.WEIGHTS,
)  # fmt: skip
FILES = (
    sentence_transformers.MODULES,
    sentence_transformers.SETTINGS,
    *_FILES,
    *(f"[0-9]*_[A-Z]*/{name}" for name in _FILES),
)


class Repository(NamedTuple):
    """A repository of the hub. `revision`: a branch, a commit, ...; "" for the newest."""

    name: str
    revision: str


def repository(path: epath.PathLike) -> Repository | None:
    """Returns the repository that a path names; None for a path of files."""
    if not str(path).startswith(PREFIX):
        return None
    name, _, revision = str(path).removeprefix(PREFIX).partition("@")
    return Repository(name, revision)


@functools.cache
def fetched(found: Repository) -> epath.Path:
    """Returns the folder with the files of a repository, in the cache; the same one for all of this process.

    Raises `UserError` if it cannot be had, or if it holds no model in safetensors.
    """
    shown = PREFIX + "@".join(filter(None, found))
    hub = _library(shown)
    with _told(hub, shown):
        folder = pathlib.Path(
            hub.snapshot_download(
                found.name, revision=found.revision or None, allow_patterns=list(FILES), library_name="bertjax"
            )
        )
    configs = huggingface.CONFIG, sentence_transformers.MODULES, peft_adapter.CONFIG
    if not any((folder / name).exists() for name in configs):
        raise UserError(f"{shown}: has no {huggingface.CONFIG}, so that it is no model of transformers")
    if not any(folder.rglob(WEIGHTS)):
        raise UserError(
            f"{shown}: has no {huggingface.WEIGHTS}, and nothing else is downloaded; for other weights, hf download "
            f"{found.name} --local-dir=DIR, and give DIR"
        )
    return epath.Path(folder)


def check_push(name: str) -> None:
    """Raises `UserError` if nothing can be pushed to a repository of this name."""
    shown = f"--push={name}"
    hub = _library(shown)
    if name.count("/") != 1:
        raise UserError(f"{shown}: write USER/NAME, with the name of a user or of an organization")
    with _told(hub, shown):
        hub.utils.validate_repo_id(name)
        hub.HfApi(library_name="bertjax").whoami()


def push(folder: epath.PathLike, name: str, is_private: bool) -> str:
    """Pushes the files of a folder to a repository, which is created if it is not there; returns its address."""
    shown = f"--push={name}"
    hub = _library(shown)
    api = hub.HfApi(library_name="bertjax")
    with _told(hub, shown, f"; {folder} is written: hf upload {name} {folder} pushes it"):
        address = api.create_repo(name, private=is_private or None, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(folder), commit_message="From bertjax")
    return str(address)


def _library(shown: str) -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise UserError(f"{shown}: needs huggingface_hub: pip install 'bertjax[hub]'") from None
    return huggingface_hub


@contextlib.contextmanager
def _told(hub: ModuleType, shown: str, remedy: str = "") -> Iterator[None]:
    """Raises what fails in the block as a `UserError`."""
    errors, place = hub.errors, hub.constants.ENDPOINT
    try:
        yield
    except errors.GatedRepoError:
        reason = f"{place} gives it to those only who have accepted its terms: do so on its page, and hf auth login"
    except errors.RepositoryNotFoundError:
        reason = f"not on {place}, or private: hf auth login shows who you are"
    except errors.RevisionNotFoundError:
        reason = f"{place} has the model, but not this revision"
    except errors.HFValidationError as error:
        reason = str(error)
    except errors.LocalTokenNotFoundError:
        reason = "nobody is logged in: hf auth login, or set HF_TOKEN"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        cache = hub.constants.HF_HUB_CACHE
        why = "HF_HUB_OFFLINE is set" if hub.constants.HF_HUB_OFFLINE else f"{place} cannot be reached"
        reason = f"not whole in {cache}, and {why}"
    except Exception as error:  # the network's, or the hub's
        reason = f"{type(error).__name__}: {error}"
    else:
        return
    raise UserError(" ".join(f"{shown}: {reason}{remedy}".split())) from None
