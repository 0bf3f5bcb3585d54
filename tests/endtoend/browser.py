"""A real browser for tests of pages: headless Chromium, spoken to in the WebDriver protocol; and what any page owes."""

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
]  # fmt: skip
WIDE, NARROW = 1280, 390
VIEWS = [(scheme, width) for scheme in ("light", "dark") for width in (WIDE, NARROW)]


def missing() -> str:
    """A sentence about the program that is not on PATH; empty if all are."""
    lacks = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(lacks)} on PATH; Debian has chromium and chromium-driver" if lacks else ""


class Browser:
    """One headless Chromium with a profile of its own, which goes with it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fedcover-", ignore_cleanup_errors=True)
        self._driver: subprocess.Popen[bytes] | None = None
        self._session = ""
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        try:
            self._base = f"http://127.0.0.1:{self._start()}"
            options = {
                "binary": shutil.which("chromium"),
                "args": [*FLAGS, f"--user-data-dir={self._folder.name}/user"],
            }
            wants = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            self._session = self._call("/session", {"capabilities": {"alwaysMatch": wants}})["sessionId"]
        except BaseException:
            self.close()
            raise

    def _start(self) -> int:
        """Start the driver on a port it chooses. It leads a group of processes, to which the browser will belong."""
        path = Path(self._folder.name) / "log"
        home = {"HOME": self._folder.name, "TMPDIR": self._folder.name}
        with path.open("wb") as log:
            self._driver = subprocess.Popen(
                ["chromedriver", "--port=0"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **home},
                start_new_session=True,
            )
        until = time.monotonic() + 30
        while time.monotonic() < until and self._driver.poll() is None:
            if found := re.search(r"successfully on port (\d+)", path.read_text(errors="replace")):
                return int(found[1])
            time.sleep(0.02)
        raise RuntimeError(f"chromedriver does not start: {path.read_text(errors='replace')}")

    def _call(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with self._open(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                raise RuntimeError(f"{path}: {json.load(error)['value']['message']}") from None

    def _here(self, path: str, body: dict[str, Any]) -> Any:
        return self._call(f"/session/{self._session}/{path}", body)

    def devtools(self, command: str, **parameters: Any) -> Any:
        """The answer to a command of the DevTools protocol."""
        return self._here("goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, path: Path) -> None:
        """Open a local file and wait until it is loaded."""
        self.visit(path.resolve().as_uri())

    def visit(self, url: str) -> None:
        """Open an address and wait until it is loaded."""
        self._here("url", {"url": url})

    def reset(self) -> None:
        """Open an empty page in a window and colours as at the start, and forget the console's entries."""
        self.visit("about:blank")
        self.devtools("Emulation.clearDeviceMetricsOverride")
        self.devtools("Emulation.setEmulatedMedia", features=[])
        self.log()

    def resize(self, width: int, height: int, phone: bool = False) -> None:
        """Give the page so many CSS pixels, even fewer than a window can have; phones heed the viewport it asks for."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )

    def scheme(self, name: str) -> None:
        """Prefer "light" or "dark" colours."""
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def show(self, path: Path, scheme: str, width: int) -> None:
        """Open a local file afresh in these colours and at this width, with all its details unfolded."""
        self.resize(width, 844, phone=width == NARROW)
        self.scheme(scheme)
        self.open(path)
        self.script("for (const folded of document.querySelectorAll('details')) folded.open = true")
        self.settle()

    def settle(self) -> None:
        """Wait until the page is drawn again, so that its observers have seen the sizes of what it shows."""
        self.script("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def script(self, code: str, *arguments: Any) -> Any:
        """What the body of a function returns that runs in the page."""
        return self._here("execute/sync", {"script": code, "args": list(arguments)})

    def point(self, x: float, y: float, touch: bool = False) -> None:
        """Move the mouse to a place of the window, or touch it with a finger."""
        if touch:
            self.devtools("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
            self.devtools("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        else:
            self.devtools("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """Press a key, such as ArrowLeft, on the element that has the focus."""
        text = {"text": "\r"} if key == "Enter" else {}
        self.devtools("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **text)
        self.devtools("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    def log(self) -> list[dict[str, Any]]:
        """The console's entries since the last look."""
        return list(self._here("se/log", {"type": "browser"}))

    def save_into(self, folder: Path) -> None:
        """Let downloads arrive in a folder."""
        self.devtools("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    def screenshot(self, path: Path) -> Path:
        """Save a picture of the whole page, as PNG."""
        shot = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def close(self) -> None:
        """End browser and driver, whatever state they are in, and remove what they wrote."""
        if self._session:
            with contextlib.suppress(Exception):  # the driver may be gone
                self._call(f"/session/{self._session}", method="DELETE")
            self._session = ""
        if self._driver:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._driver.pid, signal.SIGKILL)
            self._driver.wait()
            self._driver = None
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_page(browser: Browser, path: Path) -> None:
    """Any page of ours, in light and dark, wide and narrow: whole, readable and no wider than the window."""
    looks: dict[str, tuple[float, float]] = {}
    for scheme, width in VIEWS:
        browser.log()
        browser.show(path, scheme, width)
        seen = browser.script(LOOK, width)
        said = [entry["message"] for entry in browser.log() if entry["level"] in ("SEVERE", "WARNING")]
        problems = seen["problems"] + [f"the console says: {message}" for message in said]
        assert not problems, f"{path.name}, {scheme}, {width} px: " + "; ".join(problems)
        looks[scheme] = seen["ink"], seen["back"]
    (light, paper), (dark, night) = looks["light"], looks["dark"]
    assert light < paper, f"{path.name}: the light scheme is not dark on light"
    assert dark > night, f"{path.name}: the dark scheme is not light on dark"


