"""`python -m jkv` is the command line."""

import sys

from jkv.cli import main

sys.exit(main())
