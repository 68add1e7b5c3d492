"""`python -m stretto`: the command line, which is the application's."""

import sys
from collections.abc import Callable

from stretto.core.errors import UserError
from stretto.doors.packages import from_package


def main() -> None:
    """Run a command; without the application, say how to install it."""
    try:
        command: Callable[[], None] = from_package("stretto_app.cli.main:main", "python -m stretto")
    except UserError as error:
        print(f"stretto: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    command()


if __name__ == "__main__":
    main()