SMALL_TEXT = r"""
const small = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement, words = walker.currentNode.data.trim();
  if (!words || element.closest("script, style, metadata") || !element.checkVisibility()) continue;
  const svg = element.closest("figure > svg");
  const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
  const size = parseFloat(getComputedStyle(element).fontSize) * scale;
  if (size < 11.99) small.push(`${words.slice(0, 40)}: ${size.toFixed(2)} px`);
}
return small;
"""
"""The texts of a page that are less than 12 pixels high."""

LOOK = r"""
const [width] = arguments, root = document.documentElement, problems = [];
const name = (element) => {
  const words = (element.getAttribute("aria-label") || element.textContent).trim().replace(/\s+/g, " ");
  return `<${element.localName}> "${words.slice(0, 60)}"`;
};
const seen = (element) => element.checkVisibility({ visibilityProperty: true, opacityProperty: true });

// Colours as [red, green, blue, alpha], alpha from 0 to 1, whatever way they are written.
const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
const paint = canvas.getContext("2d", { willReadFrequently: true });
const known = new Map();
const rgba = (colour) => {
  if (!known.has(colour)) {
    paint.clearRect(0, 0, 1, 1);
    paint.fillStyle = "transparent"; // which stays where the colour is none
    paint.fillStyle = colour;
    paint.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = paint.getImageData(0, 0, 1, 1).data;
    known.set(colour, [red, green, blue, alpha / 255]);
  }
  return known.get(colour);
};
const over = (top, below) => [0, 1, 2].map((at) => top[at] * top[3] + below[at] * (1 - top[3])).concat(1);
const linear = (part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
const luminance = (colour) => {
  const [red, green, blue] = colour.map((part) => linear(part / 255));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
};
const probe = root.appendChild(document.createElement("i"));
probe.style.color = "Canvas";
const bare = rgba(getComputedStyle(probe).color);
probe.remove();
const back = (element) => {
  if (!element) return bare;
  const own = rgba(getComputedStyle(element).backgroundColor);
  return own[3] === 1 ? own : over(own, back(element.parentElement));
};
const opacity = (element) => element ? getComputedStyle(element).opacity * opacity(element.parentElement) : 1;
const legible = (element, colour, least) => {
  const [red, green, blue, alpha] = rgba(colour), below = back(element);
  const shown = over([red, green, blue, alpha * opacity(element)], below);
  const [low, high] = [luminance(shown), luminance(below)].sort((a, b) => a - b);
  const found = (high + 0.05) / (low + 0.05);
  if (found < least) problems.push(`${name(element)} has a contrast of ${found.toFixed(2)}, below ${least}`);
};

// Everything lies within the page's width, or scrolls in a box that does. A scroll bar may take some of the width.
if (root.clientWidth > width || innerWidth < width) problems.push(`the page is laid out for ${root.clientWidth} px`);
if (root.scrollWidth > root.clientWidth) problems.push(`the page scrolls sideways, to ${root.scrollWidth} px`);
const within = (element) => {
  const { left, right, top, bottom, width, height } = element.getBoundingClientRect();
  const wide = left >= 0 && right <= root.clientWidth + 0.5;
  const high = top + scrollY >= 0 && bottom + scrollY <= root.scrollHeight + 0.5;
  if (!seen(element) || !(width > 0 && height > 0)) problems.push(`${name(element)} is not visible`);
  else if (!(wide && high)) problems.push(`${name(element)} lies outside the page`);
};
const scroller = (element) => {
  const scrolls = element && /auto|scroll/.test(getComputedStyle(element).overflowX);
  return scrolls || !element ? element : scroller(element.parentElement);
};
document.querySelectorAll("figure > svg, figure > img").forEach(within);
for (const table of document.querySelectorAll("table")) {
  within(scroller(table) || table);
  if (!table.querySelector("td")) problems.push(`${name(table)} has no cells`);
}
for (const { naturalWidth, src } of document.images) {
  if (!naturalWidth) problems.push(`the image ${src.slice(0, 80)} is broken`);
}

// Text stands out from what is behind it. In drawings less is enough, and what lies on a shape is not looked at.
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), texts = new Set();
while (walker.nextNode()) if (walker.currentNode.data.trim()) texts.add(walker.currentNode.parentElement);
const fills = (shape) => shape.localName === "image" || rgba(getComputedStyle(shape).fill)[3] > 0;
const boxes = new Map();
const boxesOf = (svg) => {
  if (!boxes.has(svg)) {
    const shapes = [...svg.querySelectorAll("path, rect, circle, ellipse, polygon, image")];
    const painted = shapes.filter((shape) => !shape.closest("defs, clipPath") && fills(shape));
    boxes.set(svg, painted.map((shape) => shape.getBoundingClientRect()));
  }
  return boxes.get(svg);
};
for (const element of texts) {
  if (element.closest("script, style, noscript, title, desc") || !element.checkVisibility()) continue;
  const svg = element.closest("svg"), { color, fill } = getComputedStyle(element);
  if (!svg) {
    legible(element, color, 4.5);
    continue;
  }
  const { x: left, y: top, width, height } = element.getBoundingClientRect();
  const x = left + width / 2, y = top + height / 2;
  const covers = (box) => box.left <= x && x <= box.right && box.top <= y && y <= box.bottom;
  if (!boxesOf(svg).some(covers)) legible(element, fill, 3);
}
const ink = luminance(rgba(getComputedStyle(document.body).color));
return { problems, ink, back: luminance(back(document.body)) };
"""
