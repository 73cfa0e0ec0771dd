"""`ServeConfig`: the server's settings, from flags, HURTLE_SERVE_… variables or a TOML file, in this order."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import tyro

from hurtle.errors import HurtleError, TrustError, UnknownNameError, did_you_mean

PREFIX = "HURTLE_SERVE_"
_TRUTHS = {"true": True, "1": True, "on": True, "yes": True, "false": False, "0": False, "off": False, "no": False}
"""Booleans in environment variables."""
ExecutorName = Literal["inline", "worker", "batch"]
MaybeInt = Annotated[int | None, tyro.conf.arg(metavar="INT")]
MaybeFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]
MaybeText = Annotated[str | None, tyro.conf.arg(metavar="STR")]
MaybeFile = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
MaybePort = Annotated[int | None, tyro.conf.arg(metavar="INT|None")]


@dataclass(frozen=True)
class ModelOptions:
    """How a model runs; a TOML file may set it per model under [model.NAME]."""

    executor: ExecutorName = "batch"
    """Where requests run: inline (at once, on the event loop), worker (each on a lane), batch (fused with others that wait)."""
    lanes: MaybeInt = None
    """Threads that each own a copy of the model; 0: the event loop. By default worker has one per core, and batch uses the
    event loop for models that answer a full batch within two milliseconds, else one thread."""
    batch_size: int = 64
    """Most rows that batch fuses; a larger request runs alone, and never on the event loop."""
    batch_timeout_ms: float = 0.0
    """Milliseconds that a partial batch may wait for more after a call has returned. An idle lane never waits."""
    max_queue: int = 1024
    """Requests that may wait for a model; further ones are refused (RESOURCE_EXHAUSTED, 429)."""
    max_rows: MaybeInt = None
    """Most rows in one request."""
    backend: MaybeText = None
    """The runtime: onnx, torch_export, torchscript, native_mlp, affine, dlrm, or your own package.module:Class. By default the
    file's suffix decides."""
    parameters: dict[str, str] = field(default_factory=dict)
    """Parameters of the backend, such as device=cuda."""
    load_library: tuple[str, ...] = ()
    """Shared libraries with custom operators for TorchScript models."""

    def __post_init__(self) -> None:
        if self.executor not in get_args(ExecutorName):
            raise UnknownNameError(f"No executor {self.executor!r}. {did_you_mean(self.executor, get_args(ExecutorName))}")
        for name, least in (("batch_size", 1), ("max_queue", 1), ("max_rows", 1), ("lanes", 0), ("batch_timeout_ms", 0)):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise HurtleError(f"{name} must be at least {least}, got {value}.")
        if self.executor == "inline" and self.lanes:
            raise HurtleError(f"The inline executor runs on the event loop: it has no lanes, got lanes={self.lanes}.")
        if self.executor == "worker" and self.lanes == 0:
            raise HurtleError("The worker executor needs at least one lane; use inline to run without lanes.")


