"""Drafter folders: written, read back, read by transformers alone, and refused when damaged."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from dflash_hf import DFlashDraftModel
from drafters import make_drafter
from targets import HIDDEN, MASK, VOCAB, make_target, prompt_ids

ROOT = Path(__file__).resolve().parents[1]
CARD = ROOT / "model_cards" / "SmolLM2-135M-Instruct-DFlash"


def run_python(code: str, *args, **env) -> str:
    """Run `code` in a fresh process with no way to import dflash_hf from the repository."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        env=os.environ | env,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


WITHOUT_US = "import sys; sys.modules['dflash_hf'] = None\n"


def test_everything_survives_saving(tmp_path):
    drafter = make_drafter(
        own_tensors={"lm_head.weight": [20, HIDDEN], "d2t": [20], "embed_tokens.weight": [VOCAB, HIDDEN]},
        layer_types=["sliding_attention", "full_attention"], sliding_window=5, draft_vocab_size=20,
        dflash_config={"add_swa_attention_sink_bias": True, "input_embedding_scale": 2.0},
    )  # fmt: skip
    drafter.d2t.copy_(torch.arange(20))
    drafter.mask_embedding = torch.linspace(-1, 1, HIDDEN)
    drafter.generation_config.num_assistant_tokens = 2
    drafter.generation_config.assistant_confidence_threshold = 0.3
    drafter.save_pretrained(tmp_path)
    again = DFlashDraftModel.from_pretrained(tmp_path)
    assert set(again.state_dict()) == set(drafter.state_dict())
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert torch.equal(again.mask_embedding, drafter.mask_embedding)
    assert again.config.to_diff_dict() == drafter.config.to_diff_dict()
    assert again.generation_config.num_assistant_tokens == 2
    assert again.generation_config.assistant_confidence_threshold == 0.3
    assert not any("mask_embedding" in name for name in load_file(tmp_path / "model.safetensors"))


def test_unset_knobs_mean_the_full_block(tmp_path):
    make_drafter().save_pretrained(tmp_path)
    config = DFlashDraftModel.from_pretrained(tmp_path).generation_config
    assert config.num_assistant_tokens is None and config.assistant_confidence_threshold is None


