"""From a drafter's folder to a repository that loads: card, upload, refusals; against a Hub on loopback."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors.torch import load_file
from typer.testing import CliRunner

from dflash_hf import DFlashDraftModel
from dflash_hf.benchmark import Prompt, bench
from dflash_hf.checkpoints import convert, read
from dflash_hf.cli import app
from dflash_hf.hub import publish
from dflash_hf.hub.card import Measurements, checkpoint_sha256
from dflash_hf.hub.publish import without_tokens
from drafters import make_drafter
from hub_server import TOKEN, HubServer
from targets import make_target, prompt_ids

BASE = "someone/some-target"
SAID = {"base_model": BASE, "license": "apache-2.0"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that this process talks to, with a token to write there."""
    with HubServer(TOKEN) as server:
        server.serve(monkeypatch, tmp_path / "cache")
        yield server


@pytest.fixture
def folder(tmp_path):
    make_drafter().save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """What `dflash-hf bench` writes, of the drafter of `folder`."""
    prompts = [
        Prompt(f"{kind}/{i}", category=kind, ids=prompt_ids(length=8 + i, seed=i)[0].tolist())
        for kind in ("maths", "code") for i in range(2)
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("bench") / "bench.json"
    source = {"source": "/home/someone/data/gsm8k_dev.jsonl", "sha256": "ab" * 32}
    source["command"] = "dflash-hf bench /home/someone/target me/drafter gsm8k_dev.jsonl --max-new-tokens 12"
    source["command"] += " --out=/home/someone/bench.json"
    methods = ["plain", "constant", "prompt-lookup"]
    bench(
        make_target("llama"), make_drafter(), prompts, methods=methods, max_new_tokens=12, out=path, source=source,
    )  # fmt: skip
    return path


def test_push_then_load_by_the_name_in_a_fresh_process_and_generate(folder, report, tmp_path):
    """Everything by commands and environment variables, as a user does it; the loader does not have dflash_hf."""
    target, ids = make_target("llama"), prompt_ids(length=9)
    target.save_pretrained(tmp_path / "target")
    expected = target.generate(ids, do_sample=False, max_new_tokens=16)[0].tolist()
    with HubServer(TOKEN) as hub:
        env = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        env |= {"HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}

        def run(*command):
            command = [sys.executable, *map(str, command)]
            done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True)
            assert done.returncode == 0 and TOKEN not in done.stdout + done.stderr, done.stderr
            return done.stdout

        command = "from dflash_hf.cli import app; app()"
        options = ["--measurements", report, "--license", "apache-2.0", "--base-model", BASE, "--private"]
        out = run("-c", command, "push", folder, "me/drafter", *options)
        sha = hub.repos["me/drafter"].branches["main"]
        assert f"{hub.url}/me/drafter/tree/{sha}: " in out
        assert hub.repos["me/drafter"].private
        hub.put("me/drafter", {"config.json": b"{}"})  # main moves on; the pinned commit stays
        code = """
import sys; sys.modules["dflash_hf"] = None
import json, torch
from transformers import AutoModel, AutoModelForCausalLM
target = AutoModelForCausalLM.from_pretrained(sys.argv[1])
drafter = AutoModel.from_pretrained("me/drafter", trust_remote_code=True, revision=sys.argv[2])
ids = torch.tensor([json.loads(sys.argv[3])])
ids = target.generate(ids, do_sample=False, max_new_tokens=16, assistant_model=drafter)
print(json.dumps([ids[0].tolist(), drafter.last_run.cycles, type(drafter).__module__]))
"""
        out = run("-c", code, tmp_path / "target", sha, ids[0].tolist())
    got, cycles, module = json.loads(out.splitlines()[-1])
    assert got == expected and cycles > 0 and module.startswith("transformers_modules.me.drafter")


def test_what_is_published(hub, folder):
    (folder / "README.md").unlink(missing_ok=True)
    (folder / "optimizer.pt").write_bytes(b"of a training run")
    (folder / "notes").mkdir()
    (folder / "notes" / "data.md").write_text("where the data came from")
    (folder / "NOTICE").write_text("a notice")
    before = {path.name for path in folder.iterdir()}
    done = publish(folder, "me/drafter", **SAID, include=["notes/*"], datasets=["openai/gsm8k"], language=["en"])
    files = hub.files("me/drafter")
    assert set(files) == {*done.files, ".gitattributes"}
    code = {path.name for path in folder.glob("*.py")}
    assert set(done.files) == code | {
        "LICENSE",
        "NOTICE",
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "notes/data.md",
    }
    assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert files["LICENSE"].lstrip().startswith(b"Apache License")
    assert json.loads(files["config.json"])["target_name_or_path"] == BASE
    assert {path.name for path in folder.iterdir()} == before
    card = ModelCard(files["README.md"].decode())
    assert card.data.to_dict() == {
        "base_model": BASE,
        "base_model_relation": "adapter",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "datasets": ["openai/gsm8k"],
        "language": ["en"],
        "tags": ["dflash", "speculative-decoding", "draft-model"],
    }
    for text in (
        "No measurements: no report of `dflash-hf bench`",
        'AutoModel.from_pretrained("me/drafter", trust_remote_code=True',
        """--speculative-config '{"method": "dflash", "model": "me/drafter", "num_speculative_tokens": 3}'""",
        f"--model-path {BASE} --speculative-algorithm DFLASH --speculative-draft-model-path me/drafter",
        "2 layers, 0.0 M parameters, blocks of 4 with 3 drafts a pass, features of target layers 1, 3, 4",
    ):
        assert text in card.text
    assert card.text.count("not run here") == 2
    blocks = card.text.split("```python")[1:]
    assert len(blocks) == 1
    compile(blocks[0].split("```")[0], "card", "exec")


def numbers_of(report: Path) -> dict:
    return json.loads(report.read_text())


def test_every_number_of_the_card_is_the_reports(folder, report, tmp_path):
    done = publish(folder, "me/drafter", **SAID, measurements=report, out=tmp_path / "out")
    measured, card = numbers_of(report), ModelCard.load(tmp_path / "out" / "README.md")
    row = measured["summary"]["constant"]
    found = {(r.dataset_name, r.metric_type): r.metric_value for r in card.data.eval_results}
    expected = {}
    for name, summary in {"": measured["summary"], **measured["by_category"]}.items():
        data = f"gsm8k_dev.jsonl ({name})" if name else "gsm8k_dev.jsonl"
        expected[data, "tau"] = round(summary["constant"]["tau"], 3)
        expected[data, "speedup"] = round(summary["constant"]["ratio"]["value"], 3)
    assert found == expected and len(found) == 6
    table = [line for line in card.text.splitlines() if line.startswith("| constant ")]
    ratio, texts = row["ratio"], row["texts"]
    assert table == [
        f"| constant | {row['tokens_per_s']:.1f} | {ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}) "
        f"| {row['tau']:.2f} | {texts['equal']} of {texts['compared']} |"
    ]
    environment = measured["environment"]
    for text in (
        f"On {environment['cpu']}, {environment['threads']} thread, torch {environment['versions']['torch']}",
        "4 prompts of gsm8k_dev.jsonl (SHA-256 abababababab...), greedy, at most 12 new tokens, 1 round, batches of",
        "dflash-hf bench target me/drafter gsm8k_dev.jsonl --max-new-tokens 12 --out=bench.json",  # no folders
        " ".join(f"{share:.2f}" for share in row["acceptance_by_position"]),
    ):
        assert text in card.text
    assert "/home/someone" not in card.text and "No measurements" not in card.text
    pytest.importorskip("matplotlib")
    plots = [name for name in done.files if name.endswith(".png")]
    assert len(plots) == 3
    for name in plots:
        assert f"]({name})" in card.text
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")


def test_tau_is_of_the_longest_blocks_and_speed_of_what_generate_does_by_itself(report, tmp_path):
    whole = numbers_of(report)
    row = whole["summary"]["constant"]

    def published(*names, sampled=False) -> dict:
        """Each method has its place in `names` as its tau and speed-up."""
        rows = {n: row | {"tau": i + 1, "ratio": row["ratio"] | {"value": i + 1}} for i, n in enumerate(names)}
        sampling = whole["settings"]["sampling"] | {"do_sample": sampled}
        summary = {"plain": whole["summary"]["plain"]} | rows
        changes = {"summary": summary, "by_category": {"code": summary, "maths": summary}}
        changes["settings"] = whole["settings"] | {"sampling": sampling}
        (tmp_path / "x.json").write_text(json.dumps(whole | changes))
        measurements = Measurements(tmp_path / "x.json")
        found = {result.metric_type: result.metric_value for result in measurements.eval_results()}
        # In words and in metadata, of all prompts and of a category.
        assert f"| code | {found['tau']:.2f} | {found['speedup']:.2f} (" in measurements.markdown([])
        return found

    assert published("constant") == {"tau": 1, "speedup": 1}
    assert published("constant k=2", "constant k=10", "constant k=4") == {"tau": 2, "speedup": 2}
    assert published("constant k=2", "constant", "adaptive") == {"tau": 2, "speedup": 3}
    assert published("constant tau=3", "coupled", "constant k=2", "adaptive") == {"tau": 3, "speedup": 4}
    assert published("constant", "coupled", "adaptive", sampled=True) == {"tau": 1, "speedup": 3}
    with pytest.raises(ValueError, match="no run of the method `constant`"):
        published("adaptive", "coupled", "constant tau=3", "constant k=2 tau=3")


def test_a_card_that_is_there_keeps_its_words(folder, report, tmp_path):
    words = "# Mine\n\nBy hand, 2.5 times better.\n"
    metadata = {"license": "mit", "base_model": BASE, "tags": ["mine"], "library_name": "dflash"}
    (folder / "README.md").write_text(f"---\n{yaml.dump(metadata)}---\n\n{words}")
    (folder / "LICENSE").write_text("MIT")
    publish(folder, "me/drafter", out=tmp_path / "plain")
    card = ModelCard.load(tmp_path / "plain" / "README.md")
    assert card.text.startswith(f"\n{words}\n## Measured\n\n<!--") and card.text.count("No measurements: ") == 1
    assert card.data.library_name == "dflash" and card.data.tags == ["mine"]
    assert (tmp_path / "plain" / "LICENSE").read_text() == "MIT"
    publish(tmp_path / "plain", "me/drafter", measurements=report, out=tmp_path / "once")
    once = ModelCard.load(tmp_path / "once" / "README.md")
    assert once.text.strip().startswith(words.strip()) and "| constant |" in once.text
    assert "No measurements" not in once.text
    # Again from what came out, with other figures: the old ones are replaced.
    other = numbers_of(report)
    other["summary"]["constant"]["tau"] = 1.987
    (tmp_path / "other.json").write_text(json.dumps(other))
    publish(tmp_path / "once", "me/drafter", measurements=tmp_path / "other.json", out=tmp_path / "twice")
    twice = ModelCard.load(tmp_path / "twice" / "README.md")
    assert twice.text.count("| constant |") == 1 and "| 1.99 |" in twice.text
    assert once.text.split("<!--")[0] == twice.text.split("<!--")[0]
    assert next(r.metric_value for r in twice.data.eval_results if r.metric_type == "tau") == 1.987


def test_a_heading_and_results_of_somebody_else_stay(folder, report, tmp_path):
    theirs = EvalResult("text-generation", "x", "mine", "accuracy", 0.5)
    data = ModelCardData(license="mit", base_model=BASE, model_name="drafter", eval_results=[theirs])
    text = f"---\n{data}\n---\n\n# Mine\n\n## Measured\n\nBy hand: 2.5.\n\n## Limits\n\n![](plots/mine.png)\n"
    (folder / "README.md").write_text(text)
    (folder / "plots").mkdir()
    for name in ("mine.png", "not-shown.png"):
        (folder / "plots" / name).write_bytes(b"x")
    (folder / "LICENSE").write_text("MIT")
    before = (folder / "README.md").read_text()
    for name, source in (("once", folder), ("twice", tmp_path / "once")):
        files = publish(source, "me/drafter", measurements=report, out=tmp_path / name).files
        assert "plots/mine.png" in files and "plots/not-shown.png" not in files
        card = ModelCard.load(tmp_path / name / "README.md")
        assert card.text.count("## Measured") == card.text.count("| constant |") == 1
        assert card.text.index("| constant |") < card.text.index("By hand") < card.text.index("## Limits")
        found = [(r.metric_type, r.metric_value) for r in card.data.eval_results]
        assert found[0] == ("accuracy", 0.5) and len(found) == 7
    assert (folder / "README.md").read_text() == before


def test_a_loaded_drafter_and_one_of_speculators(hub, tmp_path):
    drafter = make_drafter()
    drafter.generation_config.num_assistant_tokens_schedule = None  # speculators' layout holds none
    publish(drafter, "me/a", **SAID)
    drafter.save_pretrained(tmp_path / "z")
    convert(tmp_path / "z", tmp_path / "s", to="speculators", target=BASE)
    publish(tmp_path / "s", "me/b", license="apache-2.0")  # the folder names its target
    a, b = hub.files("me/a"), hub.files("me/b")
    assert a["model.safetensors"] == b["model.safetensors"] and a["config.json"] == b["config.json"]
    theirs = {"README.md": b"# Theirs\n\n![](plots/x.png)\n", "LICENSE": b"By hand", "plots/x.png": b"x"}
    hub.put("me/a", a | theirs | {"plots/y.png": b"y"})
    publish("me/a", "me/c", **SAID)  # from the Hub to the Hub
    c = hub.files("me/c")
    assert "plots/y.png" not in c and b"\n# Theirs\n" in c.pop("README.md")
    assert {name: c[name] for name in ("LICENSE", "plots/x.png")} == {"LICENSE": b"By hand", "plots/x.png": b"x"}
    assert c["model.safetensors"] == a["model.safetensors"]


def test_publishing_again(hub, folder):
    first = publish(folder, "me/drafter", **SAID)
    assert publish(folder, "me/drafter", **SAID).revision == first.revision  # nothing changed: no commit
    old = {"model-00001-of-00002.safetensors": b"old", "model.safetensors.index.json": b"{}", "model.gguf": b"mine"}
    hub.put("me/drafter", hub.files("me/drafter") | old)
    make_drafter(seed=1).save_pretrained(folder)
    second = publish(folder, "me/drafter", **SAID)
    files = hub.files("me/drafter")
    assert set(files) == {*second.files, ".gitattributes", "model.gguf"}  # no old weights beside the new
    assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    branch = publish(folder, "me/drafter", **SAID, revision="next")
    assert hub.repos["me/drafter"].branches["next"] == branch.revision


def on_hub(hub) -> str:
    return hub.files("me/drafter")["README.md"].decode()


def edit_on_hub(hub, old: str, new: str, **files) -> None:
    assert old in on_hub(hub)
    hub.put("me/drafter", hub.files("me/drafter") | {"README.md": on_hub(hub).replace(old, new).encode()})


def test_a_card_that_was_changed_on_the_hub_stays(hub, folder, report, tmp_path):
    pytest.importorskip("matplotlib")
    publish(folder, "me/drafter", **SAID, measurements=report)
    figures = on_hub(hub).split("<!--")[1]
    plots = {name for name in hub.files("me/drafter") if name.endswith(".png")}
    edit_on_hub(hub, "# drafter\n", "# drafter\n\nBy hand.\n")
    edit_on_hub(hub, "- dflash\n", "- by-hand\n")
    edited = ModelCard(on_hub(hub))

    # Without a report: nothing to do. The second time nobody has changed it since the last push.
    head = hub.repos["me/drafter"].branches["main"]
    assert [publish(folder, "me/drafter", **SAID).revision for _ in range(2)] == [head, head]

    # So on a branch that is made.
    publish(folder, "me/drafter", **SAID, revision="next")
    assert hub.files("me/drafter", "next")["README.md"].decode() == on_hub(hub)

    # With other figures: these alone change, and the plot that is drawn no more goes.
    other = numbers_of(report)
    for row in other["summary"].values():
        row["acceptance_by_position"] = row["acceptance_by_position"] and [0.125]
    other["summary"]["constant"]["tau"] = 1.987
    for run in other["runs"]:
        run |= {"accepted": [], "offered": []}
    (tmp_path / "other.json").write_text(json.dumps(other))
    hub.put("me/drafter", hub.files("me/drafter") | {"plots/theirs.png": b"x"})
    publish(folder, "me/drafter", **SAID, measurements=tmp_path / "other.json")
    card = ModelCard(on_hub(hub))
    assert [card.text.split("<!--")[i] for i in (0, 2)] == [edited.text.split("<!--")[i] for i in (0, 2)]
    assert card.data.tags == edited.data.tags and "by-hand" in card.data.tags
    assert "| 1.99 |" in card.text and 1.987 in [result.metric_value for result in card.data.eval_results]
    left = {name for name in hub.files("me/drafter") if name.endswith(".png")}
    assert left == plots - {"plots/bench-acceptance.png"} | {"plots/theirs.png"} != plots

    # Other weights: the figures say whose they are, and are no results of these.
    make_drafter(seed=1).save_pretrained(folder)
    for _ in range(2):
        publish(folder, "me/drafter", **SAID)
        card = ModelCard(on_hub(hub))
        assert card.text.count("These figures are of other weights") == card.text.count("| 1.99 |") == 1
        assert "By hand." in card.text and card.data.eval_results is None
    # By force a new card, with the figures that were there.
    publish(folder, "me/drafter", **SAID, force=True)
    assert "By hand." not in on_hub(hub) and "| 1.99 |" in on_hub(hub) and "by-hand" not in on_hub(hub)
    assert figures.splitlines()[0] in on_hub(hub)


def test_two_cards_that_differ(hub, folder, report, tmp_path):
    """The folder's own replaces the one that an earlier push made of it, and no other."""
    said = f"---\nlicense: apache-2.0\nbase_model: {BASE}\n---\n"
    readme = folder / "README.md"
    readme.write_text(f"{said}# First\n")
    publish(folder, "me/drafter", measurements=report)
    readme.write_text(f"{said}# Second\n")
    publish(folder, "me/drafter", out=tmp_path / "looked-at")  # says that there are no measurements
    publish(tmp_path / "looked-at", "me/drafter")
    card = ModelCard(on_hub(hub))
    assert "# Second" in card.text and "| constant |" in card.text and len(card.data.eval_results) == 6
    edit_on_hub(hub, "# Second", "# Edited")
    before = hub.files("me/drafter")
    readme.write_text(f"{said}# Third\n")
    with pytest.raises(ValueError, match=r"README.md of me/drafter was changed there, .*\(--force\)"):
        publish(folder, "me/drafter")
    assert hub.files("me/drafter") == before
    readme.unlink()
    make_drafter(seed=1).save_pretrained(folder)
    publish(folder, "me/drafter", **SAID)
    assert "# Edited" in on_hub(hub)
    readme.write_text(f"{said}# Third\n")
    with pytest.raises(ValueError, match="changed there"):  # since the last card that came from a folder
        publish(folder, "me/drafter")
    publish(folder, "me/drafter", force=True)
    assert "# Third" in on_hub(hub) and "| constant |" in on_hub(hub)
    edit_on_hub(hub, "# Third", "# Edited")
    readme.write_bytes(hub.files("me/drafter")["README.md"])  # taken over from there
    make_drafter(seed=2).save_pretrained(folder)
    publish(folder, "me/drafter")
    readme.write_text(f"{said}# Fourth\n")
    publish(folder, "me/drafter")
    assert "# Fourth" in on_hub(hub)


def other_drafter(**changes) -> dict[str, bytes]:
    config = make_drafter(**changes).config.to_dict() | {"target_name_or_path": BASE}
    return {"config.json": json.dumps(config, default=str).encode(), "model.safetensors": b"weights"}


SOMETHING_ELSE = {
    "a language model": ({"config.json": b'{"architectures": ["LlamaForCausalLM"]}'}, "LlamaForCausalLM"),
    "files": ({"data.csv": b"1,2", "README.md": b"# Data"}, "README.md, data.csv"),
    "a card with words": ({"README.md": b"---\nlicense: mit\n---\n# My plans"}, "a README.md"),
    "a broken config": ({"config.json": b"{"}, "a config.json that is no drafter's"),
    "another size": (other_drafter(block_size=8), "block_size 8, here 4"),
    "other layers": (other_drafter(target_layer_ids=[0, 1, 2]), r"target_layer_ids \[0, 1, 2\]"),
}


@pytest.mark.parametrize("case", SOMETHING_ELSE)
def test_something_else_is_only_replaced_by_force(case, hub, folder):
    files, message = SOMETHING_ELSE[case]
    sha = hub.put("me/taken", files)
    with pytest.raises(ValueError, match=f"me/taken holds something else: .*{message}.*--force"):
        publish(folder, "me/taken", **SAID)
    assert hub.files("me/taken") == files and not hub.stored
    done = publish(folder, "me/taken", **SAID, force=True)
    assert set(hub.files("me/taken")) == set(done.files)
    assert hub.files("me/taken", sha) == files  # the history has it


def test_the_same_shape_for_another_target(hub, folder):
    publish(folder, "me/drafter", **SAID)
    with pytest.raises(ValueError, match="target someone/some-target, here someone/another"):
        publish(folder, "me/drafter", **SAID | {"base_model": "someone/another"})


def test_a_repository_made_on_the_website_is_empty(hub, folder):
    hub.put("me/new", {".gitattributes": b"", "README.md": b"---\nlicense: mit\n---\n"})
    assert publish(folder, "me/new", **SAID).revision == hub.repos["me/new"].branches["main"]


@pytest.mark.parametrize("where", ["POST .*/commit/", "PUT /lfs/", "POST .*/batch", "POST .*/preupload"])
def test_an_interrupted_upload_goes_on(where, hub, folder):
    hub.refuse.append(where)
    with pytest.raises(OSError, match="403"):
        publish(folder, "me/drafter", **SAID)
    assert set(hub.files("me/drafter")) == {".gitattributes"}  # a commit is whole or not there
    sent = len(hub.stored)
    done = publish(folder, "me/drafter", **SAID)
    assert set(hub.files("me/drafter")) == {*done.files, ".gitattributes"}
    puts = [path for method, path in hub.requests if method == "PUT"]
    # Once the weights are stored they are not sent again.
    assert len(puts) == (1 if sent else 2 if where.startswith("PUT") else 1)
    assert len(hub.repos["me/drafter"].messages) == 2


def test_a_commit_in_between_is_not_overwritten(hub, folder, monkeypatch):
    from huggingface_hub import HfApi

    publish(folder, "me/drafter", **SAID)
    make_drafter(seed=1).save_pretrained(folder)
    upload = HfApi.upload_folder

    def late(self, **kwargs):
        hub.put("me/drafter", hub.files("me/drafter") | {"theirs.txt": b"theirs"})
        return upload(self, **kwargs)

    monkeypatch.setattr(HfApi, "upload_folder", late)
    with pytest.raises(OSError, match="412"):
        publish(folder, "me/drafter", **SAID)
    assert "theirs.txt" in hub.files("me/drafter")


def test_no_token_in_errors(hub, folder, monkeypatch):
    cases = {
        "wrong": "hf_" + "Wr0ng" * 7,
        "with a line break": TOKEN + "\n",  # the HTTP library quotes the whole header
        "not of the usual form": "my secret\x00token",
    }
    for token in cases.values():
        with pytest.raises(OSError) as error:
            publish(folder, "me/drafter", **SAID, token=token)
        shown = "".join(map(str, (error.value, repr(error.value), error.value.__context__, error.value.__cause__)))
        assert token.strip() not in shown and token.strip()[:12] not in shown
    error = OSError("failed")
    error.__cause__ = RuntimeError(f"Bearer {TOKEN} and a secret")
    assert str(without_tokens(error, "a secret")) == "OSError: failed: Bearer *** and ***"
    assert without_tokens(OSError("failed")) is None
    monkeypatch.setenv("HF_TOKEN", cases["wrong"])
    done = CliRunner().invoke(app, ["push", str(folder), "me/drafter", "--license", "mit", "--base-model", BASE])
    assert done.exit_code == 1 and cases["wrong"] not in done.output
    assert "me/drafter" not in hub.repos


BAD = {
    "no owner": (["drafter"], {}, "like owner/name, got 'drafter'"),
    "a space in the name": (["me/a b"], {}, "like owner/name, got 'me/a b'"),
    "a card of another encoding": ([], {}, "README.md is not UTF-8"),
    "no license": ([], {"license": None}, "needs license"),
    "no target": ([], {"base_model": None}, "needs base_model"),
    "a folder as target": ([], {"base_model": "/home/someone/target"}, "target's name on the Hub"),
    "nothing to include": ([], {"include": ["recipe/*"]}, "No file of .* matches 'recipe/"),
    "files of elsewhere": ([], {"include": ["../*"]}, "in the drafter's folder to include, got '../"),
    "a license other than its text": ([], {}, "The LICENSE of the drafter's folder is mit, the card's apache-2.0"),
    "a license other than the card's": (
        [],
        {"license": "mit"},
        "README.md says license: apache-2.0, and mit was given",
    ),
    "a license other than Apache's text": ([], {"license": "mit"}, "folder is apache-2.0, the card's mit"),
    "license without its text": ([], {"license": "mit"}, "put the text of mit there"),
    "no such folder": ([], {"drafter": "nowhere"}, "Expected a drafter's folder or a Hub name"),
    "no report": ([], {"measurements": "missing.json"}, "missing.json"),
    "broken card": ([], {}, "README.md: the metadata between the --- lines cannot be read"),
    "no such report": ([], {"measurements": "config.json"}, "is not a report"),
    "a report without its parts": ([], {"measurements": "part.json"}, "part.json is not a report"),
    "a card with a number of tags": ([], {}, "README.md: the metadata between the --- lines cannot be read"),
    "a card with two licenses": ([], {"license": None}, r"README.md: expected one name as license .*'mit'\]"),
    "data of this machine": ([], {"datasets": ["/home/someone/data.jsonl"]}, "Hub names of the data, got '/home/some"),
}
CARDS = {
    "broken card": "---\nlicense: [\n---\n",
    "a card with a number of tags": "---\ntags: 5\n---\n",
    "a card with two licenses": "---\nlicense:\n- apache-2.0\n- mit\n---\n",
    "a license other than the card's": "---\nlicense: apache-2.0\n---\n",
}
TEXTS = {
    "a license other than its text": "# The MIT License (MIT)\n\nCopyright",
    "a license other than Apache's text": (Path(__file__).parents[1] / "LICENSE").read_text(),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_reaches_no_hub(case, hub, folder, monkeypatch):
    names, changes, message = BAD[case]
    monkeypatch.chdir(folder)
    if case in CARDS:
        (folder / "README.md").write_text(CARDS[case])
    if case in TEXTS:
        (folder / "LICENSE").write_text(TEXTS[case])
    parts = {"schema": 1, "summary": {"constant": {}}, "environment": {"cpu": "x"}}
    (folder / "part.json").write_text(json.dumps(parts))
    if case == "a card of another encoding":
        (folder / "README.md").write_bytes("# Café".encode("latin-1"))
    settings = {"drafter": folder, "repo_id": (names or ["me/drafter"])[0], **SAID} | changes
    with pytest.raises((ValueError, OSError), match=message):
        publish(**settings)
    assert not hub.requests


def sha256_of(tensors: dict) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        content = tensors[name].contiguous().view(torch.uint8).numpy().tobytes()
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}\n".encode() + content)
    return digest.hexdigest()


def test_a_report_is_of_these_weights_and_this_target(folder, report, tmp_path, monkeypatch):
    weights = load_file(folder / "model.safetensors")
    assert numbers_of(report)["drafter"]["weights_sha256"] == sha256_of(weights)

    def published(source=folder, target=None, **drafter) -> None:
        changed = numbers_of(report)
        changed["drafter"] |= drafter
        changed["target"]["name"] = target or changed["target"]["name"]
        (tmp_path / "x.json").write_text(json.dumps(changed))
        publish(source, "me/x", **SAID, measurements=tmp_path / "x.json", out=tmp_path / "out")
        assert (
            f"(weights SHA-256 {changed['drafter']['weights_sha256'][:12]}...)"
            in ModelCard.load(tmp_path / "out" / "README.md").text
        )
        shutil.rmtree(tmp_path / "out")

    published(target=BASE)
    published(target="/home/someone/target")
    in_bfloat16 = DFlashDraftModel.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    published(dtype="bfloat16", weights_sha256=sha256_of(in_bfloat16))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "target").mkdir(parents=True)
    published(target="models/target")  # a folder, though it might be a Hub name
    make_drafter(seed=1).save_pretrained(tmp_path / "other")  # of the same size
    other = sha256_of(load_file(tmp_path / "other" / "model.safetensors"))
    of_both = (
        f"of other weights .*{sha256_of(weights)[:12]}.*{other[:12]}.*dflash-hf bench {BASE} {tmp_path}/other gsm8k"
    )
    refused = {
        of_both: {"source": tmp_path / "other"},
        "of other weights": {"dtype": "bfloat16"},
        f"target someone/else, base_model is {BASE}.*dflash-hf bench {BASE} ": {"target": "someone/else"},
        "names the drafter's weights; measure again": {"weights_sha256": None},
        "is not a report of this version's": {"dtype": "float99"},
    }
    for message, changes in refused.items():
        with pytest.raises(ValueError, match=message):
            published(**changes)
        assert not (tmp_path / "out").exists()


