"""What a drafter folder holds, whichever layout it is in."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig

from ..drafter.candidates import knobs
from ..drafter.configuration_dflash import DFlashConfig
from ..drafter.modeling_dflash import _OWN_TENSORS, DFlashDraftModel
from . import speculators

_NEEDED = ["*.json", "*.safetensors", "mask_embedding.pt", "LICENSE*", "NOTICE*", "README.md", "plots/*.png"]


@dataclass
class Checkpoint:
    """A drafter folder, read but for its tensors.

    Attributes:
        folder: where it lies on this machine.
        layout: "z-lab" or "speculators".
        config: the drafter's.
        files: tensor name -> safetensors file, of the tensors that the drafter needs.
        shapes: of those tensors.
        generation_config: the drafter's knobs.
        target: name or path of the target, where the folder says it, and its model classes.
        left_out: tensors of the folder that the drafter does not need, with the reason.
        notes: what else a reader should know.
    """

    folder: Path
    layout: str
    config: DFlashConfig
    files: dict[str, Path]
    shapes: dict[str, list[int]]
    generation_config: GenerationConfig
    target: str | None = None
    target_architectures: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def mask_embedding(self) -> Path | None:
        """The file with an own embedding of the mask token, where there is one."""
        path = self.folder / "mask_embedding.pt"
        return path if path.is_file() else None

    @property
    def own_tensors(self) -> dict[str, list[int]]:
        """Shapes of the tensors that most drafters borrow from the target and this one has; see `DFlashDraftModel`."""
        return {name: self.shapes[name] for name in _OWN_TENSORS if name in self.shapes}

    @property
    def num_parameters(self) -> int:
        """As `drafter.num_parameters()` counts them."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if name != "d2t")

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, mapped from its file: it takes memory only while it is used."""
        with safe_open(self.files[name], framework="pt") as tensors:
            return tensors.get_tensor(name)


def read(source: str | os.PathLike) -> Checkpoint:
    """Read a drafter's folder, or download it from the Hub, in z-lab's or speculators' layout.

    Every tensor of the folder is needed by the drafter, or named in `left_out`, or refused.

    Raises:
        FileNotFoundError: there is no such folder, or it lacks config.json or safetensors.
        OSError: it cannot be downloaded.
        ValueError: it is of another kind, damaged, or holds tensors of unknown use or knobs that `generate()` refuses
            (named).

    Example:
        >>> read("model_cards/SmolLM2-135M-Instruct-DFlash").layout           # doctest: +SKIP
        'z-lab'
    """
    folder = fetch(source)
    raw = _read_json(folder / "config.json")
    generation_config = GenerationConfig()
    if (folder / "generation_config.json").is_file():
        generation_config = GenerationConfig(**_read_json(folder / "generation_config.json"))
    kinds = raw.get("architectures") or ["DFlashDraftModel"]
    notes: list[str] = []
    with _as_value_error(folder / "config.json"):
        if "speculators_model_type" in raw or "transformer_layer_config" in raw:
            layout, (config, drafts, notes) = "speculators", speculators.read_config(raw)
            if drafts is not None:
                generation_config.num_assistant_tokens = drafts
        elif raw.get("model_type") == "muse_glimmer_assistant":
            raise ValueError("This is a Muse Glimmer assistant, which transformers loads and runs by itself.")
        elif "dflash_config" not in raw and not any("DFlash" in str(kind) for kind in kinds):
            raise ValueError(f"Expected a DFlash drafter, {folder} holds a model of the class {', '.join(kinds)}.")
        else:
            layout, config = "z-lab", DFlashConfig.from_dict(raw)
    files, shapes = _list_tensors(folder)
    if config.dtype is None and "fc.weight" in files:
        with safe_open(files["fc.weight"], framework="pt") as tensors:
            config.dtype = tensors.get_tensor("fc.weight").dtype
    if "d2t" in shapes and config.option("draft_vocab_size") is None and shapes["d2t"] != [config.vocab_size]:
        config.draft_vocab_size = shapes["d2t"][0]  # vLLM looks for it
    checkpoint = Checkpoint(
        folder,
        layout,
        config,
        files,
        shapes,
        generation_config,
        target=getattr(config, "target_name_or_path", None),
        target_architectures=getattr(config, "target_architectures", None) or [],
        notes=notes,
    )
    with _as_value_error(folder / "config.json"):
        _account(checkpoint)
    try:
        knobs(checkpoint)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    if checkpoint.mask_embedding is not None:
        try:
            torch.load(checkpoint.mask_embedding, map_location="cpu", weights_only=True)
        except Exception as error:  # of many kinds, by what is wrong with the file
            raise ValueError(f"{checkpoint.mask_embedding} cannot be read ({error}); it is damaged.") from None
    return checkpoint


@contextmanager
def _as_value_error(path: Path) -> Iterator[None]:
    """What a value of the wrong kind makes of the code that expects another, said of the file that holds it."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"{path} holds a value of the wrong kind or lacks one: {error}.") from error


