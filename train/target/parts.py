"""A target in parts: if features come from elsewhere, only the weights that trainers need are in
memory.

These are embedding and LM head, because drafters share them and losses turn hidden states into
logits. If vLLM computes the features, the final norm is added, because vLLM's states end before it.
All other weights have a shape and no contents: if a head starts from a layer, that layer's weights
are read from their file on demand. Only safetensors files are read, tensor by tensor, and only the
files of a Hub repository that hold the requested weights are fetched. Of a quantised target these
weights must be plain, as they usually are; its other weights cannot be read.

Settings that would run the target are refused beforehand (`refuse_parts`); the target's self-check
at loading is left to the process that computes the features.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from typing_extensions import TypedDict

from heads.api.batch import TrainBatch
from heads.api.errors import UserError
from heads.api.features import FeatureSpec
from heads.api.reading import read_object, require_fit
from heads.api.tensors import BROKEN
from inference.target import loading
from inference.target.loading import TargetConfig, describe
from inference.target.memory import gib
from inference.target.model import TargetModel
from inference.target.packed_target import packed_settings, without_settings
from inference.target.revision import hub_commit
from inference.target.shared import kept_tensors, text_name
from inference.target.taps import find_decoder, find_final_norm, find_layers
from train.config import TrainingJob
from train.data.loader import PackedBatch
from train.features.base import OnlineFeatures
from train.features.store.batches import batch_on

WHOLE = "features.trainer_target=whole"


def loader(job: TrainingJob) -> Callable[[TargetConfig], TargetModel]:
    features = job.features
    if features.trainer_target == "whole":
        return TargetModel.load
    return partial(load_parts, norm=features.mode in ("vllm", "responses"))


def refuse_parts(job: TrainingJob) -> None:
    """Raise one `UserError` for all settings that are impossible with parts of a target."""
    if job.features.trainer_target == "whole":
        return
    config = job.config
    wishes = (
        (
            job.features.mode == "online",
            "features.mode=online runs them in every trainer (features=store, remote, vllm, "
            "sglang or group)",
        ),
        (
            config.eval_every > 0,
            "measuring tau decodes with them (train.eval_every=0: the last weights count as the "
            "best, and `headstart measure` tells their tau)",
        ),
        (config.parity, "the parity check runs them (train.parity=false)"),
        (job.joint.on, "joint training changes them (joint=none)"),
        (
            job.engine.target_sharding != "none",
            "engine.target_sharding divides them (engine.target_sharding=none)",
        ),
        (
            job.target.quantization not in ("auto", "none"),
            f"target.quantization={job.target.quantization} packs them as they are loaded "
            "(target.quantization=none)",
        ),
    )
    needed = [what for on, what in wishes if on]
    if needed:
        raise UserError(
            "features.trainer_target=parts leaves the target's layers in their files, but "
            f"{'; '.join(needed)}. Change {'that' if len(needed) == 1 else 'those'}, or use "
            f"{WHOLE}."
        )


def load_parts(config: TargetConfig, norm: bool = False) -> TargetModel:
    """The target with only embedding and LM head, in its dtype on its device; its layers cannot
    run. norm: load its final norm too. Raises `UserError` if it cannot be found or read in parts,
    or is no target."""
    described = loading.checked_config(config)
    own = getattr(described, "quantization_config", None)
    quantised = own is not None or packed_settings(config.path, config.revision, described)
    described = without_settings(described)
    device, model = loading.pick_device(config.device), empty_model(config, described)
    revision = hub_commit(config.path, config.revision) or config.revision
    files = WeightFiles(model, config, revision, bool(quantised))
    fill(model, files, device, norm)
    tokenizer = loading.load_tokenizer(config)
    own_generation = loading.load_generation_config(replace(config, revision=files.revision))
    if own_generation is not None:
        model.generation_config = own_generation
    loading.switch_attention(model)
    target = TargetModel(model, tokenizer, describe(model, tokenizer, config))
    target.weights.state = StoredWeights(model, files, device)
    target.decoder.register_forward_pre_hook(_cannot_run)
    return target


def _cannot_run(*_: Any) -> None:
    raise RuntimeError(
        f"this target is held in parts and has no layers to run ({WHOLE} loads them)"
    )


def empty_model(config: TargetConfig, described: Any) -> Any:
    """The target's frozen modules: weights have shapes and no contents, buffers are real."""
    with init_empty_weights(include_buffers=False):
        model = loading.model_class(described).from_config(
            loading.built_from(described),
            dtype=loading.DTYPES[config.dtype_name],
            trust_remote_code=config.trust_remote_code,
        )
    model = loading.text_alone(model)
    model.tie_weights()
    return loading.prepare(model.requires_grad_(False).eval(), config.long_context)


