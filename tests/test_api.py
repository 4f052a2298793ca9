"""The public names: each has a docstring with an example, or a reason here why it has none."""

import importlib
import inspect

import pytest

MODULES = ["dflash_hf", "dflash_hf.benchmark", "dflash_hf.checkpoints", "dflash_hf.doctor", "dflash_hf.hub"]
# Named in the documentation, of modules that hold other things too.
TRAINER = ("DFlashTrainer", "DFlashTrainingArguments", "read_dataset")
NAMED = ["dflash_hf.terminal.AcceptedStreamer", *(f"dflash_hf.training.trainer.{name}" for name in TRAINER)]

RESULT = "what a function returns; that one's example shows it"
PART = "a step of diagnose(), for those who build another doctor"
WITHOUT_EXAMPLE = {
    "dflash_hf.checkpoints.Checkpoint": RESULT,
    "dflash_hf.checkpoints.Conversion": RESULT,
    "dflash_hf.doctor.PROMPTS": "a list",
    "dflash_hf.doctor.Evidence": PART,
    "dflash_hf.doctor.Fault": RESULT,
    "dflash_hf.doctor.Findings": RESULT,
    "dflash_hf.doctor.gather": PART,
    "dflash_hf.doctor.score": PART,
    "dflash_hf.hub.Measurements": RESULT,
    "dflash_hf.hub.Published": RESULT,
    "dflash_hf.training.trainer.read_dataset": "docs/training.md has one, which the tests run",
}


def resolve(name: str):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


PUBLIC = [f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__] + NAMED


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_documented(name):
    thing = resolve(name)
    if name not in WITHOUT_EXAMPLE:
        assert ">>>" in (thing.__doc__ or ""), f"{name} shows no example"
    if not callable(thing):
        return
    assert thing.__doc__ and not thing.__doc__.startswith(f"{thing.__name__}(")  # what dataclasses make by themselves
    for member, value in vars(thing).items() if inspect.isclass(thing) else ():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if member.startswith("_") or not inspect.isfunction(function):
            continue
        # Overridden methods of transformers' keep its meaning and its documentation; attributes may be in the class's.
        inherited = any(member in vars(base) for base in thing.__mro__[1:])
        assert function.__doc__ or inherited or f" {member}:" in thing.__doc__, f"{name}.{member}"


def test_exceptions_are_about_public_names():
    assert set(WITHOUT_EXAMPLE) <= set(PUBLIC)
    assert all(">>>" not in (resolve(name).__doc__ or "") for name in WITHOUT_EXAMPLE)
