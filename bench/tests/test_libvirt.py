"""Topic `libvirt` with invented rows: figures and tables; a client's view of libvirt; domains.

A domain is a guest of libvirt. Its QEMU is replaced for the `first` time, or `again`; `own` is a VM of Rekindle's,
`managedsave` libvirt's own way. In case `pause` a domain is `attached`, or replaced and then attached.
"""

import xml.etree.ElementTree as ET
from functools import partial

import pytest
from row_files import write_rows

from rekindle_bench.libvirt import analysis, cases, domains, plots, rows
from rekindle_bench.libvirt.domains import Domain
from rekindle_bench.libvirt.plan import FULL, QUICK, left_out
from rekindle_bench.libvirt.private_libvirt import Attempt
from rekindle_bench.libvirt.rows import (
    AGAIN,
    ATTACHED,
    FIRST,
    INTO_LIBVIRT,
    MANAGEDSAVE,
    OVERLAYS,
    OWN,
    RAM_ONLY,
    REPLACED,
    REPLACED_DOMAIN,
    RESTORED_DOMAIN,
    UNPROTECTED,
    UNTOUCHED,
    Row,
)
from rekindle_lab.guests import Image
from rekindle_lab.rekindle import Probe, RekindleError

START_US = 1_800_000_000_000_000
# Guest-stopped times in ms.
FIRST_MS, AGAIN_MS, OWN_MS = 16.0, 11.0, 10.0
GAP_MS, SAVE_GAP_MS = 300.0, 12_000.0
# Pauses in ms.
ATTACHED_MS, REPLACED_MS, PAUSE_MS = 6.0, 4.2, 4.0
AWAY_S, LONGEST_S, REPORTED_S = 2.5, 0.5, 2.2
DOMAINS = 10
ROUNDS = 5
# Cases `losses`, `overlays`, `epochs` and `restored`.
VERSIONS = ("10.0", "11.1")
ANSWERED = 40
OVERLAYS_MS, WRITES_PER_S = 2.5, {UNPROTECTED: 1200.0, RAM_ONLY: 1000.0, OVERLAYS: 900.0}
EPOCHS, PASSES = 50, 7
RESTORE_S = 1.25

write = partial(write_rows, rows)


def replaced(case, how, number, stopped_ms, *, mib=2048, **more):
    """Returns a replacement; round n takes n us longer than round 0. The second half of the stop is the step `load`."""
    stopped_us = int(stopped_ms * 1000) + number
    half_us = stopped_us // 2
    steps = [
        {"step": "copy memory", "start_host_us": START_US - 900_000, "us": 900_000},
        {"step": "load", "start_host_us": START_US + half_us, "us": stopped_us - half_us},
        # It starts before the guest runs again: 0.1 ms of it belong to the stop.
        {"step": "give back", "start_host_us": START_US + stopped_us - 100, "us": 500_000},
    ]
    times = {"stopped_us": stopped_us, "stop_host_us": START_US, "resume_host_us": START_US + stopped_us}
    columns = {"guests": 1, "vm": "a", **times, "steps": steps, **more}
    return Row(case=case, how=how, memory_mib=mib, round=number, **columns)


def tried(how, operation, round_number, failure=""):
    guest = {"memory_mib": 256, "guests": 1, "vm": "a"}
    row = Row(case="works", how=how, round=round_number, operation=operation, **guest)
    row.worked, row.failure = not failure, failure
    return row


