"""`python -m trimode_vlm` is the `trimode-vlm` command."""

import sys

from trimode_vlm.cli import main

if __name__ == "__main__":
    sys.exit(main())
