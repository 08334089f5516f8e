"""Starts a Chromium without a window, over selenium, for tests and benchmarks of pages: its size, its theme, its log.

It needs selenium, which ``constraints-browser.txt`` pins, and Debian's packages ``chromium`` and ``chromium-driver``.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-extensions"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps"),
)


def missing() -> str:
    """What is not here of what a browser needs, in words; "" if all is."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed: make test-browser makes an environment with it"
    if program() is None or shutil.which("chromedriver") is None:
        return "Chromium is not installed: apt-get install chromium chromium-driver"
    return ""


def program() -> str | None:
    """The path of Chromium, None if it is not here."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def browser() -> Iterator[Any]:
    """A context with a started Chromium: selenium's driver. Its profile is new, and is removed at the end."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program() or ""
    folder = tempfile.mkdtemp()
    for flag in (*FLAGS, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    os.environ.setdefault("SE_OFFLINE", "true")  # selenium looks for no driver of its own
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()
        shutil.rmtree(folder, ignore_errors=True)


def look(driver: Any, *, width: int, dark: bool, height: int = 900) -> None:
    """Makes the window as wide as a desktop's or a phone's, in a light or dark theme."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