def with_disks_or_clients(lost_requests=0, lost_sessions=0, wrong=0):
    """Returns rows of the cases `losses`, `overlays`, `epochs` and `restored`."""
    guest = {"memory_mib": 2048, "guests": 1, "vm": "a"}
    made = []
    for number in range(ROUNDS):
        losses = {"answered": ANSWERED, "failed": lost_requests if number == 1 else 0, "sessions": 2}
        losses |= {"lost_sessions": lost_sessions if number > 2 else 0, "to_version": VERSIONS[number % 2]}
        made.append(replaced("losses", FIRST, number, 95.0, **losses))
        for how, writes in WRITES_PER_S.items():
            made.append(Row(case="overlays", how=how, round=number, writes_per_s=writes + number, **guest))
        for how, ms in ((RAM_ONLY, 0.0), (OVERLAYS, OVERLAYS_MS)):
            pause_us = {"disks_us": int(ms * 1000) + number, "stopped_us": 94_000}
            made.append(Row(case="overlays", how=how, round=number, number=number, **pause_us, **guest))
        restored = {"how": INTO_LIBVIRT, "command_us": int(RESTORE_S * 1e6) + number, "worked": number > 0}
        made.append(Row(case="restored", round=number, **restored, **guest))
        made.append(Row(case="restored", round=number, **{**restored, "command_us": 1}, **{**guest, "memory_mib": 512}))
    return [
        *made,
        Row(case="epochs", how=OVERLAYS, round=0, number=EPOCHS, passes=PASSES, wrong=wrong, **guest),
    ]


def made_up(away_s=AWAY_S):
    made = []
    for number in range(ROUNDS):
        made.append(replaced("first", FIRST, number, FIRST_MS))
        made.append(replaced("first", FIRST, number, 99.0, mib=8192))
        made.append(replaced("again", AGAIN, number, AGAIN_MS))
        made.append(replaced("again", OWN, number, OWN_MS))
        made.append(replaced("managedsave", FIRST, number, 98.0, gap_us=int(GAP_MS * 1000)))
        save = {"case": "managedsave", "how": MANAGEDSAVE, "memory_mib": 2048, "guests": 1, "vm": "a"}
        made.append(Row(**save, round=number, gap_us=int(SAVE_GAP_MS * 1000)))
        for vm in range(DOMAINS):
            away = {
                "away_us": int(away_s * 1e6),
                "longest_away_us": int(LONGEST_S * 1e6),
                "absences": DOMAINS,
                "reported_away_us": int(REPORTED_S * 1e6),
            }
            how = AGAIN if number else FIRST
            made.append(replaced("away", how, number, 97.0, mib=256, **{**away, "guests": DOMAINS, "vm": f"d{vm}"}))
        for how, ms in ((ATTACHED, ATTACHED_MS), (OWN, PAUSE_MS), (REPLACED, REPLACED_MS)):
            made.append(replaced("pause", how, number, ms, mib=512, dirty_bytes=2**21))
            made.append(replaced("pause", how, number, 10 * ms, mib=2048, dirty_bytes=2**22))
    made += with_disks_or_clients()
    made += [tried(how, "dump", 0) for how in (UNTOUCHED, REPLACED_DOMAIN)]
    # The domain of case `again` is replaced for the first time before the turns.
    return [*made, replaced("again", FIRST, 0, 96.0)]


def figures_of(tmp_path, made):
    findings = analysis.figures(write(tmp_path / "libvirt-raw.csv", made), "libvirt-raw.csv")
    return {figure.id: figure for figure in findings.figures}, findings.absent


def test_known_rows_give_known_figures(tmp_path):
    """Each figure has the rows of its own case, size and way alone. The median of round n's n us is 2 us."""
    figures, absent = figures_of(tmp_path, made_up())
    assert absent == []
    stopped = figures["libvirt_replace_stopped"].as_json()
    assert (stopped["value"], stopped["unit"], stopped["n"], stopped["met"]) == (FIRST_MS + 0.002, "ms", ROUNDS, True)
    again = figures["libvirt_replace_again"].as_json()
    assert again["ratio_of"] == {"ours": AGAIN_MS + 0.002, "peer": OWN_MS + 0.002} and again["met"]
    assert "verdict" not in again  # both are Rekindle's
    save = figures["libvirt_vs_managedsave"].as_json()
    assert save["ratio_of"] == {"ours": GAP_MS, "peer": SAVE_GAP_MS} and save["met"]
    away = figures["libvirt_daemon_away"].as_json()
    assert (away["value"], away["n"], away["unit"]) == (AWAY_S, ROUNDS, "s")  # one for each command, not each domain
    extra = {"domains": DOMAINS, "absences": DOMAINS, "longest_absence_s": LONGEST_S, "reported_s": REPORTED_S}
    assert away | extra == away
    pauses = [figures[name] for name in ("libvirt_pause", "libvirt_pause_replaced")]
    assert [figure.value for figure in pauses] == pytest.approx([1.5, 1.05], rel=1e-3)
    assert pauses[1].met and not figures_of(tmp_path, made_up(away_s=3.1))[0]["libvirt_daemon_away"].met


