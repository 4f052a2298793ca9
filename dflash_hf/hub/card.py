"""The model card of a drafter: metadata that the Hub understands, usage, and measured figures only."""

import json
import os
import re
import shlex
from dataclasses import fields
from pathlib import Path, PurePath

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..benchmark.report import Report, weights_sha256
from ..checkpoints import Checkpoint

BEGIN, END = "<!-- measured with dflash-hf bench -->", "<!-- end of what was measured -->"
SECTION = re.compile(rf"{re.escape(BEGIN)}\s*(.*?){re.escape(END)}", flags=re.DOTALL)
NOTHING = "No measurements: no report of `dflash-hf bench`, which finds acceptance and speed, came with this card.\n"
OTHERS = "These figures are of other weights than those that are here, which were not measured.\n\n"
OURS = ("tau", "speedup")  # the evaluation results that come from a report
TAGS = ("dflash", "speculative-decoding", "draft-model")
# Versions whose source the notes on serving engines were read from; nothing was run there.
VLLM, SGLANG = "0.33", "0.5.23"


class Measurements:
    """A report of `dflash-hf bench`, as JSON.

    Args:
        path: the JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no such report, or has no run of the drafter.
    """

    def __init__(self, path: str | os.PathLike):
        odd = ValueError(
            f"{path} is not a report of this version's `dflash-hf bench --out`, which names the drafter's weights; "
            "measure again."
        )
        try:
            self.report = json.loads(Path(path).read_text(encoding="utf-8"))
            known = self.report["schema"] == 1 and self.report["summary"] and self.report["environment"]
        except (KeyError, TypeError, ValueError):
            known = False
        if not known:
            raise odd
        # Simulated drafts say nothing about this drafter. Tau is of full blocks, or of the longest that ran, so that
        # drafters compare; the speed is that of what generate() does by itself, adaptive lengths.
        self.methods = [name for name in self.report["summary"] if "tau=" not in name]
        lengths = {}
        for name in self.methods:
            if constant := re.fullmatch(r"constant(?: k=(\d+))?", name):
                lengths[name] = float(constant[1] or "inf")
        if not lengths:
            raise ValueError(f"{path} has no run of the method `constant`, which tau is counted on.")
        self.method = max(lengths, key=lengths.__getitem__)
        self.default = "adaptive" if "adaptive" in self.methods else self.method
        try:
            self.target, self.drafter = (self.report[role]["name"] for role in ("target", "drafter"))
            self.dtype = getattr(torch, self.report["drafter"]["dtype"])
            self.weights = self.report["drafter"]["weights_sha256"]
            self.eval_results()  # whatever the card will ask of it
            self.markdown([])
        except (AttributeError, KeyError, TypeError, ValueError):
            raise odd from None

    @property
    def prompts(self) -> str:
        """Name of the prompts: a data set, or a file without its folder."""
        return _name(str(self.report["prompts"].get("source", "prompts")))

    def draw(self, folder: Path) -> list[Path]:
        """PNG plots; none where matplotlib is not installed."""
        try:
            from ..benchmark.plots import draw

            names = [field.name for field in fields(Report)]
            report = Report(**{name: self.report[name] for name in names if name in self.report})
            report.settings = report.settings | {"methods": self.methods}
            return draw(report, folder)
        except ModuleNotFoundError:
            return []

    def eval_results(self) -> list[EvalResult]:
        """Tau of full blocks and speed-up of the default method, over all prompts and by category (model-index)."""
        groups = {"": self.report["summary"], **self.report.get("by_category", {})}
        results = []
        for category, summary in groups.items():
            row = summary.get(self.method)
            if row is None or (category and len(groups) == 2):  # a single category is all there is
                continue
            values = [("tau", "tokens committed per cycle (tau)", row["tau"])]
            ratio = (summary.get(self.default) or row)["ratio"]
            values.append(("speedup", "tokens/s over plain generate()", (ratio or {}).get("value")))
            results += [
                EvalResult(
                    task_type="text-generation",
                    dataset_type=self.prompts,
                    dataset_name=f"{self.prompts} ({category})" if category else self.prompts,
                    dataset_config=category or None,  # results of one data set and config share one name
                    metric_type=kind,
                    metric_name=name,
                    metric_value=round(value, 3),
                )
                for kind, name, value in values
                if value is not None
            ]
        return results

    def markdown(self, plots: list[str]) -> str:
        """The section of the card: machine, command, tables and plots."""
        report, environment, settings = self.report, self.report["environment"], self.report["settings"]
        versions = environment["versions"]
        machine = environment["accelerator"] or f"{environment['cpu']}, {_count(environment['threads'], 'thread')}"
        sampling = settings["sampling"]
        how = "greedy"
        if sampling["do_sample"]:
            how = "sampled with " + ", ".join(f"{key} {sampling[key]}" for key in ("temperature", "top_k", "top_p"))
        prompts = f"{report['prompts'].get('count', '?')} prompts of {self.prompts}"
        if sha256 := report["prompts"].get("sha256"):
            prompts += f" (SHA-256 {sha256[:12]}...)"
        lines = [
            f"On {machine}, torch {versions['torch']}, transformers {versions['transformers']}, target in "
            f"{report['target']['dtype']}, drafter in {report['drafter']['dtype']} (weights SHA-256 "
            f"{self.weights[:12]}...): {prompts}, {how}, at most {settings['max_new_tokens']} new tokens, "
            f"{_count(settings['repeats'], 'round')}, batches of {settings['batch_size']}.",
            "",
        ]
        if report.get("interrupted"):
            lines += ["The measurement was interrupted; these are the runs that were complete.", ""]
        if command := report["prompts"].get("command"):
            lines += ["```bash", shlex.join(_option(part) for part in shlex.split(command)), "```", ""]
        lines += self._methods_table(report["summary"])
        categories = report.get("by_category", {})
        if len(categories) > 1:
            whose = f"tau of `{self.method}`, speed of `{self.default}`"
            lines += ["", f"By category, {whose}:", "", *self._categories_table(categories)]
        row = report["summary"][self.method]
        accepted = " ".join(f"{share:.2f}" for share in row["acceptance_by_position"])
        lines += ["", f"Drafts accepted by position, of the cycles that offered one there: {accepted}"]
        for plot in plots:
            lines += ["", f"![{PurePath(plot).stem.replace('-', ' ')}]({plot})"]
        return "\n".join(lines)

    def _methods_table(self, summary: dict) -> list[str]:
        lines = ["| method | tokens/s | x plain (95% interval) | tau | same text as plain |", "|---|---|---|---|---|"]
        for name in self.methods:
            row = summary[name]
            ratio, texts = row["ratio"], row["texts"]
            same = ""
            if texts["compared"]:
                same = f"{texts['equal']} of {texts['compared']}"
                same += f", {texts['near_ties']} differ at a near-tie" if texts["near_ties"] else ""
                same += f", {texts['real']} differ otherwise" if texts["real"] else ""
            over = "" if ratio is None else f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
            over = "1" if name == "plain" else over
            tau = "" if row["tau"] is None or name == "plain" else f"{row['tau']:.2f}"
            lines.append(f"| {name} | {row['tokens_per_s']:.1f} | {over} | {tau} | {same} |")
        return lines

    def _categories_table(self, categories: dict) -> list[str]:
        lines = ["| category | tau | x plain (95% interval) |", "|---|---|---|"]
        for category, summary in categories.items():
            if (row := summary.get(self.method)) is not None:
                ratio = (summary.get(self.default) or row)["ratio"]
                over = "" if ratio is None else f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
                lines.append(f"| {category} | {'' if row['tau'] is None else format(row['tau'], '.2f')} | {over} |")
        return lines


