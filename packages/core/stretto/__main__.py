"""`python -m stretto`: runs the command line of the application package."""

import sys
from collections.abc import Callable

from stretto.core.errors import UserError
from stretto.doors.loading import from_package


def main() -> None:
    """Run the command line. If the application package is not installed, print how to install it and exit with 2."""
    try:
        command: Callable[[], None] = from_package("stretto_app.cli.main:main", "python -m stretto")
    except UserError as error:
        print(f"stretto: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    command()


if __name__ == "__main__":
    main()
