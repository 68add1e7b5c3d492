"""Promise: the page that asks for the password can be used with a browser, which says where its forms come from."""

import contextlib

from playwright.sync_api import Browser, expect

from tests.real_browser.conftest import PATIENCE_MILLISECONDS, TOKEN, WatchServer


def test_the_password_opens_the_page_and_a_wrong_one_asks_again(browser: Browser, server: WatchServer) -> None:
    with contextlib.closing(browser.new_context()) as context:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MILLISECONDS)
        page.goto(server.address)
        for given in ("wrong", TOKEN):
            page.get_by_label("Token or password").fill(given)
            page.get_by_role("button", name="Open").click()
            if given == "wrong":
                expect(page.get_by_label("Token or password")).to_have_value("")
        page.get_by_test_id("run-row").first.wait_for()
