"""From a drafter to a repository on the Hub."""

import glob
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distribution
from pathlib import Path, PurePath

import yaml
from huggingface_hub import HfApi, ModelCard, get_token

from ..checkpoints import Checkpoint, convert, meaning, read
from ..checkpoints.convert import new_folder
from ..drafter.configuration_dflash import DFlashConfig
from ..drafter.modeling_dflash import DFlashDraftModel
from .card import Measurements, checkpoint_sha256, hub_name, is_hub_name, write_card

# Titles of commits. Only under the first is the card that of the drafter's folder, or a new one.
PUBLISHED = "Publish the drafter"
KEPT = f"{PUBLISHED}; the card is the one that was here"
LICENSES = {"apache-2.0": r"\W*Apache License\W+Version 2\.0\b", "mit": r"\W*(The )?MIT License\b"}


@dataclass
class Published:
    """What `publish` did: the commit (None if nothing was uploaded), where to look at it, and the files."""

    repo_id: str
    revision: str | None
    url: str
    files: list[str]


def publish(
    drafter: DFlashDraftModel | str | os.PathLike,
    repo_id: str,
    *,
    measurements: str | os.PathLike | None = None,
    base_model: str | None = None,
    license: str | None = None,
    datasets: list[str] | None = None,
    language: list[str] | None = None,
    include: Iterable[str] = (),
    private: bool | None = None,
    revision: str | None = None,
    force: bool = False,
    token: str | None = None,
    out: str | os.PathLike | None = None,
) -> Published:
    """Publish a drafter: weights, config, code for `trust_remote_code`, generation config, LICENSE and card.

    The folder itself is left as it is. Its README.md, if it has one, is the card, with the figures filled in; else the
    one that is on the Hub already; else a card is written. Without new measurements the figures on the Hub stay. Of
    the folder's other files only LICENSE, NOTICE, plots that the card shows and what `include` names are published.
    An upload that broke off goes on where it was when the same call is made again.

    Args:
        drafter: a loaded drafter, or a folder or Hub name in z-lab's or speculators' layout.
        repo_id: `owner/name`; made if it does not exist.
        measurements: the JSON file of `dflash-hf bench --out`; every figure of the card comes from it.
        base_model: Hub name of the target; unset: what the drafter, its card or the measurements say.
        license: Hub identifier, such as "apache-2.0"; unset: what the drafter's card says.
        datasets: Hub names of the data that it was trained on.
        language: of that data, such as ["en"].
        include: patterns of other files of the drafter's folder, such as "recipe/*".
        private: for a repository that is made.
        revision: branch to upload to; made if it does not exist. Unset: main.
        force: replace the files of a repository that holds something else, and a README.md that was changed there. Its
            history keeps them.
        token: of the Hub; unset: that of `hf auth login` or HF_TOKEN.
        out: write the files to this new folder and upload nothing.

    Raises:
        ValueError: the drafter is damaged, the card lacks something that only the caller knows, the measurements are
            of other weights or another target, the license is not the one that the folder names, or the repository
            holds something else or a README.md that was changed there.
        OSError: the Hub cannot be reached or refuses; no token is ever part of the message.

    Example:
        >>> publish("my-drafter", "me/my-drafter", measurements="bench.json", license="apache-2.0")  # doctest: +SKIP
    """
    if not is_hub_name(repo_id):
        raise ValueError(f"Expected a repository like owner/name, got {repo_id!r}.")
    with new_folder(out) if out is not None else _temporary() as stage:
        readme, card = _write(stage, drafter, repo_id, measurements, base_model, license, datasets, language, include)
        if out is not None:
            return Published(repo_id, None, str(out), _files(stage))
        try:
            return _upload(stage, repo_id, readme, card, private=private, revision=revision, force=force, token=token)
        except Exception as error:
            if (clean := without_tokens(error, token)) is None:
                raise
        raise clean  # out here, so that the first error does not hang on to it


@contextmanager
def _temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _files(stage: Path) -> list[str]:
    return sorted(str(path.relative_to(stage)) for path in stage.rglob("*") if path.is_file())


