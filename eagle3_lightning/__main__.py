"""`python -m eagle3_lightning` is `eagle3`."""

import sys

from eagle3_lightning.cli import main

if __name__ == "__main__":
    sys.exit(main())
