"""Promises about the pages of `stretto watch`, in a real Chromium on finished runs.

- Runs: one row for each, damaged ones with their fault; picked ones over each other, with what their recipes differ in.
- Curves have their sentences; smoothing and zoom are in the address, the token is not.
- The timeline zooms by key and wheel and says what a stretch holds, and on which machine.
- The table is filtered, sorted and paged by the server; a trajectory shows the numbers of the token under the pointer,
  a group its members; what a model said is text, with hidden characters shown.
- Data health says which weights each engine has proven, with a way to its curve.
- Data health, alarms, the recipe and the first difference of two runs have their pages.
- The tab's title says run and page; logs are read; a page that waits says so; a long name stays in its column.
- Shortcuts work; no page is wider than a phone; axe finds nothing; the console is silent (the fixture `page`).
"""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, Route, expect

AXE = Path(__file__).parent.parent.parent / "web" / "node_modules" / "axe-core" / "axe.min.js"
PAGES = {
    "runs": "#/?pick={one},{other}",
    "curves": "#/runs/{recorded}/curves?more=1&smoothing=0.5",
    "timeline": "#/runs/{recorded}/timeline",
    "trajectories": "#/runs/{recorded}/trajectories",
    "trajectory": "#/runs/{recorded}/trajectory/0.50.0%2F3",
    "conversation": "#/runs/{hostile}/trajectory/0.a.0%2F1?view=conversation&colour=fate",
    "fates": "#/runs/{hostile}/trajectory/0.b.0%2F0?colour=fate",
    "group": "#/runs/{hostile}/group/0.a.0",
    "health": "#/runs/{hostile}/health",
    "alarms": "#/runs/{hostile}/alarms",
    "recipe": "#/runs/{recorded}/recipe",
    "replay": "#/runs/{recorded}/replay",
    "logs": "#/runs/{recorded}/logs",
    "diff": "#/diff?a={one}&b={other}",
    "damaged": "#/runs/{damaged}/curves",
}


def names_of(page: Page) -> dict[str, str]:
    """The ids of the runs, by name."""
    rows = page.get_by_test_id("run-row")
    return {str(row.locator("th").inner_text()): str(row.get_attribute("data-run")) for row in rows.all()}


def curve(page: Page, name: str) -> Locator:
    return page.locator(f'[data-testid="curve"][data-name="{name}"]')


def go(page: Page, place: str) -> None:
    """From the page of all runs to an address behind the #, with the ids of runs in place of their names."""
    page.goto(page.url.partition("#")[0] + place.format(**names_of(page)))


def visit(page: Page, name: str) -> None:
    go(page, PAGES[name])
    page.locator("main h2, main h1").first.wait_for()
    page.wait_for_load_state("networkidle") if name in ("runs", "diff") else page.locator("main h2").first.wait_for()


def test_every_run_has_a_row_a_damaged_one_its_fault_and_the_token_does_not_stay_in_the_address(page: Page) -> None:
    assert "token" not in page.url
    expect(page.get_by_test_id("run-row")).to_have_count(5)
    assert names_of(page).keys() == {"recorded", "hostile", "one", "other", "damaged"}
    expect(page.get_by_test_id("run-row").filter(has_text="damaged").first).to_contain_text("ledger.sqlite")


def test_picked_runs_are_drawn_over_each_other_with_the_differences_of_their_recipes(page: Page) -> None:
    page.get_by_label("pick one").check()
    page.get_by_label("pick other").check()
    entropy = curve(page, "trainer.entropy")
    expect(entropy.locator(".latest")).to_contain_text("one 0.001")
    expect(entropy.locator(".latest")).to_contain_text("other 0.002")
    expect(entropy.locator("canvas")).to_be_visible()
    expect(page.locator('[data-table="recipes"] tbody tr')).to_have_count(1)
    expect(page.locator('[data-table="recipes"]')).to_contain_text("trainer.learning_rate")


COLOUR = "swatch => getComputedStyle(swatch).backgroundColor"


