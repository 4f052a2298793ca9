# ruff: noqa: F811  (pytest fixtures of another file)
"""LoRA by peft, on the drafter and on the target."""

import json

import pytest
import torch

from dflash_hf import DFlashDraftModel
from dflash_hf.training.trainer import DFlashTrainer, SampleDataset
from drafters import make_drafter
from targets import make_target, prompt_ids
from test_training import arguments, assert_same_weights, samples, target, trained  # noqa: F401  (fixtures)

peft = pytest.importorskip("peft", reason="needs peft: `make test` installs it")

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora(model, **overrides):
    settings = {"r": 4, "lora_alpha": 8, "target_modules": PROJECTIONS}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return peft.get_peft_model(model, peft.LoraConfig(**settings | overrides))


def drafts(target, drafter, samples) -> list:
    """What shows which weights a drafter ran with: the tokens it was right about, cycle by cycle."""
    found = []
    for sample in samples:
        start = sample.spans[0][0]
        prompt = torch.tensor([sample.ids[:start]])
        out = target.generate(prompt, assistant_model=drafter, max_new_tokens=len(sample.ids) - start, do_sample=False)
        assert out[0].tolist() == sample.ids
        found.append((drafter.last_run.cycles, drafter.last_run.accepted))
    return found


@pytest.fixture(scope="module")
def adapted(target, samples, tmp_path_factory):
    """A drafter with an adapter that was trained until it knows the answers, and where it was saved."""
    folder = tmp_path_factory.mktemp("adapter")
    base = make_drafter(initializer_range=0.05)
    base.generation_config.num_assistant_tokens_schedule = "constant"
    before = {name: parameter.clone() for name, parameter in base.named_parameters()}
    trainer = trained(
        target,
        SampleDataset(samples),
        folder,
        drafter=lora(base),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        max_steps=60,
        num_anchors=64,
        learning_rate=2e-2,
    )
    trainer.save_model()
    return trainer, before, folder


def test_only_the_adapter_is_trained_and_saved(adapted):
    trainer, before, folder = adapted
    for name, parameter in trainer.drafter.named_parameters():
        if "lora" not in name:
            assert torch.equal(parameter, before[name.replace(".base_layer", "")]), name
    assert {path.name for path in folder.glob("*.safetensors")} == {"adapter_model.safetensors"}


def test_adapter_drafts_switches_off_merges_and_loads(adapted, target, samples):
    trainer, _, folder = adapted
    model = trainer.model.eval()
    with_adapter = drafts(target, model, samples)
    base = make_drafter(initializer_range=0.05)
    base.generation_config.num_assistant_tokens_schedule = "constant"
    without = drafts(target, base, samples)
    assert sum(cycles for cycles, _ in with_adapter) < 0.8 * sum(cycles for cycles, _ in without)
    with model.disable_adapter():
        assert drafts(target, model, samples) == without
    assert drafts(target, model, samples) == with_adapter

    loaded = peft.PeftModel.from_pretrained(base, folder).eval()
    assert drafts(target, loaded, samples) == with_adapter
    loaded.load_adapter(folder, adapter_name="second")
    for name, parameter in loaded.named_parameters():
        if "lora_B.second" in name:
            torch.nn.init.zeros_(parameter)  # an adapter that adds nothing
    loaded.set_adapter("second")
    assert drafts(target, loaded, samples) == without
    loaded.set_adapter("default")
    assert drafts(target, loaded, samples) == with_adapter


def test_example_adapts_a_drafter_and_measures_it(target, samples, tmp_path):
    """From files, as the example's command line: better with the adapter, unchanged without it, a small file."""
    import adapt_lora

    base = make_drafter(initializer_range=0.05)
    base.save_pretrained(tmp_path / "drafter")
    lines = [json.dumps({"id": s.id, "ids": s.ids, "spans": s.spans}) + "\n" for s in samples]
    (tmp_path / "answers.jsonl").write_text("".join(lines))
    options = ["--max_steps=40", "--learning_rate=2e-2", "--use_cpu=True", "--disable_tqdm=True"]
    answers, adapter = str(tmp_path / "answers.jsonl"), str(tmp_path / "adapter")
    adapt_lora.train(target, str(tmp_path / "drafter"), answers, adapter, *options)
    weights = [path.name for path in (tmp_path / "adapter").glob("*.safetensors")]
    assert weights == ["adapter_model.safetensors"]
    (on, off, without) = adapt_lora.measure(target, adapter, answers)[answers]
    assert on > 1.3 * without and off == without
    evaluation = DFlashTrainer(base, target, arguments(tmp_path / "out"), eval_dataset=SampleDataset(samples))
    assert without == pytest.approx(evaluation.evaluate()["eval_tau"])


def test_merged_drafter_is_an_ordinary_one(adapted, target, samples, tmp_path):
    trainer, _, folder = adapted
    base = make_drafter(initializer_range=0.05)
    base.generation_config.num_assistant_tokens_schedule = "constant"
    merged = peft.PeftModel.from_pretrained(base, folder).merge_and_unload()
    assert isinstance(merged, DFlashDraftModel)
    merged.save_pretrained(tmp_path)
    again = DFlashDraftModel.from_pretrained(tmp_path)
    assert_same_weights(merged, again)
    assert drafts(target, again, samples) == drafts(target, trainer.model.eval(), samples)


@pytest.mark.parametrize("on_drafter", [False, True])
def test_target_with_an_adapter(on_drafter, samples, tmp_path):
    """The features and the verified text are those of the adapted target, with either kind of drafter."""
    target = lora(make_target("qwen3"))
    for name, parameter in target.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    target.eval()
    prompt = torch.tensor([samples[0].ids[:6]])
    plain = target.generate(input_ids=prompt, max_new_tokens=12, do_sample=False)
    with target.disable_adapter():
        assert not torch.equal(plain, target.generate(input_ids=prompt, max_new_tokens=12, do_sample=False))
    drafter = make_drafter(initializer_range=0.05)
    if on_drafter:
        drafter = lora(drafter)
    trainer = trained(target, SampleDataset(samples), tmp_path, drafter=drafter)
    out = target.generate(input_ids=prompt, assistant_model=trainer.model.eval(), max_new_tokens=12, do_sample=False)
    assert torch.equal(out, plain)
    assert trainer.drafter.last_run.tokens == 12


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"])
def test_targets_with_prompt_learning_are_decoded_plainly(kind):
    """peft puts virtual tokens before the prompt in a way of its own, in which drafts cannot follow."""
    torch.manual_seed(1)
    settings = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    target = peft.get_peft_model(make_target("llama"), getattr(peft, kind)(**settings)).eval()
    options = {"input_ids": prompt_ids(length=9), "do_sample": False, "max_new_tokens": 12}
    expected, drafter = target.generate(**options), make_drafter()
    with pytest.warns(UserWarning, match="prompt learning"):
        out = target.generate(**options, assistant_model=drafter)
    assert out.tolist() == expected.tolist()