def replace_parameters(model: nn.Module, fresh: Mapping[int, nn.Parameter]) -> None:
    """Replace the parameters with these ids by others, wherever they are used."""
    for module in model.modules():
        for key, old in module._parameters.items():
            if old is not None and id(old) in fresh:
                module._parameters[key] = fresh[id(old)]


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Bring the buffers to the device, each contiguous."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device).contiguous()


def fill(model: Any, files: WeightFiles, device: torch.device, norm: bool) -> None:
    """Load the weights of embedding, LM head and, if `norm` is set, the final norm, and move the
    buffers to the device."""
    move_buffers(model, device)
    head = model.get_output_embeddings()
    ends = [module for module in (model.get_input_embeddings(), head) if module is not None]
    names = {id(module): name for name, module in model.named_modules()}
    for module in [*ends, *(final_norms(model) if norm else ())]:
        for key, empty in list(module.named_parameters(recurse=False)):
            if empty.device.type == "meta":  # a tied head already has the embedding
                value = files.read(f"{names[id(module)]}.{key}", device)
                replace_parameters(model, {id(empty): nn.Parameter(value, requires_grad=False)})
    own = f"{names.get(id(head))}.weight"
    if len(ends) == 2 and head.weight is ends[0].weight and files.apart(own):
        # transformers ignores a config that ties two weights which differ
        value = files.read(own, device)
        if not torch.equal(value, head.weight):
            head.weight = nn.Parameter(value, requires_grad=False)


def final_norms(model: Any) -> list[nn.Module]:
    """The final norm of a model; empty if it is not known."""
    decoder = find_decoder(model)
    layers = find_layers(decoder, loading.decoder_layers(model.config.get_text_config()))
    found = find_final_norm(decoder, layers)
    return [] if found is None else [found]


class WeightMap(TypedDict):
    """The part of a model's index that is read: weight -> file."""

    weight_map: dict[str, str]


class WeightFiles:
    """The places of a model's weights in its safetensors files, which are fetched and opened when
    read. read_so_far: weights and their bytes. quantised: only some of the weights are plain
    numbers, and the others cannot be read. Raises `UserError` if files or weights are missing."""

    def __init__(
        self, model: Any, config: TargetConfig, revision: str | None, quantised: bool
    ) -> None:
        self.path, self.revision, self.quantised = config.path, revision, quantised
        self.read_so_far: dict[str, int] = {}
        every = kept_tensors(model, remove_duplicate=False)
        self._dtypes = {name: parameter.dtype for name, parameter in every.items()}
        self._shapes = {name: parameter.shape for name, parameter in every.items()}
        alike: dict[int, list[str]] = {}
        for name, parameter in every.items():
            alike.setdefault(id(parameter), []).append(name)
        self._alike = {name: names for names in alike.values() for name in names}
        self._files = self._index()
        self._keys, self._built = stored_names(model, self._files)
        known = {*self._keys, *self._built}
        weights = dict(model.named_parameters())  # a buffer that is missing has a default
        missing = sorted(
            names[0]
            for names in alike.values()
            if known.isdisjoint(names) and not weights.keys().isdisjoint(names)
        )
        if missing and not quantised:
            raise UserError(
                f"target '{self.path}' is incomplete: weights {missing[:4]} are missing from its "
                "files."
            )

    def _index(self) -> dict[str, str]:
        single = self._fetch(SAFE_WEIGHTS_NAME)
        if single is not None:
            with self._opened(single) as file:
                return dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
        index = self._fetch(SAFE_WEIGHTS_INDEX_NAME)
        if index is None:
            raise UserError(
                f"target '{self.path}' has neither {SAFE_WEIGHTS_NAME} nor "
                f"{SAFE_WEIGHTS_INDEX_NAME}, and other files cannot be read in parts. Use "
                f"{WHOLE}, or save it as safetensors."
            )
        try:
            content = require_fit(WeightMap, read_object(Path(index), ""), "it")
        except UserError as error:
            raise self._unreadable(index, error) from error
        return content["weight_map"]

    def _fetch(self, name: str) -> str | None:
        """The path of a file in the folder or the Hub's cache; None if there is none."""
        try:
            found: str | None = cached_file(
                self.path, name, revision=self.revision, _raise_exceptions_for_missing_entries=False
            )
        except (OSError, ValueError) as error:
            raise UserError(f"target '{self.path}': {name} cannot be fetched: {error}") from error
        return found

    def _opened(self, path: str) -> Any:
        try:
            return safe_open(path, framework="pt")
        except BROKEN as error:
            raise self._unreadable(path, error) from error

    def _unreadable(self, path: str, error: object) -> UserError:
        return UserError(
            f"target '{self.path}': '{path}' cannot be read ({error}). Fetch it again."
        )

    def apart(self, name: str) -> bool:
        """Whether the files hold a tied weight both under its own name and under the other's."""
        return name in self._keys and sum(each in self._keys for each in self._alike[name]) > 1

    def _has_scale(self, key: str) -> bool:
        """Whether the files hold scales for the tensor `key`, so that its numbers need them."""
        layer = key.removesuffix("weight")
        return any(other.startswith(f"{layer}weight_scale") for other in self._files)

    def _packed(self, name: str) -> UserError:
        return UserError(
            f"target '{self.path}': {name} is quantised in its files, and only plain weights "
            f"are read in parts. Use {WHOLE}, or a head that does not start from the target's "
            "layers."
        )

    def read(self, name: str, device: torch.device) -> Tensor:
        """One weight, in the model's dtype."""
        own = [name, *self._alike[name]]
        stored = next((each for each in own if each in self._keys), None)
        if self.quantised and (stored is None or self._has_scale(self._keys[stored])):
            raise self._packed(name)
        if stored is None:
            raise UserError(
                f"target '{self.path}': {name} is put together from several tensors of its files, "
                f"which is not done in parts. Use {WHOLE}."
            )
        key = self._keys[stored]
        path = self._fetch(self._files[key])
        if path is None:
            raise UserError(
                f"target '{self.path}' is incomplete: its file {self._files[key]} is missing. "
                "Fetch it again."
            )
        try:
            with self._opened(path) as file:
                value: Tensor = file.get_tensor(key)
        except SafetensorError as error:
            raise self._unreadable(path, error) from error
        plain = value.is_floating_point() and value.element_size() > 1
        if self.quantised and (not plain or value.shape != self._shapes[name]):
            raise self._packed(name)  # scales under a name that only the quantiser knows
        value = value.to(device=device, dtype=self._dtypes[name])
        self.read_so_far[stored] = value.nbytes
        return value