def _write(
    stage, drafter, repo_id, measurements, base_model, license, datasets, language, include
) -> tuple[str | None, Callable[..., ModelCard]]:
    """Fill `stage` with all files of the repository; return the folder's README.md and what writes the card."""
    measured = None if measurements is None else Measurements(measurements)
    with _temporary() if isinstance(drafter, DFlashDraftModel) else nullcontext(drafter) as source:
        if isinstance(drafter, DFlashDraftModel):
            drafter.save_pretrained(source)
        checkpoint = read(source)
        readme = checkpoint.folder / "README.md"
        written = _text(readme) if readme.is_file() else None
        said = _metadata(readme, written)
        for name, given in (("base_model", base_model), ("license", license)):
            if given is None and not isinstance(said.get(name) or "", str):
                raise ValueError(f"{readme}: expected one name as {name} in the metadata, got {said[name]!r}.")
        for name in datasets or ():
            if not re.fullmatch(r"([\w.-]+/)?[\w.-]+", name):
                raise ValueError(f"Expected Hub names of the data, got {name!r}: leave out what is not on the Hub.")
        if base_model is not None and not hub_name(base_model):
            raise ValueError(f"Expected the target's name on the Hub as base_model, got {base_model!r}.")
        candidates = [base_model, said.get("base_model"), checkpoint.target]
        candidates.append(measured.target if measured else None)
        base_model = next(filter(hub_name, candidates), None)
        license = license or said.get("license")
        for name, value, example in (
            ("base_model", base_model, "Qwen/Qwen3-8B"),
            ("license", license, "apache-2.0"),
        ):
            if value is None:
                raise ValueError(
                    f"The card needs {name}, and the drafter does not say it: pass {name}='{example}' "
                    f"(--{name.replace('_', '-')} {example})."
                )
        if isinstance(named := said.get("license"), str) and named != license:
            raise ValueError(f"{readme} says license: {named}, and {license} was given: change one of them.")
        convert(source, stage, target=base_model)
        _include(checkpoint.folder, stage, include)
        _add_license(stage, license)
        staged, plots = read(stage), []
        if measured is not None:
            _check_fits(measured, staged, base_model, source if source is drafter else "DRAFTER")
            plots = [f"plots/{path.name}" for path in measured.draw(stage / "plots")]
        card = partial(
            write_card,
            staged,
            repo_id,
            base_model=base_model,
            license=license,
            datasets=datasets,
            language=language,
            measurements=measured,
            plots=plots,
        )
        text = str(card(written=written))
        (stage / "README.md").write_text(text, encoding="utf-8")
        drawn = [f"plots/{path.name}" for path in checkpoint.folder.glob("plots/*.png")]
        _include(checkpoint.folder, stage, [glob.escape(name) for name in drawn if name in text])
    return written, card


def _text(readme: Path) -> str:
    try:
        return readme.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{readme} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8.") from None


def _metadata(readme: Path | str, written: str | None) -> dict:
    try:
        said = ModelCard(written).data.to_dict() if written else {}
    except (TypeError, ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{readme}: the metadata between the --- lines cannot be read ({problem}).") from None
    bases = said.get("base_model")
    if isinstance(bases, list) and len(bases) == 1:
        said["base_model"] = bases[0]
    return said


def _include(folder: Path, stage: Path, patterns: Iterable[str]) -> None:
    """Copy the files of `folder` that match and are not written anew."""
    for pattern in patterns:
        if PurePath(pattern).is_absolute() or ".." in PurePath(pattern).parts:
            raise ValueError(f"Expected a pattern of files in the drafter's folder to include, got {pattern!r}.")
        files = [file for file in sorted(folder.glob(pattern)) if file.is_file()]
        if not files:
            raise ValueError(f"No file of {folder} matches {pattern!r}, which was to be included.")
        for file in files:
            copy = stage / file.relative_to(folder)
            if not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)


def _add_license(stage: Path, license: str) -> None:
    texts = [path.read_text(errors="replace") for path in stage.glob("LICENSE*")]
    named = [name for name, title in LICENSES.items() if any(re.match(title, text) for text in texts)]
    if named and license not in named:
        raise ValueError(
            f"The LICENSE of the drafter's folder is {named[0]}, the card's {license}: change one of them."
        )
    if texts:
        return
    text = distribution("dflash-hf").read_text("licenses/LICENSE") if license == "apache-2.0" else None
    if text is None:
        raise ValueError(f"The drafter's folder has no LICENSE file: put the text of {license} there.")
    (stage / "LICENSE").write_text(text, encoding="utf-8")


def _check_fits(measured: Measurements, checkpoint: Checkpoint, base_model: str, source) -> None:
    command = f"dflash-hf bench {base_model} {source} {measured.prompts} --out bench.json"
    weights = checkpoint_sha256(checkpoint, measured.dtype)
    if weights != measured.weights:
        raise ValueError(
            f"The measurements are of other weights ({measured.drafter}, SHA-256 {measured.weights[:12]}...), this "
            f"drafter's are {weights[:12]}.... Measure these: {command}"
        )
    if hub_name(measured.target) and measured.target != base_model:
        raise ValueError(
            f"The measurements are with the target {measured.target}, base_model is {base_model}. Name the one that "
            f"was measured (--base-model), or measure with the other: {command}"
        )