def write_card(
    checkpoint: Checkpoint,
    repo_id: str,
    *,
    base_model: str,
    license: str,
    datasets: list[str] | None = None,
    language: list[str] | None = None,
    measurements: Measurements | None = None,
    plots: list[str] | None = None,
    written: str | None = None,
    published: str | None = None,
) -> ModelCard:
    """Write the card of a drafter, or fill in one that is there.

    A card that is there keeps its text and its metadata; what was measured replaces what is between the two comments
    `BEGIN` and `END`, or comes at its end. Without new measurements the earlier figures stay; if they are of other
    weights, the card says so, and its metadata no longer has them.

    Args:
        checkpoint: the drafter, in z-lab's layout.
        repo_id: its name on the Hub.
        base_model: Hub name of the target.
        plots: paths of the plots in the repository.
        written: the text of a README.md that is there.
        published: of the one on the Hub; its figures stay where `written` has none.

    Example:
        >>> write_card(read("drafter"), "me/drafter", base_model="Qwen/Qwen3-8B", license="mit")    # doctest: +SKIP
    """
    section, results = NOTHING, None
    if measurements is not None:
        section, results = measurements.markdown(plots or []) + "\n", measurements.eval_results()
    elif (figures := _figures(written) or _figures(published)) is not None:
        section, results = figures
        named = re.search(r"drafter in (b?float\d+) \(weights SHA-256 (\w+)", section)
        if named and not checkpoint_sha256(checkpoint, getattr(torch, named[1])).startswith(named[2]):
            section, results = OTHERS + section, []
    section = f"{BEGIN}\n{section}{END}"
    if written is None:
        card = ModelCard(f"---\n{{}}\n---\n\n{_text(checkpoint, repo_id, base_model, section)}")
        tags, card.data.tags = list(TAGS), None
    else:
        card, tags = ModelCard(written), []
        if SECTION.search(card.text) is None:
            heading = re.compile(r"^## Measured *\n+", flags=re.MULTILINE)
            if heading.search(card.text) is None:
                card.text = f"{card.text.rstrip()}\n\n## Measured\n\n"
            at = next(heading.finditer(card.text)).end()
            card.text = f"{card.text[:at]}{BEGIN}{END}\n\n{card.text[at:]}"
        card.text = SECTION.sub(lambda _: section, card.text, count=1)
    have = card.data.to_dict()
    new = {
        "license": license,
        "base_model": base_model,
        "base_model_relation": "adapter",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "language": language,
        "datasets": datasets,
        "tags": list(dict.fromkeys([*(have.get("tags") or []), *tags])) or None,
    }
    # What the caller says wins over the card that is there; what is only a default does not.
    defaults = {"base_model_relation", "library_name", "pipeline_tag"}
    have |= {key: value for key, value in new.items() if value and not (key in defaults and have.get(key))}
    if results is not None:
        have.pop("model-index", None)
        # Results by somebody else, of other metrics, are theirs.
        others = [r for r in card.data.eval_results or [] if r.metric_type not in OURS]
        name = card.data.model_name if others else repo_id.split("/")[-1]
        have |= {"model_name": name, "eval_results": [*others, *results]} if others or results else {}
    card.data = ModelCardData(**have)
    return card


