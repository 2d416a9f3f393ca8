#!/usr/bin/env bash
# Holds what requirements/ lists against PyPI's known vulnerabilities, and the code against bandit's rules.
#
#   scripts/audit.sh      needs the tools of requirements/release.txt on PATH, and PyPI's JSON service
#
# pip-audit by itself ends well where it could look nothing up, as behind a mirror without that service, and passes over
# what is listed for another Python than its own. Here a release that was not looked at is a failure.
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

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# What pip-audit reads is a copy: every release that is listed, for whichever Python, and under the version that PyPI
# knows (2.13.0 of 2.13.0+cpu). It takes no name twice, so there are as many copies as one has releases.
python3 - "$folder" requirements/{locked,torch,megatron,build,release}.txt <<'PY'
import pathlib, re, sys
releases = {}
for path in map(pathlib.Path, sys.argv[2:]):
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line or line[0] in " #":
            continue
        found = re.match(r"([A-Za-z0-9._-]+)==([^\s;+\\]+)", line)
        if found is None:
            sys.exit(f"audit: {path}: no one release: {line}")
        releases.setdefault(re.sub("[-_.]+", "-", found[1]).lower(), {})[found[2]] = None
while any(releases.values()):
    chosen = {name: next(iter(versions)) for name, versions in releases.items() if versions}
    text = "".join(f"{name}=={version}\n" for name, version in chosen.items())
    (pathlib.Path(sys.argv[1]) / f"{len(max(releases.values(), key=len))}.txt").write_text(text, encoding="utf-8")
    for name, version in chosen.items():
        del releases[name][version]
PY
code=0
for list in "$folder"/*.txt; do
    pip-audit --disable-pip --no-deps --progress-spinner off --format json --output "${list%.txt}.json" \
        --requirement "$list" || code=$?
done
python3 - "$folder" "$code" <<'PY'
import json, pathlib, sys
listed, packages = set(), []
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.txt")):
    listed |= {tuple(line.split("==")) for line in path.read_text(encoding="utf-8").split()}
    try:
        packages += json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["dependencies"]
    except (OSError, ValueError):
        sys.exit(f"audit: pip-audit gave no report (exit code {sys.argv[2]})")
looked_at = {(each["name"], each["version"]) for each in packages if "skip_reason" not in each}
known = [(each, hole) for each in packages for hole in each.get("vulns", ())]
for each, hole in known:
    print(f"audit: {each['name']} {each['version']}: {hole['id']}, mended in {', '.join(hole['fix_versions']) or 'no release'}")
missing = sorted(listed - looked_at)
why = {each["name"]: each["skip_reason"][:200] for each in packages if "skip_reason" in each}
for name, version in missing:
    print(f"audit: {name} {version}: not looked at: {why.get(name, 'the report does not name it')}")
if missing and not looked_at:
    print("audit: not one answer: does this machine reach https://pypi.org/pypi/NAME/VERSION/json? A mirror may lack it")
if known or missing or not listed or sys.argv[2] != "0":
    sys.exit(f"audit: {len(known)} known vulnerabilities; {len(missing)} of {len(listed)} releases were not looked at")
print(f"audit: {len(listed)} releases were looked at; none has a known vulnerability")
PY
