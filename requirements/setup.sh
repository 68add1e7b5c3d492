#!/bin/sh
# Makes or completes .venv in the current folder: `setup.sh run` for what runs, `setup.sh test` for the checks on
# top, `setup.sh docs` for the site, `setup.sh browser` for the tests in a browser.
# PYTHON  interpreter to use (otherwise the first on the PATH that is 3.11 or newer)
# TORCH   version of torch to install
# EXTRAS  extras of stretto, by comma, that `setup.sh run` installs too
set -eu

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

suitable() {
    "$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        suitable "$PYTHON" || fail "PYTHON=$PYTHON is no Python 3.11 or newer with the venv module"
        echo "$PYTHON"
        return
    fi
    for name in python3 python3.13 python3.12 python3.11; do
        if suitable "$name"; then
            echo "$name"
            return
        fi
    done
    fail "no Python 3.11 or newer with the venv module on the PATH (found: $(python3 --version 2>&1 || true));" \
        "on Debian: apt-get install python3 python3-venv; or name one: make setup PYTHON=/path/to/python3"
}

make_environment() {
    python=$(find_python)
    echo "setup: .venv with $("$python" --version)"
    if "$python" -c 'import ensurepip' >/dev/null 2>&1; then
        "$python" -m venv --clear .venv
    elif "$python" -m pip --version >/dev/null 2>&1; then
        "$python" -m venv --clear --without-pip .venv
        "$python" -m pip --python .venv/bin/python install --quiet pip
    else
        fail "$python can make no environment with pip in it; on Debian: apt-get install python3-venv"
    fi
}

pip_install() {
    .venv/bin/python -m pip install --quiet "$@"
}

has_gpu() {
    command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1
}

install_torch() {
    if ! has_gpu; then
        words=$(pip_install --constraint requirements/run.txt "torch==$TORCH+cpu" 2>&1) && return
        case $words in
        *"No matching distribution found for torch=="*) ;;
        *)
            printf '%s\n' "$words" >&2
            fail "torch $TORCH could not be installed; pip says why"
            ;;
        esac
        echo "setup: no index in use offers the CPU build of torch $TORCH; taking the standard build"
    fi
    pip_install --constraint requirements/run.txt "torch==$TORCH"
}

# The sandbox of code rewards is strongest with bubblewrap; without it stretto steps down to what the kernel offers.
offer_bubblewrap() {
    command -v bwrap >/dev/null 2>&1 && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        echo "setup: bubblewrap, for the sandbox of code rewards"
        { timeout 120 apt-get install -y --no-install-recommends bubblewrap ||
            { timeout 120 apt-get update && timeout 120 apt-get install -y --no-install-recommends bubblewrap; }; } \
            >/dev/null 2>&1 && return
    fi
    echo "setup: no bubblewrap; code rewards will use a weaker sandbox (on Debian: apt-get install bubblewrap)"
}

need_chromium() {
    command -v chromium >/dev/null 2>&1 && return
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 ||
        fail "the tests in a browser need Chromium on the PATH (on Debian: apt-get install chromium)"
    echo "setup: chromium, for the tests in a browser"
    apt-get update >/dev/null 2>&1 || true
    apt-get install -y --no-install-recommends chromium fonts-dejavu-core >/dev/null 2>&1 || fail "apt-get installs no chromium"
}

suitable .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1 || make_environment
case $1 in
run)
    echo "setup: torch $TORCH and the packages of requirements/run.txt (minutes, the first time)"
    install_torch
    pip_install --requirement requirements/run.txt
    editable=
    for folder in packages/*/pyproject.toml; do editable="$editable --editable ${folder%/pyproject.toml}"; done
    # shellcheck disable=SC2086  # words
    pip_install --no-deps --no-build-isolation $editable --editable .
    [ -z "${EXTRAS:-}" ] || pip_install --constraint requirements/test.txt "stretto[$EXTRAS]"
    offer_bubblewrap
    ;;
test | docs | browser)
    echo "setup: the packages of requirements/$1.txt"
    pip_install --requirement "requirements/$1.txt"
    [ "$1" != browser ] || need_chromium
    ;;
*) fail "unknown part: $1 (run, test, docs or browser)" ;;
esac
touch ".venv/ready-$1"
