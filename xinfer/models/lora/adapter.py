"""LoRA adapters (PEFT folders), merged into the weights as these are read."""

__all__ = ["Adapted", "Adapter", "find_adapter"]

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from xinfer.errors import ModelError
from xinfer.models.lora.config import INSTEAD, LoraConfig, parse_lora
from xinfer.models.names import Found
from xinfer.models.safetensors_reader import read_safetensors
from xinfer.models.sources import resolve
from xinfer.models.spec import DecoderSpec
from xinfer.models.weights import Tensors, Weights

Find = Callable[[str], Found | None]

_CONFIG, _WEIGHTS, _PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_ENDS = ("embed.weight", "head.weight")
_MOST_LETTERS = 200  # of a name, since expressions are tried on it
_PREFIX = "base_model.model."
_LOW_RANK = re.compile(r"(.+)\.(lora_[AB]\.weight|lora_B\.bias|lora_embedding_[AB]|lora_magnitude_vector)(?:\.weight)?")
_WHOLE = re.compile(r"(.+?)(\.modules_to_save|\.base_layer)?(\.weight|\.bias)")


@dataclass(slots=True)
class _LowRank:
    """The names of what changes one module: left @ right, by the file's names for its parts."""

    parts: dict[str, str]
    factor: float
    embedding: bool  # whether the product is stored the other way round


