"""Where things are kept that can be made or fetched again."""

import os
from pathlib import Path


def user_cache_folder() -> Path:
    """jpaged's folder in the user's cache: below XDG_CACHE_HOME, or ~/.cache without it.

    Raises `OSError` for a user who has no home.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore relative paths.
    if not base.is_absolute():
        base = _home() / ".cache"
    return base / "jpaged"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise OSError("this user has no home folder") from error
