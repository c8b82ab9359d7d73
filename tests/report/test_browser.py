"""The pages in headless Chromium: no error, and every control works."""

import os
import shutil

import pytest
from tests.report._runs import run

from expunge.report import Point, RowText, render_comparison, render_report

CHROMIUM = os.environ.get("EXPUNGE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install -e '.[dev]')")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium on this machine (apt-get install chromium)")

_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
_FLAGS += ["--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    words = RowText("Who?", "<b>Ada</b>", ("<i>", "Ada", "\n"))
    one = run(folder / "one")
    texts = type(one)(**{name: getattr(one, name) for name in one.__dataclass_fields__} | {"texts": [words] * 4})
    two = run(folder / "two", tokens=False)
    files = {"run": render_report(one), "texts": render_report(texts), "bare": render_report(two)}
    files["comparison"] = render_comparison([one, two], retrained=Point("retrained", 0.2, 0.85))
    for name, text in files.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def show(browser, pages):
    """Open a page; at the end it must have said nothing on the console and asked for nothing."""
    opened, said = [], []

    def open_page(name, width=1280, scheme="light"):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        opened.append(page)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.on("request", lambda asked: asked.url.startswith(("file:", "data:")) or said.append(asked.url))
        page.goto((pages / f"{name}.html").as_uri())
        return page

    yield open_page
    for page in opened:
        page.close()
    assert said == []


def _shown(page):
    return page.eval_on_selector_all(
        "#table tbody tr[data-index]", "rows => rows.filter(r => !r.hidden).map(r => r.dataset.index)"
    )


@pytest.mark.parametrize("name", ["run", "texts", "bare", "comparison"])
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (400, "light")])
def test_every_chart_is_drawn_and_nothing_is_wider_than_the_page(show, name, width, scheme):
    page = show(name, width, scheme)
    charts = page.locator("[data-chart]")
    assert charts.count() == {"run": 7, "texts": 7, "bare": 6, "comparison": 2}[name]
    assert page.locator("[data-chart] svg").count() == charts.count()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelectorAll('img').length") == 0


def test_the_table_is_filtered_and_sorted(show):
    page = show("run")
    assert _shown(page) == ["0", "1", "2", "3"]
    page.fill("#find", "ROW-1")
    assert _shown(page) == ["1"]
    assert page.inner_text("#count") == "1 shown"
    page.fill("#find", "")
    page.select_option("#verdict", "left")
    assert _shown(page) == ["2"]
    page.select_option("#verdict", "")
    page.click("[data-sort=after]")
    assert _shown(page) == ["0", "3", "1", "2"]
    header = page.locator("th:has([data-sort=after])")
    assert header.get_attribute("aria-sort") == "ascending"
    page.click("[data-sort=after]")
    assert _shown(page) == ["2", "1", "3", "0"]
    assert header.get_attribute("aria-sort") == "descending"
    page.select_option("#sort", "before")
    assert _shown(page)[-1] == "3"  # not measured is last, also when sorting downwards
    page.uncheck("#down")
    assert _shown(page)[-1] == "3"


def test_an_example_opens_to_its_tokens_by_keyboard(show):
    page = show("run")
    page.locator(".open").nth(0).focus()
    page.keyboard.press("Enter")
    assert page.locator(".open").nth(0).get_attribute("aria-expanded") == "true"
    assert page.locator(".strip").count() == 2
    assert page.locator(".strip").nth(0).locator(".up").count() == 2
    assert page.locator(".strip").nth(1).locator(".up").count() == 1
    assert page.locator(".strip li").nth(0).inner_text() == ""
    page.locator(".strip").nth(0).locator("li").nth(0).focus()
    page.keyboard.press("ArrowRight")
    assert page.inner_text(".readout") == "token 2: margin before −1.00, after −2.00 (τ 0.85)"
    page.locator(".open").nth(0).click()
    assert page.locator(".strip").count() == 0


def test_texts_of_tokens_are_text(show):
    page = show("texts")
    page.locator(".open").nth(0).click()
    assert page.locator(".strip").nth(0).locator("li").all_inner_texts() == ["<i>", "Ada", "↵"]
    assert page.locator(".texts b").nth(0).inner_text() == "<b>Ada</b>"


def test_the_theme_is_switched_and_charts_follow(show):
    page = show("run")
    color = "getComputedStyle(document.body).backgroundColor"
    line = "document.querySelector('[data-chart=forget_loss] svg').innerHTML"
    light, drawn = page.evaluate(color), page.evaluate(line)
    page.click("#theme")
    assert page.evaluate(color) == light
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate(color) != light
    assert page.evaluate(line) != drawn
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(color) == light
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(color) != light


def test_definitions_come_on_focus_and_hover_and_go_with_escape(show):
    page = show("run")
    word = page.locator(".term[data-term=violation]").first
    word.focus()
    assert page.locator("#tip").is_visible()
    assert page.locator("#tip math").count() == 1
    assert word.get_attribute("aria-describedby") == "tip"
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    page.locator(".term[data-term=utility]").first.hover()
    assert "utility kept" in page.inner_text("#tip")


def test_an_injected_script_does_not_run(browser, pages):
    text = (pages / "run.html").read_text(encoding="utf-8")
    hurt = text.replace("<main", "<script>document.title = 'hurt'</script><main", 1)
    (pages / "hurt.html").write_text(hurt, encoding="utf-8")
    page = browser.new_page()
    page.goto((pages / "hurt.html").as_uri())
    assert page.title() == "one · expunge"
    page.close()


def test_without_scripts_the_numbers_are_there(browser, pages):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((pages / "run.html").as_uri())
    assert page.locator("#table tbody tr").count() == 4
    assert "1 of 4 examples are left" in page.inner_text("main")
    assert page.locator("noscript").is_visible()
    context.close()
