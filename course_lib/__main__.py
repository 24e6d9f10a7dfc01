"""The command line: `python -m course_lib COMMAND`, each with `--help`."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn


def doctor(_: argparse.Namespace) -> int:
    """Say whether the course can run here (exit code 0) or what it lacks (1)."""
    from course_lib.doctor import run

    return run()


def model(_: argparse.Namespace) -> int:
    """Fetch and convert the small model where that is still to be done, and say where it is."""
    from course_lib.models import SMALL_MODEL_HUB_ID, find_small_model, load_small_model

    if find_small_model() == SMALL_MODEL_HUB_ID:
        print("Not on this machine; asking the hub ...")
    load_small_model(device="cpu")
    print(f"The small model is ready: {find_small_model()}")
    return 0


def finetune(options: argparse.Namespace) -> int:
    """Fine-tune a model with GRPO; prints held-out accuracy and replies before and after."""
    from course_lib.finetune import finetune

    return finetune(options)


def finetune_options(parser: argparse.ArgumentParser) -> None:
    from course_lib.finetune import add_finetune_options

    add_finetune_options(parser)


def evaluate(options: argparse.Namespace) -> int:
    """Play held-out problems greedily; prints the accuracy with its interval and some replies."""
    from course_lib.finetune import evaluate

    return evaluate(options)


def evaluate_options(parser: argparse.ArgumentParser) -> None:
    from course_lib.finetune import add_evaluate_options

    add_evaluate_options(parser)


def progress(_: argparse.Namespace) -> int:
    """Show which exercises are solved."""
    from course_lib.exercises import progress_table

    print(progress_table())
    return 0


# Adding a command: a function from its parsed options to the exit code, and one entry here with a function
# that adds its options. Imports stand inside the functions, so that `--help` does not wait for torch.
COMMANDS = {
    "doctor": (doctor, lambda parser: None),
    "model": (model, lambda parser: None),
    "finetune": (finetune, finetune_options),
    "evaluate": (evaluate, evaluate_options),
    "progress": (progress, lambda parser: None),
}

SET_UP = "Set up first, with make learn or as in the README; then use the Python of that set-up: .venv/bin/python"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code: 0 good, 1 not good, 2 wrong input, said in one line."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        options = _parser(argv[:1]).parse_args(argv)
        return options.run(options)
    except ModuleNotFoundError as error:
        what = f"{error.msg}. {SET_UP}"
    except KeyboardInterrupt:
        print(f"course_lib {argv[0]}: stopped", file=sys.stderr)
        return 130
    except (ValueError, OSError, FloatingPointError) as error:
        what = str(error)
    print(f"course_lib {argv[0]}: {what}", file=sys.stderr)
    return 2


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line: the usage of `finetune` alone would fill the screen in front of it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def _parser(chosen: Sequence[str]) -> argparse.ArgumentParser:
    parser = Parser(prog="course_lib", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (run, add_options) in COMMANDS.items():
        command = commands.add_parser(name, help=run.__doc__.splitlines()[0], description=run.__doc__)
        if name in chosen:  # the options of the others would only be built, slowly, to be thrown away
            add_options(command)
        command.set_defaults(run=run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
