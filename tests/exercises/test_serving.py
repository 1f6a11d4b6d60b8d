import pytest

from helpers.exercises import check


def batch(limit=True, absolute=False, sliding=False, strict=False, late=0):
    def first_batch(arrivals, max_batch, max_wait):
        deadline, count = max_wait if absolute else arrivals[0] + max_wait, 0
        for at in arrivals:
            if at > deadline or (strict and at == deadline):
                break
            count += 1
            if sliding:
                deadline = at + max_wait
        return min(count, max_batch + late) if limit else count

    return first_batch


def schedule(from_sent=False, idle=True, wait_only=False):
    def from_schedule(interval, service):
        latencies, free = [], 0.0
        for number, seconds in enumerate(service):
            scheduled = number * interval
            start = max(free, scheduled) if idle else free
            free = start + seconds
            begin = start if from_sent else scheduled
            latencies.append((start if wait_only else free) - begin)
        return latencies

    return from_schedule


def retry(again=(429, 503, 504), last=3, base=0.5, factor=2, obey=True, add=False):
    def wait_before_retry(status, attempt, retry_after):
        if status not in again or attempt > last:
            return None
        wait = base * factor ** (attempt - 1)
        if retry_after is None or not obey:
            return wait
        return wait + retry_after if add else max(wait, retry_after)

    return wait_before_retry


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("first_batch", batch()),
        ("from_schedule", schedule()),
        ("wait_before_retry", retry()),
    ],
)
def test_a_right_answer_is_accepted(name, answer, capsys):
    check(f"serving.{name}", answer)
    assert capsys.readouterr().out.startswith("✓")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("first_batch", batch(limit=False)),
        ("first_batch", batch(absolute=True)),
        ("first_batch", batch(sliding=True)),
        ("first_batch", batch(strict=True)),
        ("first_batch", batch(late=1)),
        ("first_batch", lambda arrivals, max_batch, max_wait: min(len(arrivals), max_batch)),
        ("from_schedule", schedule(from_sent=True)),
        ("from_schedule", schedule(idle=False)),
        ("from_schedule", schedule(wait_only=True)),
        ("from_schedule", lambda interval, service: list(service)),
        ("from_schedule", lambda interval, service: [s + interval for s in service]),
        ("wait_before_retry", retry(again=(429, 500, 503, 504))),
        ("wait_before_retry", retry(again=(422, 429, 503, 504))),
        ("wait_before_retry", retry(again=(429,))),
        ("wait_before_retry", retry(last=99)),
        ("wait_before_retry", retry(last=4)),
        ("wait_before_retry", retry(factor=1)),
        ("wait_before_retry", retry(base=1)),
        ("wait_before_retry", retry(obey=False)),
        ("wait_before_retry", retry(add=True)),
        ("wait_before_retry", lambda status, attempt, retry_after: retry_after),
        ("first_batch", lambda arrivals, max_batch, max_wait: ...),
    ],
)
def test_a_wrong_answer_is_refused(name, answer, capsys):
    check(f"serving.{name}", answer)
    assert capsys.readouterr().out.startswith("✗")
