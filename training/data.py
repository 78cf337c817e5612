"""Fetches the emoji pictures from npm and turns them into the training set."""

import argparse
import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from concepts import CONCEPTS
from PIL import Image
from torch import Tensor

SIZE: Final = 48
MARGIN: Final = 1.1
IGNORED: Final = ("a", "an", "the", "with", "of", "in", "on", "and", "style", "picture", "emoji")


class Source(NamedTuple):
    """Where the pictures of a style come from."""

    package: str
    version: str
    picture: str


SOURCES: Final = {
    "noto": Source("emoji-datasource-google", "16.0.0", "package/img/google/64/{codepoints}.png"),
    "fluent": Source("@lobehub/fluent-emoji-3d", "1.1.0", "package/assets/{codepoints}.webp"),
}


class PictureSet(NamedTuple):
    """Pictures `[n, 3, size, size]` in [-1, 1] and the prompt of each."""

    pictures: Tensor
    prompts: list[str]

    @property
    def vocabulary(self) -> list[str]:
        """Words of all prompts, in order of appearance."""
        words = (word for prompt in self.prompts for word in prompt.split())
        return [word for word in dict.fromkeys(words) if word not in IGNORED]


def load(folder: Path) -> PictureSet:
    """Reads what `build` wrote."""
    pixels = torch.from_numpy(np.load(folder / "pictures.npy"))
    prompts: list[str] = json.loads((folder / "prompts.json").read_text())
    return PictureSet(pixels.permute(0, 3, 1, 2).float() / 127.5 - 1, prompts)


def build(folder: Path) -> None:
    """Writes pictures.npy and prompts.json into the folder."""
    pictures, prompts = [], []
    for style, source in SOURCES.items():
        with tarfile.open(_fetch(source, folder)) as archive:
            for concept, codepoints in CONCEPTS.items():
                name = source.picture.format(codepoints=codepoints)
                member = archive.extractfile(name)
                if member is None:
                    raise FileNotFoundError(f"{source.package} has no {name}")
                pictures.append(_compose(Image.open(io.BytesIO(member.read()))))
                prompts.append(f"{style} {concept}")
    np.save(folder / "pictures.npy", np.stack(pictures))
    (folder / "prompts.json").write_text(json.dumps(prompts, indent=1))


def _fetch(source: Source, folder: Path) -> Path:
    name = source.package.removeprefix("@").replace("/", "-")
    archive = folder / f"{name}-{source.version}.tgz"
    if not archive.exists():
        command = ["npm", "pack", "--silent", f"{source.package}@{source.version}"]
        subprocess.run(command, cwd=folder, check=True)
    return archive


def _compose(picture: Image.Image) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Crops to the drawing, centres it on white and scales it to the canvas."""
    drawing = picture.convert("RGBA")
    drawing = drawing.crop(drawing.getbbox())
    side = round(max(drawing.size) * MARGIN)
    canvas = Image.new("RGBA", (side, side), "white")
    canvas.alpha_composite(drawing, ((side - drawing.width) // 2, (side - drawing.height) // 2))
    return np.asarray(canvas.convert("RGB").resize((SIZE, SIZE), Image.Resampling.LANCZOS))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the downloads and the set go")
    target: Path = parser.parse_args().folder
    target.mkdir(parents=True, exist_ok=True)
    build(target)
