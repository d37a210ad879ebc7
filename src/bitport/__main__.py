"""``python -m bitport``: the command line."""

import sys

from bitport.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
