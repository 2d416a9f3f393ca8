"""The images: what builds them, what is in them; on request the CPU image is really built, and the demo runs inside.

The build needs root, buildah and a base image, for which debootstrap will do where none can be pulled. It takes a
quarter of an hour. HOTSPA_IMAGE_STORAGE names a folder that keeps layers for the next time.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.spawn import REPOSITORY

BUILD = REPOSITORY / "scripts" / "build_image.sh"
FILES = sorted((REPOSITORY / "docker").iterdir())
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


# --------------------------------------------------------------------------------------------------------- the two files


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_a_file_names_its_base_and_runs_as_no_root(file: Path) -> None:
    text = file.read_text()
    base = re.search(r"^ARG BASE_IMAGE=(\S+):(\S+)\nFROM \$\{BASE_IMAGE\}$", text, re.MULTILINE)
    assert base is not None and base[2] != "latest"
    users = re.findall(r"^USER (.*)$", text, re.MULTILINE)
    assert users == ["${USER_ID}"] and re.search(r"^ARG USER_ID=[1-9]\d+$", text, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK ", text, re.MULTILINE)
    # What is copied is there, and is not left out of what the builder is given.
    for source in (word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()):
        assert source.startswith("--") or (REPOSITORY / source).exists(), source
    if shutil.which("hadolint"):
        subprocess.run(["hadolint", file], check=True)


def test_the_gpu_image_takes_megatron_and_apex_as_arguments() -> None:
    text = (REPOSITORY / "docker" / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE_IMAGE=nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3$", text, re.MULTILINE)
    assert re.search(r"^ARG MEGATRON_TAG=core_v\d+\.\d+\.\d+$", text, re.MULTILINE)
    assert re.search(r"^ARG APEX_REF=$", text, re.MULTILINE)


# ----------------------------------------------------------------------------------------------------------- the builder


def build(tools: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script, where nothing but these tools and those of the system's base can be found."""
    for name in ("bash", "dirname", "timeout", "sed"):
        found = shutil.which(name)
        assert found is not None
        if not (tools / name).exists():
            (tools / name).symlink_to(found)
    return subprocess.run(
        [tools / "bash", BUILD, *arguments], env={"PATH": str(tools), **variables},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def tool(folder: Path, name: str, *, works: bool = True) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f'#!/bin/sh\n[ "$1" != info ] || exit {int(not works)}\necho {name} "$@"\n')
    path.chmod(0o755)


