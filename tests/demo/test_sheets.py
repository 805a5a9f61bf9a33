import torch
from PIL import ImageFont

from tomadiff.demo.sheets import fold, sheet


def test_pictures_stand_row_by_row_with_their_labels():
    pictures = torch.linspace(0, 1, 3).view(3, 1, 1, 1).expand(3, 3, 40, 40)
    page = sheet(pictures, ["a", "b", "c"], columns=2)
    assert page.width == 8 + 2 * (40 + 8)
    assert page.getpixel((8 + 20, 8 + 20)) == (0, 0, 0)
    assert page.getpixel((8 + 48 + 20, 8 + 20)) == (128, 128, 128)
    below = page.crop((8, 48, 48, 66))
    assert below.convert("L").getextrema()[0] < 100, "a label in dark letters"


def test_title_and_tile_size():
    pictures = torch.zeros(1, 3, 64, 128)
    assert sheet(pictures, ["x"], 1, "a title", tile=64).width == 8 + 64 + 8
    assert sheet(pictures, ["x"], 1, "a title").height > sheet(pictures, ["x"], 1).height


def test_long_labels_are_folded():
    font = ImageFont.load_default(14)
    folded = fold("tiger face on a red to yellow gradient background\nsecond line", font, 120)
    assert folded.endswith("second line")
    assert all(font.getlength(line) < 150 for line in folded.split("\n"))
