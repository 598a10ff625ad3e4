"""Loading and describing a target. Every failure becomes a `UserError` with one clear message.

A model that cannot be a target is refused by its config, before weights are read.
"""

from __future__ import annotations

import errno
import inspect
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.utils import logging

import inference.target.attention as attention
from heads.api.config import config
from heads.api.errors import UserError, suggest
from heads.api.target_info import TargetInfo, tokenizer_hash
from inference.target import parallel
from inference.target.hardware import found_device, is_there
from inference.target.packed_target import open_packed, packed_settings, without_settings
from inference.target.quantization import quantization_settings
from inference.target.revision import revision_of
from inference.target.rope import pin_frequencies, rope_parts, trained_positions
from inference.target.settings import Loading, first_setting
from inference.target.shared import head_rows

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
AUTO = "auto"
_RECURRENT = (
    "its recurrent layers are code of their own, whose states cannot be taken back when drafted "
    "tokens are refused"
)
_ALIBI = (
    "its attention adds ALiBi biases in code of its own, which transformers does not let us replace"
)
_OWN_CODE = "its attention is code of its own, which transformers does not let us replace"
_SPARSE = (
    "its attention chooses keys by a compressed index, which our cache and masks do not follow"
)
_BIASED = (
    "it adds learned biases to the attention scores as a mask, which our attention does not take"
)
_ENCODER = "it is an encoder-decoder model, and targets are decoder-only"
_BOTH_WAYS = "it is an encoder with an LM head of several layers"
_NEEDS_OTHERS = "it is a part that reads another model's states and gives no text alone"
_SEES = "its layers read images or sound beside the text"
_LOOPS = "its layers are not one list that is run once"
REFUSED: dict[str, str] = {
    "emu3": "transformers' class for its text does not read the checkpoints of the whole model",
    **dict.fromkeys(
        "rwkv xlstm inkling_text inkling2_text qwen4_exp_text glm5_next_text".split(), _RECURRENT
    ),
    **dict.fromkeys("bloom mpt".split(), _ALIBI),
    **dict.fromkeys(
        "falcon gptj gpt_neo gpt_neox_japanese codegen xglm openai-gpt ctrl cpmant big_bird "
        "reformer rembert roformer megatron-bert xlm xlnet prophetnet trocr".split(),
        _OWN_CODE,
    ),
    **dict.fromkeys(
        "bert bert-generation camembert data2vec-text electra ernie modernbert-decoder roberta "
        "roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl xmod".split(),
        _BOTH_WAYS,
    ),
    **dict.fromkeys("gemma4_assistant gemma4_unified_assistant".split(), _NEEDS_OTHERS),
    **dict.fromkeys("git mllama moshi".split(), _SEES),
    **dict.fromkeys("blt hrm_text".split(), _LOOPS),
    "deepseek_v4": _SPARSE,
    "doge": _BIASED,
}
"""Families that cannot be targets, by model_type, and the reason; see also `_objection`."""
RECURRENT = frozenset(
    "qwen3_next qwen3_5_text qwen3_5_moe_text olmo_hybrid kimi_linear bailing_hybrid nemotron_h "
    "falcon_h1 granitemoehybrid bamba zamba zamba2 jamba mamba mamba2 falcon_mamba lfm2 lfm2_moe "
    "lfm3 minimax recurrent_gemma zaya".split()
)
"""Families whose recurrent layers can verify draft trees (`inference.target.recurrent`)."""
WITHOUT_USE_CACHE = frozenset("minimax recurrent_gemma".split())
"""Families that with use_cache accept only their own cache (MiniMax), or keep states in their
modules."""
INDEXED = frozenset("deepseek_v32 glm_moe_dsa axk2 hy_v4 dots3_note_text".split())
"""Families whose attention chooses keys by an indexer (`inference.target.indexed`)."""
TWO_BLOCKS = "longcat_flash"
_LAYERS: dict[str, str] = {
    **dict.fromkeys(
        "linear_attention mamba conv recurrent hybrid hybrid_sliding".split(), _RECURRENT
    ),
    **dict.fromkeys(
        "indexed_attention compressed_sparse_attention heavily_compressed_attention".split(),
        _SPARSE,
    ),
}
"""Types of layers that a target cannot have, except for the families in `RECURRENT` and
`INDEXED`."""


