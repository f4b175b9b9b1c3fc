"""``minedraft serve``: vLLM's OpenAI-compatible server with a drafter beside it.

vLLM's own serve command runs in this process, with our options among its own. A drafter of our
own is a child of this process, and a thread looks after it.
"""

import argparse
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.logger import configure_logging_from_args, init_logger
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from minedraft import beside, protocol
from minedraft.config import ENV_CONTROL, ENV_TRACE, ConfigError, Endpoint, MineDraftConfig
from minedraft.drafter.child import DrafterError, DrafterProcess, NoDrafterError, greet
from minedraft.drafter.supervisor import Supervisor
from minedraft.engine_options import one_line, with_cpu_defaults
from minedraft.placement import Placement
from minedraft.verifier import refusals
from minedraft.verifier.patches import INTERRUPTION_OF_A_START
from minedraft.verifier.plugin import class_options

logger = init_logger("vllm.minedraft")

MIDDLEWARE = "minedraft.status.StatusMiddleware"
FIRST_GREETING_S = 3.0
"""A drafter elsewhere that does not answer by then may come later."""
SIGNAL_AGAIN_S = 5.0


def run_stock(options: argparse.Namespace) -> int:
    """Serves without drafts until SIGTERM or SIGINT; ``options`` as cli.py parses them."""
    serving = _Serving(options)
    beside.say_unused(vars(options))
    serving.run(serving.given, beside.target_only(options.target_cores))
    return 0


def run(options: argparse.Namespace, folder: Path) -> int:
    """Serves with drafts until SIGTERM or SIGINT.

    ``folder`` is private and for this run. Raises ConfigError and DrafterError for what cannot be.
    """
    serving = _Serving(options)
    config = {name: getattr(options, name) for name in MineDraftConfig.__struct_fields__}
    ours = class_options(MineDraftConfig.parse(config), options.num_speculative_tokens)
    settings = beside.merged(serving.given, ours)
    settings["middleware"] = [*(settings.get("middleware") or []), MIDDLEWARE]
    wish = beside.DrafterOptions.of(options)
    hello = _checked_target(options.target, settings)
    placement = beside.place(wish, settings)
    with _drafter(wish, placement, settings, hello, folder) as endpoint:
        os.environ.update(endpoint.environment())
        if options.trace:
            os.environ[ENV_TRACE] = str(Path(options.trace).absolute())
        logger.info(
            "MineDraft: %s, K=%d, drafter %s; %s; control folder %s",
            options.mode,
            options.num_speculative_tokens,
            wish.draft_model or wish.drafter,
            placement,
            os.environ[ENV_CONTROL],
        )
        serving.run(settings, placement)
    return 0


class _Serving:
    """vLLM's serve command."""

    def __init__(self, options: argparse.Namespace) -> None:
        if current_platform.is_cpu():
            # The worker in the process of its engine: with few cores, its busy waiting for the
            # other costs more than it brings.
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM's own command
        command = ServeSubcommand()
        parser = FlexibleArgumentParser(prog="minedraft")
        flags = command.subparser_init(parser.add_subparsers(dest="subparser"))
        self._command = command
        self._arguments = parser.parse_args(["serve", options.target, *options.engine_flags])
        configure_logging_from_args(self._arguments)
        try:
            command.validate(self._arguments)
        except (TypeError, ValueError) as error:
            raise ConfigError(one_line(error)) from error
        given = vars(self._arguments).items()
        self.given = with_cpu_defaults(
            {name: value for name, value in given if value != flags.get_default(name)}
        )
        """The flags that the user set, by name, and our defaults for a CPU."""

    def run(self, settings: dict[str, Any], placement: Placement) -> None:
        """Serves with these flags until the end."""
        for name, value in settings.items():
            setattr(self._arguments, name, value)
        INTERRUPTION_OF_A_START.apply()
        try:
            with beside.target_device(placement, settings, own_process=True):
                self._command.cmd(self._arguments)
        finally:
            # Those that vLLM forgets when one of several engines does not start: this process
            # would wait for them for ever.
            for child in multiprocessing.active_children():
                child.kill()


def _checked_target(model: str, settings: dict[str, Any]) -> protocol.Hello:
    try:
        target = beside.vllm_config(model, settings)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{model}: {one_line(error)}") from error
    refusals.check_target(target)
    return beside.hello(target.model_config)


@contextmanager
def _drafter(
    wish: beside.DrafterOptions,
    placement: Placement,
    settings: dict[str, Any],
    hello: protocol.Hello,
    folder: Path,
) -> Iterator[Endpoint]:
    """Where the drafter is, while it is served with."""
    if wish.drafter is not None:
        yield _elsewhere(Endpoint(wish.drafter, wish.key_file), hello)
        return
    beside.check_draft_model(hello, wish, settings)
    child = beside.drafter_process(wish, placement, settings, folder)
    with _supervised(child, hello):
        yield child.endpoint


def _elsewhere(endpoint: Endpoint, hello: protocol.Hello) -> Endpoint:
    try:
        greet(endpoint, hello, FIRST_GREETING_S)
    except NoDrafterError as error:
        logger.warning("MineDraft: %s Serving without drafts until it comes.", error)
    return endpoint


@contextmanager
def _supervised(child: DrafterProcess, hello: protocol.Hello) -> Iterator[None]:
    """While the drafter is needed. One that never gets ready ends the server. Raises its error."""
    failures: list[DrafterError] = []
    ended = threading.Event()

    def end(error: DrafterError) -> None:
        failures.append(error)
        os.kill(os.getpid(), signal.SIGTERM)  # vLLM's graceful end
        # vLLM drops a signal that comes while its engines start.
        while not ended.wait(SIGNAL_AGAIN_S):
            os.kill(os.getpid(), signal.SIGTERM)

    supervisor = Supervisor(child, hello, end)
    try:
        yield
    finally:
        ended.set()
        supervisor.stop()
        if failures:
            raise failures[0]