@pytest.mark.parametrize("picked", [["one", "other"], ["other", "one"], ["recorded", "other", "hostile", "one"]])
def test_a_run_has_one_colour_in_table_and_curves_whatever_was_picked_first(page: Page, picked: list[str]) -> None:
    for name in picked:
        page.get_by_label(f"pick {name}", exact=True).check()
    rows, legend = page.get_by_test_id("run-row"), curve(page, "reward").locator(".latest")
    expect(legend.locator(".swatch")).to_have_count(len(picked))
    in_table = {
        name: rows.filter(has=page.get_by_label(f"pick {name}", exact=True))
        .locator("td .swatch")
        .first.evaluate(COLOUR)
        for name in picked
    }
    in_curves = {
        str(line.locator("bdi").inner_text()): line.locator(".swatch").evaluate(COLOUR)
        for line in legend.locator(":scope > span").all()
    }
    assert in_curves == in_table
    assert len(set(in_table.values())) == len(picked)


def test_a_curve_has_its_sentence_and_its_zoom_is_in_the_address(page: Page) -> None:
    visit(page, "curves")
    drawn = curve(page, "length_mean")
    expect(drawn.locator("figcaption")).to_contain_text("mean sampled tokens over the batch's completions")
    box = drawn.locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 40)
    expect(drawn.locator(".readout")).to_contain_text("steps 2")
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 40, steps=5)
    page.mouse.up()
    page.wait_for_url("**zoom=**")
    page.get_by_role("button", name="Whole axis").click()
    assert "zoom" not in page.url


def test_a_curve_is_zoomed_by_keys(page: Page) -> None:
    visit(page, "curves")
    curve(page, "length_mean").locator(".zoomed").focus()
    page.keyboard.press("+")
    page.wait_for_url("**zoom=2.25000%7E4.75000**")  # the middle half of steps 1 to 6
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**zoom=2.87500%7E5.37500**")
    page.keyboard.press("0")
    expect(page.get_by_role("button", name="Whole axis")).to_be_disabled()


def test_a_caption_says_how_to_read_the_curve_and_has_the_formula_behind_it(page: Page) -> None:
    visit(page, "curves")
    caption = curve(page, "trainer.grad_norm").locator("figcaption")
    expect(caption).to_contain_text("0 for long: nothing is learned")
    expect(caption.locator("details")).not_to_have_attribute("open", "")


def test_the_title_of_the_tab_says_which_run_and_which_page(page: Page) -> None:
    expect(page).to_have_title("Runs · stretto")
    visit(page, "health")
    expect(page).to_have_title("hostile · Data health · stretto")


def test_the_logs_of_the_run_and_its_roles_are_read_in_the_browser(page: Page) -> None:
    visit(page, "logs")
    expect(page.locator('[data-log="run"]')).to_contain_text("ends with exit code 0")


def test_a_long_name_pushes_no_column_out_and_is_whole_in_its_title(page: Page) -> None:
    def renamed(route: Route) -> None:
        listed = route.fetch().json()
        listed["runs"][0]["name"] = "long" * 100
        route.fulfill(json=listed)

    page.route("**/api/runs", renamed)
    box = page.get_by_title("long" * 100, exact=True).bounding_box()
    assert box is not None
    assert box["width"] < 400


def test_a_page_that_waits_for_the_server_says_so(page: Page) -> None:
    held: list[Route] = []
    page.route("**/health", lambda route: held.append(route))
    with page.expect_request("**/health"):
        go(page, "#/runs/{hostile}/health")
    expect(page.get_by_role("heading", name="Data health")).to_be_visible()
    expect(page.get_by_role("status").filter(has_text="Reading")).to_be_visible()
    page.unroute("**/health")
    page.reload()
    expect(page.get_by_role("status").filter(has_text="Reading")).to_have_count(0)


def test_curves_are_drawn_against_another_axis(page: Page) -> None:
    visit(page, "curves")
    page.locator("select[name=axis]").select_option("trained_tokens")
    expect(page.get_by_test_id("curve").first.get_by_role("img")).to_have_attribute(
        "aria-label", re.compile("trained tokens")
    )


