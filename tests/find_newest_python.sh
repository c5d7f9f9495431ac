#!/bin/sh
# Prints the path of a Python of 3.12 or newer, of the version given if there is one; fails when there is none. pyenv's
# shims exist for versions that are not selected and then fail, so each candidate is run.
for candidate in ${1:+"python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python3} python3.14 python3.13 python3.12 python3 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.14*/bin/python3 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13*/bin/python3 \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
        "$candidate" -c 'import sys; print(sys.executable)'
        exit 0
    fi
done
exit 1
