"""`python -m jpaged` is the command line."""

import sys

from jpaged.cli.main import main

sys.exit(main())
