"""`python -m trimode_vlm.training`, also under torchrun."""

import sys

from trimode_vlm.training.cli import train

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))