WIDTHS = ("intermediate_size", "ffn_dim", "n_inner")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
"""Names that families give to the width of the MLP, and to the epsilon of their norms."""


@config("target")
@dataclass(frozen=True)
class TargetConfig:
    """The target to load, and how to load it."""

    path: str
    """Hub id or local folder of a Hugging Face causal LM with its tokenizer."""
    revision: str | None = None
    """Hub revision (branch, tag or commit); None is the default branch. Ignored for folders."""
    dtype: str = "float32"
    """float64, float32, bfloat16, float16, or auto: bfloat16 on a GPU, float32 on a CPU."""
    device: str = "auto"
    """cpu, cuda, cuda:N, or auto: CUDA if there is one."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Turn it on only if you trust the author."""
    quantization: str = "auto"
    """auto (as the checkpoint says), none, bnb-4bit, bnb-8bit, torchao-int8, torchao-int4 or fp8:
    see `inference.target.quantization`."""
    long_context: bool = False
    """For models with two sets of rotary frequencies (longrope: Phi-3 128k): use the long set, for
    prompts of every length. Off: use the short set, and limit prompts to its length."""
    tensor_parallel: bool = False
    """Split the target over torchrun's processes: see `inference.target.parallel`."""

    @classmethod
    def named(cls, path: str | Path) -> TargetConfig:
        """The target with that Hub id or in that folder, loaded as by the command line's
        `target=local`."""
        return cls(path=str(path), dtype=AUTO)

    @property
    def dtype_name(self) -> str:
        """`dtype` without auto."""
        if self.dtype != AUTO:
            return self.dtype
        return "float32" if pick_device(self.device).type == "cpu" else "bfloat16"

    @property
    def unusual(self) -> Loading:
        """The settings, besides revision and dtype, that change what the target computes, where
        they differ from the defaults."""
        found: Loading = {}
        if self.quantization not in (AUTO, "none"):  # both load the files as they are
            found["quantization"] = self.quantization
        if self.long_context:
            found["long_context"] = True
        return found


def pick_device(name: str) -> torch.device:
    """The device with a name; raises `UserError` if it is unknown or not available."""
    if name == "auto":
        return found_device()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(
            f"target.device '{name}' is not a device. Allowed: auto, cpu, cuda, cuda:N, and other "
            "accelerators of torch, such as xpu and mps."
        ) from error
    if not is_there(device):
        kind = "CUDA" if device.type == "cuda" else device.type.upper()
        raise UserError(
            f"target.device is '{name}', but no {kind} device is available. Use "
            f"target.device={found_device()}."
        )
    return device


_ONE_AT_A_TIME = threading.Lock()
"""transformers replaces methods of its classes while it loads. If two threads load at once, a
replacement remains, and from then on no model of this process ties its embeddings."""


def load_model(config: TargetConfig) -> Any:
    """The frozen model on its device; raises `UserError` if it cannot be loaded as a target."""
    described = checked_config(config)
    ranks = parallel.join_ranks(config.device) if config.tensor_parallel else None
    device = ranks.device if ranks else pick_device(config.device)
    packed = packed_settings(config.path, config.revision, described)
    own = None if packed else getattr(described, "quantization_config", None)
    if packed and (ranks is not None or config.quantization not in ("auto", "none")):
        raise UserError(
            f"the target's files are quantised already ({packed['quant_method']}); they are loaded "
            "as plain weights, with target.quantization=auto and target.tensor_parallel=false."
        )
    quantised = quantization_settings(config.quantization, own, DTYPES[config.dtype_name], device)
    options: dict[str, Any] = {} if quantised is None else {"quantization_config": quantised}
    if ranks is not None:
        options |= _split(described, ranks)
    elif own is not None or quantised is not None:
        # packed weights are created on their device and cannot be moved
        options["device_map"] = {"": device}
    if DTYPES[config.dtype_name] == torch.float64:
        # the grouped product of experts, transformers' default, does not support float64
        options["experts_implementation"] = "eager"
    if packed:
        options |= _plain_weights(config, described, packed)
    model, report = _from_pretrained(config, described, options)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise UserError(
            f"target '{config.path}' is incomplete: weights {missing[:4]} are missing from its "
            "files."
        )
    own_generation = load_generation_config(config)
    if own_generation is not None:
        # transformers continues without one that it cannot read
        model.generation_config = own_generation
    model.requires_grad_(False).eval()
    model.headstart_loading = config.unusual
    placed = "device_map" in options or ranks is not None
    return prepare(model if placed else model.to(device), config.long_context)


