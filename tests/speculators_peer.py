"""Run speculators' own DFlash model on folders that we wrote: a process of its own, because of the stand-ins."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock

import torch
from transformers import PreTrainedModel  # noqa: F401  (looks for packages: before the stand-ins)

for name in ("openai", "openai.types", "openai.types.chat", "openai.types.completion", "datasets"):
    sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))  # speculators imports them and needs none here

from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig, core  # noqa: E402

ANCHOR, LENGTH = 15, 20
folder, results = Path(sys.argv[1]), {}
core.select_anchors = lambda loss_mask, count, block: (torch.tensor([ANCHOR]), torch.tensor([True]))
for case in sys.argv[2:]:
    config = DFlashSpeculatorConfig.from_pretrained(folder / f"{case}-s")
    config.transformer_layer_config._attn_implementation = "eager"
    model = DFlashDraftModel.from_pretrained(folder / f"{case}-s", config=config).eval()
    torch.manual_seed(0)
    width = model.fc.in_features
    features, ids = torch.randn(1, LENGTH, width), torch.randint(8, config.target_vocab_size, (1, LENGTH))
    with torch.no_grad():
        hidden = model._backbone_forward(
            features, ids, torch.ones(1, LENGTH), torch.randn(1, LENGTH, model.hidden_size),
            torch.zeros(1, LENGTH, dtype=torch.long), None, max_anchors=1,
        )[0]  # fmt: skip
    block = torch.full((1, config.block_size), config.mask_token_id)
    block[0, 0] = ids[0, ANCHOR]
    positions = torch.arange(ANCHOR + config.block_size)[None]
    results[case] = {"hidden": hidden, "block": block, "positions": positions, "features": features[:, :ANCHOR]}
torch.save(results, folder / "hidden.pt")
