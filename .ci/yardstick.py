"""Processor seconds of a fixed piece of work, in two processes side by side: how fast this machine is just now.

Tests start interpreters, import, and run bytecode; so does this, with the standard library alone.
"""

import argparse
import ast
import asyncio
import inspect
import resource
import subprocess
import sys
import typing

PROCESSES = 2
INTERPRETERS = 15
MODULES = "import asyncio, decimal, email.message, http.client, json, logging, sqlite3, typing, unittest, xml.dom.minidom"


def work() -> None:
    """Start interpreters that import, and compile sources."""
    for _ in range(INTERPRETERS):
        subprocess.run([sys.executable, "-c", MODULES], check=True)
    sources = [inspect.getsource(module) for module in (argparse, ast, asyncio.events, inspect, subprocess, typing)]
    for _ in range(2):
        for source in sources:
            compile(ast.unparse(ast.parse(source)), "<yardstick>", "exec")


if __name__ == "__main__":
    if sys.argv[1:] == ["work"]:
        work()
    else:
        running = [subprocess.Popen([sys.executable, __file__, "work"]) for _ in range(PROCESSES)]
        if any(process.wait() for process in running):
            sys.exit("the yardstick failed")
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"{used.ru_utime + used.ru_stime:.2f}")
