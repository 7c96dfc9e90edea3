# Sourced by the commands in this folder: sets ROOT (the checkout) and PYTHON (3.11 or newer, able to make environments).

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

find_python() {
    local candidate
    for candidate in ${DAGENGINE_PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return 0
        fi
    done
    echo "No Python 3.11 or newer with venv was found (looked at: ${DAGENGINE_PYTHON:-python3, python3.11 … 3.13})." >&2
    echo "Install one (on Debian and Ubuntu: apt install python3 python3-venv) or name it: DAGENGINE_PYTHON=/path $0" >&2
    return 1
}

PYTHON="$(find_python)"
