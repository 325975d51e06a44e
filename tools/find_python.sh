#!/bin/sh
# Prints the Python that set-up uses: $PYTHON if it is set, else the first fitting one of those below.
# It must be 3.11 or newer and able to make a virtual environment; if none is, one line says what to install.
# 3.11 comes first because the versions in constraints.txt are tested with it.
set -u

usable='import sys; sys.exit(0 if sys.version_info >= (3, 11) else 3)'
makes_environments='import ensurepip, venv'
too_old=''
no_venv=''

if [ -n "${PYTHON:-}" ]; then
    set -- "$PYTHON"
else
    set -- python3.11 python3 python3.12 python3.13 python3.14
fi

for candidate in "$@"; do
    path=$(command -v "$candidate" 2>/dev/null) || continue
    if ! "$path" -c "$usable" 2>/dev/null; then
        version=$("$path" -c 'import platform; print(platform.python_version())' 2>/dev/null) && too_old="$too_old $version"
    elif ! "$path" -c "$makes_environments" 2>/dev/null; then
        no_venv=$("$path" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    else
        echo "$path"
        exit 0
    fi
done

if [ -n "$no_venv" ]; then
    echo "inferq: $no_venv cannot make virtual environments; install it: apt-get install ${no_venv}-venv" >&2
elif [ -n "${PYTHON:-}" ]; then
    echo "inferq: PYTHON=$PYTHON is not a Python of version 3.11 or newer; name another one or leave PYTHON unset" >&2
elif [ -n "$too_old" ]; then
    echo "inferq: needs Python 3.11 or newer (found only:$too_old); install one: apt-get install python3.11 python3.11-venv" >&2
else
    echo "inferq: needs Python 3.11 or newer; install it: apt-get install python3 python3-venv" >&2
fi
exit 1
