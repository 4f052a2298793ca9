"""Training against generation, closed forms, and itself: batches, processes and interruptions change nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, TrainerCallback
from typer.testing import CliRunner

from dflash_hf import DFlashDraftModel
from dflash_hf.cli import app
from dflash_hf.training import acceptance, objective
from dflash_hf.training.acceptance import figures, walk
from dflash_hf.training.answers import Sample
from dflash_hf.training.features import target_features
from dflash_hf.training.trainer import (
    DFlashTrainer,
    DFlashTrainingArguments,
    Head,
    SampleDataset,
    last_checkpoint,
)
from drafters import BLOCK, make_drafter
from hub_server import TOKEN, HubServer
from targets import COMMON, FIRST_TEXT_ID, HIDDEN, MASK, VOCAB, make_target, prompt_ids

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
VARIANTS = {
    "bidirectional": {},
    "sliding": SLIDING,
    "causal": {"is_causal": True},
    "use_swa": {"dflash_config": {"use_swa": True, "swa_window_size": 3}},
    "sinks": SLIDING | {"dflash_config": {"attention_sink_bias": True}},
    "sample_from_anchor": {"dflash_config": {"sample_from_anchor": True}},
    "interleaved rope": {"is_neox_style": False},
}


@pytest.fixture(scope="module")
def target():
    return make_target("qwen3")


@pytest.fixture(scope="module")
def samples(target) -> list[Sample]:
    """Greedy answers of several lengths to prompts of several lengths."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in range(8):
        prompt = torch.randint(FIRST_TEXT_ID, VOCAB, (1, 6 + number), generator=generator)
        ids = target.generate(prompt, max_new_tokens=13 + number, do_sample=False)[0].tolist()
        found.append(Sample(f"s{number}", ids, [(6 + number, len(ids))]))
    return found


def item_of(target, sample: Sample, config) -> dict:
    ids = torch.tensor(sample.ids)
    features, final = target_features(target, ids[None], config.target_layer_ids, with_final=True)
    return {"sample_id": sample.id, "ids": ids, "spans": sample.spans, "features": features[0], "final": final[0]}


def arguments(folder, **overrides) -> DFlashTrainingArguments:
    settings = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "max_steps": 2,
        "num_anchors": 6,
        "learning_rate": 1e-2,
    }
    return DFlashTrainingArguments(**settings | overrides)


