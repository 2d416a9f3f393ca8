#!/usr/bin/env bash
# Holds what requirements/ lists against PyPI's known vulnerabilities, and the code against bandit's rules.
#
#   scripts/audit.sh      needs the tools of requirements/release.txt on PATH, and PyPI's JSON service
#
# pip-audit by itself ends well where it could look nothing up, as behind a mirror without that service. Here a package
# that was skipped is a failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
    "") ;;
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit
        ;;
    *)
        printf "audit: unknown argument '%s'; scripts/audit.sh --help tells what there is\n" "$1" >&2
        exit 2
        ;;
esac
for tool in bandit pip-audit python3; do
    command -v "$tool" >/dev/null 2>&1 || { printf 'audit: no %s: pip install -r requirements/release.txt\n' "$tool" >&2 && exit 2; }
done

bandit --quiet --configfile pyproject.toml --recursive hotspa_megatron examples scripts
printf 'audit: bandit finds nothing\n'

report=$(mktemp)
trap 'rm -f "$report"' EXIT
lists=()
for name in locked torch megatron release; do
    lists+=(--requirement "requirements/$name.txt")
done
code=0
pip-audit --disable-pip --require-hashes --progress-spinner off --format json --output "$report" "${lists[@]}" || code=$?
python3 - "$report" "$code" <<'PY'
import json, sys
try:
    with open(sys.argv[1], encoding="utf-8") as file:
        packages = json.load(file)["dependencies"]
except ValueError:
    sys.exit(f"audit: pip-audit gave no report (exit code {sys.argv[2]})")
skipped = [each for each in packages if "skip_reason" in each]
known = [(each, hole) for each in packages for hole in each.get("vulns", ())]
for each, hole in known:
    print(f"audit: {each['name']} {each['version']}: {hole['id']}, mended in {', '.join(hole['fix_versions']) or 'no release'}")
for each in skipped:
    print(f"audit: {each['name']}: not looked at: {each['skip_reason'][:200]}")
if known or skipped or not packages or sys.argv[2] != "0":
    sys.exit(f"audit: {len(known)} known vulnerabilities; {len(skipped)} of {len(packages)} packages were not looked at")
print(f"audit: {len(packages)} packages were looked at; none has a known vulnerability")
PY
