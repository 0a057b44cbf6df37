#!/bin/sh
# Makes .venv: a Python >= 3.11, uv from its hashed lock, the locked packages, this project.
# Run by make whenever a lock or pyproject.toml is newer than the last set-up. It needs no root,
# no compiler and no address: pip's own settings say where packages come from.
set -eu
cd "$(dirname "$0")/.."

venv=.venv
is_supported='import sys; sys.exit(sys.version_info < (3, 11))'

fail() {
    echo "magnetar: $1" >&2
    exit 1
}

# Sets `python` to the first usable candidate, or says in one line what is missing.
find_python() {
    problem="no Python found: install Python 3.11 or newer, or run: make PYTHON=<path of one>"
    rank=0
    for python in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11 python; do
        version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
            continue
        if ! "$python" -c "$is_supported" 2>/dev/null; then
            [ "$rank" -ge 1 ] && continue
            rank=1
            problem="$python is Python $version, too old: install Python 3.11 or newer, \
or run: make PYTHON=<path of one>"
        elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
            [ "$rank" -ge 2 ] && continue
            rank=2
            problem="$python (Python $version) lacks the venv module: install it (Debian, Ubuntu: \
package python$version-venv), or run: make PYTHON=<path of another Python>"
        else
            return 0
        fi
    done
    fail "$problem"
}

# uv does not read pip's configuration; hand it over unless uv has its own.
pip_setting() {
    "$venv/bin/python" -m pip config get "global.$1" 2>/dev/null || true
}

hand_over_pip_settings() {
    if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
        index=${PIP_INDEX_URL:-$(pip_setting index-url)}
        [ -z "$index" ] || export UV_DEFAULT_INDEX="$index"
    fi
    if [ -z "${SSL_CERT_FILE:-}" ]; then
        cert=${PIP_CERT:-$(pip_setting cert)}
        [ -z "$cert" ] || export SSL_CERT_FILE="$cert"
    fi
}

made_in=$(cat "$venv/.made-in" 2>/dev/null || pwd)
if [ "$made_in" != "$(pwd)" ] || ! "$venv/bin/python" -c "$is_supported" 2>/dev/null; then
    find_python
    echo "magnetar: making $venv with $python (Python $version)"
    echo "magnetar: the first time this downloads about 650 MB: Spark 456, Arrow 55, a Java 35, tools"
    "$python" -m venv --clear "$venv" || fail "could not make $venv with $python: see above"
fi

if ! "$venv/bin/uv" --version >/dev/null 2>&1 ||
    ! "$venv/bin/python" -c 'import setuptools' 2>/dev/null; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes \
        --only-binary :all: --requirement requirements/uv.txt ||
        fail "could not install uv and setuptools: check that pip reaches its package registry, then repeat"
fi

hand_over_pip_settings
# uv's own lock is among the sources, or uv would remove itself.
# Compiled here, as pip does it: where Python may not write bytecode, a server would compile all that
# it loads at every start, which takes longer than all else that it does.
# PySpark is the one package that its project gives away as source alone (Python and jars, nothing to
# compile): its wheel is put together here, by the locked setuptools.
"$venv/bin/uv" pip sync --quiet --compile-bytecode --python "$venv/bin/python" --require-hashes \
    --only-binary :all: --no-binary pyspark --no-build-isolation \
    requirements/uv.txt requirements/dev.txt ||
    fail "could not install the locked packages: see above"
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation \
    --editable . || fail "could not install this project into $venv: see above"
"$venv/bin/python" -m compileall -q src/magnetar || fail "could not compile src/magnetar: see above"
pwd >"$venv/.made-in"
echo "magnetar: $venv is ready"