def trained(target, dataset, folder, drafter=None, callbacks=None, resume=None, **overrides) -> DFlashTrainer:
    drafter = make_drafter(initializer_range=0.05) if drafter is None else drafter
    trainer = DFlashTrainer(drafter, target, arguments(folder, **overrides), dataset, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_same_weights(one, other, tolerance: float = 0.0) -> None:
    others = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        assert (parameter - others[name]).abs().max() <= tolerance, name


# -- train equals inference --


class Recorder(DFlashDraftModel):
    """Keeps the anchor's position and the logits of every draft."""

    def forward(self, noise_embeds, context_hidden_states, position_ids=None, **kwargs):
        if noise_embeds.shape[1] == self.config.block_size:
            self.anchors.append(int(position_ids[0, -noise_embeds.shape[1]]))
        return super().forward(noise_embeds, context_hidden_states, position_ids, **kwargs)

    def compute_logits(self, hidden, target_head, vocab_size):
        logits = super().compute_logits(hidden, target_head, vocab_size)
        self.drafted.append(logits[0])
        return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_pass_gives_the_logits_of_generation(variant, dtype, samples):
    target = make_target("qwen3", dtype=dtype)
    drafter = make_drafter(cls=Recorder, **VARIANTS[variant]).to(dtype)
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    drafter.anchors, drafter.drafted = [], []
    sample, other = samples[3], samples[5]
    start = sample.spans[0][0]
    prompt = torch.tensor([sample.ids[:start]])
    target.generate(prompt, assistant_model=drafter, max_new_tokens=len(sample.ids) - start, do_sample=False)
    anchors, drafted = drafter.anchors, drafter.drafted[:]
    assert len(anchors) == len(drafted) > 10

    objective.use_block_attention(drafter)
    items = [item_of(target, s, drafter.config) for s in (other, sample)]
    blocks = objective.pack(items, [[other.spans[0][0], other.spans[0][0] + 4], anchors], drafter.config)
    states = objective.block_states(drafter, drafter, blocks, target.get_input_embeddings())
    logits = drafter.compute_logits(states, target.get_output_embeddings(), VOCAB)[2:]
    for row, seen in zip(logits, drafted, strict=True):
        # Of the largest logit in float32, where rounding is relative; two orders above that is left in float64.
        atol = 1e-5 * max(1.0, float(seen.abs().max())) if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(row[: len(seen)], seen, rtol=0, atol=atol)


@pytest.mark.parametrize("variant", ["bidirectional", "sliding", "causal"])
def test_flex_attention_sees_what_sdpa_sees(variant):
    attention = make_drafter(**VARIANTS[variant]).layers[0].self_attn
    visible = torch.tensor([[0, 5], [0, 7], [9, 12], [9, 20]])
    T, L = 21, 4
    q, k = torch.randn(1, 4, 4 * L, 16), torch.randn(1, 4, T + 4 * L, 16)
    v = torch.randn_like(k)
    attention.num_key_value_groups = 1
    mask = visible[None, None]
    expected, _ = objective.block_attention(attention, q, k, v, mask, scaling=0.25)
    found = objective._flex(attention, q, k, v, mask, L, T, 0.25)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_flex_attention_gets_one_dtype(monkeypatch):
    """Under autocast queries and keys come in float32, values in bfloat16; older torch refuses that."""
    attention, seen = make_drafter().layers[0].self_attn, []

    def flex(query, key, value, **options):
        seen.append({query.dtype, key.dtype, value.dtype})
        return query

    monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", flex)
    q, k = torch.randn(1, 4, 4, 16), torch.randn(1, 4, 9, 16)
    objective._flex(attention, q, k, k.bfloat16(), torch.tensor([[[[0, 5]]]]), 4, 5, 0.25)
    assert seen == [{torch.bfloat16}]


@pytest.mark.parametrize("window", [None, 3, 40, 300])
@pytest.mark.parametrize("causal", [False, True])
def test_tiles_of_flex_attention_are_those_of_every_pair(causal, window):
    """torch's own way to them, from the dense mask. Sequences of several tiles and of less than one."""
    generator = torch.Generator().manual_seed(0)
    L, T, visible = 7, 900, []
    for begin, stop, count in ((0, 300, 20), (300, 310, 5), (310, T, 60)):
        anchors = torch.randint(begin, stop, (count,), generator=generator).sort().values
        visible += [[begin, anchor] for anchor in anchors.tolist()]
    visible = torch.tensor(visible)
    dense = objective.visibility(visible, L, 0, T, causal=causal, window=window)
    expected = create_block_mask(lambda b, h, q, k: dense[q, k], 1, None, *dense.shape, device="cpu")
    found = objective.tiles(visible, L, T, causal=causal, window=window)
    assert found.seq_lengths == expected.seq_lengths
    assert found.full_kv_num_blocks.any() or window is not None
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_indices"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    query, key = (torch.arange(n) for n in dense.shape)
    assert torch.equal(found.mask_mod(0, 0, query[:, None], key), dense)


# -- the objective --


def test_labels_are_the_answers_tokens_and_nothing_else(target):
    sample = Sample("two turns", list(range(8, 28)), [(4, 9), (13, 20)])
    drafter = make_drafter()
    anchors = objective.possible_anchors(sample.spans)
    assert anchors == [4, 5, 6, 7, 13, 14, 15, 16, 17, 18]
    blocks = objective.pack([item_of(target, sample, drafter.config)], [anchors], drafter.config)
    for anchor, ids, labels in zip(anchors, blocks.block_ids.view(-1, BLOCK), blocks.labels, strict=True):
        assert ids.tolist() == [sample.ids[anchor]] + [MASK] * (BLOCK - 1)
        stop = 9 if anchor < 9 else 20
        expected = [sample.ids[p] if p < stop else objective.IGNORE for p in range(anchor + 1, anchor + BLOCK)]
        assert labels.tolist() == expected


def test_anchors_are_drawn_by_seed_epoch_and_sample():
    spans = [(10, 200), (300, 400)]
    drawn = objective.draw_anchors(spans, 20, seed=1, epoch=2, sample_id="x")
    assert drawn == objective.draw_anchors(spans, 20, seed=1, epoch=2, sample_id="x")
    others = [(0, 2, "x"), (1, 3, "x"), (1, 2, "y"), (1, 2, "x", 1)]
    assert all(drawn != objective.draw_anchors(spans, 20, *other) for other in others)
    assert drawn == sorted(set(drawn)) and len(drawn) == 20
    assert set(drawn) <= set(objective.possible_anchors(spans))
    assert objective.draw_anchors(spans, 999, 1, 2, "x") == objective.possible_anchors(spans)


@pytest.mark.parametrize("absent", [[], [2, 7]], ids=["whole", "reduced"])
@pytest.mark.parametrize("distillation_weight", [0.0, 0.3, 1.0])
def test_loss_in_chunks_is_the_loss_and_its_gradient(distillation_weight, absent, monkeypatch):
    torch.manual_seed(0)
    rows, width = 20, 8
    head, states = torch.randn(VOCAB, width), torch.randn(rows, width, requires_grad=True)
    labels, weights, teacher = torch.randint(VOCAB, (rows,)), torch.rand(rows), torch.randn(9, VOCAB)
    teachers = torch.randint(9, (rows,))
    labels[(labels == 2) | (labels == 7)] = 3

    def logits_of(states):
        return (states @ head.T).index_fill(1, torch.tensor(absent, dtype=torch.long), float("-inf"))

    monkeypatch.setattr(objective, "LOGITS_IN_A_CHUNK", 3 * VOCAB)
    monkeypatch.setattr(objective, "ROWS_IN_A_CHUNK", 1)
    loss = objective.weighted_loss(
        states, labels, weights, logits_of, VOCAB, lambda p: teacher[p], teachers, distillation_weight
    )
    (gradient,) = torch.autograd.grad(2 * loss, states)

    log_q, p = logits_of(states).log_softmax(-1), teacher.softmax(-1)[teachers]
    right = -log_q[torch.arange(rows), labels]
    held = [token for token in range(VOCAB) if token not in absent]
    divergence = (p * (p.log() - log_q))[:, held].sum(-1)
    expected = (weights * ((1 - distillation_weight) * right + distillation_weight * divergence)).sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(2 * expected, states)[0])


def memory(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux to tell the peak of memory")
def test_a_vocabulary_of_262k_does_not_need_gigabytes():
    """Loss and gradient, distillation included, of logits that would take 0.2 GB as a whole, and six times that in
    all: a chunk of 64 MB and what its loss needs is all there is of it at a time."""
    rows, width, vocabulary = 160, 4, 262_144
    head, states = torch.randn(vocabulary, width), torch.randn(rows, width, requires_grad=True)
    labels, weights = torch.randint(vocabulary, (rows,)), torch.rand(rows)

    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory("VmRSS")
    objective.weighted_loss(
        states,
        labels,
        weights,
        lambda x: x @ head.T,
        vocabulary,
        lambda p: states[p] @ head.T,
        torch.arange(rows),
        0.5,
    ).backward()
    assert memory("VmHWM") - before < 6 * 4 * objective.ROWS_IN_A_CHUNK * vocabulary < 0.5e9


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"num_hidden_layers": 3},
        {"intermediate_size": 192},
        {"num_attention_heads": 16},
        {"num_key_value_heads": 4, "head_dim": 32},
    ],
)
def test_what_a_forward_pass_keeps_is_bounded(sizes, target, samples, tmp_path):
    """The formula of docs/training.md, of everything that autograd keeps."""
    drafter = make_drafter(**sizes).train()
    data = SampleDataset([Sample(sample.id, sample.ids * 3, [(6, 3 * len(sample.ids))]) for sample in samples[:3]])
    settings = arguments(tmp_path, num_anchors=48, distillation_weight=0.5)
    trainer = DFlashTrainer(drafter, target, settings, data)
    items = [item_of(target, sample, drafter.config) for sample in data.samples]
    (batch,), total = trainer.get_batch_samples(iter([items]), 1, torch.device("cpu"))
    weights = {parameter.data_ptr() for parameter in [*drafter.parameters(), *target.parameters()]}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor, so that its memory is not used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.compute_loss(drafter, batch, num_items_in_batch=total)
    config, visible = drafter.config, batch["blocks"].visible
    D, intermediate, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    q, kv = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    n, T = len(visible) * BLOCK, sum(len(item["ids"]) for item in items)
    keys = n * (1 + max(len(item["ids"]) for item in items) / objective.QUERIES_IN_A_GROUP)
    layer = n * (13 * D + 4 * intermediate + 6 * q) + 2 * keys * q + 3 * (T + n) * kv
    bound = 4 * (layers * layer + 12 * n * D + T * (len(config.target_layer_ids) + 3) * D)
    assert 0.6 * bound < sum(nbytes for nbytes, _ in kept.values()) < bound


