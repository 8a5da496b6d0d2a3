"""The settings: one struct, read once, passed down as plain values.

Three sources, later over earlier: one TOML file, the environment (`OUBLIETTE_PORT` is `port`), flags. A name that is
not known is refused together with the nearest one that is; only the environment is shared with other programs, so
there a foreign name is refused when it is nearly one of ours. Every field carries its documentation, from which
`table()` makes the manual's page.
"""

import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from oubliette.server.errors import NotConfigured

PREFIX = "OUBLIETTE_"
FILE = "oubliette.toml"
EVENTS_KEPT = 100_000
EVENT_BYTES_KEPT = 64 * 1024 * 1024

# Variables that are ours and no settings: where the file is, and what callers and droids read.
_NO_SETTINGS = frozenset({"CONFIG", "API_KEY", "TOKEN", "URL", "PROJECT_ID", "SESSION_ID"})
_NEARLY = 0.75

Seconds = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    home: Annotated[Path, Meta(description="The folder that holds the database, the boxes' sockets and workspaces.")]
    host: Annotated[str, Meta(min_length=1, description="The address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="The TCP port; 0 takes a free one.")] = 8080
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(description="Names that the `Host` header may carry, besides loopback names and `host`; `*` is any."),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(description="Web origins that may call, besides pages of this machine; `*` is any."),
    ] = ()
    runtime: Annotated[
        Literal["bubblewrap", "process"],
        Meta(description="How boxes are made. `process` isolates nothing and runs only the built-in droid."),
    ] = "bubblewrap"
    unsafe_no_sandbox: Annotated[
        bool, Meta(description="Let any droid run, and run commands, without isolation. For throw-away machines only.")
    ] = False
    durability: Annotated[
        Literal["process", "power"],
        Meta(description="What a commit survives: a killed server, or a power cut as well (slower)."),
    ] = "process"
    caller_tool_timeout_s: Annotated[
        Positive, Meta(description="How long a call of a caller's tool waits unless session or tool say otherwise.")
    ] = 60.0
    caller_tool_timeout_max_s: Annotated[
        Positive, Meta(description="The longest such wait that may be asked for, or reached by progress.")
    ] = 600.0
    disconnect_grace_s: Annotated[
        Seconds, Meta(description="How long a caller may be away before its calls fail; 0 fails them at once.")
    ] = 4.0
    restart_grace_s: Annotated[
        Seconds, Meta(description="How long after a start of the server no caller counts as gone.")
    ] = 30.0
    client_grace_s: Annotated[
        Seconds, Meta(description="How long the calls of a client in a box wait for it to connect again.")
    ] = 15.0
    outcomes_kept_s: Annotated[
        Seconds, Meta(description="How long the outcomes of calls are kept after their session ended.")
    ] = 86_400.0
    events_kept: Annotated[
        Count, Meta(description="Events kept per session at least; then the oldest go, 64 at a time.")
    ] = EVENTS_KEPT
    event_bytes_kept: Annotated[Count, Meta(description="Bytes of events kept per session; then the oldest go.")] = (
        EVENT_BYTES_KEPT
    )
    max_depth: Annotated[
        int, Meta(ge=0, description="How deep sessions may start sessions; 0 means that none may.")
    ] = 3
    max_children: Annotated[
        int, Meta(ge=0, description="How many sessions may descend from one that a caller started.")
    ] = 50
    sessions_max: Annotated[
        Count, Meta(description="Live sessions on this server, each with its box; those that droids start, too.")
    ] = 100
    sessions_per_project: Annotated[
        Count, Meta(description="Live sessions per project that callers started; `max_children` bounds the rest.")
    ] = 10
    idle_after_s: Annotated[
        Positive, Meta(description="A session with no turn and no message for so long is ended.")
    ] = 1800.0
    turn_silence_s: Annotated[Positive, Meta(description="A turn whose droid says nothing for so long has failed.")] = (
        300.0
    )
    turn_max_s: Annotated[
        Positive, Meta(description="A turn that takes so long in all has failed, however busy its droid is.")
    ] = 14_400.0
    box_abandoned_after_s: Annotated[
        Positive, Meta(description="A box that no server has come back to for so long ends itself.")
    ] = 900.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="The least severe lines that are logged.")
    ] = "info"

    def __post_init__(self) -> None:
        if self.caller_tool_timeout_s > self.caller_tool_timeout_max_s:
            raise ValueError(
                f"caller_tool_timeout_s ({self.caller_tool_timeout_s:g}) is more than"
                f" caller_tool_timeout_max_s ({self.caller_tool_timeout_max_s:g})"
            )


def load(text: str, env: Mapping[str, str], flags: Mapping[str, Any]) -> Settings:
    """Join the sources. Raises `NotConfigured` with the name at fault, where it stands, and what it may be.

    A flag that is None was not given. In the environment and in flags a list is separated by commas.
    """
    values = _joined(text, env, flags)
    try:
        return Settings(**values)
    except ValueError as error:
        raise NotConfigured(f"settings: {error}") from None


