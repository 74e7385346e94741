"""``python -m torch_cute_ops``: what is installed and ready, the kernel cache, and compiling ahead of use."""

import sys

from torch_cute_ops.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
