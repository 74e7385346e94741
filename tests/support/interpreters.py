"""Run code in fresh Python interpreters that can import this package."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch_cute_ops

PACKAGE = Path(torch_cute_ops.__file__).parent


def variables_of(**environment: str) -> dict[str, str]:
    """Return environment variables for an interpreter that can import this package. Of the package's settings, they
    contain only the given settings."""
    path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_CUTE_OPS_")}
    return {**kept, "PYTHONPATH": path, **environment}


def python(code: str, *, arguments: Sequence[str] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that can import this package."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=variables_of(**environment), timeout=120)


FORKS = """
import json, os, sys, tempfile, traceback
import torch

code, groups = json.loads(sys.argv[1])
done = []
for group in groups:
    children = []
    for environment in group:
        out, err = (tempfile.TemporaryFile("w+") for _ in range(2))
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.environ.update(environment)
            status = 1
            try:
                exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        children.append((child, out, err))
    for child, *files in children:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        texts = []
        for file in files:
            file.seek(0)
            texts.append(file.read())
            file.close()
        done.append((status, *texts))
print(json.dumps(done))
"""


def python_in_each(code: str, *environments: Mapping[str, str]) -> list[subprocess.CompletedProcess[str]]:
    """Run the code once per environment, each time in a fork of one fresh interpreter that has imported torch: this
    import takes most of the time. An environment contains the variables to add."""
    return python_in_groups(code, *([each] for each in environments))


def python_in_groups(code: str, *groups: Sequence[Mapping[str, str]]) -> list[subprocess.CompletedProcess[str]]:
    """Run the code once per environment, as ``python_in_each`` does. The runs of a group are simultaneous; the groups
    run one after another."""
    done = python(FORKS, arguments=[json.dumps([code, groups])])
    assert done.returncode == 0, done.stderr
    return [subprocess.CompletedProcess(code, *each) for each in json.loads(done.stdout)]
