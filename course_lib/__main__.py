"""The command line: `python -m course_lib COMMAND`, each with `--help`."""

import argparse
import sys
from collections.abc import Sequence


def model(_: argparse.Namespace) -> int:
    """Fetch and convert the small model where that is still to be done, and say where it is."""
    from course_lib.models import find_small_model, load_small_model

    load_small_model(device="cpu")
    print(f"The small model is ready: {find_small_model()}")
    return 0


# Adding a command: a function from its parsed options to the exit code, and one entry here with a function
# that adds its options. Imports stand inside the functions, so that `--help` does not wait for torch.
COMMANDS = {
    "model": (model, lambda parser: None),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code: 0 good, 1 not good, 2 wrong input, said in one line."""
    parser = argparse.ArgumentParser(prog="course_lib", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (run, add_options) in COMMANDS.items():
        command = commands.add_parser(name, help=run.__doc__.splitlines()[0], description=run.__doc__)
        add_options(command)
        command.set_defaults(run=run)
    options = parser.parse_args(argv)
    try:
        return options.run(options)
    except ValueError as error:
        print(f"course_lib {options.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
