"""`python -m expunge`."""

import sys

from expunge.cli import main

sys.exit(main())