def _account(checkpoint: Checkpoint) -> None:
    """Compare the tensors that are there with those that the config asks for."""
    files, shapes, folder = checkpoint.files, checkpoint.shapes, checkpoint.folder
    if "t2d" in files:
        _check_t2d(checkpoint)
        checkpoint.left_out["t2d"] = "says the same as d2t"
    if checkpoint.layout == "speculators":
        for name in speculators.TRAINING_TENSORS:
            if name in files:
                checkpoint.left_out[name] = "the target's, used by speculators in training"
        reduced = checkpoint.config.option("draft_vocab_size") is not None
        if reduced and not {"d2t", "lm_head.weight"} <= files.keys():
            raise ValueError(
                f"{folder}: draft_vocab_size={checkpoint.config.draft_vocab_size} is smaller than the vocabulary of "
                f"{checkpoint.config.vocab_size}: expected the tensors d2t and lm_head.weight; it is incomplete."
            )
        if not reduced and "d2t" in files:
            if checkpoint.tensor("d2t").any():
                raise ValueError(f"{folder}: d2t maps to other tokens, but draft_vocab_size is the full vocabulary.")
            checkpoint.left_out["d2t"] = "maps every token to itself"
    for name in checkpoint.left_out:
        del files[name], shapes[name]
    with torch.device("meta"):
        drafter = DFlashDraftModel(checkpoint.config, own_tensors=checkpoint.own_tensors)
    expected = {name: list(tensor.shape) for name, tensor in drafter.state_dict().items()}
    problems = [f"missing {name}" for name in sorted(expected.keys() - shapes.keys())]
    problems += [f"unknown {name}" for name in sorted(shapes.keys() - expected.keys())]
    problems += [
        f"{name}: {shapes[name]} in the file, {shape} by config.json"
        for name, shape in sorted(expected.items())
        if name in shapes and shapes[name] != shape
    ]
    if problems:
        raise ValueError(
            f"{folder} does not hold the tensors of a DFlash drafter of its config.json: {'; '.join(problems)}."
        )


def t2d_of(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Bool `[vocab_size]`: whether a target id has a draft id. `d2t` holds offsets, `[draft vocabulary]` long."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[torch.arange(len(d2t)) + d2t] = True
    return t2d


def _check_t2d(checkpoint: Checkpoint) -> None:
    t2d, vocab_size = checkpoint.tensor("t2d"), checkpoint.config.vocab_size
    d2t = checkpoint.tensor("d2t") if "d2t" in checkpoint.files else torch.zeros(vocab_size, dtype=torch.long)
    ids = torch.arange(len(d2t)) + d2t
    if ids.min() < 0 or ids.max() >= vocab_size or not torch.equal(t2d.bool(), t2d_of(d2t, vocab_size)):
        raise ValueError(
            f"{checkpoint.folder}: t2d and d2t name different tokens; they are of two checkpoints, or damaged."
        )


def fetch(source: str | os.PathLike) -> Path:
    """The folder on this machine: the one that is named, or the download of a Hub name.

    Raises:
        OSError: there is no such folder, or it cannot be downloaded.
        ValueError: the Hub takes no such name.

    Example:
        >>> fetch("z-lab/Qwen3-8B-DFlash-b16")                                # doctest: +SKIP
    """
    folder = Path(source)
    if folder.is_dir() and str(source):
        return folder
    if folder.exists() or len(folder.parts) != 2 or folder.is_absolute():
        raise FileNotFoundError(f"Expected a drafter's folder or a Hub name like owner/name, got {source}.")
    try:
        return Path(snapshot_download(str(source), allow_patterns=_NEEDED))
    except OSError as error:
        if str(source) in str(error):
            raise
        raise OSError(f"{source} cannot be fetched: {error}") from None


def _read_json(path: Path) -> dict:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}: expected a drafter's folder.")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); it is damaged or incomplete.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, got a {type(content).__name__}.")
    return content


def _list_tensors(folder: Path) -> tuple[dict[str, Path], dict[str, list[int]]]:
    index = folder / "model.safetensors.index.json"
    names = _read_json(index).get("weight_map") if index.is_file() else {}
    if not isinstance(names, dict):
        raise ValueError(f"{index} must map tensors to files in weight_map, got {names!r}.")
    if odd := [name for name in names.values() if not isinstance(name, str) or Path(name).name != name]:
        raise ValueError(f"{index} must map tensors to names of files beside it, got {odd[0]!r}.")
    paths = [folder / name for name in sorted(set(names.values()))] or [folder / "model.safetensors"]
    files, shapes = {}, {}
    for path in paths:
        if not path.is_file():
            pickles = sorted(p.name for p in folder.glob("*.bin"))
            hint = f"; {', '.join(pickles)} may run code on loading and is not read" if pickles else ""
            raise FileNotFoundError(f"{folder} has no {path.name}{hint}. Expected weights as safetensors.")
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (safe_open has no __iter__)
                    files[name] = path
                    shapes[name] = list(tensors.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read ({error}); it is damaged or incomplete.") from None
    if missing := sorted(names.keys() - files.keys()):
        raise ValueError(f"{index} lists tensors that the files do not hold: {missing}.")
    return files, shapes
