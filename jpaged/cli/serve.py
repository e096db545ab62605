"""`jpaged serve`: the HTTP server."""

import argparse
import logging

from jpaged.cli.command import Command
from jpaged.cli.model_argument import add_model_argument, apply_model_argument
from jpaged.cli.options import add_options, read_options
from jpaged.config import EngineConfig
from jpaged.server.options import ServerOptions


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    add_options(parser, ServerOptions, title="server")
    add_options(parser, EngineConfig, title="engine")


def _run(arguments: argparse.Namespace) -> None:
    apply_model_argument(arguments)
    options = read_options(ServerOptions, arguments)
    config = read_options(EngineConfig, arguments)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("jpaged").setLevel(logging.INFO)

    from jpaged.server.run import serve

    serve(config, options)


SERVE = Command(
    name="serve",
    help="serve a model over HTTP with the OpenAI API",
    add_arguments=_add_arguments,
    run=_run,
    sigterm_code=0,  # SIGTERM is how servers are asked to stop
)
