"""``minedraft drafter``: a drafter that runs alone, for several verifiers."""

import argparse
import logging
import os
import signal
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from minedraft import lifeline, protocol, transport
from minedraft.config import ConfigError, Endpoint
from minedraft.drafter.engine import DraftEngine, DraftEngineError
from minedraft.drafter.server import DraftServer
from minedraft.engine_options import one_line, parse_flags, with_cpu_defaults
from minedraft.tokenizers import tokenizer_fingerprint

logger = logging.getLogger("vllm.minedraft")


def run(options: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT; ``options`` as cli.py parses them."""
    if os.environ.get(lifeline.ENV_PARENT):
        lifeline.exit_with_parent()
    if current_platform.is_cpu():
        # The workers in this process: a draft step is short, and round trips to others are not.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    transport.check_address(options.listen)
    if options.key_file:
        transport.create_key_file(Path(options.key_file))
    flags = parse_flags(options.engine_flags, program="minedraft drafter")
    # The socket first: an address that cannot be is said before a model is loaded.
    socket = transport.Server(Endpoint(options.listen, options.key_file))
    try:
        engine = DraftEngine(EngineArgs(options.model, **with_cpu_defaults(flags)))
    except (DraftEngineError, ValueError, OSError) as error:
        socket.close()
        raise ConfigError(f"{options.model}: {one_line(error)}") from error
    try:
        _warm_up(engine)
        server = DraftServer(engine, socket, _welcome(engine))
        _serve(server, f"{options.listen}, Model Runner {engine.model_runner}")
    finally:
        socket.close()
        engine.shutdown()
    return 0


def _warm_up(engine: DraftEngine) -> None:
    """The first passes of a model are slow; no verifier is to wait for them."""
    engine.open("warm-up", [0, 0])
    engine.extend("warm-up", 2, [0], 2)
    while engine.has_work():
        engine.step()
    engine.close("warm-up")


def _welcome(engine: DraftEngine) -> protocol.Welcome:
    return protocol.Welcome(
        version=protocol.PROTOCOL_VERSION,
        model=engine.model[: protocol.MAX_TEXT],
        vocabulary=tokenizer_fingerprint(engine.model_config),
        vocab_size=engine.vocab_size,
        max_model_len=engine.max_model_len,
    )


def _serve(server: DraftServer, what: str) -> None:
    stopping = False

    def stop(*_: Any) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    logger.warning("MineDraft drafter: ready on %s", what)
    while not stopping:
        server.serve_once()
