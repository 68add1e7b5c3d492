"""A file as a script, in a process that is forked (`tests.launch.warm`): its path, and its arguments."""

import runpy
import sys


def main() -> None:
    runpy.run_path(sys.argv.pop(1), run_name="__main__")