def test_the_timeline_zooms_by_key_and_wheel_and_names_what_a_stretch_holds(page: Page) -> None:
    visit(page, "timeline")
    canvas = page.get_by_test_id("timeline")
    whole = float(canvas.get_attribute("data-to") or 0)
    canvas.focus()
    page.keyboard.press("+")
    expect(canvas).not_to_have_attribute("data-to", str(whole))
    half = float(canvas.get_attribute("data-to") or 0) - float(canvas.get_attribute("data-from") or 0)
    assert half == pytest.approx(whole / 2)
    canvas.hover(position={"x": 400, "y": 40})
    page.mouse.wheel(0, -100)
    width = "(({from, to}) => to - from)(document.querySelector('[data-testid=timeline]').dataset)"
    page.wait_for_function(f"{width} < {half}")
    page.get_by_role("button", name="Whole run").click()
    canvas.click(position={"x": 200, "y": 100})
    expect(page.locator('[data-table="stretch"]')).to_contain_text("generate")
    expect(page.locator("#stretch")).to_contain_text("In the stretch")


def test_the_lanes_of_several_machines_say_which(page: Page) -> None:
    go(page, "#/runs/{hostile}/timeline")
    expect(page.get_by_test_id("timeline")).to_have_attribute(
        "aria-label", re.compile("trainer, node-3/engine-0, here/engine-1,")
    )
    expect(page.locator('[data-table="stretch"] th[scope=row]').first).to_have_text("trainer")
    expect(page.locator('[data-table="stretch"]')).to_contain_text("node-3/engine-0")


def test_the_table_is_filtered_sorted_and_paged_by_the_server(page: Page, faults: list[str]) -> None:
    visit(page, "trajectories")
    rows = page.get_by_test_id("trajectory-row")
    expect(rows).to_have_count(50)
    page.keyboard.press("n")
    expect(rows).to_have_count(6)
    page.get_by_label("State").select_option("in_flight")
    expect(rows).to_have_count(8)
    page.get_by_role("button", name="No filter").click()
    page.get_by_label("Tokens at least").fill("64")
    page.get_by_label("Tokens at least").press("Enter")
    page.get_by_role("button", name="Reward", exact=True).click()
    expect(page.locator("th[aria-sort]")).to_contain_text("Reward")
    expect(page.locator("[data-matched]")).to_contain_text("that match, 56 in all")
    page.get_by_label("Filter", exact=True).fill("colour=red")
    page.get_by_label("Filter", exact=True).press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("colour")
    faults[:] = [fault for fault in faults if "status of 400" not in fault]


def test_a_token_shows_its_numbers_under_the_pointer_and_by_key(page: Page) -> None:
    visit(page, "trajectory")
    tokens = page.get_by_test_id("token")
    expect(tokens).to_have_count(41)
    tokens.nth(1).hover()
    numbers = page.locator("dl[data-token]")
    expect(numbers).to_have_attribute("data-token", "0:1")
    expect(numbers).to_contain_text("log-probability")
    page.get_by_role("group", name="Tokens").focus()
    page.keyboard.press("ArrowRight")
    expect(numbers).to_have_attribute("data-token", "0:2")
    page.get_by_label("Coloured by").select_option("logprob")
    assert len({token.get_attribute("style") for token in tokens.all()}) > 3
    expect(page.locator('[data-event="trained"]')).to_contain_text("step 6")


def test_what_training_did_with_each_token_is_coloured_counted_and_told(page: Page) -> None:
    ids = names_of(page)
    go(page, "#/runs/{hostile}/trajectory/0.b.0%2F0?colour=fate")
    tokens = page.get_by_test_id("token")
    expect(tokens).to_have_count(4)
    assert len({token.get_attribute("style") for token in tokens.all()}) == 4  # each has another fate
    for fate in ("trained", "clipped, ratio above 1", "masked by the correction", "masked, too old"):
        expect(page.locator(".legend")).to_contain_text(fate)
    expect(page.locator(".training")).to_contain_text("3 tokens in the loss, 1 of them clipped")
    tokens.nth(2).hover()
    numbers = page.locator("dl[data-token]")
    for told in ("trainer − engine\n0.25", "ratio\n1.5", "advantage\n0.25", "in training\nclipped, ratio above 1"):
        expect(numbers).to_contain_text(told, use_inner_text=True)
    for signed, legend in (("difference", "-0.5"), ("advantage", "-0.25")):
        page.locator("select[name=colour]").select_option(signed)
        expect(page.locator(".legend")).to_contain_text(legend)
    assert tokens.nth(0).get_attribute("style") in (None, "")  # too old: nothing is known
    page.goto(f"{page.url.partition('#')[0]}#/runs/{ids['hostile']}/trajectory/0.a.0%2F0?colour=advantage")
    expect(page.locator(".training")).to_contain_text("in step 1 is not on record")
    expect(page.locator("aside")).to_contain_text("Nothing on record: advantage")


