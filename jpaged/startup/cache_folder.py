"""Where things are kept that can be made or fetched again."""

import os
from pathlib import Path


def user_cache_folder() -> Path:
    """jpaged's folder in the user's cache: below XDG_CACHE_HOME, or ~/.cache without it."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore relative paths.
    return (base if base.is_absolute() else Path.home() / ".cache") / "jpaged"
