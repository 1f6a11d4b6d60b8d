"""Answers to the exercises of chapter 18, right and wrong."""


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


RIGHT = {
    "first_batch": [batch()],
    "from_schedule": [schedule()],
    "wait_before_retry": [retry()],
}

WRONG = {
    "first_batch": [
        batch(limit=False),
        batch(absolute=True),
        batch(sliding=True),
        batch(strict=True),
        batch(late=1),
        lambda arrivals, max_batch, max_wait: min(len(arrivals), max_batch),
    ],
    "from_schedule": [
        schedule(from_sent=True),
        schedule(idle=False),
        schedule(wait_only=True),
        lambda interval, service: list(service),
        lambda interval, service: [s + interval for s in service],
    ],
    "wait_before_retry": [
        retry(again=(429, 500, 503, 504)),
        retry(again=(422, 429, 503, 504)),
        retry(again=(429,)),
        retry(last=99),
        retry(last=4),
        retry(factor=1),
        retry(base=1),
        retry(obey=False),
        retry(add=True),
        lambda status, attempt, retry_after: retry_after,
    ],
}
