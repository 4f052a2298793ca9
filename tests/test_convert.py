"""Drafter folders from one layout to the other: nothing lost, nothing changed, nothing half written."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig
from typer.testing import CliRunner

from dflash_hf import DFlashDraftModel
from dflash_hf.checkpoints import convert, load_drafter, meaning, speculators
from dflash_hf.cli import app
from dflash_hf.drafter.candidates import knobs
from drafters import drafter_config, make_drafter
from targets import HIDDEN, MASK, VOCAB, make_target

TARGET = "someone/some-target"
SLIDING = ["sliding_attention", "full_attention"]
REDUCED = {"lm_head.weight": [20, HIDDEN], "d2t": [20]}


def save(folder: Path, own=None, knobs=None, mask_embedding=False, **overrides) -> DFlashDraftModel:
    drafter = make_drafter(own_tensors=own, **overrides)
    if drafter.d2t is not None:
        drafter.d2t.copy_(torch.arange(len(drafter.d2t)))  # draft id i is target id 2 i
    if mask_embedding:
        drafter.mask_embedding = torch.randn(HIDDEN)
    drafter.generation_config.num_assistant_tokens_schedule = None
    for name, value in (knobs or {}).items():
        setattr(drafter.generation_config, name, value)
    drafter.save_pretrained(folder)
    return drafter


def rewrite(file: Path, change) -> None:
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))


def bits(folder: Path) -> dict:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return {name: (t.dtype, list(t.shape), t.view(torch.uint8).flatten().tolist()) for name, t in tensors.items()}


# What both layouts can hold.
BOTH = {
    "full attention": {},
    "causal sliding layers": {"layer_types": SLIDING, "sliding_window": 6},
    "bidirectional sliding layers": {"layer_types": SLIDING, "sliding_window": 6, "is_causal": False},
    "all sliding, causal by option": {
        "layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "dflash_config": {"causal": True}},
    "use_swa": {"dflash_config": {"use_swa": True, "swa_window_size": 5}},
    "swa_window_size beats sliding_window": {
        "layer_types": SLIDING, "sliding_window": 9, "dflash_config": {"swa_window_size": 7}},
    "reduced vocabulary": {"own": REDUCED, "draft_vocab_size": 20},
    "anchor slot predicts": {"dflash_config": {"sample_from_anchor": True}},
    "fewer drafts than the block": {"knobs": {"num_assistant_tokens": 2}},
    "knobs as they are unset": {"knobs": {
        "assistant_confidence_threshold": 0.0, "num_assistant_tokens_schedule": "adaptive",
        "assistant_sampling": "coupled"}},
    "biases": {"attention_bias": True},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 128}},
    "one layer, one feature": {"num_hidden_layers": 1, "target_layer_ids": [0]},
    "the target's last layer": {"target_layer_ids": [2, 4]},
}  # fmt: skip


@pytest.mark.parametrize("case", BOTH)
def test_round_trip(case, tmp_path):
    drafter = save(tmp_path / "a", **BOTH[case])
    convert(tmp_path / "a", tmp_path / "b", to="speculators", target=TARGET)
    convert(tmp_path / "b", tmp_path / "c")
    convert(tmp_path / "c", tmp_path / "d", to="speculators")  # the folder has kept the target's name
    again = DFlashDraftModel.from_pretrained(tmp_path / "c")
    assert bits(tmp_path / "a") == bits(tmp_path / "c")
    assert meaning(again.config) == meaning(drafter.config)
    assert again.generation_config.num_assistant_tokens == drafter.generation_config.num_assistant_tokens
    assert knobs(again) == knobs(drafter)
    assert bits(tmp_path / "b") == bits(tmp_path / "d")
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == (
        json.loads((tmp_path / "d" / "config.json").read_text())
    )
    extra = set(bits(tmp_path / "b")) - set(bits(tmp_path / "a"))
    assert extra == ({"t2d"} if drafter.d2t is not None else set())


def test_what_speculators_layout_says(tmp_path):
    save(
        tmp_path / "a", own=REDUCED, draft_vocab_size=20, layer_types=SLIDING, sliding_window=6, is_causal=False,
        dflash_config={"sample_from_anchor": True},
    )  # fmt: skip
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    convert(tmp_path / "a", tmp_path / "b", to="speculators", target=str(tmp_path / "target"))
    raw = json.loads((tmp_path / "b" / "config.json").read_text())
    layer = raw.pop("transformer_layer_config")
    spec = raw.pop("speculators_config")
    assert raw == {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "block_size": 4,
        "draft_vocab_size": 20,
        "mask_token_id": MASK,
        "sample_from_anchor": True,
        "sliding_window_non_causal": True,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    assert spec["verifier"] == {"name_or_path": str(tmp_path / "target"), "architectures": ["LlamaForCausalLM"]}
    assert spec["algorithm"] == "dflash" and spec["proposal_methods"][0]["speculative_tokens"] == 4
    expected = {"model_type": "qwen3", "hidden_size": HIDDEN, "head_dim": 16, "vocab_size": VOCAB}
    expected |= {"layer_types": SLIDING, "sliding_window": 6, "use_sliding_window": True, "num_hidden_layers": 2}
    assert {name: layer[name] for name in expected} == expected
    t2d = load_file(tmp_path / "b" / "model.safetensors")["t2d"]
    assert t2d.dtype == torch.bool and t2d.nonzero().flatten().tolist() == list(range(0, 40, 2))


def speculators_folder(folder: Path, **changes) -> None:
    """As speculators 0.9 saves one: fields equal to Qwen3Config's defaults are left out of the layer's config."""
    drafter = make_drafter()
    folder.mkdir()
    save_file(drafter.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    layer = {
        "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB,
        "max_position_embeddings": 512, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }  # fmt: skip
    raw = {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "block_size": 4,
        "draft_vocab_size": VOCAB,
        "mask_token_id": MASK,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "accept_tolerance": 0.0, "verifier_accept_k": 1}
            ],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": TARGET},
        },
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "tie_word_embeddings": False,
        "transformers_version": "5.12.0",
    }
    for key, value in changes.items():
        inside, _, name = key.rpartition("__")
        part = {"": raw, "layer": layer, "method": raw["speculators_config"]["proposal_methods"][0]}[inside]
        part[name] = value
        if value is None:
            del part[name]
    (folder / "config.json").write_text(json.dumps(raw | {"transformer_layer_config": layer}))


def test_a_folder_of_speculators(tmp_path):
    speculators_folder(tmp_path / "a", max_anchors=512)
    done = convert(tmp_path / "a", tmp_path / "b")
    assert done.notes == ["config.json: max_anchors=512 is not known here and was left out"]
    raw = json.loads((tmp_path / "b" / "config.json").read_text())
    assert raw["dflash_config"] == {"block_size": 4, "mask_token_id": MASK, "target_layer_ids": [1, 3, 4]}
    assert raw["target_name_or_path"] == TARGET and raw["target_architectures"] == ["LlamaForCausalLM"]
    assert "speculators_config" not in raw and "transformer_layer_config" not in raw
    mine = meaning(DFlashDraftModel.from_pretrained(tmp_path / "b").config)
    reference = meaning(make_drafter().config)
    assert mine == reference and bits(tmp_path / "a") == bits(tmp_path / "b")
    assert load_drafter(tmp_path / "a").config.num_drafts == 3


@pytest.mark.parametrize(
    ("changes", "windows", "causal"),
    [
        ({}, [None, None], [False, False]),
        ({"layer__layer_types": SLIDING, "layer__sliding_window": 6}, [6, None], [True, False]),
        ({"layer__layer_types": SLIDING, "layer__sliding_window": 6, "sliding_window_non_causal": None},
         [6, None], [True, False]),
        ({"layer__layer_types": SLIDING, "layer__sliding_window": 6, "sliding_window_non_causal": True},
         [6, None], [False, False]),
        # Qwen3Config fills in the layer types from here on.
        ({"layer__sliding_window": 6, "layer__max_window_layers": 1}, [None, 6], [False, True]),
    ],
)  # fmt: skip
def test_windows_of_speculators(changes, windows, causal, tmp_path):
    speculators_folder(tmp_path / "a", layer__use_sliding_window=True, **changes)
    done = convert(tmp_path / "a", tmp_path / "b")
    config = DFlashDraftModel.from_pretrained(tmp_path / "b").config
    assert (config.layer_windows, config.layer_causal) == (windows, causal)
    assert any("counted from the block's anchor" in note for note in done.notes) == any(windows)


def test_an_older_folder_of_z_labs(tmp_path):
    """RoPE and block size at top level, layers to be worked out, bfloat16, three shards."""
    make_drafter(num_target_layers=9, target_layer_ids=[1, 6]).to(torch.bfloat16).save_pretrained(
        tmp_path / "a", max_shard_size="20KB"
    )
    keep = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    keep += ("head_dim", "vocab_size", "max_position_embeddings", "block_size", "model_type", "architectures")

    def older(raw):
        old = {name: raw[name] for name in keep} | {"rope_theta": 7000.0, "rope_scaling": None, "num_target_layers": 9}
        old |= {"torch_dtype": "bfloat16", "dflash_config": {"mask_token_id": MASK}, "sliding_window": 4096}
        raw.clear()
        raw.update(old)

    rewrite(tmp_path / "a" / "config.json", older)
    for file in [*(tmp_path / "a").glob("*.py"), tmp_path / "a" / "generation_config.json"]:
        file.unlink()
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 1
    convert(tmp_path / "a", tmp_path / "b")
    raw = json.loads((tmp_path / "b" / "config.json").read_text())
    assert raw["dflash_config"] == {"block_size": 4, "mask_token_id": MASK, "target_layer_ids": [1, 6]}
    assert raw["block_size"] == 4 and raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 7000.0
    assert raw["dtype"] == "bfloat16" and (tmp_path / "b" / "modeling_dflash.py").is_file()
    assert bits(tmp_path / "a") == bits(tmp_path / "b")
    assert (tmp_path / "b" / "model.safetensors").stat().st_mode & 0o777 == (
        (tmp_path / "b" / "config.json").stat().st_mode & 0o777
    )


def test_a_checkpoint_trained_elsewhere(shared, tmp_path):
    source = shared / "drafters" / "smollm2-135m-instruct-dflash-b8"
    convert(source, tmp_path / "a", to="speculators", target="HuggingFaceTB/SmolLM2-135M-Instruct")
    convert(tmp_path / "a", tmp_path / "b")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "b"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.int16), after[name].view(torch.int16)) for name in before)
    configs = [DFlashDraftModel.from_pretrained(folder).config for folder in (source, tmp_path / "b")]
    assert meaning(configs[0]) == meaning(configs[1]) and configs[1].num_target_layers == 30


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_a_dtype_is_that_of_the_parameters_and_rope_stays_in_float32(layout, tmp_path):
    """`drafter.to(dtype)` would round the rotations; what `from_pretrained(dtype=...)` does counts."""
    save(tmp_path / "z-lab")
    convert(tmp_path / "z-lab", tmp_path / "speculators", to="speculators", target=TARGET)
    loaded = load_drafter(tmp_path / layout, dtype=torch.bfloat16)
    expected = DFlashDraftModel.from_pretrained(tmp_path / "z-lab", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.parameters()} == {loaded.config.dtype} == {torch.bfloat16}
    assert torch.equal(loaded.rotary_emb.inv_freq, expected.rotary_emb.inv_freq)
    assert loaded.rotary_emb.inv_freq.dtype == torch.float32 and not loaded.training
    assert loaded.config.name_or_path == str(tmp_path / layout)
    inputs = torch.randn(1, 4, HIDDEN), torch.randn(1, 6, 3 * HIDDEN), torch.arange(490, 500)[None]
    drafts = [drafter(*inputs).last_hidden_state for drafter in (loaded, expected)]
    rounded = DFlashDraftModel.from_pretrained(tmp_path / "z-lab").to(torch.bfloat16)
    assert torch.equal(*drafts) and not torch.equal(drafts[0], rounded(*inputs).last_hidden_state)
    as_it_is = load_drafter(tmp_path / layout)
    assert {parameter.dtype for parameter in as_it_is.parameters()} == {torch.float32}


# What z-lab's layout can say and speculators' cannot.
UNHELD = {
    "sinks": ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias"),
    "causal full attention": ({"is_causal": True}, "is_causal"),
    "interleaved RoPE": ({"is_neox_style": False}, "is_neox_style=false"),
    "embedding scale": ({"dflash_config": {"input_embedding_scale": 2.0}}, "input_embedding_scale=2.0"),
    "logit scale": ({"dflash_config": {"output_multiplier": 0.5}}, "output_multiplier=0.5"),
    "soft cap": ({"dflash_config": {"final_logit_softcapping": 30.0}}, "final_logit_softcapping=30.0"),
    "unknown option": ({"dflash_config": {"mystery": 1}}, "dflash_config.mystery=1"),
    "width": ({"target_hidden_size": 48, "own": {"embed_tokens.weight": [VOCAB, HIDDEN]}}, "target_hidden_size=48"),
    "own embeddings": ({"own": {"embed_tokens.weight": [VOCAB, HIDDEN]}}, "embed_tokens.weight"),
    "own head": ({"own": {"lm_head.weight": [VOCAB, HIDDEN]}}, "lm_head.weight"),
    "mask embedding": ({"mask_embedding": True}, "mask_embedding.pt"),
    "threshold": ({"knobs": {"assistant_confidence_threshold": 0.3}}, "assistant_confidence_threshold=0.3"),
    "schedule": ({"knobs": {"num_assistant_tokens_schedule": "constant"}}, "num_assistant_tokens_schedule=constant"),
    "sampling": ({"knobs": {"assistant_sampling": "rejection"}}, "assistant_sampling=rejection"),
    "a layer twice": ({"target_layer_ids": [1, 1, 4]}, r"target_layer_ids=\[1, 1, 4\]"),
    "no drafts": ({"block_size": 1}, "block_size=1"),
}


@pytest.mark.parametrize("case", UNHELD)
def test_what_speculators_cannot_hold_is_refused_by_name_and_stays_in_z_labs(case, tmp_path):
    settings, message = UNHELD[case]
    drafter = save(tmp_path / "a", **settings)
    with pytest.raises(ValueError, match=f"cannot hold.*{message}"):
        convert(tmp_path / "a", tmp_path / "b", to="speculators", target=TARGET)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    convert(tmp_path / "a", tmp_path / "b")
    again = DFlashDraftModel.from_pretrained(tmp_path / "b")
    assert bits(tmp_path / "a") == bits(tmp_path / "b") and meaning(again.config) == meaning(drafter.config)
    assert knobs(again) == knobs(drafter)
    assert again.config.dflash_config == DFlashDraftModel.from_pretrained(tmp_path / "a").config.dflash_config
    if drafter.mask_embedding is not None:
        assert torch.equal(again.mask_embedding, drafter.mask_embedding)


def edit_tensors(change):
    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def ask(**knobs):
    return lambda folder: (folder / "generation_config.json").write_text(json.dumps(knobs))


def cut(name, keep):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


FOREIGN = {  # changes to a folder of speculators, damage to it, message
    "another kind": ({"speculators_model_type": "eagle3"}, None, "speculators_model_type 'dflash', got 'eagle3'"),
    "embedding output": ({"aux_hidden_state_layer_ids": [0, 2, 4]}, None, "id 0 is the target's embedding output"),
    "no layers": ({"aux_hidden_state_layer_ids": None}, None, "list of layer ids"),
    "no mask token": ({"mask_token_id": None}, None, "names no mask token"),
    "lossy": ({"method__verifier_accept_k": 5}, None, "verifier_accept_k=5"),
    "window off": ({"layer__layer_types": SLIDING, "layer__sliding_window": 6}, None, "no window"),
    "unknown layers": ({"layer__model_type": "mystery"}, None, "model_type='mystery'"),
    "sizes": ({"layer__intermediate_size": 40}, None, r"mlp.up_proj.weight: \[48, 32\] in the file, \[40, 32\]"),
    "half a vocabulary": ({"draft_vocab_size": 20}, None, "expected the tensors d2t and lm_head.weight"),
    "unknown tensor": ({}, edit_tensors(lambda t: t.update(odd=torch.zeros(1))), "unknown odd"),
    "missing tensor": ({}, edit_tensors(lambda t: t.pop("norm.weight")), "missing norm.weight"),
    "two mappings": ({}, edit_tensors(lambda t: t.update(t2d=torch.zeros(VOCAB).bool())), "t2d and d2t name"),
    "cut weights": ({}, cut("model.safetensors", 5000), "model.safetensors cannot be read"),
    "cut config": ({}, cut("config.json", 50), "not valid JSON"),
    "pickles only": ({}, pickled, "pytorch_model.bin may run code"),
    "wrong kind of size": ({"layer__hidden_size": "wide"}, None, "config.json holds a value of the wrong kind"),
    "wrong kind of list": ({"speculators_config": "x"}, None, "config.json holds a value of the wrong kind"),
    "index of numbers": (
        {},
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}'),
        "names of files beside it, got 5",
    ),
    "index that leaves the folder": (
        {},
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}'),
        "names of files beside it, got '../b'",
    ),
    "index": ({}, lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "weight_map, got None"),
    "shards": (
        {},
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
        "has no b.safetensors",
    ),
    "mask embedding": ({}, lambda folder: (folder / "mask_embedding.pt").write_bytes(b"junk"), "cannot be read"),
    "knobs: drafts": ({}, ask(num_assistant_tokens="x"), "num_assistant_tokens must be a whole number .* got 'x'"),
    "knobs: threshold": ({}, ask(assistant_confidence_threshold=2), "a probability from 0 to 1, or none, got 2"),
    "knobs: schedule": ({}, ask(num_assistant_tokens_schedule="foo"), "must be .constant., .* got 'foo'"),
    "knobs: sampling": ({}, ask(assistant_sampling=["coupled"]), r"must be .rejection., .* got \['coupled'\]"),
    "no drafts": ({"method__speculative_tokens": 0}, None, "whole number from 1 on, .* got 0"),
    "a language model": (
        {},
        lambda folder: (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}'),
        "expected a DFlash drafter, .* holds a model of the class LlamaForCausalLM",
    ),
    "a list": ({}, lambda folder: (folder / "config.json").write_text("[]"), "must hold an object, got a list"),
    "no config": ({}, lambda folder: (folder / "config.json").unlink(), "has no config.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_damaged_and_foreign_folders_give_one_line(case, tmp_path):
    changes, damage, message = FOREIGN[case]
    speculators_folder(tmp_path / "a", **changes)
    if damage is not None:
        damage(tmp_path / "a")
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "a"), str(tmp_path / "b")])
    assert done.exit_code == 1 and len(done.stderr.splitlines()) == 1
    with pytest.raises((ValueError, OSError), match=f"(?i){message}") as error:
        convert(tmp_path / "a", tmp_path / "b")
    assert " ".join(str(error.value).split()) in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_tensors_of_training_and_identity_mappings_are_left_out_by_name(tmp_path):
    speculators_folder(tmp_path / "a")
    extra = {"verifier_norm.weight": torch.ones(HIDDEN), "d2t": torch.zeros(VOCAB, dtype=torch.long)}
    edit_tensors(lambda tensors: tensors.update(extra, t2d=torch.ones(VOCAB).bool()))(tmp_path / "a")
    done = convert(tmp_path / "a", tmp_path / "b")
    assert set(done.left_out) == {"verifier_norm.weight", "d2t", "t2d"}
    assert bits(tmp_path / "b").keys() == make_drafter().state_dict().keys()


def test_what_is_there_stays(tmp_path):
    save(tmp_path / "a")
    (tmp_path / "b").mkdir()
    convert(tmp_path / "a", tmp_path / "b")  # an empty folder is taken
    before = bits(tmp_path / "b")
    for out, message in (("b", "is there already"), ("none/b", "There is no folder")):
        with pytest.raises(OSError, match=message):
            convert(tmp_path / "a", tmp_path / out)
    with pytest.raises(ValueError, match="pass target"):
        convert(tmp_path / "a", tmp_path / "c", to="speculators")
    with pytest.raises(ValueError, match="one of the layouts z-lab, speculators, got 'gguf'"):
        convert(tmp_path / "a", tmp_path / "c", to="gguf")
    assert bits(tmp_path / "b") == before and not (tmp_path / "c").exists()


def test_a_difference_is_found(tmp_path, monkeypatch):
    """If a value is lost on the way, the draft from both folders shows it and nothing is written."""
    write = speculators.write_config

    def lossy(config, **kwargs):
        written = write(config, **kwargs)
        written["transformer_layer_config"]["rope_parameters"]["rope_theta"] = 1.0
        return written

    save(tmp_path / "a")
    monkeypatch.setattr(speculators, "write_config", lossy)
    with pytest.raises(RuntimeError, match=r"not the same \(config: \['rope_parameters'\]"):
        convert(tmp_path / "a", tmp_path / "b", to="speculators", target=TARGET)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_config_survives_or_is_refused(data):
    """Configs only, of every mix of options: what is not refused by name means the same after both directions."""
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    layers = pick(1, 2, 3)
    kinds = [pick("full_attention", "sliding_attention") for _ in range(layers)]
    config = drafter_config(
        num_hidden_layers=layers,
        layer_types=pick(None, kinds),
        sliding_window=pick(3, 7),
        use_sliding_window=pick(True, False),
        is_causal=pick(None, None, None, True, False),
        block_size=pick(2, 8),
        attention_bias=pick(True, False),
        hidden_act=pick("silu", "gelu"),
        target_layer_ids=pick([0], [4, 1], [0, 2, 4]),
        rope_parameters=pick(None, {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}),
        dflash_config={
            name: value
            for name, value in {
                "causal": pick(None, None, None, True, False),
                "use_swa": pick(None, True, False),
                "swa_window_size": pick(None, 5),
                "sample_from_anchor": pick(None, True, False),
                "attention_sink_bias": pick(None, False),
                "output_multiplier": pick(None, 1.0),
            }.items()
            if value is not None
        },
    )
    refused = speculators.unheld(config, set(), mask_embedding=False, knobs=GenerationConfig())
    causal = any(c and w is None for c, w in zip(config.layer_causal, config.layer_windows, strict=True))
    assert bool(refused) == causal  # the one thing in here that speculators cannot hold
    if refused:
        return
    drafts = pick(None, 1)
    written = speculators.write_config(config, target=TARGET, architectures=["A"], drafts=drafts)
    again, read_drafts, _ = speculators.read_config(json.loads(json.dumps(written)))
    assert meaning(again) == meaning(config)
    assert read_drafts == (None if drafts in (None, config.num_drafts) else drafts)
    assert (again.target_name_or_path, again.target_architectures) == (TARGET, ["A"])
    twice = speculators.write_config(again, target=TARGET, architectures=["A"], drafts=drafts)
    assert twice == written


def test_command(tmp_path):
    save(tmp_path / "a", own=REDUCED)
    done = CliRunner().invoke(
        app, ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "speculators", "--target", TARGET]
    )
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{tmp_path / 'b'}: 28 tensors, speculators layout, the same draft before and after\n"
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "b"), str(tmp_path / "c")])
    assert "left out: t2d (says the same as d2t)" in done.stdout


def test_speculators_itself_computes_the_same(tmp_path):
    """Hidden states of speculators' own model, loaded from our folder, on one anchored block."""
    if find_spec("speculators") is None:
        pytest.skip(
            "needs the package speculators (0.9.0, loguru, pydantic-settings and hs-connectors, all --no-deps)"
        )
    make_target("llama").save_pretrained(tmp_path / "target")
    cases = {
        "full": {},
        "sliding": {"layer_types": SLIDING, "sliding_window": 80},  # wider than the text: see the note on windows
        "reduced": {"own": REDUCED},
    }
    for name, overrides in cases.items():
        save(tmp_path / name, **overrides)
        convert(tmp_path / name, tmp_path / f"{name}-s", to="speculators", target=str(tmp_path / "target"))
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("speculators_peer.py"), tmp_path, *cases],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    theirs = torch.load(tmp_path / "hidden.pt")
    for name in cases:
        drafter = load_drafter(tmp_path / name)
        run = theirs[name]
        embeds = drafter.embed_block(run["block"], make_target("llama").get_input_embeddings())
        ours = drafter(embeds, run["features"], position_ids=run["positions"]).last_hidden_state
        torch.testing.assert_close(ours, run["hidden"], rtol=0, atol=2e-5)
