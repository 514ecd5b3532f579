"""Each alert fires when it should and not before, as `promtool test rules` has it: alerts/<name>.yml."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.tools import ROOT, defaults, rendered, run
from trainer.core.settings.config import Config
from trainer.telemetry.goodput import KINDS

CASES = sorted((Path(__file__).parent / "alerts").glob("*.yml"))
OBSERVING = ROOT / "docs" / "observing.md"
SCHEMA = ROOT / "fleet" / "site" / "schema" / "inventory.yml"


def rules(**settings: Any) -> dict[str, Any]:
    return yaml.safe_load(rendered("prometheus", "alerts.yml.j2", settings))


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in rules()["groups"] for rule in group["rules"] if "alert" in rule}


def of_the_run() -> list[str]:
    """Return the alerts that are silent while no run is wanted."""
    return [name for name, rule in alerts().items() if "psfleet:run_wanted" in rule["expr"]]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where promtool finds the rules, without the long texts: a case says the summary alone."""
    shortened = rules()
    for group in shortened["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                rule["annotations"] = {"summary": rule["annotations"]["summary"]}
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(shortened, width=1000))
    return tmp_path


def promtool_test(directory: Path, case: dict[str, Any]) -> str:
    """Run a case with the rules that it needs; returns what promtool complains of."""
    asked = {expected["alertname"] for test in case["tests"] for expected in test["alert_rule_test"]}
    known = yaml.safe_load((directory / "alerts.yml").read_text())
    for group in known["groups"]:
        group["rules"] = [rule for rule in group["rules"] if rule.get("alert", next(iter(asked))) in asked]
    (directory / "alerts.yml").write_text(yaml.safe_dump(known, width=1000))
    (directory / "case.yml").write_text(yaml.safe_dump(case, width=10000))
    done = run("promtool", "test", "rules", directory / "case.yml")
    output = done.stdout + done.stderr
    assert ("SUCCESS" in output) == (done.returncode == 0), output
    return "" if done.returncode == 0 else output


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_an_alert_fires_and_does_not(directory: Path, path: Path) -> None:
    assert promtool_test(directory, yaml.safe_load(path.read_text())) == ""


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    assert [path.stem for path in CASES] == sorted(alerts())
    for path in CASES:
        fires = [
            bool(expected["exp_alerts"])
            for test in yaml.safe_load(path.read_text())["tests"]
            for expected in test["alert_rule_test"]
        ]
        assert {True, False} == set(fires), path.stem


@pytest.mark.parametrize("name", of_the_run())
def test_an_alert_of_the_run_is_silent_while_it_is_stopped(directory: Path, name: str) -> None:
    case = yaml.safe_load((Path(__file__).parent / "alerts" / f"{name}.yml").read_text())
    assert "'active'" not in str(case)
    stopped = 0
    for test in case["tests"]:
        for series in test["input_series"]:
            if 'state="active"' in series["series"]:
                series["series"] = series["series"].replace('"active"', '"inactive"')
                stopped += 1
        for expected in test["alert_rule_test"]:
            expected["exp_alerts"] = []
    assert stopped
    assert promtool_test(directory, case) == ""


def test_all_others_are_of_hosts_or_of_a_failed_run() -> None:
    assert set(alerts()) - set(of_the_run()) == {
        "PsfleetClockOff", "PsfleetGpuGone", "PsfleetGpuThrottled", "PsfleetHostAway", "PsfleetRunFailed",
    }  # fmt: skip


def test_a_threshold_is_a_setting(directory: Path) -> None:
    def after(seconds: int) -> str:
        (directory / "alerts.yml").write_text(yaml.safe_dump(rules(prometheus_no_step_seconds=seconds)))
        case = yaml.safe_load((Path(__file__).parent / "alerts" / "PsfleetNoStep.yml").read_text())
        return promtool_test(directory, case | {"tests": case["tests"][1:2]})

    assert "got:" in after(60)
    assert "PsfleetNoStep" in after(60)


@pytest.mark.parametrize("name", alerts())
def test_an_alert_says_what_to_do_and_where_more_stands(name: str) -> None:
    rule = alerts()[name]
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert page == "docs/observing.md"
    assert anchor == name.lower()
    assert re.search(rf"^#+ {name}$", OBSERVING.read_text(), re.MULTILINE), "no section for it"
    for text in rule["annotations"].values():
        for sentence in re.split(r"(?<=[.!?]) ", text):
            assert len(sentence.split()) <= 30, sentence


def test_the_page_has_the_alerts_with_their_thresholds() -> None:
    row = re.compile(r"^\| \[`(Psfleet\w+)`\]\(#(\w+)\) \| (.*?) \| (.*?) \| (?:`(\w+)`)? ?\| (\w+) \|$", re.MULTILINE)
    listed = {
        name: (anchor, condition, after, setting, severity)
        for name, anchor, condition, after, setting, severity in row.findall(OBSERVING.read_text())
    }
    texts = (ROOT / "roles" / "prometheus" / "templates" / "alerts.yml.j2").read_text().split("- alert: ")[1:]
    assert list(listed) == [text.split()[0] for text in texts]
    values = defaults("prometheus")
    for text in texts:
        name = text.split()[0]
        anchor, condition, after, setting, severity = listed[name]
        assert anchor == name.lower()
        assert severity == alerts()[name]["labels"]["severity"]
        assert set(re.findall(r"<< (\w+) ", text)) == ({setting} if setting else set()), name
        if setting:
            assert re.search(rf"\b{values[setting]} ", f"{condition} {after} "), name


def test_the_time_is_told_by_the_kinds_that_there_are() -> None:
    _, _, section = OBSERVING.read_text().partition("#### PsfleetGoodputLow\n")
    named = re.findall(r"\*(\w+)\*", section.partition("####")[0])
    assert len(named) > 4
    assert {word.lower() for word in named} < set(KINDS)


def test_the_texts_name_settings_and_verbs_that_there_are() -> None:
    known = {field.name for field in dataclasses.fields(Config)} | set(yaml.safe_load(SCHEMA.read_text())["variables"])
    texts = (ROOT / "fleet" / "command_line").glob("*.py")
    verbs = {verb for each in texts for verb in re.findall(r"^def (\w+)\(", each.read_text(), re.MULTILINE)}
    for text in [OBSERVING.read_text(), *(str(rule["annotations"]) for rule in alerts().values())]:
        assert {verb.replace("-", "_") for verb in re.findall(r"`fab ([a-z-]+)", text)} <= verbs
    for rule in alerts().values():
        for name in re.findall(r"`([a-z]+_[a-z_]+)`", str(rule["annotations"])):
            assert name in known, name
