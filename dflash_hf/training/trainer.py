"""DFlashTrainer: transformers' Trainer with the objective of DFlash drafters."""

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import logging

from .acceptance import figures, walk
from .answers import Sample, check_ids, read_samples
from .features import FeatureDataset, target_features
from .objective import (
    IGNORE,
    Blocks,
    block_states,
    draw_anchors,
    loss_decay,
    pack,
    use_block_attention,
    weight_of,
    weighted_loss,
)

logger = logging.get_logger(__name__)

# Options by what their values must be. transformers takes most of these and fails late, or trains nothing useful.
LIMITS: dict[str, tuple[Callable[[float], bool], tuple[str, ...]]] = {
    "above 0": (
        lambda value: 0 < value < math.inf,
        ("learning_rate", "num_train_epochs", "loss_gamma"),
    ),
    "a number from 0": (
        lambda value: 0 <= value < math.inf,
        ("weight_decay", "warmup_steps", "max_grad_norm", "adam_epsilon", "dataloader_num_workers",
         "logging_steps", "save_steps", "eval_steps"),
    ),
    "at least 1": (
        lambda value: value >= 1,
        ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "num_anchors"),
    ),
    "at least 2": (lambda value: value >= 2, ("max_length",)),
    "at least 1, or -1 for whole epochs": (lambda value: value >= 1 or value == -1, ("max_steps",)),
    "from 0 to 1": (lambda value: 0 <= value <= 1, ("distillation_weight",)),
    "from 0 to below 1": (lambda value: 0 <= value < 1, ("adam_beta1", "adam_beta2")),
    "from 0 to 2**32 - 1": (lambda value: 0 <= value < 2**32, ("seed",)),
}  # fmt: skip
# What the packed pass has no place for, with the only value that it can have.
NOT_HERE: dict[str, object] = {
    "label_smoothing_factor": 0.0,
    "neftune_noise_alpha": None,
    "activation_checkpointing": False,
    "remove_unused_columns": False,
}


