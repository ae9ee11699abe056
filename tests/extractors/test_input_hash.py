"""Images in files are known by what the file system says of them."""

import os
import shutil

import numpy as np
from PIL import Image

import otdd_flash as otdd
from otdd_flash.extractors.input_hash import inputs_hash


def test_a_file_that_another_of_its_size_and_date_replaced_is_another(tmp_path):
    """Uncompressed images are of one size, and copying tools set dates: old features were found."""
    folder, other = tmp_path / "photos", tmp_path / "other.bmp"
    (folder / "cat").mkdir(parents=True)
    place = folder / "cat" / "1.bmp"
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(place)
    Image.fromarray(np.full((4, 4), 200, np.uint8)).save(other)
    date = place.stat()
    os.utime(other, ns=(date.st_atime_ns, date.st_mtime_ns))
    before = inputs_hash(otdd.load("image_folder", path=str(folder)))
    assert inputs_hash(otdd.load("image_folder", path=str(folder))) == before
    shutil.copy2(other, place)
    now = place.stat()
    assert (now.st_size, now.st_mtime_ns) == (date.st_size, date.st_mtime_ns)
    assert inputs_hash(otdd.load("image_folder", path=str(folder))) != before