@dataclass(frozen=True)
class ServeConfig(ModelOptions):
    """The settings of `hurtle serve`."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL ...]")] = ()
    """Policies and other models (policy.onnx is named policy), or folders of them: name/version/model.onnx."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    http_port: MaybePort = 8000
    """Port for REST, the web page and metrics; 0 picks a free one, None turns it off."""
    grpc_port: MaybePort = 8001
    """Port for gRPC; 0 picks a free one, None turns it off."""
    processes: int = 1
    """Processes that share the ports, to use more cores than one event loop can."""
    watch: float = 0.0
    """Seconds between scans of the folders for new, changed and removed versions; 0: only when a client asks."""
    max_message_mib: float = 64.0
    """The largest request."""
    max_buffered_mib: MaybeFloat = None
    """Memory of one process for unfinished requests and unread answers; beyond it new requests are refused (RESOURCE_EXHAUSTED,
    503). By default 1024, or four times max_message_mib if that is more; at least twice max_message_mib."""
    max_connections: MaybeInt = None
    """Connections of one process, over both ports; further ones are refused (UNAVAILABLE, 503). By default as many as there are
    file descriptors for (ulimit -n)."""
    max_sequences: int = 4096
    """Sequences per model whose state the server keeps."""
    max_sequence_mib: float = 256.0
    """Memory for the states of all sequences; beyond it new sequences are refused (RESOURCE_EXHAUSTED, 429)."""
    sequence_idle: float = 60.0
    """Seconds after which an idle sequence is dropped."""
    tls_cert: MaybeFile = None
    """PEM file with the server's certificate chain: serve over TLS."""
    tls_key: MaybeFile = None
    """PEM file with its private key."""
    tls_client_ca: MaybeFile = None
    """PEM file with the authorities of client certificates: only clients with one may connect (mTLS)."""
    auth_token_file: MaybeFile = None
    """File with a token; every request except health checks must then carry `authorization: Bearer TOKEN`."""
    access_log: MaybeFile = None
    """File for one line of JSON per request; - is standard output."""
    access_log_mib: float = 64.0
    """Size at which the access log is rotated: FILE becomes FILE.1, FILE.1 becomes FILE.2, and so on."""
    access_log_files: int = 4
    """Rotated access logs that are kept; older ones are deleted."""
    triton_metrics: bool = False
    """Report metrics under Triton's names too (nv_inference_…), for existing dashboards."""
    allow_file_overrides: bool = False
    """Let clients send an .onnx file when they load a model. Anybody who may load models then decides what the server runs."""
    drain: float = 30.0
    """Seconds to answer what clients have sent, after SIGTERM or Ctrl-C."""
    otlp_endpoint: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None
    """Where to send OpenTelemetry traces, such as http://collector:4318/v1/traces; needs hurtle[telemetry]."""
    overrides: Annotated[dict[str, dict[str, Any]], tyro.conf.Suppress] = field(default_factory=dict)
    """Options of single models, by name; [model.NAME] in the TOML file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("processes", 1), ("watch", 0), ("drain", 0), ("max_sequences", 0), ("sequence_idle", 0)):
            if not getattr(self, name) >= least:  # also refuses NaN
                raise HurtleError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        for name in ("max_connections", "access_log_files"):
            if getattr(self, name) is not None and not getattr(self, name) >= 1:
                raise HurtleError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("max_message_mib", "max_sequence_mib", "access_log_mib"):
            if not 0 < getattr(self, name) < 2**20:
                raise HurtleError(f"{name} must be more than 0 and less than 2²⁰, got {getattr(self, name)}.")
        if self.max_buffered_mib is not None and not 2 * self.max_message_mib <= self.max_buffered_mib < 2**20:
            raise HurtleError(
                f"max_buffered_mib must be at least twice max_message_mib, {2 * self.max_message_mib}, and less than 2²⁰, got "
                f"{self.max_buffered_mib}."
            )
        for name in ("http_port", "grpc_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port < 65536:
                raise HurtleError(f"{name} must be 0 to 65535, got {port}.")
        if self.http_port is None and self.grpc_port is None:
            raise HurtleError("Both ports are off: set --http-port or --grpc-port.")
        if bool(self.tls_cert) != bool(self.tls_key) or (self.tls_client_ca and not self.tls_cert):
            raise HurtleError("TLS needs both --tls-cert and --tls-key, and --tls-client-ca needs TLS.")
        for name in self.overrides:
            self.for_model(name)

    @property
    def max_message_bytes(self) -> int:
        """Size of the largest request."""
        return int(self.max_message_mib * 2**20)

    @property
    def max_buffered_bytes(self) -> int:
        """Memory for unfinished requests and unread answers."""
        if self.max_buffered_mib is None:
            return max(2**30, 4 * self.max_message_bytes)
        return int(self.max_buffered_mib * 2**20)

    @property
    def max_sequence_bytes(self) -> int:
        """Memory for the states of all sequences."""
        return int(self.max_sequence_mib * 2**20)

    @property
    def auth_token(self) -> str | None:
        """The token that clients must send, if any.

        Raises:
            HurtleError: The file cannot be read, or is empty.
        """
        if self.auth_token_file is None:
            return None
        try:
            token = Path(self.auth_token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise HurtleError(f"Cannot read the token in {self.auth_token_file}: {error}.") from None
        if not token:
            raise HurtleError(f"{self.auth_token_file} holds no token.")
        return token

    def for_model(self, name: str) -> ModelOptions:
        """The options of one model."""
        shared = {option.name: getattr(self, option.name) for option in fields(ModelOptions)}
        own = dict(self.overrides.get(name, {}))
        check_names(own, fields(ModelOptions), f"[model.{name}]")
        if "parameters" in own:
            own["parameters"] = {**shared["parameters"], **own["parameters"]}
        return ModelOptions(**{**shared, **{key: _fitted(ModelOptions, key, value) for key, value in own.items()}})


def check_names(given: Mapping[str, Any], known: Sequence[Field[Any]], where: str) -> None:
    """Refuse options that do not exist."""
    names = [option.name for option in known]
    for name in given:
        if name not in names:
            raise UnknownNameError(f"{where} has no option {name!r}. {did_you_mean(name, names)}")


def defaults_from(path: str | Path | None, environ: Mapping[str, str] = os.environ, trust: bool = False) -> ServeConfig:
    """The config of a TOML file and HURTLE_SERVE_… variables, as the defaults of the flags.

    Args:
        path: The TOML file, if there is one.
        environ: The environment variables.
        trust: Whether the file may name code; HURTLE_SERVE_TRUST=1 allows it too.

    Raises:
        TrustError: The file names code without being trusted.
        HurtleError: A value is wrong; the message says where.
    """
    known = [option for option in fields(ServeConfig) if option.name != "overrides"]
    given: dict[str, Any] = {}
    if path is not None:
        table = _read_toml(Path(path))
        own = table.pop("model", {})
        if not isinstance(own, dict) or not all(isinstance(options, dict) for options in own.values()):
            raise HurtleError(f"{path}: expected the options of a model as a table, [model.NAME].")
        if not trust and not _truth("TRUST", environ.get(PREFIX + "TRUST") or "false"):
            _refuse_code(path, {"": table, **{f"[model.{name}] ": options for name, options in own.items()}})
        given["overrides"] = own
        check_names(table, known, str(path))
        given |= {key: _fitted(ServeConfig, key, value) for key, value in table.items()}
    for name, text in environ.items():
        if name.startswith(PREFIX) and name not in (PREFIX + "CONFIG", PREFIX + "TRUST"):
            key = name.removeprefix(PREFIX).lower()
            check_names({key: text}, known, f"The environment variable {name}")
            given[key] = _from_text(key, text)
    return replace(ServeConfig(), **given) if given else ServeConfig()


def _refuse_code(path: str | Path, tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a TOML file that names code: a foreign backend, libraries, files that torch may execute."""
    named = []
    for where, options in tables.items():
        if ":" in str(options.get("backend", "")):
            named.append(f"{where}backend = {options['backend']!r}")
        if options.get("load_library"):
            named.append(f"{where}load_library = {options['load_library']!r}")
        parameters = options.get("parameters", {})
        if isinstance(parameters, dict):
            named += [f"{where}parameters.{name}" for name in ("backend", "load_library", "trusted") if name in parameters]
    if named:
        raise TrustError(
            f"{path} names code: {', '.join(named)}. A file may come from anybody: give it on the command line (--backend, "
            f"--load-library, --parameters), or pass --trust ({PREFIX}TRUST=1) if you trust the file's author."
        )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise HurtleError(f"Cannot read {path}: {error}.") from None


