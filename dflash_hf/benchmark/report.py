"""What a measurement gives: the runs, their summary, JSON, and a table."""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch

from .statistics import ratio_of_medians

SCHEMA = 1
SHOWN_SHARES = ("drafting", "verifying", "other")

# How the bare passes of the cycle efficiency run.
BARE_PASSES = {
    "as_it_is": "as transformers runs them",
    "without_target_copies": "with the fastest kernels that need no copy of the target",
    "best_kernels": "with the fastest kernels of all",
}


@dataclass
class Report:
    """The content of the JSON file; its schema is in docs/benchmark.md.

    Example:
        >>> report = bench(target, drafter, prompts, tokenizer=tokenizer)                      # doctest: +SKIP
        >>> report.print(); report.save("bench.json")                                          # doctest: +SKIP
    """

    settings: dict
    environment: dict
    prompts: dict
    target: dict
    drafter: dict
    runs: list[dict] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    memory: dict[str, dict] = field(default_factory=dict)
    cycle_efficiency: dict | None = None
    interrupted: bool = False

    def summary(self, where: Callable[[dict], bool] = lambda run: True) -> dict[str, dict]:
        """Figures of each method over the runs that `where` keeps; methods without a run are left out."""
        runs = [run for run in self.runs if where(run)]
        plain = {(r["batch"], r["repeat"]): r["tokens_per_s"] for r in runs if r["method"] == "plain"}
        figures = {}
        for name in self.settings["methods"]:
            mine = [run for run in runs if run["method"] == name]
            if mine:
                figures[name] = self._figures(name, mine, plain)
        return figures

    def _figures(self, name: str, runs: list[dict], plain: dict) -> dict:
        paired: dict[int, list] = {}
        for run in runs:
            if (key := (run["batch"], run["repeat"])) in plain:
                paired.setdefault(run["batch"], []).append((run["tokens_per_s"], plain[key]))
        ratio = ratio_of_medians(
            [[pair[0] for pair in pairs] for pairs in paired.values()],
            [[pair[1] for pair in pairs] for pairs in paired.values()],
            seed=self.settings["seed"],
        )
        seconds = sum(run["seconds"] for run in runs)
        cycles = sum(run["cycles"] or 0 for run in runs)
        accepted, offered = (_sum_by_slot([run[key] for run in runs]) for key in ("accepted", "offered"))
        shares: dict[str, float | None] = {}
        for share, figure in (("prefill", "first_token_s"), ("drafting", "drafting_s"), ("verifying", "verifying_s")):
            times = [run[figure] for run in runs]
            shares[share] = None if None in times else sum(times) / seconds
        known = [share for share in shares.values() if share is not None]
        shares["other"] = 1 - sum(known) if len(known) == len(shares) else None
        compared = [equal for run in runs for equal in run.get("ids_equal", ())]
        differences = [difference for run in runs for difference in run.get("differences", ())]
        return {
            "runs": len(runs),
            "tokens_per_s": median(run["tokens_per_s"] for run in runs),
            "ratio": None if ratio is None else dict(zip(("value", "low", "high"), ratio, strict=True)),
            "tau": sum(run["committed"] for run in runs if run["cycles"]) / cycles if cycles else None,
            "acceptance_by_position": [a / o for a, o in zip(accepted, offered, strict=True)],
            "offered_by_position": offered,
            "shares": shares,
            "first_token_s": median(run["first_token_s"] for run in runs),
            "memory": self.memory.get(name),
            "texts": {
                "compared": len(compared),
                "equal": sum(compared),
                "near_ties": sum(difference["near_tie"] for difference in differences),
                "real": sum(not difference["near_tie"] for difference in differences),
            },
        }

    def to_dict(self) -> dict:
        """JSON-ready: everything, with the summary over all runs, by category and by context."""

        def of(key: str, value) -> dict:
            return self.summary(lambda run: run[key] == value)

        groups = {}
        for key in ("category", "context"):
            values = sorted({run[key] for run in self.runs if run[key] is not None})
            groups[f"by_{key}"] = {str(value): of(key, value) for value in values}
        return {"schema": SCHEMA, **asdict(self), "summary": self.summary(), **groups}

    def save(self, path: str | os.PathLike) -> None:
        """Write the JSON under a temporary name, then rename: an older file is replaced whole or not at all."""
        write_json(path, self.to_dict())

    def print(self) -> None:
        """Print the table (needs the package `rich`)."""
        from rich.console import Console
        from rich.table import Table

        table = Table(title="interrupted: what was measured" if self.interrupted else None)
        table.add_column("method", no_wrap=True)
        shares_title, memory_title = "draft/verify/other %", "MiB over plain"
        for name in ("tokens/s", "x plain", "95%", "tau", shares_title, "first token", memory_title, "same ids"):
            table.add_column(name, justify="right", no_wrap=True)
        for name, row in self.summary().items():
            ratio, shares, memory = row["ratio"], row["shares"], row["memory"] or {}
            texts, over_plain = row["texts"], memory.get("over_plain_mib")
            same = "" if not texts["compared"] else f"{texts['equal']}/{texts['compared']}"
            same += f", {texts['near_ties']} ties" if texts["near_ties"] else ""
            same += f", {texts['real']} REAL" if texts["real"] else ""
            table.add_row(
                name,
                f"{row['tokens_per_s']:.1f}",
                f"{ratio['value']:.2f}" if ratio else "",
                f"{ratio['low']:.2f} - {ratio['high']:.2f}" if ratio else "",
                "" if row["tau"] is None else f"{row['tau']:.2f}",
                "/".join(f"{100 * shares[key]:.0f}" for key in SHOWN_SHARES if shares[key] is not None),
                f"{1e3 * row['first_token_s']:.0f} ms",
                "" if over_plain is None or name == "plain" else f"{over_plain:+.0f}",
                same,
            )
        console = Console()
        needed = console.measure(table, options=console.options.update(max_width=1000)).maximum
        console.width = max(console.width, needed)  # cells cut short would say nothing
        console.print(table)
        for name, reason in self.refused.items():
            console.print(f"{name}: {reason}", markup=False)
        if self.cycle_efficiency is not None:
            versions = {name: self.cycle_efficiency[name]["efficiency"] for name in BARE_PASSES}
            figures = ", ".join(f"{value:.3f} {BARE_PASSES[name]}" for name, value in versions.items())
            console.print(
                f"cycle efficiency of {self.cycle_efficiency['method']}, bare passes over a cycle: {figures}"
            )


