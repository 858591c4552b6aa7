"""Serves a model over gRPC, and over HTTP where asked for.

    python -m headrace.scripts.serve --model=smollm2-135m-instruct
    python -m headrace.scripts.serve --host=0.0.0.0 --strict --key_file=keys.json \
        --tls_cert=server.pem --tls_key=server.key

Prints one line per address once calls are served there, such as
"serving gRPC on 127.0.0.1:50051". SIGTERM drains: new calls are refused, those that run
have --grace_s to end, the exit code is 0; a second signal ends them at once.
"""

import asyncio
import dataclasses
import os
import sys

from absl import app, flags

from headrace.configs.schema import EngineConfig
from headrace.engine.serving import access_log
from headrace.engine.serving.http_server import bound_socket
from headrace.engine.serving.limits import ServiceLimits
from headrace.engine.serving.server_options import ServerOptions, read_file
from headrace.engine.serving.tenants import KeyFile
from headrace.scripts import engine_flags

FLAGS = flags.FLAGS

flags.DEFINE_string("host", "127.0.0.1", "Address to bind to; 0.0.0.0 is every one.")
flags.DEFINE_integer("port", 50051, "Port of gRPC; 0 picks a free one.")
flags.DEFINE_integer("http_port", None, "Port of HTTP, 0 picks one. Default: no HTTP.")
flags.DEFINE_string("model_name", None, "What clients call the model.")
flags.DEFINE_string("key_file", None, "Bearer keys (JSON, see make_key.py).")
flags.DEFINE_string("tls_cert", None, "PEM file: the server's certificate chain.")
flags.DEFINE_string("tls_key", None, "PEM file: its private key.")
flags.DEFINE_string("tls_client_ca", None, "PEM file: who signs clients' certificates.")
flags.DEFINE_bool("strict", False, "Refuse to be open to others without TLS and keys.")
flags.DEFINE_float("grace_s", 30.0, "Seconds for running calls after SIGTERM.")
flags.DEFINE_integer("max_message_bytes", 8 * 2**20, "Of a request or response.")
flags.DEFINE_integer("max_concurrent_calls", 1024, "Calls at a time.")
flags.DEFINE_integer("max_queued_requests", 256, "Requests that wait for a slot.")
flags.DEFINE_bool(
    "share_queue",
    None,
    "A tenant may have no more requests waiting than places are left, so that a flood "
    "takes half of them at most. Default: with --key_file.",
)
flags.DEFINE_bool("scoring", True, "Compile what Score and prompt_logprobs need.")
flags.DEFINE_enum(
    "log_prompts",
    "none",
    ["none", "redacted", "full"],
    "Prompts in the log; 'redacted' has x and 0 for letters and digits.",
)
flags.DEFINE_string("metrics_prefix", "headrace", "Of the names of metrics.")
flags.DEFINE_string("access_log", None, "File for a JSON line per call; - is stderr.")
flags.DEFINE_string("otlp_endpoint", None, "Where OpenTelemetry traces go.")

# One flag per bound of a request: max_prompt_tokens -> --limit_prompt_tokens.
_LIMITS = {
    f"limit_{field.name.removeprefix('max_')}": field
    for field in dataclasses.fields(ServiceLimits)
}
for _flag, _field in _LIMITS.items():
    _define = flags.DEFINE_float if _flag.endswith("_s") else flags.DEFINE_integer
    _define(_flag, _field.default, f"{_field.name} of one request, see limits.py.")


def server_options() -> ServerOptions:
    """The flags as options.

    Raises:
      ValueError: a value out of its range, or flags that do not go together.
    """
    limits = {field.name: FLAGS[flag].value for flag, field in _LIMITS.items()}
    names = {field.name for field in dataclasses.fields(ServerOptions)}
    values = {name: FLAGS[name].value for name in names - {"limits", "model_name"}}
    name = FLAGS.model_name or FLAGS.model or FLAGS.config
    return ServerOptions(
        **values,
        limits=ServiceLimits(**limits),
        model_name=FLAGS.model_name
        or os.path.basename((name or engine_flags.DEFAULT_MODEL).rstrip("/")),
    )


def check_options(options: ServerOptions) -> None:
    """Tells before the engine's long start what would stop the server after it.

    Raises:
      ValueError: an unreadable file; with --strict: open to others unprotected.
      OSError: an address that is taken.
    """
    for what in options.exposure():
        if FLAGS.strict:
            raise ValueError(f"--strict: reachable from outside with {what}")
        print(f"warning: reachable from outside with {what}", file=sys.stderr)
    if options.key_file is not None:
        KeyFile(options.key_file)
    for name in ("tls_cert", "tls_key", "tls_client_ca"):
        if (path := getattr(options, name)) is not None:
            read_file(f"--{name}", path)
    if options.access_log is not None:
        with access_log.opened(options.access_log):
            pass
    for port in (options.port, options.http_port):
        if port:
            bound_socket(options.host, port).close()


def run() -> int:
    """Serves until a signal; returns the exit code.

    Raises:
      ValueError, OSError: see `check_options`.
    """
    options = server_options()
    check_options(options)
    llm = engine_flags.build_llm(for_serving)
    from headrace.engine.serving.server import serve

    return asyncio.run(serve(llm, options, announce=_announce))


def for_serving(config: EngineConfig) -> EngineConfig:
    """The settings of an engine that serves, where flags say so."""
    return dataclasses.replace(
        config,
        scoring=FLAGS.scoring,
        max_queued_requests=FLAGS.max_queued_requests,
        share_queue=shares_queue(),
    )


def shares_queue() -> bool:
    """Whether tenants share the queue's places, as a flag says or keys suggest."""
    is_told = FLAGS.share_queue is not None
    return FLAGS.share_queue if is_told else FLAGS.key_file is not None


def _announce(line: str) -> None:
    print(line, flush=True)


def main(argv: list[str]) -> int:
    """Returns the exit code: 0, or 1 where something was refused or failed."""
    if len(argv) > 1:
        raise app.UsageError(f"only flags are taken, got {argv[1:]}")
    return engine_flags.exit_code(run)


if __name__ == "__main__":
    app.run(main)
