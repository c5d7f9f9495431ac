"""Parity, rates, rooflines, whole models and block sizes on the chip of this machine, in pieces.

    python -m benchmarks.on_chip --minutes 9 --out DIR

Pieces run in the order of their worth, each result is written at once, and the same command goes on where the last one
ended. A piece that fails, crashes its process or hangs is recorded, and the next one runs. Needs no network.
"""

import argparse
import json
import signal
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
PACKAGES = FOLDER / "packages"
MAX_BYTES = 50 * 2**20


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.on_chip", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="time for this run (default: %(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results/on_chip"),
        metavar="DIR",
        help="folder of all that is written; what its results have is not run again (default: %(default)s)",
    )
    parser.add_argument("--resume", action="store_true", help="go on with the results in DIR, as is done anyway")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="pieces whose names contain it; may be repeated"
    )
    parser.add_argument("--again", action="store_true", help="run pieces again that crashed, hung or failed")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, which a CPU can run: tests the command")
    parser.add_argument("--table", action="store_true", help="print the table of DIR and run nothing")
    parser.add_argument("--packages", action="store_true", help="print the bytes of packages that travel with the tree")
    parser.add_argument("--plant", default="", help=argparse.SUPPRESS)
    parser.add_argument("--work", metavar="UNTIL", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--environment", type=json.loads, default={}, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.packages:
        return _print_packages()
    if PACKAGES.exists():
        sys.path.append(str(PACKAGES))  # after the machine's own
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes} is not more than 0")

    from benchmarks.on_chip import supervisor
    from benchmarks.on_chip.settings import REFUSED, Settings

    plant = tuple(filter(None, options.plant.split(",")))
    settings = Settings(options.out, options.tiny, tuple(options.only or ()), plant, options.again)
    if options.work is not None:
        from benchmarks.on_chip import worker

        try:
            return worker.main(settings, options.work, options.environment)
        except ValueError as error:
            print(f"on_chip: {error}", file=sys.stderr)
            return REFUSED
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = 0 if options.table else supervisor.supervise(settings, 60 * options.minutes)
        return 2 if status == REFUSED else _print_table(settings) or status
    except ValueError as error:
        parser.error(str(error))


def _print_table(settings) -> int:
    from benchmarks.on_chip import supervisor

    results = supervisor.write_table(settings)
    if not results.cards:
        print(f"on_chip: there are no results in {settings.out}", file=sys.stderr)
        return 2
    print((settings.out / supervisor.TABLE).read_text(encoding="utf-8"), end="")
    return 0 if all(card.is_right for card in results.cards.values()) else 1


def _print_packages() -> int:
    """Prints the size of the packages; returns 1 if it is more than is allowed."""
    files = [path for path in PACKAGES.rglob("*") if path.is_file()] if PACKAGES.exists() else []
    size = sum(path.stat().st_size for path in files)
    name = PACKAGES.relative_to(FOLDER.parent.parent)
    print(f"{name}: {len(files)} files, {size / 2**20:.1f} MiB of at most {MAX_BYTES / 2**20:.0f}")
    return int(size > MAX_BYTES)


if __name__ == "__main__":
    sys.exit(main())
