"""The images: what builds them, what is in them; on request they are really built, and train inside.

The builds need root, buildah and a base image, for which debootstrap will do where none can be pulled. They take a
quarter of an hour. HOTSPA_IMAGE_STORAGE names a folder that keeps layers for the next time. In NVIDIA's base's place the
GPU image gets the CPU image's, with torch; MEGATRON_LM_PATH names the checkout of Megatron-LM that goes into it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.lint import assert_clean
from tests.spawn import REPOSITORY
from tests.test_megatron_lm import release_of
from tests.test_patches import PATCHES, make_checkout
from tests.training import arguments, on_mock_data, printed_losses

BUILD = REPOSITORY / "scripts" / "build_image.sh"
FILES = sorted((REPOSITORY / "docker").iterdir())
# What no package of ours goes with, as named or as what it is built with.
HELD = ("pyyaml==5.4.1", "rich==12.6.0", "setuptools==60.10.0")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


# --------------------------------------------------------------------------------------------------------- the two files


def test_the_gpu_image_is_not_held_to_the_releases_of_its_base() -> None:
    """NVIDIA's image has those in PIP_CONSTRAINT, and packages named here, or needed for a build, are of others."""
    installs = re.findall(r"(\S+) python3 -m pip install", (REPOSITORY / "docker/Dockerfile").read_text())
    assert set(installs) == {"PIP_CONSTRAINT=''"}


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


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(file: Path) -> None:
    assert_clean("hadolint", file)