def _upload(stage, repo_id, written, card, *, private, revision, force, token) -> Published:
    # Of the two ways to send a folder, upload_folder resumes by itself (huggingface_hub 2.4): what is stored already,
    # whole or in parts, is not sent again, and a commit comes after all of its files.
    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    info = api.model_info(repo_id, revision=revision)
    there = {sibling.rfilename for sibling in info.siblings or ()} - {".gitattributes"}
    something_else = _something_else(api, repo_id, info.sha, there, read(stage).config)
    if something_else and not force:
        raise ValueError(
            f"{repo_id} holds something else: {something_else}. Nothing was uploaded. Choose another name, or replace "
            "its files with force=True (--force); its history keeps them."
        )
    published, title = None, PUBLISHED
    if "README.md" in there and not something_else:
        published = _download(api, repo_id, "README.md", info.sha)
        _metadata(f"{repo_id}/README.md", published)
        published = published if ModelCard(published).text.strip() else None  # made on the website
    if published is not None and not force:
        if written is None:
            written, title = published, KEPT
        elif published not in (written, _last_card(api, repo_id, revision)):
            raise ValueError(
                f"The README.md of {repo_id} was changed there, and the drafter's folder has one too. Nothing was "
                "uploaded. Take the folder's away, and the one on the Hub stays; or put into it what is to stay, and "
                "replace the one on the Hub with force=True (--force)."
            )
    text = str(card(written=written, published=published))
    (stage / "README.md").write_text(text, encoding="utf-8")
    files = _files(stage)
    # Old weights beside new ones would be loaded in their place.
    weights = re.compile(r"[^/]*\.(safetensors|bin)(\.index\.json)?|mask_embedding\.pt")
    plots = [name for name in there if re.fullmatch(r"plots/bench-\w+\.png", name) and name not in text]
    stale = {name for name in there if something_else or weights.fullmatch(name)}.union(plots).difference(files)
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=stage,
        revision=revision,
        commit_message=title,
        delete_patterns=[glob.escape(name) for name in sorted(stale)] or None,
        parent_commit=info.sha,  # nothing that came in between is overwritten
    )
    return Published(repo_id, commit.oid, f"{api.endpoint}/{repo_id}/tree/{commit.oid}", files)


def _download(api: HfApi, repo_id: str, name: str, revision: str) -> str:
    return _text(Path(api.hf_hub_download(repo_id, name, revision=revision)))


def _last_card(api: HfApi, repo_id: str, revision: str | None) -> str | None:
    """The README.md of the newest commit that brought the folder's own, or a new one."""
    commits = api.list_repo_commits(repo_id, revision=revision)
    last = next((commit.commit_id for commit in commits if commit.title == PUBLISHED), None)
    return None if last is None else _download(api, repo_id, "README.md", last)


def _something_else(api: HfApi, repo_id: str, sha: str, there: set[str], config: DFlashConfig) -> str | None:
    """Why the files of a repository are not an older version of this drafter; None if they are, or there are none."""

    if not there:
        return None
    if there <= {"README.md", "LICENSE"}:  # made on the website, which asks for a license
        words = "README.md" in there and ModelCard(_download(api, repo_id, "README.md", sha)).text.strip()
        return "a README.md" if words else None
    if "config.json" not in there:
        return f"{', '.join(sorted(there)[:5])}{' and more' if len(there) > 5 else ''}"
    try:
        raw = json.loads(_download(api, repo_id, "config.json", sha))
        if raw.get("architectures") != ["DFlashDraftModel"] or "dflash_config" not in raw:
            return f"a model with architectures={raw.get('architectures')}"
        theirs = meaning(DFlashConfig.from_dict(raw))
    except (AttributeError, TypeError, ValueError) as error:
        return f"a config.json that is no drafter's ({error})"
    ours = meaning(config)
    differ = [f"{name} {theirs[name]}, here {ours[name]}" for name in ours if theirs[name] != ours[name]]
    names = raw.get("target_name_or_path"), getattr(config, "target_name_or_path", None)
    if None not in names and names[0] != names[1]:
        differ.append(f"target {names[0]}, here {names[1]}")
    return f"another drafter ({'; '.join(differ)})" if differ else None


def without_tokens(error: Exception, token: str | None = None) -> OSError | None:
    """An error to raise in the place of `error`; None if that one can be shown as it is.

    It cannot if access tokens are part of its message or of those of its causes (an HTTP library quotes the header
    that it does not like), or if it is of a kind that only the HTTP library knows.
    """
    messages: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        if str(cause) not in messages:
            messages.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    message = ": ".join(messages)
    clean = re.sub(r"hf_[A-Za-z0-9]{20,}|(?<=Bearer )[^\s'\"]+", "***", message)
    for secret in filter(None, (token, get_token())):
        clean = clean.replace(secret.strip(), "***").replace(repr(secret.strip())[1:-1], "***")
    if clean == message and isinstance(error, OSError | ValueError):
        return None
    return OSError(f"{type(error).__name__}: {clean}")