def _plain_weights(
    config: TargetConfig, described: Any, settings: dict[str, Any]
) -> dict[str, Any]:
    """The options for loading quantised files as plain weights."""
    dtype = DTYPES[config.dtype_name]
    return {
        "pretrained_model_name_or_path": None,
        "config": without_settings(described),
        "state_dict": open_packed(config.path, config.revision, settings, dtype),
    }


def checked_config(config: TargetConfig) -> Any:
    """The transformers config of a target; raises `UserError` if it cannot be one."""
    allowed = (*DTYPES, AUTO)
    if config.dtype not in allowed:
        meant = suggest(config.dtype, allowed)
        raise UserError(f"target.dtype '{config.dtype}' is unknown.{meant}")
    _check_path(config.path)
    described = load_config(config)
    require_supported(config.path, described)
    return described


def _source(config: TargetConfig) -> dict[str, Any]:
    return {
        "pretrained_model_name_or_path": config.path,
        "revision": config.revision,
        "trust_remote_code": config.trust_remote_code,
    }


LOADING = (
    *(OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, ImportError),
    *(RuntimeError, MemoryError, SafetensorError, StrictDataclassError),
)
"""What transformers raises for folders and repositories without a model, or with a damaged one."""


def load_config(config: TargetConfig) -> Any:
    """The target's transformers config; raises `UserError` if there is none."""
    try:
        return AutoConfig.from_pretrained(**_source(config))
    except LOADING as error:
        raise UserError(f"target '{config.path}' cannot be loaded: {_first_line(error)}") from error


def _from_pretrained(
    config: TargetConfig, described: Any, options: dict[str, Any]
) -> tuple[Any, Any]:
    try:
        with _ONE_AT_A_TIME:
            options = {**_source(config), "dtype": DTYPES[config.dtype_name], **options}
            loader = model_class(described)
            if "state_dict" in options:  # the automatic classes need a path
                loader = loader._model_mapping[type(described)]
            read = built_from(described)
            if read is not described:
                options["config"] = read
            with _without_warnings():
                model, report = loader.from_pretrained(output_loading_info=True, **options)
    except LOADING as error:
        raise UserError(f"target '{config.path}' cannot be loaded: {_first_line(error)}") from error
    return text_alone(model), report


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Within the block, transformers prints no warnings, such as its table of weights that do not
    fit; the error message has the relevant part."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


READ_ALONE = ("gemma3n",)
"""Composite families whose composite class needs further packages (timm), and whose text class can
read its weights from the composite checkpoint."""


def built_from(described: Any) -> Any:
    """The config from which a target of this config is built: its text config if that is read
    alone."""
    return described.get_text_config() if described.model_type in READ_ALONE else described


def model_class(described: Any) -> Any:
    """The class that loads a target of this config. For composite models (text and images) without
    a text class in transformers, it is the composite class."""
    composite = type(described) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if composite and type(described) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def text_alone(model: Any) -> Any:
    """The model without its parts for images and sound."""
    base: Any = getattr(model, "model", None)
    text = getattr(base, "language_model", None)
    if text is not None:
        for name, part in list(base.named_children()):
            if part is not text:
                setattr(base, name, None)
    return model


