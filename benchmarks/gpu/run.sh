#!/usr/bin/env bash
# Measure plans on a real NVIDIA GPU: benchmarks/gpu/run.sh [--dry-run] [--programs FOLDER] [--seconds S] [SPEC ...]
# PYTHON names the interpreter; otherwise the first that has what is needed is taken, and failing that a new
# environment is tried. Exit status: 0 measured, 1 every program failed, 2 no GPU here or no JAX for it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

dry=
for argument in "$@"; do [[ $argument != --dry-run ]] || dry=1; done
if [[ -z $dry ]] && ! compgen -G "/dev/nvidia[0-9]*" >/dev/null && ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
  echo "no NVIDIA GPU here: benchmarks/gpu/run.sh measures on one; --dry-run tries the script without" >&2
  exit 2
fi

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_MEM_FRACTION=.93
export PIP_DISABLE_PIP_VERSION_CHECK=1
if [[ -n $dry ]]; then export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_backend_optimization_level=0; fi

# Prints what is missing, nothing if all is there. A dry run takes any JAX that the package takes.
check='
import sys
dry = bool(sys.argv[1:])
try:
    import jax
except ImportError:
    sys.exit("no JAX")
if tuple(map(int, jax.__version__.split(".")[:2])) < ((0, 10) if dry else (0, 11)):
    sys.exit(f"jax {jax.__version__}, older than 0.11")
if not dry:
    try:
        jax.devices("cuda")
    except Exception as error:
        sys.exit(f"jax {jax.__version__} without a GPU: {str(error).splitlines()[0][:200]}")
'
tried=()
usable() { # usable PYTHON: whether it can run the benchmark; says why not at the end
  "$1" -c '' 2>/dev/null || return 1 # not there, or a shim of nothing
  local why
  why=$("$1" -c "$check" $dry 2>&1 >/dev/null) && return 0
  tried+=("$1: $(tail -n 1 <<<"$why")")
  return 1
}

python=
for candidate in ${PYTHON:-python3 python3.12 .venv-312/bin/python .venv/bin/python .venv-gpu/bin/python}; do
  if usable "$candidate"; then python=$candidate && break; fi
done
if [[ -z $python && -z ${PYTHON:-} ]]; then
  # Whatever wheels pip finds: an index, or the folder .whl of this checkout.
  wanted=("jax[cuda13]>=0.11" flax optax) links=()
  if [[ -n $dry ]]; then wanted=(jax flax optax); fi
  if [[ -d .whl ]]; then links=(--find-links .whl); fi
  echo "no Python here has what is needed; trying a new environment, .venv-gpu ..." >&2
  for base in python3.12 python3.13 python3; do
    if "$base" -m venv --clear .venv-gpu 2>/dev/null; then break; fi
  done
  if timeout 180 .venv-gpu/bin/python -m pip install -q --retries 0 --timeout 10 "${links[@]}" "${wanted[@]}"; then
    if usable .venv-gpu/bin/python; then python=.venv-gpu/bin/python; fi
  else
    tried+=(".venv-gpu: pip could not install ${wanted[*]}")
  fi
fi
if [[ -z $python ]]; then
  echo "needed: Python >= 3.12 with jax[cuda13] >= 0.11, and flax and optax for most workloads. Tried:" >&2
  printf '  %s\n' "${tried[@]}" >&2
  exit 2
fi
echo "with $("$python" -c 'import sys, jax; print(sys.executable, "jax", jax.__version__)' 2>/dev/null)"
exec "$python" -m benchmarks.gpu.run "$@"
