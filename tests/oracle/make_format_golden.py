"""Writes tests/oracle/golden/formats: modules that bitsandbytes, compressed-tensors and Transformers quantized.

Needs torch, Transformers, bitsandbytes and compressed-tensors. Run twice, it writes the same bytes.
"""

import shutil

from tests.oracle.format_cases import FOLDER, cases, save


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    sizes = [save(case).stat().st_size for case in cases(seed=0)]
    print(f"{len(sizes)} modules, {sum(sizes):,} bytes, the largest {max(sizes):,}")


if __name__ == "__main__":
    main()
