"""``python -m shardtrace``: the command ``shardtrace``."""

import sys

from shardtrace.cli import main

sys.exit(main())
