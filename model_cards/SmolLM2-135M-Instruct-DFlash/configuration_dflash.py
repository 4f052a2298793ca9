"""DFlashConfig: one view of a drafter's config.json, whichever of z-lab's spellings it was written in."""

from typing import Any

import transformers
from packaging.version import Version

# AutoConfig imports this file alone, and everything else of the drafter imports it first.
MINIMUM_TRANSFORMERS = "5.24"
if Version(transformers.__version__) < Version(MINIMUM_TRANSFORMERS):
    raise ImportError(
        f"DFlash drafters need transformers >= {MINIMUM_TRANSFORMERS}, found {transformers.__version__}: "
        f'pip install -U "transformers>={MINIMUM_TRANSFORMERS}"'
    )

from transformers.configuration_utils import PreTrainedConfig  # noqa: E402  (after the version check)

# What `AutoX.from_pretrained(folder, trust_remote_code=True)` resolves to. AutoModelForCausalLM is named too because
# `model_type: "qwen3"` would otherwise build a Qwen3ForCausalLM with random weights from the folder, without a word.
AUTO_MAP = {
    "AutoConfig": "configuration_dflash.DFlashConfig",
    "AutoModel": "modeling_dflash.DFlashDraftModel",
    "AutoModelForCausalLM": "modeling_dflash.DFlashDraftModel",
}

