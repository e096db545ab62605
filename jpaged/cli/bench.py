"""`jpaged bench`: measurements on this machine."""

import argparse
from dataclasses import dataclass
from importlib import import_module

from jpaged.bench.kernels.options import KernelsOptions
from jpaged.bench.options import ModelOptions
from jpaged.cli.command import Command
from jpaged.cli.options import add_options, read_options


@dataclass(frozen=True, kw_only=True)
class BenchmarkCommand(Command):
    """One word after `jpaged bench`. function: "module:function" that runs it."""

    function: str


def _benchmark(name: str, help: str, options: type, function: str) -> BenchmarkCommand:
    """Make the command of a benchmark whose function takes a dataclass of options.

    The function is imported when it is called, as JAX takes seconds to import.
    """

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add_options(parser, options, title=name)

    def run(arguments: argparse.Namespace) -> None:
        values = read_options(options, arguments)
        module, _, function_name = function.partition(":")
        getattr(import_module(module), function_name)(values)

    return BenchmarkCommand(
        name=name, help=help, add_arguments=add_arguments, run=run, function=function
    )


BENCHMARKS: tuple[BenchmarkCommand, ...] = (
    _benchmark(
        "kernels",
        "check and time paged attention of real models, and peers that are there",
        KernelsOptions,
        "jpaged.bench.kernels.run:bench_kernels",
    ),
    _benchmark(
        "transformers",
        "compare start, throughput and answers with transformers' generate; needs torch",
        ModelOptions,
        "jpaged.bench.compare_transformers:bench_transformers",
    ),
    _benchmark(
        "prefix-cache",
        "measure what the prefix cache gains when none, half or most of a prompt is known",
        ModelOptions,
        "jpaged.bench.prefix_cache:bench_prefix_cache",
    ),
    _benchmark(
        "block-sharing",
        "measure the memory that samples and beams of one prompt save by sharing blocks",
        ModelOptions,
        "jpaged.bench.block_sharing:bench_block_sharing",
    ),
)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(metavar="BENCHMARK", required=True)
    for command in BENCHMARKS:
        benchmark = benchmarks.add_parser(
            command.name, help=command.help, description=command.help, allow_abbrev=False
        )
        command.add_arguments(benchmark)
        benchmark.set_defaults(benchmark=command)


def _run(arguments: argparse.Namespace) -> None:
    arguments.benchmark.run(arguments)


BENCH = Command(
    name="bench",
    help="measure on this machine",
    add_arguments=_add_arguments,
    run=_run,
)
