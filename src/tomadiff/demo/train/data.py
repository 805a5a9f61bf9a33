"""Fetch the Fluent 3D emoji and keep them as one tensor.

python -m tomadiff.demo.train.data --out runs
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ..captions import subjects

PACKAGE = "@lobehub/fluent-emoji-3d@1.1.0"
SIZE = 256
UNSEEN_ONE_IN = 16
SKIN_TONES = ("1f3fb", "1f3fc", "1f3fd", "1f3fe", "1f3ff")


@dataclass(frozen=True)
class Glyphs:
    """stems: file names without suffix; pictures: (N, 4, 256, 256) uint8, colour multiplied by alpha."""

    stems: list[str]
    pictures: torch.Tensor

    def point(self, index: int) -> int | None:
        """The code point of a picture that stands for a single one, else None (flags, families)."""
        return single_point(self.stems[index])

    def rows(self, points: list[int]) -> torch.Tensor:
        """Rows of `pictures` that hold these code points. -> (len(points),) int64"""
        row_of = {self.point(index): index for index in range(len(self.stems))}
        return torch.tensor([row_of[point] for point in points])

    def autoencoder_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows the autoencoder trains on, and rows it never sees; the latter have no subject among them."""
        drawn = set(subjects())
        unseen = [
            index
            for index, stem in enumerate(self.stems)
            if self.point(index) not in drawn
            and hashlib.sha256(stem.encode()).digest()[0] % UNSEEN_ONE_IN == 0
        ]
        seen = sorted(set(range(len(self.stems))) - set(unseen))
        return torch.tensor(seen), torch.tensor(unseen)

    def unlike_any_seen(self) -> torch.Tensor:
        """The rows that the autoencoder never sees, without those that differ from one it sees by skin tone
        only."""
        seen, unseen = self.autoencoder_rows()
        known = {without_skin_tone(self.stems[index]) for index in seen.tolist()}
        return torch.tensor([i for i in unseen.tolist() if without_skin_tone(self.stems[i]) not in known])


def single_point(stem: str) -> int | None:
    """'1f405' or '1f405-fe0f' -> 0x1F405; anything of several code points -> None.

    >>> single_point("1f336-fe0f") == 0x1F336, single_point("1f415-200d-1f9ba")
    (True, None)
    """
    points = [part for part in stem.split("-") if part != "fe0f"]
    return int(points[0], 16) if len(points) == 1 else None


def without_skin_tone(stem: str) -> str:
    """
    >>> without_skin_tone("1f44b-1f3fd"), without_skin_tone("1f575-fe0f-200d-2640-fe0f")
    ('1f44b', '1f575-200d-2640')
    """
    return "-".join(part for part in stem.split("-") if part not in ("fe0f", *SKIN_TONES))


def fetch(folder: Path) -> Path:
    """Download and unpack the package below `folder` unless it is there; returns the folder of pictures."""
    assets = folder / "package" / "assets"
    if assets.is_dir():
        return assets
    if shutil.which("npm") is None:
        raise SystemExit(
            f"npm is needed to fetch {PACKAGE}: install Node.js, or unpack it so that {assets} exists."
        )
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True)
    archive = next(folder.glob("lobehub-fluent-emoji-3d-*.tgz"))
    partial = folder / "unpacking"
    with tarfile.open(archive) as tar:
        tar.extractall(partial, filter="data")
    os.replace(partial / "package", folder / "package")
    return assets


def read_picture(path: Path) -> torch.Tensor:
    """-> (4, 256, 256) uint8 RGBA with colour multiplied by alpha; taller pictures lose their margin."""
    with Image.open(path) as image:
        rgba = image.convert("RGBA")
    left, top = (rgba.width - SIZE) // 2, (rgba.height - SIZE) // 2
    pixels = np.asarray(rgba.crop((left, top, left + SIZE, top + SIZE))).astype(np.float32)
    pixels[..., :3] *= pixels[..., 3:] / 255
    return torch.from_numpy(pixels.round().astype(np.uint8)).permute(2, 0, 1).contiguous()


def load_glyphs(out: Path) -> Glyphs:
    """All pictures of the package, fetched and decoded the first time and memory-mapped afterwards."""
    folder = out / "data"
    packed = folder / "glyphs.pt"
    if not packed.exists():
        paths = sorted(fetch(folder).glob("*.webp"))
        stored = {
            "stems": [path.stem for path in paths],
            "pictures": torch.stack([read_picture(p) for p in paths]),
        }
        partial = packed.with_suffix(".partial")
        torch.save(stored, partial)
        os.replace(partial, packed)
    stored = torch.load(packed, mmap=True, weights_only=True)
    return Glyphs(stored["stems"], stored["pictures"])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs"))
    glyphs = load_glyphs(parser.parse_args().out)
    seen, unseen = glyphs.autoencoder_rows()
    print(
        f"{len(glyphs.stems)} pictures: {len(seen)} for the autoencoder, {len(unseen)} it never sees, "
        f"{len(subjects())} subjects"
    )


if __name__ == "__main__":
    main()