class Products(TorchDispatchMode):
    """Counts the operations of matrix products. (torch's FlopCounterMode stops at a gradient within a pass.)"""

    operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        if function is torch.ops.aten.mm.default:
            self.operations += 2 * out.numel() * args[0].shape[1]
        return out


@pytest.mark.parametrize("distillation_weight", [0.0, 0.5])
def test_operations_are_those_of_a_step(distillation_weight, target, samples, tmp_path):
    """Of all linear layers, forward and backward; attention is left to its formula."""
    data, drafter = SampleDataset(samples[:2]), make_drafter()
    trainer = DFlashTrainer(drafter, target, arguments(tmp_path, distillation_weight=distillation_weight), data)
    items = [item_of(target, sample, drafter.config) for sample in samples[:2]]
    (batch,), total = trainer.get_batch_samples(iter([items]), 1, torch.device("cpu"))
    with Products() as products:
        trainer.compute_loss(drafter, batch, num_items_in_batch=total).backward()
    visible, config = batch["blocks"].visible, drafter.config
    pairs = int((visible[:, 1] - visible[:, 0] + BLOCK).sum()) * BLOCK
    attention = 12 * config.num_hidden_layers * pairs * config.num_attention_heads * config.head_dim
    assert trainer.floating_point_ops(batch) - attention == products.operations


def test_an_untrained_teacher_of_itself_has_no_divergence(target, samples, tmp_path):
    """The teacher's rows stand where the labels do: a drafter's KL to the target's own logits is the closed form."""
    drafter = make_drafter()
    trainer = DFlashTrainer(drafter, target, arguments(tmp_path, distillation_weight=1.0), SampleDataset(samples))
    (batch,), total = trainer.get_batch_samples(iter([[SampleDataset(samples)[2]]]), 1, torch.device("cpu"))
    loss = trainer.compute_loss(drafter, batch, num_items_in_batch=total)

    sample, blocks = samples[2], batch["blocks"]
    log_p = target(torch.tensor([sample.ids])).logits[0].log_softmax(-1)  # row i is about token i + 1
    states = objective.block_states(drafter, drafter, blocks, target.get_input_embeddings())
    log_q = drafter.compute_logits(states, target.get_output_embeddings(), VOCAB).log_softmax(-1)
    expected, weights = 0.0, 0.0
    for n, (_, anchor) in enumerate(blocks.visible.tolist()):
        for k in range(BLOCK - 1):
            if anchor + 1 + k < len(sample.ids):
                weight = float(torch.exp(torch.tensor(-k / 2.0)))  # gamma is 2 for blocks of 4
                row = log_p[anchor + k]
                expected += weight * float((row.exp() * (row - log_q[n, k])).sum())
                weights += weight
    assert float(total) == pytest.approx(weights, rel=1e-5)
    assert float(loss) == pytest.approx(expected / weights, rel=1e-4)


