"""Print the time of a process's first call as a line of JSON: `python -m benchmarks.first_call`.

Imports, CUDA initialisation and the first call are timed separately. The time of the first call includes compiling the
kernel, loading the module, and the launch, and ends when the kernel has ended. If the environment names a filled disk
cache, the kernel is read from the cache instead of being compiled.
"""

from __future__ import annotations

import json
import time

start = time.perf_counter()
import torch  # noqa: E402

import torch_cute_ops  # noqa: E402, F401

imported = time.perf_counter()


def main() -> None:
    x = torch.randn(8, 7168, dtype=torch.bfloat16, device="cuda")
    w = torch.randn(7168, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    times = [time.perf_counter()]
    for _ in range(2):
        torch.ops.cute.rmsnorm_fp4quant(x, w)
        torch.cuda.synchronize()
        times.append(time.perf_counter())
    seconds = {
        "import_s": imported - start,
        "cuda_start_s": times[0] - imported,
        "first_call_s": times[1] - times[0],
        "second_call_us": (times[2] - times[1]) * 1e6,
    }
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
