"""The version of the installed package."""

from importlib import metadata


def version() -> str:
    try:
        return metadata.version("jpaged")
    except metadata.PackageNotFoundError:
        return "unknown"  # a checkout that is not installed
