"""``python -m torch_cute_ops``: what is installed and ready, the kernel cache, and compiling ahead of use."""

import signal
import sys

from torch_cute_ops.cli.main import main

if __name__ == "__main__":
    # By default, SIGTERM would end the process without ending its workers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
