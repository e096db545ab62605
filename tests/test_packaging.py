"""What is installed: everything of the two packages, and nothing else."""

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
SOURCES = ("jpaged", "models", "server", "bench", "pallas_kernels")
PROJECT_FILES = ("pyproject.toml", "README.md", "LICENSE")
PACKAGES = ("jpaged", "pallas_kernels")
PACKAGED = (".py", ".json", ".typed")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist of a copy of the tree, and the wheel that was built from that sdist."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in PROJECT_FILES:
        shutil.copy(ROOT / name, source)
    target = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), source]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


def files_of_the_tree() -> set[str]:
    """Files of the packages as they are imported, links followed."""
    files = set()
    for package in PACKAGES:
        folders = [ROOT / package]
        while folders:
            for path in folders.pop().iterdir():
                if path.is_dir() and path.name != "__pycache__":
                    folders.append(path)
                elif path.suffix in PACKAGED:
                    files.add(path.relative_to(ROOT).as_posix())
    return files


def test_wheel_has_the_files_of_the_tree(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == files_of_the_tree()
    assert {"jpaged/models/config.py", "jpaged/server/app.py", "jpaged/py.typed"} <= names


def test_sdist_has_files_where_the_tree_has_links(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = {member.name.split("/", 1)[-1]: member for member in archive.getmembers()}
    assert files_of_the_tree() <= set(members)
    assert members["jpaged/models/config.py"].isfile()
    assert {"LICENSE", "README.md", "pyproject.toml"} <= set(members)


def test_devices_get_the_versions_that_are_tested() -> None:
    """What is compiled in tests is what users of a device install."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]

    def versions(extra: str) -> set[tuple[str, str, str]]:
        found = [Requirement(text) for text in extras[extra]]
        return {(each.name, str(each.specifier), str(each.marker)) for each in found}

    assert versions("cuda12") == versions("gpu-test")
    assert versions("tpu") > versions("tpu-test")
    cuda13 = {(name.replace("13", "12"), *rest) for name, *rest in versions("cuda13")}
    assert cuda13 == versions("cuda12")


def test_installed_names(built: Path, tmp_path: Path) -> None:
    """No generic top-level package such as `models` reaches site-packages."""
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
        [entry_points] = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "jpaged = jpaged.cli.main:main" in archive.read(entry_points).decode()
    top_level = {path.name for path in tmp_path.iterdir() if path.suffix != ".dist-info"}
    assert top_level == set(PACKAGES)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "import jpaged.models.config, jpaged.server.options, jpaged.bench, pallas_kernels; "
        "print(jpaged.models.config.__file__)"
    )
    command = [sys.executable, "-I", "-c", code]
    result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout.strip() == str(tmp_path / "jpaged" / "models" / "config.py")