def read(env: Mapping[str, str], flags: Mapping[str, Any], *, file: Path | None = None) -> Settings:
    """Find the file and load it: the one that is named (by argument or `OUBLIETTE_CONFIG`), or that in the home."""
    named = file or (Path(env[PREFIX + "CONFIG"]) if env.get(PREFIX + "CONFIG") else None)
    if named is not None:
        return load(_text(named), env, flags)
    # The home alone: what else is said so far may be good only together with what the file says.
    home: Path = _joined("", env, flags)["home"]
    found = home / FILE
    if not found.exists():
        return load("", env, flags)
    settings = load(_text(found), env, flags)
    if settings.home != home:
        raise NotConfigured(f"{found}: it sets another home than the one it was found in; remove `home` from it")
    return settings


def table() -> list[tuple[str, str, str, str]]:
    """For each setting: its name, its type in words, its default, and what it does."""
    rows: list[tuple[str, str, str, str]] = []
    defaults = {field.name: field.default for field in msgspec.structs.fields(Settings)}
    for name, hint in get_type_hints(Settings, include_extras=True).items():
        described = next(m.description for m in reversed(hint.__metadata__) if m.description)
        default = "~/.oubliette" if name == "home" else _shown(defaults[name])
        rows.append((name, _kind(hint), default, described))
    return rows


def _joined(text: str, env: Mapping[str, str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """What the sources say, each value checked by itself."""
    values: dict[str, Any] = {"home": "~/.oubliette"}
    for name, value in _parsed(text).items():
        values[name] = _checked(name, value, where=FILE, strict=True)
    for name, value in _from_environment(env):
        values[name] = _checked(name, _listed(name, value), where=f"{PREFIX}{name.upper()}", strict=False)
    for name, value in flags.items():
        if value is not None:
            values[name] = _checked(name, _listed(name, value), where=f"--{name.replace('_', '-')}", strict=False)
    values["home"] = _expanded(Path(values["home"]), env)
    return values


def _parsed(text: str) -> dict[str, Any]:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise NotConfigured(f"{FILE}: {error}") from None
    for name in values:
        if name not in Settings.__struct_fields__:
            raise NotConfigured(f"{FILE}: there is no setting `{name}`{_nearest(name, cutoff=0.5)}")
    return values


def _from_environment(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for variable, value in env.items():
        if not variable.startswith(PREFIX):
            continue
        name = variable.removeprefix(PREFIX)
        if name in _NO_SETTINGS:
            continue
        if name.lower() not in Settings.__struct_fields__:
            if near := _nearest(name.lower(), cutoff=_NEARLY):
                raise NotConfigured(f"{variable}: there is no setting `{name.lower()}`{near}")
            continue
        yield name.lower(), value


def _listed(name: str, value: Any) -> Any:
    """Where a list is wanted and a text given, its parts."""
    if isinstance(value, str) and get_origin(get_type_hints(Settings).get(name)) is tuple:
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _nearest(name: str, *, cutoff: float) -> str:
    near = difflib.get_close_matches(name.lower(), Settings.__struct_fields__, n=1, cutoff=cutoff)
    return f"; did you mean `{near[0]}`?" if near else ""


def _checked(name: str, value: Any, *, where: str, strict: bool) -> Any:
    if name not in Settings.__struct_fields__:
        raise NotConfigured(f"{where}: there is no setting `{name}`{_nearest(name, cutoff=0.5)}")
    kind = get_type_hints(Settings, include_extras=True)[name]
    at = where if where.startswith((PREFIX, "--")) else f"{where}: {name}"
    try:
        converted = msgspec.convert(value, kind, strict=strict, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise NotConfigured(f"{at}: {error}") from None
    if isinstance(converted, float) and not math.isfinite(converted):
        raise NotConfigured(f"{at}: Expected a finite number")
    return converted


def _path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str | Path) and str(value):
        return Path(value)
    raise ValueError("Expected a path")


def _expanded(home: Path, env: Mapping[str, str]) -> Path:
    """Make the home absolute; `~` is the environment's HOME, or where there is none what the system knows."""
    if home.parts[:1] == ("~",):
        user = env.get("HOME") or Path("~").expanduser()
        return Path(user, *home.parts[1:]).absolute()
    return home.absolute()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise NotConfigured(f"{path}: cannot be read: {reason}") from None


def _kind(hint: Any) -> str:
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(bare) is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(bare))
    if get_origin(bare) is tuple:
        return "list of text"
    return {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}[bare]


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return "[]"
    return (
        f'"{default}"' if isinstance(default, str) else f"{default:g}" if isinstance(default, float) else f"{default}"
    )
