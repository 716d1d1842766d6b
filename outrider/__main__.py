"""`python -m outrider` is the command `outrider`."""

import sys

from outrider.cli import main

if __name__ == "__main__":  # a worker in a process of its own imports this module anew
    sys.exit(main())
