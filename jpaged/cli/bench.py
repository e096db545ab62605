"""`jpaged bench`: measurements on this machine."""

import argparse

from jpaged.bench.kernels.options import KernelsOptions
from jpaged.cli.command import Command
from jpaged.cli.options import add_options, read_options


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


def _add_kernels_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, KernelsOptions, title="kernels")


def _run_kernels(arguments: argparse.Namespace) -> None:
    options = read_options(KernelsOptions, arguments)

    from jpaged.bench.kernels.run import bench_kernels

    bench_kernels(options)


KERNELS = Command(
    name="kernels",
    help="check and time paged attention of real models, and peers that are there",
    add_arguments=_add_kernels_arguments,
    run=_run_kernels,
)
BENCHMARKS: tuple[Command, ...] = (KERNELS,)
BENCH = Command(
    name="bench",
    help="measure on this machine",
    add_arguments=_add_arguments,
    run=_run,
)
