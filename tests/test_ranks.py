"""What ranks print, and who of them was first; the processes are those of test_distributed."""

import io
import time

import pytest
from IPython.core.formatters import DisplayFormatter

from helpers import ranks

# ---- who was first: an end is a cause, or follows from another's


def failure(rank, line, exitcode=1, **more):
    text = f"Traceback (most recent call last):\n  File x\n{line}\n" if line else ""
    return ranks.Failure(rank, exitcode, text, **more)


LOST = "RuntimeError: [/gloo/pair.cc:561] Connection closed by peer [127.0.0.1]:2486"
LATE = "RuntimeError: [/gloo/buffer.cc:78] Timed out waiting 3000ms for recv operation"


@pytest.mark.parametrize(
    "failures",
    [
        [failure(1, "ValueError: x", time=9), failure(0, LOST, time=1)],
        [failure(1, "ValueError: x", time=9), failure(0, LATE, time=1)],
        [failure(1, LATE, time=9), failure(0, LOST, time=1)],
        [failure(1, "", -9), failure(0, "ValueError: x")],
        [failure(1, LOST), failure(0, "", -15)],
        [failure(1, "ValueError: x", -15), failure(0, LOST)],  # ended on its way out
        [failure(1, "ValueError: x", time=1), failure(0, "ValueError: x", time=2)],
        [failure(1, "ValueError: x", named_first=True), failure(0, "ValueError: x")],
    ],
)
def test_causes_come_before_consequences(failures):
    assert ranks.RankError(failures[::-1], 2, None).rank == 1


def test_the_error_quotes_the_cause_and_names_the_rest():
    failures = [failure(1, "ValueError: x", time=1), failure(0, LOST, time=2), failure(2, "", -15)]
    lines = str(ranks.RankError(failures, 3, None)).splitlines()
    assert lines[0] == "rank 1 of 3 failed with exit code 1" and lines[3] == "ValueError: x"
    assert lines[4] == f"then rank 0 failed with exit code 1: {LOST}"
    assert ranks.Failure(0, -15, f"{HEAD}A: a").how() == "failed with an exception"
    assert lines[5] == "then rank 2 was killed by signal 15 (SIGTERM)"


REPORT = """
ChildFailedError:
Failures:
[1]:
  time      : 2026-11-22_10:00:00
  host      : here
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 10)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_10:00:00
  host      : here
  rank      : 1 (local_rank: 1)
  exitcode  : 3 (pid: 11)
"""


def test_torchrun_s_report_is_read():
    output = ranks.Output({0: "", 1: "one\ntwo\n"}, REPORT, 1.0)
    first, second = sorted(ranks.reported_failures(output), key=ranks.Failure.order)
    assert first == ranks.Failure(1, 3, "one\ntwo", 0, True)
    assert second == ranks.Failure(0, -15, "", 0, False)


WIDE = "=" * 60
REPORT_WITH_TRACEBACK = f"""E1124 10:00:00 api.py:1002] failed
ChildFailedError:
{WIDE}
train.py FAILED
{"-" * 60}
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  error_file: /tmp/torchelastic_x/none_y/attempt_0/1/error.json
  traceback : Traceback (most recent call last):
    File "/v/site-packages/torch/errors.py", line 384, in wrapper
      result = f(*args, **kwargs)
               ^^^^^^^^^^^^^^^^^^
    File "/home/me/train.py", line 16, in main
      dist.all_reduce(torch.ones(1))
  RuntimeError: [/w/gloo/pair.cc:561] Connection closed by peer
  
{WIDE}
"""


def test_torchrun_s_report_is_shortened():
    output = ranks.Output({0: "", 1: ""}, REPORT_WITH_TRACEBACK, 1.0)
    assert ranks.RankError([failure(1, LOST)], 2, output).report.splitlines() == [
        WIDE,
        "train.py FAILED",
        "-" * 60,
        "Root Cause (first observed failure):",
        "[0]:",
        "rank      : 1 (local_rank: 1)",
        "error_file: …/1/error.json",
        "traceback : Traceback (most recent call last):",
        '  File "train.py", line 16, in main',
        "    dist.all_reduce(torch.ones(1))",
        "RuntimeError: [pair.cc:561] Connection closed by peer",
        WIDE,
    ]
    assert ranks.short_report("torchrun: error\n") == ""
    assert ranks.RankError([failure(1, LOST)], 2, None).report == ""


def test_a_cell_that_ends_with_torchrun_shows_the_lines_only_once():
    output = ranks.Output({0: "one\n"}, "", 1.0)
    assert DisplayFormatter().format(output) == ({}, {})


HEAD = "Traceback (most recent call last):\n  File x\n"
CHAIN = "\nDuring handling of the above exception, another exception occurred:\n\n"
LOG = "[W1122 10:37:07.1 Module.cpp:1] Warning: destroy_process_group"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (f"hello\n{HEAD}A: a\n", f"{HEAD}A: a"),
        (f"{HEAD}A: a\nhello\n{HEAD}B: b\n", f"{HEAD}B: b"),
        (f"{HEAD}A: a\n{CHAIN}{HEAD}B: b\n", f"{HEAD}A: a\n{CHAIN}{HEAD}B: b"),
        (f"{HEAD}A: a\n{LOG}\n", f"{HEAD}A: a"),
        ("".join(f"{n}\n" for n in range(9)), "4\n5\n6\n7\n8"),
        ("", ""),
    ],
)
def test_the_last_traceback_with_its_causes(text, want):
    assert ranks.last_traceback(text) == want


def test_lines_find_their_rank(capsys):
    lines = ranks.Lines(echo=True)
    text = f"[rank 1] [rank1]: odd\nreport\n[rank 0] 一\n[rank 0] {HEAD.splitlines()[0]}\n"
    lines.follow(io.BytesIO((text + "[rank 0] KeyError: 1\n[rank 0] on\n").encode()), None)
    assert lines.wait(time.monotonic() + 10)
    output = lines.output(2, 1.0)
    assert output.by_rank == {0: f"一\n{HEAD.splitlines()[0]}\nKeyError: 1\non\n", 1: "odd\n"}
    assert output.launcher == "report\n"
    assert capsys.readouterr().out == "[rank 1] odd\n[rank 0] 一\n[rank 0] on\n"
    lines.print_held()  # it went on after its traceback
    assert capsys.readouterr().out.endswith("[rank 0] KeyError: 1\n")


def test_a_rank_that_never_stops_printing_is_not_waited_for():
    class Endless:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def __iter__(self):
            while not stop:
                yield b"more\n"
                time.sleep(1e-4)

    stop = []
    lines = ranks.Lines(echo=False)
    lines.follow(Endless(), 0)
    start = time.monotonic()
    assert not lines.wait(start + 0.2) and time.monotonic() - start < 5
    stop.append(True)
    assert lines.wait(time.monotonic() + 10)