# Every entry of `dflash_config` that means something here, if only a refusal.
OPTIONS = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "target_hidden_size",
    "causal",
    "use_swa",
    "swa_window_size",
    "attention_sink_bias",
    "add_swa_attention_sink_bias",
    "attention_value_scale",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    "sample_from_anchor",
    "selector_rank",
)


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Layer ids of a checkpoint that names none: spread from the second to the third-to-last layer (paper, section 4).

    >>> default_target_layer_ids(36, 5)
    [1, 9, 17, 25, 33]
    """
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    return [round(1 + k * (num_target_layers - 4) / (num_draft_layers - 1)) for k in range(num_draft_layers)]


class DFlashConfig(PreTrainedConfig):
    """Configuration of a DFlash drafter, in the layout of z-lab's checkpoints.

    The file says `model_type: "qwen3"` because that is what vLLM and SGLang expect of a DFlash folder. Options live in
    the nested `dflash_config`; `block_size`, `mask_token_id` and `target_layer_ids` may stand there or at top level
    (the nested one wins) and are attributes here. Everything else of `dflash_config` is kept as it came and read
    through the properties below.

    Args:
        vocab_size: vocabulary of the TARGET, whose embedding table and head are borrowed.
        hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim:
            sizes of the drafter's Qwen3-style layers.
        num_target_layers: decoder layers of the target; only used where `target_layer_ids` is absent.
        target_layer_ids: target layers whose OUTPUTS are the context features, counted from 0
            (`hidden_states[i + 1]` in transformers).
        block_size: tokens in a block, the anchor included.
        target_hidden_size: width of the target's hidden states, where it is not `hidden_size`.
        mask_token_id: id whose embedding stands at the slots to fill.
        layer_types: `"full_attention"` or `"sliding_attention"` for every layer.
        sliding_window: window of the sliding layers, in tokens. Read raw: Qwen3's `use_sliding_window` has no say.
        is_causal: causality of all layers; unset, see `layer_causal`.
        dflash_config: the nested options.

    Example:
        >>> config = DFlashConfig(num_target_layers=36, num_hidden_layers=5, dflash_config={"mask_token_id": 151669})
        >>> config.target_layer_ids, config.block_size, config.num_drafts
        ([1, 9, 17, 25, 33], 16, 15)
    """

    model_type = "qwen3"

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    layer_types: list[str] | None = None
    use_sliding_window: bool = False
    sliding_window: int | None = None
    is_causal: bool | None = None
    is_neox_style: bool = True
    num_target_layers: int | None = None
    block_size: int | None = None
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    target_hidden_size: int | None = None
    dflash_config: dict | None = None
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        if not isinstance(self.dflash_config, dict | None):
            raise ValueError(f"config.json: dflash_config must be an object, got {self.dflash_config!r}.")
        self.dflash_config = dict(self.dflash_config or {})
        for name in ("block_size", "mask_token_id", "target_layer_ids", "target_hidden_size"):
            if self.dflash_config.get(name) is not None:
                setattr(self, name, self.dflash_config[name])
        if self.block_size is None:
            self.block_size = 16  # the paper's
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.target_layer_ids is None and self.num_target_layers is not None:
            self.target_layer_ids = default_target_layer_ids(self.num_target_layers, self.num_hidden_layers)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        # DynamicCache reads these two: without layer types it would give every layer the window.
        self.layer_types = list(self.layer_types or ["full_attention"] * self.num_hidden_layers)
        if self.rope_parameters:
            # to_dict() writes both spellings; the newer one is complete.
            kwargs.pop("rope_scaling", None)
            if "rope_theta" in self.rope_parameters:
                kwargs.pop("rope_theta", None)
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """The z-lab layout, written in every spelling that a known reader looks for."""
        output = super().to_dict()
        nested = dict(self.dflash_config or {})
        for name in ("block_size", "mask_token_id", "target_layer_ids"):
            if (value := getattr(self, name)) is not None:
                nested[name] = value
        output["dflash_config"] = nested
        if self.target_hidden_size != self.hidden_size:
            nested["target_hidden_size"] = self.target_hidden_size
        for name in ("mask_token_id", "target_layer_ids", "target_hidden_size"):
            output.pop(name, None)
        rope = self.rope_parameters or {}
        if "rope_theta" in rope:
            output["rope_theta"] = rope["rope_theta"]
            scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
            output["rope_scaling"] = None if scaling.get("rope_type", "default") == "default" else scaling
        # transformers' Qwen3Config, which the serving engines read the file with, drops the window without this; and
        # SGLang 0.5 looks for causality at top level only.
        if any(self._slides[0]):
            output["use_sliding_window"] = True
        causal = nested.get("causal") if self.is_causal is None else self.is_causal
        output.pop("is_causal", None)
        if causal is not None:
            output["is_causal"] = causal
        output["architectures"] = ["DFlashDraftModel"]
        output["auto_map"] = dict(AUTO_MAP)
        return output

    def option(self, name: str, default: Any = None) -> Any:
        """An option of `dflash_config`, or of the top level where the nested one does not name it."""
        value = (self.dflash_config or {}).get(name)
        if value is None:
            value = getattr(self, name, None)
        return default if value is None else value

    @property
    def num_drafts(self) -> int:
        """Tokens proposed by a full block: the mask slots, and the anchor's slot too under `sample_from_anchor`."""
        return self.block_size - (0 if self.option("sample_from_anchor", False) else 1)

    @property
    def _slides(self) -> tuple[list[bool], bool]:
        """Whether each layer slides, and whether that is due to `use_swa` alone."""
        slides = [layer_type == "sliding_attention" for layer_type in self.layer_types]
        if self.option("use_swa", False) and not any(slides):
            return [True] * self.num_hidden_layers, True
        return slides, False

    @property
    def layer_windows(self) -> list[int | None]:
        """Window of each layer in tokens, None where it sees everything."""
        slides, _ = self._slides
        window = self.option("swa_window_size", self.sliding_window)
        if any(slides) and window is None:
            raise ValueError(
                "config.json has sliding layers but neither `dflash_config.swa_window_size` nor `sliding_window`; "
                "set one of them to the window that the drafter was trained with."
            )
        return [window if slide else None for slide in slides]

    @property
    def layer_causal(self) -> list[bool]:
        """Causality of each layer: `is_causal`, else `dflash_config.causal`, else causal exactly where it slides.

        Layers that slide only because of `use_swa` are bidirectional.
        """
        slides, by_use_swa = self._slides
        for setting in (self.is_causal, (self.dflash_config or {}).get("causal")):
            if setting is not None:
                return [bool(setting)] * self.num_hidden_layers
        return [slide and not by_use_swa for slide in slides]

    @property
    def layer_sinks(self) -> list[bool]:
        """Whether each layer has a learned attention sink (a per-head logit that takes weight and gives no value)."""
        slides, _ = self._slides
        everywhere = bool(self.option("attention_sink_bias", False))
        where_sliding = bool(self.option("add_swa_attention_sink_bias", False))
        return [everywhere or (where_sliding and slide) for slide in slides]


__all__ = ["DFlashConfig"]