HEADS = {  # what stands behind the LM head
    "LlamaForCausalLM": {},
    "CohereForCausalLM": {"logit_scale": 0.3},
    "GraniteForCausalLM": {"logits_scaling": 3.0},
    "Gemma2ForCausalLM": {"head_dim": 16, "final_logit_softcapping": 2.0},
    "FalconH1ForCausalLM": {
        "lm_head_multiplier": 0.4,
        "head_dim": 16,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_ssm": 64,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 16,
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", HEADS)
def test_the_teachers_logits_are_the_targets(family, dtype):
    cls = getattr(transformers, family)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = cls._from_config(cls.config_class(**COMMON | HEADS[family]), dtype=dtype).eval()
    ids = prompt_ids()
    _, final = target_features(target, ids, [1], with_final=True)
    expected = target(ids).logits[0].float()
    for rows in (None, torch.tensor([3, 9, 60])):
        head = Head(make_drafter(), target, rows)
        found = head.of_target(final[0].float())
        chosen = expected if rows is None else expected[:, rows]
        torch.testing.assert_close(found, chosen, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-5)
        head.check_target(target)


def test_a_teacher_with_logits_of_its_own_is_refused(samples, tmp_path):
    """HyperCLOVA X multiplies by what Granite divides by, under the same name."""
    config = transformers.HyperCLOVAXConfig(**COMMON, logits_scaling=0.5)
    target = transformers.HyperCLOVAXForCausalLM(config).eval()
    data, out = SampleDataset(samples), tmp_path / "out"
    with pytest.raises(ValueError, match=r"The logits of HyperCLOVAXForCausalLM are not .*: leave out distillation_w"):
        DFlashTrainer(make_drafter(), target, arguments(out, distillation_weight=0.5), data)
    assert not out.exists()
    DFlashTrainer(make_drafter(), target, arguments(out), data)


def test_a_quantized_head_takes_the_states_as_they_are(target, tmp_path, samples):
    """Its weight is of integers, so that its dtype says nothing of what it reads; rows of it are no head."""

    class Quantized(torch.nn.Module):
        def __init__(self, head):
            super().__init__()
            self.scale = head.weight.abs().max() / 127
            self.weight = torch.nn.Parameter((head.weight / self.scale).round().to(torch.int8), requires_grad=False)

        def forward(self, states):
            return states @ (self.weight.to(states.dtype) * self.scale).T

    plain, states = target.get_output_embeddings(), torch.randn(3, HIDDEN)
    quantized = make_target("qwen3")
    quantized.set_output_embeddings(Quantized(plain))
    head = Head(make_drafter(), quantized)
    torch.testing.assert_close(head.of_target(states), plain(states), rtol=0, atol=0.1)
    torch.testing.assert_close(head(states), head.of_target(states))
    with pytest.raises(ValueError, match=r"answer_vocabulary needs .* a head that is not quantized: leave it out"):
        DFlashTrainer(
            make_drafter(), quantized, arguments(tmp_path / "out", answer_vocabulary=True), SampleDataset(samples)
        )


def test_weights_that_are_not_float32_are_refused_and_the_target_evaluates(target, samples, tmp_path):
    """Embedding table and LM head are not trained. bfloat16 is fine to evaluate."""
    data, drafter = SampleDataset(samples), make_drafter(own_tensors=OWN).bfloat16()
    with pytest.raises(ValueError, match=r"must be float32, .* is torch.bfloat16: call drafter.float\(\) first"):
        DFlashTrainer(drafter, target, arguments(tmp_path / "out"), data)
    assert not (tmp_path / "out").exists()
    assert DFlashTrainer(drafter, target, arguments(tmp_path), eval_dataset=data).evaluate()["eval_tau"] >= 1
    drafter.float().lm_head.bfloat16()
    busy = make_target("qwen3").train()
    DFlashTrainer(drafter, busy, arguments(tmp_path), data)
    assert not any(module.training for module in busy.modules())


def test_how_a_step_is_cut_into_batches_does_not_matter(target, samples, tmp_path):
    data = SampleDataset(samples)
    runs = [
        trained(target, data, tmp_path, per_device_train_batch_size=batch, gradient_accumulation_steps=8 // batch)
        for batch in (1, 4, 8)
    ]
    for other in runs[1:]:
        assert_same_weights(runs[0].model, other.model, 1e-5)
    assert runs[0].state.log_history[0]["loss"] == pytest.approx(runs[2].state.log_history[0]["loss"], abs=1e-5)


def test_bf16_is_the_same_training_within_its_precision(target, samples, tmp_path):
    data, settings = SampleDataset(samples), {"distillation_weight": 0.3, "learning_rate": 1e-3, "max_steps": 1}
    narrow, wide = (trained(target, data, tmp_path, bf16=bf16, **settings) for bf16 in (True, False))
    losses = [run.state.log_history[0]["loss"] for run in (narrow, wide)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02) and losses[0] != losses[1]
    assert {parameter.dtype for parameter in narrow.model.parameters()} == {torch.float32}  # what AdamW updates


def test_the_loss_over_the_answers_tokens_leaves_the_others_out(target, samples, tmp_path):
    data = SampleDataset(samples[:2])
    trainer = DFlashTrainer(make_drafter(), target, arguments(tmp_path, answer_vocabulary=True), data)
    used = {i for s in samples[:2] for i in s.ids[s.spans[0][0] :]}
    assert trainer.head.vocab_size == len(used) < VOCAB
    whole = target.get_output_embeddings()(torch.eye(target.config.hidden_size))
    reduced = trainer.head(torch.eye(target.config.hidden_size))
    ids = torch.tensor(sorted(used))
    assert torch.equal(trainer.head.number(ids), torch.arange(len(used)))
    torch.testing.assert_close(reduced, whole[:, ids])


@pytest.mark.parametrize("others", [0, 2])
def test_an_answer_without_room_for_a_block_adds_nothing(others, target, samples, tmp_path):
    short = Sample("short", samples[0].ids[:7], [(6, 7)])
    settings = {"max_steps": 1, "per_device_train_batch_size": 3, "warmup_steps": 0, "gradient_accumulation_steps": 1}
    if others:
        whole = trained(target, SampleDataset([*samples[:others], short]), tmp_path, **settings)
        without = trained(target, SampleDataset(samples[:others]), tmp_path, **settings)
        assert_same_weights(whole.model, without.model, 1e-5)
    else:
        settings |= {"per_device_train_batch_size": 1, "train_sampling_strategy": "sequential"}
        first = trained(target, SampleDataset([short, *samples]), tmp_path, **settings)
        assert_same_weights(first.model, make_drafter(initializer_range=0.05))


# -- learning, and what evaluation says of it --


@pytest.fixture(scope="module")
def overfitted(target, samples, tmp_path_factory):
    """A drafter that knows seven answers by heart, and has not seen the eighth."""
    folder = tmp_path_factory.mktemp("overfitted")
    trainer = trained(
        target,
        SampleDataset(samples[:7]),
        folder,
        per_device_train_batch_size=7,
        gradient_accumulation_steps=1,
        max_steps=130,
        num_anchors=64,
        learning_rate=5e-3,
    )
    trainer.save_model()
    return folder, trainer


def test_answers_are_learnt_by_heart(overfitted, samples):
    _, trainer = overfitted
    metrics = trainer.evaluate(SampleDataset(samples[:7]))
    # A block can be right to its end and yet be cut by the end of its answer: tau stays a little below its size.
    most = figures_when_all_is_right(samples[:7])
    assert metrics["eval_tau"] == pytest.approx(most)
    assert metrics["eval_tau"] >= 0.9 * BLOCK
    assert metrics["eval_accuracy_1"] == metrics["eval_accuracy_3"] == 1.0


def figures_when_all_is_right(samples) -> float:
    tokens = [stop - start - 1 for s in samples for start, stop in s.spans]
    return sum(tokens) / sum(-(-n // BLOCK) for n in tokens)


def test_a_reduced_vocabulary_is_evaluated_on_the_tokens_that_it_has(target, samples, tmp_path):
    """Its loss is that of training on the same blocks; tau counts every token."""
    absent = samples[0].ids[-3]
    own = {"lm_head.weight": [VOCAB - 1, HIDDEN], "d2t": [VOCAB - 1]}
    drafter = make_drafter(initializer_range=0.05, own_tensors=own)
    drafter.d2t.copy_(torch.arange(VOCAB - 1) >= absent)  # all ids but one
    data = SampleDataset(samples[:1])
    trainer = DFlashTrainer(drafter, target, arguments(tmp_path, num_anchors=99, loss_gamma=1e9), data)
    found = trainer.evaluate(data)
    rows = []
    for position in objective.possible_anchors(samples[0].spans):
        item = item_of(target, samples[0], drafter.config)
        blocks = objective.pack([item], [[position]], drafter.config)
        states = objective.block_states(drafter, drafter, blocks, target.get_input_embeddings())
        logits = drafter.compute_logits(states, target.get_output_embeddings(), VOCAB)
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), blocks.labels.flatten(), reduction="none", ignore_index=objective.IGNORE
        )
        rows.append(losses[losses.isfinite() & (losses > 0)])
    # An untrained drafter accepts next to nothing, so nearly every anchor is a cycle's.
    assert found["eval_tau"] < 1.3
    assert found["eval_loss"] == pytest.approx(float(torch.cat(rows).mean()), rel=0.03)


def test_what_cannot_be_evaluated_is_refused(target, samples, tmp_path):
    data = SampleDataset(samples)
    with pytest.raises(ValueError, match="compute_metrics has no logits to work on"):
        DFlashTrainer(make_drafter(), target, arguments(tmp_path), data, compute_metrics=lambda found: {})
    few = arguments(tmp_path, per_device_eval_batch_size=9, dataloader_drop_last=True)
    with pytest.raises(ValueError, match=r"The held-out answers \(8\) are fewer than a batch"):
        DFlashTrainer(make_drafter(), target, few, data).evaluate(data)


def test_evaluation_counts_the_cycles_of_generation(overfitted, samples):
    folder, trainer = overfitted
    target = trainer.target
    drafter = DFlashDraftModel.from_pretrained(folder)
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    head, embeddings = target.get_output_embeddings(), target.get_input_embeddings()
    items = [item_of(target, sample, drafter.config) for sample in samples]
    rows = walk(
        trainer.model, trainer.drafter, items, lambda s: drafter.compute_logits(s, head, VOCAB), embeddings, 2.0
    )
    K, seen = BLOCK - 1, set()
    for sample, row in zip(samples, rows.tolist(), strict=True):
        start = sample.spans[0][0]
        prompt = torch.tensor([sample.ids[:start]])
        target.generate(prompt, assistant_model=drafter, max_new_tokens=len(sample.ids) - start, do_sample=False)
        run = drafter.last_run
        assert row[2:4] == [run.tokens - 1, run.cycles]
        assert row[4 : 4 + K] == run.accepted + [0] * (K - len(run.accepted))
        assert row[4 + K : 4 + 2 * K] == run.offered + [0] * (K - len(run.offered))
        seen.add(run.tau)
    assert len(seen) > 2  # the unknown answer, at the least, went another way
    assert figures(rows)["tau"] == pytest.approx(rows[:, 2].sum() / rows[:, 3].sum())


@pytest.mark.parametrize("most", [1, 9, 20])
def test_evaluation_in_parts_changes_nothing(most, overfitted, samples, monkeypatch):
    """However few blocks a pass makes, and with answers of several turns and of none; more passes find nothing."""
    _, trainer = overfitted
    target, drafter = trainer.target, trainer.drafter
    turns = Sample("turns", samples[7].ids, [(3, 9), (10, 11), (12, len(samples[7].ids))])
    cut = [*samples[:3], turns, Sample("nothing", samples[5].ids[:7], [(6, 7)])]
    items = [item_of(target, sample, drafter.config) for sample in cut]
    passes, rows = [], []

    def model(noise_embeds, **inputs):
        passes.append(noise_embeds.shape[1] // BLOCK)
        return drafter(noise_embeds=noise_embeds, **inputs)

    def head(states):
        rows.append(len(states))
        return drafter.compute_logits(states, target.get_output_embeddings(), VOCAB)

    whole = walk(model, drafter, items, head, target.get_input_embeddings(), 2.0)
    assert passes == [sum(len(objective.possible_anchors(sample.spans)) for sample in cut)]
    monkeypatch.setattr(acceptance, "BLOCKS_IN_A_PASS", most)
    monkeypatch.setattr(acceptance, "ROWS_OF_LOGITS", 7)
    passes.clear()
    rows.clear()
    parts = walk(model, drafter, items, head, target.get_input_embeddings(), 2.0)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-4)
    assert len(passes) == acceptance.num_passes(items) > 1
    assert max(passes) <= max(most, len(items)) and max(rows) == 2 * (BLOCK - 1)
    more = walk(model, drafter, items, head, target.get_input_embeddings(), 2.0, passes=len(passes) + 2)
    assert torch.equal(more, parts) and passes[-2:] == [1, 1]


def test_example_trains_a_drafter_that_helps(tmp_path):
    import train_tiny

    assert train_tiny.main(str(tmp_path)) > 4  # tokens a cycle, of at most 8


# -- a fresh drafter --


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "gpt_neox"])
def test_a_fresh_drafter_fits_its_target(family):
    target = make_target(family)
    drafter = DFlashDraftModel.for_target(target, num_layers=1, block_size=3, intermediate_size=16)
    assert (drafter.config.num_hidden_layers, drafter.config.block_size) == (1, 3)
    assert drafter.layers[0].mlp.up_proj.out_features == 16
    prompt = torch.randint(FIRST_TEXT_ID, VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
    plain = target.generate(prompt, max_new_tokens=8, do_sample=False)
    assert torch.equal(target.generate(prompt, assistant_model=drafter, max_new_tokens=8, do_sample=False), plain)


def test_a_fresh_drafter_reads_layers_spread_over_the_target():
    target = make_target("llama", num_hidden_layers=30)
    assert DFlashDraftModel.for_target(target, num_layers=3).config.target_layer_ids == [1, 8, 14, 20, 27]
    assert DFlashDraftModel.for_target(make_target("llama"), num_layers=3).config.target_layer_ids == [1, 2]
    assert DFlashDraftModel.for_target(target, num_features=2).config.target_layer_ids == [1, 27]


def test_the_mask_token_is_one_that_no_text_holds(byte_tokenizer, caplog):
    target = make_target("llama")
    target.config.eos_token_id = VOCAB - 1
    assert DFlashDraftModel.for_target(target, mask_token_id=5).config.mask_token_id == 5
    # The tokenizer uses every id of the table and names no special ones.
    with pytest.raises(ValueError, match="pass mask_token_id"):
        DFlashDraftModel.for_target(target, tokenizer=byte_tokenizer)
    wide = make_target("llama", vocab_size=VOCAB + 4)
    assert DFlashDraftModel.for_target(wide, tokenizer=byte_tokenizer).config.mask_token_id == VOCAB
    assert f"mask token is {VOCAB}" in caplog.text


# -- the command, and what it refuses --


@pytest.fixture(scope="module")
def places(target, samples, byte_tokenizer, tmp_path_factory):
    """A folder with a target, a drafter, answers, and things that are none of these."""
    folder = tmp_path_factory.mktemp("places")
    target.save_pretrained(folder / "target")
    byte_tokenizer.save_pretrained(folder / "target")
    make_drafter().save_pretrained(folder / "drafter")
    (folder / "empty").mkdir()
    lines = [json.dumps({"id": s.id, "ids": s.ids, "spans": s.spans}) for s in samples[:2]]
    for name in ("answers.jsonl", "empty/answers.jsonl"):
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


COMMAND = "train target --data answers.jsonl --output_dir out --mask-token-id 3 --report_to none --use_cpu"
QUICK = "--max_steps 1 --gradient_accumulation_steps 1 --num_anchors 2 --num-layers 1 --block-size 4"
BAD = [
    ("--loss_gamma -1", "loss_gamma must be above 0, got -1.0: change it or leave it out."),
    ("--loss_gamma 0", "loss_gamma must be above 0, got 0.0"),
    ("--loss_gamma nan", "loss_gamma must be above 0, got nan"),
    (
        "--learning_rate nan",
        "learning_rate must be above 0, got nan: change it or leave it out, which makes it 0.0006",
    ),
    ("--learning_rate inf", "learning_rate must be above 0, got inf"),
    ("--num_train_epochs 0", "num_train_epochs must be above 0, got 0.0"),
    ("--num_train_epochs nan", "num_train_epochs must be above 0, got nan"),
    ("--max_steps 0", "max_steps must be at least 1, or -1 for whole epochs, got 0"),
    ("--per_device_train_batch_size 0", "per_device_train_batch_size must be at least 1, got 0"),
    ("--per_device_eval_batch_size -1", "per_device_eval_batch_size must be at least 1, got -1"),
    ("--gradient_accumulation_steps -2", "gradient_accumulation_steps must be at least 1, got -2"),
    ("--max_grad_norm nan", "max_grad_norm must be a number from 0, got nan"),
    ("--weight_decay nan", "weight_decay must be a number from 0, got nan"),
    ("--warmup_steps nan", "warmup_steps must be a number from 0, got nan"),
    ("--save_steps nan", "save_steps must be a number from 0, got nan"),
    ("--adam_beta1 2", "adam_beta1 must be from 0 to below 1, got 2.0"),
    ("--adam_epsilon nan", "adam_epsilon must be a number from 0, got nan"),
    ("--distillation_weight nan", "distillation_weight must be from 0 to 1, got nan"),
    ("--dataloader_num_workers -1", "dataloader_num_workers must be a number from 0, got -1"),
    ("--max_length 1", "max_length must be at least 2, got 1"),
    (
        "--max_length 5",
        "None of the 2 samples of train_dataset has two tokens of an answer within max_length=5: expected",
    ),
    ("--max_length 5 --answer_vocabulary True", "None of the 2 samples of train_dataset has two tokens of an answer"),
    ("--label_smoothing_factor 0.1", "label_smoothing_factor=0.1 does nothing in a drafter's training"),
    ("--neftune_noise_alpha 5", "neftune_noise_alpha=5.0 does nothing"),
    ("--remove_unused_columns True", "remove_unused_columns=True does nothing"),
    ("--activation_checkpointing True", "activation_checkpointing=True (gradient_checkpointing) does nothing"),
    ("--train_sampling_strategy group_by_length", "must be random or sequential, got group_by_length: leave it out"),
    ("--init-from nowhere", "Expected a drafter's folder or a Hub name like owner/name, got nowhere."),
    ("--init-from nowhere/at/all", "Expected a drafter's folder or a Hub name like owner/name, got nowhere/at/all."),
    ("--init-from someone/nothing", "someone/nothing cannot be fetched: "),
    ("--init-from target", "Expected a DFlash drafter, target holds a model of the class Qwen3ForCausalLM."),
    ("--init-from empty", "empty has no config.json: expected a drafter's folder."),
    ("--eval_strategy epoch", "--eval_strategy epoch needs held-out answers as --eval-data"),
    ("--eval-data answers.jsonl,empty/answers.jsonl", "under its name, and two share one"),
    (
        "--eval-data answers.jsonl --eval_strategy epoch --save_strategy epoch --load_best_model_at_end True",
        "must name a held-out set and its figure, such as answers_tau, got loss",
    ),
    ("--resume_from_checkpoint nowhere", "Can't find a valid checkpoint at nowhere"),
    ("--optim adafactor --optim_args nonsense", "unpack"),  # found by the trainer, which has made the folder by then
]


@pytest.mark.parametrize("drafter", ["nowhere", "nowhere/at/all", "someone/nothing", "target", "empty"])
def test_features_refuses_as_train_does(drafter, places, monkeypatch):
    monkeypatch.chdir(places)
    message = dict(BAD)[f"--init-from {drafter}"]
    done = CliRunner().invoke(app, ["features", "target", "answers.jsonl", "out", "--drafter", drafter])
    assert done.exit_code == 1 and f"Error: {message}" in done.stderr
    assert not (places / "out").exists()


@pytest.mark.parametrize(("options", "message"), BAD, ids=[options for options, _ in BAD])
def test_what_train_refuses_leaves_one_line_and_no_folder(options, message, places, monkeypatch):
    monkeypatch.chdir(places)
    done = CliRunner().invoke(app, f"{COMMAND} {options}".split())
    lines = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert done.exit_code == 1, done.exception
    assert len(lines) == 1 and message in lines[0], done.stderr
    assert sorted(path.name for path in places.iterdir()) == ["answers.jsonl", "drafter", "empty", "target"]


def test_a_fresh_drafter_is_of_the_seed(places, monkeypatch, tmp_path):
    """Held-out answers without a strategy are evaluated at the end."""
    monkeypatch.chdir(places)
    drafters = []
    for number, seed in enumerate((1, 1, 2)):
        torch.manual_seed(number)
        command = COMMAND.replace("_dir out", f"_dir {tmp_path / str(number)}")
        done = CliRunner().invoke(app, f"{command} {QUICK} --seed {seed} --eval-data answers.jsonl".split())
        assert done.exit_code == 0, done.exception
        assert "a drafter of 1 steps, eval_answers_tau 1." in done.stdout
        drafters.append(DFlashDraftModel.from_pretrained(tmp_path / str(number)))
    assert_same_weights(*drafters[:2])
    assert not torch.equal(drafters[0].fc.weight, drafters[2].fc.weight)


# -- to the Hub --


def test_push_to_hub_loads_at_every_step_and_says_what_it_is(target, samples, monkeypatch, tmp_path):
    data, name = SampleDataset(samples[:2]), "someone/the-target"
    monkeypatch.setattr(target.config, "_name_or_path", name)
    settings = {"push_to_hub": True, "hub_model_id": "me/drafter", "hub_token": TOKEN, "hub_always_push": True}
    settings |= {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 2}
    with HubServer(TOKEN) as hub:
        hub.serve(monkeypatch, tmp_path / "cache")
        trainer = DFlashTrainer(
            make_drafter(initializer_range=0.05), target, arguments(tmp_path / "out", **settings), data, {"held": data}
        )

        class Wait(TrainerCallback):
            """Uploads read the output folder in the background, where the next step may have written already."""

            def on_save(self, args, state, control, **kwargs):
                trainer.push_in_progress.wait_until_done()

        trainer.add_callback(Wait())
        trainer.train()
        repo = hub.repos["me/drafter"]
        first = next(sha for sha, tree in repo.commits.items() if "model.safetensors" in tree)
        trainer.push_to_hub()
        monkeypatch.setitem(sys.modules, "dflash_hf", None)  # the repository brings its own code
        pushed, early = (
            AutoModel.from_pretrained("me/drafter", trust_remote_code=True, revision=sha)
            for sha in (repo.branches["main"], first)
        )
        files = hub.files("me/drafter")
    assert_same_weights(trainer.model, pushed)
    assert not torch.equal(early.fc.weight, pushed.fc.weight)
    assert type(pushed).__module__.startswith("transformers_modules.me.drafter")
    assert not any(TOKEN.encode() in content for content in files.values())

    card = ModelCard(files["README.md"].decode())
    said = card.data.to_dict()
    assert said.pop("tags") == ["dflash", "speculative-decoding", "draft-model", "generated_from_trainer"]
    expected = {"base_model": name, "base_model_relation": "adapter", "library_name": "transformers"}
    assert said == expected | {"pipeline_tag": "text-generation"}
    assert f"for [{name}](https://huggingface.co/{name}), of 2 training steps" in card.text
    tau = trainer.evaluate()["eval_held_tau"]
    assert f"eval_held_tau {tau:.3f}" in card.text and "from scratch" not in card.text

    readme = tmp_path / "out" / "README.md"
    readme.write_text("# By hand\n")
    trainer.create_model_card()
    assert readme.read_text() == "# By hand\n"


# -- processes and interruptions --

SCRIPT = """
import os, sys
sys.path[:0] = [{root!r}, {tests!r}]
import torch
torch.set_num_threads(1)
from test_training import *
acceptance.BLOCKS_IN_A_PASS = 5  # one process has more passes of an evaluation to make than the other
target, folder, kill_at = make_target("qwen3"), sys.argv[1], int(sys.argv[2])
samples = torch.load(sys.argv[3], weights_only=False)

class Kill(DFlashTrainer):
    def _save_optimizer_and_scheduler(self, output_dir):
        if self.state.global_step == kill_at:  # half of the checkpoint is written
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_optimizer_and_scheduler(output_dir)

torch.manual_seed(0)
settings = arguments(folder, **RUN | {options!r})
if settings.fsdp:  # accelerate shards on GPUs only; told that this is one, it takes the same path on CPUs
    from accelerate.state import DistributedType, PartialState
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
drafter = make_drafter(initializer_range=0.05, own_tensors=OWN if settings.fsdp else None)
trainer = Kill(drafter, target, settings, SampleDataset(samples), {{"held": SampleDataset(held_out(samples))}})
trainer.train(resume_from_checkpoint=True)
if settings.fsdp:
    from torch.distributed.tensor import DTensor
    frozen = [*drafter.embed_tokens.parameters(), *drafter.lm_head.parameters(), *target.parameters()]
    assert not any(isinstance(parameter, DTensor) for parameter in frozen)
    sharded = [p for p in drafter.parameters() if not any(p is other for other in frozen)]
    assert all(isinstance(parameter, DTensor) for parameter in sharded)
    assert any(parameter.to_local().shape != parameter.shape for parameter in sharded)
trainer.save_model()
"""
OWN = {"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 1}
FSDP = {"fsdp": True} | EVALUATED
RUN = {
    "max_steps": 7,
    "save_strategy": "steps",
    "save_steps": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
}


def held_out(samples) -> list[Sample]:
    """An even number, of which the last has nothing to draft and so gives one process less to do."""
    return [*samples[:5], Sample("nothing", samples[5].ids[:7], [(6, 7)])]


def run_script(tmp_path, samples, folder, kill_at: int, processes: int = 1, **options) -> subprocess.CompletedProcess:
    root = Path(__file__).resolve().parents[1]
    script, data = tmp_path / "script.py", tmp_path / "samples.pt"
    script.write_text(SCRIPT.format(root=str(root), tests=str(root / "tests"), options=options))
    torch.save(samples, data)
    launch = [] if processes == 1 else ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    if launch:
        launch += ["--master_port", str(20000 + os.getpid() % 20000)]
    command = [sys.executable, *launch, str(script), str(folder), str(kill_at), str(data)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_killed_while_it_saves_and_started_again_gives_the_same_weights(target, samples, tmp_path):
    whole = trained(target, SampleDataset(samples), tmp_path / "whole", **RUN)
    killed = run_script(tmp_path, samples, tmp_path / "killed", kill_at=4)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / "killed/checkpoint-4/model.safetensors").is_file()
    DFlashDraftModel.from_pretrained(tmp_path / "killed/checkpoint-2")  # a checkpoint is a drafter
    assert last_checkpoint(tmp_path / "killed").endswith("checkpoint-2")
    again = trained(target, SampleDataset(samples), tmp_path / "killed", resume=True, **RUN)
    assert again.state.global_step == 7
    assert_same_weights(whole.model, again.model)


def test_what_is_no_whole_checkpoint_is_left_alone(target, samples, tmp_path, caplog):
    """Somebody's weights, what a kill left, a damaged file: nothing to go on from, and nothing to delete."""
    saving = {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 1, "max_steps": 2}
    first = trained(target, SampleDataset(samples), tmp_path, **saving)
    damages = {
        "trainer_state.json": [None, b'{"global_', b"{}", b"[]"],
        "scheduler.pt": [None],  # as save_only_model leaves it
        "model.safetensors": [b"weights", "cut"],
        "optimizer.pt": [b"", "cut"],
    }
    cases = [(name, content) for name, contents in damages.items() for content in contents]
    for step, (name, content) in enumerate(cases, start=3):
        folder = tmp_path / f"checkpoint-{step}"
        shutil.copytree(tmp_path / "checkpoint-2", folder)
        whole = (folder / name).read_bytes()
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(whole[: len(whole) // 2] if content == "cut" else content)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    for _ in range(2):
        assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    for step, (name, _) in enumerate(cases, start=3):
        said = f"checkpoint-{step} is left out, it is no checkpoint to go on from: it has no whole {name}."
        assert caplog.text.count(said) == 1
    again = trained(target, SampleDataset(samples), tmp_path, resume=True, **saving)
    assert_same_weights(first.model, again.model)
    kept = {path: path.stat().st_mtime_ns for path in before}
    assert all(kept[path] == before[path] for path in before if path.parent != tmp_path)


def test_a_finished_run_takes_no_step_more(target, samples, tmp_path, caplog):
    """Called again as it was, or for fewer steps. And a checkpoint of another drafter is nothing to go on from."""
    data, settings = SampleDataset(samples), RUN | {"per_device_train_batch_size": 1, "max_steps": 3}
    first = trained(target, data, tmp_path, **settings)
    for steps in (3, 2):
        again = trained(target, data, tmp_path, resume=True, **settings | {"max_steps": steps})
        assert again.state.global_step == 3 and f"Going on from {tmp_path}/checkpoint-3" in caplog.text
        assert_same_weights(first.model, again.model)
    for change, message in (
        ({"num_hidden_layers": 1}, "num_hidden_layers 2, here 1"),
        ({"target_layer_ids": [1, 2, 3]}, r"target_layer_ids \[1, 3, 4\], here \[1, 2, 3\]"),
    ):
        with pytest.raises(ValueError, match=f"checkpoint-3 is of another drafter .*{message}.* another output_dir"):
            trained(target, data, tmp_path, make_drafter(**change), resume=True, **settings | {"max_steps": 4})
    further = trained(target, data, tmp_path, resume=True, **settings | {"max_steps": 4})
    assert further.state.global_step == 4


@pytest.mark.parametrize("options", [EVALUATED, FSDP], ids=["ddp", "fsdp"])
def test_two_processes_train_as_one(options, target, samples, tmp_path):
    """The samples' lengths differ, so do the processes' shares of the loss. (An epoch that does not divide evenly is
    filled up by accelerate with samples from its beginning; this one divides.) Under FSDP the trained weights are
    sharded, and a table and a head that the drafter brings are whole in every process, as the target is; a kill in
    between changes nothing."""
    samples = [*samples[1:], Sample("short", samples[0].ids[:9], [(6, 9)])]
    sharded = "fsdp" in options
    drafter = make_drafter(initializer_range=0.05, own_tensors=OWN if sharded else None)
    one = trained(
        target, SampleDataset(samples), tmp_path / "one", drafter, **RUN | {"gradient_accumulation_steps": 4}
    )
    two = tmp_path / "two"
    if sharded:
        assert run_script(tmp_path, samples, two, kill_at=4, processes=2, **options).returncode != 0
        assert last_checkpoint(two).endswith("checkpoint-2")
        DFlashDraftModel.from_pretrained(two / "checkpoint-2")
    done = run_script(tmp_path, samples, two, kill_at=0, processes=2, **options)
    assert done.returncode == 0, done.stderr
    assert_same_weights(one.model, DFlashDraftModel.from_pretrained(two), 1e-5)
    log = json.loads((two / "checkpoint-7" / "trainer_state.json").read_text())["log_history"]
    evaluated = [record for record in log if "eval_held_tau" in record]
    assert [record["step"] for record in evaluated] == [4, 7]
    expected = one.evaluate(SampleDataset(held_out(samples)))
    for name in ("tau", "loss", "accuracy_1"):
        assert evaluated[-1][f"eval_held_{name}"] == pytest.approx(expected[f"eval_{name}"], abs=1e-4)


def test_full_disk_keeps_the_last_checkpoint(target, samples, tmp_path, monkeypatch):
    class FullAtFour(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:

                def full(*args, **kwargs):
                    raise OSError(28, "No space left on device")

                monkeypatch.setattr(DFlashDraftModel, "save_pretrained", full)

    with pytest.raises(OSError, match=r"checkpoint of step 4 .*No space left.*checkpoint-2 is whole"):
        trained(target, SampleDataset(samples), tmp_path, callbacks=[FullAtFour()], **RUN)
    monkeypatch.undo()
    again = trained(target, SampleDataset(samples), tmp_path, resume=True, **RUN)
    whole = trained(target, SampleDataset(samples), tmp_path / "whole", **RUN)
    assert_same_weights(whole.model, again.model)
