"""`python -m hurtle`, the same as the command `hurtle`."""

import sys

from hurtle.cli import main

sys.exit(main())