def test_a_group_shows_its_members_and_what_a_model_said_is_text(page: Page) -> None:
    visit(page, "group")
    members = page.get_by_test_id("group").locator("article")
    expect(members).to_have_count(2)
    expect(members.nth(1)).to_contain_text("</script><img src=x onerror=alert(1)>␀␛[2J⟨U+202E⟩gnp.exe⟨U+2066⟩")
    assert page.locator("main img").count() == 0


def test_data_health_shows_the_budget_the_reasons_and_what_no_one_solves(page: Page) -> None:
    visit(page, "health")
    expect(page.get_by_test_id("goodput")).to_contain_text("trained")
    expect(page.locator('[data-table="reasons"]')).to_contain_text("timeout after 1 s")
    page.locator('[data-table="reasons"] a').click()
    expect(page.get_by_test_id("trajectory-row")).to_have_count(2)


def test_data_health_shows_which_weights_each_engine_has_proven(page: Page) -> None:
    visit(page, "health")
    rows = page.locator('[data-table="canary"] tbody tr')
    expect(rows).to_have_count(3)
    assert [row.locator("th, td").all_inner_texts() for row in rows.all()] == [
        ["engine-0", "newest", "2", "4.00e-8", "1.00e-6", "yes"],
        ["engine-1", "newest", "1", "5.00e-8", "1.00e-6", "yes"],
        ["engine-1", "worst of the run", "0", "0.25", "1.00e-6", "no"],
    ]
    rows.get_by_role("link", name="engine-0").click()
    drawn = page.locator('[data-testid="curve"]').first
    expect(drawn).to_have_attribute("data-name", "canary.engine-0")
    expect(drawn.locator(".latest")).to_contain_text("0.04")
    expect(drawn.locator("figcaption")).to_contain_text(
        "at 1 an engine does not compute with the weights of the trainer"
    )


def test_the_canary_of_the_worst_engine_is_among_the_first_curves(page: Page) -> None:
    visit(page, "alarms")
    page.keyboard.press("1")
    drawn = curve(page, "canary")
    expect(drawn).to_contain_text("canary, of the worst engine")
    expect(drawn.locator(".latest")).to_contain_text("0.05")


def test_a_run_without_proofs_says_so(page: Page) -> None:
    go(page, "#/runs/{one}/health")
    expect(page.locator("main")).to_contain_text("No proof is on record.")


def test_two_runs_are_compared_at_the_step_where_they_part(page: Page) -> None:
    visit(page, "diff")
    diff = page.get_by_test_id("diff")
    expect(diff).to_have_attribute("data-step", "2")
    expect(diff).to_contain_text("trainer.learning_rate")


def test_a_replay_is_not_offered_by_a_server_that_begins_none(page: Page) -> None:
    visit(page, "replay")
    expect(page.locator('[data-allowed="false"]')).to_contain_text("--allow-replay")
    expect(page.get_by_role("button", name="Begin")).to_have_count(0)


def test_shortcuts_go_from_page_to_page(page: Page) -> None:
    visit(page, "curves")
    page.keyboard.press("3")
    expect(page.get_by_test_id("trajectory-row").first).to_be_visible()
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("r")
    expect(page.get_by_test_id("run-row").first).to_be_visible()


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_and_a_phone_is_wide_enough(page: Page, name: str, scheme: str) -> None:
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light", reduced_motion="reduce")
    visit(page, name)
    if scheme == "dark":
        page.set_viewport_size({"width": 360, "height": 740})
    page.wait_for_timeout(600)  # until curves are drawn: nothing on the page says so
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("async () => (await axe.run()).violations.map(v => `${v.id}: ${v.nodes.map(n => n.html)}`)")
    assert found == []
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
