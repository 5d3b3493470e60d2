"""Sources of settings: the file that RAY_HETERO_CONFIG names, and vLLM's `additional_config`.

Both hold the same keys, with `ray_hetero` around them or without.  This module knows where settings
stand and which of them win; what the keys may be and mean is `ray_hetero.config`'s.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from placement.given import file_shown, shown
from placement.json_file import read_json
from placement.text_file import FileError
from placement.yaml_file import read_yaml
from ray_hetero.errors import ConfigError
from ray_hetero.log import logger

ENVIRONMENT_VARIABLE = "RAY_HETERO_CONFIG"
KEY = "ray_hetero"
ADDITIONAL_CONFIG = "--additional-config"
RENAMED = {
    "restart": "max_restarts",
    "cpu.strict": "cpu.max_remote_memory_fraction",
    "cpu.borrow_gpu": "cpu.prefill_on_gpu",
    "cpu.borrow_gpu_tokens": "cpu.prefill_on_gpu_tokens",
}
"""Old name of a key → its name; both in the same section."""

Path = tuple[str, ...]
"""A key by its sections: `("cpu", "cores")`."""
DEEPEST = len(("cpu", "env", "NAME"))


@dataclass(frozen=True)
class Source:
    """One place with settings, and what it says."""

    kind: Literal["file", "additional_config"]
    name: str
    """Name of the source in messages, such as `RAY_HETERO_CONFIG=/etc/ray_hetero.yaml`."""
    settings: dict[str, Any]


@dataclass(frozen=True)
class Merged:
    """Settings of all sources, and which source each of them is from."""

    settings: dict[str, Any]
    origins: Mapping[Path, Source] = field(default_factory=dict)
    """Sources by the paths of the values; sections have none."""

    def origin(self, path: Path) -> Source | None:
        """The source of a value, or of the value that a path leads into."""
        for length in range(len(path), 0, -1):
            if (found := self.origins.get(path[:length])) is not None:
                return found
        return None


def read_sources(additional_config: object, names: Collection[str]) -> tuple[Source, ...]:
    """Settings of each source, the weakest first, keys by today's names.

    Args:
        additional_config: vLLM's `additional_config`, which other plugins may use too.
        names: keys that there are outside of sections.

    Raises:
        ConfigError: a file that is not there or cannot be read, or keys where nobody reads them.

    """
    found = (_file(os.environ.get(ENVIRONMENT_VARIABLE)), _given(additional_config, names))
    return tuple(source for source in found if source is not None)


def merged(sources: Collection[Source]) -> Merged:
    """All settings, those of later sources over those of earlier ones, key by key."""
    settings: dict[str, Any] = {}
    origins: dict[Path, Source] = {}
    for source in sources:
        settings = _over(settings, source.settings)
        for path in _values(source.settings):
            for other in list(origins):
                # What was a section may now be a value, and the other way round.
                if other[: len(path)] == path or path[: len(other)] == other:
                    del origins[other]
            origins[path] = source
    return Merged(settings, origins)


def _file(path: str | None) -> Source | None:
    if not path:
        return None
    where = f"{ENVIRONMENT_VARIABLE}={file_shown(path)}"
    try:
        content = read_json(path) if path.endswith(".json") else read_yaml(path)
    except FileError as error:
        raise ConfigError(f"{where}: {error}") from None
    settings = _mapping({} if content is None else content, where)
    if KEY in settings:
        if beside := sorted(settings.keys() - {KEY}):
            raise ConfigError(
                f"{where}: expected all keys inside {KEY!r} or none, "
                f"got {', '.join(map(shown, beside))} beside it"
            )
        settings = _mapping(settings[KEY], f"{where}, key {KEY!r}")
    return Source("file", where, _by_new_names(settings, where))


def _given(additional_config: object, names: Collection[str]) -> Source | None:
    if not isinstance(additional_config, dict):
        return None
    _check_spelling(additional_config)
    ours = [key for key in map(str, additional_config) if key in names or key in RENAMED]
    if KEY in additional_config:
        if ours:
            raise ConfigError(
                f"--additional-config key {ours[0]!r}: it belongs inside {KEY!r}, which is there; "
                f'type: --additional-config \'{{"{KEY}": {{"{ours[0]}": …}}}}\''
            )
        where = f"--additional-config key {KEY!r}"
        settings = _mapping(additional_config[KEY], where)
    elif ours:
        where, settings = ADDITIONAL_CONFIG, _mapping(additional_config, ADDITIONAL_CONFIG)
    else:
        return None
    return Source("additional_config", where, _by_new_names(settings, where))


def _check_spelling(additional_config: dict[Any, Any]) -> None:
    """Refuse settings of ours that nobody would read.

    Raises:
        ConfigError: `ray_hetero` in another spelling.

    """
    for key in map(str, additional_config):
        if key != KEY and re.sub(r"[\W_]", "", key.lower()) == KEY.replace("_", ""):
            raise ConfigError(f"--additional-config key {key!r}: expected {KEY!r}")


def _mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{where}: expected keys and values, got {as_written(value)}")
    return value


def as_written(value: object) -> str:
    """A value that somebody gave, as messages show it: `null` and truth as JSON and YAML do."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else shown(value)


def _by_new_names(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """The settings of one source with all keys by their names of today.

    Raises:
        ConfigError: a key is there by its old and by its new name.

    """
    settings = {
        key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()
    }
    for old, new in RENAMED.items():
        section: object = settings
        *path, name = old.split(".")
        for part in path:
            section = section.get(part) if isinstance(section, dict) else None
        if not isinstance(section, dict) or name not in section:
            continue
        if (now := new.split(".")[-1]) in section:
            raise ConfigError(f"{where}: {old} is the old name of {new}; keep the new one only")
        logger.warning("%s: %s is called %s now, please rename it", where, old, new)
        section[now] = section.pop(name)
    return settings


def _over(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        result[key] = _over(below, value) if both else value  # type: ignore[arg-type]
    return result


def _values(settings: dict[str, Any], above: Path = ()) -> Iterator[Path]:
    """Paths of all that is no section; an empty section is a value too."""
    for key, value in settings.items():
        path = (*above, str(key))
        # YAML may contain itself; no key is deeper than this.
        if isinstance(value, dict) and value and len(path) < DEEPEST:
            yield from _values(value, path)
        else:
            yield path
