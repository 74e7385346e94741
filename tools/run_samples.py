"""Run every op on its sample inputs on the GPU, once each, and compare with the reference: the program to sanitise.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tools/run_samples.py

and likewise with ``racecheck``, ``initcheck`` and ``synccheck``.
"""

import torch

from torch_cute_ops.ops._spec import as_tuple
from torch_cute_ops.registry import OPS


def main() -> None:
    """Run the samples; exit with a message at the first wrong output."""
    calls = 0
    for spec in OPS.values():
        op = getattr(torch.ops.cute, spec.name)
        for sample in spec.sample_inputs(torch.device("cuda")):
            outputs = as_tuple(op(*sample.args, **sample.kwargs))
            expected = as_tuple(spec.reference(*sample.args, **sample.kwargs))
            for name, output, reference in zip(spec.outputs, outputs, expected, strict=True):
                differing = (output.view(torch.uint8) != reference.view(torch.uint8)).float().mean().item()
                # The norm's sum has another order than the reference's: see SPEC's one in a thousand.
                if output.numel() and differing > 2e-2:
                    raise SystemExit(f"{spec.name} {sample.name}: {differing:.1%} of the bytes of {name} differ")
            calls += 1
    print(f"{calls} calls")


if __name__ == "__main__":
    main()
