"""Finding and loading plugins, the built-in ones among them, and what they bring."""

__all__ = ["LoadedPlugin", "Plugins", "load_plugins"]

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from xinfer import hookspecs
from xinfer.backends import API_VERSION, Backend
from xinfer.engine.engine import Observers
from xinfer.engine.logits import LogitsProcessor
from xinfer.engine.runner import RunnerInfo
from xinfer.errors import PluginError, nearest
from xinfer.models.families import Family

log = logging.getLogger(__name__)

_BUILT_IN = ("xinfer.backends.torch", "xinfer.backends.onnx", "xinfer.models.families")


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    """A plugin that was loaded."""

    name: str
    distribution: str
    version: str
    hooks: tuple[str, ...]


@dataclass
class Plugins:
    """The plugins of this process.

    Attributes:
        manager: pluggy's, to call hooks.
        loaded: in the order of loading, built-in ones first.
        failed: plugins that could not be loaded, with the reason.
        silenced: observers that raised and are not called any more, with the reason.
    """

    manager: pluggy.PluginManager
    loaded: list[LoadedPlugin] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    silenced: dict[str, str] = field(default_factory=dict)
    backends: dict[str, Backend] = field(default_factory=dict)
    families: dict[str, Family] = field(default_factory=dict)
    configs: list[tuple[str, str, type]] = field(default_factory=list)

    def backend(self, name: str) -> Backend:
        """Return a backend by name; for one that failed to load, or is of another contract, the error says why."""
        if name in self.failed:
            raise PluginError(f"backend={name!r}: its plugin could not be loaded: {self.failed[name]}")
        if name not in self.backends:
            choices = ", ".join(self.backends)
            raise PluginError(f"backend={name!r} is unknown{nearest(name, self.backends)} (there are: {choices})")
        backend = self.backends[name]
        if backend.api_version not in (None, API_VERSION):
            raise PluginError(
                f"backend={name!r} was written for version {backend.api_version} of the contract with backends, this "
                f"xinfer has version {API_VERSION}: install a version of its package, or of xinfer, that fits the other"
            )
        return backend

    def observers(self) -> Observers:
        """Return the plugins' listeners, each of which is switched off when it first raises."""
        return Observers(
            on_step=self._listeners("xinfer_on_step", "step"),
            on_token=self._listeners("xinfer_on_token", "sequence", "token"),
            on_request_finished=self._listeners("xinfer_on_request_finished", "output"),
        )

    def logits_processors(self, info: RunnerInfo) -> list[LogitsProcessor]:
        """Return the plugins' logits processors for a runner; two of one name are a `PluginError`."""
        found: dict[str, LogitsProcessor] = {}
        for processors in reversed(self.manager.hook.xinfer_logits_processors(info=info)):
            for processor in processors:
                if processor.name in found:
                    raise PluginError(f"two plugins offer the logits processor {processor.name!r}: remove one")
                found[processor.name] = processor
        return list(found.values())

    def tell(self, hook: str, run: Any) -> None:
        """Call `xinfer_on_run_start` or `xinfer_on_run_end`; one that raises does not harm the run."""
        for listener in self._listeners(hook, "run"):
            listener(run)

    def _listeners(self, hook: str, *arguments: str) -> tuple[Callable[..., None], ...]:
        return tuple(self._guarded(impl, arguments) for impl in getattr(self.manager.hook, hook).get_hookimpls())

    def _guarded(self, impl: pluggy.HookImpl, arguments: tuple[str, ...]) -> Callable[..., None]:
        places = [arguments.index(name) for name in impl.argnames]

        def call(*values: object) -> None:
            if impl.plugin_name in self.silenced:
                return
            try:
                impl.function(*(values[place] for place in places))
            except Exception as error:  # whatever a stranger's code raises
                self.silenced[impl.plugin_name] = f"{type(error).__name__}: {error}"
                log.warning("plugin %r raised and is not called any more: %r", impl.plugin_name, error)

        return call