def write_json(path: str | os.PathLike, content) -> None:
    """Write JSON under a temporary name, then rename: an older file is replaced whole or not at all."""
    path = Path(path)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)


def _sum_by_slot(lists: list[list[int]]) -> list[int]:
    length = max(map(len, lists), default=0)
    return [sum(values[slot] for values in lists if slot < len(values)) for slot in range(length)]


def model_facts(model) -> dict:
    """What a report says about a model. Weights are counted once where modules share them."""
    parameters = {p.data_ptr(): p for p in model.parameters()}.values()
    return {
        "name": model.config.name_or_path or type(model).__name__,
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in parameters),
        "weights_mib": round(sum(p.numel() * p.element_size() for p in parameters) / 2**20, 1),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "attention": model.config._attn_implementation,
    }


@torch.no_grad()
def weights_sha256(names: Iterable[str], tensor: Callable[[str], torch.Tensor], dtype: torch.dtype) -> str:
    """SHA-256 over name, dtype, shape and content of a model's tensors, one at a time and in the order of their names.

    Args:
        names: of the tensors.
        tensor: gives the one of a name.
        dtype: what floats are taken in, so that a checkpoint has the sum of the model that was loaded from it in
            that dtype.

    Example:
        >>> weights_sha256(["x"], lambda name: torch.ones(2), torch.float32)[:12]
        '202183560874'
    """
    digest = hashlib.sha256()
    for name in sorted(names):
        value = tensor(name)
        value = value.to("cpu", dtype if value.is_floating_point() else None).contiguous()
        digest.update(f"{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def environment(device: torch.device) -> dict:
    """Versions and hardware."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("dflash-hf", "torch", "transformers", "dflash", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "versions": versions,
        "platform": f"{sys.platform} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