def _figures(card: str | None) -> tuple[str, list[EvalResult]] | None:
    """What an earlier report put on a card: the section and the evaluation results."""
    section = SECTION.search(card or "")
    if section is None or section[1] in ("", NOTHING):
        return None
    results = ModelCard(card).data.eval_results or []
    return section[1].removeprefix(OTHERS), [result for result in results if result.metric_type in OURS]


def checkpoint_sha256(checkpoint: Checkpoint, dtype: torch.dtype) -> str:
    """As a report names the weights of the drafter when it ran in this dtype."""
    return weights_sha256(checkpoint.files, checkpoint.tensor, dtype)


def is_hub_name(name) -> bool:
    """Whether `name` can be a model's name on the Hub, `owner/name`."""
    if not isinstance(name, str) or name.count("/") != 1:
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def hub_name(name) -> bool:
    """The same, and no folder here has that name."""
    return is_hub_name(name) and not Path(name).is_dir()


def _name(path: str) -> str:
    """A path without what it says about this machine."""
    return PurePath(path).name if os.path.isabs(path) or path.startswith((".", "~")) else path


def _option(part: str) -> str:
    """The same for a word of a command, such as `--out=/home/me/bench.json`."""
    name, equals, value = part.partition("=")
    return f"{name}={_name(value)}" if equals and name.startswith("-") else _name(part)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _text(checkpoint: Checkpoint, repo_id: str, base_model: str, section: str) -> str:
    config = checkpoint.config
    layers = ", ".join(map(str, config.target_layer_ids or []))
    own = [name.removesuffix(".weight") for name in checkpoint.own_tensors]
    tables = f"Own tensors: {', '.join(own)}." if own else "It borrows the target's embedding table and LM head."
    notes = "\n".join(f"- {note}" for note in engine_notes(checkpoint))
    return f"""# {repo_id.split("/")[-1]}

A DFlash drafter ([arXiv 2602.06036](https://arxiv.org/abs/2602.06036)) for [{base_model}](https://huggingface.co/{base_model}): speculative decoding that does not change the target's output. {_count(config.num_hidden_layers, "layer")}, {checkpoint.num_parameters / 1e6:.1f} M parameters, blocks of {config.block_size} with {_count(config.num_drafts, "draft")} a pass, features of target layers {layers} (counted from 0), mask token {config.mask_token_id}. {tables}

## Use

With transformers 5.24 or newer and nothing else; the code is in this repository.

```python
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained("{base_model}", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("{base_model}")
drafter = AutoModel.from_pretrained("{repo_id}", trust_remote_code=True, dtype=target.dtype)

inputs = tokenizer("The capital of France is", return_tensors="pt")
output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=64)
print(tokenizer.decode(output[0]), drafter.last_run)
```

`trust_remote_code=True` runs the Python files of this repository: read them, and pin the commit that you read with
`revision=`. Without the flag, transformers takes the folder for a Qwen3 language model with random weights.

vLLM, not run here:

```bash
vllm serve {base_model} --speculative-config '{{"method": "dflash", "model": "{repo_id}", "num_speculative_tokens": {config.num_drafts}}}'
```

SGLang, not run here:

```bash
python -m sglang.launch_server --model-path {base_model} --speculative-algorithm DFLASH --speculative-draft-model-path {repo_id}
```

{notes}

## Measured

{section}
"""  # noqa: E501  (paragraphs and commands are one line each)