def _fitted(owner: type, key: str, value: Any) -> Any:
    """Convert a TOML value to the field's type; the error says what was expected."""
    kind = get_type_hints(owner)[key]
    if kind == tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            return tuple(value)
    elif kind == dict[str, str]:
        if isinstance(value, dict):
            return {name: str(part) for name, part in value.items()}
    elif value is False and type(None) in get_args(kind):
        return None  # TOML has no null: grpc_port = false
    else:
        allowed = get_args(kind) if get_args(kind) and not isinstance(get_args(kind)[0], str) else (kind,)
        if kind is ExecutorName and isinstance(value, str):
            return value
        if float in allowed and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if type(value) in allowed:
            return value
    raise HurtleError(f"{key} must be {getattr(kind, '__name__', kind)}, got {value!r}.")


def _from_text(key: str, text: str) -> Any:
    """Convert the value of an environment variable."""
    kind = get_type_hints(ServeConfig)[key]
    if kind == tuple[str, ...]:
        return tuple(part for part in text.split(os.pathsep) if part)
    if kind == dict[str, str]:
        return parse_pairs(text.split(","))
    if kind is bool:
        return _truth(key.upper(), text)
    options = [option for option in get_args(kind) if isinstance(option, type)] or [kind]
    if type(None) in options and text.lower() in ("", "none", "off"):
        return None
    for option in options:
        if option in (int, float):
            try:
                return option(text)
            except ValueError:
                raise HurtleError(f"{PREFIX}{key.upper()} must be a number, got {text!r}.") from None
    return text


def _truth(name: str, text: str) -> bool:
    if text.lower() not in _TRUTHS:
        raise HurtleError(f"{PREFIX}{name} must be true or false, got {text!r}.")
    return _TRUTHS[text.lower()]


def parse_pairs(texts: Sequence[str]) -> dict[str, str]:
    """["device=cuda"] → {"device": "cuda"}."""
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise HurtleError(f"Expected NAME=VALUE, got {text!r}.")
        pairs[name.strip()] = value.strip()
    return pairs


def describe(config: ServeConfig) -> str:
    """The options that differ from the defaults, for the log."""
    changed = []
    for option in fields(config):
        default = option.default_factory() if option.default_factory is not MISSING else option.default
        value = getattr(config, option.name)
        if value != default and option.name not in ("models", "overrides"):
            changed.append(f"{option.name}={value}")
    changed += [f"{name}: {' '.join(f'{key}={value}' for key, value in own.items())}" for name, own in config.overrides.items()]
    return ", ".join(changed) or "default options"
