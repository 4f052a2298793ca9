"""From one drafter layout to the other, tensor by tensor, with a draft before and after that must be the same."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from .. import drafter as drafter_package
from ..drafter.configuration_dflash import DFlashConfig
from ..drafter.modeling_dflash import DFlashDraftModel
from . import speculators
from .files import Checkpoint, read, t2d_of

LAYOUTS = ("z-lab", "speculators")
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_bias"),
    *("is_neox_style", "block_size", "mask_token_id", "target_layer_ids", "target_hidden_size", "num_drafts"),
    *("rope_parameters", "layer_windows", "layer_causal", "layer_sinks"),
)
_OPTIONS = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}  # and defaults


@dataclass
class Conversion:
    """What `convert` did: the folder and its layout, the names of its tensors, what was left out, and notes."""

    folder: Path
    layout: str
    tensors: list[str]
    left_out: dict[str, str]
    notes: list[str]


def convert(
    source: str | os.PathLike, out: str | os.PathLike, *, to: str = "z-lab", target: str | None = None
) -> Conversion:
    """Write the drafter of one folder to another, in z-lab's layout or in speculators'.

    z-lab's layout is what transformers with `trust_remote_code`, vLLM and SGLang load; older spellings of its config
    come out in the ones that all of them know. Tensors keep their bits, dtype and names and go from file to file
    without being held in memory. Both folders are then loaded, one after the other, and draft from the same random
    features. The new folder appears under its name when all of this is done, or not at all.

    Args:
        source: folder or Hub name, in either layout.
        out: folder to write; may exist if it is empty.
        to: "z-lab" or "speculators".
        target: name or path of the target, which speculators' layout must say; needed if `source` does not.

    Raises:
        ValueError: `source` is of another kind or damaged, or the layout cannot hold one of its options (named).
        FileExistsError: there is something at `out`.

    Example:
        >>> convert("z-lab/Qwen3-8B-DFlash-b16", "drafter", to="speculators", target="Qwen/Qwen3-8B")  # doctest: +SKIP
    """
    if to not in LAYOUTS:
        raise ValueError(f"Expected one of the layouts {', '.join(LAYOUTS)}, got {to!r}.")
    with new_folder(out) as part:
        checkpoint = read(source)
        if target not in (None, checkpoint.target):
            checkpoint.target, checkpoint.target_architectures = target, []
        tensors = write_zlab(checkpoint, part) if to == "z-lab" else write_speculators(checkpoint, part)
        _check_same(checkpoint.folder, part)
    return Conversion(Path(out), to, tensors, checkpoint.left_out, checkpoint.notes)


@contextmanager
def new_folder(out: str | os.PathLike) -> Iterator[Path]:
    """A folder to fill that becomes `out` at the end, and disappears if something fails.

    Raises:
        FileExistsError: `out` is a file, or a folder with something in it.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} is there already: expected a new or an empty folder to write to.")
    if not out.absolute().parent.is_dir():
        raise FileNotFoundError(f"There is no folder {out.absolute().parent} to write {out.name} to; make it first.")
    part = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
    try:
        yield part
        part.chmod(0o755)  # mkdtemp's are for the owner alone
        os.replace(part, out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def write_zlab(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Write weights, config, code and generation config into `folder`; return the names of the tensors."""
    if checkpoint.target is not None:
        checkpoint.config.target_name_or_path = checkpoint.target
        checkpoint.config.target_architectures = checkpoint.target_architectures
    checkpoint.config.save_pretrained(folder)
    checkpoint.generation_config.save_pretrained(folder)
    for source in Path(drafter_package.__file__).parent.glob("*.py"):
        if source.name != "__init__.py":
            shutil.copyfile(source, folder / source.name)
    if checkpoint.mask_embedding is not None:
        shutil.copyfile(checkpoint.mask_embedding, folder / "mask_embedding.pt")
    _copy_licenses(checkpoint, folder)
    return _save({name: checkpoint.tensor(name) for name in checkpoint.files}, folder)


def write_speculators(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Write weights and config for speculators into `folder`; return the names of the tensors.

    Raises:
        ValueError: names the options that the layout cannot hold, or says that the target's name is needed.
    """
    config, knobs = checkpoint.config, checkpoint.generation_config
    refused = speculators.unheld(
        config,
        set(checkpoint.files),
        mask_embedding=checkpoint.mask_embedding is not None,
        knobs=knobs,
    )
    if refused:
        raise ValueError(f"speculators' layout cannot hold {'; '.join(refused)}.")
    if checkpoint.target is None:
        raise ValueError("speculators' layout names the target, and the drafter's folder does not: pass target=NAME.")
    architectures = checkpoint.target_architectures or _architectures(checkpoint.target)
    written = speculators.write_config(
        config, target=checkpoint.target, architectures=architectures, drafts=knobs.num_assistant_tokens
    )
    (folder / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    _copy_licenses(checkpoint, folder)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.files}
    if "d2t" in tensors:
        tensors["t2d"] = t2d_of(tensors["d2t"], config.vocab_size)
    return _save(tensors, folder)


def _architectures(target: str) -> list[str]:
    try:
        return PreTrainedConfig.get_config_dict(target, local_files_only=True)[0].get("architectures") or []
    except OSError:  # not on this machine; speculators has them for information only
        return []


def _copy_licenses(checkpoint: Checkpoint, folder: Path) -> None:
    for pattern in ("LICENSE*", "NOTICE*"):
        for file in checkpoint.folder.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def _save(tensors: dict[str, torch.Tensor], folder: Path) -> list[str]:
    # The tensors are mapped from their files and written from there: none is ever copied to memory.
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # it comes for the owner alone
    return sorted(tensors)


def load_drafter(source: str | os.PathLike, *, dtype: torch.dtype | None = None) -> DFlashDraftModel:
    """Load a drafter from a folder or the Hub in z-lab's or in speculators' layout, in eval mode.

    Args:
        source: folder or Hub name; `config.name_or_path` of the drafter is this name.
        dtype: of the parameters; None: as they are in the files. RoPE's frequencies stay float32, which
            `drafter.to(dtype)` would round, too: at long positions the rotations are then wrong.

    Raises:
        ValueError: the folder is of another kind, damaged or incomplete.

    Example:
        >>> drafter = load_drafter("speculators-folder", dtype=target.dtype)         # doctest: +SKIP
    """
    checkpoint = read(source)
    if checkpoint.layout == "z-lab":
        drafter = DFlashDraftModel.from_pretrained(checkpoint.folder, **({} if dtype is None else {"dtype": dtype}))
    else:
        tensors = {name: checkpoint.tensor(name) for name in checkpoint.files}
        with torch.device("meta"):
            drafter = DFlashDraftModel(checkpoint.config, own_tensors=checkpoint.own_tensors)
        drafter.load_state_dict(tensors, assign=True)
        drafter.rotary_emb = type(drafter.rotary_emb)(checkpoint.config)  # its tables are no part of the checkpoint
        if dtype is not None:
            drafter.config.dtype = dtype
            for parameter in drafter.parameters():
                parameter.data = parameter.data.to(dtype)
        drafter.generation_config = checkpoint.generation_config
    drafter.config.name_or_path = str(source)  # not the cache's folder
    return drafter.eval()


def meaning(config: DFlashConfig) -> dict:
    """All of a config that changes what the drafter computes, whichever way it is spelled.

    Example:
        >>> meaning(DFlashConfig(block_size=8)) == meaning(DFlashConfig(dflash_config={"block_size": 8}))
        True
    """
    return {name: getattr(config, name) for name in _SIZES} | {
        name: config.option(name, default) for name, default in _OPTIONS.items()
    }


@torch.no_grad()
def draft_logits(drafter: DFlashDraftModel, seed: int = 0) -> torch.Tensor:
    """Logits `[1, block_size, rows]` for random features and embeddings, through its own head or a random one."""
    config = drafter.config
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(drafter.dtype)

    positions = 2 * config.block_size
    features = random(1, positions, len(config.target_layer_ids) * config.target_hidden_size)
    ids = torch.full((1, config.block_size), config.mask_token_id)
    ids[0, 0] = 0
    block = drafter.embed_block(ids, lambda ids: random(*ids.shape, config.hidden_size))
    hidden = drafter(block, features).last_hidden_state
    rows = 64 if drafter.d2t is None else len(drafter.d2t)
    head = torch.nn.Linear(config.hidden_size, rows, bias=False, dtype=drafter.dtype)
    head.weight.copy_(random(rows, config.hidden_size))
    return drafter.compute_logits(hidden, head, config.vocab_size)


def _check_same(before: Path, after: Path) -> None:
    def result(folder: Path):  # one drafter at a time: it is gone on return
        drafter = load_drafter(folder)
        return meaning(drafter.config), draft_logits(drafter)

    (meaning_before, logits_before), (meaning_after, logits_after) = result(before), result(after)
    if logits_before.isnan().any():
        raise ValueError("The drafter's logits are not numbers (NaN): its weights are damaged. Nothing was written.")
    differ = [name for name, value in meaning_before.items() if meaning_after[name] != value]
    if differ or not torch.equal(logits_before, logits_after):
        raise RuntimeError(
            f"The converted drafter is not the same (config: {differ or 'equal'}; largest difference of its draft "
            f"logits: {float((logits_before - logits_after).abs().nan_to_num(0).max())}); nothing was written. This "
            "is an error in dflash-hf: please report it."
        )