def engine_notes(checkpoint: Checkpoint) -> list[str]:
    """What the serving engines make of this drafter's options, as read from their source."""
    config, own = checkpoint.config, checkpoint.own_tensors
    ignored = [f"`{name}`" for name in ("use_swa", "target_hidden_size") if (config.dflash_config or {}).get(name)]
    ignored += [f"the own `{name.removesuffix('.weight')}`" for name in own]
    unknown = [name for name in ("input_embedding_scale", "output_multiplier") if config.option(name, 1.0) != 1.0]
    unknown += ["final_logit_softcapping"] if config.option("final_logit_softcapping") else []
    unknown += [] if config.is_neox_style else ["is_neox_style"]
    notes = []
    if ignored:
        notes.append(f"SGLang {SGLANG} does not read {', '.join(ignored)} of this drafter: expect poor drafts.")
    if config.option("sample_from_anchor", False):
        notes.append(f"vLLM {VLLM} refuses `sample_from_anchor`, which this drafter has.")
    if config.option("add_swa_attention_sink_bias", False) and not all(config.layer_sinks):
        notes.append(f"vLLM {VLLM} gives every layer an attention sink, this drafter only its sliding ones.")
    if any(config.layer_sinks):
        notes.append("Whether SGLang knows attention sinks, which this drafter has, was not looked up.")
    if unknown:
        notes.append(f"Whether the two read {', '.join(f'`{name}`' for name in unknown)} was not looked up.")
    return notes or [
        f"By the source of vLLM {VLLM} and SGLang {SGLANG}, both read every option that this drafter has."
    ]
