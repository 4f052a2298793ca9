# ruff: noqa: F811  (pytest fixtures of another file)
"""Features on disk: the same training as features in the step, whole or refused, resumable."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from dflash_hf import DFlashDraftModel
from dflash_hf.cli import app
from dflash_hf.training import features as module
from dflash_hf.training.answers import Sample
from dflash_hf.training.features import FeatureDataset, feature_bytes, target_features, write_features
from dflash_hf.training.trainer import DFlashTrainer, SampleDataset, read_dataset
from drafters import make_drafter
from targets import VOCAB, make_target
from test_training import arguments, assert_same_weights, samples, target, trained  # noqa: F401  (fixtures)

LAYERS = [1, 3, 4]  # of drafters.drafter_config


def shards(folder) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


@pytest.fixture
def folder(target, samples, tmp_path):
    """Features of eight samples in four shards."""
    assert write_features(target, samples, tmp_path / "f", LAYERS, with_final=True, samples_per_shard=2) == 4
    return tmp_path / "f"


def test_items_are_the_targets_hidden_states(target, samples, folder):
    dataset = FeatureDataset(folder)
    assert len(dataset) == len(samples)
    for sample, item in zip(samples, dataset, strict=True):
        states = target(torch.tensor([sample.ids]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[i + 1] for i in LAYERS], dim=-1)[0]
        assert (item["sample_id"], item["ids"].tolist(), item["spans"]) == (sample.id, sample.ids, sample.spans)
        assert item["features"].dtype == torch.bfloat16
        torch.testing.assert_close(item["features"].float(), expected, rtol=2**-8, atol=1e-5)
        # What the LM head reads, so that its logits are the target's.
        logits = target.get_output_embeddings()(item["final"].float())
        torch.testing.assert_close(logits, target(torch.tensor([sample.ids])).logits[0], rtol=0, atol=0.2)


def test_padding_on_the_right_changes_nothing(target, samples):
    ids = torch.zeros(2, 40, dtype=torch.long)
    for row, sample in zip(ids, samples[2:4], strict=True):
        row[: len(sample.ids)] = torch.tensor(sample.ids)
    together, _ = target_features(target, ids, LAYERS)
    for row, sample in zip(together, samples[2:4], strict=True):
        alone, _ = target_features(target, torch.tensor([sample.ids]), LAYERS)
        torch.testing.assert_close(row[: len(sample.ids)], alone[0], rtol=0, atol=1e-4)


def test_training_from_disk_is_training_in_the_step(target, samples, folder, tmp_path, monkeypatch):
    """With float32 on disk to the last bits; bfloat16 moves the first step by about its precision."""
    settings = {"distillation_weight": 0.3, "learning_rate": 1e-3}
    online = trained(target, SampleDataset(samples), tmp_path / "a", **settings)
    narrow = trained(target, FeatureDataset(folder), tmp_path / "b", **settings)
    losses = [run.state.log_history[0]["loss"] for run in (online, narrow)]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
    monkeypatch.setitem(module.DTYPES, "float32", torch.float32)
    write_features(target, samples, tmp_path / "wide", LAYERS, dtype="float32", with_final=True)
    offline = trained(target, read_dataset([tmp_path / "wide"]), tmp_path / "c", **settings)
    assert_same_weights(online.model, offline.model, 1e-5)


def test_only_what_is_missing_is_computed_again(target, samples, folder, monkeypatch):
    before = load_file(folder / "features-00001.safetensors")
    (folder / "features-00001.safetensors").unlink()
    (folder / "features-00003.safetensors.tmp").write_bytes(b"left by a kill")
    with pytest.raises(FileNotFoundError, match=r"has 3 of 4 shards: run `dflash-hf features` again"):
        FeatureDataset(folder)
    assert write_features(target, samples, folder, LAYERS, with_final=True, samples_per_shard=2) == 1
    after = load_file(folder / "features-00001.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert write_features(target, samples, folder, LAYERS, with_final=True, samples_per_shard=2) == 0


def test_features_of_other_answers_are_kept(target, samples, folder):
    """Answers may be added to the end, which fills the last shard up; anything else would leave a mixture."""
    settings = {"layer_ids": LAYERS, "with_final": True}
    before = {path: path.read_bytes() for path in folder.iterdir()}
    other = [*samples[:6], Sample("other", samples[6].ids, samples[6].spans), samples[7]]
    for answers in (other, samples[1:], [samples[0]]):
        with pytest.raises(ValueError, match=r"features-0000\d.* holds features of other answers: name"):
            write_features(target, answers, folder, samples_per_shard=2, **settings)
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
    new = folder.with_name("new")
    assert write_features(target, samples[:5], new, samples_per_shard=3, **settings) == 2
    short = (new / "features-00001.safetensors").read_bytes()
    assert write_features(target, samples, new, samples_per_shard=3, **settings) == 2
    assert [item["sample_id"] for item in FeatureDataset(new)] == [sample.id for sample in samples]
    (new / "features-00001.safetensors").write_bytes(short)  # as a kill would have left it
    with pytest.raises(FileNotFoundError, match=r"has features of 7 samples, its features.json says 8: run"):
        FeatureDataset(new)


def test_a_folder_named_twice_counts_its_samples(folder):
    twice = FeatureDataset([folder, folder])
    assert [twice[i]["occurrence"] for i in (0, 7, 8, 15)] == [0, 0, 1, 1]
    assert twice[3]["sample_id"] == twice[11]["sample_id"]


def test_the_size_is_said_before_anything_is_computed(target, samples, tmp_path, caplog, monkeypatch):
    width = 3 * target.config.hidden_size
    needed = feature_bytes(samples, width)
    assert needed == 2 * width * sum(len(sample.ids) for sample in samples)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=needed - 1))
    with caplog.at_level(logging.WARNING, logger=module.logger.name), pytest.raises(OSError, match="larger disk"):
        write_features(target, samples, tmp_path / "new" / "folder", LAYERS)
    assert list(tmp_path.iterdir()) == []
    assert f"Features of 8 samples: {needed / 1e9:.2f} GB as bfloat16" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "header", "swapped"])
def test_a_damaged_shard_is_named(damage, target, samples, folder, tmp_path):
    path = folder / "features-00002.safetensors"
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "header":
        path.write_bytes(b"\xff" * 64 + content[64:])
    else:
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"features-00002.* is damaged .*Delete it and run `dflash-hf features`"):
        FeatureDataset(folder)
    assert write_features(target, samples, folder, LAYERS, with_final=True, samples_per_shard=2) == 1
    assert len(FeatureDataset(folder)) == len(samples)


def test_a_shard_that_is_damaged_while_training_leaves_the_checkpoints(target, samples, folder, tmp_path):
    dataset = FeatureDataset(folder)
    run = {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 1, "max_steps": 8}

    class Damaged(torch.utils.data.Dataset):
        index, reads = dataset.index, 0

        def __len__(self):
            return len(dataset)

        def __getitem__(self, i):
            Damaged.reads += 1
            if Damaged.reads == 4:
                for path in folder.glob("*.safetensors"):
                    path.write_bytes(b"")
                dataset._open.clear()
            return dataset[i]

    with pytest.raises(ValueError, match="is damaged"):
        trained(target, Damaged(), tmp_path / "run", **run)
    DFlashDraftModel.from_pretrained(sorted((tmp_path / "run").glob("checkpoint-*"))[-1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_ids": [1, 2, 3]}, r"target_layer_ids = \[1, 3, 4\], wanted \[1, 2, 3\]"),
        ({"dtype": "float16"}, "dtype = bfloat16, wanted float16"),
        ({"dtype": "int8"}, "dtype must be one of float16, bfloat16, got 'int8'"),
        ({"target": make_target("qwen3", seed=1)}, "target = .* wanted"),
    ],
)
def test_features_of_something_else_are_not_mixed_in(change, message, target, samples, folder):
    settings = {"target": target, "samples": samples, "folder": folder, "layer_ids": LAYERS, "with_final": True}
    with pytest.raises(ValueError, match=message):
        write_features(**settings | {"samples_per_shard": 2} | change)
    assert len(FeatureDataset(folder)) == len(samples)


def test_token_ids_of_another_vocabulary_are_refused_before_anything_is_written(target, samples, folder, tmp_path):
    foreign = [samples[0], Sample("odd", [*samples[1].ids, VOCAB], samples[1].spans)]
    message = f"Sample odd holds the token id {VOCAB}, and the target's vocabulary has {VOCAB}"
    with pytest.raises(ValueError, match=message):
        trained(target, SampleDataset(foreign), tmp_path / "out")
    with pytest.raises(ValueError, match=message):
        write_features(target, foreign, tmp_path / "new", LAYERS)
    largest = max(max(sample.ids) for sample in samples)
    smaller = make_target("qwen3", vocab_size=largest)
    with pytest.raises(ValueError, match=rf"The shard .* holds the token id {largest}, .* has {largest}"):
        FeatureDataset(folder).check_ids(smaller)
    assert not (tmp_path / "out").exists() and not (tmp_path / "new").exists()


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_refused(seed, tmp_path):
    with pytest.raises(ValueError, match=f"seed must be from 0 .*, got {seed}"):
        arguments(tmp_path, seed=seed)


def test_float16_refuses_what_it_cannot_hold(samples, tmp_path):
    loud = make_target("qwen3")
    with torch.no_grad():
        loud.get_input_embeddings().weight.mul_(1e6)
    with pytest.raises(ValueError, match=r"Sample s\d: hidden states up to .* do not fit .*use bfloat16"):
        write_features(loud, samples, tmp_path / "f", LAYERS, dtype="float16")


def test_a_drafter_of_other_layers_is_refused(target, folder, tmp_path):
    drafter = make_drafter(target_layer_ids=[1, 2, 3])
    with pytest.raises(ValueError, match=r"target layers \[1, 3, 4\], the drafter reads \[1, 2, 3\]"):
        trained(target, FeatureDataset(folder), tmp_path, drafter=drafter)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 1}, r"of another target: .* fingerprint \w{16}, this one's \w{16}\. Load the target as it was then"),
        ({"hidden_size": 48}, r"of a target of hidden size 32, this one's is 48: write features of this target"),
    ],
)
@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_features_of_another_target_are_refused(name, other, message, folder, tmp_path):
    drafter = make_drafter(hidden_size=other.get("hidden_size", 32))
    settings = arguments(tmp_path / "out")
    with pytest.raises(ValueError, match=f"The features of {name} are {message}"):
        DFlashTrainer(drafter, make_target("qwen3", **other), settings, **{name: FeatureDataset(folder)})
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=f"The features of {name} are {message}"):  # also when they come later
        DFlashTrainer(drafter, make_target("qwen3", **other), settings).evaluate({name: FeatureDataset(folder)})


def test_command_line_from_answers_to_a_drafter(target, samples, byte_tokenizer, tmp_path):
    target.save_pretrained(tmp_path / "target")
    byte_tokenizer.save_pretrained(tmp_path / "target")
    make_drafter().save_pretrained(tmp_path / "first")
    lines = [json.dumps({"id": s.id, "ids": s.ids, "spans": s.spans}) for s in samples]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines) + "\n")
    base = [str(tmp_path / "target"), "--device", "cpu"]

    def call(*command) -> str:
        done = CliRunner().invoke(app, list(map(str, command)), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    said = call(
        "features", base[0], tmp_path / "answers.jsonl", tmp_path / "f", "--drafter", tmp_path / "first", *base[1:]
    )
    assert "1 shards written, 8 answers" in said
    train = ["--output_dir", tmp_path / "out", "--max_steps", 2, "--num_anchors", 4, "--report_to", "none"]
    train += ["--use_cpu", "True", "--save_strategy", "no", "--eval_strategy", "steps", "--eval_steps", 2]
    data = ["--data", tmp_path / "f", "--eval-data", tmp_path / "answers.jsonl"]
    assert "a drafter of 2 steps" in call("train", *base, *data, "--init-from", tmp_path / "first", *train)
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "out")
    assert any((a != b).any() for a, b in zip(drafter.parameters(), make_drafter().parameters(), strict=True))

    fresh = ["--num-layers", 1, "--block-size", 3, "--mask-token-id", 4, "--output_dir", tmp_path / "fresh"]
    call("train", *base, "--data", tmp_path / "answers.jsonl", *train[:-4], *fresh)
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "fresh")
    assert (drafter.config.num_hidden_layers, drafter.config.block_size) == (1, 3)
    prompt = torch.tensor([samples[0].ids[:6]])
    plain = target.generate(prompt, max_new_tokens=9, do_sample=False)
    assert torch.equal(target.generate(prompt, assistant_model=drafter, max_new_tokens=9, do_sample=False), plain)
    assert drafter.config.mask_token_id == 4
