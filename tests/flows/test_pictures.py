"""Pictures for reports hold what they were given: decoded by another library, they show the same numbers."""

import base64
import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from cameraready.evidence.report.galleries import picture_source
from cameraready.flows._pictures import image_grid, plane


def decoded(picture):
    image = pytest.importorskip("PIL.Image")
    return np.asarray(image.open(io.BytesIO(base64.b64decode(picture.partition("base64,")[2]))))


def test_a_grid_decodes_to_its_images():
    images = np.random.default_rng(0).uniform(-1, 1, (5, 1, 8, 6))
    sheet = decoded(image_grid(images, columns=2, scale=3))
    assert sheet.shape == (3 * 26 + 2, 2 * 20 + 2)
    for index, image in enumerate(images[:, 0]):
        top, left = 2 + (index // 2) * 26, 2 + (index % 2) * 20
        cell = sheet[top : top + 24, left : left + 18]
        for row in range(3):  # every pixel is a square of three by three
            np.testing.assert_array_equal(cell[row::3, row::3], np.rint((image + 1) / 2 * 255))


def test_what_lies_outside_the_range_is_cut_off():
    sheet = decoded(image_grid(np.array([[[-9.0, 9.0]]]), scale=1))
    assert sheet[2, 2:4].tolist() == [0, 255]


@pytest.mark.parametrize(
    "images", [np.zeros((2, 3, 4, 4)), np.zeros((0, 4, 4)), np.zeros(4), np.full((1, 2, 2), np.nan)]
)
def test_odd_images_are_refused(images):
    with pytest.raises(ValueError, match="images"):
        image_grid(images)


def test_points_and_paths_lie_where_they_should():
    points = np.array([[0.0, 0.0], [1.0, 1.0], [9.0, 9.0], [np.nan, 0.0]])
    paths = np.array([[[0.0, 0.0]], [[1.0, 0.0]]])
    drawn = plane(points, points[:1], paths=paths, labels=("a < b", "c"), span=(0, 2, 0, 2), size=100)
    root = ElementTree.fromstring(drawn)
    line, first, second = [each.get("d") for each in root.iter("{http://www.w3.org/2000/svg}path")]
    assert line == "M0.0 100.0L50.0 100.0"
    assert re.findall(r"M([\d.]+) ([\d.]+)h0", first) == [("0.0", "100.0"), ("50.0", "50.0")]  # inside and finite
    assert second == "M0.0 100.0h0"
    assert [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")] == ["a < b", "c"]
    assert picture_source(drawn).startswith("data:image/svg+xml")


def test_a_trajectory_is_broken_where_it_has_no_place():
    paths = np.array([[[0.0, 0.0]], [[np.nan, 0.0]], [[1.0, 1.0]], [[1.0, 0.0]]])
    root = ElementTree.fromstring(plane(np.zeros((1, 2)), paths=paths, span=(0, 2, 0, 2), size=100))
    assert next(root.iter("{http://www.w3.org/2000/svg}path")).get("d") == "M0.0 100.0M50.0 50.0L50.0 100.0"


def test_half_precision_is_drawn_and_odd_settings_are_told():
    torch = pytest.importorskip("torch")
    assert image_grid(torch.ones(2, 3, 3).bfloat16()) == image_grid(np.ones((2, 3, 3)))
    assert plane(torch.ones(2, 2).bfloat16()) == plane(np.ones((2, 2)))
    for options, words in (
        ({"low": 1.0}, "low must lie below high"),
        ({"columns": 0}, "columns and scale are whole numbers"),
        ({"scale": 0}, "columns and scale are whole numbers"),
    ):
        with pytest.raises(ValueError, match=words):
            image_grid(np.ones((2, 3, 3)), **options)
    with pytest.raises(ValueError, match="span must be"):
        plane(np.ones((2, 2)), span=(0, 0, 1, 2))


@pytest.mark.parametrize("points", [np.zeros((3, 3)), np.full((2, 2), np.inf), np.zeros(2)])
def test_points_that_cannot_be_drawn_are_refused(points):
    with pytest.raises(ValueError, match=r"plane|finite"):
        plane(points)