def test_the_layout_is_z_labs(tmp_path):
    make_drafter(num_hidden_layers=5, target_layer_ids=[0, 1, 2, 3, 4]).to(torch.bfloat16).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["DFlashDraftModel"] and raw["model_type"] == "qwen3"
    assert (
        raw["dflash_config"]["mask_token_id"] == MASK and raw["block_size"] == raw["dflash_config"]["block_size"] == 4
    )
    assert raw["dflash_config"]["target_layer_ids"] == [0, 1, 2, 3, 4]
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] and raw["dtype"] == "bfloat16"
    tensors = load_file(tmp_path / "model.safetensors")
    assert len(tensors) == 58 and {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert not any("embed" in name or "lm_head" in name for name in tensors)


@pytest.mark.parametrize("load", [DFlashDraftModel, AutoModel], ids=lambda of: of.__name__)
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
def test_dtype_is_the_files_or_the_callers(load, stored, tmp_path):
    make_drafter().to(stored).save_pretrained(tmp_path)
    remote = {} if load is DFlashDraftModel else {"trust_remote_code": True}
    for given, expected in ({}, stored), ({"dtype": "auto"}, stored), ({"dtype": "float16"}, torch.float16):
        drafter = load.from_pretrained(tmp_path, **given, **remote)
        assert {p.dtype for p in drafter.parameters()} == {expected} and drafter.config.dtype == expected


@pytest.mark.parametrize("which", ["a tiny drafter", "the card's"])
def test_transformers_alone_loads_generates_saves_and_loads_again(which, tmp_path):
    ids = prompt_ids(length=9)
    if which == "a tiny drafter":
        target = make_target("llama")
        make_drafter().save_pretrained(tmp_path / "drafter")
    else:  # as wide, as deep and with as many tokens as the target that the card's drafter is for
        sizes = {"vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9}
        target = make_target("llama", num_key_value_heads=3, initializer_range=0.1, **sizes)
        shutil.copytree(CARD, tmp_path / "drafter")
    target.save_pretrained(tmp_path / "target")
    expected = target.generate(ids, do_sample=False, max_new_tokens=16)[0].tolist()
    out = run_python(
        WITHOUT_US
        + """
import json, torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
folder, ids = sys.argv[1], torch.tensor([json.loads(sys.argv[2])])
target = AutoModelForCausalLM.from_pretrained(folder + "/target")
assert type(AutoConfig.from_pretrained(folder + "/drafter", trust_remote_code=True)).__name__ == "DFlashConfig"
drafter = AutoModel.from_pretrained(folder + "/drafter", trust_remote_code=True, dtype=torch.float32)
assert type(drafter).__module__.startswith("transformers_modules")
texts = [target.generate(ids, do_sample=False, max_new_tokens=16, assistant_model=drafter)[0].tolist()]
assert drafter.last_run.tokens == 16
drafter.save_pretrained(folder + "/again")
for auto in (AutoModel, AutoModelForCausalLM):
    again = auto.from_pretrained(folder + "/again", trust_remote_code=True, dtype=torch.float32)
    assert type(again).__name__ == "DFlashDraftModel", type(again)
    assert all(torch.equal(a, b) for a, b in zip(drafter.state_dict().values(), again.state_dict().values()))
    texts.append(target.generate(ids, do_sample=False, max_new_tokens=16, assistant_model=again)[0].tolist())
print(json.dumps(texts))
""",
        tmp_path, json.dumps(ids[0].tolist()), HF_HOME=str(tmp_path / "cache"),
    )  # fmt: skip
    assert json.loads(out.splitlines()[-1]) == [expected] * 3


def test_package_and_remote_code_in_one_process(tmp_path):


    target, ids, drafter = make_target("llama"), prompt_ids(length=9), make_drafter()
    drafter.save_pretrained(tmp_path)
    remote = AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(remote) is not DFlashDraftModel
    texts = [
        target.generate(ids, do_sample=False, max_new_tokens=16, assistant_model=d).tolist() for d in (drafter, remote)
    ]
    assert texts[0] == texts[1] and remote.last_run.accepted == drafter.last_run.accepted


def test_the_code_in_the_card_is_the_code_of_the_package():
    for source in (ROOT / "dflash_hf" / "drafter").glob("*.py"):
        if source.name != "__init__.py":
            assert (CARD / source.name).read_text() == source.read_text(), (
                f"save the drafter anew: {source.name} differs"
            )


def damage_missing(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def damage_unknown(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(
        tensors | {"layers.0.mystery.weight": torch.zeros(2)},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def damage_shape(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit(**changes):
    def change(folder):
        raw = json.loads((folder / "config.json").read_text())
        for key, value in changes.items():
            raw[key] = value
        (folder / "config.json").write_text(json.dumps(raw))

    return change


def edit_option(**changes):
    def change(folder):
        raw = json.loads((folder / "config.json").read_text())
        raw["dflash_config"] |= changes
        for key in changes:
            raw.pop(key, None)
        (folder / "config.json").write_text(json.dumps(raw))

    return change


def cut_short(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


DAMAGED = {
    "missing tensor": (damage_missing, r"missing keys.*layers\.1\.mlp\.up_proj\.weight"),
    "unknown tensor": (damage_unknown, r"unexpected keys.*layers\.0\.mystery\.weight"),
    "wrong shape": (damage_shape, r"fc\.weight: \[32, 95\] in the file, \[32, 96\]"),
    "DFlash 2": (edit(architectures=["DFlash2DraftModel"]), "DFlash 2"),
    "Muse assistant": (edit(model_type="muse_glimmer_assistant"), "Muse Glimmer"),
    "speculators": (edit(speculators_model_type="dflash"), "speculators layout"),
    "no mask token": (edit(dflash_config={"target_layer_ids": [1, 3, 4]}), "names no mask token"),
    "no layers": (edit(dflash_config={"mask_token_id": 5}, num_target_layers=None), "target_layer_ids"),
    "value scale": (
        edit(dflash_config={"mask_token_id": 5, "attention_value_scale": 0.5}),
        "attention_value_scale=0.5",
    ),
    "block size": (edit_option(block_size="8"), "block_size must be a whole number.*got '8'"),
    "huge block": (edit_option(block_size=10**9), "block_size must be a whole number from 1 to max_position"),
    "epsilon as text": (edit(rms_norm_eps="1e-6"), "rms_norm_eps must be a number.*got '1e-6'"),
    "mask beyond": (edit_option(mask_token_id=64), "mask_token_id must be an id of the vocabulary, 0 to 63, got 64"),
    "empty layers": (edit_option(target_layer_ids=[]), r"target_layer_ids must be a list.*got \[\]"),
    "layer names": (edit_option(target_layer_ids=["1"]), "target_layer_ids must be a list"),
    "negative layers": (edit_option(target_layer_ids=[-1, 2]), "target_layer_ids must be a list"),
    "causal as text": (edit_option(causal="false"), "causal must be true or false, got 'false'"),
    "odd heads": (edit(head_dim=15), "head_dim must be an even number, got 15"),
    "ragged heads": (edit(num_attention_heads=3), "num_attention_heads must be a multiple"),
    "layer types": (edit(layer_types=["full_attention"]), "one entry for each of the 2 layers"),
    "options": (edit(dflash_config=[1]), "dflash_config must be an object"),
    "empty window": (
        edit(layer_types=["sliding_attention"] * 2, sliding_window=0), "window must be a whole number"),
    "cut short": (cut_short, r"model\.safetensors is damaged or incomplete \(.+\); fetch or write it again"),
    "no header": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"404"), r"model\.safetensors is damaged"),
    "no window": (edit(layer_types=["sliding_attention"] * 2), "sliding_window"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_and_foreign_checkpoints_are_refused(case, tmp_path):
    make_drafter().save_pretrained(tmp_path)
    damage, message = DAMAGED[case]
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        DFlashDraftModel.from_pretrained(tmp_path)


def test_one_damaged_shard_is_named(tmp_path):
    make_drafter().save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].write_bytes(shards[1].read_bytes()[:-4])
    with pytest.raises(ValueError, match=f"{shards[1].name} is damaged or incomplete"):
        DFlashDraftModel.from_pretrained(tmp_path)
    shards[1].unlink()
    with pytest.raises(OSError, match=shards[1].name):
        DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("options, named", [({"casual": True, "use_sva": False}, "casual, use_sva"), ({}, None)])
def test_unknown_options_are_named_once(options, named, tmp_path, caplog):
    make_drafter().save_pretrained(tmp_path)
    edit_option(**options)(tmp_path)
    transformers.utils.logging.enable_propagation()
    with caplog.at_level("WARNING"):
        drafter = DFlashDraftModel.from_pretrained(tmp_path)
    transformers.utils.logging.disable_propagation()
    warnings = [record.message for record in caplog.records if "nothing here reads" in record.message]
    assert len(warnings) == (named is not None) and all(f"dflash_config: {named}. " in text for text in warnings)
    assert {key: drafter.config.to_dict()["dflash_config"][key] for key in options} == options  # kept all the same


def test_own_tensors_that_do_not_belong_together(tmp_path):
    for own, message in (
        ({"lm_head.weight": [20, 32]}, "gives 20 tokens and its d2t maps 64"),
        ({"d2t": [40]}, "gives 64 tokens and its d2t maps 40"),
    ):
        make_drafter(own_tensors=own).save_pretrained(tmp_path / str(len(own)))
        with pytest.raises(ValueError, match=message):
            DFlashDraftModel.from_pretrained(tmp_path / str(len(own)))
    drafter = make_drafter(own_tensors={"lm_head.weight": [40, 32], "d2t": [40]})
    drafter.d2t += 30
    drafter.save_pretrained(tmp_path / "far")
    with pytest.raises(ValueError, match="target ids 30 to 69, the vocabulary has 64"):
        DFlashDraftModel.from_pretrained(tmp_path / "far")
    drafter = make_drafter()
    drafter.mask_embedding = torch.zeros(32)
    drafter.save_pretrained(tmp_path / "mask")
    torch.save({"embedding": torch.zeros(1), "mask_token_id": 3}, tmp_path / "mask" / "mask_embedding.pt")
    with pytest.raises(ValueError, match="holds 1 values for token 3"):
        DFlashDraftModel.from_pretrained(tmp_path / "mask")


OWN = {"embed_tokens.weight": [64, 32], "lm_head.weight": [40, 32], "d2t": [40]}


@pytest.mark.parametrize(
    "how",
    [{}, {"variant": "fp16"}, {"max_shard_size": "20KB"}, {"variant": "fp16", "max_shard_size": "20KB"}],
)
@pytest.mark.parametrize("subfolder", ["", "inner"])
def test_the_ways_that_transformers_stores_checkpoints(how, subfolder, tmp_path):
    drafter = make_drafter(own_tensors=OWN)
    drafter.save_pretrained(tmp_path / subfolder, **how)
    variant = {"variant": how["variant"]} if "variant" in how else {}
    again = DFlashDraftModel.from_pretrained(tmp_path, subfolder=subfolder, **variant)
    assert {n: t.tolist() for n, t in again.state_dict().items()} == (
        {n: t.tolist() for n, t in drafter.state_dict().items()}
    )


@pytest.mark.parametrize("how", ["dflash_hf.DFlashDraftModel", "dflash_hf.DFlashConfig", "AutoConfig", "AutoModel"])
def test_old_transformers_gives_one_clear_error(how, tmp_path):
    make_drafter().save_pretrained(tmp_path)
    code = """
import sys; sys.path.insert(0, sys.argv[1])
how, folder = sys.argv[2:]
import transformers, transformers.configuration_utils
auto = getattr(transformers, how, None)
transformers.__version__ = "4.57.1"
try:
    if auto is None:
        del transformers.configuration_utils.PreTrainedConfig  # spelt otherwise then
        import dflash_hf
        eval(how)
    else:
        auto.from_pretrained(folder, trust_remote_code=True)
except ImportError as error:
    print(error)
"""
    out = run_python(code, ROOT, how, tmp_path, HF_HOME=str(tmp_path / "cache"))
    assert out.strip() == (
        "DFlash drafters need transformers >= 5.24, found 4.57.1: pip install -U \"transformers>=5.24\""
    )


def test_import_is_light():
    """No transformers module that `import transformers` leaves out may come with `import dflash_hf`."""
    code = """
import sys; sys.path.insert(0, sys.argv[1])
import torch, transformers
before = set(sys.modules)
import dflash_hf
print(sorted(set(sys.modules) - before))
"""
    assert run_python(code, ROOT).strip() == "['dflash_hf']"


def test_saving_into_the_folder_it_came_from(tmp_path):
    make_drafter().save_pretrained(tmp_path / "a")
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    drafter.save_pretrained(tmp_path / "a")
    for file in (tmp_path / "b").iterdir():
        assert (tmp_path / "a" / file.name).read_bytes() == file.read_bytes()
