"""A name on the hub at one commit, ORG/NAME@COMMIT: what a spec's ORG/NAME comes to once a cluster starts. Each of its
processes, whenever it starts, loads the same files then, though the main branch has moved on since.

And what is told where its files cannot be had.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

AT_COMMIT = re.compile(r"([^@]+)@([0-9a-f]{40})", re.ASCII)
ASK_TIMEOUT_S = 10.0
CLIENTS = ("httpx", "httpx2", "huggingface_hub")  # whose errors tell why
BARRED = {"GatedRepoError", "RepositoryNotFoundError"}
UNLIKE = {"RemoteEntryNotFoundError", "RevisionNotFoundError"}  # the hub answers that there is none
SIGNATURE = re.compile(r"\?[^\s']*")  # of an address, that whoever has it may fetch a file by
MORE = " For more information check"
MOST_CHARS = 200


def name_and_commit(model: str) -> tuple[str, str | None]:
    """None: of a directory, or of a name wherever its main branch is."""
    parts = None if os.path.isdir(model) else AT_COMMIT.fullmatch(model)
    return (parts[1], parts[2]) if parts is not None else (model, None)


def at_commit(model: str) -> str:
    """With the commit at which the hub has it now; as it is where that cannot be asked, or it is a directory."""
    if os.path.isdir(model) or model.startswith((".", "/", "~")) or AT_COMMIT.fullmatch(model):
        return model
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    with suppress(Exception):  # whatever the hub's client raises
        commit = get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=ASK_TIMEOUT_S).commit_hash
        if AT_COMMIT.fullmatch(there := f"{model}@{commit}"):
            return there
    return model


def keep_as_main(model: str) -> None:
    """Have a commit that was downloaded found by the bare name, too, where the hub cannot be asked: its client notes
    that of branches alone."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    name, commit = name_and_commit(model)
    if commit is None:
        return
    note = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "refs" / "main"
    with suppress(OSError):  # of a cache that is not to be written to
        if not note.exists() or note.read_text() != commit:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(commit)


def why_not_had(model: str, error: BaseException) -> str:
    """Of a name on the hub, where an error has its cause in what the hub's client met; nothing of any other."""
    name, _ = name_and_commit(model)
    met = [each for each in _chain(error) if type(each).__module__.split(".")[0] in CLIENTS]
    kinds = {type(each).__name__ for each in met}
    if not met or os.path.isdir(model) or kinds & UNLIKE:
        return ""
    mend = f"start again, or fetch it by `hf download {name}`"
    if kinds & BARRED:
        mend = "look at its name and its terms there, and give each host HF_TOKEN or log in on it by `hf auth login`"
    word = " ".join(str(met[-1]).split()).split(MORE)[0] or type(met[-1]).__name__
    return f"the hub does not give its files ({SIGNATURE.sub('', word)[:MOST_CHARS]}); {mend}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