def load_plugins(allowed: str | None = None) -> Plugins:
    """Load the built-in plugins and those installed under the entry-point group `xinfer`.

    One that fails is logged and left out; its neighbours are not harmed. Two that offer the same name are a
    `PluginError`, as nobody could tell which is meant.

    Args:
        allowed: names, separated by commas, of those to load; by default `XINFER_PLUGINS`, and all where it is unset.
    """
    manager = pluggy.PluginManager("xinfer")
    manager.add_hookspecs(hookspecs)
    plugins = Plugins(manager)
    for name in _BUILT_IN:
        manager.register(import_module(name), name)
        plugins.loaded.append(LoadedPlugin(name, "xinfer", "built in", _hooks(manager, name)))
    for entry in _installed(os.environ.get("XINFER_PLUGINS") if allowed is None else allowed):
        _load(plugins, entry)
    _collect(plugins)
    return plugins


def _installed(allowed: str | None) -> list[EntryPoint]:
    found = {entry.name: entry for entry in sorted(entry_points(group="xinfer"), key=lambda e: e.name)}
    if allowed is None:
        return list(found.values())
    names = [name.strip() for name in allowed.split(",") if name.strip()]
    for name in names:
        if name not in found:
            there = ", ".join(found) or "none"
            raise PluginError(f"XINFER_PLUGINS names {name!r}, which is not installed (there are: {there})")
    return [found[name] for name in names]


def _load(plugins: Plugins, entry: EntryPoint) -> None:
    """Load one plugin whole or not at all: hooks that no specification knows are refused too."""
    manager = plugins.manager
    distribution = entry.dist.name if entry.dist else "unknown"
    try:
        manager.register(entry.load(), entry.name)
        manager.check_pending()
    except (Exception, SystemExit) as error:  # importing a stranger's module can raise anything
        if manager.has_plugin(entry.name):
            manager.unregister(name=entry.name)
        reason = " ".join(str(error).split()) or type(error).__name__
        plugins.failed[entry.name] = f"{type(error).__name__}: {reason} (package {distribution})"
        log.warning("plugin %r (package %s) could not be loaded: %s", entry.name, distribution, reason)
        return
    version = entry.dist.version if entry.dist else "unknown"
    plugins.loaded.append(LoadedPlugin(entry.name, distribution, version, _hooks(manager, entry.name)))


def _hooks(manager: pluggy.PluginManager, name: str) -> tuple[str, ...]:
    callers = manager.get_hookcallers(manager.get_plugin(name)) or []
    return tuple(sorted(caller.name for caller in callers))


def _collect(plugins: Plugins) -> None:
    """Ask every plugin for what it brings; one that raises is left out as if it had not loaded."""
    for impl, backends in _answers(plugins, "xinfer_backends"):
        _add(plugins.backends, backends, "backend", impl.plugin_name)
    for impl, families in _answers(plugins, "xinfer_model_families"):
        _add(plugins.families, families, "model family", impl.plugin_name)
    for _, configs in _answers(plugins, "xinfer_configs"):
        plugins.configs += configs


def _answers(plugins: Plugins, hook: str) -> Iterable[tuple[pluggy.HookImpl, list[Any]]]:
    for impl in getattr(plugins.manager.hook, hook).get_hookimpls():
        try:
            yield impl, list(impl.function())
        except Exception as error:  # see `_load`
            plugins.failed[impl.plugin_name] = f"{type(error).__name__}: {error} (in {hook})"
            log.warning("plugin %r raised in %s: %r", impl.plugin_name, hook, error)


def _add(known: dict[str, Any], offered: list[Any], kind: str, plugin: str) -> None:
    for item in offered:
        if item.name in known:
            raise PluginError(
                f"plugin {plugin!r} offers the {kind} {item.name!r}, which another plugin offers too: remove one, or "
                "name those to load in XINFER_PLUGINS"
            )
        known[item.name] = item
