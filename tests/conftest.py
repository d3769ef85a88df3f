"""One real browser for all tests that need one; they share an xdist group, so that it starts once."""

import contextlib
import os

import pytest

from tests.browser import axe_source, browser_path


@pytest.fixture(scope="session")
def chromium():
    path = browser_path()
    from playwright.sync_api import sync_playwright

    # Chromium's sandbox refuses to run as root, which containers do.
    options = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=options)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def axe():
    return axe_source()


@pytest.fixture
def visit(chromium):
    """Opens a file in a page of its own: ``visit(path, scheme="dark", width=360)``; keeps what it said and asked for."""
    with contextlib.ExitStack() as opened:

        def open_page(path, *, scheme="light", width=1180, height=900, media="screen"):
            view = {"width": width, "height": height}
            context = chromium.new_context(viewport=view, color_scheme=scheme, reduced_motion="reduce")
            opened.callback(context.close)
            tab = context.new_page()
            tab.emulate_media(media=media, color_scheme=scheme)
            tab.said, tab.asked = [], []
            tab.on("console", lambda message: tab.said.append(message.text))
            tab.on("pageerror", lambda error: tab.said.append(str(error)))
            tab.on("request", lambda request: tab.asked.append(request.url))
            tab.goto(path.absolute().as_uri())
            return tab

        yield open_page
