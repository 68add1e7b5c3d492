"""`python -m stretto`: the command line."""

from stretto_app.cli.main import main

if __name__ == "__main__":
    main()