def test_the_gpu_image_takes_megatron_and_apex_as_arguments() -> None:
    text = (REPOSITORY / "docker" / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE_IMAGE=nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3$", text, re.MULTILINE)
    assert re.search(r"^ARG MEGATRON_TAG=core_v\d+\.\d+\.\d+$", text, re.MULTILINE)
    assert re.search(r"^ARG APEX_REF=$", text, re.MULTILINE)


def test_the_gpu_image_has_what_its_scripts_need(tmp_path: Path) -> None:
    """What is copied, and nothing else, patches a checkout."""
    copied = re.findall(
        r"^COPY ([^-].*) (/opt/hotspa_megatron/\S*)$", (REPOSITORY / "docker" / "Dockerfile").read_text(), re.MULTILINE
    )
    for sources, target in copied:
        place = tmp_path / target.removeprefix("/opt/")
        for source in map(REPOSITORY.joinpath, sources.split()):
            if source.is_dir():
                shutil.copytree(source, place)
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, place)
    checkout = make_checkout(tmp_path / "Megatron-LM", PATCHES[-1])
    script = tmp_path / "hotspa_megatron" / "scripts" / "apply_patches.sh"
    done = subprocess.run(["bash", script, checkout, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def health_command(name: str) -> list[str]:
    text = (REPOSITORY / "docker" / name).read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^HEALTHCHECK .*?\bCMD (\[.*\])$", text, re.MULTILINE)
    words: list[str] = json.loads(command)
    return words


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_the_health_check_runs_and_can_fail(name: str, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "bash").symlink_to("/bin/bash")
    hotspa = Path(sys.executable).with_name("hotspa")

    def healthy() -> bool:
        # As a container's runtime does it: found on PATH, started without a shell.
        first, *words = health_command(name)
        found = shutil.which(first, path=str(programs))
        if found is None:
            return False
        done = subprocess.run(
            [found, *words], env={"PATH": str(programs)}, capture_output=True, timeout=60, check=False
        )
        return done.returncode == 0

    def put(program: str, text: str) -> None:
        (programs / program).unlink(missing_ok=True)
        (programs / program).write_text(text)
        (programs / program).chmod(0o755)

    put("nvidia-smi", "#!/bin/bash\n[[ $* == -L ]]\n")
    assert not healthy()  # there is no hotspa yet
    put("hotspa", f'#!/bin/bash\nexec {hotspa} "$@"\n')
    assert healthy()
    put("hotspa", "#!/bin/bash\nexit 1\n")
    assert not healthy()
    put("hotspa", f'#!/bin/bash\nexec {hotspa} "$@"\n')
    put("nvidia-smi", "#!/bin/bash\nexit 9\n")  # the driver is gone, of which the CPU image knows nothing
    assert healthy() == (name == "Dockerfile.cpu")


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

    def base_with_torch(self) -> str:
        """The same with torch for CPU and what else the GPU image expects of its base, and with NVIDIA's hold on pip."""
        made, folder = "localhost/hotspa-test-torch:1", self.folder / "torch"
        torch = re.search(r"^torch==(\S+)", (REPOSITORY / "requirements/torch.txt").read_text(), re.MULTILINE)
        assert torch is not None
        folder.mkdir(exist_ok=True)
        (folder / "Dockerfile").write_text(f"""FROM {self.base()}
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN apt-get update && apt-get install --yes --no-install-recommends g++ git make
RUN PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 python3 -m pip install torch=={torch[1]} numpy packaging pybind11
RUN mkdir -p /etc/pip && printf '%s\\n' {" ".join(HELD)} >/etc/pip/constraint.txt
ENV PIP_CONSTRAINT=/etc/pip/constraint.txt
""")
        settings = pip_settings(self.folder)
        done = self.run("buildah", "build", "--format", "docker", "--layers", *settings, "--tag", made, folder)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return made


def pip_settings(folder: Path, *more: str) -> list[str]:
    """The builder's arguments by which pip inside finds packages as pip here does: certificates, mirrors, wheels.

    ``more``: further lines of pip's configuration.
    """
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
    configuration.write_text("\n".join(["[global]", "timeout = 180", *lines, *more, ""]))
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


@dataclasses.dataclass(frozen=True)
class GpuImage:
    """``release``: of the Megatron-LM in it."""

    tag: str
    release: str


@pytest.fixture(scope="module")
def gpu_image(images: Images) -> GpuImage:
    checkout, kept = os.environ.get("MEGATRON_LM_PATH"), images.folder / "Megatron-LM.git"
    if not checkout:
        pytest.skip("MEGATRON_LM_PATH names no checkout of Megatron-LM")
    values = {
        "BASE_IMAGE": images.base_with_torch(),
        "MEGATRON_REPOSITORY": "file:///mnt/Megatron-LM.git",
        "MEGATRON_TAG": repository_of(Path(checkout), kept),
    }
    # Last, as each build has a file of its own in the same place. Megatron asks for Python 3.12, which this base may lack.
    settings = pip_settings(images.folder, "ignore-requires-python = true")
    chosen = [word for name, value in values.items() for word in ("--build-arg", f"{name}={value}")]
    made = GpuImage("localhost/hotspa-test-gpu:1", release_of(Path(checkout)))
    mount = ("--volume", f"{kept}:/mnt/Megatron-LM.git:ro")
    done = images.run(BUILD, "gpu", *settings, *mount, *chosen, "--tag", made.tag)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    print(done.stdout.splitlines()[-1])
    return made


def repository_of(checkout: Path, repository: Path) -> str:
    """Make a bare repository of a checkout's files, with a history or without one, and return its tag.

    The tag follows from the files: layers that were made from others are not taken again.
    """

    def git(*command: str) -> str:
        identity = ("-c", "user.name=tests", "-c", "user.email=tests@localhost", "-c", "commit.gpgsign=false")
        places = (f"--git-dir={repository}", f"--work-tree={checkout}")
        return subprocess.run(
            ["git", *identity, *places, *command], capture_output=True, text=True, timeout=300, check=True
        ).stdout.strip()

    shutil.rmtree(repository, ignore_errors=True)
    subprocess.run(["git", "init", "--quiet", "--bare", repository], check=True)
    git("add", "--all")
    git("commit", "--quiet", "--message", "the checkout")
    tag = f"checkout-{git('rev-parse', 'HEAD^{tree}')[:12]}"
    git("tag", tag)
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


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_gpu_images_steps_run_on_a_base_with_torch(images: Images, gpu_image: GpuImage) -> None:
    assert lines(inside(images, gpu_image.tag, "id", "--user", limit_s=60)) == ["10001"]
    found = lines(inside(images, gpu_image.tag, "hotspa", "doctor", limit_s=120))
    assert any(re.match(rf"\S+ +megatron-core +{re.escape(gpu_image.release)}", line) for line in found), found
    asked = 'echo "$PWD $MEGATRON_LM_PATH $CUDA_DEVICE_MAX_CONNECTIONS"; touch here; cat /etc/pip.conf || true'
    assert lines(inside(images, gpu_image.tag, "bash", "-c", asked, limit_s=60)) == ["/workspace /opt/Megatron-LM 1"]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_gpu_images_megatron_trains_inside_as_its_user(images: Images, gpu_image: GpuImage) -> None:
    """On CPU; all but the kernels is what a job on GPUs runs."""
    line = on_mock_data(arguments(tp=2, iterations=2, batch=8, documents=Path("/workspace/mock")))
    config = "strategies: [{max_length: 32, tp: 1}]\nmerge: never\nmock_lengths: lognormal:mean=40,sigma=1,max=200\n"
    started = (
        'printf %s "$0" >hotspa.yaml && OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo exec torchrun --standalone '
        "--local-addr 127.0.0.1 --nproc-per-node 2 -m hotspa_megatron.launch /opt/Megatron-LM/pretrain_gpt.py "
        '--hotspa-config hotspa.yaml "$@"'
    )
    done = inside(images, gpu_image.tag, "bash", "-c", started, config, *line, limit_s=600)
    said = "\n".join(lines(done))
    assert f"hotspa: megatron-core {gpu_image.release}" in said
    assert "hotspa: switch tp2-cp1-pp1-dp1 -> tp1-cp1-pp1-dp2" in said
    assert len(printed_losses(said)) == 2 and all(4 < loss < 6 for loss in printed_losses(said))


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_a_checkout_becomes_a_repository_that_can_be_cloned(tmp_path: Path) -> None:
    checkout, kept = tmp_path / "checkout", tmp_path / "kept.git"
    (checkout / "megatron").mkdir(parents=True)
    (checkout / "pretrain_gpt.py").write_text("one\n")
    first = repository_of(checkout, kept)
    # As the image does it; a second time, when a history is there already, and something else.
    subprocess.run(["git", "init", "--quiet", checkout], check=True)
    assert repository_of(checkout, kept) == first
    (checkout / "pretrain_gpt.py").write_text("two\n")
    second = repository_of(checkout, kept)
    assert second != first
    clone = ("git", "clone", "--quiet", "--depth", "1", "--branch", second, f"file://{kept}", tmp_path / "cloned")
    subprocess.run(clone, check=True, capture_output=True)
    assert (tmp_path / "cloned" / "pretrain_gpt.py").read_text() == "two\n"
    assert sorted(path.name for path in (tmp_path / "cloned").iterdir()) == [".git", "pretrain_gpt.py"]
