"""Run code in fresh Python interpreters that can import this package."""

import atexit
import functools
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch_cute_ops

PACKAGE = Path(torch_cute_ops.__file__).parent


def variables_of(**environment: str) -> dict[str, str]:
    """Return environment variables for an interpreter that can import this package. Of the package's settings, the
    variables contain only the given settings."""
    path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_CUTE_OPS_")}
    return {**kept, "PYTHONPATH": path, **environment}


def python(code: str, *, arguments: Sequence[str] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter that can import this package."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=variables_of(**environment), timeout=600)


SERVER = """
import atexit, gc, json, os, sys, tempfile, threading, traceback, types
import torch
# As in conftest.py: collect garbage rarely, and never search torch, whose pages each fork would then copy.
gc.set_threshold(20_000, 20, 20)
gc.collect()
gc.freeze()

def run(code, arguments, environment):
    os.environ.clear()
    os.environ.update(environment)
    first = [path for path in environment["PYTHONPATH"].split(os.pathsep) if path]
    sys.path[:] = ["", *first, *(path for path in sys.path if path and path not in first)]
    sys.argv[:] = ["-c", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(code, "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for line in sys.stdin:
    code, arguments, folder, groups = json.loads(line)
    done = []
    for group in groups:
        children = []
        for environment in group:
            out, err = (tempfile.TemporaryFile("w+") for _ in range(2))
            child = os.fork()
            if child == 0:
                for number, file in enumerate((open(os.devnull), out, err)):
                    os.dup2(file.fileno(), number)
                os.chdir(folder)
                status = run(code, arguments, environment)
                threading._shutdown()
                atexit._run_exitfuncs()
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
    print(json.dumps(done), flush=True)
"""
"""Program that runs code in forks of itself, after it imported torch, which takes most of the time of a start."""


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Start the program `SERVER` once per test process. It ends with the test process, which closes its input."""
    command = [sys.executable, "-c", SERVER]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables_of(), cwd=PACKAGE.parent
    )
    atexit.register(server.kill)
    return server


def forked(code: str, *, arguments: Sequence[str] = (), **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code as ``python`` does, but in a fork of an interpreter that imported only torch. The environment takes
    effect after this import."""
    (done,) = _in_groups(code, [[environment]], arguments)
    return done


def forked_module(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m name`` with these arguments, as ``forked`` runs code."""
    code = f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    return forked(code, arguments=arguments, **environment)


def python_in_each(code: str, *environments: Mapping[str, str]) -> list[subprocess.CompletedProcess[str]]:
    """Run the code once per environment, each time in a fork of an interpreter that imported only torch. An environment
    contains the variables to add."""
    return _in_groups(code, [[each] for each in environments])


def python_in_groups(code: str, *groups: Sequence[Mapping[str, str]]) -> list[subprocess.CompletedProcess[str]]:
    """Run the code once per environment, as ``python_in_each`` does. The runs of a group are simultaneous; the groups
    run one after another."""
    return _in_groups(code, groups)


def _in_groups(
    code: str, groups: Iterable[Sequence[Mapping[str, str]]], arguments: Sequence[str] = ()
) -> list[subprocess.CompletedProcess[str]]:
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    every = [[variables_of(**environment) for environment in group] for group in groups]
    server.stdin.write(json.dumps([code, [*arguments], os.getcwd(), every]) + "\n")
    server.stdin.flush()
    if not select.select([server.stdout], [], [], 120)[0]:
        server.kill()
        _server.cache_clear()
        raise subprocess.TimeoutExpired(code, 120)
    return [subprocess.CompletedProcess(code, *each) for each in json.loads(server.stdout.readline())]
