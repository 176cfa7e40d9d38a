"""Fill the git-ignored ``.bench`` folder with the peers that measurements compare against.

    python -m benchmarks.fetch_peers

Takes single files out of two wheels of vLLM (about 620 MB downloaded and thrown away); vLLM itself is not installed:

* the original kernel and ``unified_attention``, both Triton, out of 0.33.0;
* FlashAttention 3, a compiled library, out of 0.24.0, which was built for torch 2.11 and CUDA 13. It is kept compressed
  (11 MB instead of 153) and unpacked where it is first used, see ``peers``.
"""

from __future__ import annotations

import lzma
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent.parent / ".bench"
COMMAND = "python -m benchmarks.fetch_peers"
FA3_LIBRARY = "_vllm_fa3_C.abi3.so"
TRITON_VERSION, FA3_VERSION = "0.33.0", "0.24.0"
ORIGINAL_FILES = ("sparse_decode_attention.py", "swa_decode.py")
UNIFIED_FILES = ("triton_attention_helpers.py", "triton_unified_attention.py")
FA3_FILES = (f"{FA3_LIBRARY}.xz",)

WHEELS = {
    TRITON_VERSION: {
        **{name: f"vllm/models/step5/nvidia/ops/{name}" for name in ORIGINAL_FILES},
        **{name: f"vllm/v1/attention/ops/{name}" for name in UNIFIED_FILES},
    },
    FA3_VERSION: {FA3_FILES[0]: f"vllm/vllm_flash_attn/{FA3_LIBRARY}"},
}
"""By version of vLLM: the files that are kept, and where they lie in its wheel."""


def present(names: Iterable[str]) -> bool:
    """Tell whether all of these files were fetched."""
    return all((FOLDER / name).is_file() for name in names)


def unpack(wheel: Path, members: dict[str, str], folder: Path) -> None:
    """Copy members of a wheel into ``folder``; a name that ends in ``.xz`` is compressed on the way."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for name, member in members.items():
            data = archive.read(member)
            (folder / name).write_bytes(lzma.compress(data, preset=6) if name.endswith(".xz") else data)


def download(version: str, folder: str) -> Path:
    """Download a wheel of vLLM, the one for Linux on x86-64 whatever this machine is."""
    options = ["--no-deps", "--only-binary=:all:", "--platform=manylinux_2_28_x86_64", "--python-version=3.12"]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "--dest", folder, f"vllm=={version}"], check=True
    )
    (wheel,) = Path(folder).glob("vllm-*.whl")
    return wheel


def main() -> None:
    """Download and unpack what is not there yet."""
    for version, members in WHEELS.items():
        if not present(members):
            with tempfile.TemporaryDirectory() as folder:
                unpack(download(version, folder), members, FOLDER)
        print(f"{', '.join(members)} from vllm {version} are in {FOLDER}")


if __name__ == "__main__":
    main()