def _split(described: Any, ranks: parallel.Ranks) -> dict[str, Any]:
    """The options for loading with tensor parallelism. Raises `UserError` for families without a
    plan in transformers."""
    text = described.get_text_config()
    if text.model_type in RECURRENT:
        raise UserError(
            f"a {text.model_type} target cannot be split: its recurrent layers keep whole states. "
            "Set target.tensor_parallel=false."
        )
    parallel.require_divisible(text, ranks.size)
    if not getattr(text, "base_model_tp_plan", None):
        raise UserError(
            f"a {text.model_type} target cannot be split: transformers has no tensor-parallel "
            "plan for it. Set target.tensor_parallel=false."
        )
    return {"distributed_config": parallel.split_settings(ranks.size)}


def prepare(model: Any, long_context: bool = False) -> Any:
    """Fix rotary frequencies that would otherwise change with the length; call it before any
    pass."""
    pin_frequencies(model, long_context)
    model.config.get_text_config().headstart_long_context = long_context
    return model


def require_supported(name: str, config: Any) -> None:
    """Raise `UserError` if a model of this transformers config cannot be a target."""
    try:
        text = config.get_text_config()
    except ValueError as error:  # there are several text models
        raise UserError(
            f"'{name}' ({config.model_type}) cannot be a target: it holds several text models. "
            "Use a decoder-only model."
        ) from error
    for part in (config, text):
        objection = _objection(part)
        if objection is not None:
            raise UserError(
                f"'{name}' ({part.model_type}) cannot be a target: {objection}. Use a "
                "decoder-only model with standard attention (Llama, Qwen, Mistral, Gemma, OLMo, "
                "Phi, GPT-OSS, ...)."
            )


def _objection(config: Any) -> str | None:
    """Why a model of this config cannot be a target, or None."""
    if getattr(config, "is_encoder_decoder", False):
        return _ENCODER
    if config.model_type == "falcon" and config.alibi:
        return _ALIBI
    if config.model_type in REFUSED:
        return REFUSED[config.model_type]
    if config.model_type in RECURRENT | INDEXED:
        return None
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return next((_LAYERS[kind] for kind in kinds if kind in _LAYERS), None)


def is_recurrent(config: Any) -> bool:
    """Whether a text config's model has recurrent layers that can verify draft trees."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    known = kinds is None or any(kind in _LAYERS for kind in kinds)
    return config.model_type in RECURRENT and known


def decoder_layers(config: Any) -> int:
    """Decoder layers of a text config's model. A layer of LongCat has two attention blocks, and its
    num_hidden_layers counts the blocks."""
    return int(config.num_layers if config.model_type == TWO_BLOCKS else config.num_hidden_layers)


def usable_positions(config: Any) -> tuple[int, str]:
    """Positions that a prepared text config allows, and a hint for users who need more."""
    limit = int(first_setting(config, "max_position_embeddings", "n_positions", default=2048))
    trained = (
        None if getattr(config, "headstart_long_context", False) else trained_positions(config)
    )
    if trained is not None and trained < limit:
        hint = (
            "Its short rotary frequencies end there; target.long_context=true uses the long ones."
        )
        return trained, hint
    return limit, ""


def load_tokenizer(config: TargetConfig) -> Any:
    """The target's tokenizer; raises `UserError` if it has none."""
    try:
        return AutoTokenizer.from_pretrained(**_source(config))
    except Exception as error:  # a damaged file may cause any exception
        raise UserError(
            f"target '{config.path}' has no readable tokenizer: {_first_line(error)}"
        ) from error


def load_generation_config(config: TargetConfig) -> GenerationConfig | None:
    """The target's generation config, which includes its end-of-text tokens; None if it has none.
    Raises `UserError` if the file cannot be read: without it, answers would end elsewhere."""
    try:
        return GenerationConfig.from_pretrained(config.path, revision=config.revision)
    except Exception as error:  # as above
        if isinstance(error, OSError) and _is_absent(error):
            return None
        raise UserError(
            f"the generation config of target '{config.path}' cannot be read: {_first_line(error)}"
        ) from error