@dataclass
class DFlashTrainingArguments(TrainingArguments):
    """transformers' `TrainingArguments` with the paper's defaults, and what a drafter needs beside them.

    Args:
        num_anchors: blocks of each sequence and epoch.
        max_length: tokens of a sequence that are used.
        loss_gamma: decay of the loss weights; unset: by block size, see `objective.loss_decay`.
        distillation_weight: 0 for cross-entropy alone, 1 for the divergence from the target's distribution alone.
        answer_vocabulary: take the training loss over the tokens that occur in the training answers, not the whole
            vocabulary: where the LM head is most of the work, a step is much cheaper. Evaluation is not affected.

    Raises:
        ValueError: an option is out of its range, or has no meaning for a drafter.

    Example:
        >>> DFlashTrainingArguments(output_dir="runs/drafter").learning_rate
        0.0006
    """

    output_dir: str | None = field(default="dflash-drafter", metadata={"help": "Checkpoints and the trained drafter."})
    learning_rate: float = field(default=6e-4, metadata={"help": "Peak learning rate of AdamW."})
    num_train_epochs: float = field(default=6.0, metadata={"help": "Passes over the data, new anchors each."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule of the learning rate."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Steps, or below 1 the share of all steps."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradient clipping."})
    per_device_train_batch_size: int = field(default=1, metadata={"help": "Sequences in one pass."})
    gradient_accumulation_steps: int = field(default=8, metadata={"help": "Passes in one step."})
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "Sequences evaluated side by side."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Leave it off: samples are not columns."})
    num_anchors: int = field(default=512, metadata={"help": "Blocks of each sequence and epoch."})
    max_length: int = field(default=3072, metadata={"help": "Tokens of a sequence that are used."})
    loss_gamma: float | None = field(default=None, metadata={"help": "Loss decay; unset: by block size."})
    distillation_weight: float = field(default=0.0, metadata={"help": "0: cross-entropy, 1: divergence alone."})
    answer_vocabulary: bool = field(default=False, metadata={"help": "Loss over the tokens of the answers alone."})

    def __post_init__(self):
        super().__post_init__()
        usual = {option.name: option.default for option in fields(self)}
        for expected, (fits, names) in LIMITS.items():
            for name in names:
                value = getattr(self, name)
                if value is not None and not fits(value):
                    without = "" if usual[name] is None else f", which makes it {usual[name]}"
                    raise ValueError(f"{name} must be {expected}, got {value}: change it or leave it out{without}.")
        for name, value in NOT_HERE.items():
            if getattr(self, name) != value:
                raise ValueError(f"{name}={getattr(self, name)} does nothing in a drafter's training: leave it out.")
        if self.train_sampling_strategy not in ("random", "sequential"):
            raise ValueError(
                f"train_sampling_strategy must be random or sequential, got {self.train_sampling_strategy}: leave it "
                "out. Samples are packed without padding, their lengths need not agree."
            )


class SampleDataset(torch.utils.data.Dataset):
    """Samples whose features are computed in the training step.

    Example:
        >>> SampleDataset([Sample("a", [5, 6, 7, 8], [(2, 4)])])[0]["ids"]
        tensor([5, 6, 7, 8])
    """

    def __init__(self, samples: list[Sample]):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> dict:
        sample = self.samples[i]
        return {"sample_id": sample.id, "ids": torch.tensor(sample.ids, dtype=torch.long), "spans": sample.spans}

    def check_ids(self, target) -> None:
        """Refuse ids that `target` has no embedding for, see `answers.check_ids`."""
        for sample in self.samples:
            check_ids(f"Sample {sample.id}", max(sample.ids), target)


def read_dataset(sources: list[str | os.PathLike]) -> torch.utils.data.Dataset:
    """A data set of files of answers, or of folders of features.

    Raises:
        ValueError: files and folders are mixed, or there is none.
        FileNotFoundError: one of them is not there.
    """
    if not sources:
        raise ValueError("Expected files of answers or folders of features, got none.")
    folders = [source for source in sources if Path(source).is_dir()]
    if folders and len(folders) < len(sources):
        raise ValueError(f"Expected files of answers or folders of features, got both: {sources}.")
    if folders:
        return FeatureDataset(folders)
    return SampleDataset([sample for source in sources for sample in read_samples(source)])


class DFlashTrainer(Trainer):
    """Train a drafter on the answers of its target. Everything else is transformers' `Trainer`.

    The target is frozen: it gives the embeddings and the LM head, and the features where the data set has none. The
    loss of a step is divided by the sum of its weights over accumulation and processes, so neither changes a result.
    Checkpoints are drafter folders. Evaluation reports the loss, the accuracy of each slot, and `tau`, the acceptance
    length that greedy generation would have on these answers.

    Args:
        model: a `DFlashDraftModel`, or a `PeftModel` around one.
        target: its target, on the device where it is to run.
        args: `DFlashTrainingArguments`.
        train_dataset: a `FeatureDataset`, a `SampleDataset` or another data set of such items.
        eval_dataset: the same, or a dict of them by name.

    Raises:
        ValueError: the drafter does not fit the target, the features are of other layers, or a token id is beyond the
            target's vocabulary. Nothing was written then.

    Example:
        >>> dataset = SampleDataset(read_samples("answers.jsonl"))                                # doctest: +SKIP
        >>> trainer = DFlashTrainer(drafter, target, DFlashTrainingArguments("out"), dataset)     # doctest: +SKIP
        >>> trainer.train(); trainer.save_model()                                                 # doctest: +SKIP
    """

    def __init__(self, model, target, args: DFlashTrainingArguments, train_dataset=None, eval_dataset=None, **kwargs):
        self.drafter = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.drafter.check_target(target)
        if args.n_gpu > 1:
            raise ValueError(
                f"{args.n_gpu} GPUs in one process would be nn.DataParallel, which does not take packed sequences: "
                "start one process a GPU with `accelerate launch`, or set CUDA_VISIBLE_DEVICES to one."
            )
        _check_metric(args.metric_for_best_model, eval_dataset)
        self.target = target
        for name, dataset in {"train_dataset": train_dataset, **_by_name(eval_dataset)}.items():
            _check_features(dataset, name, self.drafter.config, args.distillation_weight)
            if hasattr(dataset, "check_ids"):
                dataset.check_ids(target)
        use_block_attention(self.drafter)
        for part in (self.drafter.embed_tokens, self.drafter.lm_head):
            if part is not None:
                part.requires_grad_(False)
        self.gamma = loss_decay(self.drafter.config.block_size) if args.loss_gamma is None else args.loss_gamma
        reduced = args.answer_vocabulary and train_dataset is not None
        rows = answer_tokens(train_dataset, args.max_length) if reduced else None
        self.head = Head(self.drafter, target, rows)
        self._known = None  # ids that a reduced draft vocabulary holds
        if self.drafter.d2t is not None:
            self._known = torch.zeros(self.drafter.config.vocab_size, dtype=torch.bool)
            self._known[torch.arange(len(self.drafter.d2t)) + self.drafter.d2t.cpu()] = True
        super().__init__(
            model=model,
            args=args,
            data_collator=_as_they_are,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            **kwargs,
        )
        # compute_loss divides by the weights of the whole step already.
        self.loss_is_scaled_for_ga = True
        if self.is_fsdp_enabled:
            # Used outside of the forward pass, by each process for itself: they stay whole, as the target does.
            whole = [module for module in (self.drafter.embed_tokens, self.drafter.lm_head) if module is not None]
            self.accelerator.state.fsdp_plugin.ignored_modules = whole or None
        elif args.fsdp:
            logger.warning("accelerate does not shard on this device: --fsdp is ignored, every process is a replica.")

    # -- the step --

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The passes of one step with their anchors drawn, and the sum of their weights over all processes."""
        batches = []
        for _ in range(num_batches):
            try:
                batches.append(next(epoch_iterator))
            except StopIteration:
                break
        epoch = int(self.state.epoch or 0)
        batches = [self._with_blocks(items, epoch) for items in batches]
        total = torch.zeros((), dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)
        for batch in batches:
            total += weight_of(batch["blocks"].labels, self.gamma).sum().to(total)
        if self.args.world_size > 1:
            total = self.accelerator.reduce(total, "sum")
        return batches, total

    def _with_blocks(self, items: list[dict], epoch: int) -> dict:
        items = [self._prepared(item) for item in items]
        anchors = [
            # An answer without room for a block gets one without labels, so that every process has a pass to make.
            draw_anchors(item["spans"], self.args.num_anchors, self.args.seed, epoch, item["sample_id"]) or [0]
            for item in items
        ]
        blocks = pack(items, anchors, self.drafter.config)
        if self._known is not None:
            known = self._known.to(blocks.labels.device)
            blocks.labels = torch.where(known[blocks.labels.clamp(min=0)], blocks.labels, IGNORE)
        return {"blocks": blocks, "items": items}

    def _prepared(self, item: dict) -> dict:
        """An item on the device, at most max_length long."""
        most, device = self.args.max_length, self.args.device
        spans = [(start, min(stop, most)) for start, stop in item["spans"] if start < most]
        tensors = {key: value[:most].to(device) for key, value in item.items() if torch.is_tensor(value)}
        return {"sample_id": item["sample_id"], "spans": spans} | tensors

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The weighted loss of one pass, as its share of the step's loss (times processes, whose mean DDP takes)."""
        blocks = inputs["blocks"]
        if blocks.features is None or (self.args.distillation_weight > 0 and blocks.final is None):
            self._compute_features(blocks, inputs["items"])
        states = block_states(model, self.drafter, blocks, self.target.get_input_embeddings())
        there = blocks.labels != IGNORE
        labels, weights = blocks.labels[there], weight_of(blocks.labels, self.gamma)[there]
        if len(labels) == 0:  # every parameter still takes part, which DDP waits for
            loss = states.sum() * 0.0
            return (loss, None) if return_outputs else loss
        teacher = None
        if self.args.distillation_weight > 0:
            rows = blocks.final[blocks.teachers[there]]

            def teacher(part):
                return self.head.of_target(rows[part])

        loss = weighted_loss(
            states[there],
            self.head.number(labels),
            weights,
            self.head,
            self.head.vocab_size,
            teacher,
            self.args.distillation_weight,
        )
        total = weights.sum() if num_items_in_batch is None else num_items_in_batch
        loss = loss * (self.args.world_size / total).to(loss)
        return (loss, None) if return_outputs else loss

    def floating_point_ops(self, inputs) -> int:
        """What one training pass needs, forward and backward, target features left out; `total_flos` sums it up.

        Two operations a multiply-add; the backward pass twice the forward. The frozen head has no weight gradient, and
        the features have none.
        """
        blocks, config = inputs["blocks"], self.drafter.config
        N, L = len(blocks.visible), config.block_size
        T = blocks.position_ids.shape[1] - N * L
        D, head_dim = config.hidden_size, config.head_dim
        kv = 2 * D * config.num_key_value_heads * head_dim
        layer = kv + 2 * D * config.num_attention_heads * head_dim + 3 * D * config.intermediate_size
        fc, linear = T * self.drafter.fc.weight.numel(), config.num_hidden_layers * (T * kv + N * L * layer)
        seen = int((blocks.visible[:, 1] - blocks.visible[:, 0] + L).sum()) * L  # pairs of query and key
        attention = config.num_hidden_layers * seen * 2 * config.num_attention_heads * head_dim
        labels = int((blocks.labels != IGNORE).sum())
        head = labels * self.head.vocab_size * D
        return 4 * fc + 6 * (linear + attention) + (6 if self.args.distillation_weight > 0 else 4) * head

    def _compute_features(self, blocks: Blocks, items: list[dict]) -> None:
        distils = self.args.distillation_weight > 0
        ids = torch.nn.utils.rnn.pad_sequence([item["ids"] for item in items], batch_first=True)
        features, final = target_features(self.target, ids, self.drafter.config.target_layer_ids, distils)
        lengths = [len(item["ids"]) for item in items]
        device = blocks.block_ids.device
        blocks.features = torch.cat([row[:n] for row, n in zip(features, lengths, strict=True)])[None].to(device)
        if final is not None:
            blocks.final = torch.cat([row[:n] for row, n in zip(final, lengths, strict=True)]).to(device)

    # -- evaluation --

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ) -> EvalLoopOutput:
        """Teacher-forced cycles over every sample: `loss`, `tau` and the accuracy of each slot, pooled."""
        self.model.eval()
        target = self.target
        found = []

        def head(states):
            return self.drafter.compute_logits(states, target.get_output_embeddings(), self.drafter.config.vocab_size)

        for items in dataloader:
            items = [self._prepared(item) for item in items]
            missing = [item for item in items if "features" not in item]
            for item in missing:
                features, _ = target_features(target, item["ids"][None], self.drafter.config.target_layer_ids)
                item["features"] = features[0].to(self.args.device)
            rows = walk(self.model, self.drafter, items, head, target.get_input_embeddings(), self.gamma)
            # Drops what the data loader repeated to give every process the same number.
            found.append(self.accelerator.gather_for_metrics(rows.float().to(self.args.device)).double().cpu())
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures(torch.cat(found)).items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=len(dataloader.dataset))

    # -- checkpoints --

    def train(self, resume_from_checkpoint=None, **kwargs):
        """As in transformers; `resume_from_checkpoint=True` takes the newest checkpoint that is whole, if any."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _save_checkpoint(self, model, trial) -> None:
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, SafetensorError, RuntimeError) as error:
            last = last_checkpoint(self.args.output_dir)
            kept = f"{last} is whole" if last else "there is no earlier one"
            raise OSError(
                f"Could not write the checkpoint of step {self.state.global_step} to {self.args.output_dir}: {error}. "
                f"Of the earlier ones {kept}: make room and start again with the same command."
            ) from error


class Head:
    """The frozen LM head of the training loss: the drafter's own, the target's, or some rows of the target's.

    Args:
        rows: ids `[V']` to keep, in order, or None for the whole vocabulary.
    """

    def __init__(self, drafter, target, rows: torch.Tensor | None = None):
        self.drafter, self.text = drafter, target.config.get_text_config()
        self.module = target.get_output_embeddings()
        self.vocab_size = drafter.config.vocab_size
        self.numbers = None
        if rows is not None:
            if drafter.lm_head is not None or self.module.weight.shape[0] != self.vocab_size:
                raise ValueError("answer_vocabulary needs a drafter that borrows the target's LM head: leave it out.")
            whole, self.vocab_size = self.module, len(rows)
            rows = rows.to(whole.weight.device)
            self.module = torch.nn.Linear(1, 1, bias=whole.bias is not None)
            self.module.weight = torch.nn.Parameter(whole.weight.detach()[rows], requires_grad=False)
            if whole.bias is not None:
                self.module.bias = torch.nn.Parameter(whole.bias.detach()[rows], requires_grad=False)
            self.numbers = torch.zeros(drafter.config.vocab_size, dtype=torch.long, device=rows.device)
            self.numbers[rows] = torch.arange(len(rows), device=rows.device)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """The drafter's logits `[m, V]` of `[m, D]`."""
        return self.drafter.compute_logits(states, self.module, self.vocab_size)

    def of_target(self, final: torch.Tensor) -> torch.Tensor:
        """The target's logits `[m, V]` of its final hidden states `[m, D_t]`, scaled as its own forward does."""
        weight = self.module.weight
        logits = self.module(final.to(weight.device, weight.dtype)).float()
        # What Cohere, Granite and Gemma do behind their heads.
        logits = logits * (getattr(self.text, "logit_scale", None) or 1.0)
        logits = logits / (getattr(self.text, "logits_scaling", None) or 1.0)
        if cap := getattr(self.text, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits

    def number(self, ids: torch.Tensor) -> torch.Tensor:
        """Where ids of the vocabulary stand in this head."""
        return ids if self.numbers is None else self.numbers.to(ids.device)[ids]


def last_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """The newest whole checkpoint in a folder, None without one. What was left half-written is removed.

    The Trainer writes its state last, so a checkpoint without it was cut off.
    """
    whole = {}
    for folder in Path(output_dir).glob("checkpoint-*"):
        step = folder.name.removeprefix("checkpoint-")
        if not step.isdigit():
            continue
        try:
            whole[int(step)] = json.loads((folder / TRAINER_STATE_NAME).read_text())["global_step"] and folder
        except (OSError, ValueError, KeyError):
            logger.warning(f"{folder} is not a whole checkpoint: it was cut off while it was written. Removing it.")
            shutil.rmtree(folder, ignore_errors=True)
    return str(whole[max(whole)]) if whole else None


def _as_they_are(items: list[dict]) -> list[dict]:
    return items


def _by_name(eval_dataset) -> dict:
    return eval_dataset if isinstance(eval_dataset, dict) else {"eval_dataset": eval_dataset}


def _check_metric(wanted: str | None, eval_dataset) -> None:
    if wanted is None or not isinstance(eval_dataset, dict):
        return
    if not any(wanted.removeprefix("eval_").startswith(f"{name}_") for name in eval_dataset):
        raise ValueError(
            f"metric_for_best_model must name a held-out set and its figure, such as {next(iter(eval_dataset))}_tau, "
            f"got {wanted}."
        )


def _check_features(dataset, name: str, config, distillation_weight: float) -> None:
    index = getattr(dataset, "index", None)
    if index is None:
        return
    if list(index["target_layer_ids"]) != list(config.target_layer_ids):
        raise ValueError(
            f"The features of {name} are of target layers {index['target_layer_ids']}, the drafter reads "
            f"{config.target_layer_ids}: write features for this drafter."
        )
    if name == "train_dataset" and distillation_weight > 0 and not index["with_final"]:
        raise ValueError(
            f"distillation_weight={distillation_weight} needs the target's final hidden states, which the features of "
            f"{name} lack: write them with --with-final, or leave out distillation."
        )


def answer_tokens(dataset, max_length: int) -> torch.Tensor:
    """Ids that occur in the answers of a data set, in order."""
    found: set[int] = set()
    for i in range(len(dataset)):
        item = dataset.without_features(i) if hasattr(dataset, "without_features") else dataset[i]
        for start, stop in item["spans"]:
            found.update(item["ids"][start : min(stop, max_length)].tolist())
    return torch.tensor(sorted(found))