class Adapter:
    """A PEFT folder that holds a LoRA; its tensors are read when they are asked for.

    Args:
        folder: where adapter_config.json and adapter_model.safetensors lie.
        scale: how far to go from the model to the adapted one: 0 is the model, 1 what the adapter's maker had.

    What is missing, damaged, or asks for what is not done here is a `ModelError` that names it.
    """

    def __init__(self, folder: Path, scale: float = 1.0) -> None:
        self.folder, self.scale = folder, scale
        file = folder / _WEIGHTS
        if not (folder / _CONFIG).is_file():
            raise ModelError(f"{folder}: no {_CONFIG} in it, so it is no adapter: give a PEFT folder")
        self.config = LoraConfig.read(folder / _CONFIG)
        if not file.is_file():
            pickled = (folder / _PICKLE).exists()
            raise ModelError(
                f"{folder}: only {_PICKLE}, a pickle, which can run code when loaded and is refused: save it as "
                "safetensors (PEFT's save_pretrained does)"
                if pickled
                else f"{folder}: no {_WEIGHTS} in it: save the adapter as safetensors"
            )
        self.files = (file, folder / _CONFIG)
        self._stored = read_safetensors([file])
        self._low_rank: dict[str, _LowRank] = {}
        self._whole: dict[str, str] = {}  # the file's name, by the checkpoint's
        for name in self._stored.shapes:
            self._sort(name)
        for module, change in self._low_rank.items():
            self._check(module, change)
        if not self._stored.shapes:
            raise ModelError(f"{file}: no tensors in it, so it changes nothing: save the adapter again")

    def _sort(self, name: str) -> None:
        """Find out what a tensor of the file is."""
        bare = name.removeprefix(_PREFIX) if len(name) <= _MOST_LETTERS else name
        if bare != name and (match := _LOW_RANK.fullmatch(bare)):
            module, part = match[1], match[2].replace("lora_", "").removesuffix(".weight")
            embedding = part.startswith("embedding_")
            change = self._low_rank.setdefault(module, _LowRank({}, self.config.factor(module), embedding))
            change.parts[part.removeprefix("embedding_")] = name
            change.embedding |= embedding
        elif bare != name and (match := _WHOLE.fullmatch(bare)) and match[1] + match[3] not in self._whole:
            self._whole[match[1] + match[3]] = name
        else:
            raise ModelError(f"{self.files[0]}: tensor {name!r} is not one of a LoRA that can be merged")

    def _check(self, module: str, change: _LowRank) -> None:
        """Check that a module's tensors belong together."""
        shapes = {part: self._stored.shapes[name] for part, name in change.parts.items()}
        if not {"A", "B"} <= shapes.keys():
            raise ModelError(f"{self.files[0]}: {module!r} needs both lora_A and lora_B: save the adapter again")
        rank = self.config.rank_of(module)
        ranks = [shapes["A"][0:1], shapes["B"][1:]]
        if any(len(shapes[part]) != 2 for part in "AB") or ranks != [(rank,), (rank,)]:
            raise ModelError(
                f"{self.files[0]}: {module!r} has lora_A {list(shapes['A'])} and lora_B {list(shapes['B'])}, which "
                f"don't fit its rank of {rank} in {_CONFIG}"
            )
        for part in ("magnitude_vector", "B.bias"):
            if part in shapes and (change.embedding or shapes[part] != shapes["B"][:1]):
                raise ModelError(
                    f"{self.files[0]}: {change.parts[part]!r} of shape {list(shapes[part])} can't be merged"
                    + (": DoRA and biases on embeddings are not supported" if change.embedding else "")
                )

    @cached_property
    def deltas(self) -> Tensors:
        """What is added: tensors as the checkpoint names them, matrices [out, in] and embeddings [rows, width]."""
        shapes: dict[str, tuple[int, ...]] = {}
        for module, change in self._low_rank.items():
            (_, columns), (rows, _) = (self._stored.shapes[change.parts[part]] for part in "AB")
            shapes[f"{module}.weight"] = (columns, rows) if change.embedding else (rows, columns)
            if "B.bias" in change.parts:
                shapes[f"{module}.bias"] = (rows,)
        return Tensors(shapes, self._delta, self.files)

    def _delta(self, name: str) -> Tensor:
        module, _, kind = name.rpartition(".")
        change = self._low_rank[module]
        if kind == "bias":
            return self._load(change.parts["B.bias"]) * change.factor
        product = self._load(change.parts["B"]) @ self._load(change.parts["A"]).mul(change.factor)
        return product.T if change.embedding else product

    @cached_property
    def magnitudes(self) -> Tensors:
        """Of DoRA, the lengths that rows get, repeated along each row."""
        found = {
            f"{module}.weight": change.parts["magnitude_vector"]
            for module, change in self._low_rank.items()
            if "magnitude_vector" in change.parts
        }
        shapes = {name: self.deltas.shapes[name] for name in found}
        return Tensors(shapes, lambda name: self._load(found[name])[:, None].expand(shapes[name]), self.files)

    @cached_property
    def replaced(self) -> Tensors:
        """Tensors that take the model's place, as the checkpoint names them and lays them out."""
        shapes = {name: self._stored.shapes[stored] for name, stored in self._whole.items()}
        return Tensors(shapes, lambda name: self._load(self._whole[name]), self.files)

    def _load(self, name: str) -> Tensor:
        return self._stored.load(name).float()

    def check_tied(self, find: Find) -> None:
        """Refuse what would part a tied model's head from its embedding.

        A low-rank change of the embedding is the head's too, as in PEFT's merging; of both, they must be alike.
        """

        def at(place: str, names: Iterable[str]) -> str | None:
            places = ((name, find(name)) for name in names)
            return next((name for name, found in places if found and found.stored.parts == (place,)), None)

        embed, head = (at(place, self.deltas.shapes) for place in _ENDS)
        if head is not None and (embed is None or not self._alike(embed, head)):
            raise ModelError(self._parted(head))
        embed, head = (at(place, self.replaced.shapes) for place in _ENDS)
        if embed is not None and head is not None and not torch.equal(*map(self.replaced.load, (embed, head))):
            raise ModelError(self._parted(head))
        one = embed or head
        # What lies beside a low-rank change of the embedding is the model's own, which PEFT puts there.
        if one is not None and None in (embed, head) and not (embed and ".base_layer." in self._whole[embed]):
            raise ModelError(self._parted(one))

    def _alike(self, embed: str, head: str) -> bool:
        """Whether a change of the head is that of the embedding, which is stored the other way round."""
        one, other = (self._low_rank[name.removesuffix(".weight")] for name in (embed, head))
        if not one.embedding or other.embedding or one.factor != other.factor or "magnitude_vector" in other.parts:
            return False
        return all(torch.equal(self._load(one.parts[a]).T, self._load(other.parts[b])) for a, b in ("AB", "BA"))

    def _parted(self, name: str) -> str:
        return (
            f"{self.files[0]}: {name!r} changes only the head or only the embedding of a model whose head is its "
            f"embedding, which is not supported: {INSTEAD}"
        )

    def notes(self, reference: str, find: Find) -> list[str]:
        """Return what a user should know: what is merged, what is not, and whether it was made for another model."""
        names = [*self.deltas.shapes, *self.replaced.shapes]
        skipped = [name for name in names if find(name) is None]
        notes = [f"adapter {self.folder} merged: {len(names) - len(skipped)} tensors changed, scale {self.scale:g}"]
        if skipped:
            notes.append(f"not merged, being of no text part: {len(skipped)} of the adapter's, as {skipped[0]}")
        if self.config.base is not None and not _same_model(self.config.base, reference):
            notes.append(f"the adapter was made for {self.config.base!r}, not for {reference!r}")
        return notes