def test_weights_have_one_name(tmp_path):
    """As loaded in any dtype, and as stored in any number of files."""
    own = {"own_tensors": {"lm_head.weight": [20, 32], "d2t": [20]}}
    for name, settings in {"small": {}, "own": own}.items():
        drafter = make_drafter(**settings)
        drafter.save_pretrained(tmp_path / name, max_shard_size="10KB")
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 1
        for dtype in (torch.float32, torch.bfloat16):
            weights = DFlashDraftModel.from_pretrained(tmp_path / name, dtype=dtype).state_dict()
            assert checkpoint_sha256(read(tmp_path / name), dtype) == sha256_of(weights)


def test_notes_on_engines(tmp_path):
    from dflash_hf.hub.card import engine_notes

    table = {
        "": ({}, "both read every option"),
        "swa": ({"dflash_config": {"use_swa": True, "swa_window_size": 4}}, "SGLang .* does not read `use_swa`"),
        "anchor": ({"dflash_config": {"sample_from_anchor": True}}, "vLLM .* refuses `sample_from_anchor`"),
        "cap": ({"dflash_config": {"final_logit_softcapping": 9.0}}, "`final_logit_softcapping` was not looked up"),
        "own": ({"own_tensors": {"lm_head.weight": [20, 32], "d2t": [20]}}, "the own `lm_head`, the own `d2t`"),
    }
    for name, (settings, message) in table.items():
        make_drafter(**settings).save_pretrained(tmp_path / f"x{name}")
        (note,) = engine_notes(read(tmp_path / f"x{name}"))
        assert re.search(message, note), note


def test_command_writes_to_a_folder(folder, tmp_path):
    done = CliRunner().invoke(
        app,
        [
            *("push", str(folder), "me/drafter", "--out", str(tmp_path / "out"), "--license", "apache-2.0"),
            *("--base-model", BASE, "--dataset", "a/b", "--dataset", "c/d"),
        ],
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{tmp_path / 'out'}: ") and done.stdout.endswith(" files, nothing uploaded\n")
    assert ModelCard.load(tmp_path / "out" / "README.md").data.datasets == ["a/b", "c/d"]
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(make_drafter().state_dict())