def stored_names(model: Any, keys: Iterable[str]) -> tuple[dict[str, str], set[str]]:
    """Weights that files hold as they are -> their key; weights that transformers makes from
    several, or from parts of one."""
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    state, prefix = model.state_dict(), model.base_model_prefix
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    found: dict[str, str] = {}
    built: set[str] = set()
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = key, None
        if pattern is None:
            found[name] = key
            continue
        first, *others = by_pattern[pattern].target_patterns
        built |= {name, *(name.replace(first, other) for other in others)}
    return found, built


class StoredWeights(UserDict[str, Tensor]):
    """The named weights of a target in parts, from memory or, on demand, from a file."""

    def __init__(self, model: nn.Module, files: WeightFiles, device: torch.device) -> None:
        own = kept_tensors(model)
        super().__init__({text_name(name): value for name, value in own.items()})
        self.files, self._device = files, device
        self._own = {text_name(name): name for name in own}
        """A weight's name in a text model -> its name in the model, which may be composite."""

    def __getitem__(self, name: str) -> Tensor:
        value = self.data[name]
        empty = value.device.type == "meta"
        return self.files.read(self._own[name], self._device) if empty else value.detach()

    def __str__(self) -> str:
        whole = sum(parameter.nbytes for parameter in self.data.values())
        return (
            f"target held in parts: {gib(sum(self.files.read_so_far.values()))} of {gib(whole)} "
            "were read; tau and parity are not checked in this training"
        )


def trial_batch(
    job: TrainingJob, target: TargetModel, needs: FeatureSpec, packed: PackedBatch
) -> TrainBatch:
    """`packed` with the target's features; random ones if it cannot compute them."""
    online = OnlineFeatures(target, needs, job.engine.dtype)
    if job.features.trainer_target == "whole":
        return online.batch(packed)
    batch = batch_on(packed, target.device)
    generator, hidden = torch.Generator().manual_seed(0), target.info.hidden_size

    def drawn(*sizes: int) -> Tensor:
        values = torch.randn(*batch.tokens.shape, *sizes, generator=generator)
        return values.to(target.device, job.engine.dtype)

    batch.taps = drawn(len(needs.taps), hidden) if needs.taps else None
    batch.last_hidden = drawn(hidden) if needs.last_hidden or needs.logits else None
    batch.target_logits = online.logits if needs.logits else None
    return batch
