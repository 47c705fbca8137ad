"""From overrides to a configuration, by Hydra: where values lie, what they must be, and what is said of mistakes."""

__all__ = ["compose", "composed", "config_folder", "default_model", "register", "typed", "worded"]

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins as HydraPlugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from xinfer.config import Config, keys
from xinfer.errors import ConfigError, UsageError, nearest

if TYPE_CHECKING:
    from xinfer.plugins import Plugins

_one_at_a_time = threading.Lock()  # Hydra has one state for the whole process


def register(plugins: "Plugins") -> None:
    """Tell Hydra the schemas, those of plugins among them, so that unknown keys and wrong types are refused.

    A built-in backend's values come from conf/backend/NAME.yaml, which names its schema; a plugin's from its dataclass.
    """
    store = ConfigStore.instance()
    store.store(group="schema", name="config", node=Config)
    built_in = {name for name in plugins.backends if (config_folder() / "backend" / f"{name}.yaml").is_file()}
    for name, backend in plugins.backends.items():
        node = _named(name, backend.config)
        store.store(group="schema/backend" if name in built_in else "backend", name=name, node=node)
    for group, name, node in plugins.configs:
        store.store(group=f"plugin/{group}", name=name, node=node)


def _named(name: str, config: type) -> type:
    """Return a backend's config class with the backend's own name in it, so that a resolved config tells it."""
    return make_dataclass(config.__name__, [("name", str, field(default=name))], bases=(config,))


def config_folder() -> Path:
    """Return conf/: inside the package where it was installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def default_model() -> str:
    """Return the reference of the model that is taken where none is named."""
    return str(OmegaConf.load(config_folder() / "model" / "smollm2.yaml").reference)


def compose(overrides: Sequence[str], plugins: "Plugins") -> Config:
    """Return the configuration for these overrides, as the command line would; what it refuses is a `UsageError`."""
    return typed(composed(overrides, plugins))


def composed(overrides: Sequence[str], plugins: "Plugins") -> DictConfig:
    """Return what `compose` does before it is an object, and may have keys missing.

    For programs, which may use Hydra themselves: nothing of its state is different afterwards. Only another thread that
    uses Hydra at the same time would notice.
    """
    try:
        with _hydra_of_our_own():
            register(plugins)
            with hydra.initialize_config_dir(str(config_folder()), job_name="xinfer", version_base="1.3"):
                return hydra.compose("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise worded(error, overrides, plugins) from error


@contextmanager
def _hydra_of_our_own() -> Iterator[None]:
    """Put Hydra's state aside: what the program that we are in has composed, registered and chosen."""
    HydraPlugins.instance()  # found and registered once, for everybody
    with _one_at_a_time:
        theirs = Singleton._instances
        store = copy(ConfigStore.instance())
        store.repo = _branches(store.repo)
        kept = {kind: it for kind, it in theirs.items() if kind not in (GlobalHydra, JobRuntime, VersionBase)}
        Singleton._instances = {**kept, ConfigStore: store}  # type: ignore[dict-item]  # Hydra's annotation is wrong
        try:
            yield
        finally:
            Singleton._instances = theirs


def _branches(repository: dict[str, Any]) -> dict[str, Any]:
    """Copy a tree of dicts, not its leaves."""
    return {name: _branches(node) if isinstance(node, dict) else node for name, node in repository.items()}


def typed(config: DictConfig) -> Config:
    """Return a composed configuration as an object; what must be given and is not is a `ConfigError`."""
    if missing := OmegaConf.missing_keys(config):
        raise ConfigError(f"{', '.join(sorted(missing))} must be given, as key=value")
    found: Any = OmegaConf.to_object(config)
    return found  # type: ignore[no-any-return]


def worded(error: Exception, overrides: Sequence[str], plugins: "Plugins") -> UsageError:
    """Say in one line what Hydra says in several, with the nearest name that would have been right."""
    text, cause = str(error), str(error.__cause__ or "").partition("\n")[0]
    if match := re.search(r"Could not override '([^']+)'", text):
        key = match[1]
        known = [*keys(), *(f"backend.{k}" for b in plugins.backends.values() for k in vars(b.config()))]
        return ConfigError(f"unknown key {key!r}{nearest(key, known)}: --help lists the keys")
    if match := re.search(r"Error merging override (\S+)", text):
        return ConfigError(f"{match[1]}: {cause or 'this value is not accepted'}")
    if match := re.search(r"Could not find '([^'/]+)/([^']+)'\n\nAvailable options in '[^']*':\n((?:\t.*\n)*)", text):
        group, name, choices = match[1], match[2], match[3].split()
        if group == "hydra":  # hydra/launcher, hydra/sweeper
            inner, _, name = name.rpartition("/")
            group = f"hydra/{inner}"
            if name in ("joblib", "optuna"):
                return ConfigError(f"{group}={name} is not installed: pip install 'xinfer[sweeps]'")
        if group == "backend" and name in plugins.failed:
            plugins.backend(name)
        return ConfigError(f"{group}={name} is unknown{nearest(name, choices)} (there are: {', '.join(choices)})")
    if "Ambiguous value for argument" in text:
        return ConfigError(f"{text.splitlines()[0]}: quote it, make it a list with [], or add -m to run all of them")
    if type(error).__name__ == "OverrideParseException":
        words = [word for word in overrides if word.count("=") != 1] or overrides
        return ConfigError(
            f"can't read {' or '.join(words)} ({text.splitlines()[0]}): put the value in quotes twice, as in "
            "\"key='a=b,c'\", or use --key value"
        )
    return ConfigError(text.replace("\n", " ") + (f" ({cause})" if cause and cause not in text else ""))