def test_known_rows_of_disks_and_clients_give_known_figures(tmp_path):
    """The peer of overlays are checkpoints of the RAM alone, not an unprotected guest; a failed restore is counted."""
    figures, _ = figures_of(tmp_path, with_disks_or_clients())
    known = {name: figure.as_json() for name, figure in figures.items()}
    losses = {
        "value": 0,
        "replacements": ROUNDS,
        "versions": len(VERSIONS),
        "requests": ROUNDS * ANSWERED,
        "sessions": 2,
    }
    assert known["libvirt_losses"] | losses == known["libvirt_losses"] and known["libvirt_losses"]["met"]
    pause = known["overlay_pause"]
    assert (pause["value"], pause["unit"], pause["n"]) == (OVERLAYS_MS + 0.002, "ms", ROUNDS)
    cost = known["overlay_write_cost"]
    assert cost["ratio_of"] == {"ours": WRITES_PER_S[OVERLAYS] + 2, "peer": WRITES_PER_S[RAM_ONLY] + 2} and cost["met"]
    assert cost["ratio_of_unit"] == "writes/s"
    wrong = known["overlay_wrong"]
    assert (wrong["value"], wrong["checkpoints"], wrong["verified_passes"], wrong["met"]) == (0, EPOCHS, PASSES, True)
    restore = known["libvirt_restore"]
    assert (restore["value"], restore["n"], restore["failed"]) == (RESTORE_S, ROUNDS, 1)


def test_what_is_lost_or_wrong_is_counted_once(tmp_path):
    """A lost session is in the row of every later replacement, a lost request in its own."""
    figures, _ = figures_of(tmp_path, with_disks_or_clients(lost_requests=3, lost_sessions=1, wrong=2))
    losses, wrong = figures["libvirt_losses"].as_json(), figures["overlay_wrong"].as_json()
    assert (losses["value"], losses["lost_requests"], losses["lost_sessions"], losses["met"]) == (4, 3, 1, False)
    assert losses["requests"] == ROUNDS * ANSWERED + 3
    assert (wrong["value"], wrong["met"]) == (2, False)


def test_figures_without_rows_are_reported(tmp_path):
    """A run of one case has the figures of that case."""
    figures, absent = figures_of(tmp_path, [row for row in made_up() if row.case == "first"])
    assert set(figures) == {"libvirt_replace_stopped"}
    text = "\n".join(absent)
    for name in (
        "replace_again",
        "vs_managedsave",
        "daemon_away",
        "pause",
        "pause_replaced",
        "works_after",
        "losses",
        "restore",
    ):
        assert f"figure libvirt_{name}: no rows" in text
    for name in ("pause", "write_cost", "wrong"):
        assert f"figure overlay_{name}: no rows" in text


