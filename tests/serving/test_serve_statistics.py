"""Counts and times: Triton's statistics, Prometheus text, and sums over processes."""

import re

from serving_helpers import request

from hurtle.serving.lanes import Job
from hurtle.serving.statistics import ModelStatistics, add, as_prometheus, as_triton, as_triton_metrics, past_counts


def job(rows=2, queue=5_000_000, compute=20_000_000, batch=6, leads=True, phases=None):
    made = Job(request(), lambda job: None, rows)
    made.arrived, made.started, made.finished = 1000, 1000 + queue, 1000 + queue + compute
    made.batch, made.leads, made.phases = batch, leads, phases
    return made


def filled(count=3, phases=None):
    found = ModelStatistics()
    for n in range(count):
        found.succeed(job(phases=phases), 30_001_000)
        if n == 0:
            found.execute(job(phases=phases))
    found.fail("not_found")
    return found


def test_triton_statistics_count_requests_rows_calls_and_time():
    entry = as_triton("m", "1", filled().snapshot())
    assert (entry["inference_count"], entry["execution_count"]) == (6, 1)
    stats = entry["inference_stats"]
    assert stats["success"] == {"count": 3, "ns": 90_000_000}
    assert stats["queue"] == {"count": 3, "ns": 15_000_000}
    assert stats["compute_infer"] == {"count": 3, "ns": 60_000_000}
    assert stats["fail"]["count"] == 1
    assert entry["batch_stats"][0]["batch_size"] == 6
    assert entry["batch_stats"][0]["compute_infer"] == {"count": 1, "ns": 20_000_000}


def test_what_is_not_measured_is_left_out_of_triton_s_statistics():
    entry = as_triton("m", "1", filled().snapshot())
    for stats in (entry["inference_stats"], *entry["batch_stats"]):
        assert not {"compute_input", "compute_output"} & stats.keys()
    found = ModelStatistics()
    found.measures_phases = True  # nothing was run yet, but it will be measured
    assert as_triton("m", "1", found.snapshot())["inference_stats"]["compute_input"] == {"count": 0, "ns": 0}


def test_the_phases_of_computing_add_up_to_all_of_it():
    both = add(filled(3, (2_000_000, 500_000)).snapshot(), filled(1, (2_000_000, 500_000)).snapshot())
    entry = as_triton("m", "1", both)
    stats = entry["inference_stats"]
    assert stats["compute_input"] == {"count": 4, "ns": 8_000_000}
    assert stats["compute_infer"] == {"count": 4, "ns": 70_000_000}
    assert stats["compute_output"] == {"count": 4, "ns": 2_000_000}
    (batch,) = entry["batch_stats"]
    assert batch["compute_input"] == {"count": 2, "ns": 4_000_000}
    assert batch["compute_infer"] == {"count": 2, "ns": 35_000_000}
    assert batch["compute_output"] == {"count": 2, "ns": 1_000_000}


def test_metrics_under_triton_s_names_have_its_labels_units_and_reasons():
    found = filled(3, (2_000_000, 500_000))
    found.fail("internal")
    found.fail("deadline_exceeded")
    found.cancelled += 2
    lines = as_triton_metrics([("m", "1", {**found.snapshot(), "queued": 4}), ("n", "2", filled(1).snapshot())]).splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    of_m = {name.partition("{")[0]: int(value) for name, value in values.items() if 'model="m",version="1"}' in name}
    assert of_m == {
        "nv_inference_request_success": 3,
        "nv_inference_count": 6,
        "nv_inference_exec_count": 1,
        "nv_inference_request_duration_us": 90_000,
        "nv_inference_queue_duration_us": 15_000,
        "nv_inference_compute_input_duration_us": 6_000,
        "nv_inference_compute_infer_duration_us": 52_500,
        "nv_inference_compute_output_duration_us": 1_500,
        "nv_inference_pending_request_count": 4,
    }
    failures = [f'nv_inference_request_failure{{model="m",version="1",reason="{reason}"}}' for reason in
                ("REJECTED", "CANCELED", "BACKEND", "OTHER")]  # fmt: skip
    assert [values[name] for name in failures] == ["1", "2", "1", "1"]
    assert 'nv_inference_compute_infer_duration_us{model="n",version="2"}' in values
    assert not any("compute_input" in name and 'model="n"' in name for name in values)  # it was not measured
    assert "# TYPE nv_inference_pending_request_count gauge" in lines
    assert "# TYPE nv_inference_request_failure counter" in lines


def test_processes_are_added_up():
    one, other = filled(3), filled(2)
    one.fail("internal")
    one.last_ms, other.last_ms = 5, 7
    found = add({"models": {"m": one.snapshot()}}, {"models": {"m": other.snapshot(), "n": filled(1).snapshot()}})
    both = found["models"]["m"]
    assert (both["succeeded"], both["rows"], both["last_ms"]) == (5, 10, 7)
    assert both["reasons"] == {"not_found": 2, "internal": 1}
    assert both["batches"] == {"6": [2, 40_000_000]}
    assert sum(both["histograms"]["request_seconds"]["counts"]) == 5
    assert found["models"]["n"]["succeeded"] == 1


def test_of_a_process_that_is_gone_only_what_it_has_done_is_kept():
    gone = {
        "models": {"m": {**filled(3).snapshot(), "queued": 4}},
        "refused": {"not_found": 2},
        "connections": 5,
        "sequences": 6,
        "buffered": 7_000_000,
        "processes": 1,
    }
    lives = {**gone, "models": {}, "refused": {}, "connections": 1, "sequences": 2, "buffered": 3}
    found = add(add(lives, past_counts(gone)), past_counts(gone))
    assert found["models"]["m"]["succeeded"] == 6
    assert found["models"]["m"]["queued"] == 0
    assert found["refused"] == {"not_found": 4}
    assert [found[name] for name in ("connections", "sequences", "buffered", "processes")] == [1, 2, 3, 1]


def test_prometheus_text_is_well_formed_and_histograms_are_cumulative():
    text = as_prometheus([('a"b\\c\nd', "1", filled().snapshot())], {"connections": ("gauge", "Clients.", 4)}, {"cancelled": 2})
    assert text.endswith("\n")
    lines = text.splitlines()
    label = r'[a-z_]+="(?:[^"\\\n]|\\[\\"n])*"'
    shape = re.compile(rf"hurtle_[a-z_]+(?:\{{{label}(?:,{label})*\}})? [0-9.e+-]+|# (?:HELP|TYPE) hurtle_[a-z_]+ .+")
    assert [line for line in lines if not shape.fullmatch(line)] == []
    buckets = [line for line in lines if line.startswith("hurtle_request_seconds_bucket")]
    counts = [int(line.split()[-1]) for line in buckets]
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert 'le="+Inf"' in buckets[-1]
    assert [int(line.split()[-1]) for line in buckets if 'le="0.02"' in line or 'le="0.05"' in line] == [0, 3]
    assert "hurtle_connections 4" in lines
    assert 'hurtle_failures_total{reason="cancelled"} 2' in lines
    assert any(
        line.startswith("hurtle_failures_total") and 'reason="not_found"' in line and line.endswith(" 1") for line in lines
    )