def test_whichever_builder_works_is_used(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tool(tools, "buildah")
    done = build(tools, "cpu")
    assert done.returncode == 0, done.stderr
    built = "build --format docker --layers --tag hotspa-megatron-cpu --file docker/Dockerfile.cpu ."
    assert done.stdout.splitlines()[:2] == [
        "build_image: buildah builds hotspa-megatron-cpu from docker/Dockerfile.cpu", f"buildah {built}"
    ]  # fmt: skip
    tool(tools, "docker", works=False)  # the command without its daemon
    assert build(tools, "gpu", "--plan").stdout.startswith("buildah ")
    tool(tools, "podman")
    assert build(tools, "gpu", "--plan").stdout.startswith("podman build --format docker ")
    assert build(tools, "gpu", "--plan", BUILDER="buildah").stdout.startswith("buildah ")
    tool(tools, "docker")
    more = ("--tag", "mine:1", "--build-arg", "APEX_REF=25.09")
    assert build(tools, "gpu", *more, "--plan").stdout == (
        "docker build --build-arg APEX_REF=25.09 --tag mine:1 --file docker/Dockerfile . \n"
    )


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        ((), {}, "'': write gpu or cpu"),
        (("tpu",), {}, "'tpu': write gpu or cpu"),
        (("cpu",), {}, "neither docker (with its daemon), podman nor buildah works here"),
        (("cpu",), {"BUILDER": "kaniko"}, "BUILDER=kaniko: write docker, podman or buildah"),
        (("cpu",), {"BUILDER": "podman"}, "BUILDER=podman does not work here"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], variables: dict[str, str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "tools").mkdir()
    done = build(tmp_path / "tools", *arguments, **variables)
    assert done.returncode == 2
    assert done.stderr.startswith(f"build_image: {said}") and done.stderr.count("\n") == 1


# -------------------------------------------------------------------------------------------------------------- for real


class Images:
    """buildah with a storage of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        configuration = folder / "storage.conf"
        configuration.write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/store"\nrunroot = "{folder}/run"\n'
        )
        self.environment = {**os.environ, "CONTAINERS_STORAGE_CONF": str(configuration), "BUILDER": "buildah"}

    def run(self, *command: str | Path, limit_s: float = 1800) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=limit_s, check=False
        )

    def base(self) -> str:
        """A Debian with Python: pulled where a registry can be reached, else made; skips where neither works."""
        made = "localhost/hotspa-test-base:1"
        if self.run("buildah", "inspect", made).returncode == 0:
            return made
        pulled = re.search(r"^ARG BASE_IMAGE=(\S+)$", (REPOSITORY / "docker/Dockerfile.cpu").read_text(), re.MULTILINE)
        assert pulled is not None
        if (
            self.run("timeout", "120", "buildah", "pull", "--retry", "0", f"docker.io/library/{pulled[1]}").returncode
            == 0
        ):
            return f"docker.io/library/{pulled[1]}"
        if shutil.which("debootstrap") is None:
            pytest.skip(f"{pulled[1]} cannot be pulled, and there is no debootstrap to make a base image with")
        root, files = self.folder / "root", self.folder / "base"
        files.mkdir(exist_ok=True)
        included = "ca-certificates,python3,python3-venv,python3-pip,python3-dev,g++,git"
        done = self.run("debootstrap", "--variant=minbase", f"--include={included}", "bookworm", root)
        if done.returncode:
            pytest.skip(f"debootstrap: {(done.stdout.strip().splitlines() or ['failed'])[-1]}")
        self.run("tar", "-C", root, "--numeric-owner", "--exclude=./dev/*", "-cf", files / "base.tar", ".")
        shutil.rmtree(root)
        (files / "Dockerfile").write_text('FROM scratch\nADD base.tar /\nCMD ["/bin/bash"]\n')
        done = self.run("buildah", "build", "--isolation", "chroot", "--tag", made, files)
        assert done.returncode == 0, done.stderr[-3000:]
        (files / "base.tar").unlink()
        return made


def pip_settings(folder: Path) -> list[str]:
    """The builder's arguments by which pip inside finds packages as pip here does: certificates, mirrors, wheels."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"^\S+?\.([\w-]+)='(.*)'$", listed.stdout, re.MULTILINE))
    known = ("cert", "index-url", "extra-index-url", "find-links")
    lines = [f"{name} = {found[name]}" for name in known if name in found]
    places = {word.removeprefix("file://") for name in known[1:] for word in found.get(name, "").split()}
    # An index of files refers to what lies beside it.
    mounts = {
        str(Path(place).parent if place.endswith("/simple") else Path(place)) for place in places if place[:1] == "/"
    }
    if CERTIFICATES.exists():
        mounts.add(str(CERTIFICATES))
    configuration = folder / "pip.conf"
    configuration.write_text("\n".join(["[global]", "timeout = 180", *lines, ""]))
    arguments = ["--isolation", "chroot", "--volume", f"{configuration}:/etc/pip.conf:ro"]
    for mount in sorted(mounts):
        if Path(mount).exists():
            arguments += ["--volume", f"{mount}:{mount}:ro"]
    if "find-links" in found or "extra-index-url" in found:
        arguments += ["--build-arg", "PIP_EXTRA_INDEX_URL="]
    return arguments


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    if os.geteuid() != 0:
        pytest.skip("building without a daemon needs root here")
    if shutil.which("buildah") is None:
        pytest.skip("no buildah: apt-get install buildah")
    kept = os.environ.get("HOTSPA_IMAGE_STORAGE")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("images")
    folder.mkdir(exist_ok=True)
    made = Images(folder)
    yield made
    if kept is None:
        made.run("buildah", "rm", "--all")
        made.run("buildah", "rmi", "--all", "--force")


@pytest.fixture(scope="module")
def cpu_image(images: Images) -> str:
    base = images.base()
    tag = "localhost/hotspa-test-cpu:1"
    arguments = [*pip_settings(images.folder), "--build-arg", f"BASE_IMAGE={base}", "--tag", tag]
    done = images.run(BUILD, "cpu", *arguments)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    print(done.stdout.splitlines()[-1])
    return tag


def inside(images: Images, image: str, *command: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command in a new container of an image, as the image's user."""
    container = images.run("buildah", "from", image).stdout.strip()
    try:
        return images.run("buildah", "run", "--isolation", "chroot", container, "--", *command, limit_s=limit_s)
    finally:
        images.run("buildah", "rm", container)


def lines(done: subprocess.CompletedProcess[str]) -> Sequence[str]:
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_cpu_image_is_built_and_its_user_is_not_root(images: Images, cpu_image: str) -> None:
    assert lines(inside(images, cpu_image, "id", "--user", limit_s=60)) == ["10001"]
    found = lines(inside(images, cpu_image, "hotspa", "doctor", limit_s=120))
    assert any(re.match(r"ok +megatron-core +0\.\d+", line) for line in found), found
    # Nothing of the machine that it was built on.
    assert (
        lines(inside(images, cpu_image, "bash", "-c", "ls -A ~; cat /etc/pip.conf 2>/dev/null || true", limit_s=60))[-1]
        != "[global]"
    )
    assert inside(images, cpu_image, "test", "-e", ".git", limit_s=60).returncode != 0


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_demo_runs_inside(images: Images, cpu_image: str) -> None:
    found = lines(inside(images, cpu_image, "bash", "scripts/demo.sh", "--iterations", "2", limit_s=900))
    assert any("up to date" in line for line in found), "the environment was made anew"
    assert any(re.match(r"2 steps, [\d,]+ tokens: the same training", line) for line in found), found
