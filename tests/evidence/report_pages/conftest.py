"""A finished run and its page, shared by the tests of the report."""

import pytest

from cameraready.evidence.report import render
from tests.evidence.report_pages.reading import Page
from tests.evidence.report_runs import a_result


@pytest.fixture(scope="session")
def result():
    return a_result()


@pytest.fixture(scope="session")
def html(result):
    return render(result)


@pytest.fixture(scope="session")
def page(html):
    return Page(html)