def test_an_operation_counts_if_it_works_without_a_replacement(tmp_path):
    """It must work in every round. One that fails without a replacement as well proves nothing."""
    made = [
        *(tried(how, "dump", number) for how in (UNTOUCHED, REPLACED_DOMAIN) for number in range(2)),
        *(tried(how, "backup", 0, "no room") for how in (UNTOUCHED, REPLACED_DOMAIN)),
        *(tried(UNTOUCHED, "reset", number) for number in range(2)),
        tried(REPLACED_DOMAIN, "reset", 0),
        tried(REPLACED_DOMAIN, "reset", 1, "no answer"),
        tried(RESTORED_DOMAIN, "reset", 0),
        tried(RESTORED_DOMAIN, "dump", 0),
    ]
    figure = figures_of(tmp_path, made)[0]["libvirt_works_after"].as_json()
    assert (figure["value"], figure["met"]) == (0.75, False)  # dump on both, reset on one
    assert (figure["operations"], figure["fail_without_a_replacement"]) == (3, 1)
    table = {line["operation"]: line for line in analysis.operations(write(tmp_path / "r.csv", made))}
    ways = {UNTOUCHED: "works", REPLACED_DOMAIN: "no answer", RESTORED_DOMAIN: "works"}
    assert table["reset"] == {"operation": "reset"} | ways
    assert RESTORED_DOMAIN not in table["backup"]
    assert table["dump"][REPLACED_DOMAIN] == "works"


def test_the_tables_have_every_way(tmp_path):
    """Medians by case, size and way; the steps of the pause alone; one line for the commands of each kind."""
    frame = write(tmp_path / "r.csv", made_up())
    summary = {(line["case"], line["guests"], line["how"]): line for line in analysis.summary(frame)}
    assert summary["managedsave", "2G", MANAGEDSAVE]["stopped ms"] is None
    assert summary["managedsave", "2G", MANAGEDSAVE]["gap ms"] == SAVE_GAP_MS
    assert summary["away", "10 x 256M", AGAIN]["n"] == DOMAINS * (ROUNDS - 1)
    stops = {(line["case"], line["guest"], line["how"]): line for line in analysis.stops(frame)}
    assert stops["again", "2G", OWN]["load ms"] == pytest.approx(OWN_MS / 2, rel=1e-3)
    assert stops["again", "2G", OWN]["give back ms"] == pytest.approx(0.1)
    assert not any("copy memory ms" in line for line in stops.values())
    absences = {line["how"]: line for line in analysis.absences(frame)}
    assert (absences[FIRST]["n"], absences[AGAIN]["n"], absences[AGAIN]["away s"]) == (1, ROUNDS - 1, AWAY_S)
    disks = {line["how"]: line for line in analysis.disks(frame)}
    assert disks[UNPROTECTED]["writes per s"] == WRITES_PER_S[UNPROTECTED] + 2
    assert (disks[UNPROTECTED]["pauses"], disks[OVERLAYS]["pauses"]) == (0, ROUNDS)
    restores = {line["domain"]: line for line in analysis.restores(frame)}
    assert (restores["512M"]["n"], restores["2G"]["failed"]) == (ROUNDS, 1)
    pauses = {(line["guest"], line["how"]): line for line in analysis.pauses(frame)}
    assert pauses["512M", ATTACHED]["dirty MiB"] == 2 and pauses["2G", ATTACHED]["dirty MiB"] == 4


def test_the_plot_is_drawn_if_there_are_replacements(tmp_path):
    """Checkpoints alone have none."""
    made = made_up()
    assert plots.draw(write(tmp_path / "r.csv", made), tmp_path) == ["libvirt-stops.png"]
    assert (tmp_path / "libvirt-stops.png").read_bytes().startswith(b"\x89PNG")
    assert plots.draw(write(tmp_path / "s.csv", [row for row in made if row.case == "pause"]), tmp_path) == []


def attempts(*ends_ms, failed=()):
    """Returns attempts of 1 ms that end at these times."""
    return [Attempt(end * 1000 - 1000, end * 1000, end not in failed) for end in ends_ms]


def test_an_absence_is_from_one_answer_to_the_next():
    """Attempts fail, or one is answered late, as by a socket that systemd keeps open."""
    assert domains.absences_us(attempts(10, 20, 30, 50)) == []
    # 40 and 50 fail: from the answer at 30 to the one at 60.
    assert domains.absences_us(attempts(10, 20, 30, 40, 50, 60, 70, failed=(40, 50))) == [30_000]
    # Two absences: a late answer, and a failure.
    assert domains.absences_us(attempts(10, 500, 510, 520, 530, failed=(520,))) == [490_000, 20_000]
    # Before the first answer and after the last one nothing is known.
    assert domains.absences_us(attempts(10, 20, 30, 40, failed=(10, 40))) == []
    assert domains.absences_us([]) == []