def _is_absent(error: BaseException | None) -> bool:
    """Whether an OSError of transformers means that a file does not exist, and no exception in its
    chain means that the file could not be read."""
    while error is not None:
        if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)):
            return False
        if getattr(error, "errno", None) not in (None, errno.ENOENT, errno.ENOTDIR):
            return False
        error = error.__cause__ or error.__context__
    return True


def cache_argument(decoder: Any) -> str:
    """The name of the cache argument of a decoder's forward method."""
    names = inspect.signature(decoder.forward).parameters
    return "past_key_values" if "past_key_values" in names else "cache_params"


def has_attention(config: Any) -> bool:
    """Whether a text config's model has layers with attention."""
    return first_setting(config, "num_attention_heads") is not None


def switch_attention(model: Any) -> None:
    """Make every layer call Headstart's attention; raises `UserError` if that is impossible."""
    if not has_attention(model.config.get_text_config()):
        return
    try:
        with _without_warnings():  # of composite models it names the parts that were dropped
            model.set_attn_implementation(attention.NAME)
    except (ValueError, NotImplementedError, AttributeError) as error:
        raise UserError(_irreplaceable(model, _first_line(error))) from error
    if model.config.get_text_config()._attn_implementation != attention.NAME:
        raise UserError(_irreplaceable(model, "its class does not follow the attention interface"))


def _irreplaceable(model: Any, why: str) -> str:
    return (
        f"a {model.config.model_type} model cannot be a target: transformers does not let its "
        f"attention be replaced ({why}). Use a model with standard attention (Llama, Qwen, "
        "Mistral, Gemma, OLMo, Phi, GPT-2, ...)."
    )


def describe(model: Any, tokenizer: Any, config: TargetConfig) -> TargetInfo:
    """The facts of a loaded target. It resolves attribute names that differ between families."""
    text = model.config.get_text_config()
    hidden = first_setting(text, "hidden_size")
    heads = first_setting(text, "num_attention_heads", default=max(1, hidden // 64))
    rope = next((part for part in rope_parts(text) if "rope_theta" in part), {})
    theta = rope.get("rope_theta", first_setting(text, "rope_theta", default=10000.0))
    return TargetInfo(
        id=config.path,
        revision=revision_of(config.path, config.revision),
        model_type=text.model_type,
        tokenizer_hash=tokenizer_hash(tokenizer),
        vocab_size=head_rows(model),
        hidden_size=hidden,
        num_layers=decoder_layers(text),
        num_attention_heads=heads,
        num_key_value_heads=first_setting(text, "num_key_value_heads", default=heads),
        head_dim=first_setting(text, "head_dim", default=hidden // heads),
        intermediate_size=first_setting(text, *WIDTHS, default=4 * hidden),
        rms_norm_eps=float(first_setting(text, *EPSILONS, default=1e-5)),
        rope_theta=float(theta),
        max_position_embeddings=usable_positions(text)[0],
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _check_path(path: str) -> None:
    """Raise `UserError` for a mistyped folder, before a Hub look-up gives a confusing message."""
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if not path.strip():
        raise UserError("target.path is empty: give a Hub id such as Qwen/Qwen3-8B, or a folder.")
    if looks_local and not Path(path).is_dir():
        raise UserError(
            f"target folder '{path}' does not exist. Give a folder with config.json, or a Hub id "
            "(owner/name)."
        )
    if Path(path).is_dir() and not (Path(path) / "config.json").is_file():
        raise UserError(
            f"target folder '{path}' has no config.json: it is not a Hugging Face model folder."
        )


def _first_line(error: Exception) -> str:
    if "look at the above report" in str(error):  # see `_without_warnings`
        return "its files hold weights of other sizes than its config.json says. Fetch it again"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


def end_tokens(ids: int | Sequence[int] | None, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end an answer: a generation config's `ids`, or the tokenizer's."""
    ids = tokenizer.eos_token_id if ids is None else ids
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
