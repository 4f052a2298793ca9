"""The context features of a frozen target: computed in the training step (online) or kept on disk (offline).

A token's features are the target's hidden states after the layers `target_layer_ids`, side by side: F * D_t numbers
(paper, section 3). Offline they are written once, as safetensors shards of a few dozen samples, and memory-mapped.
"""

import hashlib
import json
import os
import shutil
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.utils import logging

from .answers import Sample, check_ids, fingerprint, write_json

logger = logging.get_logger(__name__)

INDEX = "features.json"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@torch.no_grad()
def target_features(
    target, input_ids: torch.Tensor, layer_ids: list[int], with_final: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One forward pass of the target, of which only the named hidden states are kept.

    Args:
        target: a causal LM, in eval mode.
        input_ids: `[B, S]` long, padded on the RIGHT with any id: a causal target's earlier positions do not see it.
        layer_ids: ids of decoder layers, counted from 0; id i is `hidden_states[i + 1]` in transformers.
        with_final: return what the target's LM head reads, too.

    Returns:
        features `[B, S, F * D_t]`, and the final hidden states `[B, S, D_t]` or None; both in the target's dtype.

    Example:
        >>> features, _ = target_features(target, torch.tensor([[5, 6, 7]]), [1, 8, 14])       # doctest: +SKIP
    """
    wanted = [i + 1 for i in layer_ids]
    last = target.config.get_text_config().num_hidden_layers
    outputs = target(
        input_ids=input_ids.to(target.device),
        output_hidden_states=[*wanted, last] if with_final else wanted,
        use_cache=False,
        logits_to_keep=1,  # the LM head is not needed; one row is the least that it can be asked for
    )
    states = [outputs.hidden_states[i] for i in wanted]
    features = torch.cat([state.to(states[0].device) for state in states], dim=-1)  # layers may be on several devices
    return features, outputs.hidden_states[last] if with_final else None


def occurrences(sample_ids: list[str]) -> list[int]:
    """How often each id stood in the list before.

    >>> occurrences(["a", "b", "a"])
    [0, 0, 1]
    """
    count: Counter[str] = Counter()
    found = []
    for sample_id in sample_ids:
        found.append(count[sample_id])
        count[sample_id] += 1
    return found


def feature_bytes(samples: list[Sample], width: int) -> int:
    """Bytes on disk of `width` 16-bit numbers a token.

    >>> feature_bytes([Sample("a", [1, 2, 3], [(1, 3)])], width=5 * 4096)
    122880
    """
    return sum(len(sample.ids) for sample in samples) * width * 2


def write_features(
    target,
    samples: list[Sample],
    folder: str | os.PathLike,
    layer_ids: list[int],
    *,
    dtype: str = "bfloat16",
    with_final: bool = False,
    samples_per_shard: int = 32,
    tokens_per_batch: int = 1024,
    progress: bool = False,
) -> int:
    """Compute the features of `samples` and keep them in `folder`; returns the number of shards written.

    The folder holds `features.json` and `features-00000.safetensors` and so on, samples in order, each shard with its
    samples' ids and spans, so that training needs nothing else. A shard appears under its name when it is whole: after
    a kill, call again with the same arguments and the missing shards are computed.

    Args:
        target: the frozen causal LM, in eval mode.
        samples: with their token ids; the target's own answers.
        layer_ids: the drafter's `config.target_layer_ids`.
        dtype: "bfloat16" or "float16". float16 keeps three bits more, and cannot hold values beyond 65504, which some
            targets' hidden states reach.
        with_final: keep the final hidden states too, which distillation needs (D_t numbers a token more).
        samples_per_shard: samples in a shard.
        tokens_per_batch: of one pass of the target, padding included; a longer sample is a batch of its own.
        progress: a progress bar with tokens/s and time left (needs the package `rich`).

    Raises:
        ValueError: the folder holds features of something else, or of other answers; a value does not fit float16, an
            unknown `dtype`, or a token id is beyond the target's vocabulary.
        OSError: the disk has no room for all of it (said before anything is computed) or cannot be written.

    Example:
        >>> write_features(target, read_samples("answers.jsonl"), "features", [1, 8, 14, 20, 27])      # doctest: +SKIP
        234
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    for sample in samples:
        check_ids(f"Sample {sample.id}", max(sample.ids), target)
    folder = Path(folder)
    hidden_size = target.config.get_text_config().hidden_size
    width = hidden_size * (len(layer_ids) + with_final)
    index = {
        "target_layer_ids": list(layer_ids),
        "target_hidden_size": hidden_size,
        "dtype": dtype,
        "with_final": with_final,
        "target": fingerprint(target),
        "samples_per_shard": samples_per_shard,
    }
    shards = [samples[i : i + samples_per_shard] for i in range(0, len(samples), samples_per_shard)]
    _check_index(folder, index)
    missing = [i for i, shard in enumerate(shards) if not _is_whole(_shard_path(folder, i), _digest(shard))]
    for i in missing:
        _check_replaceable(_shard_path(folder, i), shards[i])
    needed = feature_bytes([sample for i in missing for sample in shards[i]], width)
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    logger.warning(
        f"Features of {len(samples)} samples: {feature_bytes(samples, width) / 1e9:.2f} GB as {dtype} in {folder}, "
        f"{needed / 1e9:.2f} GB of them to be written; {free / 1e9:.1f} GB are free."
    )
    if needed > free:
        raise OSError(
            f"The features need {needed / 1e9:.2f} GB and {folder} has {free / 1e9:.2f} GB free: name a folder on a "
            "larger disk, fewer samples, or train with online features."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / INDEX, index | {"shards": len(shards), "samples": len(samples)})
    tokens = sum(len(sample.ids) for i in missing for sample in shards[i])
    with _progress(tokens) if progress else nullcontext(lambda tokens: None) as advance:
        for i in missing:
            tensors = _shard_tensors(target, shards[i], layer_ids, DTYPES[dtype], with_final, tokens_per_batch)
            metadata = {"digest": _digest(shards[i]), "sample_ids": json.dumps([s.id for s in shards[i]])}
            _save_whole(tensors, _shard_path(folder, i), metadata)
            advance(sum(len(sample.ids) for sample in shards[i]))
    return len(missing)


def _shard_tensors(target, samples, layer_ids, dtype, with_final, tokens_per_batch) -> dict[str, torch.Tensor]:
    features: list = [None] * len(samples)
    final: list = [None] * len(samples)
    for batch in _batches(samples, tokens_per_batch):
        width = max(len(samples[i].ids) for i in batch)
        ids = torch.tensor([samples[i].ids + [0] * (width - len(samples[i].ids)) for i in batch])
        computed, last = target_features(target, ids, layer_ids, with_final)
        for row, i in enumerate(batch):
            length = len(samples[i].ids)
            features[i] = _narrow(computed[row, :length], dtype, samples[i].id)
            if last is not None:
                final[i] = _narrow(last[row, :length], dtype, samples[i].id)
    tensors = {
        "features": torch.cat(features),  # [T, F * D_t]
        "ids": torch.tensor([i for sample in samples for i in sample.ids], dtype=torch.int32),  # [T]
        "lengths": torch.tensor([len(sample.ids) for sample in samples], dtype=torch.int32),
        "spans": torch.tensor(  # (sample, start, stop)
            [(n, start, stop) for n, sample in enumerate(samples) for start, stop in sample.spans], dtype=torch.int32
        ),
    }
    return tensors | ({"final": torch.cat(final)} if with_final else {})


def _narrow(states: torch.Tensor, dtype: torch.dtype, sample_id: str) -> torch.Tensor:
    narrow = states.to("cpu", dtype)
    if not narrow.isfinite().all():
        raise ValueError(
            f"Sample {sample_id}: hidden states up to {states.abs().max():.3g} do not fit {dtype}; use bfloat16."
            if states.isfinite().all()
            else f"Sample {sample_id}: the target's hidden states are not finite; check its weights and dtype."
        )
    return narrow


def _batches(samples: list[Sample], tokens: int) -> list[list[int]]:
    """Indices of samples of about the same length, at most `tokens` with padding."""
    batches: list[list[int]] = []
    for i in sorted(range(len(samples)), key=lambda i: len(samples[i].ids)):
        if batches and (len(batches[-1]) + 1) * len(samples[i].ids) <= tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


class FeatureDataset(torch.utils.data.Dataset):
    """Samples with their features, read from folders that `write_features` wrote.

    An item is a dict: `sample_id` (str), `ids` `[S]` long, `spans` (list of pairs), `features` `[S, F * D_t]` and,
    where it was kept, `final` `[S, D_t]`, both in the dtype on disk. Only what an item needs is read.

    Args:
        folders: one or several, of the same target and layers.
        partial: accept a folder whose shards are not all there yet.

    Raises:
        FileNotFoundError: no such folder, or shards are missing.
        ValueError: the folders disagree, or a shard is damaged (named, with what to do).

    Example:
        >>> dataset = FeatureDataset("features")                            # doctest: +SKIP
        >>> dataset[0]["features"].shape                                    # doctest: +SKIP
        torch.Size([187, 2880])
    """

    def __init__(self, folders: str | os.PathLike | list[str | os.PathLike], partial: bool = False):
        sources = [Path(f) for f in ([folders] if isinstance(folders, str | os.PathLike) else folders)]
        self.index: dict = {}
        self.items: list = []
        self.lengths: list[int] = []
        self._open: dict[Path, safe_open] = {}
        for folder in sources:
            if not (folder / INDEX).is_file():
                raise FileNotFoundError(f"{folder} holds no {INDEX}: expected a folder of `dflash-hf features`.")
            index = json.loads((folder / INDEX).read_text())
            keys = ("target_layer_ids", "target_hidden_size", "with_final", "target")
            for key in keys:
                if self.index and index[key] != self.index[key]:
                    raise ValueError(
                        f"{folder} has {key} = {index[key]}, {sources[0]} has {self.index[key]}: features of one "
                        "training run must come from the same target and layers."
                    )
            self.index = self.index or index
            paths = [_shard_path(folder, i) for i in range(index["shards"])]
            there = [path for path in paths if path.is_file()]
            if len(there) < len(paths) and not partial:
                raise FileNotFoundError(
                    f"{folder} has {len(there)} of {len(paths)} shards: run `dflash-hf features` again, it goes on "
                    "where it stopped."
                )
            before = len(self.items)
            for path in there:
                self._read_header(path)
            if not partial and len(self.items) - before != index["samples"]:
                raise FileNotFoundError(
                    f"{folder} has features of {len(self.items) - before} samples, its {INDEX} says "
                    f"{index['samples']}: run `dflash-hf features` again, it goes on where it stopped."
                )
        self.occurrences = occurrences([sample_id for _, sample_id, *_ in self.items])

    def _read_header(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as shard:
                sample_ids = json.loads(shard.metadata()["sample_ids"])
                lengths = shard.get_tensor("lengths").tolist()
                spans: list[list] = [[] for _ in lengths]
                for n, start, stop in shard.get_tensor("spans").tolist():
                    spans[n].append((start, stop))
                # Comparing sizes here finds a damaged file before the first step, not hours later.
                if shard.get_slice("features").get_shape()[0] != sum(lengths) or len(sample_ids) != len(lengths):
                    raise KeyError("lengths")
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(_damaged(path, error)) from error
        start = 0
        for sample_id, length, sample_spans in zip(sample_ids, lengths, spans, strict=True):
            self.items.append((path, sample_id, start, length, sample_spans))
            self.lengths.append(length)
            start += length

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> dict:
        path, sample_id, start, length, spans = self.items[i]
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            shard, rows = self._open[path], slice(start, start + length)
            item = {"sample_id": sample_id, "ids": shard.get_slice("ids")[rows].long(), "spans": spans}
            item["occurrence"] = self.occurrences[i]
            item["features"] = shard.get_slice("features")[rows]
            if self.index["with_final"]:
                item["final"] = shard.get_slice("final")[rows]
        except (SafetensorError, OSError) as error:
            raise ValueError(_damaged(path, error)) from error
        return item

    def check_ids(self, target) -> None:
        """Refuse ids that `target` has no embedding for, see `answers.check_ids`."""
        for path in {path: None for path, *_ in self.items}:
            with safe_open(path, framework="pt") as shard:
                check_ids(f"The shard {path}", int(shard.get_tensor("ids").max()), target)

    def spans(self) -> list[list[tuple[int, int]]]:
        """Of every item."""
        return [spans for *_, spans in self.items]

    def without_features(self, i: int) -> dict:
        """Item i without what takes time to read."""
        path, sample_id, start, length, spans = self.items[i]
        with safe_open(path, framework="pt") as shard:
            ids = shard.get_slice("ids")[start : start + length].long()
        return {"sample_id": sample_id, "ids": ids, "spans": spans}

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_open": {}}  # a data loader's workers open the files themselves


def _damaged(path: Path, error: Exception) -> str:
    return (
        f"The shard {path} is damaged ({error}). Delete it and run `dflash-hf features` with the same arguments: only "
        "what is missing is computed. Checkpoints of the training run are not affected."
    )


def _shard_path(folder: Path, i: int) -> Path:
    return folder / f"features-{i:05d}.safetensors"


def _is_whole(path: Path, digest: str) -> bool:
    """Whether the shard is there, complete, and of these samples."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, framework="pt") as shard:
            return (shard.metadata() or {}).get("digest") == digest
    except SafetensorError:  # its size is not what its header says
        return False


def _check_replaceable(path: Path, samples: list[Sample]) -> None:
    """Whole shards of other answers are kept; one that `samples` only add to is the last of an earlier call."""
    try:
        with safe_open(path, framework="pt") as shard:
            metadata = shard.metadata() or {}
            sample_ids = json.loads(metadata.get("sample_ids", "[]"))
    except (SafetensorError, OSError, ValueError):  # damaged, or not there
        return
    if metadata.get("digest") != _digest(samples[: len(sample_ids)]):
        raise ValueError(
            f"{path} holds features of other answers: name another folder, or delete {path.parent} if they are no "
            "longer needed. (Answers may be added to the end of the file, nothing else changed in it.)"
        )


def _digest(samples: list[Sample]) -> str:
    content = json.dumps([[sample.id, sample.ids, sample.spans] for sample in samples])
    return hashlib.sha256(content.encode()).hexdigest()


def _check_index(folder: Path, index: dict) -> None:
    path = folder / INDEX
    if not path.exists():
        return
    found = json.loads(path.read_text())
    for key, value in index.items():
        if found.get(key) != value:
            raise ValueError(
                f"{folder} holds features with {key} = {found.get(key)}, wanted {value}: name another folder, or "
                "delete this one."
            )


def _save_whole(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        save_file(tensors, temporary, metadata=metadata)
        temporary.replace(path)
    except (SafetensorError, OSError) as error:
        temporary.unlink(missing_ok=True)
        raise OSError(
            f"Could not write {path} ({error}). The shards before it are whole: make room and run the command again."
        ) from error


@contextmanager
def _progress(total: int):
    """Yield `advance(tokens)` of a bar with tokens/s and time left."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    rate = TextColumn("{task.percentage:.0f}%, {task.fields[rate]:.0f} tokens/s")
    with Progress("features", BarColumn(), rate, TimeRemainingColumn(elapsed_when_finished=True)) as bar:
        task = bar.add_task("", total=total, rate=0.0)

        def advance(tokens: int) -> None:
            bar.advance(task, tokens)
            bar.update(task, rate=bar.tasks[task].completed / (bar.tasks[task].elapsed or 1.0))

        yield advance