class Adapted(Weights):
    """A checkpoint's weights with an adapter merged into them as they are read.

    What the adapter changes is float32 (or wider, as the checkpoint's), so that nothing is lost before the backend's
    own rounding; all else, and all if the scale is 0, is as the checkpoint has it. Reading takes the memory of one
    tensor more.

    Args:
        spec, tensors, find: as for `Weights`.
        adapter: what to merge. A module that the model lacks, or a shape that does not fit, is a `ModelError`.
        names: tells what a tensor by the name that the family's checkpoints give it is.
    """

    def __init__(self, spec: DecoderSpec, tensors: Tensors, find: Find, adapter: Adapter, names: Find) -> None:
        super().__init__(spec, tensors, find)
        self.files = (*tensors.files, *adapter.files)
        self._scale = adapter.scale

        def upright(name: str) -> Found | None:  # products are [out, in] in any family
            found = names(name)
            return found and replace(found, stored=replace(found.stored, transposed=False))

        if spec.tied:
            adapter.check_tied(names)
        try:
            self._deltas = Weights(spec, adapter.deltas, upright, whole=False)
            self._magnitudes = Weights(spec, adapter.magnitudes, upright, whole=False)
            self._replaced = Weights(spec, adapter.replaced, names, whole=False)
        except ModelError as error:
            raise ModelError(f"{adapter.files[0]}: the adapter does not fit the model: {error}") from error

    def load(self, canonical: str) -> Tensor:
        """Return one tensor, on the CPU, merged."""
        base = super().load(canonical)
        changed = self._deltas.holds(canonical) or self._replaced.holds(canonical)
        if not changed or self._scale == 0:
            return base
        merged = base.to(torch.promote_types(base.dtype, torch.float32), copy=True)
        for expert, tensor in self._replaced.pieces(canonical):
            _place(merged, expert).lerp_(tensor.to(merged.dtype), self._scale)
        lengths = dict(self._magnitudes.pieces(canonical))
        for expert, delta in self._deltas.pieces(canonical):
            place = _place(merged, expert)
            if expert not in lengths:
                place.add_(delta, alpha=self._scale)
            else:
                whole = place + delta
                whole *= lengths[expert][:, :1] / torch.linalg.vector_norm(whole, dim=1, keepdim=True)
                place.lerp_(whole, self._scale)
        return merged


def _place(tensor: Tensor, expert: int | None) -> Tensor:
    return tensor if expert is None else tensor[expert]


def _same_model(base: str, reference: str) -> bool:
    """Whether two references may name one model: the last parts of their paths are alike, but for a file's ending."""
    plain = reference.partition("#")[0]
    if plain.startswith("hf:"):
        plain = plain.partition("@")[0]
    own, other = (re.split(r"[/\\:]", text.rstrip("/\\"))[-1].casefold() for text in (base, plain))
    return other == own or (other.endswith(".gguf") and other.startswith(own))


def find_adapter(lora: str) -> Callable[[], Adapter]:
    """Return what reads the adapter `reference[:scale]`: a folder, or `hf:org/name[@revision]`, fetched if need be.

    A scale out of range is a `ConfigError` at once; what is not there or can't be merged is a `ModelError` later.
    """
    reference, scale = parse_lora(lora)
    return lambda: Adapter(_folder(reference), scale)


def _folder(reference: str) -> Path:
    if reference.startswith("hf:"):
        return resolve(reference)
    with suppress(OSError, RuntimeError):  # too long a name, or `~` of a user who is not there
        path = Path(reference).expanduser().absolute()
        if reference and path.is_dir():
            return path
    raise ModelError(
        f"model.lora={reference!r}: no such folder: give a PEFT folder or hf:org/name[@revision], and behind it "
        ":NUMBER for another scale than 1"
    )
