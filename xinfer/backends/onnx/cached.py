"""Graphs that were written before, in the cache folder under a hash of all that they depend on."""

__all__ = ["graph_for", "graph_key"]

import hashlib
import json
import logging
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import onnxruntime

from xinfer.backends.onnx.form import Form
from xinfer.backends.onnx.recipe import Recipe
from xinfer.errors import ConfigError
from xinfer.models.cache import cache_folder
from xinfer.models.kept import code_hash
from xinfer.models.spec import DecoderSpec

log = logging.getLogger(__name__)


def graph_for(spec: DecoderSpec, form: Form) -> tuple[Path, dict[str, Recipe]]:
    """Return a graph's file, and how each of its weights is made; written now if it was not before, or was damaged."""
    folder = cache_folder() / "onnx" / graph_key(spec, form)
    found = _read(folder)
    if found is None:
        started = perf_counter()
        _write(folder, spec, form)
        found = _read(folder)
        assert found is not None
        log.info("graph written", extra={"seconds": perf_counter() - started, "folder": str(folder)})
    return folder / "model.onnx", found


def graph_key(spec: DecoderSpec, form: Form) -> str:
    """Return a hash of the model, what the graph is for, the runtime, and the code that writes it."""
    what = repr((spec, form, onnxruntime.__version__, code_hash(Path(__file__).parent)))
    return hashlib.sha256(what.encode()).hexdigest()[:32]


def _read(folder: Path) -> dict[str, Recipe] | None:
    """Return the recipes of a graph that is whole."""
    try:
        known = json.loads((folder / "recipes.json").read_bytes())
        if hashlib.sha256((folder / "model.onnx").read_bytes()).hexdigest() != known["graph"]:
            return None
        return {
            name: Recipe(each["form"], tuple(each["sources"]), each["layer"]) for name, each in known["weights"].items()
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(folder: Path, spec: DecoderSpec, form: Form) -> None:
    """Write a graph and its recipes beside the folder, which then takes their place at once."""
    import onnx_ir as ir

    from xinfer.backends.onnx.decoder import write

    model, recipes = write(spec, form)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(
            f"graphs can't be kept in {folder.parent} ({error}): set XINFER_CACHE to a folder that can be written"
        ) from error
    try:
        ir.save(model, temporary / "model.onnx")
        graph = hashlib.sha256((temporary / "model.onnx").read_bytes()).hexdigest()
        weights = {name: asdict(recipe) for name, recipe in recipes.items()}
        (temporary / "recipes.json").write_text(json.dumps({"graph": graph, "weights": weights}))
        try:
            temporary.rename(folder)
        except OSError:  # there is one, of another process that was faster, or damaged
            if _read(folder) is None:
                shutil.rmtree(folder)
                temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
