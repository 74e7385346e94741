"""``python -m torch_cute_ops``: installation report, kernel cache, compiling ahead of time, tuning, replay of calls."""

import signal
import sys

from torch_cute_ops.cli.main import main

if __name__ == "__main__":
    # Exit by an exception: SIGTERM's default action would end this process but leave its worker processes running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
