"""Which worker runs which tests, when several run."""

from xdist.scheduler import LoadScopeScheduling

# Tests that share neither engines nor servers.
INDEPENDENT = ("tests/kernels/",)


class FileScheduling(LoadScopeScheduling):
    """Gives a file's tests to one worker, which makes their engines and servers once.

    Independent tests go to any worker that is free.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return nodeid if file.startswith(INDEPENDENT) else file