def test_the_reported_absence_is_the_sum_of_all():
    """The daemon can be absent more than once. A version of Rekindle may not report it."""
    assert domains.reported_away_us({"vms": [], "daemon_absences_us": [700, 300]}) == 1000
    assert domains.reported_away_us({"vms": []}) is None


@pytest.fixture
def domain(tmp_path):
    image = Image("micro", tmp_path)
    folders = {"ram_dir": tmp_path, "disk_dir": tmp_path}
    return Domain("db", image=image, memory_mib=2048, index=3, touch="all", netns="n", **folders)


def test_a_domain_is_unprepared_and_is_reached_through_the_bridge(domain):
    """libvirt chooses where its RAM is, and QEMU gets nothing but libvirt's own arguments."""
    description = ET.fromstring(domain.xml("/usr/bin/qemu"))
    assert description.findtext("name") == "db" and description.findtext("memory") == "2048"
    assert description.findtext("devices/emulator") == "/usr/bin/qemu" and description.find("memoryBacking") is None
    assert "rekindle.touch=all" in description.findtext("os/cmdline")
    assert description.find("{*}commandline") is None
    assert description.find("devices/interface/source").get("bridge") == domains.BRIDGE
    assert f"rekindle.ip={domain.address}/24" in description.findtext("os/cmdline")
    assert domain.address.startswith(f"{domains.BRIDGE_NETWORK}.") and domain.echo_url == f"echo://{domain.address}:7"
    assert not domain.address.endswith(".1")  # this machine's


def vm_json(name, outcome="done"):
    version = {"version": {"major": 10, "minor": 0}}
    times = {"stopped_us": 9000, "stop_host_us": START_US, "resume_host_us": START_US + 9000}
    return {"name": name, "outcome": outcome, **times, "from": version, "to": version, "steps": [{"step": "load"}]}


def test_a_replacement_that_failed_is_an_error(domain):
    """Its report has no times to record."""
    row = cases.row_of("first", FIRST, domain, 0)
    domains.replaced(row, {"vms": [vm_json("db")]})
    assert (row.stopped_us, row.from_version, row.steps) == (9000, "10.0", [{"step": "load"}])
    with pytest.raises(RekindleError, match="reboot of db: failed"):
        domains.replaced(row, {"vms": [vm_json("db", "failed")]})


def test_the_gap_is_the_one_around_the_stop(domain):
    """libvirt's own way reports no stop: its gap is the longest one."""
    gaps = [
        {"start_unix_ns": (START_US - 50) * 1000, "length_us": 120_000},
        {"start_unix_ns": (START_US + 5_000_000) * 1000, "length_us": 400_000},
    ]
    probe = Probe({"gaps": gaps, "longest_gap_us": 400_000, "answered": 5, "failed": {"timeout": 2}})
    row = cases.row_of("managedsave", FIRST, domain, 0)
    domains.fill_gap(row, probe, vm_json("db"))
    assert (row.gap_us, row.gap_start_host_us, row.answered, row.failed) == (120_000, START_US - 50, 5, 2)
    domains.fill_gap(row, probe, {})
    assert row.gap_us == 400_000


def test_omissions_of_a_quick_run_are_listed():
    """The full plan omits nothing."""
    assert left_out(FULL) == []
    text = "\n".join(left_out(QUICK))
    assert "first replacements, 8G: all of it" in text
    assert f"first replacements, 2G: {QUICK.firsts[2048]} of {FULL.firsts[2048]}" in text
    assert f"10 domains in one command: {QUICK.away_rounds} of {FULL.away_rounds}" in text
    assert FULL.firsts[2048] >= 20  # the figure requires as many
