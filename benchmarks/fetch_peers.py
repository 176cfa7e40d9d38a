"""Fill the git-ignored ``.bench`` folder with the peers that measurements compare against.

    python -m benchmarks.fetch_peers

Takes the original kernel's two files out of the vllm 0.33.0 wheel (about 340 MB downloaded); vLLM is not installed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).parent.parent / ".bench"
VERSION = "0.33.0"
FILES = ("swa_decode.py", "sparse_decode_attention.py")


def main() -> None:
    """Download and unpack."""
    with tempfile.TemporaryDirectory() as download:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", download, f"vllm=={VERSION}"]
        subprocess.run(pip, check=True)
        (wheel,) = Path(download).glob("vllm-*.whl")
        FOLDER.mkdir(exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            for name in FILES:
                (FOLDER / name).write_bytes(archive.read(f"vllm/models/step5/nvidia/ops/{name}"))
    print(f"{', '.join(FILES)} from vllm {VERSION} are in {FOLDER}")


if __name__ == "__main__":
    main()
