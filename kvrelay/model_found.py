"""Whether a model can be had, asked before anything is started: a directory with all its files, a hub id that was
downloaded, or one that the hub lets us have. Nothing is downloaded and no weight is read.

Each `why` is one sentence that names the key, the value and what to do.
"""

from __future__ import annotations

from pathlib import Path

from engine.weights.files import CONFIG, why_incomplete
from engine.weights.near import did_you_mean, folders

HUB_TIMEOUT_S = 10.0
DOWNLOADED = "models--"  # how the hub's cache names a folder: models--ORG--NAME
MAKE_ONE = "make a random one with `kvrelay make-model ./model`"


def why_not_found(model: str) -> str:
    """Nothing where workers on this machine will find it."""
    path = Path(model).expanduser()
    if path.is_dir():
        return _why_not_whole(model, path)
    if path.suffix == ".gguf":
        return f"model is {model!r}, in GGUF, which is not read; give the directory of a checkpoint in safetensors"
    if path.is_file():
        return f"model is {model!r}, which is a file; give the directory that holds {CONFIG} and the weights"
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        return (
            f"model is {model!r}; there is no such directory, {did_you_mean(model)}give another or a hub id, fetch one "
            f"with `hf download ORG/NAME --local-dir {model}`, or {MAKE_ONE.replace('./model', model)}"
        )
    return _why_not_had(model)


def _why_not_whole(model: str, path: Path) -> str:
    if not (why := why_incomplete(path)):
        return ""
    first = "" if (path / CONFIG).exists() else did_you_mean(model)
    if why.startswith("has no tokenizer"):
        first = "copy the model's tokenizer files there, or "
    return (
        f"model is {model!r}, a directory that {why}; {first}give a whole Hugging Face model directory, "
        f"such as `hf download ORG/NAME --local-dir DIRECTORY` makes, or {MAKE_ONE}"
    )


def _why_not_had(model: str) -> str:
    """Of a hub id. One that was downloaded whole is not asked for again."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(model, CONFIG)
    except HFValidationError:
        return (
            f"model is {model!r}, which is no directory and no hub id; {did_you_mean(model)}give one of them, "
            f"or {MAKE_ONE}"
        )
    lacks = why_incomplete(Path(config).parent) if isinstance(config, str) else "is not among those downloaded"
    return _why_not_given(model, lacks) if lacks else ""


def _why_not_given(model: str, lacks: str) -> str:
    """Asks the hub, which may know no such name, want a login, or be out of reach."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import GatedRepoError, RemoteEntryNotFoundError, RepositoryNotFoundError

    page = f"{constants.ENDPOINT}/{model}"
    near = did_you_mean(model, _downloaded())
    try:
        get_hf_file_metadata(hf_hub_url(model, CONFIG), timeout=HUB_TIMEOUT_S)
    except GatedRepoError:
        return f"model is {model!r}, which is gated; accept its terms at {page}, then log in with `hf auth login`"
    except RepositoryNotFoundError:
        return (
            f"model is {model!r}; there is no such directory, and on the hub none of that name that you may see: "
            f"{near}log in with `hf auth login` if it is private, give another, or {MAKE_ONE}"
        )
    except RemoteEntryNotFoundError:
        return f"model is {model!r}, which has no {CONFIG} on the hub; give one in transformers' format"
    except Exception as error:  # whatever the hub's HTTP client raises for what it cannot reach
        return (
            f"model is {model!r}, a hub id that {lacks}, and {_why_out_of_reach(error)}; {near}"
            f"`hf download {model}` where there is a network, give a directory, or {MAKE_ONE}"
        )
    return ""


def _why_out_of_reach(error: Exception) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE keeps us from asking the hub"
    return f"the hub cannot be asked ({' '.join(str(error).split())[:120] or type(error).__name__})"


def _downloaded() -> list[str]:
    """Hub ids."""
    from huggingface_hub.constants import HF_HUB_CACHE

    names = [name for name in folders(Path(HF_HUB_CACHE)) if name.startswith(DOWNLOADED)]
    return [name.removeprefix(DOWNLOADED).replace("--", "/") for name in names]
